package workload

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"ztun.dev/ztun/internal/strict"
)

// Defaults of workloads, as the workload API has them.
const (
	DefaultTrustDomain    = "cluster.local"
	DefaultServiceAccount = "default"
	DefaultClusterID      = "Kubernetes"
)

// ParseStatic reads a state in the form of the static local configuration (LOCAL_XDS_PATH): YAML or JSON with the keys
// workloads, services and policies. Nothing is ignored: an unknown key, a value of the wrong kind, a reference to an object
// that the file does not have, is an error "name:line: path: what". All errors are returned, joined.
func ParseStatic(name string, data []byte) (State, error) {
	var st State
	root, err := strict.Document(name, data)
	if err != nil {
		return State{}, err
	}
	if root == nil {
		return State{}, fmt.Errorf("%s:1: the file is empty; an empty mesh is {}", name)
	}
	d := &decoder{strict.Reader{Name: name}}
	lines := make(map[any]*yaml.Node)
	d.Mapping(root, "", map[string]strict.Field{
		"workloads": listOf(d, &st.Workloads, lines, d.workload),
		"services":  listOf(d, &st.Services, lines, d.service),
		"policies":  listOf(d, &st.Policies, lines, d.policy),
	})
	if len(d.Errs) == 0 {
		d.check(st, lines)
	}
	return st, errors.Join(d.Errs...)
}

func listOf[T any](d *decoder, dst *[]*T, lines map[any]*yaml.Node, item func(*T, *yaml.Node, string)) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			v := new(T)
			item(v, n, path)
			*dst = append(*dst, v)
			lines[v] = n
		})
	}
}

func (d *decoder) workload(w *Workload, n *yaml.Node, path string) {
	w.TrustDomain, w.ServiceAccount, w.ClusterID, w.Capacity = DefaultTrustDomain, DefaultServiceAccount, DefaultClusterID, 1
	d.Mapping(n, path, map[string]strict.Field{
		"uid":                   d.String(&w.UID),
		"name":                  d.String(&w.Name),
		"namespace":             d.String(&w.Namespace),
		"workloadIps":           d.addrs(&w.Addresses),
		"serviceAccount":        d.String(&w.ServiceAccount),
		"trustDomain":           d.String(&w.TrustDomain),
		"network":               d.String(&w.Network),
		"node":                  d.String(&w.Node),
		"clusterId":             d.String(&w.ClusterID),
		"protocol":              enum(d, &w.Protocol, protocolNames),
		"networkMode":           enum(d, &w.NetworkMode, networkModeNames),
		"status":                enum(d, &w.Status, statusNames),
		"capacity":              d.uint32(&w.Capacity),
		"hostname":              d.lower(&w.Hostname),
		"nativeTunnel":          d.boolean(&w.NativeTunnel),
		"applicationTunnel":     d.appTunnel(&w.AppTunnel),
		"locality":              d.locality(&w.Locality),
		"waypoint":              d.optionalGateway(&w.Waypoint),
		"networkGateway":        d.optionalGateway(&w.NetworkGateway),
		"authorizationPolicies": d.strings(&w.AuthorizationPolicies),
		"workloadName":          d.String(&w.WorkloadName),
		"workloadType":          enum(d, &w.WorkloadType, typeNames),
		"canonicalName":         d.String(&w.CanonicalName),
		"canonicalRevision":     d.String(&w.CanonicalRevision),
		"services":              d.workloadServices(&w.Services),
	}, "namespace", "workloadIps", "services")
	if w.TrustDomain == "" {
		w.TrustDomain = DefaultTrustDomain
	}
	if w.ServiceAccount == "" {
		w.ServiceAccount = DefaultServiceAccount
	}
	if w.ClusterID == "" {
		w.ClusterID = DefaultClusterID
	}
	if w.UID == "" {
		w.UID = w.ClusterID + "//Static/" + w.Namespace + "/" + w.Name
	}
}

func (d *decoder) lower(dst *string) strict.Field {
	return func(n *yaml.Node, path string) {
		d.String(dst)(n, path)
		*dst = strings.ToLower(*dst)
	}
}

var appTunnelNames = []string{"NONE", "PROXY"}

func (d *decoder) appTunnel(dst **AppTunnel) strict.Field {
	return func(n *yaml.Node, path string) {
		var t AppTunnel
		var protocol uint8
		d.Mapping(n, path, map[string]strict.Field{
			"protocol": enum(d, &protocol, appTunnelNames),
			"port":     d.port(&t.Port),
		}, "protocol")
		t.PROXY = protocol == 1
		*dst = &t
	}
}

