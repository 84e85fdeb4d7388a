package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"

	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// A PolicyError refuses a connection that policy denies, or ends one that it denies from now on.
type PolicyError struct {
	Verdict authz.Verdict
	Change  bool // the connection was admitted before
}

func (e *PolicyError) Error() string {
	if e.Change {
		return "connection closed due to policy change"
	}
	return "connection closed due to policy rejection: " + e.Verdict.String()
}

// authorize has policy decide about an inbound connection. A policy that the workload lists and that has not arrived is waited
// for, a moment.
func (p *Proxy) authorize(ctx context.Context, c *connection) error {
	start := p.cfg.Group.Now()
	v := c.decide()
	if v.Reason == authz.PolicyUnknown {
		v = p.awaitPolicy(ctx, c)
	}
	c.Took(telemetry.StepPolicy, p.cfg.Group.Now().Sub(start))
	return p.heed(ctx, c, v)
}

// heed tells a decision, and turns a refusal into an error.
func (p *Proxy) heed(ctx context.Context, c *connection, v authz.Verdict) error {
	c.SetPolicy(v.Policy)
	p.tell(ctx, c, v)
	if v.Allowed {
		return nil
	}
	return &PolicyError{Verdict: v}
}

// tell counts and logs a decision. The messages are ztunnel's.
func (p *Proxy) tell(ctx context.Context, c *connection, v authz.Verdict) {
	result := "deny"
	if v.Allowed {
		result = "allow"
	}
	decisions := c.pod.all.metrics.decisions
	decisions.WithLabelValues(result, v.Reason.String()).Inc()
	if v.Missing != "" {
		p.cfg.Log.Warn("policy not yet received, connection admitted", "policy", v.Missing)
	}
	level := slog.LevelDebug
	if p.cfg.LogPolicyAtInfo {
		level = slog.LevelInfo
	}
	for _, trial := range v.DryRun {
		if trial.Action == workload.Deny {
			decisions.WithLabelValues("would_deny", authz.DenyMatched.String()).Inc()
		}
	}
	if v.DryRunMissed {
		decisions.WithLabelValues("would_deny", authz.NoAllowMatched.String()).Inc()
	}
	if !p.cfg.Log.Enabled(ctx, level) {
		return
	}
	log := p.cfg.Log.With("src", c.Src.String(), "identity", c.SrcIdentity.String(), "dst", c.AppDst.String())
	for _, trial := range v.DryRun {
		if trial.Action == workload.Deny {
			log.Log(ctx, level, "dry-run: deny policy match", "policy", trial.Key())
		} else {
			log.Log(ctx, level, "dry-run: allow policy match", "policy", trial.Key())
		}
	}
	if v.DryRunMissed {
		log.Log(ctx, level, "dry-run: no allow policies match")
	}
	switch v.Reason {
	case authz.NoAllowPolicies:
		log.Log(ctx, level, "no allow policies, allow")
	case authz.AllowMatched:
		log.Log(ctx, level, "allow policy match", "policy", v.Policy)
	case authz.DenyMatched:
		log.Log(ctx, level, "deny policy match", "policy", v.Policy)
	case authz.NoAllowMatched:
		log.Log(ctx, level, "no allow policies matched")
	case authz.PolicyUnknown:
		log.Log(ctx, level, "policy not yet received", "policy", v.Policy)
	}
}

func (p *Proxy) awaitPolicy(ctx context.Context, c *connection) authz.Verdict {
	ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.PolicyWait)
	defer cancel()
	c.waiting.Store(true)
	for arrived := false; !arrived; {
		var unsubscribe func()
		err := loop.Await(ctx, func(wake func()) {
			unsubscribe = p.cfg.Store.Subscribe(wake)
			if arrived = c.decide().Reason != authz.PolicyUnknown; arrived {
				wake()
			}
		})
		unsubscribe()
		if err != nil {
			break
		}
	}
	c.waiting.Store(false)
	return c.decide() // once more, because meanwhile nobody else would have closed it
}

