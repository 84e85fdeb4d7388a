package authz

import (
	"fmt"
	"net/netip"
	"testing"

	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/workload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type (
	match = workload.Match
	rule  = workload.Rule
	group = workload.Group
	str   = workload.StringMatch
)

func exact(s string) []str  { return []str{{Kind: workload.MatchExact, Value: s}} }
func prefix(s string) []str { return []str{{Kind: workload.MatchPrefix, Value: s}} }
func suffix(s string) []str { return []str{{Kind: workload.MatchSuffix, Value: s}} }

var present = []str{{Kind: workload.MatchPresence}}

func cidr(s string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(s).Masked()} }

func sa(ns, name string) []workload.ServiceAccount {
	return []workload.ServiceAccount{{Namespace: ns, Name: name}}
}

func policy(a workload.Action, groups ...group) *workload.Policy {
	return &workload.Policy{Namespace: "istio-system", Action: a, Scope: workload.ScopePolicyGlobal, Groups: groups}
}

func allow(groups ...group) *workload.Policy { return policy(workload.Allow, groups...) }
func deny(groups ...group) *workload.Policy  { return policy(workload.Deny, groups...) }

// one is a group of one rule with these matches.
func one(ms ...match) group { return group{rule(ms)} }

func dry(p *workload.Policy) *workload.Policy { p.DryRun = true; return p }

func scoped(p *workload.Policy, s workload.PolicyScope, ns string) *workload.Policy {
	p.Scope, p.Namespace = s, ns
	return p
}

func ports(p ...uint16) match { return match{DestinationPorts: p} }

