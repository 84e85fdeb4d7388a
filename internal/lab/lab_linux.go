package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Limits of the addresses: 10.77.<node>.<pod> and fd77::<node>:<pod>, both counted from firstPod.
const (
	maxNodes = 250
	maxPods  = 240
	firstPod = 10
)

// DefaultMTU is that of Ethernet.
const DefaultMTU = 1500

// A Config says how large a lab is. The zero value is not useful: it has no node.
type Config struct {
	Nodes       int // 1 to 250
	PodsPerNode int // 0 to 240
	MTU         int // of every interface, in bytes; 0 is DefaultMTU
	IPv6        bool

	// ResolvConf is /etc/resolv.conf as the programs see it that [Host.Command] starts. Empty leaves them the machine's own.
	ResolvConf string

	// HopMTU adds a router with this MTU, in bytes, to the wire, through which [Lab.Detour] leads packets; 0 adds none.
	HopMTU int

	// TimeWaitBuckets limits the connections in TIME_WAIT of each namespace (tcp_max_tw_buckets), for measurements of many short
	// connections; 0 leaves the kernel's default.
	TimeWaitBuckets int
}

func (c *Config) check() error {
	if c.MTU == 0 {
		c.MTU = DefaultMTU
	}
	switch {
	case c.Nodes < 1 || c.Nodes > maxNodes:
		return fmt.Errorf("lab: %d nodes; want 1 to %d", c.Nodes, maxNodes)
	case c.PodsPerNode < 0 || c.PodsPerNode > maxPods:
		return fmt.Errorf("lab: %d pods for each node; want 0 to %d", c.PodsPerNode, maxPods)
	case c.MTU < 576 || c.MTU > 65535:
		return fmt.Errorf("lab: MTU %d; want 576 to 65535", c.MTU)
	case c.HopMTU != 0 && (c.HopMTU < 576 || c.HopMTU > c.MTU || c.IPv6 && c.HopMTU < 1280):
		return fmt.Errorf("lab: MTU %d of the router; want 576 to %d, with IPv6 1280 at least", c.HopMTU, c.MTU)
	case c.IPv6 && c.MTU < 1280:
		return fmt.Errorf("lab: MTU %d; IPv6 wants 1280 at least (RFC 8200, section 5)", c.MTU)
	}
	return nil
}

// A Lab is a network. Close takes it down.
type Lab struct {
	cfg        Config
	congestion string
	wire       *Wire
	hop        *Host // nil: none
	nodes      []*Host
	pods       [][]*Host // by node

	mu     sync.Mutex // guards below
	closed bool
	cmds   map[*Cmd]struct{}
	sniffs map[*Sniffer]struct{}
}

// New builds a lab. The end of ctx ends the building only.
func New(ctx context.Context, cfg Config) (*Lab, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	l := &Lab{cfg: cfg, cmds: make(map[*Cmd]struct{}), sniffs: make(map[*Sniffer]struct{})}
	if err := l.build(ctx); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func (l *Lab) build(ctx context.Context) error {
	proc, err := openProcfs()
	if err != nil {
		return err
	}
	defer proc.close()

	wire, err := l.newHost("wire", 0, 1)
	if err != nil {
		return err
	}
	l.wire = &Wire{wire}
	if err := l.wire.bridge(proc); err != nil {
		return err
	}
	if l.cfg.HopMTU != 0 {
		if err := l.addHop(proc); err != nil {
			return err
		}
	}
	for i := range l.cfg.Nodes {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("lab: %w", err)
		}
		node, err := l.newHost(nodeName(i), i+1, 1)
		if err != nil {
			return err
		}
		l.nodes, l.pods = append(l.nodes, node), append(l.pods, nil)
		if err := node.bridge(proc); err != nil {
			return err
		}
		if err := l.wire.plug(node.Name, i, node, "up0"); err != nil {
			return err
		}
		if err := node.join("up0", "br0"); err != nil {
			return err
		}
		for j := range l.cfg.PodsPerNode {
			pod, err := l.newHost(fmt.Sprintf("%s/pod-%d", node.Name, j), i+1, firstPod+j)
			if err != nil {
				return err
			}
			l.pods[i] = append(l.pods[i], pod)
			if err := pod.pod(proc, node, j); err != nil {
				return err
			}
		}
	}
	for _, h := range l.hosts() {
		if err := h.do("interfaces", func() error { return waitUp(ctx) }); err != nil {
			return err
		}
	}
	return nil
}

