package interop

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ztun.dev/ztun/internal/hbone"
)

// What TestEnvoySlowReaders has on one tunnel.
const (
	slowReaders = 99
	slowRate    = 1000 // bytes a second that each of them takes
	roundTrips  = 1000
)

// TestEnvoySlowReaders: beside 99 streams whose readers take 1 kB/s each, and whose senders have filled everything that there is to
// fill, a ping-pong on the same tunnel goes on. As sender ztun has to leave it some of the connection window, because Envoy
// gives credit for what applications took only; as receiver it has to give credit for what arrived.
func TestEnvoySlowReaders(t *testing.T) {
	t.Run("ztun sends", func(t *testing.T) {
		m := newMesh(t, 0)
		startEnvoy(t, m)
		m.newPool(t, hbone.PoolConfig{ExtraTunnels: -1}) // one tunnel, whatever happens on it
		besideSlowReaders(t, m, toPeer(m, peerAddr, newApp(t)), func(p pair) (net.Conn, net.Conn) { return p.ours, p.theirs })
	})
	t.Run("Envoy sends", func(t *testing.T) {
		m := newMesh(t, 0)
		m.baggage = "service.name=envoy"
		startEnvoy(t, m)
		besideSlowReaders(t, m, fromPeer(m, envoyApps), func(p pair) (net.Conn, net.Conn) { return p.theirs, p.ours })
	})
}

func besideSlowReaders(t *testing.T, m *mesh, r *route, ends func(p pair) (sender, reader net.Conn)) {
	fast := r.open(t)
	defer fast.close()
	alone := pingPong(t, fast)

	var work sync.WaitGroup
	defer work.Wait() // after the streams have ended
	quit := make(chan struct{})
	defer close(quit)
	var sent, taken atomic.Int64
	var pairs []pair
	for range slowReaders {
		p := r.open(t)
		if p.ours.LocalAddr().String() != fast.ours.LocalAddr().String() || p.ours.RemoteAddr().String() != fast.ours.RemoteAddr().String() {
			t.Fatal("a slow reader has another tunnel")
		}
		if c, ok := p.theirs.(*net.TCPConn); ok {
			if err := c.SetReadBuffer(16 << 10); err != nil { // or each hides megabytes
				t.Fatal(err)
			}
		}
		defer func() {
			_ = p.ours.Reset()
			_ = p.theirs.Close()
		}()
		pairs = append(pairs, p)
	}
	chunk := pattern(64<<10, 1)
	for _, p := range pairs {
		from, to := ends(p)
		work.Go(func() {
			for {
				n, err := from.Write(chunk)
				if sent.Add(int64(n)); err != nil {
					return // it ends with the test
				}
			}
		})
		work.Go(func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for {
				n, err := io.ReadFull(to, make([]byte, slowRate))
				if taken.Add(int64(n)); err != nil {
					return
				}
				select {
				case <-tick.C:
				case <-quit:
					return
				}
			}
		})
	}
	// Full: what is sent is no more than what is taken, and a little.
	for deadline, before := time.Now().Add(patience), int64(-1); ; time.Sleep(500 * time.Millisecond) {
		now := sent.Load() - taken.Load()
		if now > 0 && now-before < 1<<20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes under way, and still more", now)
		}
		before = now
	}
	beside := pingPong(t, fast)
	t.Logf("%d MiB wait for %d slow readers, %d MiB of them in ztun; %d round trips, p50 / p99: alone %v / %v, beside them %v / %v",
		(sent.Load()-taken.Load())>>20, slowReaders, m.budget.Held()>>20, roundTrips, alone.p50, alone.p99, beside.p50, beside.p99)
}

type latency struct{ p50, p99 time.Duration }

// pingPong makes round trips of 64 bytes, begun by ours.
func pingPong(t *testing.T, p pair) latency {
	t.Helper()
	if err := errors.Join(p.ours.SetDeadline(time.Now().Add(patience)), p.theirs.SetDeadline(time.Now().Add(patience))); err != nil {
		t.Fatal(err)
	}
	var took []time.Duration
	together(t, map[string]func() error{
		"ours": func() error {
			ball := make([]byte, 64)
			for range roundTrips {
				start := time.Now()
				if _, err := p.ours.Write(ball); err != nil {
					return err
				}
				if _, err := io.ReadFull(p.ours, ball); err != nil {
					return err
				}
				took = append(took, time.Since(start))
			}
			return nil
		},
		"theirs": func() error {
			ball := make([]byte, 64)
			for range roundTrips {
				if _, err := io.ReadFull(p.theirs, ball); err != nil {
					return err
				}
				if _, err := p.theirs.Write(ball); err != nil {
					return err
				}
			}
			return nil
		},
	})
	if len(took) != roundTrips {
		t.Fatalf("%d of %d round trips", len(took), roundTrips)
	}
	slices.Sort(took)
	return latency{took[roundTrips/2], took[roundTrips*99/100]}
}
