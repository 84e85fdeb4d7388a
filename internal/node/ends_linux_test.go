package node

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/lab"
)

// A way is one by which a client reaches a server.
type way struct {
	name     string
	from, to *lab.Host
	addr     string
}

// ways lists the ways by which bytes pass ztun, in both families; the server listens on port.
func (b *bed) ways(port uint16) []way {
	var all []way
	for _, w := range []struct {
		name     string
		from, to *lab.Host
	}{
		{"mesh", b.pods[clientA], b.pods[webB]},
		{"passthrough", b.pods[clientA], b.pods[plainB]},
		{"plaintext in", b.pods[plainB], b.pods[webB]},
	} {
		for _, addr := range each(w.to, port) {
			all = append(all, way{w.name, w.from, w.to, addr})
		}
	}
	return all
}

// connect returns both ends of a new connection.
func (b *bed) connect(t *testing.T, w way) (client, server *net.TCPConn) {
	t.Helper()
	port := netip.MustParseAddrPort(w.addr).Port()
	l, err := w.to.Listen("tcp", netip.AddrPortFrom(netip.IPv6Unspecified(), port).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := b.dial(w.from, w.addr)
	if err != nil {
		t.Fatalf("%s: %v", w.addr, err)
	}
	t.Cleanup(func() { c.Close() })
	l.(*net.TCPListener).SetDeadline(time.Now().Add(5 * time.Second))
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	for _, end := range []net.Conn{c, s} {
		end.SetDeadline(time.Now().Add(10 * time.Second))
	}
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// The request ends, then comes the answer, with a program of the system.
func TestNetnsHalfCloseByNetcat(t *testing.T) { eachBackend(t, checkHalfCloseByNetcat) }

func checkHalfCloseByNetcat(t *testing.T, b *bed) {
	b.start(0)
	b.start(1)
	answer := func(c net.Conn) {
		got, err := io.ReadAll(c)
		if err == nil {
			io.WriteString(c, "had "+string(got)+", then EOF")
		}
	}
	b.serve(b.pods[webB], 8080, answer)
	b.serve(b.pods[plainB], 8080, answer)
	for _, w := range b.ways(8080) {
		to := netip.MustParseAddrPort(w.addr)
		cmd := w.from.Command(t.Context(), "nc", "-N", "-w", "5", to.Addr().String(), "8080")
		cmd.Stdin = strings.NewReader("x")
		out, err := cmd.Output()
		if want := "had x, then EOF"; err != nil || string(out) != want {
			t.Errorf("%s, %s: %q, %v, want %q", w.name, w.addr, out, err, want)
		}
	}
}

// Each side may end first, and the other goes on.
func TestNetnsHalfCloseEachOrder(t *testing.T) { eachBackend(t, checkHalfCloseEachOrder) }

func checkHalfCloseEachOrder(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	for i, w := range b.ways(8080) {
		for _, order := range []string{"client first", "server first"} {
			first, second := b.connect(t, w)
			if order == "server first" {
				first, second = second, first
			}
			long := bytes.Repeat([]byte{byte(i), 1, 2, 3}, 20_000)
			var sent sync.WaitGroup
			sent.Go(func() {
				first.Write([]byte("early"))
				first.CloseWrite()
			})
			if got, err := io.ReadAll(second); err != nil || string(got) != "early" {
				t.Errorf("%s, %s, %s: %q, %v, want EOF after early", w.name, w.addr, order, got, err)
			}
			sent.Wait()
			sent.Go(func() {
				second.Write(long)
				second.CloseWrite()
			})
			if got, err := io.ReadAll(first); err != nil || !bytes.Equal(got, long) {
				t.Errorf("%s, %s, %s: %d bytes, %v, want the %d that were sent after the FIN", w.name, w.addr, order, len(got), err, len(long))
			}
			sent.Wait()
			first.Close()
			second.Close()
		}
	}
	awaitNoneOpen(t, a, z)
}

func TestNetnsResetsArriveAsSuch(t *testing.T) { eachBackend(t, checkResetsArriveAsSuch) }

func checkResetsArriveAsSuch(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	for _, w := range b.ways(8080) {
		for _, order := range []string{"by the client", "by the server"} {
			first, second := b.connect(t, w)
			if order == "by the server" {
				first, second = second, first
			}
			// Both have seen the other's bytes: the reset is that of an established connection.
			buf := make([]byte, 4)
			for _, ends := range [][2]net.Conn{{first, second}, {second, first}} {
				if _, err := ends[0].Write([]byte("ping")); err != nil {
					t.Error(err)
				}
				if _, err := io.ReadFull(ends[1], buf); err != nil {
					t.Error(err)
				}
			}
			first.SetLinger(0)
			first.Close()
			if n, err := second.Read(buf); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s, %s, %s: %d, %v, want it reset", w.name, w.addr, order, n, err)
			}
		}
	}
	awaitNoneOpen(t, a, z)
}

// awaitNoneOpen waits until the records of all connections are closed.
func awaitNoneOpen(t *testing.T, nodes ...*process) {
	t.Helper()
	for i, p := range nodes {
		eventually(t, 5*time.Second, "the end of all connections", func() bool { return p.node.records.Stats().Open == 0 })
		if s := p.node.records.Stats(); s.Open != 0 {
			t.Errorf("node %d: %+v", i, s)
		}
	}
}
