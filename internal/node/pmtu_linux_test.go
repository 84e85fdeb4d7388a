package node

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// hopMTU is that of a router in the middle of the path.
const hopMTU = 1300

// newHopBed is a bed whose pods reach each other through a router with a smaller MTU.
func newHopBed(t *testing.T, v variant) *bed {
	t.Helper()
	b := newBedOn(t, v, lab.Config{HopMTU: hopMTU})
	for _, from := range b.pods[:2] {
		for _, to := range b.pods[2:] {
			if err := b.Detour(from, to); err != nil {
				t.Fatal(err)
			}
		}
	}
	return b
}

// hopWays lists the ways through the router.
func (b *bed) hopWays(port uint16) []way {
	all := b.ways(port)[:4] // mesh and passthrough
	for _, addr := range each(b.pods[clientA], port) {
		all = append(all, way{"plaintext in", b.pods[plainB], b.pods[clientA], addr})
	}
	return all
}

// shuttle sends n bytes up, then down.
func (b *bed) shuttle(t *testing.T, w way, n int64, limit time.Duration) error {
	t.Helper()
	client, server := b.connect(t, w)
	defer client.Close()
	defer server.Close()
	deadline := time.Now().Add(limit)
	client.SetDeadline(deadline)
	server.SetDeadline(deadline)
	if err := transfer(client, server, 1, n); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	if err := transfer(server, client, 2, n); err != nil {
		return fmt.Errorf("down: %w", err)
	}
	return nil
}

func TestNetnsSmallerMTUOnThePath(t *testing.T) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) {
			b := newHopBed(t, v)
			a, z := b.start(0), b.start(1)
			for _, w := range b.hopWays(8080) {
				if err := b.shuttle(t, w, 4<<20, 10*time.Second); err != nil {
					t.Errorf("%s, %s: %v", w.name, w.addr, err)
				}
			}
			awaitNoneOpen(t, a, z)
		})
	}
}

// Without the relay of ICMP errors a download from a netstack is never told: the test before sees the relay, not luck.
func TestNetnsSmallerMTUWithoutTheRelay(t *testing.T) {
	b := newHopBed(t, variant{config.CaptureTUN, config.OffloadOff})
	b.options.NoICMPRelay = true
	b.start(0)
	var all sync.WaitGroup
	for _, w := range b.hopWays(8080)[4:] {
		client, server := b.connect(t, w)
		all.Go(func() {
			limit := time.Now().Add(1500 * time.Millisecond)
			client.SetDeadline(limit)
			server.SetDeadline(limit)
			if err := transfer(server, client, 1, 1<<20); !isTimeout(errors.Unwrap(err)) {
				t.Errorf("%s: %v, want it to stand still", w.addr, err)
			}
		})
	}
	all.Wait()
}