// inboundAtOnce decides about a plaintext flow to the pod, and gives it back to the kernel if policy allows it; false: it needs a set-up.
func (p *Proxy) inboundAtOnce(ctx context.Context, req stack.TCPRequest) bool {
	state := p.cfg.Store.Snapshot()
	self := state.Local(p.cfg.Client)
	f := req.Flow()
	if self == nil || !p.carriesInbound() || illegalPort(f.Dst.Port()) {
		return false
	}
	conn := p.conns.open(p.cfg.Records, p.inboundFacts(state, self, f), nil)
	v := conn.decide()
	if v.Reason == authz.PolicyUnknown {
		p.cfg.Group.Go(ctx, func(ctx context.Context) { p.admitPlaintext(ctx, req, conn) })
		return true
	}
	if err := p.heed(ctx, conn, v); err != nil {
		answer(req, err)
		conn.Finish(err)
		return true
	}
	p.handBack(req, conn)
	return true
}

func inboundFlow(f stack.Flow) telemetry.Facts {
	return telemetry.Facts{Direction: telemetry.Inbound, Src: f.Src, Dst: f.Dst, OriginalDst: f.Dst, AppDst: f.Dst}
}

func (p *Proxy) inboundFacts(state *workload.Snapshot, self *workload.Workload, f stack.Flow) telemetry.Facts {
	facts := inboundFlow(f)
	facts.Source, facts.Destination = state.WorkloadAt(p.cfg.Network, f.Src.Addr()), self
	setService(&facts, state, self, servedBy(state, self, f.Dst.Port(), ""))
	return facts
}

// inbound is the set-up of a plaintext flow to the pod.
func (p *Proxy) inbound(ctx context.Context, req stack.TCPRequest) {
	f := req.Flow()
	fail := func(err error) {
		p.fail(inboundFlow(f), err)
		req.Reset()
	}
	if err := CheckPort(f.Dst.Port()); err != nil {
		fail(err)
		return
	}
	self, state, err := p.self(ctx)
	if err != nil {
		fail(err)
		return
	}
	p.admitPlaintext(ctx, req, p.conns.open(p.cfg.Records, p.inboundFacts(state, self, f), nil))
}

// admitPlaintext decides about a plaintext connection, and gives it to the kernel or delivers it.
func (p *Proxy) admitPlaintext(ctx context.Context, req stack.TCPRequest, conn *connection) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	conn.SetCloser(end)
	f := req.Flow()
	err := p.authorize(ctx, conn)
	if err == nil && p.carriesInbound() {
		p.handBack(req, conn)
		return
	}
	var upstream loop.Conn
	if err == nil {
		upstream, err = p.connect(ctx, conn, func(ctx context.Context) (loop.Conn, error) { return p.cfg.Underlay.Deliver(ctx, f.Src, f.Dst) })
	}
	if err != nil {
		answer(req, err)
		conn.Finish(err)
		return
	}
	p.establish(ctx, req, upstream, conn)
}

// admit decides by policy and connects to the application.
func (p *Proxy) admit(ctx context.Context, c *connection, connect func(context.Context) (loop.Conn, error)) (loop.Conn, error) {
	if err := p.authorize(ctx, c); err != nil {
		return nil, err
	}
	return p.connect(ctx, c, connect)
}

// connect connects to the application.
func (p *Proxy) connect(ctx context.Context, c *connection, connect func(context.Context) (loop.Conn, error)) (loop.Conn, error) {
	ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.ConnectTimeout)
	defer cancel()
	start := p.cfg.Group.Now()
	app, err := connect(ctx)
	c.Took(telemetry.StepConnect, p.cfg.Group.Now().Sub(start))
	if err != nil {
		return nil, &connectError{err}
	}
	return app, nil
}

// A rejection is a CONNECT that is answered with an error status.
type rejection struct {
	status int
	reason string
}

func (r *rejection) Error() string { return r.reason }

