package authz

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"ztun.dev/ztun/internal/workload"
)

// What Changed and Denied say of a connection that was allowed is what Evaluate says, for random changes of random policies.
func TestChangedPoliciesDenyWhatEvaluateDenies(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(i int) *workload.Policy {
		p := policy([]workload.Action{workload.Deny, workload.Deny, workload.Deny, workload.Allow}[rng.IntN(4)],
			one(match{SourceIPs: cidr(fmt.Sprintf("10.0.0.%d/30", rng.IntN(16)*4))}))
		p.Name, p.DryRun = fmt.Sprint("p", i), rng.IntN(6) == 0
		return p
	}
	w := &workload.Workload{UID: "w", Namespace: "web"}
	state := func(list []*workload.Policy) *workload.Snapshot {
		return workload.NewSnapshot(workload.State{Workloads: []*workload.Workload{w}, Policies: list})
	}
	partial, denied := 0, 0
	for i := range 3000 {
		var old []*workload.Policy
		for j := range rng.IntN(5) {
			old = append(old, random(j))
		}
		changed := slices.DeleteFunc(slices.Clone(old), func(*workload.Policy) bool { return rng.IntN(4) == 0 })
		for j := range rng.IntN(3) {
			changed = append(changed, random(10+j))
		}
		before, after := state(old), state(changed)
		r := &Request{Source: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(64))}), 1), Destination: netip.MustParseAddrPort("10.1.0.1:80"), Workload: w}
		if !Evaluate(before, r).Allowed {
			continue
		}
		list, all := Changed(slices.Collect(Applying(before, w)), slices.Collect(Applying(after, w)))
		if all {
			continue
		}
		partial++
		want := Evaluate(after, r)
		got, is := Denied(list, r)
		if is != !want.Allowed || is && got.Reason != want.Reason {
			t.Fatalf("change %d, from %v: denied %v by %v, want %v", i, r.Source, is, got, want)
		}
		if is {
			denied++
		}
	}
	if partial < 500 || denied < 50 {
		t.Errorf("%d changes of DENY policies alone, of which %d deny: the test says little", partial, denied)
	}
}

// Whatever else changes has everything evaluated.
func TestChangesThatNeedMore(t *testing.T) {
	a, d := allow(one(ports(80))), deny(one(ports(80)))
	type list = []*workload.Policy
	for name, tt := range map[string]struct {
		before, after list
		all           bool
	}{
		"nothing":                   {list{a, d}, list{d, a}, false},
		"a DENY has gone":           {list{a, d}, list{a}, false},
		"a trial of ALLOW has come": {list{a}, list{a, dry(allow())}, false},
		"an ALLOW has gone":         {list{a, d}, list{d}, true},
		"an ALLOW has come":         {list{d}, list{d, a}, true},
		"one is missing":            {list{d}, list{d, nil}, true},
		"one was missing":           {list{nil, d}, list{d}, true},
	} {
		if deny, all := Changed(tt.before, tt.after); all != tt.all || len(deny) > 0 {
			t.Errorf("%s: %v, %v; want none, %v", name, deny, all, tt.all)
		}
	}
}
