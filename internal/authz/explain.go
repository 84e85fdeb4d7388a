package authz

import (
	"fmt"
	"strings"

	"ztun.dev/ztun/internal/workload"
)

// A Considered is a policy that applies, and what it says of a connection.
type Considered struct {
	Key     string
	Policy  *workload.Policy // nil: the workload lists it, and it has not arrived
	Matched bool
	Group   int    // the alternative that matched, from 1
	Failed  string // if none did: for each, the attribute that did not hold first
}

// Explain is Evaluate with what it is made of: all policies that apply, in the order of Evaluate, also those behind the one that
// settled it.
func Explain(s *workload.Snapshot, r *Request) (Verdict, []Considered) {
	v := Evaluate(s, r)
	if r.Workload == nil {
		return v, nil
	}
	var list []Considered
	f := facts{Request: r, principal: r.Peer.Principal()}
	missing := missingKeys(s, r.Workload)
	for p := range Applying(s, r.Workload) {
		if p == nil {
			list = append(list, Considered{Key: missing[0]})
			missing = missing[1:]
			continue
		}
		c := Considered{Key: p.Key(), Policy: p, Matched: f.match(p)}
		var failed []string
		for i, g := range p.Groups {
			if f.matchGroup(g) {
				c.Group = i + 1
				break
			}
			failed = append(failed, fmt.Sprintf("rule %d: %s", i+1, f.failedGroup(g)))
		}
		switch {
		case c.Matched:
		case len(p.Groups) == 0:
			c.Failed = "it has no rules"
		default:
			c.Failed = strings.Join(failed, "; ")
		}
		list = append(list, c)
	}
	return v, list
}

func missingKeys(s *workload.Snapshot, w *workload.Workload) (keys []string) {
	for _, key := range w.AuthorizationPolicies {
		if s.Policy(key) == nil {
			keys = append(keys, key)
		}
	}
	return keys
}

// failedGroup names the attribute of the first rule of a group that did not hold: of each of its matches the first.
func (f *facts) failedGroup(g workload.Group) string {
	for _, rule := range g {
		if f.matchRule(rule) {
			continue
		}
		var names []string
		for i := range rule {
			names = append(names, f.failed(&rule[i]))
		}
		return strings.Join(names, " or ")
	}
	return ""
}

// failed names the attribute of a match that does not hold, in the order of matchAll.
func (f *facts) failed(m *workload.Match) string {
	switch {
	case m.Empty():
		return "an empty match"
	case !holds(m.DestinationPorts, m.NotDestinationPorts, f.port):
		return fmt.Sprintf("destination port %d", f.Destination.Port())
	case !holds(m.Namespaces, m.NotNamespaces, f.namespace):
		return "source namespace " + said(f.Peer.Namespace)
	case !holds(m.Principals, m.NotPrincipals, f.identity):
		return "principal " + said(f.principal)
	case !holds(m.ServiceAccounts, m.NotServiceAccounts, f.serviceAccount):
		return "service account " + said(strings.TrimPrefix(f.Peer.Namespace+"/"+f.Peer.ServiceAccount, "/"))
	case !holds(m.SourceIPs, m.NotSourceIPs, f.from):
		return "source address " + f.Source.Addr().String()
	case !holds(m.DestinationIPs, m.NotDestinationIPs, f.to):
		return "destination address " + f.Destination.Addr().String()
	}
	return ""
}

func said(s string) string {
	if s == "" {
		return "(none)"
	}
	return s
}
