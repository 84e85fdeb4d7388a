package workload

import (
	"sync"
	"sync/atomic"
)

// A Store holds the current Snapshot and tells who waits for the next. The zero value holds an empty one.
type Store struct {
	current atomic.Pointer[Snapshot]

	mu      sync.Mutex // guards below
	waiters map[*func()]struct{}
}

// Snapshot is the current state. Before the first Replace it is nil, which answers every lookup with nothing.
func (s *Store) Snapshot() *Snapshot { return s.current.Load() }

// Replace makes st the current state and calls every subscriber.
func (s *Store) Replace(st State) {
	next := NewSnapshot(st)
	s.mu.Lock()
	defer s.mu.Unlock()
	next.generation = s.Snapshot().Generation() + 1
	s.current.Store(next)
	for f := range s.waiters {
		(*f)()
	}
}

// Subscribe calls changed after every change from now on, until cancel is called. changed must be short and must not call the
// Store's methods other than Snapshot.
func (s *Store) Subscribe(changed func()) (cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiters == nil {
		s.waiters = make(map[*func()]struct{})
	}
	key := &changed
	s.waiters[key] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waiters, key)
	}
}
