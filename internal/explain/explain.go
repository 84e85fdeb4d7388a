// Package explain tells why a flow goes where it goes: the decisions of proxy and authz on a state, with what they were made of.
//
// It decides nothing by itself: [Outbound] is proxy.Classify with a trace, [Inbound] authz.Evaluate with its parts.
package explain

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"ztun.dev/ztun/dnsproxy"
	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/tun"
)

// A Mesh is the state that is asked.
type Mesh struct {
	State   *workload.Snapshot
	Network string // of the node that the source is on

	Served func(*workload.Workload) bool // whether this node serves a workload, also one that is not in the mesh by the state; nil: it is not known

	ClusterDomain      string // as DNS has them: "": cluster.local
	PreferredNamespace string
	NoIPv6             bool

	Avoid        []*workload.Workload // endpoints that failed for the source a moment ago
	AllowUnknown bool                 // policies that have not arrived are left out (ZTUN_UNKNOWN_POLICY=allow)
}

// A Report is what becomes of one flow. Its JSON form is stable: keys only get added.
type Report struct {
	From        string   `json:"from"` // namespace/name, or the address of a source that is no workload
	FromAddress string   `json:"fromAddress,omitempty"`
	To          string   `json:"to"`
	UDP         bool     `json:"udp,omitempty"`
	Inbound     bool     `json:"inbound,omitempty"`
	Destination string   `json:"destination,omitempty"` // what the address is
	Match       string   `json:"match,omitempty"`       // how it was found
	Hidden      []string `json:"hidden,omitempty"`      // services at the address that the source's namespace does not see
	Service     string   `json:"service,omitempty"`     // hostname
	Waypoint    string   `json:"waypoint,omitempty"`
	SkipsIt     bool     `json:"waypointSkipped,omitempty"` // the source is the waypoint
	Gateway     string   `json:"gateway,omitempty"`         // to the network of the endpoint or waypoint
	Ports       []uint16 `json:"servicePorts,omitempty"`    // of the service, where it does not have the one asked for
	Pools       []Pool   `json:"pools,omitempty"`           // services that an endpoint was picked from
	Endpoints   []Choice `json:"endpoints,omitempty"`       // of them
	Waypoints   []Branch `json:"waypoints,omitempty"`       // if there are several by weight; the rest is about the heaviest
	Route       string   `json:"route,omitempty"`           // a proxy.Route, plaintext (inbound), or not captured
	Reason      string   `json:"reason,omitempty"`          // why it is not captured, or in plaintext
	Chosen      string   `json:"chosen,omitempty"`          // one of those that can be
	Address     string   `json:"chosenAddress,omitempty"`
	TargetPort  uint16   `json:"targetPort,omitempty"`
	NextHop     string   `json:"nextHop,omitempty"`
	Lookup      string   `json:"lookup,omitempty"` // hostname in nextHop and authority, which the node resolves for each connection
	Authority   string   `json:"authority,omitempty"`
	Accepts     []string `json:"accepts,omitempty"`       // identities of which the peer has to present one
	Beyond      []string `json:"acceptsBeyond,omitempty"` // and the peer beyond the gateway
	Error       string   `json:"error,omitempty"`         // why it is refused

	Policies []Policy `json:"policies,omitempty"` // that apply at the destination, as far as they are known here
	Verdict  string   `json:"verdict,omitempty"`
	Allowed  *bool    `json:"allowed,omitempty"` // by policy; nil: nobody here can tell
}

// A Pool is a service that an endpoint was picked from.
type Pool struct {
	Service    string `json:"service"`
	Endpoints  int    `json:"endpoints"`
	Candidates int    `json:"candidates"` // of which one is picked, by capacity
	Preset     string `json:"preset,omitempty"`
	Where      string `json:"where,omitempty"` // what the candidates have in common with the source, by the preset
}

// A Branch is one of several waypoints.
type Branch struct {
	Waypoint string `json:"waypoint"`
	Weight   uint32 `json:"weight"`
	Of       uint64 `json:"of"`                // the sum of all weights
	SkipsIt  bool   `json:"skipped,omitempty"` // the source is the waypoint
	Route    string `json:"route,omitempty"`
	Chosen   string `json:"chosen,omitempty"`
	NextHop  string `json:"nextHop,omitempty"`
	Error    string `json:"error,omitempty"`
}

