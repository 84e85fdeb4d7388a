package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/stack"
	"ztun.dev/ztun/tun"
)

// A carriers is the proxies of the pods whose flows the kernel may carry, by the cookie of their namespaces.
type carriers struct {
	unseen atomic.Uint64 // flows that began without us

	mu sync.Mutex // guards below
	by map[uint64]*proxy.Proxy
}

// add returns what takes p out again.
func (c *carriers) add(netns uint64, p *proxy.Proxy) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = make(map[uint64]*proxy.Proxy)
	}
	c.by[netns] = p
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.by[netns] == p {
			delete(c.by, netns)
		}
	}
}

// ended takes the end of a flow in the kernel.
func (c *carriers) ended(e tun.EndedFlow) {
	c.mu.Lock()
	p := c.by[e.Netns]
	c.mu.Unlock()
	if p != nil {
		p.Ended(stack.Flow{Proto: stack.TCP, Src: e.Src, Dst: e.Dst}, proxy.KernelEnd{
			Established: e.Established, Received: e.Received, Sent: e.Sent, Err: e.Err,
		})
	}
}

// begun takes the beginning of a flow that went to a destination that was remembered.
func (c *carriers) begun(e tun.EndedFlow) {
	c.mu.Lock()
	p := c.by[e.Netns]
	c.mu.Unlock()
	if p != nil {
		c.unseen.Add(1)
		p.Begun(stack.Flow{Proto: stack.TCP, Src: e.Src, Dst: e.Dst})
	}
}

// forgetDestinations has everything be decided about anew.
func (n *Node) forgetDestinations() {
	if err := n.steering.Forget(); err != nil {
		n.log.Error("connections may go by an earlier decision for a while", "for", n.cfg.ConnectCache.String(), "error", err.Error())
	}
}

// openSteering loads what leads flows past user space. What the kernel cannot do is an error only if it was asked for by name.
func (n *Node) openSteering() (err error) {
	if n.cfg.Offload == config.OffloadOff {
		if n.cfg.ConnectCache > 0 {
			n.log.Warn("ZTUN_CONNECT_CACHE has no effect: it takes ZTUN_OFFLOAD=sockops", "backend", n.cfg.Offload.String())
		}
		return nil
	}
	n.steering, err = tun.NewSteering(tun.SteeringConfig{
		Mode: n.cfg.Offload.String(), Marks: n.marks, Log: n.log, Ended: n.carriers.ended, Remember: n.cfg.ConnectCache, Begun: n.carriers.begun,
	})
	switch {
	case err == nil:
		n.log.Info("flows are given back to the kernel", "backend", n.steering.Backend())
		if n.cfg.ConnectCache > 0 && !n.steering.Remembers() {
			n.log.Warn("ZTUN_CONNECT_CACHE has no effect: it takes ZTUN_OFFLOAD=sockops", "backend", n.steering.Backend())
		}
	case n.cfg.Offload == config.OffloadAuto:
		n.log.Warn("flows cannot be given back to the kernel: all bytes pass through user space", "reason", err.Error())
		return nil
	default:
		err = fmt.Errorf("ZTUN_OFFLOAD=%s: %w; auto takes what this kernel can", n.cfg.Offload, err)
	}
	return err
}

// offload is how the flows of a device are given back to the kernel.
func (n *Node) offload(d *tun.Kernel) string {
	if !d.Steers() {
		return config.OffloadOff.String()
	}
	return n.steering.Backend()
}

// A steerer leads the flows of one pod. It is what the stack and the proxy know of the kernel.
type steerer struct {
	node   *Node
	device *tun.Kernel
	stack  *stack.Stack
}

var (
	_ stack.Steerer = (*steerer)(nil)
	_ proxy.Kernel  = (*steerer)(nil)
)

// inbound reports whether a flow was opened by somebody else.
func (s *steerer) inbound(f stack.Flow) bool { return s.device.Local(f.Dst.Addr()) }

// HandBack implements stack.Steerer.
func (s *steerer) HandBack(f stack.Flow) error {
	way := tun.ToNetwork
	if s.inbound(f) {
		way = tun.ToApplication
	}
	return s.device.Steer(f.Src, f.Dst, way)
}

// Accept implements stack.Steerer.
func (s *steerer) Accept(f stack.Flow) error {
	way := tun.ToListener
	if s.inbound(f) {
		way = tun.ToListenerInbound
	}
	return s.device.Steer(f.Src, f.Dst, way)
}

// Unsteer implements stack.Steerer.
func (s *steerer) Unsteer(f stack.Flow) { s.device.Unsteer(f.Src, f.Dst) }

// Destroy implements proxy.Kernel.
func (s *steerer) Destroy(local, remote netip.AddrPort) error {
	return s.device.DestroySocket(local, remote)
}

