package proxy

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"time"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// maxEndpoints is how many endpoints of a service one flow tries.
const maxEndpoints = 3

// outboundAtOnce gives a flow that the pod opened back to the kernel, if that may carry it; false: it needs a set-up.
func (p *Proxy) outboundAtOnce(_ context.Context, req stack.TCPRequest) bool {
	generation := p.cfg.Kernel.Generation() // before the state
	state := p.cfg.Store.Snapshot()
	self := state.Local(p.cfg.Client)
	if self == nil {
		return false
	}
	f := req.Flow()
	q := p.query(self, state, f)
	d := p.classify(state, &q)
	if !p.carries(&d, f) {
		return false
	}
	done := p.handBack(req, p.conns.open(p.cfg.Records, outboundFacts(outboundFlow(f), self, &d), nil))
	if done && d.Service == nil { // of a service's endpoints the next is perhaps another one
		p.remember(f, generation)
	}
	return true
}

func outboundFlow(f stack.Flow) telemetry.Facts {
	return telemetry.Facts{Direction: telemetry.Outbound, Src: f.Src, OriginalDst: f.Dst}
}

func (p *Proxy) query(self *workload.Workload, state *workload.Snapshot, f stack.Flow) Query {
	return Query{
		Source: self, From: f.Src.Addr(), Target: f.Dst, Network: p.cfg.Network, Rand: p.cfg.Rand(), Tables: p.tablesFor(self, state),
		Avoid: p.Avoided(),
	}
}

// outbound is the set-up of a flow that the pod opened.
func (p *Proxy) outbound(ctx context.Context, req stack.TCPRequest) {
	f := req.Flow()
	facts := outboundFlow(f)
	self, state, err := p.self(ctx)
	if err != nil {
		p.fail(facts, err)
		req.Reset()
		return
	}
	ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.AttemptTimeout)
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)

	q := p.query(self, state, f)
	var conn *connection
	var failed error
	trace := ""
	for range maxEndpoints {
		times := lookTimes{start: p.cfg.Group.Now()}
		d := p.classify(state, &q)
		times.classified = p.cfg.Group.Now()
		if d.Route == Refuse {
			if failed == nil { // otherwise the failure of the endpoint that was tried says more
				failed = d.Err
			}
			break
		}
		if err := p.lookup(ctx, self, &d); err != nil {
			failed = cmp.Or(failed, err)
			if ctx.Err() != nil || d.Service == nil {
				break
			}
			q.Exclude = append(q.Exclude, d.Destination)
			continue
		}
		if conn != nil { // it names the endpoint that has failed
			conn.Finish(failed)
			conn = nil
		}
		times.found = p.cfg.Group.Now()
		if d.Route != Passthrough && trace == "" {
			trace = traceparent(p.cfg.Rand(), p.cfg.Rand(), p.cfg.Rand())
		}
		known := outboundFacts(facts, self, &d)
		known.TraceID = traceID(trace)
		if d.Route != DoubleHBONE {
			conn = p.conns.open(p.cfg.Records, known, end)
			times.tell(conn)
		}
		if p.carries(&d, f) {
			p.handBack(req, conn)
			return
		}
		upstream, err := p.openUpstream(ctx, &q, &d, f, trace)
		if conn == nil {
			if err == nil {
				learn(&known, upstream)
			}
			conn = p.conns.open(p.cfg.Records, known, end)
			times.tell(conn)
		}
		times.opened(conn, upstream, p.cfg.Group.Now())
		if err == nil {
			p.failures.worked(d.Destination)
			p.establish(ctx, req, upstream, conn)
			return
		}
		failed = err
		others := ctx.Err() == nil && d.Service != nil && d.Destination != nil && tryAnother(err)
		if others && p.cfg.AvoidFailed && blames(err) {
			p.failures.failed(d.Destination, p.cfg.Group.Now())
		}
		if !others || d.Route == DoubleHBONE {
			break
		}
		q.Exclude = append(q.Exclude, d.Destination)
		q.Rand = p.cfg.Rand() // of several waypoints perhaps another
	}
	answer(req, failed)
	if conn == nil {
		p.fail(facts, failed)
		return
	}
	conn.Finish(failed)
}

// lookTimes are when the steps of a flow's set-up began and ended.
type lookTimes struct{ start, classified, found time.Time }

func (t *lookTimes) tell(c *connection) {
	c.Took(telemetry.StepClassify, t.classified.Sub(t.start))
	c.Took(telemetry.StepResolve, t.found.Sub(t.classified))
}

