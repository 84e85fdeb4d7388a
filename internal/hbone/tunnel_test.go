package hbone

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

var (
	serverAddr = netip.MustParseAddrPort("10.0.1.5:15008")
	clientAddr = netip.MustParseAddrPort("10.0.0.7:40000")
)

// handlerFunc is a Handler.
type handlerFunc func(ctx context.Context, r *Request)

func (f handlerFunc) ServeConnect(ctx context.Context, r *Request) { f(ctx, r) }

// dialFunc is a Dialer.
type dialFunc func(ctx context.Context, dst netip.AddrPort) (loop.Conn, error)

func (f dialFunc) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return f(ctx, dst)
}

// A mesh is a pool and a server, driven by hand, with pipes between them.
type mesh struct {
	t       *testing.T
	m       *loop.Manual
	pool    *Pool
	server  *Server
	target  Target
	conns   []loop.Conn // the client's ends, in the order in which they were dialled
	streams []Stream
	wrap    func(loop.Conn) loop.Conn // of both ends; nil: none
}

type meshConfig struct {
	pool    PoolConfig
	server  ServerConfig
	client  []string // SANs
	handler handlerFunc
}

func newMesh(t *testing.T, cfg meshConfig) *mesh {
	t.Helper()
	p := newPKI(t)
	ms := &mesh{t: t, m: loop.NewManual(t0)}
	if cfg.client == nil {
		cfg.client = []string{client1.String()}
	}
	cfg.server.Group = ms.m.Group()
	if cfg.server.TLS == nil {
		cfg.server.TLS = serverFrom(p.serverTLS(server1.String()))
	}
	cfg.server.Handler = cfg.handler
	if cfg.handler == nil {
		cfg.server.Handler = handlerFunc(echoHandler)
	}
	var err error
	if ms.server, err = NewServer(cfg.server); err != nil {
		t.Fatal(err)
	}
	cfg.pool.Group = ms.m.Group()
	cfg.pool.TLS = clientFrom(p.clientTLS(cfg.client...))
	if cfg.pool.Dialer == nil {
		cfg.pool.Dialer = dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
			a, b := loop.PipeAddrs(clientAddr, serverAddr)
			if ms.wrap != nil {
				a, b = ms.wrap(a), ms.wrap(b)
			}
			ms.conns = append(ms.conns, a)
			ms.server.Serve(b)
			return a, nil
		})
	}
	if ms.pool, err = NewPool(cfg.pool); err != nil {
		t.Fatal(err)
	}
	ms.target = Target{NextHop: serverAddr, Authority: "10.0.1.5:80", Accept: []workload.Identity{server1}}
	t.Cleanup(func() {
		ms.do(func(ctx context.Context) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			_ = ms.pool.Close(ctx)
			_ = ms.server.Close(ctx)
		})
		if err := ms.m.Close(); err != nil {
			t.Error(err)
		}
		if got := ms.m.Group().Stats(); got != (loop.Stats{}) {
			t.Errorf("left at the end: %+v", got)
		}
	})
	return ms
}

// do runs f as a set-up and settles.
func (ms *mesh) do(f func(ctx context.Context)) {
	ms.t.Helper()
	done := false
	ms.m.Group().Go(context.Background(), func(ctx context.Context) { f(ctx); done = true })
	for range 600 {
		if ms.m.Settle(); done {
			return
		}
		ms.m.Advance(time.Second)
	}
	ms.t.Error("a set-up did not return within 600 s")
}

func (ms *mesh) open() (s Stream, err error) {
	ms.t.Helper()
	ms.do(func(ctx context.Context) { s, err = ms.pool.Open(ctx, ms.target) })
	return s, err
}

func (ms *mesh) mustOpen() Stream {
	ms.t.Helper()
	s, err := ms.open()
	if err != nil {
		ms.t.Fatal(err)
	}
	return s
}

// view is a blocking view of a stream for the length of f.
func view(ctx context.Context, s Stream, f func(c *loop.Blocked)) {
	b := s.Ref().Blocking(ctx, s)
	f(b)
	_ = b.Close()
}

