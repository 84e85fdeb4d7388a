//go:build linux

package hbone

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// A sockConn is a kernel socket as a loop.Conn, as small as tests need it.
type sockConn struct {
	fd            int
	ref           *loop.Ref
	readable      bool
	writable      bool
	closed        bool
	local, remote netip.AddrPort
}

// newSock moves a TCP connection out of the runtime's poller.
func newSock(t testing.TB, c net.Conn) *sockConn {
	t.Helper()
	tc, _ := c.(*net.TCPConn)
	f, err := tc.File()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	_ = tc.Close()
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	// As the underlay's sockets: what the kernel has not sent stays ours to order.
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, 128<<10); err != nil {
		t.Fatal(err)
	}
	addr := func(a net.Addr) netip.AddrPort { return netip.MustParseAddrPort(a.String()) }
	return &sockConn{fd: fd, readable: true, writable: true, local: addr(c.LocalAddr()), remote: addr(c.RemoteAddr())}
}

// tcpPair returns the ends of a TCP connection on the loopback interface.
func tcpPair(t testing.TB) (net.Conn, net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // at once
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	a, err := net.Dial("tcp", ln.Addr().String()) //nolint:noctx // at once
	if err != nil {
		t.Fatal(err)
	}
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

func sockPair(t testing.TB) (*sockConn, *sockConn) {
	a, b := tcpPair(t)
	return newSock(t, a), newSock(t, b)
}

func (c *sockConn) TryRead(p []byte) (int, error) {
	if !c.readable {
		return 0, loop.ErrAgain
	}
	n, err := unix.Read(c.fd, p)
	switch {
	case errors.Is(err, unix.EAGAIN):
		c.readable = false
		return 0, loop.ErrAgain
	case err != nil:
		return 0, loop.ErrReset
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (c *sockConn) TryWrite(p []byte) (int, error) {
	if !c.writable {
		return 0, loop.ErrAgain
	}
	n, err := unix.SendmsgN(c.fd, p, nil, nil, unix.MSG_NOSIGNAL)
	if errors.Is(err, unix.EAGAIN) {
		c.writable = false
		return 0, loop.ErrAgain
	}
	if err != nil {
		return 0, loop.ErrReset
	}
	return n, nil
}

func (c *sockConn) Attach(r *loop.Ref) error {
	if c.ref != nil {
		c.ref.Unwatch(c.fd)
	}
	c.ref = r
	c.readable, c.writable = true, true
	if r == nil {
		return nil
	}
	r.WakeLocal()
	return r.Watch(c.fd, func(ev loop.Events) {
		if ev&^loop.Writable != 0 {
			c.readable = true
		}
		if ev&^(loop.Readable|loop.PeerClosed) != 0 {
			c.writable = true
		}
		r.WakeLocal()
	})
}

func (c *sockConn) CloseWrite() error { return unix.Shutdown(c.fd, unix.SHUT_WR) }

func (c *sockConn) Reset() error {
	_ = unix.SetsockoptLinger(c.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	return c.Close()
}

func (c *sockConn) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	if c.ref != nil && !c.ref.Removed() {
		c.ref.Unwatch(c.fd)
	}
	return unix.Close(c.fd)
}

func (c *sockConn) LocalAddr() netip.AddrPort  { return c.local }
func (c *sockConn) RemoteAddr() netip.AddrPort { return c.remote }

// A threadMesh is a pool and a server on event loops with kernel sockets between them.
type threadMesh struct {
	group  *loop.Group
	pool   *Pool
	server *Server
	target Target
}

func newThreadMesh(t testing.TB, h Handler) *threadMesh {
	t.Helper()
	return newThreadMeshOf(t, h, loop.Config{Loops: 2, Now: time.Now}, PoolConfig{})
}

func newThreadMeshOf(t testing.TB, h Handler, loops loop.Config, pool PoolConfig) *threadMesh {
	t.Helper()
	g, err := loop.New(loops)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx) }()
	p := newPKI(t)
	tm := &threadMesh{group: g, target: Target{NextHop: serverAddr, Authority: "10.0.1.5:80", Accept: []workload.Identity{server1}}}
	if tm.server, err = NewServer(ServerConfig{Group: g, TLS: serverFrom(p.serverTLS(server1.String())), Handler: h}); err != nil {
		t.Fatal(err)
	}
	dial := dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
		a, b := sockPair(t)
		tm.server.Serve(b)
		return a, nil
	})
	pool.Group, pool.TLS, pool.Dialer = g, clientFrom(p.clientTLS(client1.String())), dial
	if tm.pool, err = NewPool(pool); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		gone, stop := context.WithCancel(context.Background())
		stop()
		_ = tm.pool.Close(gone)
		_ = tm.server.Close(gone)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return tm
}

