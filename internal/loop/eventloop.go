package loop

import (
	"container/heap"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// An eventLoop is one thread's queues. All fields but those below mu and the atomics belong to the thread.
type eventLoop struct {
	g       *Group
	index   int  // among the Group's loops: the order in which two are locked
	bulk    bool // for tasks that move much; false for all, if the Group has one set of loops
	poll    *poller
	scratch []byte
	now     time.Time // read once for each round
	load    load

	tasks   atomic.Int32
	watches atomic.Int32

	mu     sync.Mutex // guards below
	inbox  []message
	asleep bool      // in epoll_wait with a timeout: a message has to interrupt it
	until  time.Time // when it wakes by itself
	state  loopState
	timers timerHeap

	spare    []message // the other inbox buffer
	posts    postQueue // taken from the inbox, not yet run
	later    postQueue // of these, those of PostLater
	woken    queue
	busy     queue
	led      bool // by hand: a leader had its turn, now one of the busy ones has
	roots    map[*Ref]struct{}
	leftover []string
}

type loopState uint8

const (
	running  loopState = iota
	draining           // ends with its last task
	ended              // takes nothing more
)

// A message is a wake of ref, or, with f, a function posted to ref; a nil ref is the loop itself. Or it is a task that comes from
// another loop.
type message struct {
	ref   *Ref
	f     func()
	later bool
	idle  bool // nobody is woken for it
	move  *migration
}

// A postQueue is functions that wait to be run.
type postQueue struct {
	list []message
	at   int // the first that has not run
}

func (q *postQueue) empty() bool { return q.at == len(q.list) }

// runOne runs the first function, if there is one.
func (q *postQueue) runOne() {
	if q.empty() {
		return
	}
	f := q.list[q.at].f
	q.list[q.at] = message{}
	if q.at++; q.empty() {
		q.list, q.at = q.list[:0], 0
	}
	f()
}

func newEventLoop(g *Group, index int, bulk bool) *eventLoop {
	return &eventLoop{g: g, index: index, bulk: bulk, roots: make(map[*Ref]struct{})}
}

// needPoller gives a loop that is driven by hand its epoll, once a task watches a descriptor.
func (l *eventLoop) needPoller() error {
	if l.poll != nil {
		return nil
	}
	p, err := newPoller()
	if err != nil {
		return fmt.Errorf("loop: %w", err)
	}
	l.poll = p
	return nil
}

// post sends the loop itself a function; false if the loop has ended.
func (l *eventLoop) post(f func()) bool {
	l.mu.Lock()
	if l.state == ended {
		l.mu.Unlock()
		return false
	}
	l.put(message{f: f})
	return true
}

// put appends to the inbox. It is called with mu held and releases it.
func (l *eventLoop) put(m message) {
	l.inbox = append(l.inbox, m)
	interrupt := l.asleep && !m.idle
	l.asleep = l.asleep && m.idle // one interruption is enough
	l.mu.Unlock()
	if interrupt {
		l.poll.interrupt()
	}
}

// run is the thread.
func (l *eventLoop) run() {
	for {
		l.now = l.g.Now()
		l.takeInbox()
		l.runTimers()
		for n := maxPosts; n > 0 && !l.posts.empty(); n-- {
			l.posts.runOne()
		}
		for n := l.woken.n; n > 0 && l.woken.n > 0; n-- {
			l.turn(l.woken.pop())
		}
		if l.busy.n > 0 {
			l.turn(l.busy.pop())
		}
		l.runLater()
		if l.finished() {
			return
		}
		l.wait()
	}
}

// sort puts a message into the queue of the thread where it belongs.
func (l *eventLoop) sort(m message) {
	switch {
	case m.move != nil:
		l.adopt(m.move)
	case m.f == nil:
		m.ref.enqueue()
	case m.later:
		l.later.list = append(l.later.list, m)
	default:
		l.posts.list = append(l.posts.list, m)
	}
}

// takeInbox sorts what others sent.
func (l *eventLoop) takeInbox() {
	l.mu.Lock()
	in := l.inbox
	l.inbox = l.spare[:0]
	l.mu.Unlock()
	for i, m := range in {
		l.sort(m)
		in[i] = message{}
	}
	l.spare = in[:0]
}

// runLater runs functions of PostLater for lateSlice, and at least one. If that does not do, others who wait for the core come next: the kernel would
// let the thread run for 3 ms.
func (l *eventLoop) runLater() {
	if l.later.empty() {
		return
	}
	for end := l.g.Now().Add(lateSlice); !l.later.empty(); {
		l.later.runOne()
		if !l.g.Now().Before(end) {
			yieldThread()
			return
		}
	}
}

func (l *eventLoop) start(r *Ref, start func(*Ref) Task) {
	l.roots[r] = struct{}{}
	r.task = start(r)
	if r.task == nil {
		r.Remove()
		return
	}
	r.wakePending.Store(true) // perhaps it was woken before it began
	r.enqueue()
}

// What a turn may move of those who are one behind the other, in slices; on a sparse loop, where they are until they have moved much, a
// leader's is half of it and a follower has one: those of many pods meet there.
//
// A leader's: all that waits, so that what is quiet does not queue behind what is busy. A ping-pong beside eight streams of its pod
// outside the mesh takes 0.6-0.7 ms (median), with half as much 2.3 (measured).
//
// A follower's: a whole window of the netstack (512 KiB). Of eight streams up with one slice each window stayed all but closed, and
// opened by so little that the application's kernel answered with segments of 37 KB: 6.2 Gbit/s at 1.29 s of CPU for each GB, against
// 9.0 at 0.80 with segments of 59 KB (interleaved). Three slices, or eight with a window twice as large, are slower.
const (
	leaderSlices   = 16
	followerSlices = 4
)

// turn gives a task that was taken from a queue its turn.
func (l *eventLoop) turn(r *Ref) {
	r.wakePending.Store(false) // from here on a wake means another turn
	budget := l.g.cfg.Slice
	sparse := !l.bulk && len(l.g.bulk) > 0
	switch {
	case r.place.leads && sparse:
		budget *= leaderSlices / 2
	case r.place.leads:
		budget *= leaderSlices
	case r.place.leader != nil && !r.place.works && !sparse:
		budget *= followerSlices
	}
	if r.task.Turn(budget) && !r.removed && r.in == nil {
		if r.place.leads {
			l.woken.push(r)
			l.led = true
		} else {
			l.busy.push(r)
		}
	}
	if len(l.g.bulk) > 0 && !r.removed {
		l.place(r)
	}
}

// maxSleep is how long a loop sleeps at most. Who sets a timer for later than that, as every set-up does for its limits, does not have
// to wake it: new connections through the mesh woke two or three threads each for nothing (measured).
const maxSleep = time.Second

// wait looks at epoll: without waiting if there is something to do.
func (l *eventLoop) wait() {
	if l.poll.poll(0, l) || l.woken.n > 0 || l.busy.n > 0 || !l.posts.empty() || !l.later.empty() {
		return
	}
	l.mu.Lock()
	if len(l.inbox) > 0 || l.state == draining && len(l.roots) == 0 {
		l.mu.Unlock()
		return
	}
	now := l.g.Now()
	l.until = now.Add(maxSleep)
	if len(l.timers) > 0 && l.timers[0].at.Before(l.until) {
		l.until = l.timers[0].at
	}
	d := max(0, l.until.Sub(now))
	l.asleep = true
	l.mu.Unlock()

	l.poll.poll(d, l)

	l.mu.Lock()
	l.asleep = false
	l.mu.Unlock()
}

// finished ends the loop once it is to end and nothing is left.
func (l *eventLoop) finished() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == running || len(l.roots) > 0 || len(l.inbox) > 0 || !l.posts.empty() || !l.later.empty() {
		return false
	}
	l.state = ended
	for _, t := range l.timers { // a late Stop finds nothing to do
		t.index = -1
	}
	l.timers = nil
	return true
}

