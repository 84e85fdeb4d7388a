package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

// A Route is how a flow travels.
type Route uint8

// The routes. The zero value refuses the flow.
const (
	Refuse       Route = iota // Decision.Err says why
	Passthrough               // plain TCP to NextHop
	OverHBONE                 // a stream to Target through NextHop
	DoubleHBONE               // a stream to Host on another network, within a stream to its gateway at NextHop
	AnsweredHere              // by the DNS proxy: nothing is connected to
)

func (r Route) String() string {
	switch r {
	case Passthrough:
		return "passthrough"
	case OverHBONE:
		return "HBONE"
	case DoubleHBONE:
		return "double HBONE"
	case AnsweredHere:
		return "DNS"
	}
	return "refused"
}

// A Decision is what becomes of an outbound flow.
type Decision struct {
	Route       Route
	NextHop     netip.AddrPort     // the address that is connected to
	Target      netip.AddrPort     // over HBONE: the authority; over double HBONE its port
	Lookup      string             // hostname of Destination, which has no address: until it is found NextHop, or also Target, is only a port
	Host        string             // over double HBONE: the hostname of the authority, of both streams
	Service     *workload.Service  // that the flow was addressed to; nil if none
	Destination *workload.Workload // at NextHop; nil if unknown
	accepts     *workload.Service  // whose names the peer may present beside the identity of Destination
	beyond      *workload.Service  // over double HBONE: of whose names the peer beyond the gateway has to present one
	near        netip.Addr         // with Lookup: addresses of its family are preferred
	Err         error              // why the flow is refused
}

// Accept lists the identities of which the peer has to present one.
func (d *Decision) Accept() []workload.Identity {
	if d.Destination == nil {
		return nil
	}
	ids := []workload.Identity{d.Destination.Identity()}
	if d.accepts != nil {
		ids = append(append(ids[:0:0], d.accepts.SubjectAltNames...), ids...)
	}
	return ids
}

// AcceptBeyond lists the identities of which the peer beyond a gateway has to present one: those of the service, all of whose
// workloads on other networks are among them. That of no single workload is added, for it is the gateway that picks one.
func (d *Decision) AcceptBeyond() []workload.Identity {
	if d.beyond == nil {
		return nil
	}
	return d.beyond.SubjectAltNames
}

// Authority is what a CONNECT asks for.
func (d *Decision) Authority() string {
	if d.Route == DoubleHBONE {
		return net.JoinHostPort(d.Host, strconv.Itoa(int(d.Target.Port())))
	}
	return d.Told(d.Target)
}

// Told is NextHop or Target as text: with the hostname, if its address has not been found yet.
func (d *Decision) Told(a netip.AddrPort) string {
	if !a.Addr().IsValid() {
		return net.JoinHostPort(d.Lookup, strconv.Itoa(int(a.Port())))
	}
	return a.String()
}

// A NoEndpointError refuses a flow to a service without an endpoint that could take it.
type NoEndpointError struct{ Target netip.AddrPort }

func (e *NoEndpointError) Error() string { return "no healthy upstream: " + e.Target.String() }

// errSelfCall refuses flows that would lead a proxy to itself.
var errSelfCall = errors.New("attempted recursive call to ourselves")

// A routeError refuses a flow for which the state has no way.
type routeError struct {
	reason telemetry.Reason
	text   string
}

func (e *routeError) Error() string { return e.text }

func noRoute(reason telemetry.Reason, format string, args ...any) error {
	return &routeError{reason, fmt.Sprintf(format, args...)}
}

func refuse(err error) Decision { return Decision{Err: err} }

// A Query is what Classify decides by.
type Query struct {
	Source  *workload.Workload   // the pod; never looked up by address
	From    netip.Addr           // the application's address
	Target  netip.AddrPort       // as the application addressed it
	Network string               // of this node
	Exclude []*workload.Workload // endpoints that are not picked
	Avoid   []*workload.Workload // endpoints that are not picked while they are no more than half of those that could be
	Rand    uint64               // chooses among endpoints
	Tables  *Tables              // of the same source and snapshot, for picks of an endpoint; nil: none
	Trace   *Trace               // is told of each step; nil on the data path
}

// Classify decides about an outbound flow. It is a pure function of its arguments.
//
// The destination is resolved once: a service by its virtual address, else a workload, else unknown, which passes through. What
// is addressed to a service goes through the service's waypoint, if it has one, what is addressed to a workload through the
// workload's; the source's own waypoint plays no part. Questions are answered here whatever is at the address.
func Classify(s *workload.Snapshot, q *Query) Decision {
	if IsQuestion(q.Target) {
		return Decision{Route: AnsweredHere}
	}
	if illegalPort(q.Target.Port()) && (q.Target.Addr().IsLoopback() || slices.Contains(q.Source.Addresses, q.Target.Addr())) {
		return refuse(errSelfCall)
	}
	if v := s.ServiceAt(q.Network, q.Target.Addr(), q.Source.Namespace); v != nil {
		if q.Trace != nil {
			q.Trace.Service = v
		}
		return classifyService(s, q, v)
	}
	if w := s.WorkloadAt(q.Network, q.Target.Addr()); w != nil {
		if q.Trace != nil {
			q.Trace.Workload = w
		}
		return classifyWorkload(s, q, w)
	}
	return Decision{Route: Passthrough, NextHop: q.Target}
}

