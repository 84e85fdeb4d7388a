package hbone

import (
	"crypto/x509"
	"slices"

	"ztun.dev/ztun/internal/loop"
)

// A pooled is a tunnel of a Pool, and its owner. Its fields are guarded by Pool.mu.
type pooled struct {
	p     *Pool
	e     *entry
	t     *tunnel
	seq   int               // of the beginning of its dial
	cert  int               // seq of when its certificate was asked for
	leaf  *x509.Certificate // that this side presented; nil: none
	limit int               // streams at once
	open  int               // streams, with those that are reserved
	busy  bool              // bulk, or without connection credit: no place for a new stream, if there is another
	done  bool              // takes no new streams
	idle  *loop.Timer       // of the tunnel's loop
}

// ready is called on the loop of a new tunnel.
func (pt *pooled) ready(t *tunnel) {
	p, e := pt.p, pt.e
	p.mu.Lock()
	defer p.mu.Unlock()
	pt.t = t
	e.dials--
	p.dials--
	p.tunnels[pt] = struct{}{}
	if p.draining {
		pt.retire()
		return
	}
	pt.limit = e.limit
	e.clearBackoff()
	e.usable = append(e.usable, pt)
	p.noteLeaf(pt)
	pt.serve(false)
	if pt.old() {
		pt.retire() // good for those who waited for it, and nobody else
	}
	p.dialIfNeeded(e)
	if pt.open == 0 && !pt.done {
		pt.startIdle()
	}
}

// old reports whether the dial began before the certificate, or the workload behind the address, changed.
func (pt *pooled) old() bool {
	l := pt.p.leaf
	return pt.seq < max(pt.p.since, pt.e.since) || l != nil && pt.leaf != nil && !pt.leaf.Equal(l)
}

// serve gives streams of the tunnel to those that wait: of a busy one only if there will be no other, or by force.
func (pt *pooled) serve(force bool) {
	if pt.busy && !force && pt.p.mayAdd(pt.e) {
		return
	}
	for i := 0; !pt.done && pt.open < pt.limit && i < len(pt.e.waiting); {
		if w := pt.e.waiting[i]; pt.seq > w.after {
			pt.p.answer(pt.e, w, pt, nil)
		} else {
			i++
		}
	}
}

// unreserve gives a stream back.
func (pt *pooled) unreserve() {
	pt.open--
	pt.serve(false)
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

// retire takes the tunnel out of use; it closes with its last stream.
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

// peerLimit is also what is expected of the next tunnel of the key, so that it is not given more streams before it speaks.
func (pt *pooled) peerLimit(_ *tunnel, streams uint32) {
	pt.p.mu.Lock()
	defer pt.p.mu.Unlock()
	pt.limit = int(min(int64(streams), int64(pt.p.cfg.MaxStreams)))
	pt.e.limit = max(1, pt.limit)
	pt.serve(false)
	pt.p.dialIfNeeded(pt.e)
}

func (pt *pooled) busyChanged(_ *tunnel, busy bool) {
	pt.p.mu.Lock()
	defer pt.p.mu.Unlock()
	if pt.busy = busy; !busy {
		pt.serve(false)
	}
}

// refused cannot happen: a server's requests are an error of the connection.
func (pt *pooled) refused(*tunnel, error) {}

func (pt *pooled) noNewStreams(*tunnel) {
	pt.p.mu.Lock()
	defer pt.p.mu.Unlock()
	pt.retire()
}

func (pt *pooled) gone(t *tunnel, err error) {
	p := pt.p
	p.cfg.Log.Debug("tunnel closed", "remote", t.remote, "err", err)
	p.mu.Lock()
	pt.retire()
	delete(p.tunnels, pt)
	p.mu.Unlock()
	p.checkIdle()
}
