package loop

import (
	"sync/atomic"
	"time"
)

// A Ref is a task's handle on its loop. Wake, Post, PostLater and Blocking may be called from any goroutine; everything else on the
// task's loop only: in a Turn, a posted function, a timer, a watch, or a start function.
type Ref struct {
	place  *place // shared with its parent and children
	parent *Ref
	task   Task

	wakePending atomic.Bool // a wake is on its way, or a turn is due

	// Of the loop's thread.
	in         *queue
	prev, next *Ref
	removed    bool // written under loop.mu as well
	hungry     bool // a child whose last turn moved much
	watches    map[int]*watch
	timers     map[*Timer]struct{}
	children   map[*Ref]struct{}
	woken      queue // children that were woken
	busy       queue // children that have more to move
}

// A place is where a top-level task is, with all of its children.
type place struct {
	at        atomic.Pointer[eventLoop] // changes when it moves
	followers atomic.Int32              // tasks on bulk loops that move what this one brings
	workers   atomic.Int32              // of these, those that have much work on it
	seat      atomic.Pointer[eventLoop] // where the last went that would be beside this one; nil: none has

	// Of the loop's thread.
	leads    bool
	leader   *place // whose task brings what this one moves; nil: none
	works    bool   // with much work
	follows  *place // among whose followers it counts; nil: nobody's
	worker   bool   // it counts among its workers, too
	relieved bool   // moved to where it is because a loop was saturated
	moving   bool   // on the way to another loop, which has not taken it over yet
	moved    int    // bytes since since
	since    time.Time
}

func newRoot(l *eventLoop) *Ref {
	r := &Ref{place: new(place)}
	r.place.at.Store(l)
	return r
}

// home is the loop that the task runs on. It stays that while code of the task runs.
func (r *Ref) home() *eventLoop { return r.place.at.Load() }

// send puts a message into the inbox of the task's loop, a wake if f is nil. False means that the loop has ended or, for a
// function, the task.
func (r *Ref) send(m message) bool {
	m.ref = r
	for {
		l := r.home()
		l.mu.Lock()
		switch {
		case r.home() != l: // it has just moved
			l.mu.Unlock()
			continue
		case l.state == ended, m.f != nil && r.removed:
			l.mu.Unlock()
			return false
		}
		l.put(m)
		return true
	}
}

// Wake gives the task another turn. It only marks and queues, so it may be called with locks held.
func (r *Ref) Wake() {
	if r.wakePending.Swap(true) {
		return
	}
	r.send(message{})
}

// WakeLocal is Wake for callers on the task's own loop: the task is queued at once, so that a parent which wakes a child in its
// turn finds it in RunChildren of the same turn.
//
// It does not rely on a wake that is on its way already: whoever sent that may have been descheduled before it was in the inbox (seen
// as 109 turns of others).
func (r *Ref) WakeLocal() {
	r.wakePending.Store(true)
	r.enqueue()
}

// enqueue puts a woken task where its turn comes from: a child behind its siblings, and its ancestors behind theirs. A
// task that waits for a turn already, as a busy one does, keeps its place. A hungry child goes behind those that are busy: all that
// move much are woken whenever there is room again, and one that was quiet would stand behind eight of them.
func (r *Ref) enqueue() {
	if r.place.moving || r.task == nil {
		return // everybody is woken at the end of a move, and a first turn is due by itself
	}
	for ; !r.removed && r.in == nil; r = r.parent {
		if r.parent == nil {
			r.home().woken.push(r)
			return
		}
		if r.hungry {
			r.parent.busy.push(r)
		} else {
			r.parent.woken.push(r)
		}
		r.parent.wakePending.Store(true)
	}
}

// Post runs f on the task's loop. False means that the task has ended and f will not run; true that f runs once, perhaps
// just after the task has been removed. Functions that one goroutine posts run in the order of its calls.
func (r *Ref) Post(f func()) bool { return r.send(message{f: f}) }

// PostLater is Post for one of very many functions, which may wait: between two looks at everything else the loop runs them for a
// fifth of a millisecond, so that a hundred thousand of them hold nobody up.
func (r *Ref) PostLater(f func()) bool { return r.send(message{f: f, later: true}) }

// PostIdle is Post for what may wait until the loop has something else to do, a second at most: nobody is woken for it.
func (r *Ref) PostIdle(f func()) bool { return r.send(message{f: f, idle: true}) }

// Lead says that the task, a top-level one, brings others what they move. It gets a turn after each turn of a busy task, so that
// what is quiet does not wait for all that is busy, and is not moved to divide the work of a saturated loop.
func (r *Ref) Lead() { r.place.leads = true }

// Beside says that the top-level task that r belongs to moves what the task of leader brings. While both move much they are on one
// loop, unless that is saturated: what one has just read is then in the cache of the core that writes it, and nobody has to be woken.
// One stream through the netstack: 0.75 s of CPU for each GB, against 1.0 (measured, two cores).
//
// A task that works much on what it moves, as one that encrypts does, is beside its leader only while it is the only such: several
// are on other loops, if there are any, so that what is quiet does not wait for the work on what is busy.
func (r *Ref) Beside(leader *Ref, works bool) { r.place.leader, r.place.works = leader.place, works }

