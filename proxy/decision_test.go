package proxy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/workload"
)

// A mesh is the state that the scenarios of the decision are told in, and change: the pods client, server and wp, and the
// service web with the endpoint server.
type mesh struct {
	client, server, wp *workload.Workload
	web, gateway       *workload.Service
	more               workload.State
}

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func pod0(name string, ips ...string) *workload.Workload {
	return &workload.Workload{
		UID: "Kubernetes//Pod/default/" + name, Name: name, Namespace: "default", ServiceAccount: name, TrustDomain: "cluster.local",
		ClusterID: "Kubernetes", Node: "n1", Addresses: addrs(ips...), Protocol: workload.ProtocolHBONE, Capacity: 1,
		Services: map[workload.ServiceKey]workload.PortMap{},
	}
}

var webKey = workload.ServiceKey{Namespace: "default", Hostname: "web.default.svc.cluster.local"}

func vip(ip string) workload.NetworkAddr { return workload.NetworkAddr{Addr: netip.MustParseAddr(ip)} }

func newMesh() *mesh {
	m := &mesh{client: pod0("client", "10.244.0.5"), server: pod0("server", "10.244.1.7"), wp: pod0("wp", "10.244.2.10")}
	m.server.Services[webKey] = nil
	m.web = &workload.Service{Name: "web", Namespace: "default", Hostname: webKey.Hostname, VIPs: []workload.NetworkAddr{vip("10.96.0.10")}, Ports: workload.PortMap{80: 8080}}
	m.gateway = &workload.Service{Name: "wp", Namespace: "default", Hostname: "wp.default.svc.cluster.local", Ports: workload.PortMap{15008: 15008}}
	m.wp.Services[m.gateway.Key()] = nil
	return m
}

func (m *mesh) snapshot() *workload.Snapshot {
	return workload.NewSnapshot(workload.State{
		Workloads: append([]*workload.Workload{m.client, m.server, m.wp}, m.more.Workloads...),
		Services:  append([]*workload.Service{m.web, m.gateway}, m.more.Services...),
	})
}

func byIP(ip string) *workload.GatewayAddress {
	return &workload.GatewayAddress{Address: vip(ip), Port: 15008}
}

func byName(host string) *workload.GatewayAddress {
	return &workload.GatewayAddress{Hostname: workload.ServiceKey{Namespace: "default", Hostname: host}, Port: 15008}
}

// say is a Decision as one line.
func say(d Decision) string {
	switch d.Route {
	case Refuse:
		return "refused: " + d.Err.Error()
	case Passthrough:
		return fmt.Sprint("TCP ", d.NextHop)
	}
	return fmt.Sprint("HBONE ", d.NextHop, " auth ", d.Target)
}