func (tm *threadMesh) open(t testing.TB) Stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s, err := tm.pool.Open(ctx, tm.target)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestTunnelThreads moves megabytes both ways on several streams at once, over TLS and kernel sockets.
func TestTunnelThreads(t *testing.T) {
	tm := newThreadMesh(t, handlerFunc(echoHandler))
	const streams, size = 5, 6 << 20
	want := pattern(size)
	done := make(chan *exchange, streams)
	var xs []*exchange
	for range streams {
		x := &exchange{s: tm.open(t), left: want}
		x.done = func() { done <- x }
		xs = append(xs, x)
	}
	for _, x := range xs { // all are open: none of them finds the tunnel bulk
		x.s.Ref().Post(x.start)
	}
	limit := time.After(30 * time.Second)
	for range streams {
		select {
		case x := <-done:
			if x.err != io.EOF || string(x.got) != string(want) {
				t.Errorf("%d bytes came back, then %v; want the %d that were sent, and the end", len(x.got), x.err, size)
			}
		case <-limit:
			t.Fatal("stuck")
		}
	}
	if st := tm.pool.Stats(); st.Tunnels != 1 {
		t.Errorf("%+v; want one tunnel", st)
	}
}

// A source gives bytes for as long as it is on, and a drain takes them: the Conns of applications that cost nothing.
type source struct {
	loop.Conn
	left int
}

func (s *source) TryRead(p []byte) (int, error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	n := min(len(p), s.left)
	s.left -= n
	return n, nil
}

type drain struct {
	loop.Conn
	got *atomic.Int64
}

func (d drain) TryWrite(p []byte) (int, error) {
	d.got.Add(int64(len(p)))
	return len(p), nil
}

func (d drain) TryWritev(bufs [][]byte) (int, error) {
	n := 0
	for _, b := range bufs {
		n += len(b)
	}
	d.got.Add(int64(n))
	return n, nil
}

func (d drain) TryReadv([][]byte) (int, error) { return 0, loop.ErrAgain }

// drainInto relays a stream to a drain.
func drainInto(s Stream, got *atomic.Int64, done func()) {
	d := drain{got: got}
	s.Ref().Child(func(r *loop.Ref) loop.Task {
		_ = s.Attach(r)
		return turnFunc(func(budget int) bool {
			n, err := s.(loop.Sender).TryWriteTo(d, budget)
			r.Moved(n)
			if err == nil {
				return true // only ErrAgain says that a wake will come
			}
			if !errors.Is(err, loop.ErrAgain) {
				_ = s.Close()
				r.Remove()
				done()
			}
			return false
		})
	})
}

// fillFrom relays n bytes to a stream and ends it.
func fillFrom(s Stream, n int) {
	src := &source{left: n}
	s.Ref().Child(func(r *loop.Ref) loop.Task {
		_ = s.Attach(r)
		return turnFunc(func(budget int) bool {
			for moved := 0; moved < budget; {
				n, err := s.(Receiver).TryReadFrom(src, budget-moved)
				moved += n
				r.Moved(n)
				if _, failed := errors.AsType[*SourceError](err); failed {
					_ = s.CloseWrite()
					r.Remove()
					return false
				}
				if err != nil {
					return false
				}
			}
			return true
		})
	})
}

// BenchmarkTunnel is bulk from one stream end to the other, on two loops: over TLS, without, and the TLS link without HTTP/2.
func BenchmarkTunnel(b *testing.B) {
	const size = 64 << 20
	for _, streams := range []int{1, 8} {
		b.Run("over=tls/streams="+string(rune('0'+streams)), func(b *testing.B) {
			var got atomic.Int64
			done := make(chan struct{}, streams)
			tm := newThreadMesh(b, handlerFunc(func(_ context.Context, r *Request) {
				_ = r.Accept(Headers{}, func(s Stream) { drainInto(s, &got, func() { done <- struct{}{} }) })
			}))
			b.SetBytes(size)
			for b.Loop() {
				for range streams {
					s := tm.open(b)
					s.Ref().Post(func() { fillFrom(s, size/streams) })
				}
				for range streams {
					<-done
				}
			}
			if got.Load() < size {
				b.Errorf("%d bytes arrived", got.Load())
			}
		})
	}
	b.Run("over=tcp/streams=1", func(b *testing.B) {
		benchPlain(b, size)
	})
	b.Run("over=link", func(b *testing.B) {
		benchLink(b, size)
	})
}

// ownerFunc is an owner that takes streams.
type ownerFunc func(t *tunnel, s *stream)

func (f ownerFunc) request(t *tunnel, s *stream, _ string, _ Headers) { f(t, s) }
func (f ownerFunc) peerLimit(*tunnel, uint32)                         {}
func (f ownerFunc) noNewStreams(*tunnel)                              {}
func (f ownerFunc) busyChanged(*tunnel, bool)                         {}
func (f ownerFunc) released(*tunnel)                                  {}
func (f ownerFunc) refused(*tunnel, error)                            {}
func (f ownerFunc) gone(*tunnel, error)                               {}

