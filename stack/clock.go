package stack

import (
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"

	"ztun.dev/ztun/internal/loop"
)

// A loopClock is the Group's clock for the netstack. Its timers run on the Group's loops.
type loopClock struct {
	g     *loop.Group
	start time.Time
	after func() // called after a timer's function

	mu     sync.Mutex // guards below, and the fields of timers
	timers map[*loopTimer]struct{}
	closed bool
}

var _ tcpip.Clock = (*loopClock)(nil)

func newLoopClock(g *loop.Group, after func()) *loopClock {
	return &loopClock{g: g, start: g.Now(), after: after, timers: make(map[*loopTimer]struct{})}
}

// Now implements tcpip.Clock.
func (c *loopClock) Now() time.Time { return c.g.Now() }

// NowMonotonic implements tcpip.Clock. It does not begin at 0, which the netstack takes for "never".
func (c *loopClock) NowMonotonic() tcpip.MonotonicTime {
	return tcpip.MonotonicTime{}.Add(time.Second + c.g.Now().Sub(c.start))
}

// AfterFunc implements tcpip.Clock.
func (c *loopClock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	t := &loopTimer{c: c, f: f}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.arm(d)
	return t
}

// close stops all timers.
func (c *loopClock) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for t := range c.timers {
		t.disarm()
	}
}

// A loopTimer is armed while it is in its clock's set.
type loopTimer struct {
	c     *loopClock
	f     func()
	timer *loop.Timer
	armed uint64 // counts arms: what an earlier one started is not the present one's
}

func (t *loopTimer) arm(d time.Duration) {
	if t.c.closed {
		return
	}
	t.armed++
	n := t.armed
	t.c.timers[t] = struct{}{}
	t.timer = t.c.g.After(d, func() { t.fire(n) })
}

func (t *loopTimer) disarm() bool {
	_, pending := t.c.timers[t]
	if pending {
		delete(t.c.timers, t)
		t.timer.Stop()
	}
	return pending
}

func (t *loopTimer) fire(n uint64) {
	t.c.mu.Lock()
	_, pending := t.c.timers[t]
	pending = pending && n == t.armed
	if pending {
		delete(t.c.timers, t)
	}
	t.c.mu.Unlock()
	if pending {
		t.f()
		t.c.after()
	}
}

// Stop implements tcpip.Timer.
func (t *loopTimer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	return t.disarm()
}

// Reset implements tcpip.Timer.
func (t *loopTimer) Reset(d time.Duration) {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	t.disarm()
	t.arm(d)
}
