package workload

import (
	"net/netip"
	"strings"
)

// A Workload is one pod, virtual machine or host that can be a source or an endpoint. Workloads in a Snapshot are immutable.
type Workload struct {
	UID                   string // primary key
	Name                  string
	Namespace             string
	ServiceAccount        string
	TrustDomain           string
	Network               string // "" is the default network
	Node                  string
	ClusterID             string
	Addresses             []netip.Addr // unmapped
	Hostname              string       // to resolve when there is no address
	Protocol              Protocol
	NetworkMode           NetworkMode
	Status                Status
	Capacity              uint32 // weight in load balancing; 0 is never picked
	NativeTunnel          bool   // the workload speaks HBONE itself
	AppTunnel             *AppTunnel
	Locality              Locality
	Waypoint              *GatewayAddress
	NetworkGateway        *GatewayAddress // through which the workload's network is reached
	AuthorizationPolicies []string        // keys of policies that select this workload
	WorkloadName          string          // telemetry, as the rest
	WorkloadType          Type
	CanonicalName         string
	CanonicalRevision     string
	Services              map[ServiceKey]PortMap
}

// Identity is the SPIFFE identity of the workload.
func (w *Workload) Identity() Identity {
	return Identity{TrustDomain: w.TrustDomain, Namespace: w.Namespace, ServiceAccount: w.ServiceAccount}
}

// A ServiceKey is the primary key of a service.
type ServiceKey struct{ Namespace, Hostname string }

func (k ServiceKey) String() string { return k.Namespace + "/" + k.Hostname }

// ParseServiceKey reads "namespace/hostname".
func ParseServiceKey(s string) (ServiceKey, bool) {
	ns, host, ok := strings.Cut(s, "/")
	return ServiceKey{ns, host}, ok && host != ""
}

// A PortMap maps service ports to target ports; a target port of 0 is resolved per endpoint.
type PortMap map[uint16]uint16

// A NetworkAddr is an address within a named network.
type NetworkAddr struct {
	Network string
	Addr    netip.Addr // unmapped
}

func (a NetworkAddr) String() string { return a.Network + "/" + a.Addr.String() }

// A NetworkPrefix is a block of virtual addresses within a named network.
type NetworkPrefix struct {
	Network string
	Prefix  netip.Prefix // masked
}

// A Service is a name, its virtual addresses and how its endpoints are chosen.
type Service struct {
	Name              string
	Namespace         string
	Hostname          string // lower case; may be a wildcard such as *.example.com
	VIPs              []NetworkAddr
	CIDRVIPs          []NetworkPrefix
	Ports             PortMap
	SubjectAltNames   []Identity // accepted beside the identity of the chosen workload
	Waypoint          *GatewayAddress
	WeightedWaypoints []WeightedWaypoint
	LoadBalancer      LoadBalancer
	IPFamilies        IPFamilies
	Canonical         bool // preferred among services of several namespaces with the same name or VIP
	Visibility        Visibility
}

// Key is the primary key.
func (s *Service) Key() ServiceKey { return ServiceKey{s.Namespace, s.Hostname} }

// VisibleTo reports whether clients of the namespace know the service.
func (s *Service) VisibleTo(namespace string) bool {
	return s.Visibility == VisiblePublic || s.Namespace == namespace
}

// A GatewayAddress names a waypoint or network gateway: by address, or by namespace and hostname.
type GatewayAddress struct {
	Address  NetworkAddr // valid if Hostname is zero
	Hostname ServiceKey
	Port     uint16 // HBONE port
}

func (g *GatewayAddress) String() string {
	if g.Hostname != (ServiceKey{}) {
		return g.Hostname.String()
	}
	return g.Address.String()
}

// A WeightedWaypoint is one of several waypoints, chosen by weight.
type WeightedWaypoint struct {
	Destination GatewayAddress
	Weight      uint32
}

// A LoadBalancer says how endpoints are ranked.
type LoadBalancer struct {
	Preferences []Scope
	Mode        LBMode
	Health      HealthPolicy
}

// A Locality is where a workload runs.
type Locality struct{ Region, Zone, Subzone string }

// An AppTunnel is how a workload wants inbound connections delivered.
type AppTunnel struct {
	PROXY bool   // begin with a PROXY protocol header
	Port  uint16 // 0: the port asked for
}

// A Policy is an L4 authorization policy: groups are alternatives, the rules of a group all have to match, of the matches of
// a rule one has to.
type Policy struct {
	Name      string
	Namespace string
	Scope     PolicyScope
	Action    Action
	DryRun    bool
	Groups    []Group
}

// Key is "namespace/name".
func (p *Policy) Key() string { return p.Namespace + "/" + p.Name }

// A Group matches if all of its rules do; without rules it matches everything.
type Group []Rule