// echo is a relay that sends back what comes.
type echo struct {
	s   Stream
	ref *loop.Ref
	buf []byte
	fin bool
	err *error
}

func (e *echo) Turn(int) bool {
	for {
		if len(e.buf) == 0 && !e.fin {
			p := make([]byte, 64<<10)
			n, err := e.s.TryRead(p)
			switch {
			case errors.Is(err, loop.ErrAgain):
				return false
			case errors.Is(err, io.EOF):
				e.fin = true
			case err != nil:
				if e.err != nil {
					*e.err = err
				}
				_ = e.s.Reset()
				e.ref.Remove()
				return false
			}
			e.buf = p[:n]
		}
		if len(e.buf) == 0 {
			_ = e.s.CloseWrite()
			_ = e.s.Close()
			e.ref.Remove()
			return false
		}
		n, err := e.s.TryWrite(e.buf)
		if errors.Is(err, loop.ErrAgain) {
			return false
		}
		if err != nil {
			_ = e.s.Reset()
			e.ref.Remove()
			return false
		}
		e.buf = e.buf[n:]
	}
}

// exchange is a task that writes what it was given, finishes, and collects what comes.
type exchange struct {
	s    Stream
	ref  *loop.Ref
	left []byte
	got  []byte
	err  error // of the last read
	done func()
}

func (x *exchange) Turn(int) bool {
	for len(x.left) > 0 {
		n, err := x.s.TryWrite(x.left)
		if err != nil {
			break
		}
		if x.left = x.left[n:]; len(x.left) == 0 {
			_ = x.s.CloseWrite()
		}
	}
	p := make([]byte, 64<<10)
	for {
		n, err := x.s.TryRead(p)
		if errors.Is(err, loop.ErrAgain) || errors.Is(err, io.EOF) && len(x.left) > 0 {
			return false
		}
		if err != nil {
			x.err = err
			_ = x.s.Close()
			x.ref.Remove()
			if x.done != nil {
				x.done()
			}
			return false
		}
		x.got = append(x.got, p[:n]...)
	}
}

func startExchange(s Stream, p []byte) *exchange {
	x := &exchange{s: s, left: p}
	s.Ref().Post(func() { x.start() })
	return x
}

func (x *exchange) start() {
	x.s.Ref().Child(func(r *loop.Ref) loop.Task {
		x.ref = r
		_ = x.s.Attach(r)
		return x
	})
}

func startEcho(s Stream, result *error) {
	s.Ref().Child(func(r *loop.Ref) loop.Task {
		e := &echo{s: s, ref: r, err: result}
		_ = s.Attach(r)
		return e
	})
}

func echoHandler(_ context.Context, r *Request) {
	_ = r.Accept(Headers{Baggage: "k8s.namespace.name=shop"}, func(s Stream) { startEcho(s, nil) })
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>11)
	}
	return b
}

func TestTunnelEcho(t *testing.T) {
	var got Request
	ms := newMesh(t, meshConfig{handler: func(ctx context.Context, r *Request) {
		got = Request{Authority: r.Authority, Headers: r.Headers, Peer: r.Peer, Local: r.Local, Remote: r.Remote}
		echoHandler(ctx, r)
	}, client: []string{"spiffe://elsewhere/ns/a/sa/b", client1.String()}})
	ms.target.Headers = Headers{Baggage: "a=b", Forwarded: "for=x", Traceparent: "00-1-2-00", ForwardedNetwork: "n1", CrossNetwork: true}
	s := ms.mustOpen()
	want := Request{Authority: "10.0.1.5:80", Headers: ms.target.Headers, Peer: client1, Local: serverAddr, Remote: clientAddr}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(Request{}), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	if s.Peer() != server1 || s.Response().Baggage != "k8s.namespace.name=shop" || s.RemoteAddr() != serverAddr || s.LocalAddr() != clientAddr {
		t.Errorf("stream: peer %v, response %+v, %v-%v", s.Peer(), s.Response(), s.LocalAddr(), s.RemoteAddr())
	}
	const size = 12 << 20 // three stream windows
	x := startExchange(s, pattern(size))
	ms.m.Settle()
	back := x.got
	if x.err != io.EOF {
		t.Errorf("read: %v, want the end", x.err)
	}
	if !bytes.Equal(back, pattern(size)) {
		t.Errorf("%d bytes came back, not the %d that were sent", len(back), size)
	}
	if st := ms.pool.Stats(); st.Streams != 0 || st.Tunnels != 1 {
		t.Errorf("after the stream: %+v", st)
	}
}