func TestEvaluate(t *testing.T) {
	const (
		global = workload.ScopePolicyGlobal
		inNS   = workload.ScopePolicyNamespace
		listed = workload.ScopePolicyWorkload
	)
	type policies = []*workload.Policy
	tls := workload.Identity{TrustDomain: "td", Namespace: "web", ServiceAccount: "fe"}
	plain := workload.Identity{}
	notPort := func(p uint16) rule { return rule{{NotDestinationPorts: []uint16{p}}} }
	noPeer := rule{{NotPrincipals: present}}
	tests := []struct {
		id       int
		policies policies
		peer     workload.Identity
		want     Reason
		lists    []string // policies that the workload lists
	}{
		{1, nil, tls, NoAllowPolicies, nil},
		{2, nil, plain, NoAllowPolicies, nil},
		{3, policies{allow()}, tls, NoAllowMatched, nil},
		{4, policies{deny()}, tls, NoAllowPolicies, nil},
		{5, policies{allow(group{})}, plain, AllowMatched, nil},
		{6, policies{deny(group{})}, plain, DenyMatched, nil},
		{7, policies{allow(group{rule{}})}, plain, AllowMatched, nil},
		{8, policies{allow(one(match{}))}, tls, NoAllowMatched, nil},
		{9, policies{deny(one(match{}))}, tls, NoAllowPolicies, nil},
		{10, policies{allow(one(match{}, ports(8080)))}, tls, AllowMatched, nil},
		{11, policies{allow(one(match{Principals: exact("td/ns/web/sa/fe")}))}, tls, AllowMatched, nil},
		{12, policies{allow(one(match{Principals: exact("spiffe://td/ns/web/sa/fe")}))}, tls, NoAllowMatched, nil},
		{13, policies{allow(one(match{Principals: exact("cluster.local/ns/web/sa/fe")}))}, tls, NoAllowMatched, nil},
		{14, policies{allow(one(match{Principals: suffix("/ns/web/sa/fe")}))}, tls, AllowMatched, nil},
		{15, policies{allow(one(match{Principals: prefix("td/ns/web/")}))}, tls, AllowMatched, nil},
		{16, policies{allow(one(match{Principals: present}))}, tls, AllowMatched, nil},
		{17, policies{allow(one(match{Principals: present}))}, plain, NoAllowMatched, nil},
		{18, policies{deny(group{noPeer})}, tls, NoAllowPolicies, nil},
		{19, policies{deny(group{noPeer})}, plain, DenyMatched, nil},
		{20, policies{deny(group{noPeer, notPort(8080)})}, plain, NoAllowPolicies, nil},
		{21, policies{deny(group{noPeer, notPort(9090)})}, plain, DenyMatched, nil},
		{22, policies{deny(one(match{NotPrincipals: present, DestinationPorts: []uint16{8080}}))}, plain, DenyMatched, nil},
		{23, policies{deny(one(match{NotPrincipals: present, DestinationPorts: []uint16{9090}}))}, plain, NoAllowPolicies, nil},
		{24, policies{allow(one(match{Namespaces: exact("web")}))}, tls, AllowMatched, nil},
		{25, policies{allow(one(match{Namespaces: exact("web")}))}, plain, NoAllowMatched, nil},
		{26, policies{allow(one(match{NotNamespaces: exact("web")}))}, plain, AllowMatched, nil},
		{27, policies{allow(one(match{NotNamespaces: exact("web")}))}, tls, NoAllowMatched, nil},
		{28, policies{allow(one(match{Namespaces: prefix("")}))}, plain, AllowMatched, nil},
		{29, policies{allow(one(match{Namespaces: exact("")}))}, plain, AllowMatched, nil},
		{30, policies{allow(one(match{ServiceAccounts: sa("web", "fe")}))}, tls, AllowMatched, nil},
		{31, policies{allow(one(match{ServiceAccounts: sa("api", "fe")}))}, tls, NoAllowMatched, nil},
		{32, policies{allow(one(match{NotServiceAccounts: sa("web", "fe")}))}, plain, AllowMatched, nil},
		{33, policies{allow(one(match{SourceIPs: cidr("10.1.0.0/16")}))}, plain, AllowMatched, nil},
		{34, policies{allow(one(match{SourceIPs: cidr("10.1.9.9/16")}))}, plain, AllowMatched, nil},
		{35, policies{allow(one(match{SourceIPs: cidr("0.0.0.0/0")}))}, plain, AllowMatched, nil},
		{36, policies{allow(one(match{SourceIPs: cidr("::/0")}))}, tls, NoAllowMatched, nil},
		{37, policies{allow(one(match{NotSourceIPs: cidr("::/0")}))}, tls, AllowMatched, nil},
		{38, policies{allow(one(match{Namespaces: exact("web"), DestinationPorts: []uint16{80}}))}, tls, NoAllowMatched, nil},
		{39, policies{allow(one(match{Namespaces: exact("web")}, ports(80)))}, tls, AllowMatched, nil},
		{40, policies{allow(group{rule{{Namespaces: exact("web")}}, rule{ports(80)}})}, tls, NoAllowMatched, nil},
		{41, policies{allow(one(match{Namespaces: exact("zzz")}), one(ports(8080)))}, tls, AllowMatched, nil},
		{42, policies{allow(one(match{Namespaces: present, NotNamespaces: exact("web")}))}, tls, NoAllowMatched, nil},
		{43, policies{deny(one(ports(8080))), allow(group{})}, tls, DenyMatched, nil},
		{44, policies{deny(one(ports(1))), allow(one(ports(2)))}, tls, NoAllowMatched, nil},
		{45, policies{deny(one(ports(1)))}, tls, NoAllowPolicies, nil},
		{46, policies{allow(one(ports(1))), allow(one(ports(8080)))}, tls, AllowMatched, nil},
		{47, policies{dry(deny(one(ports(8080))))}, tls, NoAllowPolicies, nil},
		{48, policies{dry(allow(one(ports(1))))}, tls, NoAllowPolicies, nil},
		{49, policies{dry(allow(one(ports(8080)))), allow(one(ports(1)))}, tls, NoAllowMatched, nil},
		{50, policies{deny(group{noPeer}), allow(one(ports(8080)))}, plain, DenyMatched, nil},
		{51, policies{allow(one(match{DestinationIPs: cidr("10.2.2.2/32")}))}, tls, AllowMatched, nil},
		{52, policies{allow(one(match{NotDestinationPorts: []uint16{80, 8080}}))}, tls, NoAllowMatched, nil},
		{53, policies{deny(group{noPeer, notPort(8080), notPort(9090)})}, plain, NoAllowPolicies, nil},
		{54, policies{allow(one(match{Principals: suffix("fe")}))}, workload.Identity{TrustDomain: "td", Namespace: "evil", ServiceAccount: "cafe"}, AllowMatched, nil},
		{55, policies{scoped(deny(group{}), listed, "web")}, tls, NoAllowPolicies, nil},
		{56, policies{scoped(deny(group{}), listed, "other")}, tls, DenyMatched, []string{"other/p0"}},
		{57, policies{scoped(deny(group{}), inNS, "other")}, tls, NoAllowPolicies, nil},
		{58, policies{scoped(deny(group{}), global, "istio-system")}, tls, DenyMatched, nil},
		{59, nil, tls, PolicyUnknown, []string{"web/p"}},
		{60, policies{scoped(allow(one(match{Namespaces: exact("web")})), inNS, "web"), scoped(allow(one(ports(1))), listed, "web")}, tls, AllowMatched, []string{"web/p1"}},
		{61, policies{scoped(deny(group{}), listed, "web")}, tls, NoAllowPolicies, nil},
		{62, policies{deny(one(match{NotNamespaces: exact("web")}))}, plain, DenyMatched, nil},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("AZ-%d", tt.id), func(t *testing.T) {
			for i, p := range tt.policies {
				p.Name = fmt.Sprint("p", i)
			}
			s := workload.NewSnapshot(workload.State{Policies: tt.policies})
			r := &Request{
				Source: netip.MustParseAddrPort("10.1.1.1:999"), Peer: tt.peer, Destination: netip.MustParseAddrPort("10.2.2.2:8080"),
				Workload: &workload.Workload{Namespace: "web", AuthorizationPolicies: tt.lists},
			}
			got := Evaluate(s, r)
			if got.Reason != tt.want || got.Allowed != (tt.want <= AllowMatched) {
				t.Errorf("got %v (allowed %v), want reason %v", got, got.Allowed, Verdict{Reason: tt.want})
			}
		})
	}
}