// A Rule matches if any of its matches does; without matches it matches everything.
type Rule []Match

// A Match is a set of conditions, all of which have to hold; one without any condition never matches.
type Match struct {
	Namespaces, NotNamespaces             []StringMatch
	Principals, NotPrincipals             []StringMatch
	ServiceAccounts, NotServiceAccounts   []ServiceAccount
	SourceIPs, NotSourceIPs               []netip.Prefix
	DestinationIPs, NotDestinationIPs     []netip.Prefix
	DestinationPorts, NotDestinationPorts []uint16
}

// A ServiceAccount is matched regardless of its trust domain.
type ServiceAccount struct{ Namespace, Name string }

// A StringMatch compares a string.
type StringMatch struct {
	Kind  MatchKind
	Value string
}

// MatchKind is how a StringMatch compares.
type MatchKind uint8

// The kinds of StringMatch.
const (
	MatchExact MatchKind = iota
	MatchPrefix
	MatchSuffix
	MatchPresence // any string that is not empty
)

// Matches reports whether s matches.
func (m StringMatch) Matches(s string) bool {
	switch m.Kind {
	case MatchPrefix:
		return strings.HasPrefix(s, m.Value)
	case MatchSuffix:
		return strings.HasSuffix(s, m.Value)
	case MatchPresence:
		return s != ""
	}
	return s == m.Value
}

// The enumerations of the workload API. Zero is its default.
type (
	// Protocol is how a workload is reached.
	Protocol uint8
	// NetworkMode tells host-network pods, which no address leads to.
	NetworkMode uint8
	// Status is the health of a workload.
	Status uint8
	// Type is the kind of controller behind a workload.
	Type uint8
	// Scope is a preference of load balancing.
	Scope uint8
	// LBMode is how preferences are applied.
	LBMode uint8
	// HealthPolicy says which endpoints a service has.
	HealthPolicy uint8
	// IPFamilies restricts the families of a service.
	IPFamilies uint8
	// Visibility says who knows a service.
	Visibility uint8
	// PolicyScope says what a policy applies to.
	PolicyScope uint8
	// Action is what a policy does when it matches.
	Action uint8
)

// Values of the enumerations.
const (
	ProtocolTCP Protocol = iota
	ProtocolHBONE
)

const (
	NetworkStandard NetworkMode = iota
	NetworkHost
)

const (
	Healthy Status = iota
	Unhealthy
)

const (
	TypeDeployment Type = iota
	TypeCronJob
	TypePod
	TypeJob
)

const (
	ScopeRegion Scope = iota
	ScopeZone
	ScopeSubzone
	ScopeNode
	ScopeCluster
	ScopeNetwork
)

const (
	LBStandard LBMode = iota
	LBStrict
	LBFailover
	LBPassthrough
)

const (
	OnlyHealthy HealthPolicy = iota
	AllowAll
)

const (
	FamiliesAutomatic IPFamilies = iota
	FamilyIPv4
	FamilyIPv6
	FamiliesDual
)

const (
	VisiblePublic Visibility = iota
	VisibleNamespace
)

const (
	ScopePolicyGlobal PolicyScope = iota
	ScopePolicyNamespace
	ScopePolicyWorkload
)

const (
	Allow Action = iota
	Deny
)

// The names of the enumerations' values, as in the static file and in dumps, in the order of the values.
var (
	protocolNames    = []string{"TCP", "HBONE"}
	networkModeNames = []string{"Standard", "HostNetwork"}
	statusNames      = []string{"Healthy", "Unhealthy"}
	typeNames        = []string{"deployment", "cronjob", "pod", "job"}
	scopeNames       = []string{"Region", "Zone", "Subzone", "Node", "Cluster", "Network"}
	lbModeNames      = []string{"Standard", "Strict", "Failover", "Passthrough"}
	healthNames      = []string{"OnlyHealthy", "AllowAll"}
	familyNames      = []string{"Automatic", "IPv4", "IPv6", "Dual"}
	visibilityNames  = []string{"Public", "Namespace"}
	policyScopeNames = []string{"Global", "Namespace", "WorkloadSelector"}
	actionNames      = []string{"Allow", "Deny"}
)

func (p Protocol) String() string     { return protocolNames[p] }
func (m NetworkMode) String() string  { return networkModeNames[m] }
func (s Status) String() string       { return statusNames[s] }
func (t Type) String() string         { return typeNames[t] }
func (s Scope) String() string        { return scopeNames[s] }
func (m LBMode) String() string       { return lbModeNames[m] }
func (h HealthPolicy) String() string { return healthNames[h] }
func (f IPFamilies) String() string   { return familyNames[f] }
func (v Visibility) String() string   { return visibilityNames[v] }
func (s PolicyScope) String() string  { return policyScopeNames[s] }
func (a Action) String() string       { return actionNames[a] }
