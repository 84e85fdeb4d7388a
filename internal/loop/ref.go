package loop

import (
	"sync/atomic"
	"time"
)

// A Ref is a task's handle on its loop. Wake, Post and Blocking may be called from any goroutine; everything else on the
// task's loop only: in a Turn, a posted function, a timer, a watch, or a start function.
type Ref struct {
	loop   *eventLoop
	parent *Ref
	task   Task

	wakePending atomic.Bool // a wake is on its way, or a turn is due

	// Of the loop's thread.
	in         *queue
	prev, next *Ref
	removed    bool // written under loop.mu as well
	watches    map[int]*watch
	timers     map[*Timer]struct{}
	children   map[*Ref]struct{}
	woken      queue // children that were woken
	busy       queue // children that have more to move
}

// Wake gives the task another turn. It only marks and queues, so it may be called with locks held.
func (r *Ref) Wake() {
	if r.wakePending.Swap(true) {
		return
	}
	r.loop.send(message{ref: r})
}

// WakeLocal is Wake for callers on the task's own loop: the task is queued at once, so that a parent which wakes a child in its
// turn finds it in RunChildren of the same turn.
func (r *Ref) WakeLocal() {
	if !r.wakePending.Swap(true) {
		r.enqueue()
	}
}

// enqueue puts a woken task where its turn comes from: a child behind its siblings, and its ancestors behind theirs. A
// task that waits for a turn already, as a busy one does, keeps its place.
func (r *Ref) enqueue() {
	for ; !r.removed && r.in == nil; r = r.parent {
		if r.parent == nil {
			r.loop.woken.push(r)
			return
		}
		r.parent.woken.push(r)
		r.parent.wakePending.Store(true)
	}
}

// Post runs f on the task's loop. False means that the task has ended and f will not run; true that f runs once, perhaps
// just after the task has been removed.
func (r *Ref) Post(f func()) bool {
	l := r.loop
	l.mu.Lock()
	if r.removed || l.state == ended {
		l.mu.Unlock()
		return false
	}
	l.inbox = append(l.inbox, message{f: f})
	interrupt := l.asleep
	l.asleep = false
	l.mu.Unlock()
	if interrupt {
		l.poll.interrupt()
	}
	return true
}

// After calls f on the task's loop once d has passed, unless the task is removed before.
func (r *Ref) After(d time.Duration, f func()) *Timer {
	t := r.loop.after(d, f)
	t.owner = r
	if r.timers == nil {
		r.timers = make(map[*Timer]struct{})
	}
	r.timers[t] = struct{}{}
	return t
}

// Now is the time on the Group's clock.
func (r *Ref) Now() time.Time { return r.loop.g.Now() }

// Group is the Group of the task; safe from any goroutine.
func (r *Ref) Group() *Group { return r.loop.g }

// Scratch is the scratch buffer of the loop, 256 KiB: valid until the turn ends or another task's turn begins, which
// RunChildren brings about.
func (r *Ref) Scratch() []byte {
	if r.loop.scratch == nil {
		r.loop.scratch = make([]byte, scratchBytes)
	}
	return r.loop.scratch
}

// Child adds a task that shares its parent's loop for good. start runs at once; the child's first turn is due, and its
// parent's. Child returns nil if start returned nil or the parent has been removed, in which case start does not run.
func (r *Ref) Child(start func(r *Ref) Task) *Ref {
	if r.removed {
		return nil
	}
	c := &Ref{loop: r.loop, parent: r}
	if r.children == nil {
		r.children = make(map[*Ref]struct{})
	}
	r.children[c] = struct{}{}
	c.task = start(c)
	if c.task == nil {
		c.Remove()
		return nil
	}
	c.WakeLocal()
	return c
}

// minShare is the least that RunChildren lets a child move in one turn, in bytes.
const minShare = 16 << 10

// RunChildren gives children that wait for a turn one each, those that were woken first, then those that have more to
// move, round robin, until about budget bytes may have been moved. It reports whether any child waits for another.
func (r *Ref) RunChildren(budget int) (more bool) {
	waiting := r.woken.n + r.busy.n
	if waiting == 0 {
		return false
	}
	share := max(budget/waiting, minShare)
	for n := r.woken.n; n > 0 && r.woken.n > 0 && budget > 0; n-- {
		r.turnChild(r.woken.pop(), share)
		budget -= share
	}
	for n := r.busy.n; n > 0 && r.busy.n > 0 && budget > 0; n-- {
		r.turnChild(r.busy.pop(), share)
		budget -= share
	}
	return r.woken.n+r.busy.n > 0
}

func (r *Ref) turnChild(c *Ref, share int) {
	c.wakePending.Store(false)
	if c.task.Turn(share) && !c.removed && c.in == nil {
		r.busy.push(c)
	}
}

// Watch calls ready on the task's loop when the state of fd changes (edge-triggered: readable, writable, hung up, error);
// once at once if there is something already. The descriptor must be unwatched, or the task removed, before it is closed.
func (r *Ref) Watch(fd int, ready func(Events)) error {
	if err := r.loop.needPoller(); err != nil {
		return err
	}
	w, err := r.loop.poll.watch(fd, ready)
	if err != nil {
		return err
	}
	if r.watches == nil {
		r.watches = make(map[int]*watch)
	}
	r.watches[fd] = w
	r.loop.watches.Add(1)
	return nil
}

// Unwatch ends a Watch. After it, ready is not called any more.
func (r *Ref) Unwatch(fd int) {
	if w, ok := r.watches[fd]; ok {
		delete(r.watches, fd)
		r.loop.poll.unwatch(w)
		r.loop.watches.Add(-1)
	}
}

// Remove ends the task, its watches and its timers. Each of its children gets one last turn, in which its parent lets its
// reads return ErrReset, and is removed with it.
func (r *Ref) Remove() {
	if r.removed {
		return
	}
	l := r.loop
	l.mu.Lock()
	r.removed = true // Post takes nothing from here on
	l.mu.Unlock()
	if r.in != nil {
		r.in.remove(r)
	}
	for c := range r.children {
		if c.task != nil && !c.removed {
			c.task.Turn(l.g.cfg.Slice)
		}
		c.Remove()
	}
	for fd := range r.watches {
		r.Unwatch(fd)
	}
	for t := range r.timers {
		t.Stop()
	}
	if t, ok := r.task.(interface{ removed() }); ok {
		t.removed()
	}
	if r.parent != nil {
		delete(r.parent.children, r)
		return
	}
	if _, ok := l.roots[r]; ok {
		delete(l.roots, r)
		l.tasks.Add(-1)
	}
}

// Removed reports whether the task was removed.
func (r *Ref) Removed() bool { return r.removed }
