// Package authz evaluates L4 authorization policies on the facts of one connection.
//
// [Evaluate] is a pure function of a [Request] and a snapshot: no I/O, no clock. The caller decides what becomes of the
// connection, and evaluates again when the state changes.
package authz

import (
	"net/netip"
	"slices"

	"ztun.dev/ztun/internal/workload"
)

// A Request is what is known of an inbound connection. Only this is matched: no header of the peer is.
type Request struct {
	Source      netip.AddrPort     // the TCP peer, unmapped
	Peer        workload.Identity  // what the peer's certificate proved; zero for plaintext
	Destination netip.AddrPort     // the pod's address and the port after every translation
	Workload    *workload.Workload // the destination
}

// A Reason says which step of the decision settled it.
type Reason uint8

// The reasons, in the order of the steps.
const (
	NoAllowPolicies Reason = iota // allowed: no ALLOW policy applies
	AllowMatched                  // allowed by Verdict.Policy
	DenyMatched                   // denied by Verdict.Policy
	NoAllowMatched                // denied: ALLOW policies apply, but none matched
	PolicyUnknown                 // denied for now: the workload lists Verdict.Policy, which has not arrived
	WorkloadUnknown               // denied: there is no destination workload to decide for
)

// A Verdict is the outcome.
type Verdict struct {
	Allowed bool
	Reason  Reason
	Policy  string   // key of the policy that decided, if one did
	DryRun  []string // keys of dry-run policies that matched; they decide nothing
}

func (v Verdict) String() string {
	switch v.Reason {
	case NoAllowPolicies:
		return "no allow policies"
	case AllowMatched:
		return "explicitly allowed by: " + v.Policy
	case DenyMatched:
		return "explicitly denied by: " + v.Policy
	case NoAllowMatched:
		return "allow policies exist, but none allowed"
	case PolicyUnknown:
		return "policy not yet received: " + v.Policy
	}
	return "destination workload unknown"
}

// Evaluate decides by the policies that apply to the destination: those of its namespace, the global ones, and those that it
// lists. Any DENY that matches denies; then, if any ALLOW applies, one has to match. A listed policy that is not in the
// snapshot denies unless a DENY did already: it may be one (the caller may wait for it to arrive).
func Evaluate(s *workload.Snapshot, r *Request) Verdict {
	w := r.Workload
	if w == nil {
		return Verdict{Reason: WorkloadUnknown}
	}
	var v Verdict
	var allow, allowed, unknown string
	consider := func(p *workload.Policy) bool {
		matched := Matches(p, r)
		switch {
		case p.DryRun:
			if matched {
				v.DryRun = append(v.DryRun, p.Key())
			}
		case p.Action == workload.Deny:
			return matched
		default:
			allow = p.Key()
			if matched && allowed == "" {
				allowed = p.Key()
			}
		}
		return false
	}
	deny := func(p *workload.Policy) Verdict {
		v.Reason, v.Policy = DenyMatched, p.Key()
		return v
	}
	for _, list := range [...][]*workload.Policy{s.NamespacePolicies(w.Namespace), s.GlobalPolicies()} {
		for _, p := range list {
			if consider(p) {
				return deny(p)
			}
		}
	}
	for _, key := range w.AuthorizationPolicies {
		p := s.Policy(key)
		if p == nil {
			if unknown == "" {
				unknown = key
			}
			continue
		}
		if applies(p, w) { // considered above
			continue
		}
		if consider(p) {
			return deny(p)
		}
	}
	switch {
	case unknown != "":
		v.Reason, v.Policy = PolicyUnknown, unknown
	case allow == "":
		v.Allowed, v.Reason = true, NoAllowPolicies
	case allowed != "":
		v.Allowed, v.Reason, v.Policy = true, AllowMatched, allowed
	default:
		v.Reason = NoAllowMatched
	}
	return v
}

// applies reports whether a policy applies to a workload by its scope alone.
func applies(p *workload.Policy, w *workload.Workload) bool {
	return p.Scope == workload.ScopePolicyGlobal || p.Scope == workload.ScopePolicyNamespace && p.Namespace == w.Namespace
}

// Matches reports whether any group of the policy matches: one without groups matches nothing.
func Matches(p *workload.Policy, r *Request) bool {
	for _, g := range p.Groups {
		if matchesGroup(g, r) {
			return true
		}
	}
	return false
}

func matchesGroup(g workload.Group, r *Request) bool {
	for _, rule := range g {
		if !matchesRule(rule, r) {
			return false
		}
	}
	return true
}

func matchesRule(rule workload.Rule, r *Request) bool {
	for i := range rule {
		if !rule[i].Empty() && matchesAll(&rule[i], r) {
			return true
		}
	}
	return len(rule) == 0
}

// matchesAll reports whether every condition of the match holds.
func matchesAll(m *workload.Match, r *Request) bool {
	src, dst := r.Source.Addr(), r.Destination.Addr()
	ns := func(s workload.StringMatch) bool { return s.Matches(r.Peer.Namespace) }
	principal := r.Peer.Principal()
	pr := func(s workload.StringMatch) bool { return !r.Peer.IsZero() && s.Matches(principal) }
	sa := func(s workload.ServiceAccount) bool {
		return !r.Peer.IsZero() && s.Namespace == r.Peer.Namespace && s.Name == r.Peer.ServiceAccount
	}
	from := func(p netip.Prefix) bool { return p.Contains(src) }
	to := func(p netip.Prefix) bool { return p.Contains(dst) }
	port := func(p uint16) bool { return p == r.Destination.Port() }
	return holds(m.Namespaces, m.NotNamespaces, ns) &&
		holds(m.Principals, m.NotPrincipals, pr) &&
		holds(m.ServiceAccounts, m.NotServiceAccounts, sa) &&
		holds(m.SourceIPs, m.NotSourceIPs, from) &&
		holds(m.DestinationIPs, m.NotDestinationIPs, to) &&
		holds(m.DestinationPorts, m.NotDestinationPorts, port)
}

// holds is one attribute: if there are values, one has to match; of the not_ values none may.
func holds[T any](values, not []T, match func(T) bool) bool {
	return (len(values) == 0 || slices.ContainsFunc(values, match)) && !slices.ContainsFunc(not, match)
}