// waitUp waits until all cables of a namespace carry packets. Before, a bridge drops what it gets.
func waitUp(ctx context.Context) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		down := ""
		for _, link := range links {
			if link.Type() == "veth" && link.Attrs().OperState != netlink.OperUp {
				down = link.Attrs().Name
			}
		}
		if down == "" {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s does not come up: %w", down, ctx.Err())
		}
	}
}

// hosts are all of them, the wire's and the nodes' first.
func (l *Lab) hosts() []*Host {
	var all []*Host
	if l.wire != nil {
		all = append(all, l.wire.Host)
	}
	if l.hop != nil {
		all = append(all, l.hop)
	}
	return append(append(all, l.nodes...), l.Pods()...)
}

// nodeName is node-a to node-z, then node-26 and so on.
func nodeName(i int) string {
	if i < 26 {
		return "node-" + string(rune('a'+i))
	}
	return fmt.Sprintf("node-%d", i)
}

func (l *Lab) newHost(name string, node, number int) (*Host, error) {
	ns, err := newNetns()
	if err != nil {
		return nil, err
	}
	h := &Host{Name: name, Addr4: netip.AddrFrom4([4]byte{10, 77, byte(node), byte(number)}), lab: l, ns: ns}
	if l.cfg.IPv6 {
		h.Addr6 = netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 13: byte(node), 15: byte(number)})
	}
	return h, nil
}

// bridge makes a namespace one of a node or of the wire: br0 with the host's addresses.
func (h *Host) bridge(p *procfs) error {
	return h.do("bridge br0", func() error {
		if err := h.lab.sysctls(p, h != h.lab.wireHost()); err != nil {
			return err
		}
		off := false
		br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", MTU: h.lab.cfg.MTU}, MulticastSnooping: &off}
		if err := netlink.LinkAdd(br); err != nil {
			if errors.Is(err, unix.EOPNOTSUPP) {
				return fmt.Errorf("%w; load the kernel module bridge", err)
			}
			return err
		}
		if err := h.configure("br0"); err != nil {
			return err
		}
		if h == h.lab.wireHost() {
			return nil
		}
		// Where the lab ends, say so at once instead of letting connections time out.
		return h.eachFamily(func(_ netip.Addr, all *net.IPNet) error {
			return netlink.RouteAdd(&netlink.Route{Dst: all, Type: unix.RTN_UNREACHABLE})
		})
	})
}

func (l *Lab) wireHost() *Host {
	if l.wire == nil {
		return nil
	}
	return l.wire.Host
}

// firstPort is the index of the first port of a bridge. The kernel acts on a change of a veth's carrier at once if its two
// ends have different indexes, else within a second (linkwatch_urgent_event, net/core/link_watch.c).
const firstPort = 1000

// plug makes a veth from port of h's br0, where it is called name, to the interface peer of another host.
func (h *Host) plug(name string, port int, other *Host, peer string) error {
	return h.do("veth "+name, func() error {
		err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs:     netlink.LinkAttrs{Name: name, Index: firstPort + port, MTU: h.lab.cfg.MTU},
			PeerName:      peer,
			PeerMTU:       uint32(h.lab.cfg.MTU),
			PeerNamespace: netlink.NsFd(other.ns.Fd()),
		})
		if err != nil {
			if errors.Is(err, unix.EOPNOTSUPP) {
				return fmt.Errorf("%w; load the kernel module veth", err)
			}
			return err
		}
		return join(name, "br0")
	})
}