func (d *decoder) locality(dst *Locality) strict.Field {
	return func(n *yaml.Node, path string) {
		d.Mapping(n, path, map[string]strict.Field{
			"region": d.String(&dst.Region), "zone": d.String(&dst.Zone), "subzone": d.String(&dst.Subzone),
		}, "region", "zone", "subzone")
	}
}

func (d *decoder) workloadServices(dst *map[ServiceKey]PortMap) strict.Field {
	return func(n *yaml.Node, path string) {
		if n.Kind != yaml.MappingNode {
			d.Errorf(n, path, "want a mapping of <namespace>/<hostname> to ports, have %s", strict.Describe(n))
			return
		}
		*dst = make(map[ServiceKey]PortMap, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			k := n.Content[i]
			at := path + `["` + k.Value + `"]`
			key, ok := ParseServiceKey(strings.ToLower(k.Value))
			if !ok {
				d.Errorf(k, at, "want <namespace>/<hostname>")
				continue
			}
			var ports PortMap
			d.ports(&ports)(strict.Resolve(n.Content[i+1]), at)
			(*dst)[key] = ports
		}
	}
}

func (d *decoder) service(s *Service, n *yaml.Node, path string) {
	d.Mapping(n, path, map[string]strict.Field{
		"name":              d.String(&s.Name),
		"namespace":         d.String(&s.Namespace),
		"hostname":          d.lower(&s.Hostname),
		"vips":              d.networkAddrs(&s.VIPs),
		"cidrVips":          d.cidrVIPs(&s.CIDRVIPs),
		"ports":             d.ports(&s.Ports),
		"subjectAltNames":   d.identities(&s.SubjectAltNames),
		"waypoint":          d.optionalGateway(&s.Waypoint),
		"weightedWaypoints": d.weightedWaypoints(&s.WeightedWaypoints),
		"loadBalancer":      d.loadBalancer(&s.LoadBalancer),
		"ipFamilies":        enum(d, &s.IPFamilies, familyNames),
		"canonical":         d.boolean(&s.Canonical),
		"visibility":        enum(d, &s.Visibility, visibilityNames),
	}, "name", "namespace", "hostname", "vips", "ports")
}

func (d *decoder) cidrVIPs(dst *[]NetworkPrefix) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			var v NetworkPrefix
			d.Mapping(n, path, map[string]strict.Field{
				"network": d.String(&v.Network),
				"cidr":    func(n *yaml.Node, path string) { v.Prefix, _ = d.prefix(n, path) },
			}, "cidr")
			*dst = append(*dst, v)
		})
	}
}

func (d *decoder) weightedWaypoints(dst *[]WeightedWaypoint) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			var v WeightedWaypoint
			d.Mapping(n, path, map[string]strict.Field{
				"destination": d.gateway(&v.Destination),
				"weight":      d.uint32(&v.Weight),
			}, "destination", "weight")
			*dst = append(*dst, v)
		})
	}
}

func (d *decoder) loadBalancer(dst *LoadBalancer) strict.Field {
	return func(n *yaml.Node, path string) {
		d.Mapping(n, path, map[string]strict.Field{
			"routingPreferences": enums(d, &dst.Preferences, scopeNames),
			"mode":               enum(d, &dst.Mode, lbModeNames),
			"healthPolicy":       enum(d, &dst.Health, healthNames),
		})
	}
}

func (d *decoder) policy(p *Policy, n *yaml.Node, path string) {
	d.Mapping(n, path, map[string]strict.Field{
		"name":      d.String(&p.Name),
		"namespace": d.String(&p.Namespace),
		"scope":     enum(d, &p.Scope, policyScopeNames),
		"action":    enum(d, &p.Action, actionNames),
		"dryRun":    d.boolean(&p.DryRun),
		"rules": func(n *yaml.Node, path string) {
			d.List(n, path, func(n *yaml.Node, path string) {
				var g Group
				d.List(n, path, func(n *yaml.Node, path string) {
					var r Rule
					d.List(n, path, func(n *yaml.Node, path string) { r = append(r, d.match(n, path)) })
					g = append(g, r)
				})
				p.Groups = append(p.Groups, g)
			})
		},
	}, "name", "namespace", "scope", "action", "dryRun", "rules")
}

