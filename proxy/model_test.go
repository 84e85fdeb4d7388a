package proxy

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/workload"
)

// The decision once more, slowly and from the lists: what may become of a flow, as texts. Whatever Classify picks at random is one of
// them.
type model struct {
	st workload.State
	q  *Query
}

func (m *model) outcomes() []string {
	q := m.q
	if q.Target.Port() == 53 {
		return []string{"DNS"}
	}
	own := append(addrs("127.0.0.1", "::1"), q.Source.Addresses...)
	if illegalPort(q.Target.Port()) && slices.Contains(own, q.Target.Addr()) {
		return []string{"refused"}
	}
	if v := m.serviceAt(q.Network, q.Target.Addr()); v != nil {
		if wps := m.waypointsOf(v); len(wps) > 0 {
			var all []string
			for _, wp := range wps {
				if m.fromWaypoint(wp) {
					all = append(all, m.toService(v)...)
				} else {
					all = append(all, m.throughWaypoint(wp, v)...)
				}
			}
			return all
		}
		return m.toService(v)
	}
	w := m.workloadAt(q.Network, q.Target.Addr())
	switch {
	case w == nil:
		return []string{"passthrough " + q.Target.String()}
	case w.Network != q.Source.Network:
		return []string{"refused"}
	case w.Waypoint != nil && !m.fromWaypoint(w.Waypoint):
		return m.throughWaypoint(w.Waypoint, nil)
	}
	return []string{m.direct(w, q.Target.Port(), nil)}
}

func (m *model) toService(v *workload.Service) (all []string) {
	if v.LoadBalancer.Mode == workload.LBPassthrough {
		return []string{"passthrough " + m.q.Target.String()}
	}
	for _, e := range m.endpoints(v, m.q.Target.Port(), false) {
		if e.workload.Network != m.q.Source.Network {
			all = append(all, m.throughGateway(e.workload, v)...)
			continue
		}
		all = append(all, m.direct(e.workload, e.port, v))
	}
	if len(all) == 0 {
		all = []string{"refused"}
	}
	return all
}

func (m *model) direct(w *workload.Workload, port uint16, v *workload.Service) string {
	at := m.addressOf(w, v, m.q.Target.Addr())
	switch {
	case at == "":
		return "refused"
	case w.Protocol == workload.ProtocolHBONE:
		return fmt.Sprintf("HBONE %s to %s", joined(at, hbone.Port), joined(at, port))
	case w.UID == m.q.Source.UID && illegalPort(port):
		return "refused"
	}
	return "passthrough " + joined(at, port)
}

func (m *model) throughWaypoint(g *workload.GatewayAddress, v *workload.Service) (all []string) {
	for _, e := range m.gateway(g, true) {
		at := m.addressOf(e.workload, m.gatewayService(g), m.near(g))
		switch {
		case e.workload.Network != m.q.Source.Network && v != nil:
			all = append(all, m.throughGateway(e.workload, v)...)
		case e.workload.Network != m.q.Source.Network, at == "":
			all = append(all, "refused")
		default:
			all = append(all, fmt.Sprintf("HBONE %s to %v", joined(at, e.port), m.q.Target))
		}
	}
	if len(all) == 0 {
		all = []string{"refused"}
	}
	return all
}

func (m *model) throughGateway(w *workload.Workload, v *workload.Service) (all []string) {
	g := w.NetworkGateway
	if g == nil {
		return []string{"refused"}
	}
	for _, e := range m.gateway(g, false) {
		if at := m.addressOf(e.workload, m.gatewayService(g), m.near(g)); at != "" {
			all = append(all, fmt.Sprintf("double HBONE %s to %s:%d", joined(at, e.port), v.Hostname, m.q.Target.Port()))
		} else {
			all = append(all, "refused")
		}
	}
	if len(all) == 0 {
		all = []string{"refused"}
	}
	return all
}

// near is the address whose family the gateway's is to be of.
func (m *model) near(g *workload.GatewayAddress) netip.Addr {
	if g.Hostname == (workload.ServiceKey{}) {
		return g.Address.Addr
	}
	return m.q.Target.Addr()
}

func (m *model) gatewayService(g *workload.GatewayAddress) *workload.Service {
	if g.Hostname == (workload.ServiceKey{}) {
		return m.serviceAt(g.Address.Network, g.Address.Addr)
	}
	for _, v := range m.st.Services {
		if v.Key() == g.Hostname {
			return v
		}
	}
	return nil
}

