package workload

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// A Dump is a state as /config_dump shows it, in the form of ztunnel's.
type Dump struct {
	Workloads []workloadJSON `json:"workloads"`
	Services  []serviceJSON  `json:"services"`
	Policies  []policyJSON   `json:"policies"`
}

// NewDump is the state of a snapshot, sorted by key.
func NewDump(s *Snapshot) Dump { return Dump{workloads(s), services(s), policies(s)} }

type workloadJSON struct {
	WorkloadIPs           []netip.Addr   `json:"workloadIps"`
	Waypoint              *gatewayJSON   `json:"waypoint,omitempty"`
	NetworkGateway        *gatewayJSON   `json:"networkGateway,omitempty"`
	Protocol              string         `json:"protocol"`
	NetworkMode           string         `json:"networkMode"`
	UID                   string         `json:"uid,omitempty"`
	Name                  string         `json:"name"`
	Namespace             string         `json:"namespace"`
	TrustDomain           string         `json:"trustDomain,omitempty"`
	ServiceAccount        string         `json:"serviceAccount"`
	Network               string         `json:"network,omitempty"`
	WorkloadName          string         `json:"workloadName,omitempty"`
	WorkloadType          string         `json:"workloadType"`
	CanonicalName         string         `json:"canonicalName,omitempty"`
	CanonicalRevision     string         `json:"canonicalRevision,omitempty"`
	Hostname              string         `json:"hostname,omitempty"`
	Node                  string         `json:"node,omitempty"`
	NativeTunnel          bool           `json:"nativeTunnel,omitempty"`
	ApplicationTunnel     *appTunnelJSON `json:"applicationTunnel,omitempty"`
	AuthorizationPolicies []string       `json:"authorizationPolicies,omitempty"`
	Status                string         `json:"status"`
	ClusterID             string         `json:"clusterId"`
	Locality              *localityJSON  `json:"locality,omitempty"`
	Services              []string       `json:"services,omitempty"`
	Capacity              uint32         `json:"capacity"`
}

type gatewayJSON struct {
	Destination   string `json:"destination"`
	HBONEMTLSPort uint16 `json:"hboneMtlsPort"`
}

type appTunnelJSON struct {
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port,omitempty"`
}

type localityJSON struct {
	Region  string `json:"region"`
	Zone    string `json:"zone"`
	Subzone string `json:"subzone"`
}

func gatewayOf(g *GatewayAddress) *gatewayJSON {
	if g == nil {
		return nil
	}
	return &gatewayJSON{g.String(), g.Port}
}

// workloads are sorted by UID, as State has them.
func workloads(s *Snapshot) []workloadJSON {
	list := []workloadJSON{}
	for _, w := range s.State().Workloads {
		j := workloadJSON{
			WorkloadIPs: w.Addresses, Waypoint: gatewayOf(w.Waypoint), NetworkGateway: gatewayOf(w.NetworkGateway), Protocol: w.Protocol.String(),
			NetworkMode: w.NetworkMode.String(), UID: w.UID, Name: w.Name, Namespace: w.Namespace, TrustDomain: w.TrustDomain,
			ServiceAccount: w.ServiceAccount, Network: w.Network, WorkloadName: w.WorkloadName, WorkloadType: w.WorkloadType.String(),
			CanonicalName: w.CanonicalName, CanonicalRevision: w.CanonicalRevision, Hostname: w.Hostname, Node: w.Node, NativeTunnel: w.NativeTunnel,
			AuthorizationPolicies: w.AuthorizationPolicies, Status: w.Status.String(), ClusterID: w.ClusterID, Capacity: w.Capacity,
		}
		if j.WorkloadIPs == nil {
			j.WorkloadIPs = []netip.Addr{}
		}
		if t := w.AppTunnel; t != nil {
			j.ApplicationTunnel = &appTunnelJSON{"NONE", t.Port}
			if t.PROXY {
				j.ApplicationTunnel.Protocol = "PROXY"
			}
		}
		if w.Locality != (Locality{}) {
			j.Locality = &localityJSON{w.Locality.Region, w.Locality.Zone, w.Locality.Subzone}
		}
		for k := range w.Services {
			j.Services = append(j.Services, k.String())
		}
		slices.Sort(j.Services)
		list = append(list, j)
	}
	return list
}

