package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
	"ztun.dev/ztun/stack"
)

// eachOffload runs a test of what the kernel carries.
func eachOffload(t *testing.T, test func(*testing.T, *bed)) {
	t.Helper()
	onOffloads(t, test, config.OffloadSockops, config.OffloadTC, config.OffloadNFT)
}

// onOffloads is eachOffload on some of them.
func onOffloads(t *testing.T, test func(*testing.T, *bed), some ...config.Offload) {
	t.Helper()
	for _, o := range some {
		t.Run(o.String(), func(t *testing.T) { test(t, newBedOn(t, variant{config.CaptureTUN, o}, lab.Config{})) })
	}
}

// stackOf is what the stack of a pod has counted.
func (p *process) stackOf(t *testing.T, pod string) stack.Stats {
	t.Helper()
	for _, x := range p.node.listPods() {
		if x.spec.client.Name != pod {
			continue
		}
		if b, ok := x.current().backend.(*tunBackend); ok {
			return b.stack.Stats()
		}
	}
	t.Fatalf("no stack of pod %s", pod)
	return stack.Stats{}
}

// Nothing of a connection but its SYN comes to user space through the device, whoever carries it.
func TestNetnsOnlySYNsInTheDevice(t *testing.T) { eachOffload(t, checkOnlySYNsInTheDevice) }

func checkOnlySYNsInTheDevice(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	for _, w := range b.ways(8080) {
		p, pod := a, "client"
		if w.name == "plaintext in" {
			p, pod = z, "web"
		}
		before := p.stackOf(t, pod)
		client, server := b.connect(t, w)
		if err := transfer(client, server, 1, 4<<20); err != nil {
			t.Errorf("%s, %s: up: %v", w.name, w.addr, err)
		}
		if err := transfer(server, client, 2, 4<<20); err != nil {
			t.Errorf("%s, %s: down: %v", w.name, w.addr, err)
		}
		after := p.stackOf(t, pod)
		handed := after.HandedBack - before.HandedBack
		if syns := after.RxPackets - before.RxPackets; syns != 1 || (handed == 1) != (w.name != "mesh") {
			t.Errorf("%s, %s: %d packets in the device, %d flows handed back; want the SYN alone, and the mesh's flows kept", w.name, w.addr, syns, handed)
		}
	}
	awaitNoneOpen(t, a, z)
}

// What the kernel carries is recorded like anything else.
func TestNetnsRecordsOfTheKernelsConnections(t *testing.T) {
	eachOffload(t, checkRecordsOfTheKernelsConnections)
}

func checkRecordsOfTheKernelsConnections(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	for _, w := range b.ways(8080) {
		if w.name == "mesh" {
			continue
		}
		p, direction, sent, recv := a, "outbound", 11, 22
		if w.name == "plaintext in" {
			p, direction, sent, recv = z, "inbound", 22, 11
		}
		client, server := b.connect(t, w)
		if st := p.node.records.Stats(); st.Open != 1 || st.Kernel != 1 {
			t.Errorf("%s, %s: %d connections open, %d in the kernel; want 1 and 1", w.name, w.addr, st.Open, st.Kernel)
		}
		io.WriteString(client, "hello world")
		if _, err := io.ReadFull(server, make([]byte, 11)); err != nil {
			t.Fatal(err)
		}
		io.WriteString(server, "hello worldhello world")
		if _, err := io.ReadFull(client, make([]byte, 22)); err != nil {
			t.Fatal(err)
		}
		client.Close()
		server.Close()
		awaitNoneOpen(t, a, z)
		p.out.await(t, fmt.Sprintf("bytes_sent=%d bytes_recv=%d", sent, recv), p.done, `carried="kernel"`, `direction="`+direction+`"`, "src.addr="+client.LocalAddr().String())
	}
	t.Run("refused", func(t *testing.T) {
		for _, to := range each(b.pods[plainB], 8081) {
			if _, err := b.dial(b.pods[clientA], to); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s: %v, want it refused", to, err)
			}
			a.out.await(t, `error="io error: Connection refused (os error 111)"`, a.done, `carried="kernel"`, "dst.addr="+to)
		}
	})
	t.Run("reset", func(t *testing.T) {
		client, server := b.connect(t, b.ways(8080)[2])
		client.SetLinger(0)
		client.Close()
		if _, err := server.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the server reads %v, want a reset", err)
		}
		a.out.await(t, "src.addr="+client.LocalAddr().String(), a.done, `carried="kernel"`, "info\taccess")
	})
	awaitNoneOpen(t, a, z)
}