func classifyService(s *workload.Snapshot, q *Query, v *workload.Service) Decision {
	if wp := serviceWaypoint(v, q.Rand); wp != nil && !skipsWaypoint(s, q, wp) {
		return throughWaypoint(s, q, wp, v)
	}
	if v.LoadBalancer.Mode == workload.LBPassthrough {
		return Decision{Route: Passthrough, NextHop: q.Target}
	}
	e, ok := pick(s, q, v, q.Target.Port(), false)
	if !ok {
		d := refuse(&NoEndpointError{q.Target})
		d.Service = v
		return d
	}
	return direct(s, q, e, v)
}

func classifyWorkload(s *workload.Snapshot, q *Query, w *workload.Workload) Decision {
	if w.Network != q.Source.Network {
		return refuse(noRoute(telemetry.ReasonNoRoute, "no service for target address: %s", q.Target))
	}
	if wp := w.Waypoint; wp != nil && !skipsWaypoint(s, q, wp) {
		return throughWaypoint(s, q, wp, nil)
	}
	return direct(s, q, endpoint{w, q.Target.Port()}, nil)
}

// direct is the way to an endpoint without a waypoint between.
func direct(s *workload.Snapshot, q *Query, e endpoint, v *workload.Service) Decision {
	w := e.workload
	if w.Network != q.Source.Network {
		return throughGateway(s, q, w, v, v)
	}
	ip := address(w, v, q.Target.Addr())
	if !ip.IsValid() && w.Hostname == "" {
		return Decision{Service: v, Destination: w, Err: noDestination(w)}
	}
	d := Decision{Route: Passthrough, NextHop: netip.AddrPortFrom(ip, e.port), Service: v, Destination: w, accepts: v}
	if w.Protocol == workload.ProtocolHBONE {
		d.Route, d.Target, d.NextHop = OverHBONE, d.NextHop, netip.AddrPortFrom(ip, hbone.Port)
	} else if q.Source.UID == w.UID && illegalPort(e.port) {
		return Decision{Service: v, Destination: w, Err: errSelfCall}
	}
	return d.reach(ip, q.Target.Addr())
}

// reach leaves a destination without an address to a resolver. near has the family that is preferred.
func (d Decision) reach(ip, near netip.Addr) Decision {
	if !ip.IsValid() {
		d.Lookup, d.near = d.Destination.Hostname, near
	}
	return d
}

// found completes a decision by the address of Lookup.
func (d *Decision) found(ip netip.Addr) {
	if d.Route == OverHBONE && !d.Target.Addr().IsValid() {
		d.Target = netip.AddrPortFrom(ip, d.Target.Port())
	}
	d.NextHop = netip.AddrPortFrom(ip, d.NextHop.Port())
}

func noDestination(w *workload.Workload) error {
	return noRoute(telemetry.ReasonNoRoute, "no valid routing destination for workload: Workload{%s with uid %s (%s)}", w.Name, w.UID, w.Protocol)
}

// address picks the address of a workload that a flow to target goes to: target's own, if it is one of them; of those that the
// service's families allow, the first of target's family, else the first.
func address(w *workload.Workload, v *workload.Service, target netip.Addr) netip.Addr {
	var best netip.Addr
	for _, a := range w.Addresses {
		switch {
		case a == target:
			return a
		case v != nil && v.IPFamilies == workload.FamilyIPv4 && !a.Is4(), v != nil && v.IPFamilies == workload.FamilyIPv6 && a.Is4():
		case !best.IsValid(), best.Is4() != target.Is4() && a.Is4() == target.Is4():
			best = a
		}
	}
	return best
}

// SourceAddress is the address of a workload that its tunnel to a next hop comes from. It is that of the flow if that has the family of the next
// hop, else the first of the workload that has it, if there is one.
func SourceAddress(w *workload.Workload, flow, nextHop netip.Addr) netip.Addr {
	if !nextHop.IsValid() || flow.Is4() == nextHop.Is4() {
		return flow
	}
	for _, a := range w.Addresses {
		if a.Is4() == nextHop.Is4() {
			return a
		}
	}
	return flow
}

// serviceWaypoint chooses the waypoint of a service: by weight, if it has several.
func serviceWaypoint(v *workload.Service, random uint64) *workload.GatewayAddress {
	var sum uint64
	for i := range v.WeightedWaypoints {
		sum += uint64(v.WeightedWaypoints[i].Weight)
	}
	if sum == 0 {
		return v.Waypoint
	}
	at := random % sum
	for i := range v.WeightedWaypoints {
		if w := uint64(v.WeightedWaypoints[i].Weight); at < w {
			return &v.WeightedWaypoints[i].Destination
		} else {
			at -= w
		}
	}
	return v.Waypoint
}