// Moved tells how many bytes the task, or a child for it, has moved. Tasks that move much are kept apart from those that move
// little, if the Group has loops for both.
func (r *Ref) Moved(n int) { r.place.moved += n }

// After calls f on the task's loop once d has passed, unless the task is removed before.
func (r *Ref) After(d time.Duration, f func()) *Timer {
	t := r.home().after(d, f)
	t.owner = r
	if r.timers == nil {
		r.timers = make(map[*Timer]struct{})
	}
	r.timers[t] = struct{}{}
	return t
}

// LoopTime is the Group's clock when the task's loop last looked at it: late by what it has run since, at most a few turns, and free.
func (r *Ref) LoopTime() time.Time { return r.home().now }

// Now is the time on the Group's clock.
func (r *Ref) Now() time.Time { return r.home().g.Now() }

// Group is the Group of the task; safe from any goroutine.
func (r *Ref) Group() *Group { return r.home().g }

// Scratch is the scratch buffer of the loop, 256 KiB: valid until the turn ends or another task's turn begins, which
// RunChildren brings about.
func (r *Ref) Scratch() []byte {
	l := r.home()
	if l.scratch == nil {
		l.scratch = make([]byte, scratchBytes)
	}
	return l.scratch
}

// Child adds a task that shares its parent's loop for good. start runs at once; the child's first turn is due, and its
// parent's. Child returns nil if start returned nil or the parent has been removed, in which case start does not run.
func (r *Ref) Child(start func(r *Ref) Task) *Ref {
	if r.removed {
		return nil
	}
	c := &Ref{place: r.place, parent: r}
	if r.children == nil {
		r.children = make(map[*Ref]struct{})
	}
	r.children[c] = struct{}{}
	c.task = start(c)
	if c.task == nil {
		c.Remove()
		return nil
	}
	c.wakePending.Store(true) // perhaps it was woken before it began
	c.enqueue()
	return c
}

// hungryTurn is what a child's turn moves, in bytes, from which on it counts as hungry until its next one.
const hungryTurn = 16 << 10

// childTurn is what a child's turn counts at least, in bytes: it is not free if it moves nothing.
const childTurn = 4 << 10

// RunChildren gives children that wait for a turn one each, those that were woken first, then those that have more to
// move, round robin, until about budget bytes were moved (by what they tell Moved). Each may use all of the budget: shares of 16 KiB
// made small frames and small writes of everything and cost a third of the throughput of eight streams (measured), and an idle
// child costs the others next to nothing. One of those that have more to move gets a turn even if the others have used the budget
// up: those for which bytes come all the time are woken all the time. It reports whether any child waits for another turn.
func (r *Ref) RunChildren(budget int) (more bool) {
	slice := budget
	turns := [...]int{r.woken.n, r.busy.n} // who waits now: those that have more to move wait again
	for i, q := range [...]*queue{&r.woken, &r.busy} {
		for n := turns[i]; n > 0 && q.n > 0 && (budget > 0 || q == &r.busy && n == turns[i]); n-- {
			before := r.place.moved
			r.turnChild(q.pop(), slice)
			budget -= max(childTurn, r.place.moved-before)
		}
	}
	return r.woken.n+r.busy.n > 0
}

func (r *Ref) turnChild(c *Ref, share int) {
	c.wakePending.Store(false)
	before := r.place.moved
	more := c.task.Turn(share)
	c.hungry = r.place.moved-before >= hungryTurn
	if more && !c.removed && c.in == nil {
		r.busy.push(c)
	}
}

// Watch calls ready on the task's loop when the state of fd changes (edge-triggered: readable, writable, hung up, error);
// once at once if there is something already. The descriptor must be unwatched, or the task removed, before it is closed.
func (r *Ref) Watch(fd int, ready func(Events)) error {
	l := r.home()
	if err := l.needPoller(); err != nil {
		return err
	}
	w, err := l.poll.watch(fd, ready)
	if err != nil {
		return err
	}
	if r.watches == nil {
		r.watches = make(map[int]*watch)
	}
	r.watches[fd] = w
	l.watches.Add(1)
	return nil
}

// Unwatch ends a Watch. After it, ready is not called any more.
func (r *Ref) Unwatch(fd int) {
	if w, ok := r.watches[fd]; ok {
		delete(r.watches, fd)
		r.home().poll.unwatch(w)
		r.home().watches.Add(-1)
	}
}

// Remove ends the task, its watches and its timers. Each of its children gets one last turn, in which its parent lets its
// reads return ErrReset, and is removed with it.
func (r *Ref) Remove() {
	if r.removed {
		return
	}
	l := r.home()
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
	r.place.leave()
	if _, ok := l.roots[r]; ok {
		delete(l.roots, r)
		l.tasks.Add(-1)
	}
}

// Removed reports whether the task was removed.
func (r *Ref) Removed() bool { return r.removed }