type serviceJSON struct {
	Name              string                  `json:"name"`
	Namespace         string                  `json:"namespace"`
	Hostname          string                  `json:"hostname"`
	VIPs              []string                `json:"vips"`
	CIDRVIPs          []cidrJSON              `json:"cidrVips,omitempty"`
	Ports             PortMap                 `json:"ports"`
	Endpoints         map[string]endpointJSON `json:"endpoints"`
	SubjectAltNames   []string                `json:"subjectAltNames"`
	Waypoint          *gatewayJSON            `json:"waypoint,omitempty"`
	WeightedWaypoints []weightedJSON          `json:"weightedWaypoints,omitempty"`
	LoadBalancer      *loadBalancerJSON       `json:"loadBalancer,omitempty"`
	IPFamilies        string                  `json:"ipFamilies,omitempty"`
	Canonical         bool                    `json:"canonical"`
	Visibility        string                  `json:"visibility"`
}

type cidrJSON struct {
	Network string       `json:"network"`
	CIDR    netip.Prefix `json:"cidr"`
}

type endpointJSON struct {
	WorkloadUID string  `json:"workloadUid"`
	Port        PortMap `json:"port"`
	Status      string  `json:"status"`
}

type weightedJSON struct {
	Destination gatewayJSON `json:"destination"`
	Weight      uint32      `json:"weight"`
}

type loadBalancerJSON struct {
	RoutingPreferences []string `json:"routingPreferences"`
	Mode               string   `json:"mode"`
	HealthPolicy       string   `json:"healthPolicy"`
}

// services are sorted by key, as State has them.
func services(s *Snapshot) []serviceJSON {
	list := []serviceJSON{}
	for _, v := range s.State().Services {
		j := serviceJSON{
			Name: v.Name, Namespace: v.Namespace, Hostname: v.Hostname, VIPs: []string{}, Ports: v.Ports, Endpoints: make(map[string]endpointJSON),
			SubjectAltNames: []string{}, Waypoint: gatewayOf(v.Waypoint), Canonical: v.Canonical, Visibility: v.Visibility.String(),
		}
		if j.Ports == nil {
			j.Ports = PortMap{}
		}
		for _, a := range v.VIPs {
			j.VIPs = append(j.VIPs, a.String())
		}
		for _, p := range v.CIDRVIPs {
			j.CIDRVIPs = append(j.CIDRVIPs, cidrJSON{p.Network, p.Prefix})
		}
		for _, id := range v.SubjectAltNames {
			j.SubjectAltNames = append(j.SubjectAltNames, id.String())
		}
		for _, w := range v.WeightedWaypoints {
			j.WeightedWaypoints = append(j.WeightedWaypoints, weightedJSON{*gatewayOf(&w.Destination), w.Weight})
		}
		if v.IPFamilies != FamiliesAutomatic {
			j.IPFamilies = v.IPFamilies.String()
		}
		if lb := &v.LoadBalancer; len(lb.Preferences) > 0 || lb.Mode != LBStandard || lb.Health != OnlyHealthy {
			j.LoadBalancer = &loadBalancerJSON{[]string{}, lb.Mode.String(), lb.Health.String()}
			for _, p := range lb.Preferences {
				j.LoadBalancer.RoutingPreferences = append(j.LoadBalancer.RoutingPreferences, p.String())
			}
		}
		for _, e := range s.Endpoints(v.Key()) {
			ports := e.Ports
			if ports == nil {
				ports = PortMap{}
			}
			j.Endpoints[e.Workload.UID] = endpointJSON{e.Workload.UID, ports, e.Workload.Status.String()}
		}
		list = append(list, j)
	}
	return list
}

type policyJSON struct {
	Name      string          `json:"name"`
	Namespace string          `json:"namespace"`
	Scope     string          `json:"scope"`
	Action    string          `json:"action"`
	DryRun    bool            `json:"dryRun"`
	Rules     [][][]matchJSON `json:"rules"`
}