// drain lets the loop end with its last task.
func (l *eventLoop) drain() {
	l.mu.Lock()
	l.state = draining
	l.mu.Unlock()
	l.post(func() {}) // wake it up
}

// abandon removes the tasks that are left and remembers their names.
func (l *eventLoop) abandon() {
	l.post(func() {
		for r := range l.roots {
			l.leftover = append(l.leftover, taskName(r.task))
			r.Remove()
		}
	})
}

func taskName(t Task) string {
	if s, ok := t.(fmt.Stringer); ok {
		return s.String()
	}
	return fmt.Sprintf("%T", t)
}

// A Timer is a pending call of a function on a loop.
type Timer struct {
	l     *eventLoop
	at    time.Time
	f     func()
	index int  // in the heap; -1: not pending
	owner *Ref // nil: of the group
}

func (l *eventLoop) after(d time.Duration, f func()) *Timer {
	t := &Timer{l: l, at: l.g.Now().Add(d), f: f}
	l.mu.Lock()
	if l.state == ended {
		t.index = -1
		l.mu.Unlock()
		return t
	}
	heap.Push(&l.timers, t)
	interrupt := l.asleep && t.index == 0 && t.at.Before(l.until)
	if interrupt {
		l.asleep = false
	}
	l.mu.Unlock()
	if interrupt {
		l.poll.interrupt()
	}
	return t
}

// Stop prevents the call, unless it has begun. On the timer's own loop that is certain: after Stop the function does not
// run. It may be called from any goroutine, except for timers of Ref.After, whose loop it needs.
func (t *Timer) Stop() {
	t.l.mu.Lock()
	if t.index >= 0 {
		heap.Remove(&t.l.timers, t.index)
	}
	t.l.mu.Unlock()
	if t.owner != nil {
		delete(t.owner.timers, t)
	}
}

// runTimers calls what is due.
func (l *eventLoop) runTimers() {
	for l.runTimer() {
	}
}

func (l *eventLoop) runTimer() bool {
	l.mu.Lock()
	if len(l.timers) == 0 || l.timers[0].at.After(l.g.Now()) {
		l.mu.Unlock()
		return false
	}
	t := heap.Pop(&l.timers).(*Timer)
	l.mu.Unlock()
	if t.owner != nil {
		delete(t.owner.timers, t)
	}
	t.f()
	return true
}

type timerHeap []*Timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }

func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *timerHeap) Push(x any) {
	t := x.(*Timer)
	t.index = len(*h)
	*h = append(*h, t)
}

func (h *timerHeap) Pop() any {
	old := *h
	n := len(old) - 1
	t := old[n]
	old[n] = nil
	*h = old[:n]
	t.index = -1
	return t
}
