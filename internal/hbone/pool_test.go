package hbone

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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

// TestPoolSharesTunnels: how many tunnels streams take, at once and one after the other.
func TestPoolSharesTunnels(t *testing.T) {
	tunnels := func(t *testing.T, ms *mesh, want int) {
		t.Helper()
		if len(ms.conns) != want {
			t.Errorf("%d tunnels were made, want %d", len(ms.conns), want)
		}
	}
	t.Run("DP-73 one key, far from the limit", func(t *testing.T) {
		ms := newMesh(t, meshConfig{})
		open := ms.openMany(3)
		tunnels(t, ms, 1)
		ms.close(open...)
	})
	t.Run("DP-74 limit 2, four streams, then five", func(t *testing.T) {
		ms := newMesh(t, meshConfig{pool: PoolConfig{MaxStreams: 2}})
		open := ms.openMany(4)
		tunnels(t, ms, 2)
		ms.close(open...)
		open = ms.openMany(5)
		tunnels(t, ms, 3) // of the first two, one stream each was given back
		ms.close(open...)
	})
	t.Run("DP-75 limit 1", func(t *testing.T) {
		ms := newMesh(t, meshConfig{pool: PoolConfig{MaxStreams: 1}})
		open := ms.openMany(2)
		tunnels(t, ms, 2)
		ms.close(open...)
		if st := ms.pool.Stats(); st != (PoolStats{}) {
			t.Errorf("%+v, want no tunnel to be kept", st)
		}
		ms.close(ms.mustOpen())
		tunnels(t, ms, 3)
	})
	// A pool is of one source.
	sources := func(t *testing.T, n, streams int) {
		ms := newMesh(t, meshConfig{})
		pools := []*Pool{ms.pool}
		for range n - 1 {
			p, err := NewPool(ms.pool.cfg)
			if err != nil {
				t.Fatal(err)
			}
			pools = append(pools, p)
		}
		opened := 0
		for i := range streams {
			ms.m.Group().Go(context.Background(), func(ctx context.Context) {
				if _, err := pools[i%n].Open(ctx, ms.target); err != nil {
					t.Error(err)
					return
				}
				opened++
			})
		}
		ms.m.Settle()
		tunnels(t, ms, n)
		if opened != streams {
			t.Errorf("%d of %d streams were opened", opened, streams)
		}
		ms.do(func(ctx context.Context) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			for _, p := range pools {
				_ = p.Close(ctx)
			}
		})
	}
	t.Run("DP-76 100 sources with a stream each", func(t *testing.T) { sources(t, 100, 100) })
	t.Run("DP-76 3 sources with 100 streams each", func(t *testing.T) { sources(t, 3, 300) })
}

