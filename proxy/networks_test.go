package proxy

import (
	"net/netip"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/workload"
)

// Services that share addresses, blocks of addresses, networks and their gateways: the rest of the scenarios of the decision.
func TestClassifyWhatIsShared(t *testing.T) {
	const direct = "HBONE 10.244.1.7:15008 auth 10.244.1.7:8080"
	// in is another service with an endpoint of its own, at 10.9.0.1.
	in := func(m *mesh, namespace, name string, change func(v *workload.Service)) {
		v := &workload.Service{Name: name, Namespace: namespace, Hostname: name, Ports: workload.PortMap{80: 1000}}
		change(v)
		e := pod0(name+"-0", "10.9.0.1")
		e.Services[v.Key()] = nil
		m.more.Services = append(m.more.Services, v)
		m.more.Workloads = append(m.more.Workloads, e)
	}
	const other = "HBONE 10.9.0.1:15008 auth 10.9.0.1:1000"
	same := func(v *workload.Service) { v.VIPs = []workload.NetworkAddr{vip("10.96.0.10")} }
	cidr := func(prefix string) func(v *workload.Service) {
		return func(v *workload.Service) {
			v.CIDRVIPs = []workload.NetworkPrefix{{Prefix: netip.MustParsePrefix(prefix)}}
		}
	}
	// remote moves the server to net2; its gateway is at 10.22.1.1.
	remote := func(m *mesh, g *workload.GatewayAddress) {
		m.server.Network, m.server.NetworkGateway = "net2", g
		gw := pod0("gw", "10.22.1.5")
		gw.Services[workload.ServiceKey{Namespace: "default", Hostname: "gw"}] = nil
		m.more.Workloads = append(m.more.Workloads, gw, pod0("gw-by-ip", "10.22.1.1"))
		m.more.Services = append(m.more.Services, &workload.Service{Name: "gw", Namespace: "default", Hostname: "gw", Ports: workload.PortMap{15009: 15008}})
	}
	byAddr := &workload.GatewayAddress{Address: vip("10.22.1.1"), Port: 15009}
	byHost := &workload.GatewayAddress{Hostname: workload.ServiceKey{Namespace: "default", Hostname: "gw"}, Port: 15009}
	const beyond = " auth web.default.svc.cluster.local:80"

	tests := map[string]struct {
		change func(m *mesh)
		target string
		want   string
	}{
		"DP-13": {func(m *mesh) {
			m.gateway.Ports = workload.PortMap{80: 0}
			m.wp.AppTunnel = &workload.AppTunnel{PROXY: true, Port: 15088}
			m.server.Waypoint = &workload.GatewayAddress{Hostname: m.gateway.Key(), Port: 80}
		}, "10.244.1.7:8080", "HBONE 10.244.2.10:80 auth 10.244.1.7:8080"},
		"DP-31 the client's namespace": {func(m *mesh) { in(m, "other", "x", same) }, "10.96.0.10:80", direct},
		"DP-31 that of another client": {func(m *mesh) { in(m, "other", "x", same); m.client.Namespace = "other" }, "10.96.0.10:80", other},
		"DP-32": {func(m *mesh) {
			m.web.Namespace = "y"
			m.server.Services[m.web.Key()] = nil
			in(m, "x", "x", func(v *workload.Service) { same(v); v.Canonical = true })
		}, "10.96.0.10:80", other},
		"DP-34": {func(m *mesh) {
			m.web.Namespace, m.web.Visibility = "other", workload.VisibleNamespace
			in(m, "x", "x", cidr("10.96.0.0/16"))
		}, "10.96.0.10:80", other},
		"DP-35": {func(m *mesh) {
			m.web.VIPs = nil
			in(m, "default", "x", cidr("10.0.0.0/8"))
			in(m, "other", "y", cidr("10.96.0.0/16"))
		}, "10.96.0.10:80", other},
		"DP-36": {func(m *mesh) { in(m, "default", "x", cidr("10.96.0.0/16")) }, "10.96.0.10:80", direct},
		"DP-37": {func(m *mesh) {
			m.web.VIPs = nil
			in(m, "default", "x", cidr("10.96.0.0/16"))
			m.more.Services[0].CIDRVIPs[0].Network = "net2"
		}, "10.96.0.10:80", "TCP 10.96.0.10:80"},
		"DP-43 by the address directly": {func(m *mesh) { m.server.NetworkMode, m.server.Addresses = workload.NetworkHost, addrs("192.168.1.2") }, "192.168.1.2:80", "TCP 192.168.1.2:80"},
		"DP-44": {func(m *mesh) {
			vm := pod0("vm", "10.244.1.7")
			vm.UID = "Kubernetes/networking.istio.io/WorkloadEntry/default/vm"
			m.server.Protocol = workload.ProtocolTCP
			m.more.Workloads = append(m.more.Workloads, vm)
		}, "10.244.1.7:8080", "TCP 10.244.1.7:8080"},
		"DP-56": {
			func(m *mesh) { remote(m, nil) }, "10.96.0.10:80",
			"refused: no valid routing destination for workload: Workload{server with uid Kubernetes//Pod/default/server (HBONE)}",
		},
		"DP-57":                    {func(m *mesh) { remote(m, byAddr) }, "10.96.0.10:80", "double HBONE 10.22.1.1:15009" + beyond},
		"DP-57 without an address": {func(m *mesh) { remote(m, byAddr); m.server.Addresses = nil }, "10.96.0.10:80", "double HBONE 10.22.1.1:15009" + beyond},
		"DP-58":                    {func(m *mesh) { remote(m, byHost) }, "10.96.0.10:80", "double HBONE 10.22.1.5:15008" + beyond},
		"DP-59": {func(m *mesh) {
			remote(m, byAddr)
			m.wp.Network, m.wp.NetworkGateway = "net2", byHost
			m.web.Waypoint = byName("wp.default.svc.cluster.local")
		}, "10.96.0.10:80", "double HBONE 10.22.1.5:15008" + beyond},
		"DP-60 the one near by": {func(m *mesh) { failover(m, remote, byAddr) }, "10.96.0.10:80", "HBONE 10.244.1.8:15008 auth 10.244.1.8:8080"},
		"DP-60 unless it is unhealthy": {func(m *mesh) {
			failover(m, remote, byAddr)
			m.more.Workloads[len(m.more.Workloads)-1].Status = workload.Unhealthy
		}, "10.96.0.10:80", "double HBONE 10.22.1.1:15009" + beyond},
		"DP-63": {func(m *mesh) { remote(m, &workload.GatewayAddress{Hostname: byHost.Hostname, Port: 15010}) }, "10.96.0.10:80", "refused: unknown network gateway: network gateway default/gw not found"},
		"a pod on another network, by its address": {func(m *mesh) { remote(m, byAddr); m.server.Network = ""; m.client.Network = "net3" }, "10.244.1.7:80", "refused: no service for target address: 10.244.1.7:80"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMesh()
			tt.change(m)
			d := Classify(m.snapshot(), &Query{Source: m.client, From: m.client.Addresses[0], Target: netip.MustParseAddrPort(tt.target), Rand: 7})
			got := say(d)
			if d.Route == DoubleHBONE {
				got = "double HBONE " + d.NextHop.String() + " auth " + d.Authority()
			}
			if got != tt.want {
				t.Errorf("%s is %q, want %q", tt.target, got, tt.want)
			}
		})
	}
}