type matchJSON struct {
	Namespaces          []any                `json:"namespaces,omitempty"`
	NotNamespaces       []any                `json:"notNamespaces,omitempty"`
	Principals          []any                `json:"principals,omitempty"`
	NotPrincipals       []any                `json:"notPrincipals,omitempty"`
	ServiceAccounts     []serviceAccountJSON `json:"serviceAccounts,omitempty"`
	NotServiceAccounts  []serviceAccountJSON `json:"notServiceAccounts,omitempty"`
	SourceIPs           []netip.Prefix       `json:"sourceIps,omitempty"`
	NotSourceIPs        []netip.Prefix       `json:"notSourceIps,omitempty"`
	DestinationIPs      []netip.Prefix       `json:"destinationIps,omitempty"`
	NotDestinationIPs   []netip.Prefix       `json:"notDestinationIps,omitempty"`
	DestinationPorts    []uint16             `json:"destinationPorts,omitempty"`
	NotDestinationPorts []uint16             `json:"notDestinationPorts,omitempty"`
}

type serviceAccountJSON struct {
	Namespace      string `json:"namespace"`
	ServiceAccount string `json:"serviceAccount"`
}

// policies are sorted by key, as State has them.
func policies(s *Snapshot) []policyJSON {
	list := []policyJSON{}
	for _, p := range s.State().Policies {
		j := policyJSON{p.Name, p.Namespace, p.Scope.String(), p.Action.String(), p.DryRun, [][][]matchJSON{}}
		for _, g := range p.Groups {
			group := [][]matchJSON{}
			for _, r := range g {
				rule := []matchJSON{}
				for i := range r {
					rule = append(rule, matchOf(&r[i]))
				}
				group = append(group, rule)
			}
			j.Rules = append(j.Rules, group)
		}
		list = append(list, j)
	}
	return list
}

func matchOf(m *Match) matchJSON {
	return matchJSON{
		Namespaces: textsOf(m.Namespaces), NotNamespaces: textsOf(m.NotNamespaces), Principals: textsOf(m.Principals), NotPrincipals: textsOf(m.NotPrincipals),
		ServiceAccounts: accountsOf(m.ServiceAccounts), NotServiceAccounts: accountsOf(m.NotServiceAccounts),
		SourceIPs: m.SourceIPs, NotSourceIPs: m.NotSourceIPs, DestinationIPs: m.DestinationIPs, NotDestinationIPs: m.NotDestinationIPs,
		DestinationPorts: m.DestinationPorts, NotDestinationPorts: m.NotDestinationPorts,
	}
}

func textsOf(list []StringMatch) []any {
	var out []any
	for _, m := range list {
		var value any = []string{}
		if m.Kind != MatchPresence {
			value = m.Value
		}
		out = append(out, map[string]any{matchKinds[m.Kind]: value})
	}
	return out
}

func accountsOf(list []ServiceAccount) []serviceAccountJSON {
	var out []serviceAccountJSON
	for _, a := range list {
		out = append(out, serviceAccountJSON{a.Namespace, a.Name})
	}
	return out
}

// ParseDump reads the state out of a /config_dump, of ztun or of ztunnel: a JSON object with workloads, services and policies; what
// else is in it is left alone. Endpoints that were not healthy are in a dump as workloads only.
func ParseDump(name string, data []byte) (State, error) {
	var d Dump
	if err := json.Unmarshal(data, &d); err != nil {
		return State{}, fmt.Errorf("%s: %w; a dump is what /config_dump on the admin port answers", name, err)
	}
	var p dumpParser
	var st State
	own := make(map[string]map[ServiceKey]PortMap) // by uid
	for i := range d.Services {
		p.path = fmt.Sprintf("services[%d] %s/%s", i, d.Services[i].Namespace, d.Services[i].Hostname)
		v := p.service(&d.Services[i])
		st.Services = append(st.Services, v)
		for _, e := range d.Services[i].Endpoints {
			if own[e.WorkloadUID] == nil {
				own[e.WorkloadUID] = make(map[ServiceKey]PortMap)
			}
			own[e.WorkloadUID][v.Key()] = e.Port
		}
	}
	for i := range d.Workloads {
		p.path = fmt.Sprintf("workloads[%d] %s", i, d.Workloads[i].UID)
		st.Workloads = append(st.Workloads, p.workload(&d.Workloads[i], own[d.Workloads[i].UID]))
	}
	for i := range d.Policies {
		p.path = fmt.Sprintf("policies[%d] %s/%s", i, d.Policies[i].Namespace, d.Policies[i].Name)
		st.Policies = append(st.Policies, p.policy(&d.Policies[i]))
	}
	if len(p.errs) > 0 {
		return State{}, fmt.Errorf("%s: %w", name, errors.Join(p.errs...))
	}
	return st, nil
}

