package authz

import (
	"slices"
	"strings"

	"ztun.dev/ztun/internal/workload"
)

// The decision once more, slowly and from the lists, as the specification tells it. It is compared with Evaluate and Explain.
type model struct {
	st  workload.State
	req *Request
}

// allowed is the whole decision.
func (m *model) allowed() bool {
	allows, allowed := false, false
	for _, p := range m.applying() {
		switch {
		case p.DryRun:
		case p.Action == workload.Deny && m.matches(p):
			return false
		case p.Action == workload.Allow:
			allows = true
			allowed = allowed || m.matches(p)
		}
	}
	return !m.missing() && (!allows || allowed)
}

// missing reports whether the workload lists a policy that is not there.
func (m *model) missing() bool {
	return slices.ContainsFunc(m.req.Workload.AuthorizationPolicies, func(key string) bool {
		return !slices.ContainsFunc(m.st.Policies, func(p *workload.Policy) bool { return p.Namespace+"/"+p.Name == key })
	})
}

// applying are the policies of the workload's namespace, the global ones, and those that it lists.
func (m *model) applying() (list []*workload.Policy) {
	w := m.req.Workload
	for _, p := range m.st.Policies {
		if p.Scope == workload.ScopePolicyNamespace && p.Namespace == w.Namespace || p.Scope == workload.ScopePolicyGlobal || slices.Contains(w.AuthorizationPolicies, p.Namespace+"/"+p.Name) {
			list = append(list, p)
		}
	}
	return list
}

// matches: any group, in it all rules, in each any match, in that all fields.
func (m *model) matches(p *workload.Policy) bool {
	for _, g := range p.Groups {
		all := true
		for _, r := range g {
			one := len(r) == 0
			for _, x := range r {
				one = one || m.holds(x)
			}
			all = all && one
		}
		if all {
			return true
		}
	}
	return false
}

func (m *model) holds(x workload.Match) bool {
	peer := m.req.Peer
	plain := peer == workload.Identity{}
	principal := ""
	if !plain {
		principal = strings.TrimPrefix(peer.String(), "spiffe://")
	}
	fields := 0
	ok := true
	field := func(positive, negative int, in, notIn bool) {
		fields += positive + negative
		ok = ok && (positive == 0 || in) && (negative == 0 || !notIn)
	}
	matchesText := func(list []workload.StringMatch, text string) bool {
		for _, s := range list {
			switch {
			case s.Kind == workload.MatchExact && text == s.Value,
				s.Kind == workload.MatchPrefix && strings.HasPrefix(text, s.Value),
				s.Kind == workload.MatchSuffix && strings.HasSuffix(text, s.Value),
				s.Kind == workload.MatchPresence && text != "":
				return true
			}
		}
		return false
	}
	isAccount := func(list []workload.ServiceAccount) bool {
		for _, a := range list {
			if !plain && a.Namespace == peer.Namespace && a.Name == peer.ServiceAccount {
				return true
			}
		}
		return false
	}
	from, to := m.req.Source.Addr(), m.req.Destination.Addr()
	var fromIn, fromNotIn, toIn, toNotIn bool
	for _, p := range x.SourceIPs {
		fromIn = fromIn || p.Contains(from)
	}
	for _, p := range x.NotSourceIPs {
		fromNotIn = fromNotIn || p.Contains(from)
	}
	for _, p := range x.DestinationIPs {
		toIn = toIn || p.Contains(to)
	}
	for _, p := range x.NotDestinationIPs {
		toNotIn = toNotIn || p.Contains(to)
	}
	port := m.req.Destination.Port()
	field(len(x.Namespaces), len(x.NotNamespaces), matchesText(x.Namespaces, peer.Namespace), matchesText(x.NotNamespaces, peer.Namespace))
	field(len(x.Principals), len(x.NotPrincipals), !plain && matchesText(x.Principals, principal), !plain && matchesText(x.NotPrincipals, principal))
	field(len(x.ServiceAccounts), len(x.NotServiceAccounts), isAccount(x.ServiceAccounts), isAccount(x.NotServiceAccounts))
	field(len(x.SourceIPs), len(x.NotSourceIPs), fromIn, fromNotIn)
	field(len(x.DestinationIPs), len(x.NotDestinationIPs), toIn, toNotIn)
	field(len(x.DestinationPorts), len(x.NotDestinationPorts), slices.Contains(x.DestinationPorts, port), slices.Contains(x.NotDestinationPorts, port))
	return fields > 0 && ok
}
