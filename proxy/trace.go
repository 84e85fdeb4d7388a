package proxy

import (
	"slices"

	"ztun.dev/ztun/internal/workload"
)

// A Trace is what Classify looked at on the way to its decision: the same steps, told.
type Trace struct {
	Service      *workload.Service        // that the target is a virtual address of; nil if none
	Workload     *workload.Workload       // that the target is an address of; nil if none
	Waypoint     *workload.GatewayAddress // of that service or workload; nil if none
	FromWaypoint bool                     // the source is the waypoint, which is skipped then
	Gateway      *workload.GatewayAddress // of the network that the endpoint or waypoint is on; nil if it is the source's own
	Endpoints    []EndpointTrace          // of the services that were picked from, in the order of their uids
}

// avoid marks, from an index of Endpoints on, those that were passed over because they failed.
func (t *Trace) avoid(from int, list []*workload.Workload) {
	for i := range t.Endpoints[from:] {
		if e := &t.Endpoints[from+i]; e.Why == candidate && slices.Contains(list, e.Workload) {
			e.Why = avoided
		}
	}
}

// An EndpointTrace is what became of one endpoint.
type EndpointTrace struct {
	Service  *workload.Service
	Workload *workload.Workload
	Port     uint16
	Rank     int // among the candidates: the highest are picked from
	Why      Fit
}

// A Fit says whether an endpoint could be picked, or why not.
type Fit uint8

const (
	candidate Fit = iota
	excluded
	avoided
	noAddress
	noPort
	noCapacity
	wrongPlace
)

var fitNames = []string{
	"candidate", "failed before", "failed a moment ago, and is passed over for a while", "has no address and no gateway to its network", "has no port for the service port", "has capacity 0",
	"is not where the service wants its endpoints (strict preferences)",
}

// Candidate reports whether the endpoint could be picked.
func (f Fit) Candidate() bool { return f == candidate }

func (f Fit) String() string { return fitNames[f] }