func TestVerdictNamesThePolicy(t *testing.T) {
	p := scoped(deny(group{}), workload.ScopePolicyNamespace, "web")
	p.Name = "no-one"
	s := workload.NewSnapshot(workload.State{Policies: []*workload.Policy{p, dryNamed("watch")}})
	r := &Request{Workload: &workload.Workload{Namespace: "web"}}
	if got, want := Evaluate(s, r).String(), "explicitly denied by: web/no-one"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := Evaluate(s, &Request{Workload: &workload.Workload{Namespace: "q"}}); len(got.DryRun) != 1 || got.DryRun[0].Key() != "istio-system/watch" || !got.Allowed {
		t.Errorf("dry-run: got %+v, want it named and without effect", got)
	}
	if got := Evaluate(s, &Request{}); got.Allowed || got.Reason != WorkloadUnknown {
		t.Errorf("without a workload: got %+v, want denied", got)
	}
}

func TestPoliciesForTrialAndMissingOnes(t *testing.T) {
	trial := func(p *workload.Policy, name string) *workload.Policy { dry(p).Name = name; return p }
	matched, missed := allow(one(ports(8080))), allow(one(ports(1)))
	tests := []struct {
		name     string
		policies []*workload.Policy
		lists    []string
		ignore   bool
		want     string // verdict; trials; missed; missing
	}{
		{"an ALLOW that matches", []*workload.Policy{trial(matched, "a")}, nil, false, "no allow policies [a] false "},
		{"ALLOWs that do not", []*workload.Policy{trial(missed, "b")}, nil, false, "no allow policies [] true "},
		{"one that does, one that does not", []*workload.Policy{matched, missed}, nil, false, "no allow policies [a] false "},
		{"beside one in force", []*workload.Policy{missed, allow(group{})}, nil, false, "explicitly allowed by: istio-system/ [] false "},
		{"CP-96 missing", nil, []string{"web/p"}, false, "policy not yet received: web/p [] false "},
		{"CP-96 missing and not heeded", nil, []string{"web/p", "web/q"}, true, "no allow policies [] false web/p"},
		{"missing, not heeded, denied", []*workload.Policy{allow(one(ports(1)))}, []string{"web/p"}, true, "allow policies exist, but none allowed [] false web/p"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := workload.NewSnapshot(workload.State{Policies: tt.policies})
			v := Evaluate(s, &Request{
				Destination: netip.MustParseAddrPort("10.2.2.2:8080"), Workload: &workload.Workload{Namespace: "web", AuthorizationPolicies: tt.lists}, IgnoreMissing: tt.ignore,
			})
			names := []string{}
			for _, p := range v.DryRun {
				names = append(names, p.Name)
			}
			if got := fmt.Sprint(v, " ", names, v.DryRunMissed, " ", v.Missing); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func dryNamed(name string) *workload.Policy {
	p := dry(deny(group{}))
	p.Name = name
	return p
}

func TestEvaluateAllocatesKeysOnly(t *testing.T) {
	s := workload.NewSnapshot(workload.State{Policies: []*workload.Policy{scoped(allow(one(ports(8080))), workload.ScopePolicyNamespace, "web")}})
	r := &Request{Destination: netip.MustParseAddrPort("10.2.2.2:8080"), Workload: &workload.Workload{Namespace: "web"}}
	if n := testing.AllocsPerRun(100, func() { Evaluate(s, r) }); n > 4 {
		t.Errorf("Evaluate allocates %v times per call, want at most 4", n)
	}
}

// BenchmarkEvaluate is a decision that no policy of many settles: the re-check of an open connection.
func BenchmarkEvaluate(b *testing.B) {
	for _, n := range []int{1, 10, 100, 200} {
		b.Run(fmt.Sprintf("policies=%d", n), func(b *testing.B) {
			var st workload.State
			for i := range n {
				p := deny(one(match{Principals: exact(fmt.Sprintf("td/ns/web/sa/other-%d", i)), DestinationPorts: []uint16{8080}}))
				p.Name = fmt.Sprint(i)
				st.Policies = append(st.Policies, p)
			}
			s := workload.NewSnapshot(st)
			r := &Request{
				Source: netip.MustParseAddrPort("10.1.1.1:999"), Peer: workload.Identity{TrustDomain: "td", Namespace: "web", ServiceAccount: "fe"},
				Destination: netip.MustParseAddrPort("10.2.2.2:8080"), Workload: &workload.Workload{Namespace: "web"},
			}
			b.ReportAllocs()
			for b.Loop() {
				if v := Evaluate(s, r); !v.Allowed {
					b.Fatal(v)
				}
			}
		})
	}
}
