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

// A pod is the pipeline of one pod: device, stack, proxy, and both ends of HBONE.
type pod struct {
	spec     podSpec
	log      *slog.Logger
	group    *loop.Group
	device   *tun.Kernel
	stack    *stack.Stack
	icmp     *underlay.ICMPRelay
	listener *underlay.Listener
	server   *hbone.Server
	pool     *hbone.Pool
}

// startPod builds the pipeline and captures the pod's traffic: the last step, and the first that the pod could notice. If it
// fails nothing is left.
func (n *Node) startPod(ctx context.Context, spec podSpec) (_ *pod, err error) {
	p := &pod{spec: spec, group: n.group, log: n.log.With("pod", spec.client.String())}
	defer func() {
		if err != nil {
			p.abandon(ctx)
		}
	}()
	u, err := underlay.New(underlay.Config{
		Netns: spec.netns, Group: n.group, Marks: n.marks, Rand: n.rand, Log: p.log,
		KeepaliveTime: n.cfg.KeepaliveTime, KeepaliveInterval: n.cfg.KeepaliveInterval, KeepaliveRetries: int(n.cfg.KeepaliveRetries),
	})
	if err != nil {
		return nil, err
	}
	any6 := netip.AddrPortFrom(netip.IPv6Unspecified(), hbone.Port)
	if p.listener, err = u.Listen(any6); errors.Is(err, errNoIPv6) {
		p.listener, err = u.Listen(netip.AddrPortFrom(netip.IPv4Unspecified(), hbone.Port))
	}
	if errors.Is(err, syscall.EADDRINUSE) { // a ztun that holds the port holds the device too, by which it can be named
		err = cmp.Or(tun.InUse(spec.netns, tun.DefaultName), err)
	}
	if err != nil {
		return nil, err
	}
	device, err := tun.Open(ctx, tun.Config{
		Netns: spec.netns, UID: spec.uid, Generation: n.generation, Marks: n.marks, StateDir: n.stateDir, Log: p.log, NoIPv6: !n.cfg.IPv6Enabled,
		FailOpenRoute: n.failOpenRoute,
	})
	if err != nil {
		return nil, err
	}
	p.device = device
	if err := p.assemble(n, u); err != nil {
		return nil, err
	}
	if p.icmp, err = u.ListenICMP(device.HasIPv6()); err != nil {
		return nil, err
	}
	if err := p.icmp.Start(p.stack.Inject); err != nil {
		return nil, err
	}
	if err := p.listener.Start(p.server.Serve); err != nil {
		return nil, err
	}
	p.log.Info("listener established", "address", p.listener.Addr().String(), "component", "inbound", "netns", spec.netns.String())
	p.log.Info("pod served", "device", tun.DefaultName, "addresses", device.Addrs(), "ingress_mark", device.MarkedBy())
	return p, nil
}

// assemble builds everything above the device.
func (p *pod) assemble(n *Node, u *underlay.Underlay) (err error) {
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
		return err
	}
	dns, err := n.newDNS(u)
	if err != nil {
		return err
	}
	px, err := proxy.New(proxy.Config{
		Client: &p.spec.client, Addrs: p.device.Addrs(), Network: n.cfg.Network, Store: &n.store, Underlay: u, Tunnel: p.pool, DNS: dns,
		Records: n.records, Group: n.group, Rand: n.rand, Log: p.log, ConnectTimeout: n.cfg.ConnectTimeout,
	})
	if err != nil {
		return err
	}
	p.server, err = hbone.NewServer(hbone.ServerConfig{
		Group: n.group, TLS: n.serverTLS(self), Handler: px, Log: p.log, HandshakeTimeout: n.cfg.HandshakeTimeout, Settings: settings,
	})
	if err != nil {
		return err
	}
	p.stack, err = stack.New(stack.Config{
		Device: p.device, Group: n.group, Handler: px, Log: p.log, Limits: n.limits, MaxInFlight: int(n.cfg.MaxInFlightPerPod),
		KeepaliveTime: n.cfg.KeepaliveTime, KeepaliveInterval: n.cfg.KeepaliveInterval, KeepaliveRetries: int(n.cfg.KeepaliveRetries),
		UserTimeout: -1, // it would cut an application that stops reading for a while
	})
	return err
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
func (p *pod) abandon(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	var errs []error
	if p.device != nil {
		errs = append(errs, p.device.Unenrol(ctx))
	}
	if p.stack != nil {
		errs = append(errs, p.stack.Close())
	}
	if p.icmp != nil {
		errs = append(errs, p.icmp.Close(ctx))
	}
	if p.listener != nil {
		errs = append(errs, p.listener.Close(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		p.log.Error("pod not left as it was", "error", err.Error())
	}
}

// run serves the pod until ctx ends.
func (p *pod) run(ctx context.Context) error {
	if err := p.stack.Read(ctx); err != nil {
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

// end closes both ends of HBONE, gives the pod back its network as it was, and closes the stack.
func (p *pod) end(ctx context.Context) error {
	var g errgroup.Group
	g.Go(func() error { return p.server.Close(ctx) })
	g.Go(func() error { return p.pool.Close(ctx) })
	g.Go(func() error { return p.icmp.Close(ctx) })
	err := g.Wait()
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // what was left has been cut
	}
	if left := p.device.Unenrol(ctx); left != nil {
		err = errors.Join(err, left)
	} else {
		p.log.Info("pod left as it was")
	}
	if err = errors.Join(err, p.stack.Close()); err != nil {
		return fmt.Errorf("pod %s: %w", p.spec.String(), err)
	}
	return nil
}