// A lot of connections: as many SYNs, nothing else, and none fails. A machine that stands still for a second has the kernel send SYNs
// again that wait in the device, and one of them may be read after its flow has ended.
func TestNetnsManyFlowsAreHandedBack(t *testing.T) {
	onOffloads(t, checkManyFlowsAreHandedBack, config.OffloadSockops)
}

func checkManyFlowsAreHandedBack(t *testing.T, b *bed) {
	a := b.start(0)
	const (
		count   = 200_000 / slower
		workers = 16
		ports   = 20 // so that no port of the client is needed twice in a second
	)
	for i := range ports {
		b.serve(b.pods[plainB], 9000+i, func(c net.Conn) { io.Copy(io.Discard, c) })
	}
	before, sentAgain := a.stackOf(t, "client"), synsSentAgain(t, b.pods[clientA])
	failed := make(chan error, workers)
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			err := b.pods[clientA].Do(func() error {
				for i := range count / workers {
					c, err := net.Dial("tcp", addrPort(b.pods[plainB].Addr4, uint16(9000+(w+i)%ports)))
					if err != nil {
						return fmt.Errorf("connection %d: %w", i, err)
					}
					c.(*net.TCPConn).SetLinger(0)
					c.Close()
				}
				return nil
			})
			if err != nil {
				failed <- err
			}
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		t.Error(err)
	}
	awaitNoneOpen(t, a)
	after := a.stackOf(t, "client")
	again := synsSentAgain(t, b.pods[clientA]) - sentAgain
	if again > 10*workers {
		t.Errorf("%d SYNs were sent again, of %d connections", again, count)
	}
	if syns := after.RxPackets - before.RxPackets; syns < count || syns > count+again {
		t.Errorf("%d packets in the device, for %d connections and %d SYNs sent again", syns, count, again)
	}
	if handed := after.HandedBack - before.HandedBack; handed < count || handed > count+again {
		t.Errorf("%d flows handed back, for %d connections and %d SYNs sent again", handed, count, again)
	}
	if t.Failed() {
		t.Logf("the pod's stack before: %+v, after: %+v", before, after)
	}
}

func synsSentAgain(t *testing.T, h *lab.Host) uint64 {
	t.Helper()
	n, err := h.Counter("TCPSynRetrans")
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A dead process takes the mesh's connections with it and leaves those that the kernel carries, which a later one finds as they are.
func TestNetnsKernelsConnectionsOutliveTheProcess(t *testing.T) {
	// By tc and nftables those that the pod has opened stand still meanwhile.
	checkKernelsConnectionsOutliveTheProcess(t, config.OffloadSockops)
}

func checkKernelsConnectionsOutliveTheProcess(t *testing.T, o config.Offload) {
	c := newCrashOf(t, variant{config.CaptureTUN, o})
	c.clear = true
	var kept []net.Conn
	for _, to := range each(c.pods[plainB], 8080) {
		conn, err := c.dial(c.pods[clientA], to)
		if err != nil {
			t.Fatal(err)
		}
		kept = append(kept, conn)
	}
	for _, to := range each(c.pods[clientA], 8080) { // plaintext in
		conn, err := c.dial(c.pods[plainB], to)
		if err != nil {
			t.Fatal(err)
		}
		kept = append(kept, conn)
	}
	t.Cleanup(func() {
		for _, conn := range kept {
			conn.Close()
		}
	})
	// One message each 5 ms on each of them, through death and restart.
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var talk sync.WaitGroup
	gaps := make([]time.Duration, len(kept))
	for i, conn := range kept {
		talk.Go(func() {
			for last := time.Now(); ctx.Err() == nil; last = time.Now() {
				if err := bounce(conn, "still here"); err != nil {
					t.Errorf("%v to %v: %v", conn.LocalAddr(), conn.RemoteAddr(), err)
					return
				}
				gaps[i] = max(gaps[i], time.Since(last))
				<-time.After(5 * time.Millisecond)
			}
		})
	}
	for _, a := range c.dieUnderLoad() {
		if a.err == nil {
			t.Errorf("%v after the death, %s: connected", a.after, a.to)
		}
	}
	for i, conn := range c.open { // of the mesh
		conn.SetDeadline(time.Now().Add(time.Second))
		if _, err := conn.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Errorf("connection %d of the mesh goes on: %v", i, err)
		}
	}
	c.child = c.spawnReady(0)
	for _, to := range each(c.pods[webB], 8080) {
		if err := c.attempt(to); err != nil {
			t.Errorf("after the restart, %s: %v", to, err)
		}
	}
	stop()
	talk.Wait()
	if err := c.sniffer.Close(); err != nil {
		t.Fatal(err)
	}
	for _, to := range each(c.pods[plainB], 8080) {
		if err := c.attempt(to); err != nil {
			t.Errorf("after the restart, %s: %v", to, err)
		}
	}
	if n := c.sniffer.Count(); n.Hits[0] != 0 || n.Hits[1] != 0 {
		t.Errorf("what the mesh carries was seen in clear: %+v", n)
	}
	t.Logf("longest waits: %v", gaps)
	c.child.stop(t)
	for _, conn := range kept { // and without any
		if err := bounce(conn, "still here"); err != nil {
			t.Errorf("after the end, %v to %v: %v", conn.LocalAddr(), conn.RemoteAddr(), err)
		}
	}
}