// A Choice is an endpoint of a service.
type Choice struct {
	Workload  string `json:"workload"`
	Service   string `json:"service"`
	Port      uint16 `json:"port,omitempty"`
	Candidate bool   `json:"candidate"`
	Rank      int    `json:"rank,omitempty"`
	Why       string `json:"why,omitempty"` // it is not one
}

// A Policy is one that was considered.
type Policy struct {
	Key     string `json:"key"`
	Scope   string `json:"scope,omitempty"`
	Action  string `json:"action,omitempty"`
	DryRun  bool   `json:"dryRun,omitempty"`
	Missing bool   `json:"missing,omitempty"` // the workload lists it, and it has not arrived
	Matched bool   `json:"matched"`
	Rule    int    `json:"rule,omitempty"`   // that matched, from 1
	Failed  string `json:"failed,omitempty"` // why none did
}

// Find returns the workload that text means: a uid, namespace/name, or an address.
func (m Mesh) Find(text string) (*workload.Workload, error) {
	if w := m.State.Workload(text); w != nil {
		return w, nil
	}
	if a, err := netip.ParseAddr(text); err == nil {
		if w := m.State.WorkloadAt(m.Network, a.Unmap()); w != nil {
			return w, nil
		}
		return nil, fmt.Errorf("no workload has the address %s in network %q", a, m.Network)
	}
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		return nil, fmt.Errorf("%q is no workload: want namespace/name, an address, or a uid", text)
	}
	var found []*workload.Workload
	for _, w := range m.State.State().Workloads {
		if w.Namespace == namespace && w.Name == name {
			found = append(found, w)
		}
	}
	switch len(found) {
	case 0:
		return nil, fmt.Errorf("the state has no workload %s", text)
	case 1:
		return found[0], nil
	}
	var uids []string
	for _, w := range found {
		uids = append(uids, w.UID)
	}
	return nil, fmt.Errorf("%d workloads are called %s: say which by its uid: %s", len(found), text, strings.Join(uids, ", "))
}

// Target returns the address that text means for a client, which is nil if it is no workload: ADDRESS:PORT, HOSTNAME:PORT as DNS answers
// it, or NAMESPACE/NAME:PORT of a workload. like is an address of the family that is wanted where there is a choice.
func (m Mesh) Target(text string, from *workload.Workload, like netip.Addr) (netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(text); err == nil {
		return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
	}
	i := strings.LastIndexByte(text, ':')
	if i < 0 {
		return netip.AddrPort{}, fmt.Errorf("%q has no port", text)
	}
	port, err := netip.ParseAddrPort("127.0.0.1" + text[i:])
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q: %q is not a port", text, text[i+1:])
	}
	var addr netip.Addr
	if name := text[:i]; strings.Contains(name, "/") {
		addr, err = m.workloadAddress(name, like)
	} else {
		addr, err = m.resolve(name, from, like)
	}
	return netip.AddrPortFrom(addr, port.Port()), err
}

// workloadAddress is that of a workload which Find finds.
func (m Mesh) workloadAddress(name string, like netip.Addr) (netip.Addr, error) {
	w, err := m.Find(name)
	switch {
	case err != nil:
		return netip.Addr{}, err
	case len(w.Addresses) == 0:
		return netip.Addr{}, fmt.Errorf("%s has no address", name)
	}
	return addressLike(w, like), nil
}

// resolve is the address that DNS answers a client with. Of a headless service there has to be one endpoint: which of several it is, DNS
// leaves to the client.
func (m Mesh) resolve(name string, from *workload.Workload, like netip.Addr) (netip.Addr, error) {
	n := dnsproxy.Names{
		Snapshot: m.State, Network: m.Network, Domain: dnsproxy.ClusterDomain(m.ClusterDomain), PreferredNamespace: m.PreferredNamespace, NoIPv6: m.NoIPv6,
	}
	if from != nil {
		n.Namespace, n.Network = from.Namespace, from.Network
	}
	v := n.Lookup(name)
	if v == nil {
		if left := m.State.ServiceNamed(strings.ToLower(strings.TrimSuffix(name, ".")), n.Namespace); left != nil {
			return netip.Addr{}, fmt.Errorf("%s has no address in the state: DNS asks a resolver for it", left.Hostname)
		}
		return netip.Addr{}, fmt.Errorf("the state has no service %s that is visible to namespace %s", name, n.Namespace)
	}
	addrs := n.Addresses(v, like.Is6())
	if len(addrs) == 0 {
		addrs = n.Addresses(v, !like.Is6())
	}
	switch {
	case len(addrs) == 0:
		return netip.Addr{}, fmt.Errorf("%s has no address in network %q", v.Hostname, n.Network)
	case len(v.VIPs) == 0 && len(addrs) > 1:
		return netip.Addr{}, fmt.Errorf("%s is headless: ask for one of %s", v.Hostname, strings.Trim(strings.ReplaceAll(fmt.Sprint(addrs), " ", ", "), "[]"))
	}
	return addrs[0], nil
}

