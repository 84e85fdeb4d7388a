package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// echo sends back what it gets.
func echo(c net.Conn) { io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) }

// bounce sends a message to an echo and waits for it.
func bounce(c net.Conn, message string) error {
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(c, message); err != nil {
		return err
	}
	buf := make([]byte, len(message))
	if _, err := io.ReadFull(c, buf); err != nil {
		return err
	}
	if string(buf) != message {
		return fmt.Errorf("%q came back for %q", buf, message)
	}
	return nil
}

// pingPong connects to an echo and uses it once.
func (b *bed) pingPong(h *lab.Host, to string) error {
	c, err := b.dial(h, to)
	if err != nil {
		return err
	}
	defer c.Close()
	return bounce(c, "ping")
}

// A crash is a node a that dies while its pods go on. What they send carries the family's marker.
type crash struct {
	*bed
	t       *testing.T
	child   *child
	sniffer *lab.Sniffer
	markers [2]string
	open    [2]net.Conn   // established before, through the mesh
	lost    chan struct{} // has one for each connection to the server that has ended
	clear   bool          // there is other traffic, in clear
}

// family is the index of a marker, that of IPv4 or IPv6.
func family(to string) int {
	if to[0] == '[' {
		return 1
	}
	return 0
}

func newCrash(t *testing.T, vars ...string) *crash {
	t.Helper()
	return newCrashOf(t, variant{capture: config.CaptureTUN}, vars...)
}

func newCrashOf(t *testing.T, v variant, vars ...string) *crash {
	t.Helper()
	c := &crash{bed: newBedOn(t, v, lab.Config{}), t: t, markers: [2]string{rand.Text(), rand.Text()}, lost: make(chan struct{}, 2)}
	c.child = c.spawnReady(0, vars...)
	c.start(1)
	c.serve(c.pods[webB], 8080, func(conn net.Conn) {
		echo(conn)
		select {
		case c.lost <- struct{}{}:
		default: // nobody counts so many
		}
	})
	c.serve(c.pods[plainB], 8080, echo)
	c.serve(c.pods[clientA], 8080, echo)
	return c
}

// attempt connects from the pod and says the marker.
func (c *crash) attempt(to string) error { return c.attemptFrom(c.pods[clientA], to, 5*time.Second) }

func (c *crash) attemptFrom(h *lab.Host, to string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), limit)
	defer cancel()
	conn, err := h.Dial(ctx, "tcp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	return bounce(conn, c.markers[family(to)])
}

// dieUnderLoad kills the process in the middle of traffic, then tries for a while whatever a pod may try, and returns what
// became of the connections that were tried.
func (c *crash) dieUnderLoad() (attempts []attempt) {
	t := c.t
	for i, to := range []string{"10.96.0.10:80", "[fd96::10]:80"} {
		conn, err := c.dial(c.pods[clientA], to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		c.open[i] = conn
	}
	var markers [][]byte
	for _, m := range c.markers {
		markers = append(markers, []byte(m))
	}
	var err error
	if c.sniffer, err = c.Wire().Sniff(lab.SniffConfig{Markers: markers}); err != nil {
		t.Fatal(err)
	}
	for i, conn := range c.open {
		if err := bounce(conn, c.markers[i]); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, time.Second, "packets on the wire", func() bool { return c.sniffer.Count().TunnelBytes > 0 })
	if n := c.sniffer.Count(); n.ClearBytes != 0 && !c.clear || n.TunnelBytes == 0 {
		t.Fatalf("before the crash the wire carries %+v, want all in tunnels", n)
	}
	c.child.kill(t)

	targets := append(each(c.pods[webB], 8080), each(c.pods[plainB], 8080)...)
	targets = append(targets, "10.96.0.10:80", "[fd96::10]:80")
	into := each(c.pods[clientA], 8080)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	// Long enough for several retransmissions of what is established.
	for start := time.Now(); time.Since(start) < 3*time.Second; <-tick.C {
		for i, conn := range c.open {
			conn.SetDeadline(time.Now().Add(time.Second))
			io.WriteString(conn, c.markers[i])
		}
		round := make([]attempt, len(targets)+len(into))
		var all sync.WaitGroup
		for i, to := range slices.Concat(targets, into) {
			all.Go(func() {
				from, inbound := c.pods[clientA], i >= len(targets)
				if inbound {
					from = c.Wire().Host
				}
				began := time.Now()
				err := c.attemptFrom(from, to, 300*time.Millisecond)
				round[i] = attempt{to, inbound, began.Sub(start), time.Since(began), err}
			})
		}
		all.Wait()
		attempts = append(attempts, round...)
	}
	return attempts
}

// An attempt is a connection that was tried while the process was dead.
type attempt struct {
	to          string
	inbound     bool // to the pod, from a host outside
	after, took time.Duration
	err         error
}

func TestNetnsCrashLetsNothingOut(t *testing.T) {
	c := newCrash(t)
	// The kernel takes away the routes of a device without a carrier within a second (linkwatch, net/core/link_watch.c); what
	// is sent before that is lost in the device, and the next SYN, a second later, fails.
	const settled = time.Second
	for _, a := range c.dieUnderLoad() {
		switch {
		case a.err == nil, !a.inbound && a.after < settled && !errors.Is(a.err, syscall.EHOSTUNREACH) && !isTimeout(a.err):
			t.Errorf("%v after the death, %s: %v, want no connection", a.after, a.to, a.err)
		case a.inbound: // that host is told nothing, or something by the pod's kernel
		case a.after >= settled && (!errors.Is(a.err, syscall.EHOSTUNREACH) || a.took > 200*time.Millisecond):
			t.Errorf("%v after the death, %s: %v after %v, want no route to host at once", a.after, a.to, a.err, a.took)
		}
	}
	for range c.open { // the other node has told the server
		select {
		case <-c.lost:
		case <-time.After(5 * time.Second):
			t.Error("the server does not see the end of a connection of the dead node")
		}
	}
	// It comes back while the pods go on.
	c.child = c.spawnReady(0)
	for i, to := range []string{"10.96.0.10:80", "[fd96::10]:80"} {
		if err := c.attempt(to); err != nil {
			t.Errorf("after the restart, %s: %v", to, err)
		}
		// What was established is told at its next segment.
		eventually(t, 10*time.Second, "the end of a connection from before the crash", func() bool {
			c.open[i].SetDeadline(time.Now().Add(50 * time.Millisecond))
			_, err := c.open[i].Read(make([]byte, 1))
			return err != nil && !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err)
		})
	}
	if err := c.sniffer.Close(); err != nil {
		t.Fatal(err)
	}
	n := c.sniffer.Count()
	if n.ClearBytes != 0 || n.Hits[0] != 0 || n.Hits[1] != 0 || n.Dropped != 0 {
		t.Errorf("the wire carried %+v, want nothing clear", n)
	}
	for _, to := range append(each(c.pods[webB], 8080), each(c.pods[plainB], 8080)...) {
		if err := c.attempt(to); err != nil {
			t.Errorf("after the restart, %s: %v", to, err)
		}
	}
	for _, to := range each(c.pods[clientA], 8080) {
		if err := c.attemptFrom(c.Wire().Host, to, 5*time.Second); err != nil {
			t.Errorf("after the restart, from outside to %s: %v", to, err)
		}
	}
	c.child.stop(t)
}

