package interop

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
)

// A pair is one connection through a peer: ours is the stream in ztun, theirs the other side of the peer.
type pair struct {
	ours   *loop.Blocked
	theirs conn
}

// A conn is a connection whose directions end by themselves. Those of programs are *net.TCPConn.
type conn interface {
	net.Conn
	CloseWrite() error
}

// A route is a way through a peer, in one direction. Whoever opens the stream, a pair's ends can do the same.
type route struct {
	open func(t *testing.T) pair

	ends order

	// instead has what a peer does where it cannot do what the test of that name asks for; nil: nothing.
	instead map[string]func(t *testing.T, r *route)
}

// An order is one in which the directions of a connection can end.
type order uint8

const (
	anyOrder     order = iota
	oursEndFirst       // theirs cannot end before ours has
	theirsClose        // theirs can only end both at once
)

// The sizes of what is carried. Both are more than the windows of all peers, and odd.
const (
	large  = 32<<20 + 4321
	medium = 1<<20 + 321
)

// Names of tests that not every peer can pass.
const (
	oursFirstName     = "DP-125 half-close, ours first"
	theirsFirstName   = "DP-126 half-close, theirs first, ours goes on"
	resetByOursName   = "DP-127 reset by ours"
	resetByTheirsName = "DP-128 reset by theirs"
)

// withAges runs a test twice. The second time our tunnels take new streams for 30 ms only and then go away gracefully, all the
// time, under whatever the test is doing: no stream may see anything of it.
func withAges(t *testing.T, test func(t *testing.T, m *mesh)) {
	t.Run("lasting tunnels", func(t *testing.T) { test(t, newMesh(t, 0)) })
	t.Run("GOAWAY every 30 ms", func(t *testing.T) { test(t, newMesh(t, 30*time.Millisecond)) })
}

// suite is what every peer has to get right with us, in both directions.
var suite = []struct {
	name string
	run  func(t *testing.T, r *route)
}{
	{"DP-124 32 MiB each way at once, odd write sizes", bothWays},
	{oursFirstName, oursFirst},
	{theirsFirstName, theirsFirst},
	{resetByOursName, resetByOurs},
	{resetByTheirsName, resetByTheirs},
	{"DP-129 slow readers on both sides beside a fast stream", slowBesideFast},
	{"150 streams", manyStreams},
}

func (r *route) run(t *testing.T) {
	for _, tt := range suite {
		run, name := tt.run, tt.name
		if f, ok := r.instead[name]; ok {
			if f == nil {
				continue
			}
			run, name = f, name+", as far as it goes"
		}
		t.Run(name, func(t *testing.T) { run(t, r) })
	}
}

// close ends both sides, whatever state they are in.
func (p pair) close() {
	_ = p.ours.Close()
	_ = p.theirs.Close()
}

// reset ends theirs with an RST.
func (p pair) reset(t *testing.T) {
	t.Helper()
	c, ok := p.theirs.(*net.TCPConn)
	if !ok {
		t.Fatalf("%T has no reset", p.theirs)
	}
	if err := errors.Join(c.SetLinger(0), c.Close()); err != nil {
		t.Fatal(err)
	}
}

// pattern is n bytes that tell where they belong.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8) ^ byte(i>>16) ^ seed
	}
	return b
}

// send writes p in pieces of odd sizes.
func send(w io.Writer, p []byte) error {
	for n := 1; len(p) > 0; n = (n*7 + 3) % 200_003 {
		k, err := w.Write(p[:min(n, len(p))])
		if err != nil {
			return err
		}
		p = p[k:]
	}
	return nil
}

// sendAll is send and the end.
func sendAll(w conn, p []byte) error {
	return errors.Join(send(w, p), w.CloseWrite())
}

// receiveAll wants p and then the end.
func receiveAll(r io.Reader, p []byte) error {
	got, err := io.ReadAll(r)
	if err == nil && !bytes.Equal(got, p) {
		err = fmt.Errorf("%d bytes arrived, want the %d that were sent", len(got), len(p))
	}
	return err
}

// receive wants p, and leaves what follows.
func receive(r io.Reader, p []byte) error {
	got := make([]byte, len(p))
	n, err := io.ReadFull(r, got)
	if err == nil && !bytes.Equal(got, p) {
		err = errors.New("other bytes than those that were sent")
	}
	if err != nil {
		err = fmt.Errorf("after %d of %d bytes: %w", n, len(p), err)
	}
	return err
}

