package loop

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// A Manual drives loops by hand: no threads, a clock of its own, one thing at a time. Everything happens inside Step, in
// an order that depends on nothing but the calls made before: a whole node driven so is deterministic.
//
// Set-ups (Group.Go) run as coroutines: each in a goroutine, but only while Step gives it the baton, until it waits in Await.
// A Manual belongs to one goroutine.
type Manual struct {
	group      *Group
	next       int                       // loop that the next Step begins with
	now        atomic.Pointer[time.Time] // a netstack's goroutines read it as well
	coroutines []*coroutine              // in the order of their start
}

// NewManual returns a driver of one loop, whose clock stands at start.
func NewManual(start time.Time) *Manual { return NewManualLoops(start, 1, 0) }

// NewManualLoops returns a driver of several loops, as of Config.Loops and Config.Sparse, which take turns.
func NewManualLoops(start time.Time, loops, sparse int) *Manual {
	m := new(Manual)
	m.now.Store(&start)
	m.group = newGroup(Config{Loops: loops, Sparse: sparse, Now: func() time.Time { return *m.now.Load() }})
	m.group.manual, m.group.ran = m, func() time.Duration { return 0 }
	return m
}

// Group is the Group that the tasks know.
func (m *Manual) Group() *Group { return m.group }

// Step does one thing: one posted function, timer, turn or piece of a set-up, in this order of preference, or hands out what
// epoll has, if a task watches descriptors. It reports whether there was anything to do.
func (m *Manual) Step() bool {
	for range m.group.loops {
		l := m.group.loops[m.next]
		m.next = (m.next + 1) % len(m.group.loops)
		if m.step(l) {
			return true
		}
	}
	return false
}

func (m *Manual) step(l *eventLoop) bool {
	l.now = m.group.Now()
	l.takeInbox()
	switch {
	case !l.posts.empty():
		l.posts.runOne()
	case l.runTimer():
	case l.woken.n > 0 && (!l.led || l.busy.n == 0):
		l.turn(l.woken.pop())
	case l.index == 0 && m.stepCoroutine():
	case l.busy.n > 0:
		l.led = false
		l.turn(l.busy.pop())
	case !l.later.empty():
		l.later.runOne()
	default:
		return l.poll != nil && l.poll.poll(0, l)
	}
	return true
}

// Settle steps until there is nothing left to do at this time.
func (m *Manual) Settle() {
	for m.Step() {
	}
}

// Advance moves the clock on by d, from timer to timer, and settles at each.
func (m *Manual) Advance(d time.Duration) {
	end := m.now.Load().Add(d)
	for {
		m.Settle()
		next := end
		due := false
		for _, l := range m.group.loops {
			l.mu.Lock()
			if len(l.timers) > 0 && !l.timers[0].at.After(next) {
				next, due = l.timers[0].at, true
			}
			l.mu.Unlock()
		}
		m.now.Store(&next)
		if !due {
			return
		}
	}
}

// Close ends the Group: the contexts of set-ups end, the tasks that are left are removed. It returns an error that names
// the tasks and counts the set-ups that were left.
func (m *Manual) Close() error {
	m.Settle()
	waiting := len(m.coroutines)
	m.group.stop()
	for _, co := range m.coroutines {
		co.cancel(ErrStopped)
	}
	m.Settle()
	for _, l := range m.group.loops {
		l.drain()
		l.abandon()
	}
	m.Settle()
	var left []string
	for _, l := range m.group.loops {
		l.finished()
		if l.poll != nil {
			l.poll.close()
		}
		left = append(left, l.leftover...)
	}
	if len(left) > 0 || waiting > 0 {
		return fmt.Errorf("loop: still running at the end: %d tasks %v, %d set-ups", len(left), left, waiting)
	}
	return nil
}

type coroutineKey struct{}

// A coroutine is a set-up driven by hand.
type coroutine struct {
	ctx    context.Context // what the current Await waits with; the set-up's own before
	cancel context.CancelCauseFunc
	ready  atomic.Bool // Await's wake was called
	resume chan struct{}
	yield  chan bool // true: it has ended
}

func (m *Manual) spawn(ctx context.Context, f func(context.Context)) {
	co := &coroutine{resume: make(chan struct{}), yield: make(chan bool)}
	ctx, co.cancel = context.WithCancelCause(context.WithValue(ctx, coroutineKey{}, co))
	if m.group.stopped.Err() != nil {
		co.cancel(ErrStopped)
	}
	co.ctx = ctx
	co.ready.Store(true)
	m.coroutines = append(m.coroutines, co)
	go func() {
		<-co.resume
		f(ctx)
		co.cancel(nil)
		co.yield <- true
	}()
}

// stepCoroutine lets the first set-up that can go on run until it waits again.
func (m *Manual) stepCoroutine() bool {
	for i, co := range m.coroutines {
		if !co.ready.Load() && co.ctx.Err() == nil {
			continue
		}
		co.resume <- struct{}{}
		if <-co.yield {
			m.coroutines = append(m.coroutines[:i:i], m.coroutines[i+1:]...)
		}
		return true
	}
	return false
}

// await is Await in a coroutine: it passes the baton back until it is woken or ctx ends.
func (co *coroutine) await(ctx context.Context, start func(wake func())) error {
	co.ready.Store(false)
	woken := new(atomic.Bool) // of this Await: a late wake of an earlier one does not count
	start(func() {
		woken.Store(true)
		co.ready.Store(true)
	})
	outer := co.ctx
	co.ctx = ctx
	for !woken.Load() && ctx.Err() == nil {
		co.ready.Store(false)
		if woken.Load() {
			break
		}
		co.yield <- false
		<-co.resume
	}
	co.ctx = outer
	if woken.Load() {
		return nil
	}
	return context.Cause(ctx)
}
