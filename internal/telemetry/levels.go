package telemetry

import (
	"log/slog"
	"sync"
	"sync/atomic"
)

// Levels is a filter that can be changed while the process runs. Its methods may be called from any goroutine.
type Levels struct {
	start   Filter
	current atomic.Pointer[Filter] // immutable

	mu sync.Mutex // serialises changes
}

// NewLevels begins with a filter, to which Reset returns.
func NewLevels(start Filter) *Levels {
	l := &Levels{start: start}
	l.current.Store(&l.start)
	return l
}

// Level is the least severe level that is logged for a target.
func (l *Levels) Level(target string) slog.Level { return l.current.Load().Level(target) }

// String is the filter in force.
func (l *Levels) String() string { return l.current.Load().String() }

// Change adds directives to the filter, or with reset to the one that it began with; with none, that one is back. An error
// changes nothing. undo puts back what was there, unless something else has been changed since.
func (l *Levels) Change(directives string, reset bool) (undo func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.current.Load()
	next := *before
	if reset {
		next = l.start
	}
	if directives != "" || !reset {
		if next, err = next.With(directives); err != nil {
			return nil, err
		}
	}
	l.current.Store(&next)
	return func() { l.current.CompareAndSwap(&next, before) }, nil
}
