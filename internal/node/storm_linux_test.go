package node

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/loop"
)

// Many connections that open at once all get an answer.
func TestNetnsManyConnectionsAtOnce(t *testing.T) { eachBackend(t, checkManyConnectionsAtOnce) }

func checkManyConnectionsAtOnce(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	b.serve(b.pods[webB], 8080, who)
	b.serve(b.pods[plainB], 8080, who)
	const count = 200
	for _, to := range []string{"10.96.0.10:80", "[fd96::10]:80", addrPort(b.pods[plainB].Addr4, 8080)} {
		failed := make(chan error, count)
		var all sync.WaitGroup
		for range count {
			all.Go(func() {
				if got, err := b.ask(b.pods[clientA], to); err != nil || got == "" {
					failed <- fmt.Errorf("%q, %w", got, err)
				}
			})
		}
		all.Wait()
		if n := len(failed); n > 0 {
			t.Errorf("%s: %d of %d connections failed; the first: %v", to, n, count, <-failed)
		}
	}
	awaitNoneOpen(t, a, z)
}

// What a short connection takes is given back: nothing grows with their number.
func TestNetnsShortConnectionsLeaveNothing(t *testing.T) {
	eachBackend(t, checkShortConnectionsLeaveNothing)
}

func checkShortConnectionsLeaveNothing(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	b.serve(b.pods[webB], 8080, who)
	b.serve(b.pods[plainB], 8080, who)
	targets := []string{"10.96.0.10:80", "[fd96::10]:80", addrPort(b.pods[plainB].Addr4, 8080), addrPort(b.pods[plainB].Addr6, 8080)}
	ask := func(n int) {
		for i := range n {
			to := targets[i%len(targets)]
			if _, err := b.ask(b.pods[clientA], to); err != nil {
				t.Fatalf("connection %d, to %s: %v", i, to, err)
			}
		}
		awaitNoneOpen(t, a, z)
	}
	ask(2 * len(targets)) // opens the tunnels
	type held struct {
		files   int
		a, z    loop.Stats
		waiting int
	}
	count := func() held {
		h := held{files: openFiles(t), a: a.node.group.Stats(), z: z.node.group.Stats()}
		for _, n := range []*Node{a.node, z.node} {
			h.waiting += n.limits.InFlight()
		}
		return h
	}
	before := count()
	const n = 2000
	opened := a.node.records.Stats().Opened
	ask(n)
	if got := a.node.records.Stats().Opened - opened; got != n {
		t.Errorf("%d connections are recorded of %d", got, n)
	}
	// Timers of connections in TIME_WAIT end a second later.
	var after held
	eventually(t, 5*time.Second, "what connections held", func() bool {
		after = count()
		return after.files <= before.files && after.a.Tasks <= before.a.Tasks && after.z.Tasks <= before.z.Tasks &&
			after.a.Watches <= before.a.Watches && after.z.Watches <= before.z.Watches &&
			after.a.Timers <= before.a.Timers+2 && after.z.Timers <= before.z.Timers+2 && after.waiting == 0
	})
	t.Logf("before %+v, after %+v", before, after)
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// A client that gives up while its connection is set up leaves nothing either.
func TestNetnsGivenUpConnectionsLeaveNothing(t *testing.T) {
	eachBackend(t, checkGivenUpConnectionsLeaveNothing)
}

func checkGivenUpConnectionsLeaveNothing(t *testing.T, b *bed) {
	a := b.start(0)
	const count = 50
	var all sync.WaitGroup
	for range count {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			c, err := b.pods[clientA].Dial(ctx, "tcp", "10.77.2.254:80") // nobody answers
			if (err == nil) != (b.capture == config.CaptureRedirect) {
				t.Errorf("the connect to nobody: %v", err)
			}
			if err == nil {
				<-ctx.Done()
				c.(*net.TCPConn).SetLinger(0)
				c.Close()
			}
		})
	}
	all.Wait()
	limit := 10 * time.Second // a SYN that is not repeated says nothing
	if b.capture == config.CaptureRedirect {
		limit = time.Second // a hang-up ends the set-up
	}
	eventually(t, limit, "the end of the set-ups", func() bool {
		return a.node.records.Stats().Open == 0 && a.node.limits.InFlight() == 0
	})
}