func TestClassify(t *testing.T) {
	const (
		direct  = "HBONE 10.244.1.7:15008 auth 10.244.1.7:8080"
		through = "HBONE 10.244.2.10:15008 auth "
	)
	tests := []struct {
		id     int
		change func(m *mesh)
		target string
		want   string
	}{
		{1, nil, "1.2.3.4:80", "TCP 1.2.3.4:80"},
		{2, func(m *mesh) { m.server.Node = "n2" }, "10.244.1.7:8080", direct},
		{4, func(m *mesh) { m.server.Protocol = workload.ProtocolTCP }, "10.244.1.7:8080", "TCP 10.244.1.7:8080"},
		{5, nil, "10.96.0.10:80", direct},
		{6, nil, "10.96.0.10:81", "refused: no healthy upstream: 10.96.0.10:81"},
		{7, func(m *mesh) { m.server.Services = nil }, "10.96.0.10:80", "refused: no healthy upstream: 10.96.0.10:80"},
		{8, func(m *mesh) { m.web.LoadBalancer.Mode = workload.LBPassthrough }, "10.96.0.10:80", "TCP 10.96.0.10:80"},
		{9, func(m *mesh) { m.web.LoadBalancer.Mode = workload.LBPassthrough; m.web.Waypoint = byIP("10.244.2.10") }, "10.96.0.10:80", through + "10.96.0.10:80"},
		{10, func(m *mesh) {
			m.web.Ports[80] = 0
			m.server.Services[webKey] = workload.PortMap{80: 1234}
			b := pod0("b", "10.244.1.8")
			b.Services[webKey] = workload.PortMap{8080: 9999}
			m.more.Workloads = append(m.more.Workloads, b)
		}, "10.96.0.10:80", "HBONE 10.244.1.7:15008 auth 10.244.1.7:1234"},
		{11, func(m *mesh) { m.server.Services[webKey] = workload.PortMap{80: 9090} }, "10.96.0.10:80", "HBONE 10.244.1.7:15008 auth 10.244.1.7:9090"},
		{12, nil, "10.96.0.10:80", direct},
		{14, func(m *mesh) { m.server.Waypoint = byIP("10.244.2.10") }, "10.244.1.7:8080", through + "10.244.1.7:8080"},
		{15, func(m *mesh) { m.server.Waypoint = byIP("10.244.2.10") }, "10.96.0.10:80", direct},
		{16, func(m *mesh) { m.web.Waypoint = byIP("10.244.2.10") }, "10.96.0.10:80", through + "10.96.0.10:80"},
		{17, func(m *mesh) { m.web.Waypoint = byIP("10.244.2.10") }, "10.244.1.7:8080", direct},
		{18, func(m *mesh) {
			m.client.Waypoint = byIP("10.244.2.10")
			m.server.Protocol = workload.ProtocolTCP
		}, "10.244.1.7:8080", "TCP 10.244.1.7:8080"},
		{19, func(m *mesh) {
			m.server.Addresses = addrs("10.244.1.7", "fd00::7")
			m.server.Waypoint = byIP("10.244.2.10")
		}, "[fd00::7]:80", through + "[fd00::7]:80"},
		{20, func(m *mesh) { m.server.Waypoint = byName("wp.default.svc.cluster.local") }, "10.244.1.7:80", through + "10.244.1.7:80"},
		{21, func(m *mesh) { m.wp.Hostname = "wp.example"; m.server.Waypoint = byName("wp.example") }, "10.244.1.7:80", through + "10.244.1.7:80"},
		{22, func(m *mesh) { m.server.Waypoint = byName("nope") }, "10.244.1.7:80", "refused: unknown waypoint: waypoint default/nope not found"},
		{23, func(m *mesh) {
			m.gateway.Ports = nil
			m.wp.AppTunnel = &workload.AppTunnel{PROXY: true, Port: 15088}
			m.server.Waypoint = byName("wp.default.svc.cluster.local")
		}, "10.244.1.7:80", through + "10.244.1.7:80"},
		{24, func(m *mesh) { m.gateway.Ports = nil; m.server.Waypoint = byName("wp.default.svc.cluster.local") }, "10.244.1.7:80", "refused: unknown waypoint: waypoint default/wp.default.svc.cluster.local not found"},
		{25, func(m *mesh) { m.server.Waypoint = byIP("10.244.2.10"); m.client = m.wp }, "10.244.1.7:8080", direct},
		{26, func(m *mesh) { m.server.Waypoint = byIP("10.244.2.10"); m.client.ServiceAccount = "wp" }, "10.244.1.7:8080", through + "10.244.1.7:8080"},
		{27, func(m *mesh) { m.web.Waypoint = byIP("10.244.2.10"); m.client = m.wp }, "10.96.0.10:80", direct},
		{29, func(m *mesh) {
			m.web.WeightedWaypoints = []workload.WeightedWaypoint{{Destination: *byName("nope")}}
			m.web.Waypoint = byIP("10.244.2.10")
		}, "10.96.0.10:80", through + "10.96.0.10:80"},
		{30, func(m *mesh) {
			m.web.WeightedWaypoints = []workload.WeightedWaypoint{{Destination: *byName("nope")}, {Destination: *byIP("10.244.2.10"), Weight: 1}}
		}, "10.96.0.10:80", through + "10.96.0.10:80"},
		{33, func(m *mesh) { m.web.Namespace, m.web.Visibility = "other", workload.VisibleNamespace }, "10.96.0.10:80", "TCP 10.96.0.10:80"},
		{38, func(m *mesh) {
			m.web.IPFamilies = workload.FamilyIPv6
			m.server.Addresses = addrs("10.244.1.7", "fd00::7")
		}, "10.96.0.10:80", "HBONE [fd00::7]:15008 auth [fd00::7]:8080"},
		{39, func(m *mesh) {
			m.web.IPFamilies = workload.FamilyIPv4
			m.web.VIPs = append(m.web.VIPs, vip("fd00:96::a"))
			m.server.Addresses = addrs("fd00::7", "10.244.1.7")
		}, "[fd00:96::a]:80", direct},
		{40, func(m *mesh) {
			m.web.VIPs = append(m.web.VIPs, vip("fd00:96::a"))
			m.server.Addresses = addrs("10.244.1.7", "fd00::7")
		}, "[fd00:96::a]:80", "HBONE [fd00::7]:15008 auth [fd00::7]:8080"},
		{41, func(m *mesh) { m.server.Addresses = addrs("fd00::7") }, "10.96.0.10:80", "HBONE [fd00::7]:15008 auth [fd00::7]:8080"},
		{42, func(m *mesh) { m.server.Addresses = addrs("10.244.1.6", "10.244.1.7") }, "10.244.1.7:8080", direct},
		{43, func(m *mesh) {
			m.server.NetworkMode, m.server.Protocol, m.server.Addresses = workload.NetworkHost, workload.ProtocolTCP, addrs("192.168.1.2")
		}, "10.96.0.10:80", "TCP 192.168.1.2:8080"},
		{45, func(m *mesh) { m.server.Status = workload.Unhealthy }, "10.96.0.10:80", "refused: no healthy upstream: 10.96.0.10:80"},
		{46, func(m *mesh) { m.server.Status = workload.Unhealthy; m.web.LoadBalancer.Health = workload.AllowAll }, "10.96.0.10:80", direct},
		{51, func(m *mesh) { m.server.Addresses = nil }, "10.96.0.10:80", "refused: no healthy upstream: 10.96.0.10:80"},
		{61, nil, "127.0.0.1:15001", "refused: attempted recursive call to ourselves"},
		{61, nil, "10.244.0.5:15008", "refused: attempted recursive call to ourselves"},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("DP-%d", tt.id), func(t *testing.T) {
			m := newMesh()
			if tt.change != nil {
				tt.change(m)
			}
			d := Classify(m.snapshot(), &Query{Source: m.client, From: m.client.Addresses[0], Target: netip.MustParseAddrPort(tt.target), Rand: 7})
			if got := say(d); got != tt.want {
				t.Errorf("%s is %q, want %q", tt.target, got, tt.want)
			}
		})
	}
}

