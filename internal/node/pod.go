package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/underlay"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/stack"
	"ztun.dev/ztun/tun"
)

// A podSpec is a pod to serve.
type podSpec struct {
	client workload.Client
	uid    string // of the pod
	netns  *tun.Netns
}

func (s *podSpec) String() string { return s.client.String() }

// A pod is a pod to serve and, while it is served, its pipeline.
type pod struct {
	spec     podSpec
	log      *slog.Logger
	stateDir string

	mu      sync.Mutex // guards below
	line    *pipeline  // nil: pending
	pending string     // why
	since   time.Time  // when it began to be pending
	held    bool       // it was captured by this process and lost: whatever fails, it stays closed
}

func (p *pod) isHeld() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.held }

func (p *pod) current() *pipeline {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.line
}

// state is the pipeline, or why there is none.
func (p *pod) state() (*pipeline, string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.line, p.pending
}

func (p *pod) set(l *pipeline, pending error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.pending != ""
	p.line, p.pending = l, ""
	if pending != nil {
		p.pending = pending.Error()
		if !was {
			p.since = time.Now()
		}
	}
}

// pendingFor is how long the pod has been pending; false if it is not.
func (p *pod) pendingFor(now time.Time) (time.Duration, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return now.Sub(p.since), p.pending != ""
}

// A pipeline is what serves a pod: what captures it, the proxy, and both ends of HBONE.
type pipeline struct {
	hold     bool // a failed start leaves the pod closed
	choice   choice
	log      *slog.Logger
	backend  backend
	underlay *underlay.Underlay
	listener *underlay.Listener
	proxy    *proxy.Proxy
	server   *hbone.Server
	pool     *hbone.Pool
	steerer  *steerer // nil: all bytes pass through here
	offload  string   // how flows are given back to the kernel, or off

	ownSource bool // applications see the pod itself as their client
}

// startPod builds the pipeline and captures the pod's traffic: the last step, and the first that the pod could notice. If it
// fails, a pod that was open is open again, and one that a process which died had left closed is closed.
func (n *Node) startPod(ctx context.Context, p *pod) (err error) {
	l := &pipeline{hold: p.isHeld()}
	if l.choice, err = n.choose(&p.spec); err != nil {
		return err
	}
	l.log = p.log.With("capture", l.choice.capture.String())
	marks, open := n.marks, n.openTUN
	if l.choice.capture == config.CaptureRedirect {
		marks, open = redirectMarks(), n.openRedirect
	}
	l.ownSource = n.cfg.EnableOrigSrc == config.OrigSrcNever
	u, err := underlay.New(underlay.Config{
		Netns: p.spec.netns, OwnSource: l.ownSource, Group: n.group, Marks: marks, Rand: n.rand, Log: l.log, Descriptors: n.descriptors,
		KeepaliveTime: n.keepaliveTime(), KeepaliveInterval: n.cfg.KeepaliveInterval, KeepaliveRetries: int(n.cfg.KeepaliveRetries),
		NoUserTimeout: !n.cfg.UserTimeoutEnabled,
	})
	if err != nil {
		return err
	}
	l.underlay = u
	if !l.ownSource {
		if err := u.CheckTransparent(); err != nil {
			return fmt.Errorf("%w, or ENABLE_ORIG_SRC=false, with which applications see the pod itself as their client", err)
		}
	}
	if l.listener, err = listenHBONE(u, &p.spec); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.abandon(ctx))
		}
	}()
	handle := func(local func(netip.Addr) bool, kernel proxy.Kernel) (stack.Handler, error) {
		return l.assemble(n, &p.spec.client, u, local, kernel)
	}
	if l.backend, err = open(ctx, l, &p.spec, u, handle); err != nil {
		return err
	}
	if err := l.listener.Start(l.server.Serve); err != nil {
		return err
	}
	l.log.Info("listener established", "address", l.listener.Addr().String(), "component", "inbound", "netns", p.spec.netns.String(), "reason", l.choice.reason, "transparent", !l.ownSource)
	p.set(l, nil)
	return nil
}

// keepaliveTime is negative without keepalive.
func (n *Node) keepaliveTime() time.Duration {
	if !n.cfg.KeepaliveEnabled {
		return -1
	}
	return n.cfg.KeepaliveTime
}

