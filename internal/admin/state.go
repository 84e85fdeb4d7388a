package admin

import (
	"cmp"
	"net/netip"
	"slices"

	"ztun.dev/ztun/internal/workload"
)

func addr(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func named(w *workload.Workload) string {
	if w == nil {
		return ""
	}
	return w.Namespace + "/" + w.Name
}

func sortByID(list []connJSON) {
	slices.SortFunc(list, func(a, b connJSON) int { return cmp.Compare(a.ID, b.ID) })
}

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

func gateway(g *workload.GatewayAddress) *gatewayJSON {
	if g == nil {
		return nil
	}
	return &gatewayJSON{g.String(), g.Port}
}

// workloads are sorted by UID, as State has them.
func workloads(s *workload.Snapshot) []workloadJSON {
	list := []workloadJSON{}
	for _, w := range s.State().Workloads {
		j := workloadJSON{
			WorkloadIPs: w.Addresses, Waypoint: gateway(w.Waypoint), NetworkGateway: gateway(w.NetworkGateway), Protocol: w.Protocol.String(),
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
		if w.Locality != (workload.Locality{}) {
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
	Ports             workload.PortMap        `json:"ports"`
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
	WorkloadUID string           `json:"workloadUid"`
	Port        workload.PortMap `json:"port"`
	Status      string           `json:"status"`
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
func services(s *workload.Snapshot) []serviceJSON {
	list := []serviceJSON{}
	for _, v := range s.State().Services {
		j := serviceJSON{
			Name: v.Name, Namespace: v.Namespace, Hostname: v.Hostname, VIPs: []string{}, Ports: v.Ports, Endpoints: make(map[string]endpointJSON),
			SubjectAltNames: []string{}, Waypoint: gateway(v.Waypoint), Canonical: v.Canonical, Visibility: v.Visibility.String(),
		}
		if j.Ports == nil {
			j.Ports = workload.PortMap{}
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
			j.WeightedWaypoints = append(j.WeightedWaypoints, weightedJSON{*gateway(&w.Destination), w.Weight})
		}
		if v.IPFamilies != workload.FamiliesAutomatic {
			j.IPFamilies = v.IPFamilies.String()
		}
		if lb := &v.LoadBalancer; len(lb.Preferences) > 0 || lb.Mode != workload.LBStandard || lb.Health != workload.OnlyHealthy {
			j.LoadBalancer = &loadBalancerJSON{[]string{}, lb.Mode.String(), lb.Health.String()}
			for _, p := range lb.Preferences {
				j.LoadBalancer.RoutingPreferences = append(j.LoadBalancer.RoutingPreferences, p.String())
			}
		}
		for _, e := range s.Endpoints(v.Key()) {
			ports := e.Ports
			if ports == nil {
				ports = workload.PortMap{}
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
func policies(s *workload.Snapshot) []policyJSON {
	list := []policyJSON{}
	for _, p := range s.State().Policies {
		j := policyJSON{p.Name, p.Namespace, p.Scope.String(), p.Action.String(), p.DryRun, [][][]matchJSON{}}
		for _, g := range p.Groups {
			group := [][]matchJSON{}
			for _, r := range g {
				rule := []matchJSON{}
				for i := range r {
					rule = append(rule, match(&r[i]))
				}
				group = append(group, rule)
			}
			j.Rules = append(j.Rules, group)
		}
		list = append(list, j)
	}
	return list
}

func match(m *workload.Match) matchJSON {
	return matchJSON{
		Namespaces: texts(m.Namespaces), NotNamespaces: texts(m.NotNamespaces), Principals: texts(m.Principals), NotPrincipals: texts(m.NotPrincipals),
		ServiceAccounts: accounts(m.ServiceAccounts), NotServiceAccounts: accounts(m.NotServiceAccounts),
		SourceIPs: m.SourceIPs, NotSourceIPs: m.NotSourceIPs, DestinationIPs: m.DestinationIPs, NotDestinationIPs: m.NotDestinationIPs,
		DestinationPorts: m.DestinationPorts, NotDestinationPorts: m.NotDestinationPorts,
	}
}

func texts(list []workload.StringMatch) []any {
	var out []any
	for _, m := range list {
		switch m.Kind {
		case workload.MatchExact:
			out = append(out, map[string]string{"Exact": m.Value})
		case workload.MatchPrefix:
			out = append(out, map[string]string{"Prefix": m.Value})
		case workload.MatchSuffix:
			out = append(out, map[string]string{"Suffix": m.Value})
		default:
			out = append(out, map[string][]string{"Presence": {}})
		}
	}
	return out
}

func accounts(list []workload.ServiceAccount) []serviceAccountJSON {
	var out []serviceAccountJSON
	for _, a := range list {
		out = append(out, serviceAccountJSON{a.Namespace, a.Name})
	}
	return out
}
