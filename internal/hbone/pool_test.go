package hbone

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// openMany opens n streams at once, each in a set-up of its own, and returns those that came about.
func (ms *mesh) openMany(n int) (open []Stream) {
	ms.t.Helper()
	for range n {
		ms.m.Group().Go(context.Background(), func(ctx context.Context) {
			s, err := ms.pool.Open(ctx, ms.target)
			if err != nil {
				ms.t.Errorf("Open: %v", err)
				return
			}
			open = append(open, s)
		})
	}
	ms.m.Settle()
	return open
}

func (ms *mesh) close(open ...Stream) {
	for _, s := range open {
		s.Ref().Post(func() { _ = s.Close() })
	}
	ms.m.Settle()
}

// bulk makes the tunnel of a stream bulk, by the echo of 3 MiB.
func (ms *mesh) bulk(s Stream) {
	ms.t.Helper()
	x := startExchange(s, pattern(3<<20))
	if ms.m.Settle(); x.err != io.EOF {
		ms.t.Fatalf("echo ended with %v", x.err)
	}
}

// TestPoolBurstBeyondPeerLimit: more streams at once than the peer takes, before it could say how many: what it refused goes to
// tunnels that are given no more than it takes.
func TestPoolBurstBeyondPeerLimit(t *testing.T) {
	ms := newMesh(t, meshConfig{server: ServerConfig{Settings: Settings{MaxStreams: 3}}})
	open := ms.openMany(40)
	if len(open) != 40 || len(ms.conns) != 14 {
		t.Errorf("%d streams on %d tunnels, want 40 on 14", len(open), len(ms.conns))
	}
	ms.close(open...)
}

// TestPoolRetryElsewhere: a stream that a tunnel refused is not given to it again, although it has room: then, or later.
func TestPoolRetryElsewhere(t *testing.T) {
	for _, limit := range []int{1, 2} {
		ms := newMesh(t, meshConfig{pool: PoolConfig{MaxStreams: limit}})
		first := ms.mustOpen()
		var refusing *pooled
		for pt := range ms.pool.tunnels {
			refusing = pt
		}
		var got *pooled
		ms.m.Group().Go(context.Background(), func(ctx context.Context) {
			pt, _, err := ms.pool.checkOut(ctx, ms.target, refusing.seq)
			if err != nil {
				t.Error(err)
			}
			got = pt
		})
		for ms.pool.Stats().Waiters == 0 && ms.m.Step() {
		}
		ms.close(first) // makes room, while the dial is under way
		if got == nil || got == refusing {
			t.Errorf("limit %d: the stream was given to %p, the tunnel that had refused it is %p", limit, got, refusing)
		}
	}
}

// TestPoolBulk: a bulk tunnel takes no new stream while there may be another; there may be so many, and it is calm again once it
// moves little.
func TestPoolBulk(t *testing.T) {
	ms := newMesh(t, meshConfig{pool: PoolConfig{ExtraTunnels: 2}})
	keep := []Stream{ms.mustOpen()}
	for want := 1; want <= 3; want++ {
		s := ms.mustOpen()
		if len(ms.conns) != want {
			t.Fatalf("%d tunnels, want %d", len(ms.conns), want)
		}
		keep = append(keep, ms.mustOpen())
		ms.bulk(s)
	}
	keep = append(keep, ms.mustOpen(), ms.mustOpen())
	if len(ms.conns) != 3 {
		t.Errorf("%d tunnels while all are bulk, want the 3 that there may be", len(ms.conns))
	}
	var spread []int
	for pt := range ms.pool.tunnels {
		spread = append(spread, pt.open)
	}
	if slices.Sort(spread); !slices.Equal(spread, []int{2, 2, 2}) {
		t.Errorf("%v streams on the tunnels, want those with the fewest to be chosen", spread)
	}
	ms.m.Advance(calmTime)
	ms.m.Advance(calmTime)
	for pt := range ms.pool.tunnels {
		if pt.busy {
			t.Error("a tunnel that moves nothing is bulk")
		}
	}
	keep = append(keep, ms.mustOpen())
	if len(ms.conns) != 3 {
		t.Errorf("%d tunnels once all are calm, want 3", len(ms.conns))
	}
	ms.close(keep...)
}

// TestPoolBulkWithoutAnother: if the further tunnel fails, or takes long, the bulk one is good enough.
func TestPoolBulkWithoutAnother(t *testing.T) {
	for _, how := range []string{"refused", "silent"} {
		t.Run(how, func(t *testing.T) {
			ms := newMesh(t, meshConfig{})
			keep, s := ms.mustOpen(), ms.mustOpen()
			ms.bulk(s)
			ms.pool.cfg.Dialer = dialFunc(func(ctx context.Context, _ netip.AddrPort) (loop.Conn, error) {
				if how == "silent" {
					return nil, loop.Await(ctx, func(func()) {})
				}
				return nil, errors.New("refused")
			})
			var got Stream
			ms.m.Group().Go(context.Background(), func(ctx context.Context) { got, _ = ms.pool.Open(ctx, ms.target) })
			ms.m.Settle()
			if (got != nil) != (how == "refused") {
				t.Errorf("got a stream at once: %v", got != nil)
			}
			if ms.m.Advance(extraWait); got == nil || got.Ref() != keep.Ref() {
				t.Fatal("the tunnel that there is was not used in the end")
			}
			ms.close(got)
			ms.close(keep)
		})
	}
}

