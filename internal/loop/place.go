package loop

import (
	"container/heap"
	"sync/atomic"
	"time"
)

// When a task counts as bulk and when as sparse again: apart, so that it does not go back and forth.
const (
	bulkBytes    = 1 << 20
	bulkWindow   = 100 * time.Millisecond
	sparseBytes  = 256 << 10
	sparseWindow = 200 * time.Millisecond
)

// A load tells how busy a loop was lately.
type load struct {
	ran     time.Duration // what the thread had run at from
	from    time.Time
	percent atomic.Int32 // of the last window that the thread ran
}

// Shares of a window at which a bulk loop gives a task away, and takes one. A thread that waits for a core is not saturated: with
// another one the work would only be divided, and wait as long.
const (
	saturated = 95
	spare     = 50
)

// place moves a task that has just had its turn to where it belongs: with those that move much, with those that move little,
// or from a saturated bulk loop to one that has time.
func (l *eventLoop) place(r *Ref) {
	p := r.place
	if p.since.IsZero() {
		p.since = l.now
	}
	elapsed := l.now.Sub(p.since)
	switch {
	case !l.bulk && elapsed > bulkWindow:
		p.since, p.moved = l.now, 0
	case !l.bulk && (p.moved > bulkBytes || p.moved > sparseBytes && p.awaited()):
		p.since, p.moved = l.now, 0
		p.follow()
		l.seat(r, p.best(l))
	case l.bulk && elapsed >= sparseWindow:
		sparse := p.moved < sparseBytes || p.leads && p.moved < bulkBytes && !p.awaited()
		p.since, p.moved = l.now, 0
		if sparse {
			p.relieved = false
			p.leave()
			l.move(r, leastLoaded(l.g.sparse))
			return
		}
		if p.follows != p.leader || p.worker != p.works {
			p.follow() // Beside was called again
		}
		if !p.stays(l.g) {
			if to := l.relief(); to != nil {
				p.relieved = true
				l.seat(r, to)
				return
			}
		}
		if to := p.best(l); to != l {
			l.seat(r, to)
		}
	}
}

// stays reports whether a task is not to be moved to relieve a loop. That of a leader would take the measurement, and nobody would be moved
// by it. What only moves what its leader brings waits for that one's locks elsewhere, up to 0.7 ms at a time, which pays if there is
// a core for it alone (on two cores eight streams through the netstack: 5-8 % less throughput, a tenth more CPU; measured).
func (p *place) stays(g *Group) bool {
	return p.leads || p.leader != nil && !p.works && g.cfg.Cores <= len(g.bulk)
}

// follow counts p, which goes to a bulk loop, among its leader's followers.
func (p *place) follow() {
	p.leave()
	if p.leader == nil {
		return
	}
	p.follows, p.worker = p.leader, p.works
	p.follows.followers.Add(1)
	if p.worker {
		p.follows.workers.Add(1)
	}
}

// leave undoes follow.
func (p *place) leave() {
	if p.follows == nil {
		return
	}
	p.follows.followers.Add(-1)
	if p.worker {
		p.follows.workers.Add(-1)
	}
	p.follows = nil
}

// seat moves a task to a bulk loop, and has its leader know of it if they would be beside each other there: who has much work, only if it is
// the only one that follows.
func (l *eventLoop) seat(r *Ref, to *eventLoop) {
	if p := r.place; p.follows != nil && (!p.worker || p.follows.followers.Load() == 1) {
		p.follows.seat.Store(to)
	}
	l.move(r, to)
}

// awaited reports whether a task on a bulk loop, unless it was moved to relieve one, would be beside p if that were on one, too. What a
// leader brings may be nothing but the acknowledgements of what its followers send, 500 to 1,300 in bulkWindow: they count a KiB each, around
// bulkBytes. On the sparse loop it would wait for the locks that the follower holds, and that one for its: one stream down through the netstack has
// 8.7 Gbit/s there, with 17,000 waits a second, beside each other 10-12 (measured).
func (p *place) awaited() bool {
	workers := p.workers.Load()
	return workers == 1 || p.followers.Load() > workers
}

// best is the bulk loop for a task on l that moves much.
func (p *place) best(l *eventLoop) *eventLoop {
	stay := l
	if !l.bulk {
		if stay = p.seat.Load(); stay == nil || !p.awaited() {
			stay = leastLoaded(l.g.bulk)
		}
	}
	if p.leader == nil || p.relieved {
		return stay
	}
	theirs := p.leader.at.Load()
	switch {
	case !theirs.bulk:
		return stay
	case !p.works, p.leader.workers.Load() <= 1:
		return theirs
	case stay != theirs:
		return stay
	}
	var best *eventLoop
	for _, other := range l.g.bulk {
		if other != theirs && (best == nil || other.tasks.Load() < best.tasks.Load()) {
			best = other
		}
	}
	if best == nil {
		return stay
	}
	return best
}