func (d *decoder) match(n *yaml.Node, path string) Match {
	var m Match
	d.Mapping(n, path, map[string]strict.Field{
		"namespaces":          d.stringMatches(&m.Namespaces),
		"notNamespaces":       d.stringMatches(&m.NotNamespaces),
		"principals":          d.stringMatches(&m.Principals),
		"notPrincipals":       d.stringMatches(&m.NotPrincipals),
		"serviceAccounts":     d.serviceAccounts(&m.ServiceAccounts),
		"notServiceAccounts":  d.serviceAccounts(&m.NotServiceAccounts),
		"sourceIps":           d.prefixes(&m.SourceIPs),
		"notSourceIps":        d.prefixes(&m.NotSourceIPs),
		"destinationIps":      d.prefixes(&m.DestinationIPs),
		"notDestinationIps":   d.prefixes(&m.NotDestinationIPs),
		"destinationPorts":    d.portList(&m.DestinationPorts),
		"notDestinationPorts": d.portList(&m.NotDestinationPorts),
	})
	return m
}

func (d *decoder) portList(dst *[]uint16) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			var p uint16
			d.port(&p)(n, path)
			*dst = append(*dst, p)
		})
	}
}

func (d *decoder) serviceAccounts(dst *[]ServiceAccount) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			var sa ServiceAccount
			d.Mapping(n, path, map[string]strict.Field{
				"namespace": d.String(&sa.Namespace), "serviceAccount": d.String(&sa.Name),
			}, "namespace", "serviceAccount")
			*dst = append(*dst, sa)
		})
	}
}

var matchKinds = []string{"Exact", "Prefix", "Suffix", "Presence"}

// stringMatches reads "!Exact x" and "{Exact: x}" alike; Presence has no value.
func (d *decoder) stringMatches(dst *[]StringMatch) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			kind, value := strings.TrimPrefix(n.Tag, "!"), n
			if n.Kind == yaml.MappingNode && len(n.Content) == 2 {
				kind, value = n.Content[0].Value, strict.Resolve(n.Content[1])
			}
			for i, k := range matchKinds {
				if k != kind {
					continue
				}
				m := StringMatch{Kind: MatchKind(i)}
				if m.Kind != MatchPresence {
					d.String(&m.Value)(value, path)
				}
				*dst = append(*dst, m)
				return
			}
			d.Errorf(n, path, "want !Exact, !Prefix, !Suffix or !Presence before the value, have %s", strict.Describe(n))
		})
	}
}

// check finds what is wrong between objects.
func (d *decoder) check(st State, lines map[any]*yaml.Node) {
	services := make(map[ServiceKey]bool)
	for i, s := range st.Services {
		if services[s.Key()] {
			d.Errorf(lines[s], fmt.Sprintf("services[%d]", i), "service %s is defined twice", s.Key())
		}
		services[s.Key()] = true
	}
	policies := make(map[string]bool)
	for i, p := range st.Policies {
		if policies[p.Key()] {
			d.Errorf(lines[p], fmt.Sprintf("policies[%d]", i), "policy %s is defined twice", p.Key())
		}
		policies[p.Key()] = true
	}
	uids := make(map[string]bool)
	for i, w := range st.Workloads {
		path := fmt.Sprintf("workloads[%d]", i)
		if uids[w.UID] {
			d.Errorf(lines[w], path, "workload %s is defined twice; give each its own uid", w.UID)
		}
		uids[w.UID] = true
		for _, key := range slices.SortedFunc(maps.Keys(w.Services), compareKeys) {
			if !services[key] {
				d.Errorf(lines[w], path+".services", "there is no service %s in this file", key)
			}
		}
		for j, key := range w.AuthorizationPolicies {
			if !policies[key] {
				d.Errorf(lines[w], fmt.Sprintf("%s.authorizationPolicies[%d]", path, j), "there is no policy %s in this file", key)
			}
		}
	}
	for i, p := range st.Policies {
		for g, group := range p.Groups {
			for r, rule := range group {
				for m := range rule {
					if rule[m].Empty() {
						d.Errorf(lines[p], fmt.Sprintf("policies[%d].rules[%d][%d][%d]", i, g, r, m), "a match without a condition never matches; name one")
					}
				}
			}
		}
	}
}

// Empty reports whether the match has no condition, so that it never matches.
func (m *Match) Empty() bool {
	return len(m.Namespaces)+len(m.NotNamespaces)+len(m.Principals)+len(m.NotPrincipals)+
		len(m.ServiceAccounts)+len(m.NotServiceAccounts)+len(m.SourceIPs)+len(m.NotSourceIPs)+
		len(m.DestinationIPs)+len(m.NotDestinationIPs)+len(m.DestinationPorts)+len(m.NotDestinationPorts) == 0
}
