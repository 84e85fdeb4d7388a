package dnsproxy

import (
	"cmp"
	"net/netip"
	"strings"

	"ztun.dev/ztun/internal/workload"
)

// A match is a service that a name means.
type match struct {
	service *workload.Service
	// stripped is the number of the name's first labels that mean the service, if a search domain of the cluster follows them; else 0.
	stripped int
}

// wildcard reports whether the service stands for many names.
func (m match) wildcard() bool { return strings.HasPrefix(m.service.Hostname, "*.") }

// Names are what names mean to a client: which service, and which addresses of it.
type Names struct {
	Snapshot           *workload.Snapshot
	Namespace          string // of the client
	Network            string // of the client
	Domain             string // of the cluster, by ClusterDomain
	PreferredNamespace string // as in Config
	NoIPv6             bool
}

// ClusterDomain is a domain as it was configured in lower case, without a dot at its end; of "" it is cluster.local.
func ClusterDomain(configured string) string {
	return cmp.Or(strings.ToLower(strings.TrimSuffix(configured, ".")), "cluster.local")
}

// Lookup returns the service that a program of a pod means by a name, in any case: by the search domains that Kubernetes gives to pods,
// unless the name ends with a dot. nil: the name is not one of the mesh, and is asked of a resolver.
func (n *Names) Lookup(name string) *workload.Service {
	name, absolute := strings.CutSuffix(strings.ToLower(name), ".")
	names := []string{name + "." + n.Namespace + ".svc." + n.Domain, name + ".svc." + n.Domain, name + "." + n.Domain, name}
	if absolute {
		names = names[3:]
	}
	for _, name := range names {
		if m, ok := n.find(name); ok {
			return m.service
		}
	}
	return nil
}

// Addresses are those of a service that the client can reach, in one family. They belong to the caller.
func (n *Names) Addresses(v *workload.Service, v6 bool) (list []netip.Addr) {
	if v6 && (n.NoIPv6 || v.IPFamilies == workload.FamilyIPv4) || !v6 && v.IPFamilies == workload.FamilyIPv6 {
		return nil
	}
	for _, a := range v.VIPs {
		if a.Network == n.Network && a.Addr.Is6() == v6 {
			list = append(list, a.Addr)
		}
	}
	if len(v.VIPs) > 0 {
		return list
	}
	for _, e := range n.Snapshot.Endpoints(v.Key()) {
		if e.Workload.Network != n.Network {
			continue
		}
		for _, a := range e.Workload.Addresses {
			if a.Is6() == v6 {
				list = append(list, a)
				break
			}
		}
	}
	return list
}

// find tries the name, then what Kubernetes takes it for, then both without each of the search domains that a pod's resolver may
// have appended. The first that a service has decides.
func (n *Names) find(name string) (match, bool) {
	if v := n.expand(name); v != nil {
		return match{service: v}, true
	}
	d := n.Domain
	for _, search := range []string{n.Namespace + ".svc." + d, "svc." + d, d} {
		s, ok := strings.CutSuffix(name, "."+search)
		if !ok || s == "" {
			continue
		}
		if v := n.expand(s); v != nil {
			return match{v, strings.Count(s, ".") + 1}, true
		}
	}
	return match{}, false
}

// expand tries a name and then its meanings in Kubernetes: service, service.namespace and so on.
func (n *Names) expand(name string) *workload.Service {
	if v := n.wild(name); v != nil {
		return v
	}
	d, ns := n.Domain, n.Namespace
	labels := strings.Split(name, ".")
	var meanings []string
	switch len(labels) {
	case 1:
		meanings = []string{name + "." + ns + ".svc." + d}
	case 2:
		meanings = []string{name + ".svc." + d, name + "." + ns + ".svc." + d}
	case 3:
		if labels[2] == "svc" {
			meanings = append(meanings, name+"."+d)
		}
		meanings = append(meanings, name+".svc."+d)
	case 4:
		if labels[3] == "svc" {
			meanings = append(meanings, name+"."+d)
		}
	}
	for _, m := range meanings {
		if v := n.wild(m); v != nil {
			return v
		}
	}
	return nil
}

// wild tries a name and then the wildcards above it, the most specific first.
func (n *Names) wild(name string) *workload.Service {
	if v := n.choose(name); v != nil {
		return v
	}
	for {
		_, parent, ok := strings.Cut(name, ".")
		if !ok {
			return nil
		}
		if v := n.choose("*." + parent); v != nil {
			return v
		}
		name = parent
	}
}

// choose picks among the services with a hostname: the client's namespace, canonical, preferred namespace, smallest namespace. One without
// virtual addresses is known only if it is a Kubernetes service: an external name without addresses is its own resolver's business.
func (n *Names) choose(host string) *workload.Service {
	headless := strings.HasSuffix(host, ".svc."+n.Domain)
	var best *workload.Service
	rank := 0
	for _, v := range n.Snapshot.ServicesNamed(host) {
		if len(v.VIPs) == 0 && !headless || !v.VisibleTo(n.Namespace) {
			continue
		}
		r := 1
		switch {
		case v.Namespace == n.Namespace:
			return v
		case v.Canonical:
			r = 3
		case v.Namespace == n.PreferredNamespace:
			r = 2
		}
		if r > rank { // of equal ones the first: the list is sorted
			best, rank = v, r
		}
	}
	return best
}
