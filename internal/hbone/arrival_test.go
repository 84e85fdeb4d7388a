package hbone

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// helloConn keeps what a TLS client says first.
type helloConn struct {
	net.Conn
	hello []byte
}

func (c *helloConn) Write(p []byte) (int, error) { c.hello = append(c.hello, p...); return len(p), nil }
func (c *helloConn) Read([]byte) (int, error)    { return 0, io.EOF }

func clientHello(t *testing.T) []byte {
	t.Helper()
	c := new(helloConn)
	if err := tls.Client(c, newPKI(t).clientTLS(client1.String())).Handshake(); err == nil || len(c.hello) == 0 {
		t.Fatalf("no ClientHello: %v", err)
	}
	return c.hello
}

// arrive connects a client from an address, which sends first and then nothing.
func (ms *mesh) arrive(from netip.AddrPort, first []byte) loop.Conn {
	ms.t.Helper()
	a, b := loop.PipeAddrs(from, serverAddr)
	if _, err := a.TryWrite(first); err != nil {
		ms.t.Fatal(err)
	}
	ms.server.Serve(b)
	ms.m.Settle()
	return a
}

// closed reports whether the server has reset the connection.
func closed(c loop.Conn) bool {
	_, err := c.TryRead(make([]byte, 1))
	return !errors.Is(err, loop.ErrAgain) && err != nil
}

// TestServerSilentConnections: hundreds of connections that send nothing, or less than a ClientHello, cost no goroutine and
// keep nobody waiting.
func TestServerSilentConnections(t *testing.T) {
	for _, first := range []string{"", "\x16\x03\x01\x02\x00some"} {
		ms := newMesh(t, meshConfig{})
		before := runtime.NumGoroutine()
		for range 900 {
			ms.arrive(clientAddr, []byte(first))
		}
		if n := runtime.NumGoroutine() - before; n > 0 {
			t.Errorf("%d goroutines for 900 silent connections", n)
		}
		start := ms.m.Group().Now()
		s := ms.mustOpen()
		if waited := ms.m.Group().Now().Sub(start); waited >= time.Second {
			t.Errorf("beside 900 silent connections Open took %v", waited)
		}
		s.Ref().Post(func() { _ = s.Close() })
		ms.m.Advance(10 * time.Second)
		if n := ms.server.arrivals.all.Len(); n != 0 || len(ms.server.arrivals.byPeer) != 0 || ms.server.setups != 0 {
			t.Errorf("after the time for handshakes %d connections are left, of %v; %d counted", n, ms.server.arrivals.byPeer, ms.server.setups)
		}
	}
}

// TestServerEvicts: there is room for so many connections without a handshake; the oldest of whoever has the most goes first.
func TestServerEvicts(t *testing.T) {
	other := netip.MustParseAddrPort("10.0.0.8:1")
	ms := newMesh(t, meshConfig{server: ServerConfig{MaxArrivals: 3}})
	quiet := ms.arrive(other, nil)
	var many []loop.Conn
	for range 4 {
		many = append(many, ms.arrive(clientAddr, nil))
	}
	want := []bool{true, true, false, false}
	for i, c := range many {
		if closed(c) != want[i] {
			t.Errorf("connection %d of 4: closed %v, want %v", i, closed(c), want[i])
		}
	}
	if closed(quiet) {
		t.Error("the only connection of another address was closed")
	}
}

// TestServerHandshakeLimit: of one address a quarter of the handshakes may be in progress, of all together so many.
func TestServerHandshakeLimit(t *testing.T) {
	ms := newMesh(t, meshConfig{server: ServerConfig{MaxHandshakes: 4, MaxArrivals: 8, HandshakeTimeout: 5 * time.Second}})
	hello := clientHello(t)
	from := func(i byte) netip.AddrPort { return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, i}), 1) }
	for range 3 {
		ms.arrive(from(1), hello)
	}
	if ms.server.handshakes != 1 {
		t.Errorf("%d handshakes of one address, want 1 of 4", ms.server.handshakes)
	}
	s := ms.mustOpen() // beside it
	s.Ref().Post(func() { _ = s.Close() })
	for i := range byte(3) {
		ms.arrive(from(2+i), hello)
	}
	if ms.server.handshakes != 4 || !ms.server.Accepting() {
		t.Errorf("%d handshakes, want 4; accepting: %v", ms.server.handshakes, ms.server.Accepting())
	}
	resumed := 0
	ms.server.cfg.Resume = func() { resumed++ }
	for i := range byte(4) {
		ms.arrive(from(5+i), hello)
	}
	if ms.server.Accepting() || resumed > 0 {
		t.Errorf("6 of 8 wait for a handshake and the server accepts more; resumed %d times", resumed)
	}
	ms.m.Advance(5 * time.Second)
	if !ms.server.Accepting() || resumed != 1 || ms.server.handshakes != 0 || len(ms.server.handshakesOf) != 0 {
		t.Errorf("accepting %v, resumed %d times, %d handshakes of %v", ms.server.Accepting(), resumed, ms.server.handshakes, ms.server.handshakesOf)
	}
}

// TestServerDrainResetsArrivals: a drain does not wait for those that say nothing.
func TestServerDrainResetsArrivals(t *testing.T) {
	ms := newMesh(t, meshConfig{})
	c := ms.arrive(clientAddr, nil)
	ms.server.Drain()
	ms.m.Settle()
	if !closed(c) || ms.server.setups != 0 {
		t.Errorf("closed %v, %d set-ups", closed(c), ms.server.setups)
	}
}
