// Package explain tells why a flow goes where it goes: the decisions of proxy and authz on a state, with what they were made of.
//
// It decides nothing by itself: [Outbound] is proxy.Classify with a trace, [Inbound] authz.Evaluate with its parts.
package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
)

// A Mesh is the state that is asked.
type Mesh struct {
	State   *workload.Snapshot
	Network string // of the node that the source is on

	AllowUnknown bool // policies that have not arrived are left out (ZTUN_UNKNOWN_POLICY=allow)
}

// A Report is what becomes of one flow. Its JSON form is stable: keys only get added.
type Report struct {
	From        string   `json:"from"` // namespace/name, or the address of a source that is no workload
	FromAddress string   `json:"fromAddress,omitempty"`
	To          string   `json:"to"`
	Inbound     bool     `json:"inbound,omitempty"`
	Destination string   `json:"destination,omitempty"` // what the address is
	Service     string   `json:"service,omitempty"`     // hostname
	Waypoint    string   `json:"waypoint,omitempty"`
	SkipsIt     bool     `json:"waypointSkipped,omitempty"` // the source is the waypoint
	Gateway     string   `json:"gateway,omitempty"`         // to the network of the endpoint or waypoint
	Ports       []uint16 `json:"servicePorts,omitempty"`    // of the service, where it does not have the one asked for
	Endpoints   []Choice `json:"endpoints,omitempty"`
	Route       string   `json:"route,omitempty"` // passthrough, HBONE or refused
	Chosen      string   `json:"chosen,omitempty"`
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

// Target returns the address that text means for a client of a namespace: ADDRESS:PORT, HOSTNAME:PORT of a service, or
// NAMESPACE/NAME:PORT of a workload. like is an address of the family that is wanted where there is a choice.
func (m Mesh) Target(text, namespace string, like netip.Addr) (netip.AddrPort, error) {
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
	var addrs []netip.Addr
	if name := text[:i]; strings.Contains(name, "/") {
		w, err := m.Find(name)
		if err != nil {
			return netip.AddrPort{}, err
		}
		addrs = w.Addresses
	} else if v := m.State.ServiceNamed(strings.ToLower(name), namespace); v != nil {
		for _, vip := range v.VIPs {
			if vip.Network == m.Network {
				addrs = append(addrs, vip.Addr)
			}
		}
	} else {
		return netip.AddrPort{}, fmt.Errorf("the state has no service %s that is visible to namespace %s", name, namespace)
	}
	for _, a := range addrs {
		if a.Is4() == like.Is4() {
			return netip.AddrPortFrom(a, port.Port()), nil
		}
	}
	if len(addrs) == 0 {
		return netip.AddrPort{}, fmt.Errorf("%s has no address in network %q", text[:i], m.Network)
	}
	return netip.AddrPortFrom(addrs[0], port.Port()), nil
}

// AddressOf is the address that a workload is asked about with: its first, or none.
func AddressOf(w *workload.Workload) netip.Addr {
	if len(w.Addresses) == 0 {
		return netip.IPv4Unspecified()
	}
	return w.Addresses[0]
}

func nameOf(w *workload.Workload) string { return w.Namespace + "/" + w.Name }

// Outbound tells what becomes of a flow that a workload opens.
func (m Mesh) Outbound(from *workload.Workload, to netip.AddrPort) Report {
	var trace proxy.Trace
	q := proxy.Query{Source: from, From: AddressOf(from), Target: to, Network: m.Network, Trace: &trace}
	d := proxy.Classify(m.State, &q)
	r := Report{From: nameOf(from), FromAddress: q.From.String(), To: to.String(), Route: d.Route.String()}
	switch {
	case trace.Service != nil:
		r.Service, r.Destination = trace.Service.Hostname, "service "+trace.Service.Hostname
		if _, has := trace.Service.Ports[to.Port()]; !has {
			r.Ports = portsOf(trace.Service)
		}
	case trace.Workload != nil:
		r.Destination = "workload " + nameOf(trace.Workload)
	default:
		r.Destination = fmt.Sprintf("nothing that the mesh knows in network %q", m.Network)
	}
	if trace.Waypoint != nil {
		r.Waypoint, r.SkipsIt = trace.Waypoint.String(), trace.FromWaypoint
	}
	if trace.Gateway != nil {
		r.Gateway = trace.Gateway.String()
	}
	r.Endpoints = choices(trace.Endpoints)
	if d.Err != nil {
		r.Error = d.Err.Error()
		return r
	}
	r.NextHop, r.Lookup = d.Told(d.NextHop), d.Lookup
	if d.Destination != nil {
		r.Chosen = nameOf(d.Destination)
	}
	if d.Route != proxy.Passthrough {
		r.Authority, r.Accepts, r.Beyond = d.Authority(), texts(d.Accept()), texts(d.AcceptBeyond())
	}
	m.remote(&r, from, &d, trace.Waypoint != nil && !trace.FromWaypoint)
	return r
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
	if d.Route != proxy.OverHBONE {
		return // it is outside the mesh: nobody asks
	}
	m.judge(r, &authz.Request{Source: netip.AddrPortFrom(AddressOf(from), 0), Peer: from.Identity(), Destination: d.Target, Workload: d.Destination})
}

// Inbound tells what policy says of a connection to a workload: over HBONE with the identity of from, or in plaintext from an address.
func (m Mesh) Inbound(from *workload.Workload, source netip.Addr, to *workload.Workload, port uint16) Report {
	r := Report{From: source.String(), To: netip.AddrPortFrom(AddressOf(to), port).String(), Inbound: true, Destination: "workload " + nameOf(to), Route: "plaintext"}
	req := authz.Request{Source: netip.AddrPortFrom(source, 0), Destination: netip.AddrPortFrom(AddressOf(to), port), Workload: to}
	if from != nil {
		r.From, r.FromAddress, r.Route, req.Peer = nameOf(from), source.String(), "HBONE", from.Identity()
	}
	m.judge(&r, &req)
	return r
}

func (m Mesh) judge(r *Report, req *authz.Request) {
	req.IgnoreMissing = m.AllowUnknown
	v, considered := authz.Explain(m.State, req)
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

// choices are the endpoints; those of the highest rank, of which one is picked, are marked.
func choices(list []proxy.EndpointTrace) (out []Choice) {
	best := 0
	for _, e := range list {
		if e.Why.Candidate() {
			best = max(best, e.Rank)
		}
	}
	for _, e := range list {
		c := Choice{Workload: nameOf(e.Workload), Service: e.Service.Hostname, Port: e.Port, Candidate: e.Why.Candidate(), Rank: e.Rank}
		switch {
		case !c.Candidate:
			c.Why = e.Why.String()
		case e.Rank < best:
			c.Candidate, c.Why = false, "others are nearer"
		}
		out = append(out, c)
	}
	return out
}

// Outcome is the report in a few words, for tables.
func (r *Report) Outcome() string {
	switch {
	case r.Error != "":
		return "refused: " + r.Error
	case r.Allowed != nil && !*r.Allowed:
		return "denied: " + r.Verdict
	case r.Waypoint != "" && !r.SkipsIt:
		return "HBONE by waypoint " + r.Waypoint
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
