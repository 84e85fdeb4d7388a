package hbone

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A sipper is an application that takes what it is allowed to and no more.
type sipper struct {
	s       Stream
	ref     *loop.Ref
	allowed int
	got     int
	want    []byte // what should come, again and again
	bad     bool   // something else came
	err     error
}

func (p *sipper) Turn(int) bool {
	for p.allowed > 0 && p.err == nil {
		b := make([]byte, min(p.allowed, 64<<10))
		n, err := p.s.TryRead(b)
		if errors.Is(err, loop.ErrAgain) {
			return false
		}
		if err != nil {
			p.err = err
			return false
		}
		p.allowed -= n
		for b = b[:n]; len(b) > 0; {
			want := p.want[p.got%len(p.want):]
			k := min(len(b), len(want))
			p.bad = p.bad || !bytes.Equal(b[:k], want[:k])
			p.got += k
			b = b[k:]
		}
	}
	return false
}

// allow lets it take n bytes more.
func (p *sipper) allow(n int) {
	p.allowed += n
	p.ref.Wake()
}

// sippers is a Handler whose applications are sippers, by the authority of their streams.
type sippers struct {
	want []byte
	of   map[string]*sipper
}

func newSippers(want []byte) *sippers { return &sippers{want: want, of: make(map[string]*sipper)} }

func (h *sippers) serve(_ context.Context, r *Request) {
	_ = r.Accept(Headers{}, func(s Stream) {
		s.Ref().Child(func(ref *loop.Ref) loop.Task {
			p := &sipper{s: s, ref: ref, want: h.want}
			h.of[r.Authority] = p
			_ = s.Attach(ref)
			return p
		})
	})
}

// A pusher is an application that sends as fast as it can.
type pusher struct {
	s    Stream
	src  []byte // again and again
	sent int
	left int
	err  error
}

func startPusher(s Stream, src []byte, n int) *pusher {
	p := &pusher{s: s, src: src, left: n}
	s.Ref().Post(func() {
		s.Ref().Child(func(r *loop.Ref) loop.Task {
			_ = s.Attach(r)
			return p
		})
	})
	return p
}

func (p *pusher) Turn(budget int) bool {
	for budget > 0 && p.left > 0 && p.err == nil {
		at := p.sent % len(p.src)
		n, err := p.s.TryWrite(p.src[at:min(len(p.src), at+p.left)])
		if errors.Is(err, loop.ErrAgain) {
			return false
		}
		p.err = err
		p.sent += n
		p.left -= n
		budget -= n
	}
	if p.left == 0 && p.err == nil {
		p.left = -1
		p.err = p.s.CloseWrite()
	}
	return p.left > 0 && p.err == nil
}

// TestSlowReaders: one reader that takes nothing holds up nobody, however many share its tunnel, and however short memory is.
func TestSlowReaders(t *testing.T) {
	for _, tt := range []struct {
		name  string
		limit int64
		held  int // that the blocked reader has
	}{
		{"FP-08 300 streams of one tunnel, one reader is blocked", 1 << 30, 4 << 20},
		{"FP-08 300 streams of one tunnel, one reader is blocked, memory is short", 4 << 20, 2 << 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			blocked := newSippers(pattern(1000))
			budget := loop.NewBudget(tt.limit)
			ms := newMesh(t, meshConfig{
				pool: PoolConfig{MaxStreams: 300, ExtraTunnels: -1},
				server: ServerConfig{
					Settings: Settings{MaxStreams: 300}, Budget: budget,
				},
				handler: func(ctx context.Context, r *Request) {
					if r.Authority == "blocked:1" {
						blocked.serve(ctx, r)
						return
					}
					echoHandler(ctx, r)
				},
			})
			ms.target.Authority = "blocked:1"
			stuck := startPusher(ms.mustOpen(), blocked.want, 64<<20)
			ms.m.Settle()
			sent := stuck.sent
			if sent < tt.held || sent > tt.held+tt.held/8 {
				t.Fatalf("the sender got rid of %d bytes, want about %d", sent, tt.held)
			}
			ms.target.Authority = "10.0.1.5:80"
			const size = 100_000 // more than 64 KiB
			want := pattern(size)
			var xs []*exchange
			for _, s := range ms.openMany(299) {
				xs = append(xs, startExchange(s, want))
			}
			ms.m.Settle()
			for i, x := range xs {
				if x.err != io.EOF || !bytes.Equal(x.got, want) {
					t.Fatalf("stream %d of %d: %d bytes came back, then %v; want %d and the end", i, len(xs), len(x.got), x.err, size)
				}
			}
			if len(xs) != 299 || len(ms.conns) != 1 || stuck.sent != sent {
				t.Errorf("%d streams over %d tunnels, and %d bytes of the blocked one", len(xs), len(ms.conns), stuck.sent)
			}
			if got := budget.Held(); got < int64(sent-4<<10) || got > int64(sent+sent/8) {
				t.Errorf("%d bytes are held, want about the %d that were not taken", got, sent)
			}
			if short := budget.Level() != loop.Calm; short != (tt.limit < 1<<30) {
				t.Errorf("level %d with a limit of %d", budget.Level(), tt.limit)
			}
		})
	}
}

