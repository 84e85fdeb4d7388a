package node

import (
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// Peers that accept, or connect, and then say nothing, or half a greeting, hold sockets, tasks and goroutines for a limited time.
func TestNetnsSilentPeers(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("FP-02", func(t *testing.T) { checkSilentPeers(t, b) }) })
}

func checkSilentPeers(t *testing.T, b *bed) {
	const (
		limit  = 1500 * time.Millisecond
		silent = 20 // connections of each kind
	)
	for _, name := range []string{"node-a.yaml", "node-b.yaml"} {
		b.write(name, "handshakeTimeout: 1500ms\n"+b.read(name))
	}
	a, z := b.start(0), b.start(1)
	plain, web := b.pods[plainB], b.pods[webB]
	// The workload that is gone is there again, and its node does not speak.
	if err := plain.Do(func() error { return addAddresses("eth0", []string{"10.77.2.254", "fd77::2:fe"}) }); err != nil {
		t.Fatal(err)
	}
	type held struct {
		files, goroutines int
		a, z              loop.Stats
	}
	count := func() held {
		return held{openFiles(t), runtime.NumGoroutine(), a.node.group.Stats(), z.node.group.Stats()}
	}
	eventually(t, 10*time.Second, "all listeners", func() bool { return a.node.group.Stats().Watches > 0 && z.node.group.Stats().Watches > 0 })
	before := count()

	accepted := make(chan net.Conn, 2*silent)
	l, err := plain.Listen("tcp", "[::]:15008")
	if err != nil {
		t.Fatal(err)
	}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	})
	var all sync.WaitGroup
	for i := range silent {
		for _, to := range []string{"10.77.2.254:80", "[fd77::2:fe]:80"} {
			all.Go(func() { // there is no answer, or a reset where the kernel answered
				if errno := errnoOf(b.pods[clientA], to); errno != unix.ETIMEDOUT && errno != unix.ECONNRESET {
					t.Errorf("%s: %v", to, errno)
				}
			})
		}
		for _, to := range each(web, 15008) {
			c, err := b.dial(plain, to)
			if err != nil {
				t.Fatal(err)
			}
			if i%2 == 1 {
				io.WriteString(c, "\x16\x03\x01\x02\x00half a greeting")
			}
			all.Go(func() {
				defer c.Close()
				start := time.Now()
				c.SetDeadline(start.Add(10 * limit))
				if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("what a silent peer of %s reads after %v: %v, want a reset", to, time.Since(start), err)
				}
			})
		}
	}
	first := <-accepted
	eventually(t, 5*time.Second, "the flows of the silent node", func() bool { return a.node.records.Stats().Open > 0 })
	if st := a.node.pods[0].current().pool.Stats(); st.Dials == 0 || st.Dials > 16 {
		t.Errorf("%+v, want the tunnels that are being made, a few of each family", st)
	}
	start := time.Now()
	first.SetDeadline(start.Add(10 * limit))
	if n, err := io.Copy(io.Discard, first); err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the silent node read %d bytes, then %v after %v; want its connection to end", n, err, time.Since(start))
	}
	first.Close()
	all.Wait()
	l.Close()
	accepting.Wait()
	close(accepted)
	for c := range accepted {
		c.Close()
	}
	eventually(t, 30*time.Second, "the end of all set-ups", func() bool {
		return a.node.records.Stats().Open == 0 && a.node.limits.InFlight() == 0 && a.node.pods[0].current().pool.Stats().Keys == 0
	})
	var after held
	eventually(t, 10*time.Second, "what was held", func() bool {
		after = count()
		return after.files <= before.files && after.goroutines <= before.goroutines && after.a.Tasks <= before.a.Tasks && after.z.Tasks <= before.z.Tasks &&
			after.a.Watches <= before.a.Watches && after.z.Watches <= before.z.Watches
	})
	if t.Failed() {
		t.Logf("before %+v, after %+v", before, after)
	}
}