func TestAcceptedIdentities(t *testing.T) {
	m := newMesh()
	san := workload.Identity{TrustDomain: "cluster.local", Namespace: "other", ServiceAccount: "san"}
	m.web.SubjectAltNames = []workload.Identity{san}
	q := &Query{Source: m.client, Target: netip.MustParseAddrPort("10.96.0.10:80")}
	d := Classify(m.snapshot(), q)
	if diff := cmp.Diff([]workload.Identity{san, m.server.Identity()}, d.Accept()); diff != "" {
		t.Errorf("through the service (-want +got):\n%s", diff)
	}
	q.Target = netip.MustParseAddrPort("10.244.1.7:80")
	d = Classify(m.snapshot(), q)
	if diff := cmp.Diff([]workload.Identity{m.server.Identity()}, d.Accept()); diff != "" {
		t.Errorf("by address (-want +got):\n%s", diff)
	}
	if len(m.web.SubjectAltNames) != 1 {
		t.Error("Accept changed the service")
	}
	t.Run("DP-14 DP-16 of a waypoint", func(t *testing.T) {
		other := workload.Identity{TrustDomain: "cluster.local", Namespace: "default", ServiceAccount: "wp-of-before"}
		m.gateway.SubjectAltNames = []workload.Identity{other}
		m.server.Waypoint, m.web.Waypoint = byName(m.gateway.Hostname), byName(m.gateway.Hostname)
		for _, target := range []string{"10.244.1.7:8080", "10.96.0.10:80"} {
			d := Classify(m.snapshot(), &Query{Source: m.client, From: m.client.Addresses[0], Target: netip.MustParseAddrPort(target)})
			if diff := cmp.Diff([]workload.Identity{other, m.wp.Identity()}, d.Accept()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", target, diff)
			}
			if d.Destination != m.wp || (d.Service == m.web) != (target == "10.96.0.10:80") {
				t.Errorf("%s: destination %v, service %v", target, d.Destination.Name, d.Service)
			}
		}
	})
}