func (m *model) gatewayWorkload(g *workload.GatewayAddress) *workload.Workload {
	if g.Hostname == (workload.ServiceKey{}) {
		return m.workloadAt(g.Address.Network, g.Address.Addr)
	}
	var best *workload.Workload // of several the one with the largest uid
	for _, w := range m.st.Workloads {
		if w.Namespace == g.Hostname.Namespace && w.Hostname == g.Hostname.Hostname && w.Hostname != "" && (best == nil || w.UID > best.UID) {
			best = w
		}
	}
	return best
}

func (m *model) gateway(g *workload.GatewayAddress, waypoint bool) []endpoint {
	if v := m.gatewayService(g); v != nil {
		return m.endpoints(v, g.Port, waypoint)
	}
	if w := m.gatewayWorkload(g); w != nil && !slices.Contains(m.q.Exclude, w) {
		return []endpoint{{w, g.Port}}
	}
	return nil
}

func (m *model) fromWaypoint(g *workload.GatewayAddress) bool {
	list := []*workload.Workload{m.gatewayWorkload(g)}
	if v := m.gatewayService(g); v != nil {
		list = append(list, m.members(v)...)
	}
	return slices.ContainsFunc(list, func(w *workload.Workload) bool {
		return w != nil && w.Identity() == m.q.Source.Identity() && slices.Contains(w.Addresses, m.q.From)
	})
}

func (m *model) waypointsOf(v *workload.Service) (list []*workload.GatewayAddress) {
	for i := range v.WeightedWaypoints {
		if v.WeightedWaypoints[i].Weight > 0 {
			list = append(list, &v.WeightedWaypoints[i].Destination)
		}
	}
	if len(list) == 0 && v.Waypoint != nil {
		list = append(list, v.Waypoint)
	}
	return list
}

// members are the workloads that serve a service.
func (m *model) members(v *workload.Service) (list []*workload.Workload) {
	for _, w := range m.st.Workloads {
		if _, ok := w.Services[v.Key()]; ok && (w.Status == workload.Healthy || v.LoadBalancer.Health == workload.AllowAll) {
			list = append(list, w)
		}
	}
	return list
}

func (m *model) endpoints(v *workload.Service, port uint16, waypoint bool) (all []endpoint) {
	target, has := v.Ports[port]
	if !has && !waypoint {
		return nil
	}
	best := -1
	for _, w := range m.members(v) {
		e := endpoint{w, w.Services[v.Key()][port]}
		if e.port == 0 {
			e.port = target
		}
		if e.port == 0 && waypoint && w.AppTunnel != nil && w.AppTunnel.Port != 0 {
			e.port = port
		}
		reachable := len(w.Addresses) > 0 || w.Hostname != "" || w.Network != m.q.Source.Network && w.NetworkGateway != nil
		if e.port == 0 || w.Capacity == 0 || !reachable || slices.Contains(m.q.Exclude, w) {
			continue
		}
		n := m.score(&v.LoadBalancer, w)
		if n > best {
			best, all = n, nil
		}
		if n >= 0 && n == best {
			all = append(all, e)
		}
	}
	return all
}

// score is -1 for a workload that strict preferences leave out.
func (m *model) score(lb *workload.LoadBalancer, w *workload.Workload) int {
	if lb.Mode != workload.LBStrict && lb.Mode != workload.LBFailover {
		return 0
	}
	s := m.q.Source
	same := map[workload.Scope]bool{
		workload.ScopeRegion: s.Locality.Region == w.Locality.Region, workload.ScopeZone: s.Locality.Zone == w.Locality.Zone,
		workload.ScopeSubzone: s.Locality.Subzone == w.Locality.Subzone, workload.ScopeNode: s.Node == w.Node && s.ClusterID == w.ClusterID,
		workload.ScopeCluster: s.ClusterID == w.ClusterID, workload.ScopeNetwork: s.Network == w.Network,
	}
	if lb.Mode == workload.LBStrict {
		for scope, place := range map[workload.Scope]string{workload.ScopeRegion: w.Locality.Region, workload.ScopeZone: w.Locality.Zone, workload.ScopeSubzone: w.Locality.Subzone} {
			same[scope] = same[scope] && place != ""
		}
	}
	prefs, score, all := lb.Preferences, 0, true
	if len(prefs) > 0 && prefs[0] == workload.ScopeNetwork {
		if same[workload.ScopeNetwork] {
			score = len(prefs)
		} else {
			all = false
		}
		prefs = prefs[1:]
	}
	for _, p := range prefs {
		if !same[p] {
			all = false
			break
		}
		score++
	}
	if lb.Mode == workload.LBStrict && !all {
		return -1
	}
	return score
}