func runGroup(b testing.TB) *loop.Group {
	b.Helper()
	g, err := loop.New(loop.Config{Loops: 2, Now: time.Now})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		<-ended
	})
	return g
}

func benchPlain(b *testing.B, size int) {
	g := runGroup(b)
	var got atomic.Int64
	done := make(chan struct{}, 1)
	a, c := sockPair(b)
	server := ownerFunc(func(t *tunnel, s *stream) {
		_ = t.eng.Respond(s.id, 200, Headers{}, false)
		s.answered = true
		drainInto(s, &got, func() { done <- struct{}{} })
	})
	var client, srv *tunnel
	ready := make(chan struct{}, 2)
	bufs := new(buffers)
	startTunnel(tunnelConfig{group: g, link: &link{conn: c, buffers: bufs}, server: true, owner: server, buffers: bufs, settle: time.Hour},
		func(t *tunnel) { srv = t; ready <- struct{}{} })
	startTunnel(tunnelConfig{group: g, link: &link{conn: a, buffers: bufs}, owner: server, buffers: bufs, settle: time.Hour},
		func(t *tunnel) { client = t; ready <- struct{}{} })
	<-ready
	<-ready
	b.SetBytes(int64(size))
	for b.Loop() {
		o := &opening{authority: "a:1"}
		o.done = func() { fillFrom(o.s, size) }
		client.open(o)
		<-done
	}
	srv.ref.Post(func() { srv.cut() })
}

// benchLink is the ceiling: what the TLS link moves in batches of the size that a tunnel has, without HTTP/2.
func benchLink(b *testing.B, size int) {
	g := runGroup(b)
	p := newPKI(b)
	a, c := sockPair(b)
	links := make(chan *link, 1)
	ctx := context.Background()
	go func() {
		l, err := handshake(ctx, g, c, nil, p.serverTLS(server1.String()), true)
		if err != nil {
			b.Error(err)
		}
		links <- l
	}()
	tx, err := handshake(ctx, g, a, nil, p.clientTLS(client1.String()), false)
	if err != nil {
		b.Fatal(err)
	}
	rx := <-links
	tx.buffers, rx.buffers = new(buffers), new(buffers)
	done := make(chan struct{}, 1)
	left := 0
	got := 0
	plain := make([]byte, bufferSize)
	text := make([]byte, 128<<10)
	txRef := g.Add(func(r *loop.Ref) loop.Task {
		_ = tx.conn.Attach(r)
		return turnFunc(func(int) bool {
			if ok, _ := tx.flush(); !ok || left == 0 {
				return false
			}
			_ = tx.send(text, r.Scratch())
			left -= len(text)
			return true
		})
	})
	rxRef := g.Add(func(r *loop.Ref) loop.Task {
		_ = rx.conn.Attach(r)
		return turnFunc(func(budget int) bool {
			p, again, _ := rx.read(plain[:0], r.Scratch(), budget)
			if got += len(p); got >= size {
				got -= size
				done <- struct{}{}
			}
			return !again
		})
	})
	b.SetBytes(int64(size))
	for b.Loop() {
		txRef.Post(func() { left = size; txRef.WakeLocal() })
		<-done
	}
	txRef.Post(func() { _ = tx.conn.Close(); txRef.Remove() })
	rxRef.Post(func() { _ = rx.conn.Close(); rxRef.Remove() })
}

// BenchmarkRawTLS is crypto/tls between two goroutines, for comparison.
func BenchmarkRawTLS(b *testing.B) {
	const size = 64 << 20
	p := newPKI(b)
	a, c := tcpPair(b)
	ctls, stls := p.clientTLS(client1.String()), p.serverTLS(server1.String())
	var tc, ts net.Conn = tls.Client(a, ctls), tls.Server(c, stls)
	done := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		buf := make([]byte, 128<<10)
		got := 0
		for {
			n, err := ts.Read(buf)
			if err != nil {
				return
			}
			if got += n; got >= size {
				got -= size
				done <- struct{}{}
			}
		}
	}()
	b.SetBytes(size)
	text := make([]byte, 128<<10)
	for b.Loop() {
		for n := 0; n < size; n += len(text) {
			if _, err := tc.Write(text); err != nil {
				b.Fatal(err)
			}
		}
		<-done
	}
	_ = tc.Close()
	_ = ts.Close()
	<-finished
}