// failover prefers the own network, where there is an endpoint as well.
func failover(m *mesh, remote func(*mesh, *workload.GatewayAddress), g *workload.GatewayAddress) {
	remote(m, g)
	near := pod0("near", "10.244.1.8")
	near.Services[webKey] = nil
	m.more.Workloads = append(m.more.Workloads, near)
	m.web.LoadBalancer = workload.LoadBalancer{Mode: workload.LBFailover, Preferences: []workload.Scope{workload.ScopeNetwork}}
}

func TestAcceptedIdentitiesBeyondAGateway(t *testing.T) {
	m := newMesh()
	m.server.Network, m.server.NetworkGateway = "net2", &workload.GatewayAddress{Address: vip("10.22.1.1"), Port: 15009}
	gw := pod0("gw", "10.22.1.1")
	m.more.Workloads = []*workload.Workload{gw}
	far := workload.Identity{TrustDomain: "cluster.local", Namespace: "default", ServiceAccount: "server"}
	m.web.SubjectAltNames = []workload.Identity{far}
	d := Classify(m.snapshot(), &Query{Source: m.client, From: m.client.Addresses[0], Target: netip.MustParseAddrPort("10.96.0.10:80")})
	if diff := cmp.Diff([]workload.Identity{gw.Identity()}, d.Accept()); diff != "" {
		t.Errorf("of the gateway (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]workload.Identity{far}, d.AcceptBeyond()); diff != "" {
		t.Errorf("beyond it (-want +got):\n%s", diff)
	}
}

// By weight, each flow anew.
func TestWeightedWaypoints(t *testing.T) {
	t.Run("DP-28", func(t *testing.T) {
		m := newMesh()
		m.more.Workloads = []*workload.Workload{pod0("b", "10.244.2.11")}
		m.web.WeightedWaypoints = []workload.WeightedWaypoint{{Destination: *byIP("10.244.2.10"), Weight: 75}, {Destination: *byIP("10.244.2.11"), Weight: 25}}
		s, a := m.snapshot(), 0
		for i := range 4000 {
			q := Query{Source: m.client, From: m.client.Addresses[0], Target: netip.MustParseAddrPort("10.96.0.10:80"), Rand: mix(uint64(i))}
			if d := Classify(s, &q); d.NextHop.Addr() == m.wp.Addresses[0] {
				a++
			}
		}
		if a < 2850 || a > 3150 {
			t.Errorf("%d of 4000 flows through the waypoint with three quarters of the weight", a)
		}
	})
	t.Run("DP-50 nothing matches", func(t *testing.T) {
		m := newMesh()
		m.web.LoadBalancer = workload.LoadBalancer{Mode: workload.LBFailover, Preferences: []workload.Scope{workload.ScopeRegion}}
		m.client.Locality.Region = "elsewhere"
		second := pod0("second", "10.244.1.8")
		second.Services[webKey] = nil
		m.more.Workloads = []*workload.Workload{second}
		seen := make(map[netip.Addr]bool)
		for i := range 100 {
			q := Query{Source: m.client, From: m.client.Addresses[0], Target: netip.MustParseAddrPort("10.96.0.10:80"), Rand: mix(uint64(i))}
			seen[Classify(m.snapshot(), &q).NextHop.Addr()] = true
		}
		if len(seen) != 2 {
			t.Errorf("flows went to %v, want both endpoints", seen)
		}
	})
}

// A waypoint that is one of several and cannot be reached is no reason to refuse a flow that another can take.
func TestAnotherWaypointIsTried(t *testing.T) {
	m := newMesh()
	m.more.Workloads = []*workload.Workload{pod0("b", "10.244.2.11")}
	m.web.WeightedWaypoints = []workload.WeightedWaypoint{{Destination: *byIP("10.244.2.10"), Weight: 1}, {Destination: *byIP("10.244.2.11"), Weight: 1}}
	b := newBench(t, m)
	at := uint64(0)
	b.cfg.Rand = func() uint64 { at++; return at }
	b.tunnel.fail = map[netip.AddrPort]error{netip.MustParseAddrPort("10.244.2.10:15008"): &hbone.OpenError{Err: syscall.ECONNREFUSED}}
	accepted := 0
	for range 20 {
		req := request("10.96.0.10:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		if req.answer == "accepted" {
			accepted++
			req.app.Reset()
			b.Settle()
		}
	}
	if accepted < 13 {
		t.Errorf("%d of 20 flows came through, want those of the other waypoint and half of the rest", accepted)
	}
	for _, x := range b.tunnel.targets {
		if x.Authority != "10.96.0.10:80" {
			t.Errorf("a flow went past the waypoints: %+v", x)
		}
	}
}
