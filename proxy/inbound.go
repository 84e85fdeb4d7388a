package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
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
	v := c.decide()
	if v.Reason == authz.PolicyUnknown {
		v = p.awaitPolicy(ctx, c)
	}
	c.Policy = v.Policy
	if v.Allowed {
		return nil
	}
	return &PolicyError{Verdict: v}
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

// inbound is the set-up of a plaintext flow to the pod.
func (p *Proxy) inbound(ctx context.Context, req stack.TCPRequest) {
	f := req.Flow()
	facts := telemetry.Facts{Direction: telemetry.Inbound, Src: f.Src, Dst: f.Dst, OriginalDst: f.Dst, AppDst: f.Dst}
	fail := func(err error) {
		p.cfg.Records.Fail(facts, err)
		req.Reset()
	}
	if illegalPort(f.Dst.Port()) {
		fail(errSelfCall)
		return
	}
	self, state, err := p.self(ctx)
	if err != nil {
		fail(err)
		return
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	facts.Source, facts.Destination = state.WorkloadAt(p.cfg.Network, f.Src.Addr()), self
	facts.Service = servedBy(state, self, f.Dst.Port(), "")
	conn := p.conns.open(p.cfg.Records, facts, end)
	upstream, err := p.admit(ctx, conn)
	if err != nil {
		answer(req, err)
		conn.Finish(err)
		return
	}
	p.establish(ctx, req, upstream, conn)
}

// admit decides by policy and connects to the application, from the client's address.
func (p *Proxy) admit(ctx context.Context, c *connection) (loop.Conn, error) {
	if err := p.authorize(ctx, c); err != nil {
		return nil, err
	}
	ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.ConnectTimeout)
	defer cancel()
	app, err := p.cfg.Underlay.Deliver(ctx, c.Src, c.AppDst)
	if err != nil {
		return nil, fmt.Errorf("connection failed: %w", err)
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

// ServeConnect implements hbone.Handler: the set-up of a stream to the pod. The 200 is sent once the application has accepted.
func (p *Proxy) ServeConnect(ctx context.Context, r *hbone.Request) {
	facts := telemetry.Facts{
		Direction: telemetry.Inbound, Protocol: telemetry.HBONE, Src: unmapped(r.Remote), Dst: unmapped(r.Local), OriginalDst: unmapped(r.Local),
		HBONEAddr: r.Authority, SrcIdentity: r.Peer,
	}
	early := func(err error) {
		p.cfg.Records.Fail(facts, err)
		status := http.StatusServiceUnavailable
		if rej, ok := errors.AsType[*rejection](err); ok {
			status = rej.status
		}
		r.Reject(status, err.Error())
	}
	self, state, err := p.self(ctx)
	if err != nil {
		early(err)
		return
	}
	dst, service, err := p.target(state, self, r)
	if err != nil {
		early(err)
		return
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	facts.Source, facts.Destination, facts.DstIdentity = state.WorkloadAt(p.cfg.Network, facts.Src.Addr()), self, self.Identity()
	facts.AppDst, facts.ForwardedHost = dst, forwardedHost(r.Headers.Forwarded)
	if facts.Service = service; service == "" {
		facts.Service = servedBy(state, self, dst.Port(), facts.ForwardedHost)
	}
	conn := p.conns.open(p.cfg.Records, facts, end)
	app, err := p.admit(ctx, conn)
	if err != nil {
		status := http.StatusServiceUnavailable
		if _, ok := errors.AsType[*PolicyError](err); ok {
			status = http.StatusUnauthorized
		}
		r.Reject(status, err.Error())
		conn.Finish(err)
		return
	}
	err = r.Accept(hbone.Headers{Baggage: baggage(self)}, func(s hbone.Stream) { p.relayStream(s, s, app, conn) })
	if err != nil {
		app.Reset()
		conn.Finish(err)
	}
}

// target turns the authority of a CONNECT into the address of the application: the pod's own address, and the port that the
// authority, or the service that it names, means.
func (p *Proxy) target(state *workload.Snapshot, self *workload.Workload, r *hbone.Request) (dst netip.AddrPort, service string, err error) {
	own := unmapped(r.Local).Addr()
	host, port, err := splitAuthority(r.Authority)
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.Unmap() != own && self.AppTunnel == nil && !p.fronts(state, self, ip.Unmap(), own) {
			return netip.AddrPort{}, "", reject(http.StatusBadRequest, "ip mismatch: %s != %s", own, ip.Unmap())
		}
	} else {
		v := state.ServiceNamed(strings.ToLower(host), self.Namespace)
		if v == nil {
			return netip.AddrPort{}, "", reject(http.StatusServiceUnavailable, "no service or workload for hostname: %s", host)
		}
		target := self.Services[v.Key()][port]
		if target == 0 {
			target = v.Ports[port]
		}
		if target == 0 {
			return netip.AddrPort{}, "", reject(http.StatusServiceUnavailable, "requested service %s:%d found, but cannot resolve port", host, port)
		}
		port, service = target, v.Hostname
	}
	if illegalPort(port) {
		return netip.AddrPort{}, "", errSelfCall
	}
	if t := self.AppTunnel; t != nil {
		if t.PROXY {
			return netip.AddrPort{}, "", reject(http.StatusServiceUnavailable, "the workload wants the PROXY protocol, which is not supported")
		}
		if t.Port != 0 {
			port = t.Port
		}
	}
	return netip.AddrPortFrom(own, port), service, nil
}

// fronts reports whether the pod is a waypoint of what has the address: then streams to that address are for it.
func (p *Proxy) fronts(state *workload.Snapshot, self *workload.Workload, ip, own netip.Addr) bool {
	var wp *workload.GatewayAddress
	if v := state.ServiceAt(p.cfg.Network, ip, ""); v != nil {
		wp = v.Waypoint
	} else if w := state.WorkloadAt(p.cfg.Network, ip); w != nil {
		wp = w.Waypoint
	}
	if wp == nil {
		return false
	}
	var via *workload.Service
	var w *workload.Workload
	if wp.Hostname == (workload.ServiceKey{}) {
		via = state.ServiceAt(wp.Address.Network, wp.Address.Addr, "")
		w = state.WorkloadAt(wp.Address.Network, wp.Address.Addr)
	} else {
		via, w = state.Service(wp.Hostname), state.WorkloadNamed(wp.Hostname)
	}
	if via != nil {
		for _, e := range state.Endpoints(via.Key()) {
			if e.Workload == self {
				return true
			}
		}
		return false
	}
	return w != nil && state.WorkloadAt(p.cfg.Network, own) == w
}

// splitAuthority reads host:port.
func splitAuthority(s string) (host string, port uint16, err error) {
	host, service, err := net.SplitHostPort(s)
	n, perr := strconv.ParseUint(service, 10, 16)
	if err != nil || perr != nil || host == "" || n == 0 {
		return "", 0, reject(http.StatusBadRequest, "no valid authority pseudo header: %q", s)
	}
	return host, uint16(n), nil
}

// servedBy guesses the service that an inbound connection was addressed to, among those of the workload: the one that the peer
// named, else the first, by name, that leads to the port.
func servedBy(state *workload.Snapshot, self *workload.Workload, port uint16, named string) string {
	best := ""
	for key, ports := range self.Services {
		if key.Hostname == named {
			return named
		}
		v := state.Service(key)
		if v == nil || best != "" && key.Hostname >= best {
			continue
		}
		for servicePort, target := range v.Ports {
			if own := ports[servicePort]; own != 0 {
				target = own
			}
			if target == port {
				best = key.Hostname
			}
		}
	}
	return best
}