// relief measures the load of a bulk loop, once per window, and finds another to share it with.
func (l *eventLoop) relief() *eventLoop {
	window := l.now.Sub(l.load.from)
	if window < sparseWindow {
		return nil
	}
	ran := l.g.ran()
	percent := int32(100 * (ran - l.load.ran) / window)
	if l.load.from.IsZero() {
		percent = 0
	}
	l.load.from, l.load.ran = l.now, ran
	l.load.percent.Store(percent)
	if percent < saturated || l.tasks.Load() < 2 {
		return nil
	}
	for _, to := range l.g.bulk {
		n := to.tasks.Load()
		if to != l && n < l.tasks.Load() && (n == 0 || to.load.percent.Load() <= spare) {
			return to
		}
	}
	return nil
}

// move hands a task, with its children, watches, timers and the messages that wait for it, over to another loop. It is called
// between the task's turns.
func (l *eventLoop) move(r *Ref, to *eventLoop) {
	if r.in != nil {
		r.in.remove(r)
	}
	m := migration{r: r}
	first, second := l, to
	if to.index < l.index {
		first, second = to, l
	}
	first.mu.Lock()
	second.mu.Lock()
	if to.state != running { // the end is near: it stays
		second.mu.Unlock()
		first.mu.Unlock()
		r.wakePending.Store(true)
		l.woken.push(r)
		return
	}
	r.place.moving = true
	m.take(l, r)
	m.posts = l.takePosts(r)
	r.place.at.Store(to)
	to.inbox = append(to.inbox, message{move: &m})
	interrupt := to.asleep
	to.asleep = false
	second.mu.Unlock()
	first.mu.Unlock()
	if interrupt {
		to.poll.interrupt()
	}
}

// A migration is what goes along with a task.
type migration struct {
	r       *Ref
	watches []watched
	timers  []*Timer
	posts   []message
}

type watched struct {
	r     *Ref
	fd    int
	ready func(Events)
}

// take collects what r and its children have on a loop, whose mu is held.
func (m *migration) take(l *eventLoop, r *Ref) {
	for fd, w := range r.watches {
		m.watches = append(m.watches, watched{r, fd, w.ready})
		l.poll.unwatch(w)
		l.watches.Add(-1)
	}
	clear(r.watches)
	for t := range r.timers {
		if t.index >= 0 {
			heap.Remove(&l.timers, t.index)
			m.timers = append(m.timers, t)
		}
	}
	for c := range r.children {
		m.take(l, c)
	}
	if r.parent == nil {
		delete(l.roots, r)
		l.tasks.Add(-1)
	}
}

// takePosts takes the functions that were posted to r and its children, in their order; their wakes are dropped, because
// everybody is woken in the end. mu is held.
func (l *eventLoop) takePosts(r *Ref) (posts []message) {
	filter := func(list []message) []message {
		kept := list[:0]
		for _, m := range list {
			switch {
			case m.ref == nil || m.ref.place != r.place:
				kept = append(kept, m)
			case m.f != nil:
				posts = append(posts, m)
			}
		}
		clear(list[len(kept):])
		return kept
	}
	for _, q := range []*postQueue{&l.posts, &l.later} {
		waiting := filter(q.list[q.at:])
		q.list = append(q.list[:q.at], waiting...)
	}
	l.inbox = filter(l.inbox)
	return posts
}

// adopt takes a task over, before the loop looks at any later message of the task.
func (l *eventLoop) adopt(m *migration) {
	r := m.r
	l.roots[r] = struct{}{}
	l.tasks.Add(1)
	for _, w := range m.watches {
		// The descriptor may not be watched only if the process is out of memory: then the task sees what it reads.
		if err := w.r.Watch(w.fd, w.ready); err != nil {
			w.ready(HangUp | Failed)
		}
	}
	l.mu.Lock()
	for _, t := range m.timers {
		t.l = l
		heap.Push(&l.timers, t)
	}
	l.mu.Unlock()
	r.place.moving = false
	r.wakeAll()
	for _, p := range m.posts {
		l.sort(p)
	}
}

// wakeAll gives a task and all of its children a turn: what woke them while they moved is not known.
func (r *Ref) wakeAll() {
	r.wakePending.Store(true)
	r.enqueue()
	for c := range r.children {
		c.wakeAll()
	}
}
