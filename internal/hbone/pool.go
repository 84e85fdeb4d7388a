package hbone

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// errRefused is why a request may be sent again: the peer certainly did not process it (RFC 9113, section 8.7).
var errRefused = errors.New("hbone: the peer refused the stream unprocessed")

// errPoolClosed is returned by Open after Drain.
var errPoolClosed = errors.New("hbone: the pool takes no new streams")

// maxAttempts bounds the tunnels that one Open tries, one of which may have refused it.
const maxAttempts = 4

// A Pool opens streams for one source identity, over tunnels that it shares among the streams of one key: next hop, accepted
// identities and workload. It is safe for concurrent use. No lock is held while anything waits.
type Pool struct {
	cfg    PoolConfig
	ctx    context.Context // of dials; ends at the end of Close
	cancel context.CancelFunc
	bufs   *buffers

	mu       sync.Mutex // guards below, and the fields of entries, pooled tunnels and waiters
	draining bool
	entries  map[poolKey]*entry
	tunnels  map[*pooled]struct{} // all, also those that take no new streams
	dials    int
	waiters  int
	idle     []func() // called when nothing is left
}

// A poolKey says which streams may share a tunnel.
type poolKey struct {
	nextHop netip.AddrPort
	accept  string
	uid     string
}

// An entry is what a Pool has for a key. It is forgotten when it has nothing.
type entry struct {
	key     poolKey
	accept  []workload.Identity
	usable  []*pooled
	waiting []*waiter
	dials   int
}

// A waiter is an Open that waits for a tunnel.
type waiter struct {
	wake func()
	pt   *pooled // reserved for it
	err  error
}

// A pooled is a tunnel of a Pool, and its owner.
type pooled struct {
	p     *Pool
	e     *entry
	t     *tunnel
	limit int // streams at once
	open  int // streams, with those that are reserved
	done  bool
	idle  *loop.Timer // of the tunnel's loop
}