// TestTunnelEnds: how one side ends is what the other sees, in both directions and both orders.
func TestTunnelEnds(t *testing.T) {
	type end func(ctx context.Context, s Stream) string
	read := func(ctx context.Context, s Stream, c *loop.Blocked) string {
		b, err := io.ReadAll(c)
		switch {
		case err == nil:
			return fmt.Sprintf("%s, then FIN", b)
		case errors.Is(err, loop.ErrReset):
			return "reset"
		}
		return err.Error()
	}
	with := func(f func(ctx context.Context, s Stream, c *loop.Blocked) string) end {
		return func(ctx context.Context, s Stream) (res string) {
			b := s.Ref().Blocking(ctx, s)
			res = f(ctx, s, b)
			if res != "reset" && res != "resets" {
				_ = b.Close()
			}
			return res
		}
	}
	finFirst := with(func(ctx context.Context, s Stream, c *loop.Blocked) string {
		_, _ = c.Write([]byte("first"))
		_ = c.CloseWrite()
		return read(ctx, s, c)
	})
	finLast := with(func(ctx context.Context, s Stream, c *loop.Blocked) string {
		got := read(ctx, s, c)
		if _, err := c.Write([]byte("last")); err != nil {
			return err.Error()
		}
		_ = c.CloseWrite()
		return got
	})
	resets := with(func(ctx context.Context, s Stream, c *loop.Blocked) string {
		_, _ = c.Write([]byte("lost"))
		_ = c.Reset()
		return "resets"
	})
	reads := with(read)
	closes := with(func(ctx context.Context, s Stream, c *loop.Blocked) string {
		_, _ = c.Write([]byte("bye"))
		_ = c.Close()
		return "closes"
	})
	tests := []struct {
		name           string
		client, server end
		wantC, wantS   string
	}{
		{"client finishes first", finFirst, finLast, "last, then FIN", "first, then FIN"},
		{"server finishes first", finLast, finFirst, "first, then FIN", "last, then FIN"},
		{"client resets", resets, reads, "resets", "reset"},
		{"server resets", reads, resets, "reset", "resets"},
		{"client closes", closes, reads, "closes", "bye, then FIN"},
		{"server closes", reads, closes, "bye, then FIN", "closes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			gotS := "nothing"
			ms := newMesh(t, meshConfig{handler: func(ctx context.Context, r *Request) {
				var s Stream
				if err := r.Accept(Headers{}, func(st Stream) { s = st }); err != nil {
					t.Error(err)
					return
				}
				gotS = tt.server(ctx, s)
			}})
			s := ms.mustOpen()
			gotC := "nothing"
			ms.do(func(ctx context.Context) { gotC = tt.client(ctx, s) })
			ms.m.Settle()
			if gotC != tt.wantC || gotS != tt.wantS {
				t.Errorf("client saw %q, server saw %q; want %q, %q", gotC, gotS, tt.wantC, tt.wantS)
			}
		})
	}
}

// TestTunnelLost: a connection that breaks is a reset for every stream, never an end.
func TestTunnelLost(t *testing.T) {
	for _, how := range []string{"reset", "fin"} {
		t.Run(how, func(t *testing.T) {
			var atServer error
			ms := newMesh(t, meshConfig{handler: func(ctx context.Context, r *Request) {
				_ = r.Accept(Headers{}, func(s Stream) { startEcho(s, &atServer) })
			}})
			s := ms.mustOpen()
			var atClient error
			s.Ref().Post(func() { startEcho(s, &atClient) })
			ms.m.Settle()
			if how == "reset" {
				_ = ms.conns[0].Reset()
			} else {
				_ = ms.conns[0].CloseWrite()
			}
			ms.m.Advance(time.Minute)
			if !errors.Is(atServer, loop.ErrReset) || !errors.Is(atClient, loop.ErrReset) {
				t.Errorf("server read %v, client read %v; want resets", atServer, atClient)
			}
			if st := ms.pool.Stats(); st != (PoolStats{}) || ms.server.Tunnels() != 0 {
				t.Errorf("left: %+v, %d tunnels", st, ms.server.Tunnels())
			}
		})
	}
}

