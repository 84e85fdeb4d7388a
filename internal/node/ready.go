package node

import (
	"sync"
	"time"

	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/loop"
)

// A gate makes the node not ready while pods are pending, but for no longer than the limit for each (D6): one bad pod must not fail a
// node. They are named in the answer all the same.
type gate struct {
	task  *admin.Task
	group *loop.Group
	pods  func() []*pod
	limit time.Duration // 0: none
	now   func() time.Time

	mu     sync.Mutex // guards below
	open   bool       // the start is complete
	closed bool
	timer  *loop.Timer
}

// start lets the node be ready from now on.
func (g *gate) start() {
	g.mu.Lock()
	g.open = true
	g.mu.Unlock()
	g.check()
}

// check looks at all pods; it is called when the state of one has changed.
func (g *gate) check() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.open || g.closed {
		return
	}
	if g.timer != nil {
		g.timer.Stop()
		g.timer = nil
	}
	now, wait, held := g.now(), time.Duration(0), false
	for _, p := range g.pods() {
		d, pending := p.pendingFor(now)
		if !pending || g.limit > 0 && d >= g.limit {
			continue
		}
		held = true
		wait = max(wait, g.limit-d)
	}
	if !held {
		g.task.Done()
		return
	}
	g.task.Undo()
	if g.limit > 0 {
		g.timer = g.group.After(wait, g.check)
	}
}

// close ends the timer.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	if g.timer != nil {
		g.timer.Stop()
	}
}
