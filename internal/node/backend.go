package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/underlay"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/stack"
	"ztun.dev/ztun/tun"
)

// A backend captures the traffic of one pod and gives its flows to a handler.
type backend interface {
	serve(ctx context.Context) error               // until ctx ends
	close(ctx context.Context, release bool) error // after serve; release gives the pod its network back, otherwise it stays closed
	found() bool                                   // the pod was captured already, by a process that died
	refusals() refusals
	handedBack() uint64 // flows that were given back to the kernel
}

// refusals count attempts that limits refused.
type refusals struct {
	evicted uint64 // at the pod's limit, for newer ones
	limited uint64 // at the limit of the process
}

// A choice is the backend of a pod and why it is that one.
type choice struct {
	capture config.Capture // tun or redirect
	reason  string
}

// choose picks the backend. It is never none: what cannot be captured as asked for is an error.
func (n *Node) choose(spec *podSpec) (choice, error) {
	found, err := tun.Redirected(spec.netns)
	if err != nil {
		return choice{}, err
	}
	switch {
	case n.cfg.Capture == config.CaptureTUN && found != "":
		return choice{}, fmt.Errorf("capture by tun is not possible beside the redirection of istio-cni (%s): set ZTUN_CAPTURE=redirect or auto", found)
	case n.cfg.Capture == config.CaptureTUN:
		return choice{config.CaptureTUN, "asked for"}, nil
	case n.cfg.Capture == config.CaptureRedirect && found == "":
		return choice{}, errors.New("capture by redirect needs the rules of istio-cni in the pod, and there are none: set ZTUN_CAPTURE=tun or auto")
	case n.cfg.Capture == config.CaptureRedirect:
		return choice{config.CaptureRedirect, "asked for"}, nil
	case found != "":
		return choice{config.CaptureRedirect, "istio-cni has redirected the pod: " + found}, nil
	}
	return choice{config.CaptureTUN, "nothing else captures the pod"}, nil
}

// redirectMarks are those that istio-cni's rules know. The delivery socket carries our own: connection marks bring its replies
// back.
func redirectMarks() tun.Marks {
	return tun.Marks{Own: 0x539, Deliver: 0x539, OwnMask: tun.DefaultMarkMask}
}

// A makeHandler makes the handler of a pod's flows; local knows the pod's addresses, and the kernel, unless it is nil, carries flows.
type makeHandler func(local func(netip.Addr) bool, kernel proxy.Kernel) (stack.Handler, error)

// A tunBackend is a TUN device and the netstack on it.
type tunBackend struct {
	device *tun.Kernel
	stack  *stack.Stack
	icmp   *underlay.ICMPRelay
	mtu    *mtuWatch
	tapped atomic.Bool // somebody captures its packets

	// Where flows are given back to the kernel, which then accepts the others, too; else nil.
	steerer   *steerer
	listeners *underlay.Steered
	forget    func() // takes the pod from those that ends of flows are told
}

// openTUN captures the pod; handle makes the handler of its flows once the pod's addresses can be known. If it fails nothing is left,
// but for a pod that was found captured, or that is held.
func (n *Node) openTUN(ctx context.Context, l *pipeline, spec *podSpec, u *underlay.Underlay, handle makeHandler) (_ backend, err error) {
	b := new(tunBackend)
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close(ctx, !l.hold && !b.found()))
		}
	}()
	b.device, err = tun.Open(ctx, tun.Config{
		Netns: spec.netns, UID: spec.uid, Generation: n.generation, Marks: n.marks, StateDir: n.stateDir, Log: l.log, NoIPv6: !n.cfg.IPv6Enabled,
		FailOpenRoute: n.failOpenRoute, Steering: n.steering,
	})
	if err != nil {
		return nil, err
	}
	u.SetLocal(b.device.Local)
	var (
		steerer stack.Steerer
		kernel  proxy.Kernel
	)
	if b.device.Steers() {
		if err := b.openSteered(n, u); err != nil {
			return nil, err
		}
		steerer, kernel = b.steerer, b.steerer
	}
	handler, err := handle(b.device.Local, kernel)
	if err != nil {
		return nil, err
	}
	if b.steerer != nil {
		l.steerer = b.steerer
		b.forget = n.carriers.add(b.device.Cookie(), l.proxy)
	}
	n.withOneProcessor(func() {
		b.stack, err = stack.New(stack.Config{
			Device: lent{b.device}, Steerer: steerer, Group: n.group, Handler: handler, Log: l.log, Limits: n.limits, MaxInFlight: int(n.cfg.MaxInFlightPerPod), Budget: n.budget,
			KeepaliveTime: n.keepaliveTime(), KeepaliveInterval: n.cfg.KeepaliveInterval, KeepaliveRetries: int(n.cfg.KeepaliveRetries),
			UserTimeout: -1, // it would cut an application that stops reading for a while
		})
	})
	if err != nil {
		return nil, err
	}
	if b.steerer != nil {
		b.steerer.stack = b.stack
		adopted, err := b.steerer.adopt(l.proxy)
		if err != nil {
			return nil, err
		}
		if adopted > 0 {
			l.log.Info("connections that the kernel carries found", "count", adopted)
		}
		if err := b.listeners.Start(b.stack.Accepted); err != nil {
			return nil, err
		}
	} else if !n.noICMPRelay { // which is for the netstack's connections
		if b.icmp, err = u.ListenICMP(b.device.HasIPv6()); err != nil {
			return nil, err
		}
		if err := b.icmp.Start(b.stack.Inject); err != nil {
			return nil, err
		}
	}
	b.mtu = watchMTU(n.group, b.device, b.stack, l.log)
	l.offload = n.offload(b.device)
	l.log.Info("pod captured", "device", tun.DefaultName, "addresses", b.device.Addrs(), "ingress_mark", b.device.MarkedBy(), "offload", l.offload)
	return b, nil
}