func TestPickFollowsRankAndCapacity(t *testing.T) {
	near, far := pod0("near", "10.0.0.1"), pod0("far", "10.0.0.2")
	third := pod0("third", "10.0.0.3")
	near.Locality = workload.Locality{Region: "r1", Zone: "z1"}
	far.Locality = workload.Locality{Region: "r1", Zone: "z2"}
	third.Locality = workload.Locality{Region: "r2", Zone: "z1"}
	client := pod0("client", "10.0.0.9")
	client.Locality = near.Locality
	for _, w := range []*workload.Workload{near, far, third} {
		w.Services[webKey] = nil
	}
	prefs := []workload.Scope{workload.ScopeNetwork, workload.ScopeRegion, workload.ScopeZone}
	tests := []struct {
		name    string
		mode    workload.LBMode
		change  func()
		exclude []*workload.Workload
		want    map[string]bool
	}{
		{"all alike without a mode", workload.LBStandard, func() {}, nil, map[string]bool{"near": true, "far": true, "third": true}},
		{"DP-48 strict takes the full match only", workload.LBStrict, func() {}, nil, map[string]bool{"near": true}},
		{"DP-47 strict without a match takes none", workload.LBStrict, func() {}, []*workload.Workload{near}, nil},
		{"DP-49 failover takes the best rank", workload.LBFailover, func() {}, []*workload.Workload{near}, map[string]bool{"far": true}},
		{"DP-53 capacity 0 is never picked", workload.LBStandard, func() { near.Capacity = 0 }, []*workload.Workload{far}, map[string]bool{"third": true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.change()
			v := &workload.Service{Namespace: "default", Hostname: webKey.Hostname, Ports: workload.PortMap{80: 8080}, LoadBalancer: workload.LoadBalancer{Mode: tt.mode, Preferences: prefs}}
			s := workload.NewSnapshot(workload.State{Workloads: []*workload.Workload{near, far, third}, Services: []*workload.Service{v}})
			got := make(map[string]bool)
			for i := range uint64(200) {
				q := &Query{Source: client, Exclude: tt.exclude, Rand: mix(i)}
				if e, ok := pick(s, q, v, 80, false); ok {
					got[e.workload.Name] = true
				}
			}
			if len(tt.want) == 0 && len(got) == 0 {
				return
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("picked (-want +got):\n%s", diff)
			}
		})
	}
}

// seen are the endpoints that a service picks in many flows, by name.
func seen(source *workload.Workload, v *workload.Service, endpoints []*workload.Workload) string {
	for _, w := range endpoints {
		w.Services[v.Key()] = nil
	}
	s := workload.NewSnapshot(workload.State{Workloads: endpoints, Services: []*workload.Service{v}})
	got := make(map[string]bool)
	for i := range uint64(200) {
		if e, ok := pick(s, &Query{Source: source, Rand: mix(i)}, v, 80, false); ok {
			got[e.workload.Name] = true
		}
		tables := new(Tables)
		if e, ok := pick(s, &Query{Source: source, Rand: mix(i), Tables: tables}, v, 80, false); ok {
			got[e.workload.Name] = true
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(got)), " ")
}

// Which endpoints come into question, for sources that are nearer or farther.
func TestPreferencesByPlace(t *testing.T) {
	in := func(name, network, region, zone string) *workload.Workload {
		w := pod0(name, "10.0.0.1")
		w.Network, w.Locality = network, workload.Locality{Region: region, Zone: zone}
		w.NetworkGateway = byIP("10.0.0.9")
		return w
	}
	endpoints := func() []*workload.Workload {
		return []*workload.Workload{in("full", "", "r", "z"), in("region", "", "r", "other"), in("none", "", "", ""), in("far", "net2", "r", "z")}
	}
	tests := []struct {
		name   string
		mode   workload.LBMode
		source *workload.Workload
		want   string
	}{
		{"DP-49 CP-72 network, region and zone", workload.LBFailover, in("c", "", "r", "z"), "full"},
		{"DP-49 CP-72 network and region", workload.LBFailover, in("c", "", "r", "x"), "full region"},
		{"DP-49 CP-72 network", workload.LBFailover, in("c", "", "x", "x"), "full none region"},
		{"DP-49 CP-72 region and zone of another network", workload.LBFailover, in("c", "net3", "r", "z"), "far full"},
		{"DP-50 CP-72 nothing", workload.LBFailover, in("c", "net3", "x", "x"), "far full none region"},
		{"DP-48 CP-73 strict, all", workload.LBStrict, in("c", "", "r", "z"), "full"},
		{"DP-48 CP-73 strict, not the zone", workload.LBStrict, in("c", "", "r", "x"), ""},
		{"DP-47 CP-73 strict, a source without a place, beside an endpoint without one", workload.LBStrict, in("c", "", "", ""), ""},
		{"DP-47 CP-73 strict, a source without a place and none such endpoint", workload.LBStrict, in("c", "net3", "", ""), ""},
		{"no mode: preferences do not count", workload.LBStandard, in("c", "", "r", "z"), "far full none region"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := &workload.Service{Namespace: "default", Hostname: webKey.Hostname, Ports: workload.PortMap{80: 8080}, LoadBalancer: workload.LoadBalancer{
				Mode: tt.mode, Preferences: []workload.Scope{workload.ScopeNetwork, workload.ScopeRegion, workload.ScopeZone},
			}}
			if got := seen(tt.source, v, endpoints()); got != tt.want {
				t.Errorf("picked %q, want %q", got, tt.want)
			}
		})
	}
	t.Run("CP-74", func(t *testing.T) {
		v := &workload.Service{Namespace: "default", Hostname: webKey.Hostname, Ports: workload.PortMap{80: 8080}, LoadBalancer: workload.LoadBalancer{
			Mode: workload.LBStrict, Preferences: []workload.Scope{workload.ScopeNode},
		}}
		here, there := pod0("here", "10.0.0.1"), pod0("there", "10.0.0.2")
		there.Node = "n2"
		source := pod0("c", "10.0.0.3")
		if got := seen(source, v, []*workload.Workload{here, there}); got != "here" {
			t.Errorf("on the node: %q, want here", got)
		}
		source.Node = "n3"
		if got := seen(source, v, []*workload.Workload{here, there}); got != "" {
			t.Errorf("on a node without an endpoint: %q, want none", got)
		}
	})
}

