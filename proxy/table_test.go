package proxy

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"

	"ztun.dev/ztun/internal/workload"
)

func TestTablesAreOfTheNewestState(t *testing.T) {
	st := bigMesh(20, 10)
	var store workload.Store
	store.Replace(st)
	old := store.Snapshot()
	store.Replace(bigMesh(20, 10))
	now := store.Snapshot()
	var p Proxy
	a, b := old.State().Workloads[0], now.State().Workloads[0]
	first := p.tablesFor(a, old)
	if first == nil || p.tablesFor(a, old) != first {
		t.Error("the tables of a state are made anew for each flow")
	}
	second := p.tablesFor(b, now)
	if second == nil || second == first || p.tablesFor(b, now) != second {
		t.Error("a newer state does not have tables of its own")
	}
	if got := p.tablesFor(b, old); got != nil {
		t.Error("a flow that was begun in an older state gets the tables of the newer one")
	}
}

func TestAScanOfPortsLeavesNothingBehind(t *testing.T) {
	st := bigMesh(10, 10)
	s := workload.NewSnapshot(st)
	tables := new(Tables)
	for port := range uint16(1000) {
		q := Query{Source: st.Workloads[0], Target: netip.AddrPortFrom(st.Services[0].VIPs[0].Addr, port), Tables: tables}
		if d := Classify(s, &q); (d.Route == Refuse) != (port != 80 && port != dnsPort) {
			t.Errorf("port %d: %v", port, d.Route)
		}
	}
	if len(tables.m) != 1 {
		t.Errorf("%d tables are kept, want that of the one port", len(tables.m))
	}
}

func TestTablesAreSharedByFlowsAtOnce(t *testing.T) {
	st := bigMesh(100, 10)
	s := workload.NewSnapshot(st)
	source, tables := st.Workloads[0], new(Tables)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 200 {
				v := st.Services[j%len(st.Services)]
				q := Query{Source: source, From: source.Addresses[0], Rand: uint64(i*1000 + j), Tables: tables}
				e, ok := pick(s, &q, v, 80, false)
				if _, serves := e.workload.Services[v.Key()]; !ok || !serves {
					t.Errorf("picked %v, %v for %s", e, ok, v.Key())
				}
			}
		})
	}
	all.Wait()
}

// The columns of a table give each candidate exactly its share.
func TestTablesHaveTheWholeOfEachCapacity(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 300 {
		n := 1 + rng.IntN(40)
		st := bigMesh(n, n)
		want := make(map[string]uint64)
		var sum uint64
		for _, w := range st.Workloads {
			w.Capacity = []uint32{0, 1, 1, 3, 1 << 31, uint32(rng.IntN(1000))}[rng.IntN(6)]
			if w.Capacity > 0 {
				want[w.UID] = uint64(w.Capacity)
				sum += uint64(w.Capacity)
			}
		}
		s := workload.NewSnapshot(st)
		tab := newTable(s, &Query{Source: st.Workloads[0]}, tableKey{st.Services[0], 80, false})
		if tab.height != sum || len(tab.columns) != len(want) {
			t.Fatalf("%d columns of height %d, want %d of %d", len(tab.columns), tab.height, len(want), sum)
		}
		got := make(map[string]uint64)
		for _, c := range tab.columns {
			own := min(c.own, tab.height)
			got[c.workload.UID] += own
			if rest := tab.height - own; rest > 0 {
				got[tab.columns[c.above].workload.UID] += rest
			}
		}
		for uid, capacity := range want {
			if got[uid] != capacity*uint64(len(want)) {
				t.Fatalf("%s has %d of %d columns of %d, want %d", uid, got[uid], len(want), tab.height, capacity*uint64(len(want)))
			}
		}
	}
}