// Remember implements proxy.Kernel.
func (s *steerer) Remember(src netip.Addr, dst netip.AddrPort, generation uint64) error {
	return s.device.Remember(src, dst, generation)
}

// Generation implements proxy.Kernel.
func (s *steerer) Generation() uint64 { return s.node.steering.Generation() }

// ForgetDestinations implements proxy.Kernel.
func (s *steerer) ForgetDestinations() { s.node.forgetDestinations() }

// Forget implements proxy.Kernel.
func (s *steerer) Forget(f stack.Flow) { s.stack.Ended(f) }

// GiveUp implements proxy.Kernel. Of an inbound connection the kernel forgets the SYN, unless it answers without remembering (SYN cookies).
func (s *steerer) GiveUp(f stack.Flow, local, remote netip.AddrPort) bool {
	i, err := s.device.SocketOf(local, remote)
	switch {
	case err == nil && !i.Opening(), err != nil && !errors.Is(err, os.ErrNotExist):
		return false
	case err == nil && s.inbound(f):
		_ = s.device.DestroySocket(local, remote) // it may have come to be meanwhile, or be gone
	}
	s.device.Unsteer(f.Src, f.Dst)
	s.stack.Ended(f)
	return true
}

// adopt begins the records of what the kernel has carried for an earlier process.
// Its counts are those of before, so that nothing is counted twice. What was there before the capture keeps the path that it has.
func (s *steerer) adopt(p *proxy.Proxy) (int, error) {
	list, err := s.handedBack(func(tun.HandedBack) bool { return true })
	if err != nil {
		return 0, err
	}
	return p.Adopt(list, s.device.Adopted()), nil
}

// recover begins the records of connections that were given up, and came to be after all.
func (s *steerer) recover(p *proxy.Proxy) error {
	list, err := s.handedBack(func(h tun.HandedBack) bool { return h.Mark&tun.ApplicationMark != 0 })
	if err == nil {
		p.AdoptUnknown(list)
	}
	return err
}

// handedBack lists what the kernel carries, of which it keeps some.
func (s *steerer) handedBack(keep func(tun.HandedBack) bool) ([]proxy.CarriedFlow, error) {
	found, err := s.device.HandedBack()
	if err != nil {
		return nil, err
	}
	list := make([]proxy.CarriedFlow, 0, len(found))
	for _, h := range found {
		if !keep(h) {
			continue
		}
		f := proxy.CarriedFlow{Flow: stack.Flow{Proto: stack.TCP, Src: h.Src, Dst: h.Dst}, Inbound: h.Inbound, Received: withoutSYN(h.BytesAcked), Sent: h.BytesReceived}
		if h.Inbound {
			f.Received, f.Sent = h.BytesReceived, h.BytesAcked
		}
		list = append(list, f)
	}
	return list, nil
}

// withoutSYN are the acknowledged bytes of who opened a connection.
func withoutSYN(acked uint64) uint64 { return acked - min(acked, 1) }

// sockets are the pod's TCP sockets.
func (s *steerer) sockets(f func(proxy.KernelSocket)) error {
	return s.device.Sockets(func(local, remote netip.AddrPort, i tun.SocketInfo) {
		if i.State == unix.BPF_TCP_TIME_WAIT { // both sides have ended
			return
		}
		f(proxy.KernelSocket{
			Local: local, Remote: remote, Established: !i.Opening(),
			Received: i.BytesReceived, Sent: i.BytesAcked,
		})
	})
}

// hearEnds takes the ends of flows from the kernel until ctx ends.
func (n *Node) hearEnds(ctx context.Context) {
	if err := n.steering.Run(ctx); err != nil {
		n.log.Warn("the kernel does not tell the ends of flows any more: they are found by looking for their sockets", "every", lookEvery.String(), "error", err.Error())
	}
}

// lookEvery is how often the connections that the kernel carries are compared with its sockets: how old their counts are, and how
// long an end that nobody told of stays unnoticed, twice at most.
const lookEvery = 10 * time.Second

// lookEveryUntold is the same for backends without a program of sockets: the kernel tells few ends there, and late; the dump of all sockets then is what finds them.
const lookEveryUntold = time.Second

// watchCarried compares until ctx ends.
func (n *Node) watchCarried(ctx context.Context) {
	every := lookEvery
	if n.steering.Backend() != tun.SteerBySockops {
		every = lookEveryUntold
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, p := range n.listPods() {
			l := p.current()
			if l == nil || l.steerer == nil {
				continue
			}
			err := l.proxy.Look(l.steerer.sockets)
			if l.proxy.MayComeLate() {
				err = errors.Join(err, l.steerer.recover(l.proxy))
			}
			if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrClosed) { // the pod goes
				p.log.Warn("sockets of the pod not listed: what the kernel carries of it is not counted", "error", err.Error())
			}
		}
	}
}