// A dumpParser collects errors with their places.
type dumpParser struct {
	path string
	errs []error
}

func (p *dumpParser) fail(format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s: %s", p.path, fmt.Sprintf(format, args...)))
}

// enumOf is the value with a name; an empty one is the default.
func enumOf[T ~uint8](p *dumpParser, what, name string, names []string) T {
	if name == "" {
		return 0
	}
	i := slices.IndexFunc(names, func(n string) bool { return strings.EqualFold(n, name) })
	if i < 0 {
		p.fail("%s: %q is none of %s", what, name, strings.Join(names, ", "))
		return 0
	}
	return T(i)
}

func (p *dumpParser) workload(j *workloadJSON, ports map[ServiceKey]PortMap) *Workload {
	w := &Workload{
		UID: j.UID, Name: j.Name, Namespace: j.Namespace, ServiceAccount: j.ServiceAccount, TrustDomain: j.TrustDomain, Network: j.Network,
		Node: j.Node, ClusterID: j.ClusterID, Hostname: j.Hostname, Capacity: j.Capacity, NativeTunnel: j.NativeTunnel,
		AuthorizationPolicies: j.AuthorizationPolicies, WorkloadName: j.WorkloadName, CanonicalName: j.CanonicalName,
		CanonicalRevision: j.CanonicalRevision, Waypoint: p.gateway(j.Waypoint), NetworkGateway: p.gateway(j.NetworkGateway),
		Protocol:     enumOf[Protocol](p, "protocol", j.Protocol, protocolNames),
		NetworkMode:  enumOf[NetworkMode](p, "networkMode", j.NetworkMode, networkModeNames),
		Status:       enumOf[Status](p, "status", j.Status, statusNames),
		WorkloadType: enumOf[Type](p, "workloadType", j.WorkloadType, typeNames),
		Services:     make(map[ServiceKey]PortMap, len(j.Services)),
	}
	if w.TrustDomain == "" {
		w.TrustDomain = DefaultTrustDomain
	}
	for _, a := range j.WorkloadIPs {
		w.Addresses = append(w.Addresses, a.Unmap())
	}
	if t := j.ApplicationTunnel; t != nil {
		w.AppTunnel = &AppTunnel{PROXY: enumOf[uint8](p, "applicationTunnel.protocol", t.Protocol, appTunnelNames) == 1, Port: t.Port}
	}
	if l := j.Locality; l != nil {
		w.Locality = Locality{l.Region, l.Zone, l.Subzone}
	}
	for _, text := range j.Services {
		key, ok := ParseServiceKey(strings.ToLower(text))
		if !ok {
			p.fail("services: %q is not namespace/hostname", text)
			continue
		}
		w.Services[key] = ports[key]
	}
	return w
}

func (p *dumpParser) gateway(j *gatewayJSON) *GatewayAddress {
	if j == nil {
		return nil
	}
	g := &GatewayAddress{Port: j.HBONEMTLSPort}
	if !g.parse(j.Destination) {
		p.fail("gateway: %q is neither network/address nor namespace/hostname", j.Destination)
		return nil
	}
	return g
}

