package workload

import (
	"net/netip"
	"testing"
)

func TestLookups(t *testing.T) {
	a := netip.MustParseAddr
	old := &Workload{UID: "c//Static/a", Namespace: "x", Addresses: []netip.Addr{a("10.0.0.1")}}
	pod := &Workload{
		UID: "b//Pod/x/p", Name: "p", Namespace: "x", ServiceAccount: "sa", Addresses: []netip.Addr{a("10.0.0.1")}, Node: "n1",
		Services: map[ServiceKey]PortMap{{"x", "s.x"}: {80: 8080}, {"y", "s.y"}: nil},
	}
	sick := &Workload{UID: "s", Namespace: "x", Status: Unhealthy, Services: map[ServiceKey]PortMap{{"x", "s.x"}: nil, {"y", "s.y"}: nil}}
	host := &Workload{UID: "h", Namespace: "x", NetworkMode: NetworkHost, Addresses: []netip.Addr{a("10.0.0.9")}}
	vip := NetworkAddr{"", a("10.96.0.1")}
	x := &Service{Namespace: "x", Hostname: "s.x", VIPs: []NetworkAddr{vip}}
	y := &Service{Namespace: "y", Hostname: "s.y", VIPs: []NetworkAddr{vip}, Canonical: true, LoadBalancer: LoadBalancer{Health: AllowAll}}
	z := &Service{Namespace: "a", Hostname: "s.z", VIPs: []NetworkAddr{vip}}
	hidden := &Service{Namespace: "x", Hostname: "h.x", VIPs: []NetworkAddr{{"", a("10.96.0.2")}}, Visibility: VisibleNamespace}
	wide := &Service{Namespace: "x", Hostname: "wide", CIDRVIPs: []NetworkPrefix{{"", netip.MustParsePrefix("10.97.0.0/16")}}}
	narrow := &Service{Namespace: "y", Hostname: "narrow", CIDRVIPs: []NetworkPrefix{{"", netip.MustParsePrefix("10.97.1.0/24")}}}
	s := NewSnapshot(State{Workloads: []*Workload{pod, old, sick, host}, Services: []*Service{z, y, x, hidden, wide, narrow}})

	if got := s.WorkloadAt("", a("10.0.0.1")); got != pod {
		t.Errorf("10.0.0.1 is %v, want the pod", got)
	}
	if got := s.WorkloadAt("", a("10.0.0.9")); got != nil {
		t.Errorf("a host-network pod is found by address: %v", got.UID)
	}
	services := []struct {
		ip, ns string
		want   *Service
	}{
		{"10.96.0.1", "x", x},
		{"10.96.0.1", "q", y}, // canonical
		{"10.96.0.2", "x", hidden},
		{"10.96.0.2", "q", nil},
		{"10.97.1.1", "q", narrow},
		{"10.97.1.1", "x", wide},
		{"10.97.2.1", "q", wide},
		{"10.99.0.1", "q", nil},
	}
	for _, tt := range services {
		if got := s.ServiceAt("", a(tt.ip), tt.ns); got != tt.want {
			t.Errorf("ServiceAt(%s) for namespace %s = %+v, want %+v", tt.ip, tt.ns, got, tt.want)
		}
	}
	if got := s.Endpoints(x.Key()); len(got) != 1 || got[0].Workload != pod || got[0].Ports[80] != 8080 {
		t.Errorf("endpoints of s.x: %v, want the pod with its port", got)
	}
	if got := s.Endpoints(y.Key()); len(got) != 2 {
		t.Errorf("endpoints of s.y, which takes unhealthy ones: %d, want 2", len(got))
	}
	if got := s.Local(&Client{Name: "p", Namespace: "x", ServiceAccount: "sa", Node: "n1"}); got != pod {
		t.Errorf("Local = %v, want the pod", got)
	}
	if got := s.Local(&Client{Name: "p", Namespace: "x", ServiceAccount: "sa", Node: "n2"}); got != nil {
		t.Error("Local finds a pod of another node")
	}
	var none *Snapshot
	if none.WorkloadAt("", a("10.0.0.1")) != nil || none.Endpoints(x.Key()) != nil {
		t.Error("a nil snapshot is not empty")
	}
}

func TestParseIdentity(t *testing.T) {
	id, err := ParseIdentity("spiffe://td/ns/web/sa/fe")
	if err != nil || id != (Identity{"td", "web", "fe"}) || id.String() != "spiffe://td/ns/web/sa/fe" || id.Principal() != "td/ns/web/sa/fe" {
		t.Errorf("got %+v, %v", id, err)
	}
	for _, bad := range []string{"", "td/ns/web/sa/fe", "spiffe://td/ns/web/sa/", "spiffe://td/ns/web/sa/fe/x", "spiffe://td/n/web/sa/fe", "SPIFFE://td/ns/a/sa/b"} {
		if id, err := ParseIdentity(bad); err == nil {
			t.Errorf("ParseIdentity(%q) = %v, want an error", bad, id)
		}
	}
}