// openSteered makes the listeners that flows are led to.
func (b *tunBackend) openSteered(n *Node, u *underlay.Underlay) (err error) {
	b.steerer = &steerer{node: n, device: b.device}
	if b.listeners, err = u.ListenSteered(b.device.HasIPv6()); err != nil {
		return err
	}
	return b.device.SteerListeners(b.listeners.Descriptors())
}

// withOneProcessor calls f, which makes a netstack, while GOMAXPROCS is 1: gVisor starts as many goroutines for each stack, 3.2 KiB
// each, and has no option for it (measured: 59 KiB for a stack with 2, 245 KiB with 64). One is enough for the few segments that
// the reader of the device does not process itself.
func (n *Node) withOneProcessor(f func()) {
	n.processors.Lock()
	defer n.processors.Unlock()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	f()
}

func (b *tunBackend) serve(ctx context.Context) error { return b.stack.Read(ctx) }

func (b *tunBackend) refusals() refusals {
	s := b.stack.Stats()
	return refusals{evicted: s.Drops[stack.DropEvicted], limited: s.Drops[stack.DropLimit]}
}

func (b *tunBackend) handedBack() uint64 { return b.stack.Stats().HandedBack }

func (b *tunBackend) found() bool { return b.device != nil && b.device.Adopted() }

func (b *tunBackend) close(ctx context.Context, release bool) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if b.mtu != nil {
		b.mtu.close()
	}
	if b.icmp != nil {
		err = b.icmp.Close(ctx)
	}
	if b.stack != nil { // while its resets still reach the applications
		err = errors.Join(err, b.stack.Close())
	}
	if b.listeners != nil {
		err = errors.Join(err, b.listeners.Close(ctx))
	}
	if b.forget != nil {
		b.forget()
	}
	switch {
	case b.device == nil:
	case release:
		err = errors.Join(err, b.device.Unenrol(ctx))
	default:
		err = errors.Join(err, b.device.Close())
	}
	return err
}

// A lent device is closed by its backend, after the stack and together with what leads to it.
type lent struct{ *tun.Kernel }

// Close implements tun.Device.
func (lent) Close() error { return nil }

// A redirectBackend is the listeners that istio-cni's rules lead to.
type redirectBackend struct {
	addrs     *tun.Addresses
	listeners *underlay.Redirect
}

func (n *Node) openRedirect(ctx context.Context, l *pipeline, spec *podSpec, u *underlay.Underlay, handle makeHandler) (_ backend, err error) {
	b := new(redirectBackend)
	l.offload = config.OffloadOff.String()
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close(ctx, false))
		}
	}()
	if b.addrs, err = tun.WatchAddresses(spec.netns); err != nil {
		return nil, err
	}
	handler, err := handle(b.addrs.Local, nil)
	if err != nil {
		return nil, err
	}
	ipv6 := n.cfg.IPv6Enabled && b.addrs.Local(netip.IPv6Loopback()) // which is there while IPv6 is on
	b.listeners, err = u.ListenRedirect(underlay.RedirectConfig{Handler: handler, Limits: n.limits, MaxPending: int(n.cfg.MaxInFlightPerPod), IPv6: ipv6})
	if err != nil {
		return nil, err
	}
	if err := b.listeners.Start(); err != nil {
		return nil, err
	}
	l.log.Info("pod captured", "listeners", b.listeners.Addrs(), "addresses", b.addrs.List(), "offload", l.offload)
	return b, nil
}

func (b *redirectBackend) serve(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (b *redirectBackend) handedBack() uint64 { return 0 }

func (b *redirectBackend) refusals() refusals {
	evicted, limited := b.listeners.Refused()
	return refusals{evicted, limited}
}

// found is false: the rules are istio-cni's, which keep the pod closed while nobody listens.
func (b *redirectBackend) found() bool { return false }

func (b *redirectBackend) close(ctx context.Context, _ bool) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if b.listeners != nil {
		err = b.listeners.Close(ctx)
	}
	if b.addrs != nil {
		err = errors.Join(err, b.addrs.Close())
	}
	return err
}
