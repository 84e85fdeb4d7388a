package authz

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"ztun.dev/ztun/internal/workload"
)

// On states and connections at random Evaluate decides what the slow model does, and what Explain says of each policy adds up to it.
func TestDecisionsAreThoseOfTheModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 1))
	some := func(n int) bool { return rng.IntN(n) == 0 }
	text := func() []str {
		if !some(3) {
			return nil
		}
		return []str{{Kind: workload.MatchKind(rng.IntN(4)), Value: []string{"web", "td/ns/web/sa/fe", "api", ""}[rng.IntN(4)]}}
	}
	randomMatch := func() match {
		m := match{Namespaces: text(), Principals: text(), NotPrincipals: text()}
		if some(4) {
			m.NotNamespaces = text()
		}
		if some(5) {
			m.ServiceAccounts = sa("api", "be")
		}
		if some(6) {
			m.NotDestinationPorts = []uint16{8080}
		}
		if some(6) {
			m.NotSourceIPs, m.DestinationIPs = cidr("10.1.0.0/16"), cidr("10.0.0.8/30")
		}
		if some(3) {
			m.DestinationPorts = []uint16{uint16(8080 + rng.IntN(2))}
		}
		if some(4) {
			m.SourceIPs = cidr(fmt.Sprintf("10.%d.0.0/16", rng.IntN(3)))
		}
		if some(4) {
			m.NotServiceAccounts = sa("web", "fe")
		}
		if some(5) {
			m.NotDestinationIPs = cidr("10.0.0.9/32")
		}
		return m
	}
	peers := []workload.Identity{{}, {TrustDomain: "td", Namespace: "web", ServiceAccount: "fe"}, {TrustDomain: "td", Namespace: "api", ServiceAccount: "be"}}
	decided := make(map[bool]int)
	for range 10_000 {
		var st workload.State
		w := &workload.Workload{UID: "w", Namespace: "web", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.9")}}
		for i := range rng.IntN(5) {
			p := &workload.Policy{Name: fmt.Sprint(i), Namespace: []string{"web", "root"}[rng.IntN(2)], Scope: workload.PolicyScope(rng.IntN(3)), Action: workload.Action(rng.IntN(2)), DryRun: some(5)}
			for range rng.IntN(3) {
				var g group
				for range rng.IntN(3) {
					var r rule
					for range rng.IntN(3) {
						r = append(r, randomMatch())
					}
					g = append(g, r)
				}
				p.Groups = append(p.Groups, g)
			}
			st.Policies = append(st.Policies, p)
			if some(2) {
				w.AuthorizationPolicies = append(w.AuthorizationPolicies, p.Key())
			}
		}
		if some(8) {
			w.AuthorizationPolicies = append(w.AuthorizationPolicies, "web/late")
		}
		s := workload.NewSnapshot(workload.State{Policies: slices.Clone(st.Policies)})
		req := Request{
			Source: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(rng.IntN(3)), 0, 1}), 1), Peer: peers[rng.IntN(3)],
			Destination: netip.MustParseAddrPort("10.0.0.9:8080"), Workload: w,
		}
		want := Evaluate(s, &req)
		m := model{st, &req}
		if got := m.allowed(); got != want.Allowed {
			t.Fatalf("Evaluate says %v, the model %v: of %+v under %v", want, got, req, st.Policies)
		}
		decided[want.Allowed]++
		v, list := Explain(s, &req)
		if v.Allowed != want.Allowed || v.Reason != want.Reason || v.Policy != want.Policy {
			t.Fatalf("Explain says %v, Evaluate %v", v, want)
		}
		var deny, allow, anyAllow, missing bool
		for _, c := range list {
			if c.Policy != nil && c.Matched != m.matches(c.Policy) {
				t.Fatalf("%s matches: %v; the model says %v", c.Key, c.Matched, !c.Matched)
			}
			if c.Matched != (c.Failed == "" && c.Policy != nil) || c.Matched != (c.Group > 0) {
				t.Fatalf("%s matched %v, by group %d, failed %q", c.Key, c.Matched, c.Group, c.Failed)
			}
			switch {
			case c.Policy == nil:
				missing = true
			case c.Policy.DryRun:
			case c.Policy.Action == workload.Deny:
				deny = deny || c.Matched
			default:
				anyAllow, allow = true, allow || c.Matched
			}
		}
		if got := !deny && !missing && (!anyAllow || allow); got != want.Allowed {
			t.Fatalf("the parts say %v, Evaluate %v: %+v", got, want, list)
		}
	}
	if decided[true] < 1000 || decided[false] < 1000 {
		t.Errorf("decisions: %v, want many of both", decided)
	}
}
