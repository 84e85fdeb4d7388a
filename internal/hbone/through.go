package hbone

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// OpenThrough is Open for a target on another network (double HBONE): through a stream to the gateway, which is opened as Open does,
// TLS and HTTP/2 begin anew with the peer beyond it, who has to prove one of target.Accept. That tunnel is this one stream's: it ends
// with it, and the stream to the gateway after it. NextHop and PeerUID of target are of no use. Errors are those of Open; what
// went wrong beyond the gateway is an *OpenError with an *InnerError.
func (p *Pool) OpenThrough(ctx context.Context, gateway, target Target) (Stream, error) {
	outer, err := p.Open(ctx, gateway)
	if err != nil {
		return nil, err
	}
	fail := func(phase Phase, err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return &OpenError{Phase: phase, NextHop: gateway.NextHop, Err: &InnerError{err}}
	}
	hs, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.HandshakeTimeout)
	defer cancel()
	start := p.cfg.Group.Now()
	var leaf *x509.Certificate
	l, peer, err := p.secure(hs, outer, target.Accept, &leaf)
	if err != nil {
		return nil, fail(PhaseHandshake, err)
	}
	times := Times{Dialled: start, Connected: start, Secured: p.cfg.Group.Now()}
	response, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.ResponseTimeout)
	defer cancel()
	o := &opening{authority: target.Authority, headers: target.Headers}
	var inner *tunnel // of the loop
	err = loop.Await(response, func(wake func()) {
		o.done = wake
		startTunnel(tunnelConfig{
			times: times, group: p.cfg.Group, link: l, settings: p.cfg.Settings, owner: single{p}, peer: peer, buffers: p.bufs, budget: p.cfg.Budget,
			settle: max(time.Millisecond, p.cfg.HandshakeTimeout-p.cfg.Group.Now().Sub(start)),
			failed: func() { o.err = errTunnelClosed; wake() },
		}, func(t *tunnel) {
			inner = t
			t.openHere(o)
		})
	})
	if err != nil {
		outer.Ref().Post(func() { // behind the start
			if inner != nil {
				inner.abandonHere(o)
			}
		})
		return nil, fail(PhaseResponse, err)
	}
	if o.err != nil {
		return nil, fail(phaseOf(o.err, o.settled), o.err)
	}
	return o.s, nil
}

// secure makes a client's link of a connection that is not attached, to a peer that proves one of the identities; leaf becomes the
// certificate that it was shown. The connection is closed if that fails.
func (p *Pool) secure(ctx context.Context, conn loop.Conn, accept []workload.Identity, leaf **x509.Certificate) (*link, workload.Identity, error) {
	cfg, err := p.cfg.TLS(ctx, accept)
	if err != nil {
		giveUp(conn)
		return nil, workload.Identity{}, &CertificateError{err}
	}
	l, err := handshake(ctx, p.cfg.Group, conn, nil, noteClientCertificate(requireAccepted(cfg, accept), leaf), false)
	if err != nil {
		return nil, workload.Identity{}, err
	}
	l.buffers = p.bufs
	peer, err := accepted(l.leaf, accept)
	if err != nil {
		giveUp(l.conn)
		return nil, workload.Identity{}, err
	}
	return l, peer, nil
}

// An InnerError is what went wrong beyond a gateway.
type InnerError struct{ Err error }

func (e *InnerError) Error() string { return "beyond the gateway: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *InnerError) Unwrap() error { return e.Err }

// A single is the owner of a tunnel that carries one stream and ends with it.
type single struct{ p *Pool }

func (single) request(*tunnel, *stream, string, Headers) {}
func (single) refused(*tunnel, error)                    {}
func (single) peerLimit(*tunnel, uint32)                 {}
func (single) noNewStreams(*tunnel)                      {}
func (single) busyChanged(*tunnel, bool)                 {}
func (single) released(t *tunnel)                        { t.drain() }

func (s single) gone(t *tunnel, err error) {
	if errors.Is(err, errTunnelClosed) {
		return
	}
	s.p.cfg.Log.Debug("tunnel through a gateway lost", "gateway", t.remote, "peer", t.peer.String(), "err", fmt.Sprint(err))
}
