package dnsproxy

import (
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

// A finder looks for the service that a client means by a name.
type finder struct {
	server    *Server
	snapshot  *workload.Snapshot
	namespace string // of the client
}

// find tries the name, then what Kubernetes takes it for, then both without each of the search domains that a pod's resolver may
// have appended. The first that a service has decides.
func (f *finder) find(name string) (match, bool) {
	if v := f.expand(name); v != nil {
		return match{service: v}, true
	}
	d := f.server.domain
	for _, search := range []string{f.namespace + ".svc." + d, "svc." + d, d} {
		s, ok := strings.CutSuffix(name, "."+search)
		if !ok || s == "" {
			continue
		}
		if v := f.expand(s); v != nil {
			return match{v, strings.Count(s, ".") + 1}, true
		}
	}
	return match{}, false
}

// expand tries a name and then its meanings in Kubernetes: service, service.namespace and so on.
func (f *finder) expand(name string) *workload.Service {
	if v := f.wild(name); v != nil {
		return v
	}
	d, ns := f.server.domain, f.namespace
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
		if v := f.wild(m); v != nil {
			return v
		}
	}
	return nil
}

// wild tries a name and then the wildcards above it, the most specific first.
func (f *finder) wild(name string) *workload.Service {
	if v := f.choose(name); v != nil {
		return v
	}
	for {
		_, parent, ok := strings.Cut(name, ".")
		if !ok {
			return nil
		}
		if v := f.choose("*." + parent); v != nil {
			return v
		}
		name = parent
	}
}

// choose picks among the services with a hostname: the client's namespace, canonical, preferred namespace, smallest namespace. One without
// virtual addresses is known only if it is a Kubernetes service: an external name without addresses is its own resolver's business.
func (f *finder) choose(host string) *workload.Service {
	headless := strings.HasSuffix(host, ".svc."+f.server.domain)
	var best *workload.Service
	rank := 0
	for _, v := range f.snapshot.ServicesNamed(host) {
		if len(v.VIPs) == 0 && !headless || !v.VisibleTo(f.namespace) {
			continue
		}
		r := 1
		switch {
		case v.Namespace == f.namespace:
			return v
		case v.Canonical:
			r = 3
		case v.Namespace == f.server.cfg.PreferredNamespace:
			r = 2
		}
		if r > rank { // of equal ones the first: the list is sorted
			best, rank = v, r
		}
	}
	return best
}
