package proxy

import (
	"slices"

	"ztun.dev/ztun/internal/workload"
)

// An endpoint is a workload and the port that serves the service port asked for.
type endpoint struct {
	workload *workload.Workload
	port     uint16
}

// pick chooses an endpoint of a service: among those that can be reached, the best ranked, at random by capacity. waypoint
// relaxes the port: a workload with an application tunnel takes the service port itself.
func pick(s *workload.Snapshot, q *Query, v *workload.Service, port uint16, waypoint bool) (endpoint, bool) {
	k := tableKey{v, port, waypoint}
	if q.Tables != nil && q.Trace == nil && len(q.Exclude) == 0 {
		return q.Tables.of(s, q, k).pick(q.Rand, q.Avoid)
	}
	var best int
	var d draw
	told := 0
	if q.Trace != nil {
		told = len(q.Trace.Endpoints)
	}
	eachCandidate(s, q, k, func(e endpoint, rank int) {
		if d.n > 0 && rank < best {
			return
		}
		if rank > best || d.n == 0 {
			best, d = rank, newDraw(q.Rand, q.Avoid)
		}
		d.enter(e)
	})
	if q.Trace != nil && d.avoids() {
		q.Trace.avoid(told, q.Avoid)
	}
	return d.winner(), d.n > 0
}

// A draw chooses among endpoints in one pass, by capacity: each replaces the chosen one with the probability of its weight in the sum so far.
// Those that are to be avoided are left out, unless they are more than half: then it is not the endpoints that fail.
type draw struct {
	random     uint64
	avoid      []*workload.Workload
	n, avoided int
	all, rest  struct {
		sum    uint64
		chosen endpoint
	}
}

func newDraw(random uint64, avoid []*workload.Workload) draw {
	return draw{random: random, avoid: avoid}
}

// avoids reports whether some are left out.
func (d *draw) avoids() bool { return d.avoided > 0 && 2*d.avoided <= d.n }

func (d *draw) enter(e endpoint) {
	d.n++
	d.random = mix(d.random)
	weight := uint64(e.workload.Capacity)
	if d.all.sum += weight; d.random%d.all.sum < weight {
		d.all.chosen = e
	}
	if slices.Contains(d.avoid, e.workload) {
		d.avoided++
	} else if d.rest.sum += weight; d.random%d.rest.sum < weight {
		d.rest.chosen = e
	}
}

func (d *draw) winner() endpoint {
	if d.avoids() {
		return d.rest.chosen
	}
	return d.all.chosen
}

// eachCandidate calls yield for each endpoint that can be picked, with its rank, and tells the trace of all.
func eachCandidate(s *workload.Snapshot, q *Query, k tableKey, yield func(e endpoint, rank int)) {
	target, has := k.service.Ports[k.port]
	if !has && !k.waypoint {
		return
	}
	for _, ep := range s.Endpoints(k.service.Key()) {
		w := ep.Workload
		e, why := usable(q, w, ep.Ports[k.port], target, k.port, k.waypoint)
		r, fits := 0, false
		if why == candidate {
			if r, fits = rank(&k.service.LoadBalancer, q.Source, w); !fits {
				why = wrongPlace
			}
		}
		if q.Trace != nil {
			q.Trace.Endpoints = append(q.Trace.Endpoints, EndpointTrace{Service: k.service, Workload: w, Port: e.port, Rank: r, Why: why})
		}
		if why == candidate {
			yield(e, r)
		}
	}
}

// usable says whether an endpoint can be reached, and at which port.
func usable(q *Query, w *workload.Workload, own, target, port uint16, waypoint bool) (endpoint, Fit) {
	if slices.Contains(q.Exclude, w) {
		return endpoint{}, excluded
	}
	if len(w.Addresses) == 0 && w.Hostname == "" && (w.Network == q.Source.Network || w.NetworkGateway == nil) {
		return endpoint{}, noAddress
	}
	e := endpoint{workload: w}
	switch {
	case own != 0:
		e.port = own
	case target != 0:
		e.port = target
	case waypoint && w.AppTunnel != nil && w.AppTunnel.Port != 0:
		e.port = port
	default:
		return endpoint{}, noPort
	}
	if w.Capacity == 0 {
		return e, noCapacity
	}
	return e, candidate
}

// rank counts the preferences that an endpoint fulfils, in order, up to the first that it does not. A network preference in
// the first place weighs more than all others together, and missing it does not end the count.
func rank(lb *workload.LoadBalancer, source, w *workload.Workload) (int, bool) {
	if lb.Mode != workload.LBStrict && lb.Mode != workload.LBFailover {
		return 0, true
	}
	n, bonus := 0, 0
	for i, p := range lb.Preferences {
		if matchesScope(p, source, w) && (lb.Mode != workload.LBStrict || isPlaced(p, w)) {
			n++
			if i == 0 && p == workload.ScopeNetwork {
				bonus = len(lb.Preferences) - 1
			}
		} else if i > 0 || p != workload.ScopeNetwork {
			break
		}
	}
	return n + bonus, lb.Mode == workload.LBFailover || n == len(lb.Preferences)
}

// isPlaced reports whether it is known where a workload is. Strict preferences never match places that are not.
func isPlaced(p workload.Scope, w *workload.Workload) bool {
	switch p {
	case workload.ScopeRegion:
		return w.Locality.Region != ""
	case workload.ScopeZone:
		return w.Locality.Zone != ""
	case workload.ScopeSubzone:
		return w.Locality.Subzone != ""
	}
	return true
}

func matchesScope(p workload.Scope, a, b *workload.Workload) bool {
	switch p {
	case workload.ScopeRegion:
		return a.Locality.Region == b.Locality.Region
	case workload.ScopeZone:
		return a.Locality.Zone == b.Locality.Zone
	case workload.ScopeSubzone:
		return a.Locality.Subzone == b.Locality.Subzone
	case workload.ScopeNode:
		return a.Node == b.Node && a.ClusterID == b.ClusterID
	case workload.ScopeCluster:
		return a.ClusterID == b.ClusterID
	}
	return a.Network == b.Network
}

// mix is a step of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