// TestTunnelSlowReader: a stream whose window is used up stops no other.
func TestTunnelSlowReader(t *testing.T) {
	var held []Stream
	ms := newMesh(t, meshConfig{handler: func(ctx context.Context, r *Request) {
		_ = r.Accept(Headers{}, func(s Stream) {
			if r.Authority == "slow:1" {
				held = append(held, s)
				return
			}
			startEcho(s, nil)
		})
	}})
	fast := ms.mustOpen()
	ms.target.Authority = "slow:1"
	var slow []Stream
	for range 8 { // their windows are twice the connection's
		s := ms.mustOpen()
		slow = append(slow, s)
		total := 0
		s.Ref().Post(func() {
			s.Ref().Child(func(r *loop.Ref) loop.Task {
				_ = s.Attach(r)
				return turnFunc(func(int) bool {
					n, err := s.TryWrite(make([]byte, 64<<10))
					total += n
					return err == nil
				})
			})
		})
		ms.m.Settle()
		if total != 4<<20 {
			t.Fatalf("%d bytes were taken, want the window, 4 MiB", total)
		}
	}
	var back []byte
	ms.do(func(ctx context.Context) {
		view(ctx, fast, func(c *loop.Blocked) {
			_, _ = c.Write([]byte("ping"))
			back = make([]byte, 4)
			if _, err := io.ReadFull(c, back); err != nil {
				t.Error(err)
			}
		})
	})
	if string(back) != "ping" {
		t.Errorf("got %q beside slow readers", back)
	}
	for _, s := range slices.Concat(slow, held) {
		s.Ref().Post(func() { _ = s.Reset() })
	}
	ms.m.Settle()
}

// turnFunc is a Task.
type turnFunc func(budget int) bool

func (f turnFunc) Turn(budget int) bool { return f(budget) }

func TestPoolStreamLimit(t *testing.T) {
	ms := newMesh(t, meshConfig{pool: PoolConfig{MaxStreams: 2}})
	var open []Stream
	ms.do(func(context.Context) {
		for range 4 {
			ms.m.Group().Go(context.Background(), func(ctx context.Context) {
				s, err := ms.pool.Open(ctx, ms.target)
				if err != nil {
					t.Error(err)
				}
				open = append(open, s)
			})
		}
	})
	ms.m.Settle()
	if want := (PoolStats{Keys: 1, Tunnels: 2, Streams: 4}); ms.pool.Stats() != want || len(open) != 4 {
		t.Fatalf("%d streams, %+v; want %+v", len(open), ms.pool.Stats(), want)
	}
	open[0].Ref().Post(func() { _ = open[0].Close() })
	ms.m.Settle()
	s := ms.mustOpen()
	if len(ms.conns) != 2 {
		t.Errorf("%d connections, want 2: a tunnel below its limit is used again", len(ms.conns))
	}
	for _, s := range append(open[1:], s) {
		s.Ref().Post(func() { _ = s.Close() })
	}
	ms.m.Advance(299 * time.Second)
	if n := ms.pool.Stats().Tunnels; n != 2 {
		t.Errorf("%d tunnels before the idle release, want 2", n)
	}
	ms.m.Advance(2 * time.Second)
	if st := ms.pool.Stats(); st != (PoolStats{}) {
		t.Errorf("after the idle release: %+v", st)
	}
}

