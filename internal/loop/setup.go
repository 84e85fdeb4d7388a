package loop

import (
	"context"
	"fmt"
	"iter"
	"runtime/debug"
	"sync/atomic"
)

// A setup is a set-up that runs on the thread of a loop, between the turns of tasks: a coroutine, which gives the thread back while it
// waits. Who waits in a goroutine of its own costs two threads that are woken for each step: a third of the time that a new connection
// through the mesh took (measured).
type setup struct {
	l     *eventLoop
	next  func() (struct{}, bool) // goes on until the next wait; false: it has ended
	yield func(struct{}) bool
	again func()      // step, made once
	due   atomic.Bool // again was posted, and has not run
}

// maxSteps is how many steps of set-ups may wait on a loop before further set-ups are goroutines: those of a flood of SYNs, of which a reader
// brings 2,000 in a turn, would wait there in any number.
const maxSteps = 64

// Go runs a set-up as [Group.Go] does, but on the loop of the task, if the caller is there as well and not too many wait: it begins soon
// after. What computes for more than moments, such as a handshake, is for Group.Go.
func (r *Ref) Go(ctx context.Context, f func(ctx context.Context)) {
	l := r.home()
	if l.g.manual != nil || !l.here() || l.steps.size() >= maxSteps {
		l.g.Go(ctx, f)
		return
	}
	s := &setup{l: l}
	s.again = s.step
	ctx, cancel := context.WithCancelCause(context.WithValue(ctx, coroutineKey{}, s))
	s.next, _ = iter.Pull(func(yield func(struct{}) bool) {
		s.yield = yield
		defer l.g.setups.add(-1)
		defer cancel(nil)
		defer context.AfterFunc(l.g.stopped, func() { cancel(ErrStopped) })()
		returned := false
		defer func() {
			switch p := recover(); {
			case p != nil: // it goes on in the loop, whose stack says nothing
				panic(fmt.Sprintf("%v\n\nin a set-up:\n%s", p, debug.Stack()))
			case !returned: // the loop would end, and say nothing
				panic(fmt.Sprintf("loop: a set-up called runtime.Goexit\n%s", debug.Stack()))
			}
		}()
		f(ctx)
		returned = true
	})
	l.g.setups.add(1)
	l.setups[s] = struct{}{}
	s.due.Store(true)
	l.steps.list = append(l.steps.list, message{f: s.again})
}

// here reports whether the caller is on the loop's thread.
func (l *eventLoop) here() bool { return l.thread.Load() == int32(threadID()) }

// step goes on with the set-up until it waits again.
func (s *setup) step() {
	s.due.Store(false)
	if _, here := s.l.setups[s]; !here {
		return // it has ended
	}
	if _, more := s.next(); !more {
		delete(s.l.setups, s)
	}
}

// wake lets the set-up look again; from any goroutine.
func (s *setup) wake() {
	if !s.due.Swap(true) {
		s.l.send(message{f: s.again, step: true})
	}
}

// await is Await in a set-up.
func (s *setup) await(ctx context.Context, start func(wake func())) error {
	if !s.l.here() {
		panic("loop: Await with the context of a set-up, elsewhere than in it; who goes on by himself needs another context")
	}
	woken := new(atomic.Bool) // of this Await: a late wake of an earlier one does not count
	start(func() {
		if !woken.Swap(true) {
			s.wake()
		}
	})
	if !woken.Load() {
		defer context.AfterFunc(ctx, s.wake)()
		for !woken.Load() && ctx.Err() == nil {
			if s.l.abandoned {
				return ErrStopped
			}
			s.yield(struct{}{})
		}
	}
	if woken.Load() {
		return nil
	}
	return context.Cause(ctx)
}