// TestIdleStreamMemory: what an idle stream costs both ends together, in this process, beside its relays.
func TestIdleStreamMemory(t *testing.T) {
	tm := newThreadMesh(t, handlerFunc(func(_ context.Context, r *Request) { _ = r.Accept(Headers{}, func(Stream) {}) }))
	tm.open(t)
	heap := func() int {
		least := math.MaxInt
		for range 5 { // without the buffers of a turn that happens to run
			runtime.GC()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			least = min(least, int(m.HeapAlloc))
		}
		return least
	}
	before := heap()
	const streams = 99
	for range streams {
		tm.open(t)
	}
	per := (heap() - before) / streams
	t.Logf("%d bytes for both ends of a stream; stream %d, engine's part %d", per, unsafe.Sizeof(stream{}), unsafe.Sizeof(engineStream{}))
	if per > 3<<10 {
		t.Errorf("%d bytes for both ends of an idle stream, want at most 3 KiB", per)
	}
}

// BenchmarkPingBesideBulk is a ping-pong of 64 bytes that begins beside eight bulk streams to the same peer: on their tunnel, or
// on one of its own. An operation is 50 of them.
func BenchmarkPingBesideBulk(b *testing.B) {
	for _, bb := range []struct {
		name  string
		bulk  int
		extra int
	}{{"bulk=0", 0, 0}, {"bulk=8/tunnels=shared", 8, -1}, {"bulk=8/tunnels=extra", 8, 0}} {
		b.Run(bb.name, func(b *testing.B) {
			var got atomic.Int64
			done := make(chan struct{}, bb.bulk)
			tm := newThreadMeshOf(b, handlerFunc(func(ctx context.Context, r *Request) {
				if r.Authority == "echo:1" {
					echoHandler(ctx, r)
					return
				}
				_ = r.Accept(Headers{}, func(s Stream) { drainInto(s, &got, func() { done <- struct{}{} }) })
			}), loop.Config{Loops: 2, Sparse: 1, Now: time.Now}, PoolConfig{ExtraTunnels: bb.extra})
			var open []Stream
			for range bb.bulk {
				open = append(open, tm.open(b))
			}
			for _, s := range open {
				s.Ref().Post(func() { fillFrom(s, math.MaxInt) })
			}
			for limit := time.Now().Add(10 * time.Second); bb.bulk > 0 && got.Load() < 64<<20; runtime.Gosched() {
				if time.Now().After(limit) {
					b.Fatal("the bulk does not flow")
				}
			}
			got.Store(0)
			tm.target.Authority = "echo:1"
			s := tm.open(b)
			start := time.Now()
			const batch = 50 // on the loop: the goroutine of the benchmark waits for a processor as well
			var rtts []time.Duration
			var sent time.Time
			left := 0
			finished := make(chan struct{}, 1)
			unsent := 0 // bytes of the message that the tunnel had no room for
			write := func() {
				if n, _ := s.TryWrite(make([]byte, unsent)); n > 0 {
					unsent -= n
				}
			}
			send := func() { sent, unsent = time.Now(), 64; write() }
			s.Ref().Post(func() {
				s.Ref().Child(func(r *loop.Ref) loop.Task {
					_ = s.Attach(r)
					return turnFunc(func(int) bool {
						if unsent > 0 {
							write()
						}
						if n, err := s.TryRead(make([]byte, 64)); err == nil && n == 64 {
							rtts = append(rtts, time.Since(sent))
							if left--; left > 0 {
								send()
							} else {
								finished <- struct{}{}
							}
						}
						return false
					})
				})
			})
			for b.Loop() {
				s.Ref().Post(func() { left = batch; send() })
				<-finished
			}
			slices.Sort(rtts)
			b.ReportMetric(float64(rtts[len(rtts)/2].Microseconds()), "p50-us")
			b.ReportMetric(float64(rtts[len(rtts)*99/100].Microseconds()), "p99-us")
			b.ReportMetric(float64(got.Load())/time.Since(start).Seconds()/1e6, "bulk-MB/s")
		})
	}
}

// TestTunnelCloseSockets: servers that close each tunnel as soon as its stream has ended cut none, with the kernel's sockets.
func TestTunnelCloseSockets(t *testing.T) {
	const rounds, size = 20, 3 << 20
	tm := newThreadMesh(t, handlerFunc(func(_ context.Context, r *Request) {
		_ = r.Accept(Headers{}, func(s Stream) {
			s.(*stream).t.drain()
			(&exchange{s: s, left: pattern(size)}).start()
		})
	}))
	done := make(chan *exchange, 1)
	cut := 0
	for range rounds {
		x := &exchange{s: tm.open(t)}
		x.done = func() { done <- x }
		x.s.Ref().Post(func() { _ = x.s.CloseWrite(); x.start() })
		if <-done; x.err != io.EOF || len(x.got) != size {
			cut++
		}
	}
	if cut > 0 {
		t.Errorf("%d of %d streams were cut", cut, rounds)
	}
}