// opened tells what opening the upstream took and, of a stream, which tunnel it has. What was there before the flow took it no time.
func (t *lookTimes) opened(c *connection, upstream loop.Conn, now time.Time) {
	s, ok := upstream.(interface{ Times() hbone.Times })
	if !ok {
		c.Took(telemetry.StepConnect, now.Sub(t.found))
		return
	}
	c.SetTunnel(unmapped(upstream.LocalAddr()))
	at := t.found
	until := func(end time.Time) (d time.Duration) {
		if d = end.Sub(at); d <= 0 {
			return 0
		}
		at = end
		return d
	}
	x := s.Times()
	c.Took(telemetry.StepConnect, until(x.Connected))
	c.Took(telemetry.StepTLS, until(x.Secured))
	c.Took(telemetry.StepResponse, until(now))
}

func outboundFacts(f telemetry.Facts, self *workload.Workload, d *Decision) telemetry.Facts {
	f.Dst, f.Source, f.Destination = d.NextHop, self, d.Destination
	if d.Service != nil {
		f.Service, f.ServiceName, f.ServiceNamespace = d.Service.Hostname, d.Service.Name, d.Service.Namespace
	}
	switch d.Route {
	case OverHBONE:
		f.Protocol = telemetry.HBONE
	case DoubleHBONE: // to the gateway, until it has told who is beyond it: see learn
		f.Protocol = telemetry.DoubleHBONE
	default:
		return f
	}
	f.HBONEAddr = d.Authority()
	f.SrcIdentity, f.DstIdentity = self.Identity(), d.Destination.Identity()
	return f
}

// learn puts who a stream through a gateway has come to in the place of the gateway: what he proved, and what he says of his workload.
func learn(f *telemetry.Facts, upstream loop.Conn) {
	s, ok := upstream.(hbone.Stream)
	if !ok {
		return
	}
	f.DstIdentity = s.Peer()
	if f.Destination = claimed(s.Response().Baggage); f.Destination != nil {
		f.Destination.Name = f.Destination.WorkloadName // ztunnel's log has it so
	}
}

func (p *Proxy) openUpstream(ctx context.Context, q *Query, d *Decision, f stack.Flow, trace string) (loop.Conn, error) {
	if d.Route == Passthrough {
		ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.ConnectTimeout)
		defer cancel()
		return p.cfg.Underlay.Dial(ctx, d.NextHop)
	}
	t := hbone.Target{
		NextHop: d.NextHop, Authority: d.Authority(), Accept: d.Accept(), PeerUID: d.Destination.UID,
		Headers: requestHeaders(q.Source, f.Src, d.Service, trace),
	}
	if d.Route == OverHBONE {
		return p.cfg.Tunnel.Open(ctx, t)
	}
	beyond := hbone.Target{Authority: t.Authority, Accept: d.AcceptBeyond(), Headers: t.Headers}
	beyond.Headers.ForwardedNetwork, beyond.Headers.CrossNetwork = p.cfg.Network, true // also if it is empty
	return p.cfg.Tunnel.OpenThrough(ctx, t, beyond)
}

// establish answers the application's SYN and begins to move bytes.
func (p *Proxy) establish(ctx context.Context, req stack.TCPRequest, upstream loop.Conn, conn *connection) {
	app, err := req.Accept(ctx)
	if err != nil {
		resetUnattached(upstream)
		conn.Finish(err)
		return
	}
	stream, ok := upstream.(hbone.Stream)
	if !ok {
		if p.cfg.Group.Add(p.startRelay(app, upstream, conn)) == nil {
			app.Reset()
			upstream.Reset()
			conn.Finish(loop.ErrStopped)
		}
		return
	}
	if !stream.Ref().Post(func() { p.relayStream(stream, app, stream, conn) }) {
		app.Reset()
		conn.Finish(errTunnelLost)
	}
}

// errTunnelLost is the end of a connection whose tunnel went while its application was answered.
var errTunnelLost = errors.New("the tunnel was lost before the connection was established")

// relayStream begins the relay of a stream, on the loop of its tunnel.
func (p *Proxy) relayStream(stream hbone.Stream, downstream, upstream loop.Conn, conn *connection) {
	if stream.Ref().Removed() {
		downstream.Reset()
		upstream.Reset()
		conn.Finish(errTunnelLost)
		return
	}
	stream.Ref().Child(p.startRelay(downstream, upstream, conn))
}

// resetUnattached resets a Conn that no task has yet: a stream on the loop of its tunnel, any other at once.
func resetUnattached(c loop.Conn) {
	if s, ok := c.(hbone.Stream); ok {
		s.Ref().Post(func() { s.Reset() })
		return
	}
	c.Reset()
}

// unmapped is the address without a zone and in its native family.
func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
