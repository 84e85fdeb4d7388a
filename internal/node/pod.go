package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
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

// A pod is the pipeline of one pod: what captures it, the proxy, and both ends of HBONE.
type pod struct {
	spec     podSpec
	choice   choice
	log      *slog.Logger
	backend  backend
	listener *underlay.Listener
	server   *hbone.Server
	pool     *hbone.Pool
}

// startPod builds the pipeline and captures the pod's traffic: the last step, and the first that the pod could notice. If it
// fails nothing is left.
func (n *Node) startPod(ctx context.Context, spec podSpec) (_ *pod, err error) {
	p := &pod{spec: spec, log: n.log.With("pod", spec.client.String())}
	if p.choice, err = n.choose(&spec); err != nil {
		return nil, err
	}
	p.log = p.log.With("capture", p.choice.capture.String())
	marks := n.marks
	if p.choice.capture == config.CaptureRedirect {
		marks = redirectMarks()
	}
	u, err := underlay.New(underlay.Config{
		Netns: spec.netns, Group: n.group, Marks: marks, Rand: n.rand, Log: p.log,
		KeepaliveTime: n.cfg.KeepaliveTime, KeepaliveInterval: n.cfg.KeepaliveInterval, KeepaliveRetries: int(n.cfg.KeepaliveRetries),
	})
	if err != nil {
		return nil, err
	}
	if p.listener, err = listenHBONE(u, &spec); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.abandon(ctx))
		}
	}()
	handle := func(addrs []netip.Addr) (stack.Handler, error) { return p.assemble(n, u, addrs) }
	if p.choice.capture == config.CaptureRedirect {
		p.backend, err = asBackend(n.openRedirect(&spec, u, p.log, handle))
	} else {
		p.backend, err = asBackend(n.openTUN(ctx, &spec, u, p.log, handle))
	}
	if err != nil {
		return nil, err
	}
	if err := p.listener.Start(p.server.Serve); err != nil {
		return nil, err
	}
	p.log.Info("listener established", "address", p.listener.Addr().String(), "component", "inbound", "netns", spec.netns.String(), "reason", p.choice.reason)
	return p, nil
}

// asBackend keeps a nil pointer from becoming a backend that is not nil.
func asBackend[B backend](b B, err error) (backend, error) {
	if err != nil {
		return nil, err
	}
	return b, nil
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

// assemble builds the proxy and both ends of HBONE, for a pod with these addresses.
func (p *pod) assemble(n *Node, u *underlay.Underlay, addrs []netip.Addr) (_ *proxy.Proxy, err error) {
	self := func() workload.Identity {
		c := &p.spec.client
		if w := n.store.Snapshot().Local(c); w != nil {
			return w.Identity()
		}
		return workload.Identity{TrustDomain: n.cfg.TrustDomain, Namespace: c.Namespace, ServiceAccount: c.ServiceAccount}
	}
	settings := hbone.Settings{StreamWindow: n.cfg.HTTP2StreamWindowBytes, ConnectionWindow: n.cfg.HTTP2ConnectionWindowBytes, FrameSize: n.cfg.HTTP2FrameBytes}
	p.pool, err = hbone.NewPool(hbone.PoolConfig{
		Group: n.group, Dialer: peers{u}, TLS: n.clientTLS(self), Log: p.log, Settings: settings,
		MaxStreams: int(n.cfg.PoolMaxStreams), IdleRelease: n.cfg.PoolUnusedRelease,
		ConnectTimeout: n.cfg.ConnectTimeout, HandshakeTimeout: n.cfg.HandshakeTimeout, ResponseTimeout: n.cfg.ResponseTimeout,
	})
	if err != nil {
		return nil, err
	}
	dns, err := n.newDNS(u)
	if err != nil {
		return nil, err
	}
	px, err := proxy.New(proxy.Config{
		Client: &p.spec.client, Addrs: addrs, Network: n.cfg.Network, Store: &n.store, Underlay: u, Tunnel: p.pool, DNS: dns,
		Records: n.records, Group: n.group, Rand: n.rand, Log: p.log, ConnectTimeout: n.cfg.ConnectTimeout,
	})
	if err != nil {
		return nil, err
	}
	p.server, err = hbone.NewServer(hbone.ServerConfig{
		Group: n.group, TLS: n.serverTLS(self), Handler: px, Log: p.log, HandshakeTimeout: n.cfg.HandshakeTimeout, Settings: settings,
	})
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
func (p *pod) abandon(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if p.backend != nil {
		err = p.backend.close(ctx)
	}
	return errors.Join(err, p.listener.Close(ctx))
}

// run serves the pod until ctx ends.
func (p *pod) run(ctx context.Context) error {
	if err := p.backend.serve(ctx); err != nil {
		return fmt.Errorf("pod %s: %w", p.spec.String(), err)
	}
	return nil
}

// drain stops taking new work: peers get GOAWAY.
func (p *pod) drain(ctx context.Context) {
	if err := p.listener.Close(ctx); err != nil {
		p.log.Warn("listener not closed", "error", err.Error())
	}
	p.server.Drain()
	p.pool.Drain()
}

// end closes both ends of HBONE and gives the pod back its network as it was.
func (p *pod) end(ctx context.Context) error {
	var g errgroup.Group
	g.Go(func() error { return p.server.Close(ctx) })
	g.Go(func() error { return p.pool.Close(ctx) })
	err := g.Wait()
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // what was left has been cut
	}
	if left := p.backend.close(ctx); left != nil {
		err = errors.Join(err, left)
	} else {
		p.log.Info("pod left as it was")
	}
	if err != nil {
		return fmt.Errorf("pod %s: %w", p.spec.String(), err)
	}
	return nil
}