// addressOf is the address that a workload is asked about with: its first, or none.
func addressOf(w *workload.Workload) netip.Addr {
	if len(w.Addresses) == 0 {
		return netip.IPv4Unspecified()
	}
	return w.Addresses[0]
}

// addressLike is that of the family of another, if the workload has one: what it is seen to come from by who is at the other.
func addressLike(w *workload.Workload, other netip.Addr) netip.Addr {
	return proxy.SourceAddress(w, addressOf(w), other)
}

func nameOf(w *workload.Workload) string { return w.Namespace + "/" + w.Name }

// notCaptured is the route of what no packet comes to ztun of, and plaintext that of what comes without an identity.
const (
	notCaptured = "not captured"
	plaintext   = "plaintext"
)

const (
	reasonQuestions = "of UDP only questions, to port 53 of other addresses, come to ztun"
	reasonProbe     = "kubelet's probe address, which is exempt: no policy is asked"
	reasonOwn       = "what a pod sends to itself stays in its kernel"
	reasonNoHBONE   = "the destination does not speak HBONE"
	reasonOutside   = "the source is not in the mesh: what it sends goes as it is, without an identity"
)

// InMesh reports whether a ztun, or another node proxy, captures what a workload sends and gets: one that speaks HBONE, or is served here,
// as one may be before the state says that it does.
func (m Mesh) InMesh(w *workload.Workload) bool {
	return w.Protocol == workload.ProtocolHBONE || m.Served != nil && m.Served(w)
}

// uncaptured says why nothing that a workload sends to an address comes to ztun; "": it does.
func (m Mesh) uncaptured(from *workload.Workload, to netip.Addr) string {
	switch {
	case proxy.StaysInPod(from.Addresses, to):
		return reasonOwn
	case !m.InMesh(from):
		return reasonOutside
	case tun.IsProbe(to):
		return reasonProbe
	}
	return ""
}

// UDP tells what becomes of datagrams that a workload sends: questions are answered, nothing else is captured.
func (m Mesh) UDP(from *workload.Workload, to netip.AddrPort) Report {
	r := Report{From: nameOf(from), FromAddress: addressLike(from, to.Addr()).String(), To: to.String(), UDP: true, Route: notCaptured}
	switch r.Reason = m.uncaptured(from, to.Addr()); {
	case r.Reason != "":
	case proxy.IsQuestion(to):
		r.Route = proxy.AnsweredHere.String()
	default:
		r.Reason = reasonQuestions
	}
	return r
}

// Outbound tells what becomes of a TCP flow that a workload opens.
func (m Mesh) Outbound(from *workload.Workload, to netip.AddrPort) Report {
	r := Report{From: nameOf(from), FromAddress: addressLike(from, to.Addr()).String(), To: to.String(), Route: notCaptured}
	switch r.Reason = m.uncaptured(from, to.Addr()); {
	case r.Reason == reasonOutside:
		m.outside(&r, from, to)
		return r
	case r.Reason == reasonOwn && m.InMesh(from) && proxy.CheckPort(to.Port()) != nil: // there ztun itself may listen
		r.refuse(proxy.CheckPort(to.Port()))
		return r
	case r.Reason != "":
		return r
	}
	if err := proxy.CheckAddress(to.Addr()); err != nil {
		r.refuse(err)
		return r
	}
	var trace proxy.Trace
	q := proxy.Query{Source: from, From: addressLike(from, to.Addr()), Target: to, Network: m.Network, Avoid: m.Avoid, Trace: &trace}
	r.Waypoints, q.Rand = m.branches(q)
	d := proxy.Classify(m.State, &q)
	if r.Route = d.Route.String(); d.Route == proxy.AnsweredHere {
		return r
	}
	m.describe(&r, from, to, &trace)
	if trace.Waypoint != nil {
		r.Waypoint, r.SkipsIt = trace.Waypoint.String(), trace.FromWaypoint
	}
	if trace.Gateway != nil {
		r.Gateway = trace.Gateway.String()
	}
	m.pools(&r, from, trace.Endpoints)
	if d.Err != nil {
		r.Error = d.Err.Error()
		return r
	}
	r.NextHop, r.Lookup = d.Told(d.NextHop), d.Lookup
	if d.Destination != nil {
		r.Chosen = nameOf(d.Destination)
		if d.NextHop.Addr().IsValid() {
			r.Address = d.NextHop.Addr().String()
		}
		r.TargetPort = d.NextHop.Port()
	}
	waypoint := trace.Waypoint != nil && !trace.FromWaypoint
	if d.Route != proxy.Passthrough {
		r.Authority, r.Accepts, r.Beyond = d.Authority(), texts(d.Accept()), texts(d.AcceptBeyond())
		if d.Route == proxy.OverHBONE && !waypoint {
			r.TargetPort = d.Target.Port()
		}
	}
	m.remote(&r, from, &d, waypoint)
	return r
}