// together runs all and reports what fails.
func together(t *testing.T, parts map[string]func() error) {
	t.Helper()
	var wg sync.WaitGroup
	for name, f := range parts {
		wg.Go(func() {
			if err := f(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	wg.Wait()
}

func bothWays(t *testing.T, r *route) {
	p := r.open(t)
	defer p.close()
	r.carry(t, p, pattern(large, 1), pattern(large, 2))
}

// carry sends both ways at once, and ends.
func (r *route) carry(t *testing.T, p pair, up, down []byte) {
	t.Helper()
	var received chan struct{} // closed when theirs has received ours to the end
	switch r.ends {
	case anyOrder:
		received = make(chan struct{})
		close(received)
	case oursEndFirst:
		received = make(chan struct{})
	case theirsClose:
		together(t, map[string]func() error{
			"ours sends":      func() error { return send(p.ours, up) },
			"theirs receives": func() error { return receive(p.theirs, up) },
			"theirs sends":    func() error { return send(p.theirs, down) },
			"ours receives":   func() error { return receive(p.ours, down) },
		})
		together(t, map[string]func() error{
			"theirs ends":        p.theirs.Close,
			"ours sees that end": func() error { return receiveAll(p.ours, nil) },
		})
		return
	}
	together(t, map[string]func() error{
		"ours sends": func() error { return sendAll(p.ours, up) },
		"theirs receives": func() error {
			if r.ends == oursEndFirst {
				defer close(received)
			}
			return receiveAll(p.theirs, up)
		},
		"theirs sends": func() error {
			err := send(p.theirs, down)
			<-received
			return errors.Join(err, p.theirs.CloseWrite())
		},
		"ours receives": func() error { return receiveAll(p.ours, down) },
	})
}

func oursFirst(t *testing.T, r *route) {
	p := r.open(t)
	defer p.close()
	question, answer := pattern(medium, 1), pattern(medium, 2)
	together(t, map[string]func() error{
		"ours sends":      func() error { return sendAll(p.ours, question) },
		"theirs receives": func() error { return receiveAll(p.theirs, question) },
	})
	together(t, map[string]func() error{
		"theirs sends":  func() error { return sendAll(p.theirs, answer) },
		"ours receives": func() error { return receiveAll(p.ours, answer) },
	})
}

func theirsFirst(t *testing.T, r *route) {
	p := r.open(t)
	defer p.close()
	banner, rest := pattern(medium, 1), pattern(medium, 2)
	together(t, map[string]func() error{
		"theirs sends":  func() error { return sendAll(p.theirs, banner) },
		"ours receives": func() error { return receiveAll(p.ours, banner) },
	})
	together(t, map[string]func() error{
		"ours sends":      func() error { return sendAll(p.ours, rest) },
		"theirs receives": func() error { return receiveAll(p.theirs, rest) },
	})
}

// greet lets some bytes go both ways, so that the connection is established at all ends.
func greet(t *testing.T, p pair) {
	t.Helper()
	together(t, map[string]func() error{
		"ours": func() error {
			if err := send(p.ours, []byte("hello")); err != nil {
				return err
			}
			return receive(p.ours, []byte("welcome"))
		},
		"theirs": func() error {
			if err := receive(p.theirs, []byte("hello")); err != nil {
				return err
			}
			return send(p.theirs, []byte("welcome"))
		},
	})
}

// ending is how a connection ends for a reader, and what came before it.
func ending(r io.Reader) (n int, err error) {
	for buf := make([]byte, 64<<10); ; {
		k, err := r.Read(buf)
		n += k
		if err != nil {
			return n, err
		}
	}
}

func resetByOurs(t *testing.T, r *route) {
	p := r.open(t)
	defer p.close()
	greet(t, p)
	if err := p.ours.Reset(); err != nil {
		t.Fatal(err)
	}
	if n, err := ending(p.theirs); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("theirs ends after %d bytes with %v, want a reset", n, err)
	}
}

func resetByTheirs(t *testing.T, r *route) {
	p := r.open(t)
	defer p.close()
	greet(t, p)
	p.reset(t)
	if n, err := ending(p.ours); !errors.Is(err, loop.ErrReset) {
		t.Errorf("ours ends after %d bytes with %v, want a reset", n, err)
	}
}

// slowBesideFast has one stream whose ends do not read, each of which is sent more than all windows hold, and another that
// carries as much meanwhile.
func slowBesideFast(t *testing.T, r *route) {
	slow := r.open(t)
	defer slow.close()
	greet(t, slow)
	up, down := pattern(large, 3), pattern(large, 4)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := send(slow.ours, up); err != nil {
			t.Errorf("ours sends on the slow stream: %v", err)
		}
	})
	wg.Go(func() {
		if err := send(slow.theirs, down); err != nil {
			t.Errorf("theirs sends on the slow stream: %v", err)
		}
	})
	bothWays(t, r)
	together(t, map[string]func() error{
		"theirs receives late": func() error { return receive(slow.theirs, up) },
		"ours receives late":   func() error { return receive(slow.ours, down) },
	})
	wg.Wait()
}

// manyStreams are more than fit into one tunnel.
func manyStreams(t *testing.T, r *route) {
	const streams = 150
	var pairs [streams]pair
	for i := range pairs {
		pairs[i] = r.open(t)
		defer pairs[i].close()
	}
	start := time.Now()
	var wg sync.WaitGroup
	for i, p := range pairs {
		wg.Go(func() {
			text := pattern(20_000, byte(i))
			r.carry(t, p, text, text)
		})
	}
	wg.Wait()
	t.Logf("%d streams carried their bytes in %v", streams, time.Since(start))
}

// An app is where the peer connects to for a stream that we open.
type app struct{ ln *net.TCPListener }

func newApp(t *testing.T) *app {
	t.Helper()
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return &app{ln}
}

func (a *app) authority() string { return a.ln.Addr().String() }

func (a *app) accept(t *testing.T) *net.TCPConn {
	t.Helper()
	err := a.ln.SetDeadline(time.Now().Add(patience))
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.ln.AcceptTCP()
	if err != nil {
		t.Fatalf("the peer does not connect to the application: %v", err)
	}
	return ready(t, c)
}

func ready(t *testing.T, c *net.TCPConn) *net.TCPConn {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c
}

// toPeer is the route on which we open streams, by way of the peer at addr.
func toPeer(m *mesh, addr netip.AddrPort, a *app) *route {
	return &route{open: func(t *testing.T) pair {
		t.Helper()
		s, err := m.open(addr, a.authority())
		if err != nil {
			t.Fatal(err)
		}
		if s.Peer() != peerID {
			t.Errorf("the peer is %v, want %v", s.Peer(), peerID)
		}
		return pair{view(t, s), a.accept(t)}
	}}
}

// fromPeer is the route on which the peer opens a stream for each connection to addr.
func fromPeer(m *mesh, addr string) *route {
	return &route{open: func(t *testing.T) pair {
		t.Helper()
		c, err := net.DialTimeout("tcp", addr, patience)
		if err != nil {
			t.Fatal(err)
		}
		s := m.accepted(t)
		return pair{view(t, s), ready(t, c.(*net.TCPConn))}
	}}
}

// rejected: what a peer's user sees of a request that we reject is an end without a byte, and the next request is served.
func rejected(t *testing.T, m *mesh, r *route, addr string) {
	m.status.Store(http.StatusUnauthorized)
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := ending(ready(t, c.(*net.TCPConn))); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a rejected connection ends after %d bytes with %v", n, err)
	}
	m.status.Store(0)
	p := r.open(t)
	defer p.close()
	greet(t, p)
}