// TestPoolPeerLimit: what the peer's SETTINGS allow wins.
func TestPoolPeerLimit(t *testing.T) {
	ms := newMesh(t, meshConfig{server: ServerConfig{Settings: Settings{MaxStreams: 1}}})
	a, b := ms.mustOpen(), ms.mustOpen()
	if len(ms.conns) != 2 {
		t.Errorf("%d connections, want 2", len(ms.conns))
	}
	for _, s := range []Stream{a, b} {
		s.Ref().Post(func() { _ = s.Reset() })
	}
}

func TestPoolKeys(t *testing.T) {
	ms := newMesh(t, meshConfig{})
	first := ms.target
	ms.mustOpen()
	ms.mustOpen()
	ms.target.PeerUID = "another"
	ms.mustOpen()
	ms.target = first
	ms.target.Accept = append(ms.target.Accept, client1)
	ms.mustOpen()
	if len(ms.conns) != 3 {
		t.Errorf("%d connections, want 3", len(ms.conns))
	}
}

func TestPoolErrors(t *testing.T) {
	refused := errors.New("refused")
	stuck := func(ctx context.Context, _ netip.AddrPort) (loop.Conn, error) {
		return nil, loop.Await(ctx, func(func()) {})
	}
	tests := []struct {
		name   string
		cfg    meshConfig
		accept []workload.Identity
		phase  Phase
		want   error
		limit  time.Duration
		text   string
	}{
		{name: "refused", cfg: meshConfig{pool: PoolConfig{Dialer: dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) { return nil, refused })}}, phase: PhaseConnect, want: refused},
		{name: "DP-71 connect timeout", cfg: meshConfig{pool: PoolConfig{Dialer: dialFunc(stuck)}}, phase: PhaseConnect, want: context.DeadlineExceeded, limit: 10 * time.Second, text: "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: "},
		{name: "handshake timeout", cfg: meshConfig{pool: PoolConfig{Dialer: dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
			a, _ := loop.Pipe()
			return a, nil
		})}}, phase: PhaseHandshake, want: context.DeadlineExceeded},
		{name: "unknown peer", accept: []workload.Identity{client1}, phase: PhaseHandshake, want: ErrUnknownPeer},
		{name: "nobody", accept: []workload.Identity{}, phase: PhaseHandshake, want: ErrUnknownPeer},
		{name: "our certificate is refused", cfg: meshConfig{server: ServerConfig{TLS: func(context.Context) (*tls.Config, error) {
			return newPKI(t).serverTLS(server1.String()), nil // of another root, but it is our side that is told first
		}}}, phase: PhaseHandshake, text: "unknown authority"},
		{name: "denied", cfg: meshConfig{handler: func(_ context.Context, r *Request) { r.Reject(401, "policy says no") }}, phase: PhaseResponse, want: &StatusError{401, "policy says no"}},
		{name: "response timeout", cfg: meshConfig{handler: func(ctx context.Context, r *Request) { _ = loop.Await(ctx, func(func()) {}) }}, phase: PhaseResponse, want: context.DeadlineExceeded},
		{name: "handler without answer", cfg: meshConfig{handler: func(context.Context, *Request) {}}, phase: PhaseResponse, text: "INTERNAL_ERROR"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ms := newMesh(t, tt.cfg)
			if tt.accept != nil {
				ms.target.Accept = tt.accept
			}
			start := ms.m.Group().Now()
			s, err := ms.open()
			if took := ms.m.Group().Now().Sub(start); tt.limit != 0 && took != tt.limit {
				t.Errorf("Open failed after %v, want %v", took, tt.limit)
			}
			var oe *OpenError
			if s != nil || !errors.As(err, &oe) || oe.Phase != tt.phase || oe.NextHop != serverAddr {
				t.Fatalf("Open = %v, %v; want an OpenError of %v", s, err, tt.phase)
			}
			var se *StatusError
			switch {
			case errors.As(tt.want, &se):
				var got *StatusError
				if !errors.As(err, &got) || *got != *se {
					t.Errorf("Open = %v, want %v", err, tt.want)
				}
			case tt.want != nil && !errors.Is(err, tt.want):
				t.Errorf("Open = %v, want %v", err, tt.want)
			}
			if !strings.Contains(err.Error(), tt.text) {
				t.Errorf("Open = %v, want %q", err, tt.text)
			}
			ms.m.Settle()
			if st := ms.pool.Stats(); st.Streams != 0 || st.Waiters != 0 || st.Dials != 0 {
				t.Errorf("left: %+v", st)
			}
		})
	}
}

