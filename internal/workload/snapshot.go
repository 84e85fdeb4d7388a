package workload

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

// A State is the mesh as lists: what a Snapshot is built of.
type State struct {
	Workloads []*Workload
	Services  []*Service
	Policies  []*Policy
}

// A Snapshot is the mesh at one moment, indexed. It is immutable; a nil *Snapshot is an empty one.
type Snapshot struct {
	generation uint64

	state     State
	workloads map[string]*Workload
	addrs     map[NetworkAddr]*Workload // the preferred one, if several share an address
	hosts     map[ServiceKey]*Workload  // by namespace and hostname
	locals    map[localKey][]*Workload  // by uid
	services  map[ServiceKey]*Service
	vips      map[NetworkAddr][]*Service   // by rank: canonical first, then by key
	cidrs     map[NetworkPrefix][]*Service // by rank, as vips
	lengths   []prefixLength               // of cidrs, most specific first
	names     map[string][]*Service        // by hostname; by rank, as vips
	endpoints map[ServiceKey][]Endpoint    // by uid of the workload
	policies  map[string]*Policy
	byScope   map[string][]*Policy // namespace, or "" for global ones; by key
}

type localKey struct{ name, namespace, serviceAccount string }

// A prefixLength is one that blocks of addresses have, of a family.
type prefixLength struct {
	bits int
	is4  bool
}

// An Endpoint is a workload that serves a service.
type Endpoint struct {
	Workload *Workload
	Ports    PortMap // the workload's own mapping for this service
}

// NewSnapshot indexes a state, which belongs to the Snapshot from then on. Of objects with the same key the last one counts.
func NewSnapshot(st State) *Snapshot {
	s := &Snapshot{
		workloads: make(map[string]*Workload, len(st.Workloads)),
		addrs:     make(map[NetworkAddr]*Workload, len(st.Workloads)),
		hosts:     make(map[ServiceKey]*Workload),
		locals:    make(map[localKey][]*Workload, len(st.Workloads)),
		services:  make(map[ServiceKey]*Service, len(st.Services)),
		vips:      make(map[NetworkAddr][]*Service, len(st.Services)),
		names:     make(map[string][]*Service, len(st.Services)),
		cidrs:     make(map[NetworkPrefix][]*Service),
		endpoints: make(map[ServiceKey][]Endpoint, len(st.Services)),
		policies:  make(map[string]*Policy, len(st.Policies)),
		byScope:   make(map[string][]*Policy),
	}
	for _, w := range st.Workloads {
		s.workloads[w.UID] = w
	}
	for _, v := range st.Services {
		s.services[v.Key()] = v
	}
	for _, p := range st.Policies {
		s.policies[p.Key()] = p
	}
	for _, uid := range sortedKeys(s.workloads) {
		s.addWorkload(s.workloads[uid])
	}
	for _, v := range s.services {
		s.addService(v)
	}
	for _, key := range sortedKeys(s.policies) {
		p := s.policies[key]
		s.state.Policies = append(s.state.Policies, p)
		switch p.Scope {
		case ScopePolicyGlobal:
			s.byScope[""] = append(s.byScope[""], p)
		case ScopePolicyNamespace:
			s.byScope[p.Namespace] = append(s.byScope[p.Namespace], p)
		}
	}
	slices.SortFunc(s.state.Services, func(a, b *Service) int { return compareKeys(a.Key(), b.Key()) })
	for _, list := range s.vips {
		slices.SortFunc(list, rankServices)
	}
	for _, list := range s.names {
		slices.SortFunc(list, rankServices)
	}
	for p, list := range s.cidrs {
		slices.SortFunc(list, rankServices)
		if l := (prefixLength{p.Prefix.Bits(), p.Prefix.Addr().Is4()}); !slices.Contains(s.lengths, l) {
			s.lengths = append(s.lengths, l)
		}
	}
	slices.SortFunc(s.lengths, func(a, b prefixLength) int { return cmp.Compare(b.bits, a.bits) })
	return s
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (s *Snapshot) addWorkload(w *Workload) {
	s.state.Workloads = append(s.state.Workloads, w)
	if w.NetworkMode != NetworkHost {
		for _, a := range w.Addresses {
			k := NetworkAddr{w.Network, a}
			if old := s.addrs[k]; old == nil || addressRank(w) >= addressRank(old) {
				s.addrs[k] = w
			}
		}
	}
	local := localKey{w.Name, w.Namespace, w.ServiceAccount}
	s.locals[local] = append(s.locals[local], w)
	if w.Hostname != "" {
		s.hosts[ServiceKey{w.Namespace, w.Hostname}] = w
	}
	for key, ports := range w.Services {
		v := s.services[key]
		if v == nil || w.Status == Unhealthy && v.LoadBalancer.Health != AllowAll {
			continue
		}
		s.endpoints[key] = append(s.endpoints[key], Endpoint{w, ports})
	}
}

// addressRank orders workloads that share an address: pods before others, HBONE before TCP.
func addressRank(w *Workload) int {
	rank := 0
	if strings.Contains(w.UID, "//Pod/") {
		rank += 2
	}
	if w.Protocol == ProtocolHBONE {
		rank++
	}
	return rank
}

func (s *Snapshot) addService(v *Service) {
	s.state.Services = append(s.state.Services, v)
	for _, a := range v.VIPs {
		s.vips[a] = append(s.vips[a], v)
	}
	for _, p := range v.CIDRVIPs {
		if !slices.Contains(s.cidrs[p], v) {
			s.cidrs[p] = append(s.cidrs[p], v)
		}
	}
	s.names[v.Hostname] = append(s.names[v.Hostname], v)
}

// rankServices is the order of choice among services of other namespaces than the client's: canonical, then by key. It does
// not depend on the order of arrival, so it is the same on every node.
func rankServices(a, b *Service) int {
	if a.Canonical != b.Canonical {
		if a.Canonical {
			return -1
		}
		return 1
	}
	return compareKeys(a.Key(), b.Key())
}

func compareKeys(a, b ServiceKey) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Hostname, b.Hostname))
}