func (r *Report) refuse(err error) {
	r.Route, r.Reason, r.Error = proxy.Refuse.String(), "", err.Error()
}

// outside tells of a flow from a workload outside the mesh. To a service it comes to any of its endpoints: nobody here picks one.
func (m Mesh) outside(r *Report, from *workload.Workload, to netip.AddrPort) {
	trace := proxy.Trace{Service: m.State.ServiceAt(m.Network, to.Addr(), from.Namespace)}
	if trace.Service == nil {
		trace.Workload = m.State.WorkloadAt(m.Network, to.Addr())
	}
	m.describe(r, from, to, &trace)
	if w := trace.Workload; w != nil {
		at := m.Inbound(from, addressLike(from, to.Addr()), w, to)
		r.Policies, r.Verdict, r.Allowed = at.Policies, at.Verdict, at.Allowed
	}
	if trace.Service == nil {
		return
	}
	judged := false
	for _, e := range m.State.Endpoints(trace.Service.Key()) {
		w, port := e.Workload, proxy.PortOf(e.Workload, trace.Service, to.Port())
		if port == 0 || w.Network != m.Network || len(w.Addresses) == 0 {
			continue
		}
		a := addressLike(w, to.Addr())
		at := m.Inbound(from, addressLike(from, a), w, netip.AddrPortFrom(a, port))
		if judged && at.Verdict != r.Verdict {
			r.Policies, r.Verdict, r.Allowed = nil, "not the same at each endpoint: --inbound says it of one", nil
			return
		}
		judged = true
		r.Policies, r.Verdict, r.Allowed = at.Policies, at.Verdict, at.Allowed
	}
}

// describe says what the target is.
func (m Mesh) describe(r *Report, from *workload.Workload, to netip.AddrPort, trace *proxy.Trace) {
	at := workload.NetworkAddr{Network: m.Network, Addr: to.Addr()}
	for _, v := range m.State.State().Services {
		if !v.VisibleTo(from.Namespace) && slices.Contains(v.VIPs, at) {
			r.Hidden = append(r.Hidden, v.Key().String())
		}
	}
	switch v := trace.Service; {
	case v != nil:
		r.Service, r.Destination, r.Match = v.Hostname, "service "+v.Hostname, "VIP match"
		if !slices.Contains(v.VIPs, at) {
			r.Match = "block of VIPs match"
		}
		if _, has := v.Ports[to.Port()]; !has {
			r.Ports = portsOf(v)
		}
	case trace.Workload != nil:
		r.Destination, r.Match = "workload "+nameOf(trace.Workload), "address match"
	default:
		r.Destination = fmt.Sprintf("nothing that the mesh knows in network %q", m.Network)
	}
	if r.Match != "" {
		r.Match += fmt.Sprintf(", network %q", m.Network)
	}
}