// TestPoolClientRefused: with TLS 1.3 the server's refusal of our certificate comes after our handshake.
func TestPoolClientRefused(t *testing.T) {
	p, other := newPKI(t), newPKI(t)
	cfg := p.serverTLS(server1.String())
	cfg.ClientCAs = other.pool
	ms := newMesh(t, meshConfig{server: ServerConfig{TLS: serverFrom(cfg)}})
	ms.pool.cfg.TLS = clientFrom(p.clientTLS(client1.String()))
	_, err := ms.open()
	var oe *OpenError
	if !errors.As(err, &oe) || oe.Phase != PhaseHandshake || !strings.Contains(err.Error(), "tls:") {
		t.Errorf("Open = %v, want a TLS error of the handshake", err)
	}
}

// TestPoolPeerWithoutHTTP2: a peer that has done TLS and then something else has failed at the HTTP/2 handshake.
func TestPoolPeerWithoutHTTP2(t *testing.T) {
	for _, says := range []string{"", "HTTP/1.1 400 Bad Request\r\n\r\n"} {
		t.Run(fmt.Sprintf("%q and closes", says), func(t *testing.T) {
			var ms *mesh
			ms = newMesh(t, meshConfig{pool: PoolConfig{Dialer: dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
				a, b := loop.Pipe()
				ms.m.Group().Go(context.Background(), func(ctx context.Context) {
					cfg, _ := ms.server.cfg.TLS(ctx)
					s := tls.Server(ms.m.Group().Blocking(ctx, b), cfg)
					defer s.Close()
					if err := s.Handshake(); err != nil {
						t.Errorf("handshake: %v", err)
						return
					}
					_, _ = io.WriteString(s, says) // the client may be gone
				})
				return a, nil
			})}})
			_, err := ms.open()
			if oe, ok := errors.AsType[*OpenError](err); !ok || oe.Phase != PhaseHTTP2 {
				t.Errorf("Open = %v, want an error of the %v", err, PhaseHTTP2)
			}
		})
	}
}

// TestPoolGoAwayRetry: a request that a draining server did not take goes to a fresh tunnel, not to another of the old ones, which
// have room.
func TestPoolGoAwayRetry(t *testing.T) {
	t.Run("DP-79", func(t *testing.T) {
		ms := newMesh(t, meshConfig{pool: PoolConfig{MaxStreams: 2}})
		keep := ms.mustOpen()
		second := ms.mustOpen()
		other := ms.mustOpen()
		ms.close(second)
		ms.do(func(context.Context) {
			for tn := range ms.server.tunnels {
				tn.ref.Post(func() {
					tn.eng.Drain()
					tn.eng.finalGoAway() // at once: what is under way is refused
					tn.kick()
				})
			}
			ms.m.Group().Go(context.Background(), func(ctx context.Context) {
				s, err := ms.pool.Open(ctx, ms.target)
				if err != nil {
					t.Errorf("Open beside a GOAWAY: %v", err)
					return
				}
				ms.streams = append(ms.streams, s)
			})
		})
		ms.m.Settle()
		if len(ms.conns) != 3 || len(ms.streams) != 1 {
			t.Fatalf("%d connections, %d streams; want a third connection", len(ms.conns), len(ms.streams))
		}
		ms.close(other)
		var got string
		ms.do(func(ctx context.Context) {
			view(ctx, keep, func(c *loop.Blocked) {
				_, _ = c.Write([]byte("still here"))
				b := make([]byte, 10)
				_, _ = io.ReadFull(c, b)
				got = string(b)
			})
		})
		if got != "still here" {
			t.Errorf("the open stream of a draining tunnel answered %q", got)
		}
		ms.m.Settle()
		if n := ms.pool.Stats().Tunnels; n != 1 {
			t.Errorf("%d tunnels, want 1: the drained one closes with its last stream", n)
		}
		ms.streams[0].Ref().Post(func() { _ = ms.streams[0].Close() })
	})
}