// TestWindowOfASlowReader: what a reader does not take makes its own sender wait, at a window of 4 MiB and what the tunnel has under way.
func TestWindowOfASlowReader(t *testing.T) {
	t.Run("DP-129", func(t *testing.T) {
		slow := newSippers(pattern(1000))
		ms := newMesh(t, meshConfig{handler: slow.serve})
		ms.target.Authority = "slow:1"
		p := startPusher(ms.mustOpen(), slow.want, 10<<20)
		ms.m.Settle()
		if p.sent != 4<<20 {
			t.Fatalf("%d bytes were sent, want 4 MiB", p.sent)
		}
		app := slow.of["slow:1"]
		for app.err == nil {
			app.allow(1 << 20)
			if ms.m.Settle(); app.err == nil && p.sent > app.got+4<<20 {
				t.Fatalf("%d bytes were sent and %d taken: more than a window is under way", p.sent, app.got)
			}
		}
		if app.err != io.EOF || app.got != 10<<20 || app.bad {
			t.Errorf("the application read %d bytes, as they were sent: %v, then %v", app.got, !app.bad, app.err)
		}
	})
}

// TestBudget: fast senders and slow readers, on many tunnels. What the process holds stays about within its limit, and once it
// is taken everything is as it was.
func TestBudget(t *testing.T) {
	const mib = 1 << 20
	for _, tt := range []struct {
		name  string
		limit int64
		most  int64 // what is held at the most
		full  bool
	}{
		// 40 streams with windows of 4 MiB: 160 MiB, if nothing is done.
		{"FP-09 half of the limit is where streams get less", 24 * mib, 24 * mib, false},
		// Of the 40 streams of 64 KiB each 2.5 MiB may come when there is no room, and what is under way: a pipe, and two buffers of
		// each tunnel.
		{"FP-09 more than the limit", 2 * mib, 2*mib + 5*mib/2 + 4*3*mib/4, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget := loop.NewBudget(tt.limit)
			slow := newSippers(pattern(7919))
			ms := newMesh(t, meshConfig{
				pool: PoolConfig{MaxStreams: 10, ExtraTunnels: -1}, server: ServerConfig{Budget: budget}, handler: slow.serve,
			})
			var streams []Stream
			for i := range 40 {
				ms.target.Authority = fmt.Sprintf("slow:%d", i)
				streams = append(streams, ms.mustOpen())
			}
			const size = 5 * mib
			var senders []*pusher
			for _, s := range streams {
				senders = append(senders, startPusher(s, slow.want, size))
			}
			var peak int64
			for ms.m.Step() {
				peak = max(peak, budget.Held())
			}
			if len(ms.conns) != 4 {
				t.Fatalf("%d tunnels, want 4", len(ms.conns))
			}
			if peak > tt.most || peak < tt.limit/2 {
				t.Errorf("up to %d bytes were held, want between %d and %d", peak, tt.limit/2, tt.most)
			}
			sent := 0
			for _, p := range senders {
				sent += p.sent
			}
			// Back-pressure: what the senders got rid of is what is held, and what is in their own tunnels.
			if int64(sent) > tt.most+4*mib {
				t.Errorf("the senders got rid of %d bytes, %d are held", sent, peak)
			}
			if budget.Level() == loop.Calm || (budget.TimesFull() > 0) != tt.full {
				t.Errorf("level %d, %d times full", budget.Level(), budget.TimesFull())
			}
			for done := false; !done; {
				done = true
				for _, p := range slow.of {
					if p.err == nil {
						p.allow(100_000)
						done = false
					}
				}
				for ms.m.Step() {
					peak = max(peak, budget.Held())
				}
			}
			if peak > tt.most {
				t.Errorf("up to %d bytes were held while it was taken, want at most %d", peak, tt.most)
			}
			for authority, p := range slow.of {
				if p.err != io.EOF || p.got != size || p.bad {
					t.Errorf("%s: %d bytes, as they were sent: %v, then %v; want %d and the end", authority, p.got, !p.bad, p.err, size)
				}
			}
			ms.m.Advance(20 * time.Second) // idle tunnels have a turn with each ping
			if budget.Held() != 0 || budget.Level() != loop.Calm {
				t.Errorf("in the end %d bytes are held, level %d", budget.Held(), budget.Level())
			}
			for _, s := range streams {
				if w := s.(*stream).t.eng.sendInit; w != 4*mib {
					t.Fatalf("in the end the peer lets new streams have %d bytes", w)
				}
			}
			for _, s := range slow.of {
				s.s.Ref().Post(func() { _ = s.s.Close(); s.ref.Remove() })
			}
			ms.close(streams...)
		})
	}
}

