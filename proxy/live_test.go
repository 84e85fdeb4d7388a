package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// resolved are the hostnames of random cases.
var resolved = fakeResolver{"x": addrs("192.0.2.1"), "y": addrs("192.0.2.2"), "db": addrs("192.0.2.3")}

// A liveBed serves the flows of random cases, each by a Proxy of its own.
type liveBed struct {
	*loop.Manual
	store  workload.Store
	conns  *Connections
	rec    *telemetry.Recorder
	net    fakeUnderlay
	tunnel fakeTunnel
}

func newLiveBed(t *testing.T) *liveBed {
	t.Helper()
	b := &liveBed{Manual: loop.NewManual(epoch)}
	b.tunnel.g = b.Group()
	var err error
	if b.rec, err = telemetry.NewRecorder(telemetry.Config{Now: b.Group().Now, Log: slog.New(slog.DiscardHandler), Classify: ClassifyError}); err != nil {
		t.Fatal(err)
	}
	if b.conns, err = NewConnections(ConnectionsConfig{Store: &b.store, Group: b.Group(), Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.tunnel.close()
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// serve says what becomes of the flow of a case, by what the proxy opens for it and how it answers.
func (b *liveBed) serve(t *testing.T, c *RandomCase) string {
	t.Helper()
	q := &c.Query
	b.store.Replace(workload.State{Workloads: slices.Clone(c.State.Workloads), Services: slices.Clone(c.State.Services)})
	p, err := New(Config{
		Client: &workload.Client{UID: q.Source.UID}, Local: func(a netip.Addr) bool { return a == q.From }, Network: q.Network,
		Store: &b.store, Underlay: &b.net, Tunnel: &b.tunnel, DNS: echoDNS{}, Resolver: resolved, Records: b.rec, Connections: b.conns, Group: b.Group(),
		Rand: c.world.Uint64, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	b.net.dials, b.tunnel.targets = nil, nil
	req := &fakeRequest{flow: stack.Flow{Proto: stack.TCP, Src: netip.AddrPortFrom(q.From, 40000), Dst: q.Target}}
	p.ServeTCP(context.WithoutCancel(t.Context()), req)
	b.Settle()
	if req.app != nil {
		req.app.Reset()
		b.Settle()
	}
	switch opened := len(b.net.dials) + len(b.tunnel.targets); {
	case opened > 1:
		return fmt.Sprintf("%d attempts: %v %v", opened, b.net.dials, b.tunnel.targets)
	case len(b.net.dials) == 1 && req.answer == "accepted":
		return "passthrough " + strings.TrimPrefix(b.net.dials[0], "dial ")
	case len(b.tunnel.targets) == 1:
		x := b.tunnel.targets[0]
		if _, err := netip.ParseAddrPort(x.Authority); err == nil && req.answer == "accepted" {
			return fmt.Sprintf("HBONE %v to %s", x.NextHop, x.Authority)
		}
		return fmt.Sprintf("double HBONE %v to %s", x.NextHop, x.Authority)
	case opened == 0 && req.answer == "RST":
		return "refused"
	case opened == 0 && req.answer == "accepted":
		return "DNS"
	}
	return fmt.Sprintf("answer %q, opened %v %v", req.answer, b.net.dials, b.tunnel.targets)
}

// withAddresses replaces the hostnames in an outcome by what they are resolved to.
func withAddresses(outcome string) string {
	hop, authority, _ := strings.Cut(outcome, " to ")
	for name, ips := range resolved {
		hop = strings.Replace(hop, " "+name+":", " "+ips[0].String()+":", 1)
		if strings.HasPrefix(hop, "HBONE") {
			authority = strings.Replace(authority, name+":", ips[0].String()+":", 1)
		}
	}
	if authority == "" {
		return hop
	}
	return hop + " to " + authority
}

// What a proxy does with a flow is what the slow model allows, on 10,000 random states and flows.
func TestFlowsGoWhereTheModelSays(t *testing.T) {
	b := newLiveBed(t)
	kinds := make(map[string]int)
	for seed := range uint64(10_000) {
		c := NewRandomCase(seed)
		if c.Query.Target.Addr() == c.Query.From {
			continue // inbound
		}
		var want []string
		for _, o := range c.Outcomes() {
			want = append(want, withAddresses(o))
		}
		got := b.serve(t, c)
		if !slices.Contains(want, got) {
			t.Fatalf("seed %d: the flow to %v becomes %q, want one of %q", seed, c.Query.Target, got, want)
		}
		kind, _, _ := strings.Cut(got, " ")
		kinds[kind]++
	}
	if len(kinds) != 5 {
		t.Errorf("what became of the flows: %v, want all five", kinds)
	}
}

// policy is one at random, about what plaintext from 10.0.0.0/28 to port 80 or 8080 has.
func (r world) policy(i int) *workload.Policy {
	p := &workload.Policy{
		Name: fmt.Sprint("p", i), Namespace: r.one("a", "b"), Scope: workload.PolicyScope(r.IntN(3)), Action: workload.Action(r.IntN(2)), DryRun: r.IntN(6) == 0,
	}
	for range 1 + r.IntN(2) {
		var m workload.Match
		switch r.IntN(4) {
		case 0:
			m.DestinationPorts = []uint16{80}
		case 1:
			m.NotPrincipals = []workload.StringMatch{{Kind: workload.MatchPresence}}
		case 2:
			m.SourceIPs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/30")}
		case 3:
			m.Namespaces = []workload.StringMatch{{Value: "a"}}
		}
		p.Groups = append(p.Groups, workload.Group{{m}})
	}
	return p
}

// Inbound plaintext is let in where policy says so, on random states and flows. That policy is decided about as a slow model does is
// shown in package authz.
func TestInboundFlowsAreDecidedAboutByPolicy(t *testing.T) {
	b := newLiveBed(t)
	kinds := make(map[bool]int)
	for seed := range uint64(10_000) {
		c := NewRandomCase(seed)
		r, self := c.world, c.Query.Source
		if len(self.Addresses) == 0 {
			continue
		}
		for i := range r.IntN(4) {
			p := r.policy(i)
			c.State.Policies = append(c.State.Policies, p)
			if r.IntN(2) == 0 {
				self.AuthorizationPolicies = append(self.AuthorizationPolicies, p.Key())
			}
		}
		src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(9 + r.IntN(5))}), 40000)
		if r.IntN(2) == 0 {
			src = netip.MustParseAddrPort("10.0.0.3:40000")
		}
		dst := netip.AddrPortFrom(self.Addresses[0], []uint16{80, 8080}[r.IntN(2)])
		b.store.Replace(workload.State{Workloads: slices.Clone(c.State.Workloads), Services: slices.Clone(c.State.Services), Policies: slices.Clone(c.State.Policies)})
		p, err := New(Config{
			Client: &workload.Client{UID: self.UID}, Local: func(a netip.Addr) bool { return a == dst.Addr() }, Network: self.Network,
			Store: &b.store, Underlay: &b.net, Tunnel: &b.tunnel, DNS: echoDNS{}, Records: b.rec, Connections: b.conns, Group: b.Group(),
			Rand: r.Uint64, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		b.net.dials = nil
		req := &fakeRequest{flow: stack.Flow{Proto: stack.TCP, Src: src, Dst: dst}}
		p.ServeTCP(context.WithoutCancel(t.Context()), req)
		b.Settle()
		if req.app != nil {
			req.app.Reset()
			b.Settle()
		}
		v := authz.Evaluate(b.store.Snapshot(), &authz.Request{Source: src, Destination: dst, Workload: self})
		if allowed := req.answer == "accepted"; allowed != v.Allowed || (len(b.net.dials) == 1) != v.Allowed {
			t.Fatalf("seed %d: from %v to %v the answer is %q, opened %v; policy says %v", seed, src, dst, req.answer, b.net.dials, v)
		}
		kinds[v.Allowed]++
	}
	if kinds[true] < 500 || kinds[false] < 500 {
		t.Errorf("decisions: %v, want many of both", kinds)
	}
}