func TestPoolOpenGivenUp(t *testing.T) {
	ended := false
	ms := newMesh(t, meshConfig{handler: func(ctx context.Context, r *Request) {
		_ = loop.Await(ctx, func(func()) {})
		ended = true
		if err := r.Accept(Headers{}, func(Stream) { t.Error("started") }); !errors.Is(err, loop.ErrReset) {
			t.Errorf("Accept = %v, want ErrReset", err)
		}
	}})
	var err error
	ms.do(func(ctx context.Context) {
		ctx, cancel := ms.m.Group().WithTimeout(ctx, 3*time.Second)
		defer cancel()
		_, err = ms.pool.Open(ctx, ms.target)
	})
	ms.m.Settle()
	if !errors.Is(err, context.DeadlineExceeded) || !ended {
		t.Errorf("Open = %v; the request ended: %v", err, ended)
	}
	if st := ms.pool.Stats(); st.Streams != 0 {
		t.Errorf("left: %+v", st)
	}
}

func TestServerDrainAndClose(t *testing.T) {
	ms := newMesh(t, meshConfig{})
	s := ms.mustOpen()
	ms.server.Drain()
	ms.m.Settle()
	if ms.server.Tunnels() != 1 {
		t.Fatal("a drain cut an open stream")
	}
	var err error
	ms.do(func(ctx context.Context) {
		ctx, cancel := ms.m.Group().WithTimeout(ctx, 5*time.Second)
		defer cancel()
		err = ms.server.Close(ctx)
	})
	if !errors.Is(err, context.DeadlineExceeded) || ms.server.Tunnels() != 0 {
		t.Errorf("Close = %v, %d tunnels", err, ms.server.Tunnels())
	}
	posted := s.Ref().Post(func() {
		if _, err := s.TryRead(make([]byte, 1)); !errors.Is(err, loop.ErrReset) {
			t.Errorf("TryRead = %v, want ErrReset", err)
		}
	})
	ms.m.Settle()
	if posted {
		t.Error("the client's tunnel lives on")
	}
	a, b := loop.Pipe()
	ms.server.Serve(b)
	if _, err := a.TryRead(make([]byte, 1)); !errors.Is(err, loop.ErrReset) {
		t.Errorf("a draining server took a connection: %v", err)
	}
}

// A choppy Conn moves as much as chance allows, often nothing, and wakes its task then as the contract demands.
type choppy struct {
	loop.Conn
	r   *rand.Rand
	ref *loop.Ref
}

func (c *choppy) Attach(r *loop.Ref) error {
	c.ref = r
	return c.Conn.Attach(r)
}

func (c *choppy) cut(p []byte) []byte {
	if c.r.IntN(4) == 0 {
		if c.ref != nil {
			c.ref.Wake()
		}
		return nil
	}
	return p[:min(len(p), 1+c.r.IntN(1<<c.r.IntN(19)))]
}

func (c *choppy) TryRead(p []byte) (int, error) {
	if p = c.cut(p); len(p) == 0 {
		return 0, loop.ErrAgain
	}
	return c.Conn.TryRead(p)
}

func (c *choppy) TryWrite(p []byte) (int, error) {
	if p = c.cut(p); len(p) == 0 {
		return 0, loop.ErrAgain
	}
	return c.Conn.TryWrite(p)
}