// unlessZero turns a limit whose zero means none into one whose zero means the default.
func unlessZero(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

func listenHBONE(u *underlay.Underlay, spec *podSpec) (*underlay.Listener, error) {
	l, err := u.Listen(netip.AddrPortFrom(netip.IPv6Unspecified(), hbone.Port))
	if errors.Is(err, syscall.EAFNOSUPPORT) { // a kernel without IPv6
		l, err = u.Listen(netip.AddrPortFrom(netip.IPv4Unspecified(), hbone.Port))
	}
	if errors.Is(err, syscall.EADDRINUSE) { // a ztun that holds the port holds the device too, by which it can be named
		err = cmp.Or(tun.InUse(spec.netns, tun.DefaultName), err)
	}
	return l, err
}

// assemble builds the proxy and both ends of HBONE, as a makeHandler does.
func (l *pipeline) assemble(n *Node, c *workload.Client, u *underlay.Underlay, local func(netip.Addr) bool, kernel proxy.Kernel) (_ *proxy.Proxy, err error) {
	self := func() workload.Identity {
		if w := n.store.Snapshot().Local(c); w != nil {
			return w.Identity()
		}
		return workload.Identity{TrustDomain: n.cfg.TrustDomain, Namespace: c.Namespace, ServiceAccount: c.ServiceAccount}
	}
	settings := hbone.Settings{StreamWindow: n.cfg.HTTP2StreamWindowBytes, ConnectionWindow: n.cfg.HTTP2ConnectionWindowBytes, FrameSize: n.cfg.HTTP2FrameBytes}
	l.pool, err = hbone.NewPool(hbone.PoolConfig{
		Group: n.group, Dialer: peers{u}, TLS: n.clientTLS(self), Log: l.log, Settings: settings,
		MaxAge: n.cfg.MaxConnectionAge, MaxStreams: int(n.cfg.PoolMaxStreams), IdleRelease: n.cfg.PoolUnusedRelease,
		ConnectTimeout: n.cfg.ConnectTimeout, HandshakeTimeout: n.cfg.HandshakeTimeout, ResponseTimeout: n.cfg.ResponseTimeout, Budget: n.budget, Metrics: n.tunnels,
	})
	if err != nil {
		return nil, err
	}
	dns, err := n.newDNS(u)
	if err != nil {
		return nil, err
	}
	px, err := proxy.New(proxy.Config{
		Client: c, Local: local, Network: n.cfg.Network, Store: &n.store, Underlay: u, Tunnel: l.pool, Kernel: kernel, OwnSource: l.ownSource, DNS: dns, Resolver: n.resolver,
		Questions: n.questions, Records: n.records, Connections: n.conns, Group: n.group, Rand: n.rand, Log: l.log, ConnectTimeout: n.cfg.ConnectTimeout,
		Budget: n.budget, MaxUnanswered: int(n.cfg.MaxInFlightPerPod), HalfClosedTimeout: unlessZero(n.cfg.HalfClosedTimeout), AppTunnelOnPodAddress: !n.cfg.LocalhostAppTunnel, NoBaggage: !n.cfg.EnableResponseBaggage,
		LogPolicyAtInfo: n.cfg.AuthzPolicyInfoLogging, AvoidFailed: true,
	})
	if err != nil {
		return nil, err
	}
	l.proxy = px
	l.server, err = hbone.NewServer(hbone.ServerConfig{
		Group: n.group, TLS: n.serverTLS(self), Handler: px, Refused: px.Refused, Log: l.log, HandshakeTimeout: n.cfg.HandshakeTimeout, Settings: settings,
		MaxAge: n.cfg.MaxConnectionAge, Resume: l.listener.Resume, Budget: n.budget, Metrics: n.tunnels,
	})
	if err == nil {
		l.listener.Limit(l.server.Accepting)
	}
	return px, err
}

// peers dials the tunnels of a pod.
type peers struct{ u *underlay.Underlay }

var _ hbone.Dialer = peers{}

// Dial implements hbone.Dialer.
func (p peers) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return p.u.DialPeer(ctx, dst)
}

// undoTime is what the undoing of a failed start, and the un-enrolment of a pod, may take although the process is ending.
const undoTime = 10 * time.Second

// abandon takes back a start that has failed.
func (l *pipeline) abandon(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if l.backend != nil {
		err = l.backend.close(ctx, !l.hold && !l.backend.found())
	}
	return errors.Join(err, l.listener.Close(ctx))
}

// run serves the pod until ctx ends or its capture fails.
func (p *pod) run(ctx context.Context) error { return p.current().backend.serve(ctx) }

// drain stops taking new work: peers get GOAWAY.
func (p *pod) drain(ctx context.Context) {
	l := p.current()
	if l == nil {
		return
	}
	if err := l.listener.Close(ctx); err != nil {
		p.log.Warn("listener not closed", "error", err.Error())
	}
	l.proxy.Drain()
	l.server.Drain()
	l.pool.Drain()
}

// fail ends the pipeline of a pod whose capture has failed. The pod stays closed.
func (p *pod) fail(ctx context.Context, cause error) {
	l := p.current()
	p.drain(ctx)
	p.set(nil, cause)
	p.mu.Lock()
	p.held = true
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), failTime)
	defer cancel()
	if err := l.close(ctx, false); err != nil {
		p.log.Warn("remains of a pod that was lost", "error", err.Error())
	}
}

// failTime is what the streams of a pod whose capture failed have to end.
const failTime = time.Second

// end closes both ends of HBONE and the capture. With release, the pod has its network back as it was.
func (p *pod) end(ctx context.Context, release bool) error {
	l := p.current()
	switch {
	case l != nil:
	case release: // it was lost, or could not be captured: what keeps it closed may still be there
		if held := tun.InUse(p.spec.netns, tun.DefaultName); held != nil { // a ztun that was there before us, or has come since
			p.log.Warn("pod left to another process", "reason", held.Error())
			return nil
		}
		if err := tun.Remove(ctx, tun.Config{Netns: p.spec.netns, UID: p.spec.uid, StateDir: p.stateDir, Log: p.log}); err != nil {
			return fmt.Errorf("pod %s: %w", p.spec.String(), err)
		}
		return nil
	default:
		return nil
	}
	release = release || !l.hold && !l.backend.found()
	if err := l.close(ctx, release); err != nil {
		return fmt.Errorf("pod %s: %w", p.spec.String(), err)
	}
	if release {
		p.log.Info("pod left as it was")
	} else {
		p.log.Warn("pod stays captured and closed, as it was found")
	}
	return nil
}

// closeTime is what tunnels without a connection have to say goodbye. A peer that is gone does not answer.
const closeTime = 2 * time.Second

func (l *pipeline) close(ctx context.Context, release bool) error {
	goodbye, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	var g errgroup.Group
	g.Go(func() error { return l.server.Close(goodbye) })
	g.Go(func() error { return l.pool.Close(goodbye) })
	err := g.Wait()
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // what was left has been cut
	}
	err = errors.Join(err, l.backend.close(ctx, release))
	l.proxy.LetGo() // after the last that was handed back
	return err
}