// addressOf is the address of a workload, or the hostname that has to be resolved.
func (m *model) addressOf(w *workload.Workload, v *workload.Service, near netip.Addr) string {
	if slices.Contains(w.Addresses, near) {
		return near.String()
	}
	var ok []netip.Addr
	for _, a := range w.Addresses {
		if v != nil && (v.IPFamilies == workload.FamilyIPv4 && !a.Is4() || v.IPFamilies == workload.FamilyIPv6 && a.Is4()) {
			continue
		}
		ok = append(ok, a)
	}
	for _, a := range ok {
		if a.Is4() == near.Is4() {
			return a.String()
		}
	}
	if len(ok) > 0 {
		return ok[0].String()
	}
	return w.Hostname
}

func joined(host string, port uint16) string { return net.JoinHostPort(host, strconv.Itoa(int(port))) }

// workloadAt prefers pods, then HBONE, then the larger uid.
func (m *model) workloadAt(network string, a netip.Addr) (best *workload.Workload) {
	rank := func(w *workload.Workload) int {
		n := 0
		if w.UID[0] == 'p' { // as the states here name pods
			n = 2
		}
		if w.Protocol == workload.ProtocolHBONE {
			n++
		}
		return n
	}
	for _, w := range m.st.Workloads {
		if w.NetworkMode == workload.NetworkHost || w.Network != network || !slices.Contains(w.Addresses, a) {
			continue
		}
		if best == nil || rank(w) > rank(best) || rank(w) == rank(best) && w.UID > best.UID {
			best = w
		}
	}
	return best
}

// serviceAt prefers exact addresses, then the client's namespace, then the longer prefix, canonical ones, and the smaller key.
func (m *model) serviceAt(network string, a netip.Addr) (best *workload.Service) {
	ns := m.q.Source.Namespace
	bits := -1
	better := func(v *workload.Service, n int) bool {
		switch {
		case best == nil:
			return true
		case (v.Namespace == ns) != (best.Namespace == ns):
			return v.Namespace == ns
		case n != bits:
			return n > bits
		case v.Canonical != best.Canonical:
			return v.Canonical
		}
		return v.Namespace+"/"+v.Hostname < best.Namespace+"/"+best.Hostname
	}
	for _, exact := range []bool{true, false} {
		for _, v := range m.st.Services {
			if !v.VisibleTo(ns) {
				continue
			}
			if exact && slices.Contains(v.VIPs, workload.NetworkAddr{Network: network, Addr: a}) && better(v, 0) {
				best, bits = v, 0
			}
			for _, c := range v.CIDRVIPs {
				if !exact && c.Network == network && c.Prefix.Contains(a) && better(v, c.Prefix.Bits()) {
					best, bits = v, c.Prefix.Bits()
				}
			}
		}
		if best != nil {
			return best
		}
	}
	return nil
}

// A world makes states at random that are small enough for everything to meet everything.
type world struct{ *rand.Rand }

func (r world) one(list ...string) string { return list[r.IntN(len(list))] }

func (r world) addr() netip.Addr {
	if r.IntN(4) == 0 {
		return netip.MustParseAddr(fmt.Sprintf("fd00::%d", 1+r.IntN(6)))
	}
	return netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + r.IntN(8))})
}

func (r world) network() string {
	if r.IntN(6) == 0 {
		return "net2"
	}
	return ""
}

func (r world) key() workload.ServiceKey {
	return workload.ServiceKey{Namespace: r.one("a", "b"), Hostname: r.one("x", "y", "z")}
}

func (r world) gateway() *workload.GatewayAddress {
	if r.IntN(3) > 0 {
		return nil
	}
	g := &workload.GatewayAddress{Port: 15008}
	if r.IntN(2) == 0 {
		g.Hostname = r.key()
	} else {
		g.Address = workload.NetworkAddr{Network: r.network(), Addr: r.addr()}
	}
	return g
}