// TestPoolDials: tunnels are made a few at a time for each destination, by nobody who holds others up.
func TestPoolDials(t *testing.T) {
	// slowly is a Dialer that takes a while, and counts.
	slowly := func(ms *mesh, now, most, all *int) Dialer {
		dial := ms.pool.cfg.Dialer
		return dialFunc(func(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
			*now++
			*all++
			*most = max(*most, *now)
			ctx2, cancel := ms.m.Group().WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			_ = loop.Await(ctx2, func(func()) {})
			*now--
			return dial.Dial(ctx, dst)
		})
	}
	for _, tt := range []struct {
		name       string
		peer       uint32 // how many streams of a tunnel it takes
		need, most int    // tunnels
	}{
		{"FP-13 1000 streams at once", 200, 10, 10},
		{"FP-13 1000 streams at once, of which the peer takes 20 for each tunnel", 20, 50, 50 + maxDials},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ms := newMesh(t, meshConfig{server: ServerConfig{Settings: Settings{MaxStreams: tt.peer}}})
			var now, most, all int
			ms.pool.cfg.Dialer = slowly(ms, &now, &most, &all)
			open := ms.openMany(1000)
			for range 100 {
				ms.m.Advance(100 * time.Millisecond)
			}
			if len(open) != 0 {
				t.Fatalf("%d streams were open before a tunnel was there", len(open))
			}
			if st := ms.pool.Stats(); st.Streams != 1000 || st.Waiters != 0 || most > maxDials {
				t.Errorf("%+v, up to %d tunnels were made at once; want 1000 streams, and at most %d", st, most, maxDials)
			}
			if all < tt.need || all > tt.most {
				t.Errorf("%d tunnels were made, want %d, and at most %d", all, tt.need, tt.most)
			}
		})
	}
	t.Run("FP-12 a destination that says nothing", func(t *testing.T) {
		ms := newMesh(t, meshConfig{})
		dead := netip.MustParseAddrPort("10.0.9.9:15008")
		dial := ms.pool.cfg.Dialer
		ms.pool.cfg.Dialer = dialFunc(func(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
			if dst == dead {
				return nil, loop.Await(ctx, func(func()) {})
			}
			return dial.Dial(ctx, dst)
		})
		failed, opened := 0, 0
		open := func(to netip.AddrPort) {
			target := ms.target
			target.NextHop = to
			ms.m.Group().Go(context.Background(), func(ctx context.Context) {
				if _, err := ms.pool.Open(ctx, target); err == nil {
					opened++
				} else {
					failed++
				}
			})
		}
		for range 500 {
			open(dead)
		}
		ms.m.Settle()
		const healthy = 100
		for i := range healthy {
			open(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 2, byte(i)}), Port))
		}
		ms.m.Settle() // no time passes
		if opened != healthy || failed != 0 {
			t.Errorf("%d streams were opened and %d failed while one destination is waited for, want %d and none", opened, failed, healthy)
		}
		ms.m.Advance(11 * time.Second)
		if failed != 500 || opened != healthy {
			t.Errorf("%d failed after the time limit, want the 500 to the dead destination", failed)
		}
	})
}

// TestPoolIdleRelease: a tunnel without a stream is closed after a while, one with a stream never.
func TestPoolIdleRelease(t *testing.T) {
	t.Run("DP-77", func(t *testing.T) {
		ms := newMesh(t, meshConfig{pool: PoolConfig{IdleRelease: 100 * time.Millisecond}})
		s := ms.mustOpen()
		ms.m.Advance(time.Hour)
		again := ms.mustOpen()
		if st := ms.pool.Stats(); st.Tunnels != 1 || len(ms.conns) != 1 {
			t.Errorf("%+v after an hour with an open stream, %d tunnels were made; want the first one", st, len(ms.conns))
		}
		ms.close(s, again)
		ms.m.Advance(99 * time.Millisecond)
		if st := ms.pool.Stats(); st.Tunnels != 1 {
			t.Errorf("%+v before the release", st)
		}
		ms.m.Advance(2 * time.Millisecond)
		if st := ms.pool.Stats(); st != (PoolStats{}) || ms.server.Tunnels() != 0 {
			t.Errorf("%+v after the release, the server has %d tunnels", st, ms.server.Tunnels())
		}
	})
}

// TestPoolGoAwayBetweenStreams: a tunnel whose peer said that it goes away is not used again.
func TestPoolGoAwayBetweenStreams(t *testing.T) {
	t.Run("DP-78", func(t *testing.T) {
		ms := newMesh(t, meshConfig{})
		keep := ms.mustOpen()
		for tn := range ms.server.tunnels {
			tn.ref.Post(tn.drain)
		}
		ms.m.Settle()
		next := ms.mustOpen()
		if next.Ref() == keep.Ref() || len(ms.conns) != 2 {
			t.Errorf("%d tunnels were made, want a second one for the second stream", len(ms.conns))
		}
		ms.close(keep, next)
		if st := ms.pool.Stats(); st.Tunnels != 1 {
			t.Errorf("%+v, want the second tunnel only", st)
		}
	})
}