// branches are the waypoints of which one is chosen by weight, and the random number that chooses the heaviest; none if there are not
// several. The numbers are those that the choice by weight is made with.
func (m Mesh) branches(q proxy.Query) (list []Branch, heaviest uint64) {
	v := m.State.ServiceAt(m.Network, q.Target.Addr(), q.Source.Namespace)
	if v == nil || len(v.WeightedWaypoints) < 2 || proxy.IsQuestion(q.Target) {
		return nil, 0
	}
	var sum, at uint64
	for i := range v.WeightedWaypoints {
		sum += uint64(v.WeightedWaypoints[i].Weight)
	}
	if sum == 0 {
		return nil, 0
	}
	var most uint32
	for i := range v.WeightedWaypoints {
		wp := &v.WeightedWaypoints[i]
		b := Branch{Waypoint: wp.Destination.String(), Weight: wp.Weight, Of: sum}
		if wp.Weight > 0 {
			var trace proxy.Trace
			q.Rand, q.Trace = at, &trace
			d := proxy.Classify(m.State, &q)
			b.SkipsIt, b.Route = trace.FromWaypoint, d.Route.String()
			switch {
			case d.Err != nil:
				b.Error = d.Err.Error()
			case d.Destination != nil:
				b.Chosen, b.NextHop = nameOf(d.Destination), d.Told(d.NextHop)
			default:
				b.NextHop = d.Told(d.NextHop)
			}
		}
		if wp.Weight > most {
			most, heaviest = wp.Weight, at
		}
		at += uint64(wp.Weight)
		list = append(list, b)
	}
	return list, heaviest
}

func texts(ids []workload.Identity) (list []string) {
	for _, id := range ids {
		list = append(list, id.String())
	}
	return list
}

// remote says what the destination's policies would decide, as far as they are known here.
func (m Mesh) remote(r *Report, from *workload.Workload, d *proxy.Decision, waypoint bool) {
	if d.Destination == nil {
		return
	}
	if d.Route == proxy.DoubleHBONE {
		r.Verdict = "the gateway of the other network picks the destination, whose node decides"
		return
	}
	if waypoint {
		r.Verdict = "the waypoint decides about the request, and connects to the destination with an identity of its own"
		return
	}
	source := addressLike(from, d.NextHop.Addr()) // that of the tunnel
	req := authz.Request{Source: netip.AddrPortFrom(source, 0), Destination: d.NextHop, Workload: d.Destination}
	if d.Route == proxy.OverHBONE {
		req.Peer, req.Destination = from.Identity(), d.Target
	} else if !m.InMesh(d.Destination) {
		return // nobody asks
	}
	m.judge(r, req)
}

// Inbound tells what policy says of a connection to an address of a workload: over HBONE with the identity of from, if both are in the
// mesh, else in plaintext from an address. from is nil if the source is nobody or hides its identity.
func (m Mesh) Inbound(from *workload.Workload, source netip.Addr, to *workload.Workload, at netip.AddrPort) Report {
	r := Report{From: source.String(), To: at.String(), Inbound: true, Destination: "workload " + nameOf(to), Route: plaintext}
	req := authz.Request{Source: netip.AddrPortFrom(source, 0), Destination: at, Workload: to}
	if from != nil {
		r.From, r.FromAddress = nameOf(from), source.String()
	}
	switch {
	case !m.InMesh(to):
		r.Verdict = "the destination is not in the mesh: nobody enforces policy"
		return r
	case tun.IsProbe(source):
		r.Route, r.Reason = notCaptured, reasonProbe
		return r
	case from == nil:
	case !m.InMesh(from):
		r.Reason = reasonOutside
	case to.Protocol != workload.ProtocolHBONE:
		r.Reason = reasonNoHBONE
	default:
		r.Route, req.Peer = proxy.OverHBONE.String(), from.Identity()
	}
	m.judge(&r, req)
	return r
}

// judge says what the node of the destination decides about a connection, which has come over HBONE if it has a peer.
func (m Mesh) judge(r *Report, req authz.Request) {
	port, err := req.Destination.Port(), error(nil)
	if req.Peer.IsZero() {
		err = cmp.Or(proxy.CheckAddress(req.Source.Addr()), proxy.CheckPort(port))
	} else {
		port, err = proxy.ApplicationPort(req.Workload, port)
	}
	if err != nil {
		r.Verdict, r.Allowed = err.Error(), new(bool)
		return
	}
	req.Destination, req.IgnoreMissing = netip.AddrPortFrom(req.Destination.Addr(), port), m.AllowUnknown
	v, considered := authz.Explain(m.State, &req)
	r.Verdict, r.Allowed = v.String(), &v.Allowed
	for _, c := range considered {
		p := Policy{Key: c.Key, Missing: c.Policy == nil, Matched: c.Matched, Rule: c.Group, Failed: c.Failed}
		if c.Policy != nil {
			p.Scope, p.Action, p.DryRun = c.Policy.Scope.String(), strings.ToUpper(c.Policy.Action.String()), c.Policy.DryRun
		}
		r.Policies = append(r.Policies, p)
	}
}