// TestPoolStalled: a tunnel whose peer gives no connection credit takes no new streams while there may be another.
func TestPoolStalled(t *testing.T) {
	ms := newMesh(t, meshConfig{})
	s := ms.mustOpen()
	var tn *tunnel
	s.Ref().Post(func() {
		tn = s.(*stream).t
		tn.eng.send = 0
		tn.kick()
	})
	ms.m.Advance(stallTime)
	other := ms.mustOpen()
	if len(ms.conns) != 2 {
		t.Errorf("%d tunnels, want 2", len(ms.conns))
	}
	s.Ref().Post(func() {
		tn.eng.send = 8 << 20
		tn.kick()
	})
	ms.m.Settle()
	third := ms.mustOpen()
	if third.Ref() != s.Ref() {
		t.Error("the tunnel that has credit again was not used")
	}
	ms.close(s, other, third)
}

// TestPoolBackoff: after a failure nobody dials for a while; those who come meanwhile share the next attempt.
func TestPoolBackoff(t *testing.T) {
	dials := 0
	ms := newMesh(t, meshConfig{pool: PoolConfig{Dialer: dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
		dials++
		return nil, errors.New("refused")
	})}})
	start := ms.m.Group().Now()
	failed := 0
	again := func(ctx context.Context) {
		for ms.m.Group().Now().Sub(start) < 10*time.Second {
			if _, err := ms.pool.Open(ctx, ms.target); err == nil {
				t.Error("Open without a peer")
			}
			failed++
		}
	}
	for range 50 {
		ms.m.Group().Go(context.Background(), again)
	}
	ms.m.Advance(12 * time.Second)
	if dials < 10 || dials > 16 || failed != 50*dials {
		t.Errorf("%d dials in 10 s for %d failures of 50 callers, want 10 to 16, and each failure shared", dials, failed)
	}
	if st := ms.pool.Stats(); st != (PoolStats{}) {
		t.Errorf("left: %+v", st)
	}
	before := ms.m.Group().Now()
	ms.do(func(ctx context.Context) { _, _ = ms.pool.Open(ctx, ms.target) })
	if waited := ms.m.Group().Now().Sub(before); waited > 0 {
		t.Errorf("the first attempt after a while waited %v", waited)
	}
}

// TestPoolCertificate: tunnels made with an earlier certificate take no new streams; those that are open go on.
func TestPoolCertificate(t *testing.T) {
	p := newPKI(t)
	server := p.serverTLS(server1.String())
	ms := newMesh(t, meshConfig{pool: PoolConfig{MaxStreams: 2}, server: ServerConfig{TLS: serverFrom(server)}})
	older, newer := p.clientTLS(client1.String()), p.clientTLS(client1.String())
	ms.pool.cfg.TLS = clientFrom(older)
	a, b := ms.mustOpen(), ms.mustOpen()
	ms.close(b) // room on the first tunnel
	ms.pool.cfg.TLS = clientFrom(newer)
	ms.target.PeerUID = "another"
	c := ms.mustOpen() // another key: its handshake shows the new leaf
	ms.target.PeerUID = ""
	d := ms.mustOpen()
	if d.Ref() == a.Ref() || len(ms.conns) != 3 {
		t.Errorf("%d tunnels: that of the earlier certificate took a new stream", len(ms.conns))
	}
	ms.pool.CertificateChanged()
	e := ms.mustOpen()
	if e.Ref() == d.Ref() || len(ms.conns) != 4 {
		t.Errorf("%d tunnels after CertificateChanged, want 4", len(ms.conns))
	}
	x := startExchange(a, []byte("goes on"))
	ms.m.Settle()
	if string(x.got) != "goes on" {
		t.Errorf("the open stream of the first tunnel answered %q, %v", x.got, x.err)
	}
	ms.close(c, d, e)
	if st := ms.pool.Stats(); st.Tunnels != 1 {
		t.Errorf("%+v; want the last tunnel only", st)
	}
}

// TestPoolForget: after Forget no stream goes to a tunnel of the workload that was.
func TestPoolForget(t *testing.T) {
	ms := newMesh(t, meshConfig{})
	ms.target.PeerUID = "pod-1"
	a := ms.mustOpen()
	ms.pool.Forget("pod-2")
	b := ms.mustOpen()
	if b.Ref() != a.Ref() {
		t.Error("the tunnel of another workload was forgotten")
	}
	ms.pool.Forget("pod-1")
	c := ms.mustOpen()
	if c.Ref() == a.Ref() {
		t.Error("a tunnel of a workload that was forgotten took a stream")
	}
	ms.close(a, b, c)
	if st := ms.pool.Stats(); st.Tunnels != 1 {
		t.Errorf("%+v; want the last tunnel only", st)
	}
}