// TestTunnelChoppy: however the connection below cuts what it carries, and with windows of odd sizes, the streams of a tunnel
// carry every byte in order, and their end.
func TestTunnelChoppy(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 2))
			set := Settings{StreamWindow: uint32(1 + r.IntN(1<<20)), FrameSize: uint32(1 << (14 + r.IntN(7)))}
			ms := newMesh(t, meshConfig{pool: PoolConfig{Settings: set}, server: ServerConfig{Settings: set}})
			ms.wrap = func(c loop.Conn) loop.Conn { return &choppy{Conn: c, r: r} }
			var xs []*exchange
			var sent []int
			for range 1 + r.IntN(4) {
				n := 1 + r.IntN(1<<20)
				sent = append(sent, n)
				xs = append(xs, startExchange(ms.mustOpen(), pattern(n)))
			}
			ms.m.Settle()
			for i, x := range xs {
				if x.err != io.EOF || !bytes.Equal(x.got, pattern(sent[i])) {
					t.Errorf("stream %d: %d of %d bytes came back, then %v", i, len(x.got), sent[i], x.err)
				}
			}
		})
	}
}

// counted is what a registry holds, by its labels in the order of their names.
// counted is what a registry holds, by its labels in the order of their names.
func counted(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			got[strings.Join(labels, " ")] = m.GetCounter().GetValue()
		}
	}
	return got
}

// TestTunnelBadPeer: a peer that breaks the protocol loses its tunnel, or its stream, and that is counted. The tunnel of another
// peer, which has a pool of its own, goes on.
func TestTunnelBadPeer(t *testing.T) {
	for _, tt := range []struct {
		name        string
		scope, code string
		sin         func(e *Engine, id uint32)
	}{
		{"DATA on stream 0", "connection", "PROTOCOL_ERROR", func(e *Engine, _ uint32) { e.control(appendHeader(nil, 0, http2.FrameData, 0, 0)) }},
		{"window overflow", "connection", "FLOW_CONTROL_ERROR", func(e *Engine, _ uint32) { must(e.framer.WriteWindowUpdate(0, maxWindow)) }},
		{"frame of wrong length", "connection", "FRAME_SIZE_ERROR", func(e *Engine, _ uint32) {
			e.control(append(appendHeader(nil, 1, http2.FramePing, 0, 0), 0))
		}},
		{"PING flood", "connection", "ENHANCE_YOUR_CALM", func(e *Engine, _ uint32) {
			for range floodBurst + 1 {
				must(e.framer.WritePing(false, [8]byte{}))
			}
		}},
		{"rapid reset", "connection", "ENHANCE_YOUR_CALM", func(e *Engine, _ uint32) {
			for range floodBurst + 1 {
				id, err := e.Open("a:1", Headers{})
				must(err)
				e.Reset(id, http2.ErrCodeCancel)
			}
		}},
		{"window overflow of a stream", "stream", "FLOW_CONTROL_ERROR", func(e *Engine, id uint32) { must(e.framer.WriteWindowUpdate(id, maxWindow)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reg := prometheus.NewRegistry()
			metrics, err := NewMetrics(reg)
			if err != nil {
				t.Fatal(err)
			}
			ms := newMesh(t, meshConfig{server: ServerConfig{Metrics: metrics}})
			good := ms.mustOpen()
			ms.target.PeerUID = "another tunnel"
			s := ms.mustOpen()
			var atClient error
			s.Ref().Post(func() {
				startEcho(s, &atClient)
				u := s.(*stream).t
				tt.sin(u.eng, s.(*stream).id)
				u.kick()
			})
			ms.m.Settle()
			if !errors.Is(atClient, loop.ErrReset) {
				t.Errorf("the stream read %v, want a reset", atClient)
			}
			want := 2
			if tt.scope == "connection" {
				want = 1
			}
			if n := ms.server.Tunnels(); n != want {
				t.Errorf("%d tunnels, want %d", n, want)
			}
			if got := counted(t, reg); got[tt.code+" inbound "+tt.scope] != 1 {
				t.Errorf("counted %v, want 1 %s of the %s", got, tt.code, tt.scope)
			}
			ms.do(func(ctx context.Context) {
				view(ctx, good, func(c *loop.Blocked) {
					_, _ = c.Write([]byte("as before"))
					b := make([]byte, 9)
					if _, err := io.ReadFull(c, b); err != nil || string(b) != "as before" {
						t.Errorf("the other tunnel: %q, %v", b, err)
					}
				})
			})
			again := ms.mustOpen()
			again.Ref().Post(func() { _ = again.Close() })
		})
	}
}