// choose picks the service that a client of the namespace means: its own namespace's, else the first in rank.
func choose(list []*Service, namespace string) *Service {
	var first *Service
	for _, v := range list {
		switch {
		case !v.VisibleTo(namespace):
		case v.Namespace == namespace:
			return v
		case first == nil:
			first = v
		}
	}
	return first
}

// Generation tells which of two snapshots of a Store is the newer one: its number is larger. That of a nil Snapshot is 0.
func (s *Snapshot) Generation() uint64 {
	if s == nil {
		return 0
	}
	return s.generation
}

// State returns the objects of the snapshot, sorted by key. The lists belong to the snapshot.
func (s *Snapshot) State() State {
	if s == nil {
		return State{}
	}
	return s.state
}

// Workload finds a workload by its uid; nil if there is none, as in all lookups.
func (s *Snapshot) Workload(uid string) *Workload {
	if s == nil {
		return nil
	}
	return s.workloads[uid]
}

// WorkloadAt finds the workload with an address. Host-network pods have none.
func (s *Snapshot) WorkloadAt(network string, a netip.Addr) *Workload {
	if s == nil {
		return nil
	}
	return s.addrs[NetworkAddr{network, a}]
}

// WorkloadNamed finds a workload by namespace and hostname.
func (s *Snapshot) WorkloadNamed(key ServiceKey) *Workload {
	if s == nil {
		return nil
	}
	return s.hosts[key]
}

// Local finds the workload that a pod is. It is never looked up by address.
func (s *Snapshot) Local(c *Client) *Workload {
	if s == nil {
		return nil
	}
	if w := s.workloads[c.UID]; w != nil && c.UID != "" {
		return w
	}
	for _, w := range s.locals[localKey{c.Name, c.Namespace, c.ServiceAccount}] {
		if c.Node == "" || w.Node == "" || w.Node == c.Node {
			return w
		}
	}
	return nil
}

// Service finds a service by key.
func (s *Snapshot) Service(key ServiceKey) *Service {
	if s == nil {
		return nil
	}
	return s.services[key]
}

// ServiceAt finds the service that a client of the namespace reaches at a virtual address: exact addresses before blocks. Of
// several blocks one of the client's namespace counts before all others, then the more specific, canonical, smallest key.
func (s *Snapshot) ServiceAt(network string, a netip.Addr, namespace string) *Service {
	if s == nil {
		return nil
	}
	if v := choose(s.vips[NetworkAddr{network, a}], namespace); v != nil {
		return v
	}
	var best *Service
	for _, l := range s.lengths {
		if l.is4 != a.Is4() {
			continue
		}
		p, err := a.Prefix(l.bits)
		if err != nil {
			continue
		}
		v := choose(s.cidrs[NetworkPrefix{network, p}], namespace)
		switch {
		case v == nil:
		case v.Namespace == namespace:
			return v
		case best == nil:
			best = v
		}
	}
	return best
}

// ServiceNamed finds the service that a client of the namespace means by a hostname, in lower case.
func (s *Snapshot) ServiceNamed(hostname, namespace string) *Service {
	if s == nil {
		return nil
	}
	return choose(s.names[hostname], namespace)
}

// Endpoints are the endpoints of a service, by uid; unhealthy ones only if the service wants them.
func (s *Snapshot) Endpoints(key ServiceKey) []Endpoint {
	if s == nil {
		return nil
	}
	return s.endpoints[key]
}

// Policy finds a policy by its key, "namespace/name".
func (s *Snapshot) Policy(key string) *Policy {
	if s == nil {
		return nil
	}
	return s.policies[key]
}

// NamespacePolicies are the policies of scope Namespace of one namespace, by key.
func (s *Snapshot) NamespacePolicies(namespace string) []*Policy {
	if s == nil || namespace == "" {
		return nil
	}
	return s.byScope[namespace]
}

// GlobalPolicies are the policies of scope Global, by key.
func (s *Snapshot) GlobalPolicies() []*Policy {
	if s == nil {
		return nil
	}
	return s.byScope[""]
}

// A Client says which workload a pod is. It is known before the workload itself is.
type Client struct {
	UID            string // of the workload; may be empty
	Name           string
	Namespace      string
	ServiceAccount string
	Node           string // restricts the lookup to workloads of this node; "": all
}

func (c *Client) String() string { return c.Namespace + "/" + c.Name }