func (h *Host) join(name, bridge string) error {
	return h.do("join "+name, func() error { return join(name, bridge) })
}

func join(name, bridge string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	br, err := netlink.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("%s: %w", bridge, err)
	}
	if err := netlink.LinkSetMaster(link, br); err != nil {
		return fmt.Errorf("%s: master %s: %w", name, bridge, err)
	}
	return netlink.LinkSetUp(link)
}

// pod makes a namespace one of a pod: eth0 on the node's bridge, and its default route.
func (h *Host) pod(p *procfs, node *Host, number int) error {
	if err := h.do("sysctls", func() error { return h.lab.sysctls(p, false) }); err != nil {
		return err
	}
	if err := node.plug(fmt.Sprintf("pod%d", number), number, h, "eth0"); err != nil {
		return err
	}
	return h.do("eth0", func() error {
		if err := h.configure("eth0"); err != nil {
			return err
		}
		return h.eachFamily(func(self netip.Addr, all *net.IPNet) error {
			gw := node.Addr4
			if self.Is6() {
				gw = node.Addr6
			}
			return netlink.RouteAdd(&netlink.Route{Dst: all, Gw: gw.AsSlice()})
		})
	})
}

// configure brings lo and one interface up and gives it the host's addresses.
func (h *Host) configure(name string) error {
	for _, n := range []string{"lo", name} {
		link, err := netlink.LinkByName(n)
		if err != nil {
			return fmt.Errorf("%s: %w", n, err)
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("%s: up: %w", n, err)
		}
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return h.eachFamily(func(self netip.Addr, _ *net.IPNet) error {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: self.AsSlice(), Mask: net.CIDRMask(16, 32)}}
		if self.Is6() {
			a.Mask, a.Flags = net.CIDRMask(64, 128), unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("%s: address %s: %w", name, self, err)
		}
		return nil
	})
}

// eachFamily calls f for each address of the host, with the prefix that holds all addresses of the family.
func (h *Host) eachFamily(f func(self netip.Addr, all *net.IPNet) error) error {
	if err := f(h.Addr4, &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}); err != nil {
		return err
	}
	if !h.Addr6.IsValid() {
		return nil
	}
	return f(h.Addr6, &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)})
}

// CongestionControl is that of TCP in every namespace: cubic, or reno where the machine does not allow that.
func (l *Lab) CongestionControl() string { return l.congestion }

// MTU is that of every interface, in bytes.
func (l *Lab) MTU() int { return l.cfg.MTU }

// Wire is the namespace between the nodes.
func (l *Lab) Wire() *Wire { return l.wire }

// Node returns node i, counted from 0.
func (l *Lab) Node(i int) *Host { return l.nodes[i] }

// Pod returns pod j of node i, both counted from 0.
func (l *Lab) Pod(i, j int) *Host { return l.pods[i][j] }

// Pods returns all pods, those of the first node first.
func (l *Lab) Pods() []*Host {
	var all []*Host
	for _, pods := range l.pods {
		all = append(all, pods...)
	}
	return all
}

// Close kills what was started by [Host.Command] and still runs, waits for it, ends the sniffers and lets go of the namespaces.
// The kernel removes these, with all that is in them, once the sockets are closed that callers hold. It may be called again.
func (l *Lab) Close() error {
	l.mu.Lock()
	l.closed = true
	var cmds []*Cmd
	for c := range l.cmds {
		cmds = append(cmds, c)
	}
	var sniffs []io.Closer
	for s := range l.sniffs {
		sniffs = append(sniffs, s)
	}
	l.mu.Unlock()

	for _, c := range cmds {
		c.kill()
	}
	for _, c := range cmds {
		<-c.done
	}
	for _, s := range sniffs {
		_ = s.Close()
	}
	var errs []error
	for _, h := range l.hosts() {
		if err := h.ns.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			errs = append(errs, fmt.Errorf("lab: %s: %w", h.Name, err))
		}
	}
	return errors.Join(errs...)
}