// TestTunnelAge: at the end of the earlier of the two certificates, or at the age that is set, both ends of a tunnel take no
// new streams; open ones go on, and the tunnel closes with the last of them.
func TestTunnelAge(t *testing.T) {
	for _, side := range []string{"client", "server", "client's certificate", "server's certificate"} {
		t.Run(side, func(t *testing.T) {
			var cfg meshConfig
			p := newPKI(t)
			stls, ctls := p.serverTLS(server1.String()), p.clientTLS(client1.String())
			ends := func(c *tls.Config) { c.Certificates[0].Leaf.NotAfter = t0.Add(time.Hour) }
			switch side {
			case "client":
				cfg.pool.MaxAge = time.Hour
			case "server":
				cfg.server.MaxAge = time.Hour
			case "client's certificate":
				ends(ctls)
			default:
				ends(stls)
			}
			cfg.server.TLS = serverFrom(stls)
			ms := newMesh(t, cfg)
			ms.pool.cfg.TLS = clientFrom(ctls)
			a := ms.mustOpen()
			ms.m.Advance(59 * time.Minute)
			if b := ms.mustOpen(); b.Ref() != a.Ref() {
				t.Error("a tunnel was given up before its time")
			} else {
				ms.close(b)
			}
			ms.m.Advance(2 * time.Minute)
			c := ms.mustOpen()
			if c.Ref() == a.Ref() {
				t.Error("a tunnel took a stream after its time")
			}
			x := startExchange(a, []byte("goes on"))
			ms.m.Settle()
			if string(x.got) != "goes on" || x.err != io.EOF {
				t.Errorf("the open stream answered %q, %v", x.got, x.err)
			}
			ms.close(c)
			if st := ms.pool.Stats(); st.Tunnels > 1 {
				t.Errorf("%+v; want the first tunnel gone", st)
			}
		})
	}
}

// TestDoubleHBONE: a tunnel over a stream of another is its child, ends with it, and carries bytes and ends as any.
func TestDoubleHBONE(t *testing.T) {
	p := newPKI(t)
	var inner *Server
	outer := newMesh(t, meshConfig{handler: func(_ context.Context, r *Request) {
		_ = r.Accept(Headers{}, func(s Stream) { inner.Serve(s) })
	}})
	g := outer.m.Group()
	inner, err := NewServer(ServerConfig{Group: g, TLS: serverFrom(p.serverTLS(server1.String())), Handler: handlerFunc(echoHandler)})
	if err != nil {
		t.Fatal(err)
	}
	pool, err := NewPool(PoolConfig{
		Group: g, TLS: clientFrom(p.clientTLS(client1.String())),
		Dialer: dialFunc(func(ctx context.Context, _ netip.AddrPort) (loop.Conn, error) {
			return outer.pool.Open(ctx, outer.target)
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	target := Target{NextHop: serverAddr, Authority: "10.9.9.9:80", Accept: []workload.Identity{server1}}
	open := func() (s Stream) {
		outer.do(func(ctx context.Context) {
			if s, err = pool.Open(ctx, target); err != nil {
				t.Fatal(err)
			}
		})
		return s
	}
	const size = 5 << 20
	x := startExchange(open(), pattern(size))
	outer.m.Settle()
	if x.err != io.EOF || len(x.got) != size {
		t.Errorf("%d bytes came back, then %v; want %d and the end", len(x.got), x.err, size)
	}
	if st := pool.Stats(); st.Tunnels != 1 || outer.pool.Stats().Streams != 1 {
		t.Errorf("inner %+v, outer %+v", st, outer.pool.Stats())
	}
	cut := startExchange(open(), nil)
	held := open() // received in full, and not read
	held.Ref().Post(func() { _, _ = held.TryWrite([]byte("x")); _ = held.CloseWrite() })
	outer.m.Settle()
	for _, c := range outer.conns {
		_ = c.Reset()
	}
	outer.m.Advance(time.Minute)
	if !errors.Is(cut.err, loop.ErrReset) || inner.Tunnels() != 0 {
		t.Errorf("after the outer tunnel broke the stream read %v; %d inner tunnels", cut.err, inner.Tunnels())
	}
	if st := pool.Stats(); st != (PoolStats{}) {
		t.Errorf("left: %+v", st)
	}
	again := open()
	again.Ref().Post(func() { _ = again.Close() })
	outer.do(func(ctx context.Context) {
		if err := errors.Join(pool.Close(ctx), inner.Close(ctx)); err != nil {
			t.Error(err)
		}
	})
	if n := outer.pool.Stats().Streams; n != 0 {
		t.Errorf("%d outer streams after the inner pool was closed", n)
	}
}