func TestPickWeighsByCapacity(t *testing.T) {
	t.Run("DP-52", testPickWeighsByCapacity)
}

func testPickWeighsByCapacity(t *testing.T) {
	a, b := pod0("a", "10.0.0.1"), pod0("b", "10.0.0.2")
	a.Capacity, b.Capacity = 1, 3
	a.Services[webKey], b.Services[webKey] = nil, nil
	v := &workload.Service{Namespace: "default", Hostname: webKey.Hostname, Ports: workload.PortMap{80: 8080}}
	s := workload.NewSnapshot(workload.State{Workloads: []*workload.Workload{a, b}, Services: []*workload.Service{v}})
	n := 0
	for i := range uint64(4000) {
		if e, _ := pick(s, &Query{Source: a, Rand: mix(i)}, v, 80, false); e.workload == b {
			n++
		}
	}
	if n < 2800 || n > 3200 {
		t.Errorf("the endpoint with three quarters of the capacity got %d of 4000 flows, want about 3000", n)
	}
}

func TestClassifyDoesNotAllocate(t *testing.T) {
	m := newMesh()
	s := m.snapshot()
	for _, target := range []string{"10.96.0.10:80", "10.244.1.7:8080", "1.2.3.4:80"} {
		q := &Query{Source: m.client, From: m.client.Addresses[0], Target: netip.MustParseAddrPort(target)}
		if n := testing.AllocsPerRun(100, func() { Classify(s, q) }); n != 0 {
			t.Errorf("Classify(%s) allocates %v times, want 0", target, n)
		}
	}
	for _, n := range []int{100, 10_000, 100_000} {
		if n > 10_000 && testing.Short() {
			break
		}
		st := bigMesh(n, 10)
		source, far := st.Workloads[0], st.Services[1]
		far.Waypoint = &workload.GatewayAddress{Address: workload.NetworkAddr{Addr: st.Workloads[5].Addresses[0]}, Port: 15008}
		st.Services[2].WeightedWaypoints = []workload.WeightedWaypoint{{Destination: *far.Waypoint, Weight: 1}, {Destination: *far.Waypoint, Weight: 2}}
		st.Services[3].CIDRVIPs = []workload.NetworkPrefix{{Prefix: netip.MustParsePrefix("198.51.100.0/24")}}
		for i := range 10 {
			w := st.Workloads[40+i]
			w.Network, w.NetworkGateway = "net2", far.Waypoint
		}
		s := workload.NewSnapshot(st)
		tables := new(Tables)
		to := func(v *workload.Service) netip.AddrPort { return netip.AddrPortFrom(v.VIPs[0].Addr, 80) }
		for name, target := range map[string]netip.AddrPort{
			"a service": to(st.Services[0]), "a service behind a waypoint": to(far), "waypoints by weight": to(st.Services[2]), "another network": to(st.Services[4]),
			"a block of addresses": netip.MustParseAddrPort("198.51.100.7:80"), "a workload": netip.AddrPortFrom(st.Workloads[n/2].Addresses[0], 80), "unknown": netip.MustParseAddrPort("192.0.2.1:443"),
		} {
			q := &Query{Source: source, From: source.Addresses[0], Target: target, Tables: tables}
			allocs := testing.AllocsPerRun(100, func() {
				q.Rand++
				if d := Classify(s, q); d.Route == Refuse {
					t.Fatalf("%s: %v", name, d.Err)
				}
			})
			if allocs != 0 {
				t.Errorf("%d workloads, to %s: %v allocations, want 0", n, name, allocs)
			}
		}
	}
}
