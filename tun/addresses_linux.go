package tun

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// podAddr returns the address of entry unless it is one of loopback or of a link only.
func podAddr(entry *netlink.Addr) (a netip.Addr, ok bool) {
	a, ok = netip.AddrFromSlice(entry.IP)
	a = a.Unmap()
	return a, ok && !a.IsLoopback() && !a.IsLinkLocalUnicast()
}

// podAddrs lists the addresses of the pod, IPv4 before IPv6 and those of ifaces first, in the order of ifaces. Addresses
// of interfaces that are not captured count too: the kernel answers to each of its addresses on every interface.
func podAddrs(h *netlink.Handle, families []int, ifaces []Interface) (addrs []netip.Addr, err error) {
	for _, family := range families {
		list, err := h.AddrList(nil, family)
		if err != nil {
			return nil, fmt.Errorf("addresses: %w", err)
		}
		rank := func(a netlink.Addr) int {
			i := slices.IndexFunc(ifaces, func(i Interface) bool { return i.Index == a.LinkIndex })
			if i < 0 {
				return len(ifaces)
			}
			return i
		}
		slices.SortStableFunc(list, func(a, b netlink.Addr) int { return rank(a) - rank(b) })
		for _, entry := range list {
			if a, ok := podAddr(&entry); ok {
				addrs = append(addrs, a)
			}
		}
	}
	return addrs, nil
}

// localPrefixes lists what the kernel delivers to the netns itself.
func localPrefixes(h *netlink.Handle, families []int) (list []netip.Prefix, err error) {
	want := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}
	for _, family := range families {
		routes, err := h.RouteListFiltered(family, want, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		if err != nil {
			return nil, fmt.Errorf("routes of table local: %w", err)
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			if a, ok := netip.AddrFromSlice(r.Dst.IP); ok {
				ones, _ := maskSize(r.Dst)
				list = append(list, netip.PrefixFrom(a.Unmap(), ones))
			}
		}
	}
	return list, nil
}

// A wayOut is a route of the main table that leads out of the netns.
type wayOut struct {
	to     netip.Prefix
	metric int
	index  int // of the interface; 0 when it has several
}

// waysOut lists them. Where there are rules of others, the main table does not tell the way: then there are none.
func waysOut(h *netlink.Handle, families []int) (list []wayOut, err error) {
	for _, family := range families {
		rules, err := h.RuleList(family)
		if err != nil {
			return nil, fmt.Errorf("rules: %w", err)
		}
		for _, r := range rules {
			if r.Protocol != protocol && r.Protocol != unix.RTPROT_KERNEL {
				return nil, nil
			}
		}
		want := &netlink.Route{Table: unix.RT_TABLE_MAIN}
		routes, err := h.RouteListFiltered(family, want, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("routes of table main: %w", err)
		}
		for _, r := range routes {
			w := wayOut{metric: r.Priority, index: r.LinkIndex}
			if len(r.MultiPath) > 0 || r.Type != unix.RTN_UNICAST {
				w.index = 0
			}
			ones, bits := maskSize(r.Dst)
			if r.Dst == nil || bits == 0 {
				w.to = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
				if family == unix.AF_INET6 {
					w.to = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
				}
			} else if a, ok := netip.AddrFromSlice(r.Dst.IP); ok {
				w.to = netip.PrefixFrom(a, ones)
			}
			list = append(list, w)
		}
	}
	slices.SortStableFunc(list, func(a, b wayOut) int { // the best first
		if d := b.to.Bits() - a.to.Bits(); d != 0 {
			return d
		}
		return a.metric - b.metric
	})
	return list, nil
}

// wayOut returns the interface by which the kernel sends what is for a, or 0 when that is not to be seen in the main table.
func (w *Addresses) wayOut(a netip.Addr) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refresh() != nil {
		return 0
	}
	for i := range w.ways {
		if w.ways[i].to.Contains(a) {
			return w.ways[i].index
		}
	}
	return 0
}

// eventBuffer is the size, in bytes, of the receive buffer for events; the kernel takes its minimum. That something has
// changed is all that is asked of them, and an overflow says so too: the pod's churn costs no memory.
const eventBuffer = 1

// Addresses knows the current addresses of a netns without a goroutine and, where nothing has changed, without asking for them:
// the kernel puts an event for each change into a socket, which is looked at before each answer, but for those to one SYN. Its methods may be called from
// any goroutine.
type Addresses struct {
	families []int
	ifaces   []Interface

	mu     sync.Mutex
	h      *netlink.Handle // of the netns, for any thread; nil after Close
	events int             // descriptor of a netlink socket of the netns
	stale  bool            // read anew before the next answer
	looked time.Duration   // when the events were looked at, on the monotonic clock
	addrs  []netip.Addr
	locals []netip.Prefix
	ways   []wayOut
}

// WatchAddresses returns the Addresses of netns. It ends with Close.
func WatchAddresses(netns *Netns) (a *Addresses, err error) {
	err = netns.Do(func() error {
		a, err = watchAddresses([]int{unix.AF_INET, unix.AF_INET6}, nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("tun: netns %s: %w", netns, err)
	}
	return a, nil
}

// watchAddresses is called in the netns.
func watchAddresses(families []int, ifaces []Interface) (*Addresses, error) {
	w := &Addresses{families: families, ifaces: ifaces, stale: true}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("address events: netlink: %w", err)
	}
	const groups = 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
		1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1) | 1<<(unix.RTNLGRP_LINK-1)
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, eventBuffer),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}))
	if err == nil {
		w.h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("address events: %w", err)
	}
	w.events = fd
	if err := w.refresh(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// watchAddresses makes the Addresses of the pod.
func (s *setup) watchAddresses() (err error) {
	if s.watch, err = watchAddresses(s.families, s.ifaces); err != nil {
		return err
	}
	s.undo.add(s.watch.Close)
	return nil
}

// lookAgain is how old an answer may be: within it one SYN asks four times, and each look at the events is a system call.
const lookAgain = 20 * time.Microsecond

// refresh reads the addresses if they may have changed.
func (w *Addresses) refresh() error {
	now := monotonic()
	if w.h == nil || !w.stale && now-w.looked < lookAgain {
		return nil
	}
	w.looked = now
	var b [1]byte // what has changed is not asked for
	for {
		_, err := unix.Read(w.events, b[:])
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("address events: %w", err)
		}
		w.stale = true
	}
	if !w.stale {
		return nil
	}
	addrs, err := podAddrs(w.h, w.families, w.ifaces)
	if err != nil {
		return err
	}
	locals, err := localPrefixes(w.h, w.families)
	if err != nil {
		return err
	}
	ways, err := waysOut(w.h, w.families)
	if err != nil {
		return err
	}
	w.addrs, w.locals, w.ways, w.stale = addrs, locals, ways, false
	return nil
}

// List returns the addresses, see [Kernel.Addrs]. When they cannot be read, they are those of before, until the next call.
func (w *Addresses) List() []netip.Addr {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.refresh() // stale still
	return slices.Clone(w.addrs)
}

// Local reports whether TCP to a is for the netns itself, see [Kernel.Local].
func (w *Addresses) Local(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.refresh() // stale still
	return slices.ContainsFunc(w.locals, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Close lets go of the events; the answers are those of before from then on. It is idempotent.
func (w *Addresses) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.h == nil {
		return nil
	}
	w.h.Close()
	w.h = nil
	return unix.Close(w.events)
}
