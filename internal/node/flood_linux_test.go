package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/lab"
)

// blackHole makes a host say nothing to SYNs to a port.
func blackHole(h *lab.Host, port uint16) error {
	return h.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "black-hole"})
		chain := c.AddChain(&nftables.Chain{
			Name: "input", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		exprs := slices.Concat(protocol(unix.IPPROTO_TCP), destinationPort(port, expr.CmpOpEq), []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: exprs})
		return c.Flush()
	})
}

// A flood is connects of one host that nobody waits for.
type flood struct {
	h    *lab.Host
	to   netip.AddrPort
	open []int // the oldest first
	sent int
}

// burst begins n connects; beyond keep, the oldest are given up.
func (f *flood) burst(n, keep int) error {
	f.sent += n
	return f.h.Do(func() error {
		for range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			f.open = append(f.open, fd)
			err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(f.to.Port()), Addr: f.to.Addr().As4()})
			if err != nil && !errors.Is(err, unix.EINPROGRESS) {
				return err
			}
		}
		f.trim(keep)
		return nil
	})
}

func (f *flood) trim(keep int) {
	for len(f.open) > keep {
		unix.SetsockoptLinger(f.open[0], unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		unix.Close(f.open[0])
		f.open = f.open[1:]
	}
}

// FP-17: a pod that opens connections by thousands to where nobody answers costs another pod nothing.
func TestNetnsFloodOfOnePodLeavesTheOther(t *testing.T) {
	eachBackend(t, checkFloodOfOnePodLeavesTheOther)
}

func checkFloodOfOnePodLeavesTheOther(t *testing.T, b *bed) {
	const (
		blackPort = 7
		keep      = 2000 // more than one pod may have in flight
		connects  = 300 / slower
		limit     = slower * 100 * time.Millisecond // p99
	)
	if err := blackHole(b.pods[plainB], blackPort); err != nil {
		t.Fatal(err)
	}
	b.write("node-a.yaml", "connectTimeout: 2s\nmaxInFlightPerPod: 1000\n"+b.read("node-a.yaml"))
	a, z := b.start(0), b.start(1)
	b.serve(b.pods[webB], 8080, func(c net.Conn) { c.Read(make([]byte, 1)) })
	b.serve(b.pods[plainB], 8080, func(c net.Conn) { c.Read(make([]byte, 1)) })
	targets := []string{"10.96.0.10:80", addrPort(b.pods[plainB].Addr4, 8080), "[fd96::10]:80", addrPort(b.pods[plainB].Addr6, 8080)}

	f := &flood{h: b.pods[otherA], to: netip.AddrPortFrom(b.pods[plainB].Addr4, blackPort)}
	if b.handsBack() { // that costs nothing here: a peer is needed that does not answer
		f.to = netip.MustParseAddrPort("10.77.2.254:7")
	}
	full, stop := make(chan struct{}), make(chan struct{})
	var flooding sync.WaitGroup
	flooding.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		filled := sync.OnceFunc(func() { close(full) })
		defer filled()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if err := f.burst(floodBurst, keep); err != nil {
				t.Error(err)
				return
			}
			if f.sent >= keep {
				filled()
			}
		}
	})
	<-full
	measure := func() time.Duration {
		var took []time.Duration
		for i := range connects {
			start := time.Now()
			c, err := b.dial(b.pods[clientA], targets[i%len(targets)])
			if err == nil {
				// By redirect the kernel's answer says nothing yet: what is read ends after the connection to the server.
				c.(*net.TCPConn).CloseWrite()
				c.SetDeadline(time.Now().Add(5 * time.Second))
				c.Read(make([]byte, 1))
				c.Close()
			} else {
				t.Errorf("connect %d, to %s: %v", i, targets[i%len(targets)], err)
			}
			took = append(took, time.Since(start))
		}
		slices.Sort(took)
		p99 := took[len(took)*99/100]
		t.Logf("connects of the other pod: p50 %v, p99 %v, max %v", took[len(took)/2], p99, took[len(took)-1])
		return p99
	}
	p99 := measure()
	for range 2 { // others share the machine
		if p99 > limit && !t.Failed() {
			p99 = measure()
		}
	}
	close(stop)
	flooding.Wait()
	r := a.node.pods[1].current().backend.refusals()
	t.Logf("of %d connects flooded %d were given up", f.sent, r.evicted)
	if p99 > limit {
		t.Errorf("FP-17: p99 of the other pod's connects is %v, want at most %v", p99, limit)
	}
	if r.evicted == 0 || r.limited != 0 {
		t.Errorf("D27: %+v, want attempts that were given up for newer ones, and none at the limit of the process", r)
	}
	if n := a.node.limits.InFlight(); n > int(a.node.cfg.MaxInFlightPerPod)+1 { // and perhaps the last attempt of the other pod
		t.Errorf("D27: %d in flight, want at most %d", n, a.node.cfg.MaxInFlightPerPod)
	}
	if r := a.node.pods[0].current().backend.refusals(); r != (refusals{}) {
		t.Errorf("of the other pod %+v", r)
	}
	f.trim(0)
	eventually(t, 15*time.Second, "the end of the flood", func() bool {
		return a.node.limits.InFlight() == 0 && a.node.records.Stats().Open == 0
	})
	awaitNoneOpen(t, z)
}

// Many connections are open and used at the same time, in tunnels and beside them.
func TestNetnsManyConnectionsStayOpen(t *testing.T) { eachBackend(t, checkManyConnectionsStayOpen) }

func checkManyConnectionsStayOpen(t *testing.T, b *bed) {
	const count = 1000
	a, z := b.start(0), b.start(1)
	b.serve(b.pods[webB], 8080, echo)
	b.serve(b.pods[plainB], 8080, echo)
	targets := []string{"10.96.0.10:80", addrPort(b.pods[plainB].Addr4, 8080), "[fd96::10]:80", addrPort(b.pods[plainB].Addr6, 8080)}
	conns := make([]net.Conn, count)
	each := func(what string, f func(i int) error) {
		failed := make(chan error, count)
		work := make(chan int, count)
		for i := range count {
			work <- i
		}
		close(work)
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				for i := range work {
					if err := f(i); err != nil {
						failed <- fmt.Errorf("connection %d, to %s: %w", i, targets[i%len(targets)], err)
					}
				}
			})
		}
		all.Wait()
		if n := len(failed); n > 0 {
			t.Fatalf("%s: %d of %d failed; the first: %v", what, n, count, <-failed)
		}
	}
	t.Cleanup(func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	})
	each("open", func(i int) (err error) {
		conns[i], err = b.dial(b.pods[clientA], targets[i%len(targets)])
		return err
	})
	for round := range 2 {
		each("use", func(i int) error { return bounce(conns[i], fmt.Sprintf("round %d of connection %d", round, i)) })
		if n := a.node.records.Stats().Open; n != count {
			t.Errorf("%d connections are open, want %d", n, count)
		}
		if n := z.node.records.Stats().Open; n != count/2 {
			t.Errorf("%d connections are open at the server's node, want %d", n, count/2)
		}
	}
	each("close", func(i int) error { return conns[i].Close() })
	awaitNoneOpen(t, a, z)
}