// The detector of the test before, on a capture that does not fail closed.
func TestNetnsCrashFailOpenIsDetected(t *testing.T) {
	c := newCrash(t, childFailOpen+"=1")
	through := make(map[string]int)
	for _, a := range c.dieUnderLoad() {
		if a.err == nil {
			through[a.to]++
		}
	}
	for _, to := range append(each(c.pods[webB], 8080), each(c.pods[plainB], 8080)...) {
		if through[to] == 0 {
			t.Errorf("%s: nothing got through", to)
		}
	}
	if err := c.sniffer.Close(); err != nil {
		t.Fatal(err)
	}
	n := c.sniffer.Count()
	if n.ClearBytes == 0 || n.Hits[0] == 0 || n.Hits[1] == 0 {
		t.Errorf("the detector sees nothing of what leaves in clear: %+v", n)
	}
	t.Logf("%+v", n)
}

// The pod is given back as it was also by the process after the one that captured it.
func TestNetnsAdoptedPodIsGivenBack(t *testing.T) {
	c := newBed(t)
	unchanged(t, c.pods[:2], func() {
		c.spawnReady(0).kill(t)
		c.spawnReady(0).stop(t)
	})
}

// What is cut by the death of either node is never mistaken for whole: the other side's application sees a reset, no EOF, and so
// does the dead node's own wherever the kernel carries its connection.
func TestNetnsCrashIsNoEndOfFile(t *testing.T) { eachBackend(t, checkCrashIsNoEndOfFile) }

func checkCrashIsNoEndOfFile(t *testing.T, b *bed) {
	for dead, name := range []string{"of the client's node", "of the server's node"} {
		nodes := []*child{b.spawnReady(0), b.spawnReady(1)}
		type flow struct{ from, to net.Conn }
		var flows []flow
		for _, w := range b.ways(8080)[:2] { // the mesh's
			for _, up := range []bool{true, false} {
				client, server := b.connect(t, w)
				f := flow{server, client}
				if up {
					f = flow{client, server}
				}
				// A netstack leaves its application without a word.
				if own := up == (dead == 1); own && dead == 0 && b.capture == config.CaptureTUN {
					continue
				}
				flows = append(flows, f)
			}
		}
		var sending sync.WaitGroup
		for _, f := range flows {
			sending.Go(func() { io.Copy(struct{ io.Writer }{f.from}, zeros{}) })
			if _, err := io.CopyN(io.Discard, f.to, 1_000_000); err != nil {
				t.Fatal(err)
			}
		}
		nodes[dead].kill(t)
		for _, f := range flows {
			// At once, as a rule. Where segments of the tunnel were dropped before, the reset of its dead end is not the next byte: the other
			// end asks for it again, from a pod that is closed, and learns by the engine's ping that nobody is there (10 s and 20).
			if err := f.to.SetReadDeadline(time.Now().Add(45 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, f.to); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s, %v to %v: %d bytes, then %v, want a reset", name, f.from.LocalAddr(), f.to.LocalAddr(), n, err)
			}
			f.from.Close()
		}
		sending.Wait()
		nodes[1-dead].stop(t)
	}
}

// zeros is an endless reader.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}
