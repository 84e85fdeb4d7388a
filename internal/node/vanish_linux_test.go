package node

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ztun.dev/ztun/internal/lab"
)

// One side of many connections has sent its end when the other side's host vanishes: every one of them ends in bounded time, on both
// nodes, and what it has held is given back.
func TestNetnsHalfClosedPeersVanish(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			t.Run("FP-01", func(t *testing.T) { checkHalfClosedPeersVanish(t, v) })
		})
	}
}

// sum adds up the values of a metric in a process of a node.
func (b *bed) sum(t *testing.T, node int, metric string) (sum int) {
	t.Helper()
	_, text, err := page(t.Context(), b.Node(node), 15020, "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, "} "); ok && strings.HasPrefix(name, metric+"{") {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Errorf("%s: %v", line, err)
			}
			sum += int(n)
		}
	}
	return sum
}

// files is how many descriptors a process has.
func (c *child) files(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.cmd.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func checkHalfClosedPeersVanish(t *testing.T, v variant) {
	const (
		count   = 5000 / slower
		workers = 50
		// Keepalive below finds it within 4 s; then each connection is told.
		bound = slower * 20 * time.Second
	)
	b := newBedOn(t, v, lab.Config{})
	for _, name := range []string{"node-a.yaml", "node-b.yaml"} {
		b.write(name, "keepaliveTime: 1s\nkeepaliveInterval: 1s\nkeepaliveRetries: 3\nmaxInFlightPerPod: 8000\n"+b.read(name))
	}
	nodes := []*child{b.spawnReady(0), b.spawnReady(1)}
	ends := make(chan error, count) // how the server's connections end
	b.serve(b.pods[webB], 8080, func(c net.Conn) {
		if _, err := io.Copy(io.Discard, c); err != nil { // the client's end comes first
			ends <- err
			return
		}
		// Nothing is to be read any more: a write tells.
		for {
			if _, err := c.Write([]byte("x")); err != nil {
				ends <- err
				return
			}
			<-time.After(500 * time.Millisecond)
		}
	})
	first, err := b.dial(b.pods[clientA], "10.96.0.10:80") // makes the tunnel
	if err != nil {
		t.Fatal(err)
	}
	first.(*net.TCPConn).CloseWrite()
	if _, err := first.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	first.(*net.TCPConn).SetLinger(0)
	first.Close()
	<-ends
	eventually(t, 10*time.Second, "the end of the first connection", func() bool {
		return b.sum(t, 0, "istio_tcp_connections_closed_total") == 1 && b.sum(t, 1, "istio_tcp_connections_closed_total") == 1
	})
	before := []int{nodes[0].files(t), nodes[1].files(t)}

	conns := make([]*net.TCPConn, count)
	t.Cleanup(func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	})
	failed := make(chan error, workers)
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for i := w; i < count; i += workers {
				c, err := b.dial(b.pods[clientA], "10.96.0.10:80")
				if err != nil {
					failed <- fmt.Errorf("connection %d: %w", i, err)
					return
				}
				conns[i] = c.(*net.TCPConn)
				conns[i].CloseWrite()
				if _, err := c.Read(make([]byte, 1)); err != nil { // the server has seen it
					failed <- fmt.Errorf("connection %d: %w", i, err)
					return
				}
			}
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		t.Fatal(err)
	}
	if open := b.sum(t, 0, "ztun_flows_open"); open != count {
		t.Errorf("%d connections are open, want %d", open, count)
	}
	began := time.Now()
	if err := b.pods[webB].Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(link)
	}); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"client", "server"} {
		eventually(t, bound, "the end of all connections on the node of the "+name, func() bool {
			return b.sum(t, i, "ztun_flows_open") == 0
		})
		opened, closed := b.sum(t, i, "istio_tcp_connections_opened_total"), b.sum(t, i, "istio_tcp_connections_closed_total")
		if opened != count+1 || closed != opened {
			t.Errorf("on the node of the %s: opened %d, closed %d; want %d", name, opened, closed, count+1)
		}
	}
	t.Logf("all were over after %v", time.Since(began).Round(time.Millisecond))
	for i, c := range conns { // every application has been told
		c.SetReadDeadline(time.Now().Add(bound))
		if _, err := io.Copy(io.Discard, c); err == nil || isTimeout(err) {
			t.Fatalf("connection %d reads %v, want a reset", i, err)
		}
	}
	for range count {
		select {
		case <-ends:
		case <-time.After(bound):
			t.Fatal("a connection of the server's application does not end")
		}
	}
	for i, n := range nodes {
		eventually(t, bound, "the descriptors", func() bool { return n.files(t) <= before[i]+2 })
		n.stop(t)
	}
}
