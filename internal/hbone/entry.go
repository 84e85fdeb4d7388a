package hbone

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// Bounds of what an entry does.
const (
	maxDials    = 8                      // tunnels of one key that are made at once
	minBackoff  = 100 * time.Millisecond // between a dial that failed and the next, doubled each time …
	maxBackoff  = time.Second            // … up to this
	extraWait   = 250 * time.Millisecond // what a stream waits for a new tunnel while there is room on a busy one
	maxExtra    = 4                      // further tunnels for bulk, if there are as many cores
	spareTunnel = 1                      // and one for what comes while all of them are bulk
)

// A poolKey says which streams may share a tunnel.
type poolKey struct {
	nextHop netip.AddrPort
	accept  string
	uid     string
}

// An entry is what a Pool has for a key, guarded by Pool.mu. It is forgotten when it has nothing.
type entry struct {
	key     poolKey
	accept  []workload.Identity
	usable  []*pooled
	waiting []*waiter
	dials   int
	limit   int           // streams that a new tunnel is expected to take: what the peer said last
	since   int           // tunnels of dials before this one take no new streams
	backoff time.Duration // after the last failure
	retry   *loop.Timer   // ends the back-off; nil: there is none
}

// A waiter is an Open that waits for a tunnel.
type waiter struct {
	wake  func()
	after int     // it wants a tunnel of a later dial than this
	pt    *pooled // reserved for it
	err   error
	timer *loop.Timer // of extraWait
}

// pick returns a tunnel with room for one more stream, or nil if a new one is to be waited for: if none has room, or if those
// that have are busy and there may be another.
func (p *Pool) pick(e *entry, after int) *pooled {
	busy := e.roomiest(after)
	if busy != nil && busy.busy && p.mayAdd(e) {
		return nil
	}
	return busy
}

// roomiest returns the first tunnel that has room and is not busy, or else the busy one with the fewest streams.
func (e *entry) roomiest(after int) *pooled {
	var best *pooled
	for _, pt := range e.usable {
		switch {
		case pt.seq <= after || pt.open >= pt.limit:
		case !pt.busy:
			return pt
		case best == nil || pt.open < best.open:
			best = pt
		}
	}
	return best
}

// mayAdd reports whether a stream may wait for a tunnel that is made although there is room on busy ones: for one that is being
// made already, or one of those that the Pool may have beyond what the stream limit requires.
func (p *Pool) mayAdd(e *entry) bool {
	if e.retry != nil || p.draining {
		return false
	}
	if len(e.waiting) < e.dials*e.limit {
		return true
	}
	streams := len(e.waiting) + 1
	for _, pt := range e.usable {
		streams += pt.open
	}
	required := (streams + e.limit - 1) / e.limit
	return e.dials < maxDials && len(e.usable)+e.dials < required+p.cfg.ExtraTunnels
}

// dialIfNeeded starts as many dials as the waiters of e need.
func (p *Pool) dialIfNeeded(e *entry) {
	for !p.draining && e.retry == nil && e.dials < maxDials && e.dials*e.limit < len(e.waiting) {
		e.dials++
		p.dials++
		p.seq++
		pt := &pooled{p: p, e: e, seq: p.seq}
		p.cfg.Group.Go(p.ctx, func(ctx context.Context) {
			if err := p.dial(ctx, pt); err != nil {
				p.dialFailed(e, err)
			}
		})
	}
}

// dialFailed shares a failure among those who waited for it.
func (p *Pool) dialFailed(e *entry, err error) {
	p.cfg.Log.Debug("tunnel failed", "next_hop", e.key.nextHop, "err", err)
	p.mu.Lock()
	e.dials--
	p.dials--
	for _, pt := range slices.Clone(e.usable) {
		pt.serve(true) // rather a busy tunnel than none
	}
	n := min(len(e.waiting), e.limit)
	if e.dials == 0 {
		n = len(e.waiting)
	}
	for _, w := range slices.Clone(e.waiting[:n]) {
		p.answer(e, w, nil, err)
	}
	if e.retry == nil && !p.draining {
		e.backoff = min(max(2*e.backoff, minBackoff), maxBackoff)
		var t *loop.Timer
		t = p.cfg.Group.After(e.backoff, func() { p.endBackoff(e, func() bool { return e.retry == t }) })
		e.retry = t
	}
	p.forgetIfEmpty(e)
	p.mu.Unlock()
	p.checkIdle()
}

// endBackoff makes the next attempt, for those who wait by now.
func (p *Pool) endBackoff(e *entry, current func() bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !current() {
		return
	}
	e.retry = nil
	if len(e.waiting) == 0 {
		e.backoff = 0
	}
	p.dialIfNeeded(e)
	p.forgetIfEmpty(e)
}

// clearBackoff follows a success, or the end.
func (e *entry) clearBackoff() {
	e.backoff = 0
	if e.retry != nil {
		e.retry.Stop()
		e.retry = nil
	}
}

// answer ends the waiting of w.
func (p *Pool) answer(e *entry, w *waiter, pt *pooled, err error) {
	if i := slices.Index(e.waiting, w); i >= 0 {
		e.waiting = slices.Delete(e.waiting, i, i+1)
		p.waiters--
	}
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
	if pt != nil {
		pt.open++
		if p.cfg.MaxStreams == 1 {
			pt.retire() // as with ztunnel, a limit of 1 is how tunnels are not kept
		}
	}
	w.pt, w.err = pt, err
	w.wake()
}

// wait makes w wait for a new tunnel. If there is room on a busy one, it takes that if a new one is not there soon.
func (p *Pool) wait(e *entry, w *waiter) {
	e.waiting = append(e.waiting, w)
	p.waiters++
	if e.roomiest(w.after) != nil {
		w.timer = p.cfg.Group.After(extraWait, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if pt := e.roomiest(w.after); pt != nil && slices.Contains(e.waiting, w) {
				p.answer(e, w, pt, nil)
			}
		})
	}
	p.dialIfNeeded(e)
}

func (p *Pool) forgetIfEmpty(e *entry) {
	if len(e.usable) == 0 && len(e.waiting) == 0 && e.dials == 0 && e.retry == nil && p.entries[e.key] == e {
		delete(p.entries, e.key)
	}
}