func portsOf(v *workload.Service) []uint16 { return slices.Sorted(maps.Keys(v.Ports)) }

// pools tells of the services that were picked from, and of each endpoint; those of the highest rank, of which one is picked, are marked.
func (m Mesh) pools(r *Report, from *workload.Workload, list []proxy.EndpointTrace) {
	for len(list) > 0 {
		v := list[0].Service
		n := slices.IndexFunc(list, func(e proxy.EndpointTrace) bool { return e.Service != v })
		if n < 0 {
			n = len(list)
		}
		best := 0
		for _, e := range list[:n] {
			if e.Why.Candidate() {
				best = max(best, e.Rank)
			}
		}
		pool := Pool{Service: v.Hostname, Preset: preset(&v.LoadBalancer)}
		for _, e := range list[:n] {
			c := Choice{Workload: nameOf(e.Workload), Service: v.Hostname, Port: e.Port, Candidate: e.Why.Candidate(), Rank: e.Rank}
			switch {
			case !c.Candidate:
				c.Why = e.Why.String()
			case e.Rank < best:
				c.Candidate, c.Why = false, "others are nearer"
			default:
				pool.Candidates++
			}
			r.Endpoints = append(r.Endpoints, c)
		}
		// Those that are not healthy are no endpoints for anybody else.
		pool.Endpoints = n
		for _, w := range m.State.State().Workloads {
			if _, serves := w.Services[v.Key()]; serves && w.Status == workload.Unhealthy && v.LoadBalancer.Health != workload.AllowAll {
				r.Endpoints = append(r.Endpoints, Choice{Workload: nameOf(w), Service: v.Hostname, Why: "unhealthy"})
				pool.Endpoints++
			}
		}
		if pool.Candidates > 0 && pool.Preset != "" {
			pool.Where = where(&v.LoadBalancer, best, from)
		}
		r.Pools = append(r.Pools, pool)
		list = list[n:]
	}
}

// preset names a way to choose among endpoints as Kubernetes does, where it does.
func preset(lb *workload.LoadBalancer) string {
	if lb.Mode != workload.LBStrict && lb.Mode != workload.LBFailover {
		return ""
	}
	zone := []workload.Scope{workload.ScopeNetwork, workload.ScopeRegion, workload.ScopeZone}
	switch {
	case lb.Mode == workload.LBFailover && slices.Equal(lb.Preferences, zone):
		return "PreferSameZone"
	case lb.Mode == workload.LBFailover && slices.Equal(lb.Preferences, append(zone, workload.ScopeSubzone, workload.ScopeNode)):
		return "PreferSameNode"
	case lb.Mode == workload.LBStrict && slices.Equal(lb.Preferences, []workload.Scope{workload.ScopeNode}):
		return "internalTrafficPolicy Local"
	}
	var names []string
	for _, p := range lb.Preferences {
		names = append(names, p.String())
	}
	return lb.Mode.String() + " by " + strings.Join(names, ", ")
}

// where says what endpoints of a rank have in common with the source.
func where(lb *workload.LoadBalancer, rank int, from *workload.Workload) string {
	prefs := lb.Preferences
	var names []string
	if n := len(prefs); n > 0 && prefs[0] == workload.ScopeNetwork {
		if prefs = prefs[1:]; rank >= n {
			rank -= n
			names = append(names, fmt.Sprintf("network %q", from.Network))
		}
	}
	for _, p := range prefs[:min(rank, len(prefs))] {
		names = append(names, scope(p, from))
	}
	if len(names) == 0 {
		return "elsewhere"
	}
	return "in " + strings.Join(names, ", ")
}

func scope(p workload.Scope, w *workload.Workload) string {
	value := w.Network
	switch p {
	case workload.ScopeRegion:
		value = w.Locality.Region
	case workload.ScopeZone:
		value = w.Locality.Zone
	case workload.ScopeSubzone:
		value = w.Locality.Subzone
	case workload.ScopeNode:
		value = w.Node
	case workload.ScopeCluster:
		value = w.ClusterID
	}
	name := strings.ToLower(p.String())
	if value == "" {
		return name + ` ""`
	}
	return name + " " + value
}