func (r world) workload(i int) *workload.Workload {
	kind := "pod//Pod/"
	if r.IntN(4) == 0 {
		kind = "vm/"
	}
	w := &workload.Workload{
		UID: fmt.Sprintf("%s%d", kind, i), Name: fmt.Sprint("w", i), Namespace: r.one("a", "b"), ServiceAccount: r.one("s", "t"), TrustDomain: "td",
		Network: r.network(), Node: r.one("n1", "n2"), ClusterID: r.one("c1", "c1", "c2"), Protocol: workload.Protocol(r.IntN(2)), Capacity: uint32(r.IntN(3)),
		Locality: workload.Locality{Region: r.one("r1", "r2"), Zone: r.one("z1", "z2"), Subzone: r.one("", "s1")},
		Waypoint: r.gateway(), NetworkGateway: r.gateway(), Services: map[workload.ServiceKey]workload.PortMap{},
	}
	if r.IntN(8) == 0 {
		w.NetworkMode = workload.NetworkHost
	}
	if r.IntN(5) == 0 {
		w.Status = workload.Unhealthy
	}
	if r.IntN(5) == 0 {
		w.AppTunnel = &workload.AppTunnel{PROXY: true, Port: uint16(r.IntN(3)/2) * 15088}
	}
	if r.IntN(4) == 0 {
		w.Hostname = r.one("x", "y", "db")
	}
	for range r.IntN(3) {
		if a := r.addr(); !slices.Contains(w.Addresses, a) {
			w.Addresses = append(w.Addresses, a)
		}
	}
	for range r.IntN(3) {
		ports := workload.PortMap{}
		if r.IntN(2) == 0 {
			ports[80] = uint16(8000 + r.IntN(3))
		}
		w.Services[r.key()] = ports
	}
	return w
}

func (r world) service(key workload.ServiceKey) *workload.Service {
	v := &workload.Service{
		Name: key.Hostname, Namespace: key.Namespace, Hostname: key.Hostname, Waypoint: r.gateway(), Canonical: r.IntN(3) == 0, Visibility: workload.Visibility(r.IntN(2)),
		IPFamilies: workload.IPFamilies(r.IntN(4)), Ports: workload.PortMap{},
		LoadBalancer: workload.LoadBalancer{Mode: workload.LBMode(r.IntN(4)), Health: workload.HealthPolicy(r.IntN(2))},
	}
	for _, p := range []uint16{80, 15008} {
		if r.IntN(3) > 0 {
			v.Ports[p] = uint16(r.IntN(2)) * (p + 8000)
		}
	}
	for range r.IntN(3) {
		v.VIPs = append(v.VIPs, workload.NetworkAddr{Network: r.network(), Addr: r.addr()})
	}
	if r.IntN(3) == 0 {
		p, _ := r.addr().Prefix(28 + r.IntN(4))
		v.CIDRVIPs = append(v.CIDRVIPs, workload.NetworkPrefix{Network: r.network(), Prefix: p})
	}
	for range r.IntN(4) {
		v.LoadBalancer.Preferences = append(v.LoadBalancer.Preferences, workload.Scope(r.IntN(6)))
	}
	if r.IntN(6) == 0 {
		for range 2 {
			if g := r.gateway(); g != nil {
				v.WeightedWaypoints = append(v.WeightedWaypoints, workload.WeightedWaypoint{Destination: *g, Weight: uint32(r.IntN(2))})
			}
		}
	}
	return v
}

// known is an address of one of the services or workloads, if it has any.
func (r world) known(st *workload.State) (a netip.Addr) {
	if len(st.Services) > 0 && r.IntN(2) == 0 {
		for _, vip := range st.Services[r.IntN(len(st.Services))].VIPs {
			a = vip.Addr
		}
		return a
	}
	for _, ip := range st.Workloads[r.IntN(len(st.Workloads))].Addresses {
		a = ip
	}
	return a
}