// TestPoolSilentPeer: streams over a tunnel whose peer has fallen silent end, and nobody else waits for it.
func TestPoolSilentPeer(t *testing.T) {
	t.Run("DP-80", func(t *testing.T) {
		ms, gates := gated(t, meshConfig{})
		s := ms.mustOpen()
		x := startExchange(s, nil)
		ms.m.Settle()
		(*gates)[1].shut = true // the server's end reads nothing from here on
		const ping, answer = 10 * time.Second, 20 * time.Second
		ms.m.Advance(ping + answer - time.Second)
		if x.err != nil {
			t.Errorf("after %v the stream read %v: that is within the time to answer", ping+answer-time.Second, x.err)
		}
		ms.m.Advance(2 * time.Second)
		if st := ms.pool.Stats(); !errors.Is(x.err, loop.ErrReset) || st != (PoolStats{}) {
			t.Errorf("%v after the unanswered ping the stream read %v, want a reset; left: %+v", answer, x.err, st)
		}
		(*gates)[1].shut = false
		(*gates)[1].ref.Wake()
		ms.m.Advance(time.Minute)
	})
}

// TestPoolDropped: what had arrived when the pool was dropped is still there for the application.
func TestPoolDropped(t *testing.T) {
	t.Run("DP-81", func(t *testing.T) {
		const size = 100 << 10
		ms := newMesh(t, meshConfig{handler: answering(size)})
		whole, cut := ms.mustOpen(), ms.mustOpen()
		whole.Ref().Post(func() { _ = whole.CloseWrite() })
		ms.m.Settle() // the answers are here, and not read
		ms.pool.Drain()
		x := startExchange(whole, nil)
		ms.m.Settle()
		if x.err != io.EOF || !bytes.Equal(x.got, pattern(size)) {
			t.Errorf("%d bytes, then %v; want the %d that had arrived, and the end", len(x.got), x.err, size)
		}
		if _, err := ms.open(); err == nil {
			t.Error("a pool that was dropped opened a stream")
		}
		var got error
		cut.Ref().Post(func() {
			cut.Ref().Child(func(r *loop.Ref) loop.Task {
				_ = cut.Attach(r)
				return turnFunc(func(int) bool {
					if cut.Ref().Removed() {
						_, got = cut.TryRead(make([]byte, 1))
					}
					return false
				})
			})
		})
		ms.do(func(ctx context.Context) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			_ = ms.pool.Close(ctx)
		})
		if !errors.Is(got, loop.ErrReset) {
			t.Errorf("after the end of the pool a stream that was not read gives %v, want a reset", got)
		}
	})
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
	t.Run("DP-82", func(t *testing.T) {
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
	})
}

// TestPoolRetain: no stream goes to a tunnel of a workload that is not there any more.
func TestPoolRetain(t *testing.T) {
	t.Run("FP-07 the state has changed", func(t *testing.T) {
		ms := newMesh(t, meshConfig{})
		ms.target.PeerUID = "pod-1"
		a := ms.mustOpen()
		want := []Target{{NextHop: serverAddr, Accept: []workload.Identity{server1}, PeerUID: "pod-1"}}
		var asked []Target
		there := true
		retain := func() { ms.pool.Retain(func(t Target) bool { asked = append(asked, t); return there }) }
		retain()
		if diff := cmp.Diff(want, asked, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("asked about (-want +got):\n%s", diff)
		}
		b := ms.mustOpen()
		if b.Ref() != a.Ref() {
			t.Error("a tunnel to what is still there was given up")
		}
		there = false
		retain()
		there = true
		retain()
		c := ms.mustOpen()
		if c.Ref() == a.Ref() {
			t.Error("a tunnel to what was not there took a stream")
		}
		x := startExchange(a, []byte("goes on"))
		ms.m.Settle()
		if string(x.got) != "goes on" || x.err != io.EOF {
			t.Errorf("the open stream answered %q, %v", x.got, x.err)
		}
		ms.close(b, c)
		if st := ms.pool.Stats(); st.Tunnels != 1 {
			t.Errorf("%+v; want the last tunnel only", st)
		}
	})
}