// Outcome is the report in a few words, for tables.
func (r *Report) Outcome() string {
	switch {
	case r.Error != "":
		return "refused: " + r.Error
	case r.Allowed != nil && !*r.Allowed:
		return "denied: " + r.Verdict
	case len(r.Waypoints) > 0:
		var names []string
		for _, b := range r.Waypoints {
			names = append(names, fmt.Sprintf("%s (%d of %d)", b.Waypoint, b.Weight, b.Of))
		}
		return "by waypoint " + strings.Join(names, " or ")
	case r.Waypoint != "" && !r.SkipsIt:
		return r.Route + " by waypoint " + r.Waypoint
	case r.Route == proxy.AnsweredHere.String():
		return "DNS, answered here"
	}
	return r.Route
}

// A Cell is one flow of a matrix.
type Cell struct {
	From    string `json:"from"`
	To      string `json:"to"`
	Service string `json:"service"`
	Outcome string `json:"outcome"`
}

// Matrix tells what becomes of flows from each of the sources to each port of each service that it knows.
func (m Mesh) Matrix(sources []*workload.Workload) (cells []Cell) {
	for _, from := range sources {
		for _, v := range m.State.State().Services {
			if !v.VisibleTo(from.Namespace) {
				continue
			}
			ports := portsOf(v)
			for _, vip := range v.VIPs {
				if vip.Network != m.Network {
					continue
				}
				for _, p := range ports {
					r := m.Outbound(from, netip.AddrPortFrom(vip.Addr, p))
					cells = append(cells, Cell{r.From, r.To, v.Hostname, r.Outcome()})
				}
			}
		}
	}
	return cells
}

// A Grant is one cell of a table of who can talk to a workload.
type Grant struct {
	From    string `json:"from"` // identity; "": none, in plaintext
	Port    uint16 `json:"port"`
	Allowed bool   `json:"allowed"` // nobody denies it
	Verdict string `json:"verdict"`
	Rule    int    `json:"rule,omitempty"` // of the policy in the verdict, from 1
}

// InboundMatrix tells for each identity that a workload in the mesh has, and for none, whether it can talk to a workload: on the ports that it serves, those
// that its policies name, and further ones. The source's address is that of its first workload; of none there is no address.
func (m Mesh) InboundMatrix(to *workload.Workload, further ...uint16) (grants []Grant) {
	ports := m.portsAt(to, further)
	ask := func(from *workload.Workload, source netip.Addr, name string) {
		for _, p := range ports {
			r := m.Inbound(from, source, to, netip.AddrPortFrom(addressOf(to), p))
			g := Grant{From: name, Port: p, Allowed: r.Allowed == nil || *r.Allowed, Verdict: r.Verdict}
			for _, pol := range r.Policies {
				if pol.Matched && strings.HasSuffix(r.Verdict, ": "+pol.Key) {
					g.Rule = pol.Rule
				}
			}
			grants = append(grants, g)
		}
	}
	seen := make(map[workload.Identity]bool)
	for _, w := range m.State.State().Workloads {
		if id := w.Identity(); m.InMesh(w) && !seen[id] {
			seen[id] = true
			ask(w, addressLike(w, addressOf(to)), id.String())
		}
	}
	slices.SortStableFunc(grants, func(a, b Grant) int { return strings.Compare(a.From, b.From) })
	ask(nil, netip.IPv4Unspecified(), "")
	return grants
}

// portsAt are the ports of a workload that somebody may ask about.
func (m Mesh) portsAt(w *workload.Workload, further []uint16) []uint16 {
	ports := make(map[uint16]bool)
	for _, p := range further {
		ports[p] = true
	}
	for key := range w.Services {
		v := m.State.Service(key)
		if v == nil {
			continue
		}
		for p := range v.Ports {
			if target := proxy.PortOf(w, v, p); target != 0 {
				ports[target] = true
			}
		}
	}
	for p := range authz.Applying(m.State, w) {
		if p == nil {
			continue
		}
		for _, g := range p.Groups {
			for _, r := range g {
				for i := range r {
					for _, port := range append(slices.Clone(r[i].DestinationPorts), r[i].NotDestinationPorts...) {
						ports[port] = true
					}
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(ports))
}