// An orderly end waits for what passes through the process, not for what the kernel carries.
func TestNetnsDrainLeavesTheKernelsConnections(t *testing.T) {
	eachOffload(t, func(t *testing.T, b *bed) {
		a := b.start(0)
		client, server := b.connect(t, b.ways(8080)[2])
		began := time.Now()
		b.stop(0)
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("the end took %v", took)
		}
		if err := transfer(client, server, 1, 1<<20); err != nil {
			t.Errorf("afterwards: %v", err)
		}
		if line := a.out.String(); !strings.Contains(line, `carried="kernel"`) || strings.Contains(line, "error") {
			t.Errorf("access log %q, want an ordinary line", line)
		}
	})
}

// What the kernel has carried for a process that died is known to the next one: it is listed, and what policy denies by then is cut.
// Sockets whose flows nftables leads have no mark by which they could be found.
func TestNetnsKernelsConnectionsAreFound(t *testing.T) {
	onOffloads(t, func(t *testing.T, b *bed) {
		child := b.spawnReady(1)
		in, inServer := b.connect(t, way{"plaintext in", b.pods[plainB], b.pods[webB], addrPort(b.pods[webB].Addr4, 8080)})
		in6, in6Server := b.connect(t, way{"plaintext in", b.pods[plainB], b.pods[webB], addrPort(b.pods[webB].Addr6, 8081)})
		out, outServer := b.connect(t, way{"passthrough", b.pods[webB], b.pods[plainB], addrPort(b.pods[plainB].Addr4, 8082)})
		child.kill(t)
		const strict = "policies:\n- {name: strict, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{notPrincipals: [!Presence ], destinationPorts: [8080]}]]]}\n"
		b.write("mesh.yaml", strings.NewReplacer("policies:\n", strict, "[shop/no-other, shop/no-9090]", "[shop/no-other, shop/no-9090, shop/strict]").Replace(b.read("mesh.yaml")))
		child = b.spawnReady(1)
		child.log.await(t, "connections that the kernel carries found", child.cmd.Done(), "count=3")
		for _, end := range []net.Conn{in, inServer} {
			end.SetDeadline(time.Now().Add(5 * time.Second))
			if _, err := end.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.ECONNABORTED) {
				t.Errorf("%v, which policy denies now, reads %v, want a reset", end.LocalAddr(), err)
			}
		}
		child.out.await(t, `carried="kernel"`, child.cmd.Done(), `error="connection closed due to policy change"`, "src.addr="+in.LocalAddr().String())
		for _, pair := range [][2]*net.TCPConn{{in6, in6Server}, {out, outServer}} {
			if err := transfer(pair[0], pair[1], 1, 100_000); err != nil {
				t.Errorf("%v to %v: %v", pair[0].LocalAddr(), pair[0].RemoteAddr(), err)
			}
			pair[1].Close()
		}
		child.stop(t)
	}, config.OffloadSockops, config.OffloadTC)
}