func (p *dumpParser) service(j *serviceJSON) *Service {
	v := &Service{
		Name: j.Name, Namespace: j.Namespace, Hostname: strings.ToLower(j.Hostname), Ports: j.Ports, Waypoint: p.gateway(j.Waypoint), Canonical: j.Canonical,
		IPFamilies: enumOf[IPFamilies](p, "ipFamilies", j.IPFamilies, familyNames),
		Visibility: enumOf[Visibility](p, "visibility", j.Visibility, visibilityNames),
	}
	for _, text := range j.VIPs {
		a, ok := parseNetworkAddr(text)
		if !ok {
			p.fail("vips: %q is not network/address", text)
			continue
		}
		v.VIPs = append(v.VIPs, a)
	}
	for _, c := range j.CIDRVIPs {
		v.CIDRVIPs = append(v.CIDRVIPs, NetworkPrefix{c.Network, canonicalPrefix(c.CIDR)})
	}
	for _, text := range j.SubjectAltNames {
		id, err := ParseIdentity(text)
		if err != nil {
			p.fail("subjectAltNames: %v", err)
			continue
		}
		v.SubjectAltNames = append(v.SubjectAltNames, id)
	}
	for i := range j.WeightedWaypoints {
		if g := p.gateway(&j.WeightedWaypoints[i].Destination); g != nil {
			v.WeightedWaypoints = append(v.WeightedWaypoints, WeightedWaypoint{*g, j.WeightedWaypoints[i].Weight})
		}
	}
	if lb := j.LoadBalancer; lb != nil {
		v.LoadBalancer.Mode = enumOf[LBMode](p, "loadBalancer.mode", lb.Mode, lbModeNames)
		v.LoadBalancer.Health = enumOf[HealthPolicy](p, "loadBalancer.healthPolicy", lb.HealthPolicy, healthNames)
		for _, name := range lb.RoutingPreferences {
			v.LoadBalancer.Preferences = append(v.LoadBalancer.Preferences, enumOf[Scope](p, "loadBalancer.routingPreferences", name, scopeNames))
		}
	}
	return v
}

func (p *dumpParser) policy(j *policyJSON) *Policy {
	pol := &Policy{
		Name: j.Name, Namespace: j.Namespace, DryRun: j.DryRun,
		Scope:  enumOf[PolicyScope](p, "scope", j.Scope, policyScopeNames),
		Action: enumOf[Action](p, "action", j.Action, actionNames),
	}
	for _, g := range j.Rules {
		var group Group
		for _, r := range g {
			var rule Rule
			for i := range r {
				rule = append(rule, p.match(&r[i]))
			}
			group = append(group, rule)
		}
		pol.Groups = append(pol.Groups, group)
	}
	return pol
}

func (p *dumpParser) match(j *matchJSON) Match {
	return Match{
		Namespaces: p.texts(j.Namespaces), NotNamespaces: p.texts(j.NotNamespaces), Principals: p.texts(j.Principals), NotPrincipals: p.texts(j.NotPrincipals),
		ServiceAccounts: serviceAccounts(j.ServiceAccounts), NotServiceAccounts: serviceAccounts(j.NotServiceAccounts),
		SourceIPs: canonicalPrefixes(j.SourceIPs), NotSourceIPs: canonicalPrefixes(j.NotSourceIPs),
		DestinationIPs: canonicalPrefixes(j.DestinationIPs), NotDestinationIPs: canonicalPrefixes(j.NotDestinationIPs),
		DestinationPorts: j.DestinationPorts, NotDestinationPorts: j.NotDestinationPorts,
	}
}

func canonicalPrefixes(list []netip.Prefix) []netip.Prefix {
	for i, p := range list {
		list[i] = canonicalPrefix(p)
	}
	return list
}

func (p *dumpParser) texts(list []any) (out []StringMatch) {
	for _, item := range list {
		m, ok := item.(map[string]any)
		if !ok || len(m) != 1 {
			p.fail("%v is none of Exact, Prefix, Suffix, Presence", item)
			continue
		}
		for kind, value := range m {
			i := slices.Index(matchKinds, kind)
			text, isText := value.(string)
			switch {
			case i < 0:
				p.fail("%q is none of %s", kind, strings.Join(matchKinds, ", "))
			case MatchKind(i) == MatchPresence:
				out = append(out, StringMatch{Kind: MatchPresence})
			case !isText:
				p.fail("%s: want a string, have %v", kind, value)
			default:
				out = append(out, StringMatch{MatchKind(i), text})
			}
		}
	}
	return out
}

func serviceAccounts(list []serviceAccountJSON) (out []ServiceAccount) {
	for _, a := range list {
		out = append(out, ServiceAccount{a.Namespace, a.ServiceAccount})
	}
	return out
}
