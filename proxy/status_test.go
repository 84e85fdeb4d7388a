package proxy

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
)

// status is that of the only open connection.
func (b *bench) status(t *testing.T) telemetry.Status {
	t.Helper()
	list := openConns(b)
	if len(list) != 1 {
		t.Fatalf("%d connections are open, want one", len(list))
	}
	return list[0].Status(b.Group().Now())
}

func TestStatusOfAConnection(t *testing.T) {
	b := newBench(t, newMesh())
	req := request("1.2.3.4:80")
	b.ServeTCP(t.Context(), req)
	b.Settle()
	expect := func(what string, state telemetry.State, idle time.Duration) {
		t.Helper()
		if s := b.status(t); s.State != state || s.Idle != idle {
			t.Errorf("%s: %v, idle %v; want %v, idle %v", what, s.State, s.Idle, state, idle)
		}
	}
	expect("at first", telemetry.Open, 0)
	b.Advance(time.Minute)
	expect("after a minute", telemetry.Open, time.Minute)
	if _, err := req.app.TryWrite([]byte("x")); err != nil {
		t.Fatal(err)
	}
	b.Settle()
	expect("when a byte was moved", telemetry.Open, 0)
	b.Drain()
	expect("while the pod takes no new ones", telemetry.Draining, 0)
	if err := req.app.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	b.Advance(time.Second)
	expect("when the pod has ended", telemetry.HalfClosedLocal, time.Second)
	req.app.Reset()
	b.Settle()
}

func TestStatusNamesTheSideThatHasEnded(t *testing.T) {
	b := newBench(t, newMesh())
	req := request("1.2.3.4:80")
	b.ServeTCP(t.Context(), req)
	b.Settle()
	if err := b.net.far[0].CloseWrite(); err != nil {
		t.Fatal(err)
	}
	b.Settle()
	if s := b.status(t); s.State != telemetry.HalfClosedRemote {
		t.Errorf("outbound, the server has ended: %v", s.State)
	}
	req.app.Reset()
	b.Settle()

	in := inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")
	b.ServeTCP(t.Context(), in)
	b.Settle()
	if err := in.app.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	b.Settle()
	if s := b.status(t); s.State != telemetry.HalfClosedRemote {
		t.Errorf("inbound, the client has ended: %v", s.State)
	}
	in.app.Reset()
	b.Settle()
}

func TestStatusWhileConnecting(t *testing.T) {
	b := newBench(t, newMesh())
	b.net.never = map[netip.AddrPort]bool{netip.MustParseAddrPort("1.2.3.4:80"): true}
	req := request("1.2.3.4:80")
	b.ServeTCP(t.Context(), req)
	b.Advance(3 * time.Second)
	if s := b.status(t); s.State != telemetry.Connecting || s.Idle != 3*time.Second {
		t.Errorf("%v, idle %v; want connecting for 3 s", s.State, s.Idle)
	}
	b.Advance(time.Minute)
}

func TestStatusNamesTunnelAndPolicy(t *testing.T) {
	m := newMesh()
	b := newBench(t, m)
	b.records.Each(func(*telemetry.Conn) { t.Error("a connection is open before") })
	in := inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")
	allow := strict()
	allow.Name, allow.Action, allow.Groups = "all", 0, allow.Groups[:1]
	m.more.Policies = append(m.more.Policies, allow)
	m.client.AuthorizationPolicies = []string{allow.Key()}
	b.store.Replace(m.state())
	b.ServeTCP(t.Context(), in)
	b.Settle()
	if s := b.status(t); s.Policy != allow.Key() {
		t.Errorf("policy %q, want %q", s.Policy, allow.Key())
	}
	in.app.Reset()
	b.Settle()
}

// slowDial takes its time on the clock of the group.
type slowDial struct {
	*fakeUnderlay
	g    *loop.Group
	time time.Duration
}

func (u slowDial) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	if err := loop.Await(ctx, func(wake func()) { u.g.After(u.time, wake) }); err != nil {
		return nil, err
	}
	return u.fakeUnderlay.Dial(ctx, dst)
}

// What ztun itself adds to a new connection is seen apart from what the network takes.
func TestStatusTellsWhatTheSetUpTook(t *testing.T) {
	t.Run("FP-139", func(t *testing.T) {
		b := newBench(t, newMesh())
		b.cfg.Underlay = slowDial{b.net, b.Group(), 30 * time.Millisecond}
		req := request("1.2.3.4:80")
		b.ServeTCP(t.Context(), req)
		b.Advance(30 * time.Millisecond)
		s := b.status(t)
		for step, want := range map[telemetry.Step]time.Duration{
			telemetry.StepClassify: 0, telemetry.StepResolve: 0, telemetry.StepConnect: 30 * time.Millisecond, telemetry.StepTLS: 0, telemetry.StepResponse: 0,
		} {
			if got := s.Steps[step]; got != want {
				t.Errorf("%v took %v, want %v", step, got, want)
			}
		}
		req.app.Reset()
		b.Settle()
	})
	t.Run("FP-139 over a tunnel", func(t *testing.T) {
		c := newChain(t)
		client, server := c.pair(t)
		traces := make(map[string]int)
		for _, x := range openConns(c.bench) {
			traces[x.TraceID]++
			s := x.Status(c.Group().Now())
			if x.Direction == telemetry.Outbound && !s.Tunnel.IsValid() {
				t.Errorf("the outbound connection names no tunnel: %+v", s)
			}
			if x.TraceID == "" || len(strings.Trim(x.TraceID, "0123456789abcdef")) > 0 {
				t.Errorf("trace id %q", x.TraceID)
			}
		}
		if len(traces) != 1 {
			t.Errorf("both ends of one connection have the traces %v, want one", traces)
		}
		client.Close()
		server.Close()
		c.Settle()
	})
}