// refused: an application that does not listen is the peer's 503.
func refused(t *testing.T, m *mesh, addr netip.AddrPort) {
	_, err := m.open(addr, "127.0.0.1:1")
	if status, ok := errors.AsType[*hbone.StatusError](err); !ok || status.Code != http.StatusServiceUnavailable {
		t.Errorf("a closed port behind the peer: %v, want its status 503", err)
	}
}

// goesAway: after the GOAWAY that drain brings about, what is open goes on to its end, and new streams find a new tunnel.
func goesAway(t *testing.T, m *mesh, r *route, drain func()) {
	p := r.open(t)
	defer p.close()
	greet(t, p)
	first := p.ours.LocalAddr().String()
	drain()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		next := r.open(t)
		greet(t, next)
		moved := next.ours.LocalAddr().String() != first
		next.close()
		if moved {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("new streams go on to use the tunnel")
		}
	}
	r.carry(t, p, pattern(medium, 1), pattern(medium, 2))
}

// drained: after our server has announced that it goes away, what is open goes on to its end, and soon nothing new comes.
func drained(t *testing.T, m *mesh, r *route, dial func() (net.Conn, error)) {
	p := r.open(t)
	defer p.close()
	greet(t, p)
	m.server.Drain()
	for deadline := time.Now().Add(patience); served(t, m, dial); {
		if time.Now().After(deadline) {
			t.Fatal("new streams go on to be served")
		}
	}
	r.carry(t, p, pattern(medium, 1), pattern(medium, 2))
	p.close()
	closing(t, "server", m.server.Close)
}

// served reports whether a new connection becomes a stream. One that does not ends without a byte.
func served(t *testing.T, m *mesh, dial func() (net.Conn, error)) bool {
	t.Helper()
	c, err := dial()
	if err != nil {
		return false
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		n, err := ending(c)
		if n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("after %d bytes: %w", n, err)
		} else {
			err = nil
		}
		ended <- err
	}()
	select {
	case s := <-m.streams: // sent before the GOAWAY arrived
		<-m.requests
		_ = view(t, s).Close()
		_ = c.Close()
		<-ended
		return true
	case err := <-ended:
		if err != nil {
			t.Errorf("a connection that is not served ends %v", err)
		}
		_ = c.Close()
		return false
	}
}