// meet makes it likely that gateways and networks come into play: what is random on its own seldom leads to more than one step.
func (r world) meet(st *workload.State) {
	if r.IntN(2) == 0 || len(st.Services) == 0 || len(st.Workloads) < 3 {
		return
	}
	v, far, gateway := st.Services[0], st.Workloads[1], st.Workloads[2]
	st.Workloads[0].Network, far.Network, gateway.Network = "", "net2", ""
	far.Services[v.Key()] = workload.PortMap{80: 8080}
	far.Capacity, gateway.NetworkMode = 1, workload.NetworkStandard
	if len(gateway.Addresses) > 0 {
		far.NetworkGateway = &workload.GatewayAddress{Address: workload.NetworkAddr{Addr: gateway.Addresses[0]}, Port: 15009}
	}
}

// A RandomCase is a state and a flow in it, which depend on a seed alone.
type RandomCase struct {
	State workload.State
	Query Query
	world world
}

// NewRandomCase makes the one of a seed.
func NewRandomCase(seed uint64) *RandomCase {
	r := world{rand.New(rand.NewPCG(seed, 6))}
	c := &RandomCase{world: r}
	st := &c.State
	for i := range 1 + r.IntN(7) {
		st.Workloads = append(st.Workloads, r.workload(i))
	}
	seen := make(map[workload.ServiceKey]bool)
	for range r.IntN(5) {
		if key := r.key(); !seen[key] {
			seen[key] = true
			st.Services = append(st.Services, r.service(key))
		}
	}
	r.meet(st)
	source := st.Workloads[0]
	c.Query = Query{
		Source: source, From: netip.IPv4Unspecified(), Network: source.Network,
		Target: netip.AddrPortFrom(r.addr(), []uint16{80, 80, 81, 15008, 15001, 53}[r.IntN(6)]),
	}
	if known := r.known(st); known.IsValid() && r.IntN(4) > 0 {
		c.Query.Target = netip.AddrPortFrom(known, c.Query.Target.Port())
	}
	if len(source.Addresses) > 0 {
		c.Query.From = source.Addresses[0]
	}
	return c
}

// Outcomes are what may become of the flow, as the model has it.
func (c *RandomCase) Outcomes() []string {
	m := model{c.State, &c.Query}
	return m.outcomes()
}

// Snapshot indexes the state, on a copy.
func (c *RandomCase) Snapshot() *workload.Snapshot {
	return workload.NewSnapshot(workload.State{Workloads: slices.Clone(c.State.Workloads), Services: slices.Clone(c.State.Services)})
}

// On states and flows at random the decision is one that the slow model allows, and a trace changes nothing.
func TestDecisionsAreThoseOfTheModel(t *testing.T) {
	routes := make(map[Route]int)
	for seed := range uint64(10_000) {
		c := NewRandomCase(seed)
		r, q := c.world, c.Query
		if r.IntN(4) == 0 {
			q.From = r.addr()
		}
		if r.IntN(4) == 0 {
			q.Exclude = c.State.Workloads[len(c.State.Workloads)-1:]
		}
		var tables *Tables
		m := model{c.State, &q}
		allowed := m.outcomes()
		s := c.Snapshot()
		for i := range 6 {
			q.Rand, q.Trace, q.Tables = r.Uint64(), nil, nil
			if i == 3 {
				tables = new(Tables)
			}
			if i >= 3 {
				q.Tables = tables
			}
			d := Classify(s, &q)
			if got := told(&d); !slices.Contains(allowed, got) {
				t.Fatalf("seed %d: %v in network %q becomes %s, want one of %q", seed, q.Target, q.Network, got, allowed)
			}
			routes[d.Route]++
			q.Tables = nil
			d = Classify(s, &q)
			q.Trace = new(Trace)
			if traced := Classify(s, &q); told(&traced) != told(&d) || fmt.Sprint(traced.Err) != fmt.Sprint(d.Err) {
				t.Fatalf("seed %d: with a trace it becomes %s, without %s", seed, told(&traced), told(&d))
			}
		}
	}
	if len(routes) < 5 {
		t.Errorf("routes taken: %v, want all", routes)
	}
}

func told(d *Decision) string {
	switch d.Route {
	case Passthrough:
		return "passthrough " + d.Told(d.NextHop)
	case OverHBONE:
		return fmt.Sprintf("HBONE %s to %s", d.Told(d.NextHop), d.Told(d.Target))
	case DoubleHBONE:
		return fmt.Sprintf("double HBONE %s to %s", d.Told(d.NextHop), d.Authority())
	case AnsweredHere:
		return "DNS"
	}
	return "refused"
}