// throughWaypoint leads a flow to a waypoint, which gets the address that the application used. A waypoint that cannot be found
// refuses the flow: it is never bypassed.
func throughWaypoint(s *workload.Snapshot, q *Query, wp *workload.GatewayAddress, v *workload.Service) Decision {
	e, via, target, ok := resolve(s, q, wp, true)
	if !ok {
		return Decision{Service: v, Err: noRoute(telemetry.ReasonWaypoint, "unknown waypoint: waypoint %s not found", wp)}
	}
	w := e.workload
	if w.Network != q.Source.Network {
		return throughGateway(s, q, w, v, via)
	}
	ip := address(w, via, target)
	if !ip.IsValid() && w.Hostname == "" {
		return Decision{Service: v, Destination: w, Err: noDestination(w)}
	}
	return Decision{Route: OverHBONE, NextHop: netip.AddrPortFrom(ip, e.port), Target: q.Target, Service: v, Destination: w, accepts: via}.reach(ip, target)
}

// throughGateway leads a flow for a service to the gateway of the network that its endpoint, or its waypoint, is on: the gateway picks
// one by the service's name. beyond is the service whose names the peer there has to have.
func throughGateway(s *workload.Snapshot, q *Query, w *workload.Workload, v, beyond *workload.Service) Decision {
	if v == nil {
		return Decision{Destination: w, Err: noRoute(telemetry.ReasonNoRoute, "no service for target address: %s", q.Target)}
	}
	g := w.NetworkGateway
	if g == nil {
		return Decision{Service: v, Destination: w, Err: noDestination(w)}
	}
	if q.Trace != nil {
		q.Trace.Gateway = g
	}
	e, via, target, ok := resolve(s, q, g, false)
	if !ok {
		return Decision{Service: v, Err: noRoute(telemetry.ReasonGateway, "unknown network gateway: network gateway %s not found", g)}
	}
	ip := address(e.workload, via, target)
	if !ip.IsValid() && e.workload.Hostname == "" {
		return Decision{Service: v, Destination: e.workload, Err: noDestination(e.workload)}
	}
	return Decision{
		Route: DoubleHBONE, NextHop: netip.AddrPortFrom(ip, e.port), Target: q.Target, Host: v.Hostname, Service: v, Destination: e.workload,
		accepts: via, beyond: beyond,
	}.reach(ip, target)
}

// resolve finds the workload behind the address of a waypoint or gateway and, if that names a service, the service.
func resolve(s *workload.Snapshot, q *Query, g *workload.GatewayAddress, waypoint bool) (e endpoint, via *workload.Service, target netip.Addr, ok bool) {
	target = q.Target.Addr() // a hostname follows the family of the application's address
	var w *workload.Workload
	if g.Hostname == (workload.ServiceKey{}) {
		target = g.Address.Addr
		via = s.ServiceAt(g.Address.Network, target, q.Source.Namespace)
		w = s.WorkloadAt(g.Address.Network, target)
	} else {
		via = s.Service(g.Hostname)
		w = s.WorkloadNamed(g.Hostname)
	}
	switch {
	case via != nil:
		e, ok = pick(s, q, via, g.Port, waypoint)
	case w != nil && !slices.Contains(q.Exclude, w):
		e, ok = endpoint{w, g.Port}, true
	}
	return e, via, target, ok
}

// skipsWaypoint reports whether a flow goes past the waypoint because it comes from it.
func skipsWaypoint(s *workload.Snapshot, q *Query, g *workload.GatewayAddress) bool {
	is := isWaypoint(s, q, g)
	if q.Trace != nil {
		q.Trace.Waypoint, q.Trace.FromWaypoint = g, is
	}
	return is
}

// isWaypoint reports whether the source is the waypoint itself: it has the identity and address of one of its workloads.
func isWaypoint(s *workload.Snapshot, q *Query, g *workload.GatewayAddress) bool {
	is := func(w *workload.Workload) bool {
		if w == nil || w.Identity() != q.Source.Identity() {
			return false
		}
		return slices.Contains(w.Addresses, q.From)
	}
	var via *workload.Service
	if g.Hostname == (workload.ServiceKey{}) {
		if is(s.WorkloadAt(g.Address.Network, g.Address.Addr)) {
			return true
		}
		via = s.ServiceAt(g.Address.Network, g.Address.Addr, q.Source.Namespace)
	} else {
		if is(s.WorkloadNamed(g.Hostname)) {
			return true
		}
		via = s.Service(g.Hostname)
	}
	if via == nil {
		return false
	}
	for _, e := range s.Endpoints(via.Key()) {
		if is(e.Workload) {
			return true
		}
	}
	return false
}