// NewPool returns a Pool without any tunnel.
func NewPool(cfg PoolConfig) (*Pool, error) {
	if cfg.Group == nil || cfg.Dialer == nil || cfg.TLS == nil {
		return nil, errors.New("hbone: pool config: Group, Dialer and TLS are required")
	}
	if cfg.MaxStreams < 0 {
		return nil, fmt.Errorf("hbone: pool config: %d streams per tunnel: must not be negative", cfg.MaxStreams)
	}
	cfg.MaxStreams = cmp.Or(cfg.MaxStreams, 100)
	cfg.IdleRelease = cmp.Or(cfg.IdleRelease, 300*time.Second)
	cfg.ConnectTimeout = cmp.Or(cfg.ConnectTimeout, 10*time.Second)
	cfg.HandshakeTimeout = cmp.Or(cfg.HandshakeTimeout, 10*time.Second)
	cfg.ResponseTimeout = cmp.Or(cfg.ResponseTimeout, 20*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Pool{
		cfg:     cfg,
		bufs:    new(buffers),
		entries: make(map[poolKey]*entry),
		tunnels: make(map[*pooled]struct{}),
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p, nil
}

// Open returns a stream to the target, which answered 200. It waits; ctx is one of loop.Group.Go. The error is an
// *OpenError, the cause of ctx's end, or tells that the Pool was drained.
//
// The stream is not attached: its first use is Ref().Post. If that returns false, the tunnel has ended.
func (p *Pool) Open(ctx context.Context, target Target) (Stream, error) {
	var not *pooled
	for attempt := 1; ; attempt++ {
		pt, err := p.checkOut(ctx, target, not)
		if err != nil {
			return nil, err
		}
		s, settled, err := p.request(ctx, pt, target)
		if err == nil {
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		switch {
		case errors.Is(err, errRefused) && not == nil && attempt < maxAttempts:
			not = pt // once: if another tunnel refuses it too, that is the answer
			continue
		case (errors.Is(err, errGoingAway) || errors.Is(err, errStreamLimit)) && attempt < maxAttempts:
			continue // it was not sent
		}
		phase := PhaseResponse
		if !settled {
			phase = PhaseHandshake // the peer never spoke HTTP/2; with TLS 1.3 it tells only now that it refuses our certificate
		}
		return nil, &OpenError{Phase: phase, NextHop: target.NextHop, Err: err}
	}
}

// request opens a stream on a tunnel where one is reserved.
func (p *Pool) request(ctx context.Context, pt *pooled, target Target) (_ Stream, settled bool, err error) {
	ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.ResponseTimeout)
	defer cancel()
	o := &opening{authority: target.Authority, headers: target.Headers}
	err = loop.Await(ctx, func(wake func()) {
		o.done = wake
		pt.t.open(o)
	})
	if err != nil {
		pt.t.abandon(o)
		return nil, true, err
	}
	if o.err != nil {
		return nil, o.settled, o.err
	}
	return o.s, true, nil
}

// checkOut returns a tunnel with a stream reserved on it, which is not the given one.
func (p *Pool) checkOut(ctx context.Context, target Target, not *pooled) (*pooled, error) {
	key := poolKey{nextHop: target.NextHop, uid: target.PeerUID}
	for _, id := range target.Accept {
		key.accept += id.Principal() + "\x00"
	}
	w := new(waiter)
	err := loop.Await(ctx, func(wake func()) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.draining {
			w.err = errPoolClosed
			wake()
			return
		}
		e := p.entries[key]
		if e == nil {
			e = &entry{key: key, accept: slices.Clone(target.Accept)}
			p.entries[key] = e
		}
		for _, pt := range e.usable {
			if pt != not && pt.open < pt.limit {
				pt.reserve()
				w.pt = pt
				wake()
				return
			}
		}
		w.wake = wake
		e.waiting = append(e.waiting, w)
		p.waiters++
		p.dialIfNeeded(e)
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		if w.pt != nil {
			w.pt.unreserve()
		} else if e := p.entries[key]; e != nil {
			if i := slices.Index(e.waiting, w); i >= 0 {
				e.waiting = slices.Delete(e.waiting, i, i+1)
				p.waiters--
				p.forgetIfEmpty(e)
			}
		}
		return nil, err
	}
	return w.pt, w.err
}

// dialIfNeeded starts as many dials as the waiters of e need. mu is held.
func (p *Pool) dialIfNeeded(e *entry) {
	for e.dials*p.cfg.MaxStreams < len(e.waiting) {
		e.dials++
		p.dials++
		p.cfg.Group.Go(p.ctx, func(ctx context.Context) {
			if err := p.dial(ctx, e); err != nil {
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
	n := min(len(e.waiting), p.cfg.MaxStreams)
	if e.dials == 0 {
		n = len(e.waiting)
	}
	for _, w := range e.waiting[:n] {
		w.err = err
		w.wake()
	}
	e.waiting = slices.Delete(e.waiting, 0, n)
	p.waiters -= n
	p.forgetIfEmpty(e)
	p.mu.Unlock()
	p.checkIdle()
}

func (p *Pool) dial(ctx context.Context, e *entry) error {
	fail := func(phase Phase, err error) error { return &OpenError{Phase: phase, NextHop: e.key.nextHop, Err: err} }

	connect, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.ConnectTimeout)
	conn, err := p.cfg.Dialer.Dial(connect, e.key.nextHop)
	cancel()
	if err != nil {
		return fail(PhaseConnect, err)
	}

	hs, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.HandshakeTimeout)
	defer cancel()
	start := p.cfg.Group.Now()
	cfg, err := p.cfg.TLS(hs, e.accept)
	if err != nil {
		giveUp(conn)
		return fail(PhaseHandshake, err)
	}
	l, err := handshake(hs, p.cfg.Group, conn, nil, requireAccepted(cfg, e.accept), false)
	if err != nil {
		return fail(PhaseHandshake, err)
	}
	l.buffers = p.bufs
	peer, err := accepted(l.tls.ConnectionState(), e.accept)
	if err != nil {
		giveUp(l.conn)
		return fail(PhaseHandshake, err)
	}
	pt := &pooled{p: p, e: e, limit: p.cfg.MaxStreams}
	startTunnel(tunnelConfig{
		group: p.cfg.Group, link: l, settings: p.cfg.Settings, owner: pt, peer: peer, buffers: p.bufs,
		settle: max(time.Millisecond, p.cfg.HandshakeTimeout-p.cfg.Group.Now().Sub(start)),
		failed: func() { p.dialFailed(e, fail(PhaseHandshake, loop.ErrStopped)) },
	}, pt.ready)
	return nil
}

func (p *Pool) forgetIfEmpty(e *entry) {
	if len(e.usable) == 0 && len(e.waiting) == 0 && e.dials == 0 && p.entries[e.key] == e {
		delete(p.entries, e.key)
	}
}

// ready is called on the loop of a new tunnel.
func (pt *pooled) ready(t *tunnel) {
	p := pt.p
	pt.t = t
	p.mu.Lock()
	defer p.mu.Unlock()
	pt.e.dials--
	p.dials--
	p.tunnels[pt] = struct{}{}
	if p.draining {
		pt.retire()
		return
	}
	pt.e.usable = append(pt.e.usable, pt)
	pt.serveWaiters()
	p.dialIfNeeded(pt.e)
	if pt.open == 0 {
		pt.startIdle()
	}
}

// serveWaiters gives streams of the tunnel to those that wait. mu is held.
func (pt *pooled) serveWaiters() {
	e := pt.e
	for !pt.done && pt.open < pt.limit && len(e.waiting) > 0 {
		w := e.waiting[0]
		e.waiting = slices.Delete(e.waiting, 0, 1)
		pt.p.waiters--
		pt.reserve()
		w.pt = pt
		w.wake()
	}
}

func (pt *pooled) reserve() { pt.open++ }

// unreserve gives a stream back. mu is held.
func (pt *pooled) unreserve() {
	pt.open--
	pt.serveWaiters()
	if pt.open > 0 {
		return
	}
	if pt.done {
		pt.t.ref.Post(pt.t.drain)
		return
	}
	pt.t.ref.Post(pt.startIdle)
}

// startIdle is called on the loop.
func (pt *pooled) startIdle() {
	if pt.t.dead() {
		return
	}
	if pt.idle != nil {
		pt.idle.Stop()
	}
	pt.idle = pt.t.ref.After(pt.p.cfg.IdleRelease, func() {
		pt.p.mu.Lock()
		defer pt.p.mu.Unlock()
		if pt.open == 0 {
			pt.retire()
		}
	})
}

// retire takes the tunnel out of use; it closes with its last stream. mu is held.
func (pt *pooled) retire() {
	if pt.done {
		return
	}
	pt.done = true
	if i := slices.Index(pt.e.usable, pt); i >= 0 {
		pt.e.usable = slices.Delete(pt.e.usable, i, i+1)
	}
	pt.p.forgetIfEmpty(pt.e)
	if pt.open == 0 {
		pt.t.ref.Post(pt.t.drain)
	}
}

func (pt *pooled) request(*tunnel, *stream, string, Headers) {}

func (pt *pooled) released(*tunnel) {
	pt.p.mu.Lock()
	defer pt.p.mu.Unlock()
	pt.unreserve()
}

func (pt *pooled) peerLimit(_ *tunnel, streams uint32) {
	pt.p.mu.Lock()
	defer pt.p.mu.Unlock()
	pt.limit = int(min(int64(streams), int64(pt.p.cfg.MaxStreams)))
	pt.serveWaiters()
}

func (pt *pooled) noNewStreams(*tunnel) {
	pt.p.mu.Lock()
	defer pt.p.mu.Unlock()
	pt.retire()
}

func (pt *pooled) gone(t *tunnel, err error) {
	p := pt.p
	p.cfg.Log.Debug("tunnel closed", "remote", t.remote, "err", err)
	p.mu.Lock()
	pt.done = true
	if i := slices.Index(pt.e.usable, pt); i >= 0 {
		pt.e.usable = slices.Delete(pt.e.usable, i, i+1)
	}
	delete(p.tunnels, pt)
	p.forgetIfEmpty(pt.e)
	p.mu.Unlock()
	p.checkIdle()
}

// Drain stops new streams. Those that are open go on; a tunnel closes with its last one.
func (p *Pool) Drain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining {
		return
	}
	p.draining = true
	for _, e := range p.entries {
		for _, w := range e.waiting {
			w.err = errPoolClosed
			w.wake()
		}
		p.waiters -= len(e.waiting)
		e.waiting = nil
	}
	for pt := range p.tunnels {
		pt.retire()
	}
}

// Close drains, waits until the last stream has ended or ctx ends, and then cuts what is left.
func (p *Pool) Close(ctx context.Context) error {
	p.Drain()
	err := p.await(ctx)
	p.cancel()
	if err == nil {
		return nil
	}
	p.mu.Lock()
	for pt := range p.tunnels {
		pt.t.ref.Post(pt.t.cut)
	}
	p.mu.Unlock()
	_ = p.await(context.WithoutCancel(ctx))
	return err
}

func (p *Pool) await(ctx context.Context) error {
	return loop.Await(ctx, func(wake func()) {
		p.mu.Lock()
		p.idle = append(p.idle, wake)
		p.mu.Unlock()
		p.checkIdle()
	})
}

func (p *Pool) checkIdle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining && len(p.tunnels) == 0 && p.dials == 0 {
		for _, wake := range p.idle {
			wake()
		}
		p.idle = nil
	}
}

// PoolStats is what a Pool holds.
type PoolStats struct {
	Keys    int // with a tunnel, a dial or a waiter
	Tunnels int // also those that take no new streams
	Streams int // with those that are being opened
	Waiters int // Opens that wait for a tunnel
	Dials   int // tunnels being made
}

// Stats counts what the Pool holds.
func (p *Pool) Stats() PoolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := PoolStats{Keys: len(p.entries), Tunnels: len(p.tunnels), Waiters: p.waiters, Dials: p.dials}
	for pt := range p.tunnels {
		st.Streams += pt.open
	}
	return st
}