func reject(status int, format string, args ...any) error {
	return &rejection{status, fmt.Sprintf(format, args...)}
}

// throughGateway reports whether a request has come from another network.
func (p *Proxy) throughGateway(r *hbone.Request) bool {
	return r.Headers.CrossNetwork && !strings.EqualFold(r.Headers.ForwardedNetwork, p.cfg.Network)
}

func (p *Proxy) responseHeaders(self *workload.Workload) (h hbone.Headers) {
	if !p.cfg.NoBaggage {
		h.Baggage = baggage(self)
	}
	return h
}

// Refused records what a peer of the pod sent that led to no request: hbone.ServerConfig has a place for it.
func (p *Proxy) Refused(local, remote netip.AddrPort, err error) {
	if bad, ok := errors.AsType[*hbone.RequestError](err); ok {
		err = reject(http.StatusBadRequest, "%s", bad.Reason)
	}
	p.fail(telemetry.Facts{Direction: telemetry.Inbound, Src: unmapped(remote), OriginalDst: unmapped(local)}, err)
}

// ServeConnect implements hbone.Handler: the set-up of a stream to the pod. The 200 is sent once the application has accepted.
func (p *Proxy) ServeConnect(ctx context.Context, r *hbone.Request) {
	facts := telemetry.Facts{
		Direction: telemetry.Inbound, Protocol: telemetry.HBONE, Src: unmapped(r.Remote), Dst: unmapped(r.Local), OriginalDst: unmapped(r.Local),
		HBONEAddr: r.Authority, SrcIdentity: r.Peer, ForwardedHost: forwardedHost(r.Headers.Forwarded),
		TraceID: traceID(r.Headers.Traceparent), TunnelLocal: unmapped(r.Local),
	}
	early := func(err error) {
		p.fail(facts, err)
		status := http.StatusServiceUnavailable
		if rej, ok := errors.AsType[*rejection](err); ok {
			status = rej.status
		}
		r.Reject(status, ErrorText(err))
	}
	self, state, err := p.self(ctx)
	if err != nil {
		early(err)
		return
	}
	t, err := p.target(state, self, r, facts.ForwardedHost)
	if err != nil {
		early(err)
		return
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	facts.Destination, facts.DstIdentity = self, self.Identity()
	if !p.throughGateway(r) { // whose address says nothing of the source
		facts.Source = state.WorkloadAt(p.cfg.Network, facts.Src.Addr())
	}
	if !p.cfg.NoBaggage {
		facts.Claimed = claimed(r.Headers.Baggage)
	}
	facts.AppDst = t.app
	if t.service != nil {
		facts.Service, facts.ServiceName, facts.ServiceNamespace = t.service.Hostname, t.service.Name, t.service.Namespace
	} else {
		setService(&facts, state, self, servedBy(state, self, t.app.Port(), facts.ForwardedHost))
	}
	conn := p.conns.open(p.cfg.Records, facts, end)
	app, err := p.admit(ctx, conn, func(ctx context.Context) (loop.Conn, error) {
		if t.loopback.IsValid() {
			return p.cfg.Underlay.DialLoopback(ctx, t.loopback)
		}
		return p.cfg.Underlay.Deliver(ctx, facts.Src, t.app)
	})
	if err != nil {
		status := http.StatusServiceUnavailable
		if _, ok := errors.AsType[*PolicyError](err); ok {
			status = http.StatusUnauthorized
		}
		r.Reject(status, ErrorText(err))
		conn.Finish(err)
		return
	}
	err = r.Accept(p.responseHeaders(self), func(s hbone.Stream) {
		// What a socket takes that was just made is more than the header.
		if n, err := app.TryWrite(t.header); n < len(t.header) {
			s.Reset()
			app.Reset()
			conn.Finish(&brokenError{"PROXY header", err})
			return
		}
		p.relayStream(s, s, app, conn)
	})
	if err != nil {
		app.Reset()
		conn.Finish(err)
	}
}