// TestAbortedDownloads: readers that go in the midst of a download leave nothing behind, at neither end, and take none of the
// tunnel's windows along.
func TestAbortedDownloads(t *testing.T) {
	for _, tt := range []struct {
		name  string
		short bool
	}{{"FP-10", false}, {"FP-10 while memory is short", true}} {
		t.Run(tt.name, func(t *testing.T) {
			budget := loop.NewBudget(1 << 20)
			hog := loop.NewAccount(budget)
			content := pattern(5003)
			var servers []*pusher
			ms := newMesh(t, meshConfig{
				pool: PoolConfig{
					ExtraTunnels: -1, Budget: budget,
					Settings: Settings{StreamWindow: 16 << 10, ConnectionWindow: 256 << 10},
				},
				handler: func(_ context.Context, r *Request) {
					_ = r.Accept(Headers{}, func(s Stream) { servers = append(servers, startPusher(s, content, 1<<30)) })
				},
			})
			if tt.short {
				hog.Set(600 << 10)
			}
			rng := rand.New(rand.NewPCG(10, 1))
			var tn *tunnel
			const batch, rounds = 50, 200
			for round := range rounds {
				open := ms.openMany(batch)
				if len(open) != batch {
					t.Fatalf("round %d: %d of %d streams", round, len(open), batch)
				}
				tn = open[0].(*stream).t
				for range rng.IntN(30) { // some of it is in the queues, some on its way, some not sent
					ms.m.Step()
				}
				for _, s := range open {
					s.Ref().Post(func() {
						if rng.IntN(2) == 0 {
							_, _ = s.TryRead(make([]byte, 1+rng.IntN(20_000)))
						}
						_ = s.Reset()
					})
				}
				ms.m.Settle()
				for _, p := range servers {
					if !errors.Is(p.err, loop.ErrReset) {
						t.Fatalf("round %d: the server's end was told %v, want a reset", round, p.err)
					}
					p.s.Ref().Post(func() { _ = p.s.Reset() })
				}
				servers = servers[:0]
				ms.m.Settle()
			}
			if len(ms.conns) != 1 {
				t.Errorf("%d tunnels, want 1", len(ms.conns))
			}
			hog.Set(0)
			ms.m.Settle()
			var peer *tunnel
			for tn := range ms.server.tunnels {
				peer = tn
			}
			if st := ms.pool.Stats(); st.Streams != 0 || len(tn.streams) != 0 || len(peer.streams) != 0 || peer.eng.Streams() != 0 {
				t.Errorf("left: %+v, %d streams at the one end, %d at the other", st, len(tn.streams), len(peer.streams))
			}
			if tn.unread != 0 || tn.queued != 0 || budget.Held() != 0 {
				t.Errorf("left: %d bytes unread, %d of memory, %d counted", tn.unread, tn.queued, budget.Held())
			}
			// The connection window is whole: what the server may send and what it has not been credited yet.
			if tn.eng.recv+tn.eng.credit != 256<<10 || peer.eng.send != tn.eng.recv {
				t.Errorf("of the connection window of 256 KiB the peer has %d, and %d to come; it thinks %d", tn.eng.recv, tn.eng.credit, peer.eng.send)
			}
			s := ms.mustOpen()
			p := &sipper{s: s, want: content, allowed: 1 << 20}
			s.Ref().Post(func() {
				s.Ref().Child(func(r *loop.Ref) loop.Task { p.ref = r; _ = s.Attach(r); return p })
			})
			ms.m.Settle()
			if p.got != 1<<20 || p.bad {
				t.Errorf("after that a download brings %d bytes, as they were sent: %v; then %v", p.got, !p.bad, p.err)
			}
			servers[0].s.Ref().Post(func() { _ = servers[0].s.Reset() })
			ms.m.Settle()
		})
	}
}
