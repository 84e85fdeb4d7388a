package proxy

import (
	"sort"
	"sync"

	"ztun.dev/ztun/internal/workload"
)

// Tables are what has been prepared for picks of one source in one snapshot: which endpoints of a service come into question does not
// depend on chance. A decision with a pick among 10,000 endpoints takes 0.25 µs then, against 160 (measured). The zero value is empty; it is safe for
// concurrent use.
type Tables struct {
	mu sync.RWMutex // guards below
	m  map[tableKey]*table
}

type tableKey struct {
	service  *workload.Service
	port     uint16
	waypoint bool
}

// A table is the best ranked candidates, and their capacities added up.
type table struct {
	endpoints []endpoint
	sums      []uint64
}

// noTable is that of a port that the service does not have: a scan of all ports leaves nothing behind.
var noTable table

// of returns the table of a service port, which is made the first time that it is asked for.
func (t *Tables) of(s *workload.Snapshot, q *Query, k tableKey) *table {
	if _, has := k.service.Ports[k.port]; !has && !k.waypoint {
		return &noTable
	}
	t.mu.RLock()
	got := t.m[k]
	t.mu.RUnlock()
	if got != nil {
		return got
	}
	got = new(table)
	best, sum := 0, uint64(0)
	eachCandidate(s, q, k, func(e endpoint, rank int) {
		switch {
		case sum > 0 && rank < best:
			return
		case rank > best || sum == 0:
			best, sum, *got = rank, 0, table{}
		}
		sum += uint64(e.workload.Capacity)
		got.endpoints, got.sums = append(got.endpoints, e), append(got.sums, sum)
	})
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = make(map[tableKey]*table)
	}
	t.m[k] = got
	return got
}

// pick chooses by capacity.
func (t *table) pick(random uint64) (endpoint, bool) {
	n := len(t.sums)
	if n == 0 {
		return endpoint{}, false
	}
	at := mix(random) % t.sums[n-1]
	return t.endpoints[sort.Search(n, func(i int) bool { return at < t.sums[i] })], true
}

// sourceTables are the Tables of a source and snapshot.
type sourceTables struct {
	source     *workload.Workload
	generation uint64 // of the snapshot, which is not kept alive
	Tables
}

// tablesFor returns those of the newest state; of another there are none.
func (p *Proxy) tablesFor(self *workload.Workload, s *workload.Snapshot) *Tables {
	t := p.tables.Load()
	if t == nil || t.generation < s.Generation() {
		fresh := &sourceTables{source: self, generation: s.Generation()}
		p.tables.CompareAndSwap(t, fresh) // who is late uses his own once
		return &fresh.Tables
	}
	if t.generation != s.Generation() || t.source != self {
		return nil
	}
	return &t.Tables
}
