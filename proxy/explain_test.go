package proxy_test

import (
	"slices"
	"strings"
	"testing"

	"ztun.dev/ztun/internal/explain"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
)

// What explain says is what the slow model allows, on the random states and flows of TestFlowsGoWhereTheModelSays, where the proxy does
// it.
func TestExplainSaysWhatTheModelSays(t *testing.T) {
	for seed := range uint64(10_000) {
		c := proxy.NewRandomCase(seed)
		if slices.Contains(c.Query.Source.Addresses, c.Query.Target.Addr()) {
			continue // it does not leave the pod
		}
		c.Query.Source.Protocol = workload.ProtocolHBONE // what others send is not captured
		m := explain.Mesh{State: c.Snapshot(), Network: c.Query.Network}
		r := m.Outbound(c.Query.Source, c.Query.Target)
		if got, want := outcome(&r), c.Outcomes(); !slices.Contains(want, got) {
			t.Fatalf("seed %d: explain says %q of the flow to %v, want one of %q:\n%s", seed, got, c.Query.Target, want, r.Text())
		}
		// Of several waypoints each is one that the model allows.
		for _, b := range r.Waypoints {
			if b.Weight == 0 || b.Error != "" {
				continue
			}
			if !slices.ContainsFunc(c.Outcomes(), func(o string) bool { return strings.HasPrefix(o+" ", b.Route+" "+b.NextHop+" ") }) {
				t.Fatalf("seed %d: waypoint %+v, want one of %q", seed, b, c.Outcomes())
			}
		}
	}
}

func outcome(r *explain.Report) string {
	switch {
	case r.Error != "":
		return "refused"
	case r.Authority != "":
		return r.Route + " " + r.NextHop + " to " + r.Authority
	case r.NextHop == "":
		return r.Route
	}
	return r.Route + " " + r.NextHop
}
