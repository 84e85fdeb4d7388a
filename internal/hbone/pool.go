package hbone

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// errRefused is why a request may be sent again: the peer certainly did not process it (RFC 9113, section 8.7).
var errRefused = errors.New("hbone: the peer refused the stream unprocessed")

// errPoolClosed is returned by Open after Drain. The words are ztunnel's.
var errPoolClosed = errors.New("pool draining")

// maxAttempts bounds the tunnels that one Open tries, one of which may have refused it.
const maxAttempts = 4

// A Pool opens streams for one source identity, over tunnels that it shares among the streams of one key: next hop, accepted
// identities and workload. It is safe for concurrent use. No lock is held while anything waits.
type Pool struct {
	cfg    PoolConfig
	ctx    context.Context // of dials; ends at the end of Close
	cancel context.CancelFunc
	bufs   *buffers

	mu       sync.Mutex // guards below, and entries, pooled tunnels and waiters: their methods are called with it held, but for those of owner
	draining bool
	entries  map[poolKey]*entry
	tunnels  map[*pooled]struct{} // all, also those that take no new streams
	seq      int                  // counts dials, and what makes earlier ones old
	since    int                  // tunnels of dials before this one take no new streams
	leaf     *x509.Certificate    // the newest that was used
	leafSeq  int                  // when it was asked for
	dials    int
	waiters  int
	idle     []func() // called when nothing is left
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
	cfg.ExtraTunnels = max(0, cmp.Or(cfg.ExtraTunnels, min(maxExtra, runtime.GOMAXPROCS(0))+spareTunnel))
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
	after := 0 // tunnels of dials up to this one are not asked
	for attempt := 1; ; attempt++ {
		pt, newest, err := p.checkOut(ctx, target, after)
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
		case (errors.Is(err, errRefused) || errors.Is(err, errLost) || errors.Is(err, errStale)) && after == 0 && attempt < maxAttempts:
			// Once, and on a fresh tunnel: a peer that goes away refuses on all that it has, and one that has gone is on none of them.
			// Nothing of the application's was sent yet, so that at worst its server sees a connection that ends at once.
			after = newest
			continue
		case (errors.Is(err, errGoingAway) || errors.Is(err, errStreamLimit)) && attempt < maxAttempts:
			continue // it was not sent
		}
		return nil, &OpenError{Phase: phaseOf(err, settled), NextHop: target.NextHop, Err: err}
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

// checkOut returns a tunnel with a stream reserved on it, whose dial came after the given one, and which dial is the newest now.
func (p *Pool) checkOut(ctx context.Context, target Target, after int) (_ *pooled, newest int, _ error) {
	key := poolKey{nextHop: target.NextHop, uid: target.PeerUID}
	for _, id := range target.Accept {
		key.accept += id.Principal() + "\x00"
	}
	w := &waiter{after: after}
	var e *entry
	err := loop.Await(ctx, func(wake func()) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.draining {
			w.err = errPoolClosed
			wake()
			return
		}
		if e = p.entries[key]; e == nil {
			e = &entry{key: key, accept: slices.Clone(target.Accept), limit: p.cfg.MaxStreams}
			p.entries[key] = e
		}
		w.wake = wake
		if pt := p.pick(e, after); pt != nil {
			p.answer(e, w, pt, nil)
			return
		}
		p.wait(e, w)
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		if w.pt != nil {
			w.pt.unreserve()
		} else if e != nil && slices.Contains(e.waiting, w) {
			p.answer(e, w, nil, err)
			p.forgetIfEmpty(e)
		}
		return nil, 0, err
	}
	return w.pt, p.seq, w.err
}

func (p *Pool) dial(ctx context.Context, pt *pooled) error {
	e := pt.e
	fail := func(phase Phase, err error) error { return &OpenError{Phase: phase, NextHop: e.key.nextHop, Err: err} }

	times := Times{Dialled: p.cfg.Group.Now()}
	connect, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.ConnectTimeout)
	conn, err := p.cfg.Dialer.Dial(connect, e.key.nextHop)
	cancel()
	if err != nil {
		return fail(PhaseConnect, err)
	}

	hs, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.HandshakeTimeout)
	defer cancel()
	start := p.cfg.Group.Now()
	times.Connected = start
	p.mu.Lock()
	p.seq++
	pt.cert = p.seq
	p.mu.Unlock()
	l, peer, err := p.secure(hs, conn, e.accept, &pt.leaf)
	if err != nil {
		return fail(PhaseHandshake, err)
	}
	times.Secured = p.cfg.Group.Now()
	startTunnel(tunnelConfig{
		times: times,
		group: p.cfg.Group, link: l, settings: p.cfg.Settings, owner: pt, peer: peer, buffers: p.bufs, budget: p.cfg.Budget, metrics: p.cfg.Metrics,
		age:    ageLimit(p.cfg.Group.Now(), p.cfg.MaxAge, pt.leaf, l.leaf),
		settle: max(time.Millisecond, p.cfg.HandshakeTimeout-p.cfg.Group.Now().Sub(start)),
		failed: func() { p.dialFailed(e, fail(PhaseHandshake, loop.ErrStopped)) },
	}, pt.ready)
	return nil
}

// CertificateChanged retires the tunnels that were made, or begun, so far: they take no new streams. The Pool sees by itself
// when a handshake used another leaf than those before; this is for who knows earlier, and for new roots.
func (p *Pool) CertificateChanged() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seq++
	p.since = p.seq
	p.retireOld()
}

// Retain retires the tunnels whose target is not there any more: the workload has gone, or has another address or identity. They take
// no new streams. there is asked about NextHop, Accept and PeerUID, once for each key, with the Pool locked.
func (p *Pool) Retain(there func(Target) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seq++
	for key, e := range p.entries {
		if !there(Target{NextHop: key.nextHop, Accept: e.accept, PeerUID: key.uid}) {
			e.since = p.seq
		}
	}
	p.retireOld()
}

// retireOld retires what is old by now. mu is held.
func (p *Pool) retireOld() {
	for pt := range p.tunnels {
		if pt.old() {
			pt.retire()
		}
	}
}

// noteLeaf retires the tunnels that were made with another certificate, if that of pt is newer. mu is held.
func (p *Pool) noteLeaf(pt *pooled) {
	if pt.leaf == nil || pt.cert < p.leafSeq {
		return
	}
	p.leafSeq = pt.cert
	if p.leaf == nil || !p.leaf.Equal(pt.leaf) {
		p.leaf = pt.leaf
		p.retireOld()
	}
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
		for _, w := range slices.Clone(e.waiting) {
			p.answer(e, w, nil, errPoolClosed)
		}
		e.clearBackoff()
		p.forgetIfEmpty(e)
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
	Keys    int // with a tunnel, a dial, a waiter or a dial that failed lately
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
