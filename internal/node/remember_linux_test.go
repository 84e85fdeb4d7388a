package node

import (
	"testing"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// With ZTUN_CONNECT_CACHE a second connection to the same place outside the mesh is the kernel's alone, and on record like any other. A change of
// the state has the next one decided about. What is in the mesh is never remembered.
func TestNetnsRememberedDestinations(t *testing.T) {
	b := newBedOn(t, variant{config.CaptureTUN, config.OffloadSockops}, lab.Config{})
	b.write("node-a.yaml", "connectCache: 1h\n"+b.read("node-a.yaml"))
	a, _ := b.start(0), b.start(1)
	once := func(w way, syns uint64) {
		t.Helper()
		before := a.stackOf(t, "client").RxPackets
		client, server := b.connect(t, w)
		if err := transfer(client, server, 1, 100_000); err != nil {
			t.Errorf("%s: %v", w.addr, err)
		}
		client.Close()
		server.Close()
		awaitNoneOpen(t, a)
		if got := a.stackOf(t, "client").RxPackets - before; got != syns {
			t.Errorf("%s, %s: %d packets in the device, want %d", w.name, w.addr, got, syns)
		}
		if w.name != "mesh" {
			a.out.await(t, "src.addr="+client.LocalAddr().String(), a.done, "dst.addr="+w.addr, `carried="kernel"`, "bytes_sent=100000 ")
		}
	}
	for _, w := range b.ways(8080) {
		if w.name == "plaintext in" {
			continue
		}
		again := uint64(0)
		if w.name == "mesh" {
			again = 1
		}
		once(w, 1)
		once(w, again)
		b.setState(a.node)
		once(w, 1)
		once(w, again)
	}
	if n := a.node.carriers.unseen.Load(); n != 4 {
		t.Errorf("%d connections were remembered, want 4", n)
	}
}