// gated is a mesh of whose tunnels each end can be shut off, in the order in which they were made: the client's, the server's.
func gated(t *testing.T, cfg meshConfig) (*mesh, *[]*gate) {
	t.Helper()
	ms := newMesh(t, cfg)
	gates := new([]*gate)
	ms.wrap = func(c loop.Conn) loop.Conn {
		g := &gate{Conn: c}
		*gates = append(*gates, g)
		return g
	}
	return ms, gates
}

// TestPoolPeerIsGone: a request that meets a tunnel whose peer is gone is sent again, once, on a fresh one.
func TestPoolPeerIsGone(t *testing.T) {
	// took is how long an Open takes.
	took := func(ms *mesh) (s Stream, after time.Duration, err error) {
		start := ms.m.Group().Now()
		done := false
		ms.m.Group().Go(context.Background(), func(ctx context.Context) {
			s, err = ms.pool.Open(ctx, ms.target)
			done, after = true, ms.m.Group().Now().Sub(start)
		})
		ms.m.Settle()
		for range 400 {
			if done {
				return s, after, err
			}
			ms.m.Advance(100 * time.Millisecond)
		}
		t.Fatal("Open does not return")
		return nil, 0, nil
	}
	t.Run("FP-07 without a word, a moment ago it was there", func(t *testing.T) {
		ms, gates := gated(t, meshConfig{})
		open := ms.mustOpen()
		x := startExchange(open, nil)
		ms.m.Advance(100 * time.Millisecond)
		(*gates)[0].shut, (*gates)[1].shut = true, true
		s, after, err := took(ms)
		if err != nil || after > probeAfter+probeTime || s.Ref() == open.Ref() {
			t.Fatalf("Open: %v after %v; want a stream of a fresh tunnel within %v", err, after, probeAfter+probeTime)
		}
		if x.err != nil {
			t.Errorf("the open stream of the silent tunnel reads %v before the keepalive has decided", x.err)
		}
		ms.close(s)
		ms.m.Advance(time.Minute)
		if !errors.Is(x.err, loop.ErrReset) {
			t.Errorf("afterwards it reads %v, want a reset", x.err)
		}
		for _, g := range *gates {
			g.shut = false
			g.ref.Wake()
		}
		ms.m.Advance(time.Minute)
	})
	t.Run("FP-07 with a reset", func(t *testing.T) {
		ms, gates := gated(t, meshConfig{})
		handler := ms.server.cfg.Handler
		requests := 0
		ms.server.cfg.Handler = handlerFunc(func(ctx context.Context, r *Request) {
			if requests++; requests == 2 {
				_ = (*gates)[1].Reset() // the request has arrived, and its answer never will
				return
			}
			handler.ServeConnect(ctx, r)
		})
		ms.close(ms.mustOpen())
		s, after, err := took(ms)
		if err != nil || after != 0 || len(ms.conns) != 2 {
			t.Fatalf("Open: %v after %v, %d tunnels; want a stream of a second one at once", err, after, len(ms.conns))
		}
		ms.close(s)
	})
	t.Run("FP-07 once only", func(t *testing.T) {
		ms, gates := gated(t, meshConfig{})
		handler := ms.server.cfg.Handler
		requests := 0
		ms.server.cfg.Handler = handlerFunc(func(ctx context.Context, r *Request) {
			if requests++; requests > 1 {
				_ = (*gates)[len(*gates)-1].Reset()
				return
			}
			handler.ServeConnect(ctx, r)
		})
		ms.close(ms.mustOpen())
		_, _, err := took(ms)
		if oe, ok := errors.AsType[*OpenError](err); !ok || requests != 3 {
			t.Errorf("Open: %v after %d requests; want an OpenError after one on the old tunnel and one on a fresh one", err, requests-1)
		} else if oe.NextHop != serverAddr {
			t.Errorf("%+v", oe)
		}
		// On a tunnel that never worked nothing is tried again.
		if _, _, err = took(ms); err == nil || requests != 4 {
			t.Errorf("Open: %v after %d requests, want one", err, requests-3)
		}
	})
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
