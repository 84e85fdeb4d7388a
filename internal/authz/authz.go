// Package authz evaluates L4 authorization policies on the facts of one connection.
//
// [Evaluate] is a pure function of a [Request] and a snapshot: no I/O, no clock. The caller decides what becomes of the
// connection, and evaluates again when the state changes.
package authz

import (
	"iter"
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

	IgnoreMissing bool // decide as if a policy that the workload lists and that has not arrived were not listed (ZTUN_UNKNOWN_POLICY)
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

// The names of the reasons, as metrics have them.
var reasonNames = []string{"no_allow_policies", "allow_matched", "deny_matched", "no_allow_matched", "policy_unknown", "workload_unknown"}

func (r Reason) String() string { return reasonNames[r] }

// A Verdict is the outcome.
type Verdict struct {
	Allowed bool
	Reason  Reason
	Policy  string // key of the policy that decided, if one did
	Missing string // key of a policy that Request.IgnoreMissing left out

	// What policies for trial would have done. They decide nothing.
	DryRun       []*workload.Policy // those that matched
	DryRunMissed bool               // there are ALLOW policies, all of them for trial, and none matched
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

// Applying are the policies that decide about connections to a workload: those of its namespace, the global ones, and those that it
// lists, in the order in which they are considered. For one that it lists and that is not in the snapshot there is a nil.
//
// Two decisions about the same connection differ only if this sequence does.
func Applying(s *workload.Snapshot, w *workload.Workload) iter.Seq[*workload.Policy] {
	return func(yield func(*workload.Policy) bool) {
		for _, list := range [...][]*workload.Policy{s.NamespacePolicies(w.Namespace), s.GlobalPolicies()} {
			for _, p := range list {
				if !yield(p) {
					return
				}
			}
		}
		for _, key := range w.AuthorizationPolicies {
			if p := s.Policy(key); p != nil && applies(p, w) {
				continue // it was among those above
			} else if !yield(p) {
				return
			}
		}
	}
}

// applies reports whether a policy applies to a workload by its scope alone.
func applies(p *workload.Policy, w *workload.Workload) bool {
	return p.Scope == workload.ScopePolicyGlobal || p.Scope == workload.ScopePolicyNamespace && p.Namespace == w.Namespace
}

// Evaluate decides by the policies that apply to the destination. Any DENY that matches denies; then, if any ALLOW applies, one has
// to match. A listed policy that is not in the snapshot denies unless a DENY did already: it may be one (the caller may wait for it
// to arrive).
func Evaluate(s *workload.Snapshot, r *Request) Verdict {
	if r.Workload == nil {
		return Verdict{Reason: WorkloadUnknown}
	}
	var v Verdict
	var allowed *workload.Policy
	allows, missing, trials, trialMatched := false, false, false, false
	f := facts{Request: r, principal: r.Peer.Principal()}
	for p := range Applying(s, r.Workload) {
		switch {
		case p == nil:
			missing = true
		case p.DryRun:
			matched := f.match(p)
			if matched {
				v.DryRun = append(v.DryRun, p)
			}
			if p.Action == workload.Allow {
				trials, trialMatched = true, trialMatched || matched
			}
		case p.Action == workload.Deny:
			if f.match(p) {
				v.Reason, v.Policy = DenyMatched, p.Key()
				return v
			}
		case allowed == nil:
			allows = true
			if f.match(p) {
				allowed = p
			}
		}
	}
	v.DryRunMissed = !allows && trials && !trialMatched
	if missing && r.IgnoreMissing {
		v.Missing, missing = firstMissing(s, r.Workload), false
	}
	switch {
	case missing:
		v.Reason, v.Policy = PolicyUnknown, firstMissing(s, r.Workload)
	case !allows:
		v.Allowed, v.Reason = true, NoAllowPolicies
	case allowed != nil:
		v.Allowed, v.Reason, v.Policy = true, AllowMatched, allowed.Key()
	default:
		v.Reason = NoAllowMatched
	}
	return v
}

func firstMissing(s *workload.Snapshot, w *workload.Workload) string {
	i := slices.IndexFunc(w.AuthorizationPolicies, func(key string) bool { return s.Policy(key) == nil })
	return w.AuthorizationPolicies[i]
}

// Changed says what of a change of the policies that apply (Applying) can deny a connection which they have allowed before: one of deny has
// to match it. all: more than DENY policies have changed, or one is missing, and it is to be evaluated anew.
func Changed(before, after []*workload.Policy) (deny []*workload.Policy, all bool) {
	had := make(map[*workload.Policy]bool, len(before))
	for _, p := range before {
		if p == nil {
			return nil, true
		}
		had[p] = true
	}
	for _, p := range after {
		switch {
		case p == nil:
			return nil, true
		case had[p]:
			delete(had, p)
		case p.DryRun:
		case p.Action == workload.Deny:
			deny = append(deny, p)
		default:
			return nil, true
		}
	}
	for p := range had { // they have gone
		if !p.DryRun && p.Action != workload.Deny {
			return nil, true
		}
	}
	return deny, false
}

// Denied decides by the DENY policies of Changed alone. False: none matches.
func Denied(deny []*workload.Policy, r *Request) (Verdict, bool) {
	f := facts{Request: r, principal: r.Peer.Principal()}
	for _, p := range deny {
		if f.match(p) {
			return Verdict{Reason: DenyMatched, Policy: p.Key()}, true
		}
	}
	return Verdict{}, false
}

// facts are a Request and what is made of it once for all policies.
type facts struct {
	*Request
	principal string
}

// match reports whether any group of the policy matches: one without groups matches nothing.
func (f *facts) match(p *workload.Policy) bool {
	return slices.ContainsFunc(p.Groups, f.matchGroup)
}

func (f *facts) matchGroup(g workload.Group) bool {
	for _, rule := range g {
		if !f.matchRule(rule) {
			return false
		}
	}
	return true
}

func (f *facts) matchRule(rule workload.Rule) bool {
	for i := range rule {
		if !rule[i].Empty() && f.matchAll(&rule[i]) {
			return true
		}
	}
	return len(rule) == 0
}

// matchAll reports whether every condition of the match holds.
func (f *facts) matchAll(m *workload.Match) bool {
	return holds(m.DestinationPorts, m.NotDestinationPorts, f.port) &&
		holds(m.Namespaces, m.NotNamespaces, f.namespace) &&
		holds(m.Principals, m.NotPrincipals, f.identity) &&
		holds(m.ServiceAccounts, m.NotServiceAccounts, f.serviceAccount) &&
		holds(m.SourceIPs, m.NotSourceIPs, f.from) &&
		holds(m.DestinationIPs, m.NotDestinationIPs, f.to)
}

func (f *facts) port(p uint16) bool                    { return p == f.Destination.Port() }
func (f *facts) namespace(s workload.StringMatch) bool { return s.Matches(f.Peer.Namespace) }
func (f *facts) from(p netip.Prefix) bool              { return p.Contains(f.Source.Addr()) }
func (f *facts) to(p netip.Prefix) bool                { return p.Contains(f.Destination.Addr()) }

// identity compares principals: without an identity none matches.
func (f *facts) identity(s workload.StringMatch) bool {
	return f.principal != "" && s.Matches(f.principal)
}

func (f *facts) serviceAccount(s workload.ServiceAccount) bool {
	return f.principal != "" && s.Namespace == f.Peer.Namespace && s.Name == f.Peer.ServiceAccount
}

// holds is one attribute: if there are values, one has to match; of the not_ values none may. Most matches have most attributes
// empty, so that has to be cheap.
func holds[T any](values, not []T, match func(T) bool) bool {
	return len(values) == 0 && len(not) == 0 || given(values, not, match)
}

func given[T any](values, not []T, match func(T) bool) bool {
	return (len(values) == 0 || slices.ContainsFunc(values, match)) && !slices.ContainsFunc(not, match)
}
