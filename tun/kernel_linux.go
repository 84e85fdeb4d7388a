package tun

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A Kernel is a TUN device of the kernel that captures the traffic of a network namespace. It is made by [Open].
type Kernel struct {
	cfg      Config // Netns is a descriptor of the Kernel's own
	index    int    // of the device
	ifaces   []Interface
	addrs    []netip.Addr
	families []int
	state    *state
	markedBy string

	mu sync.RWMutex // guards fd; held for reading during I/O, which never blocks
	fd int          // -1 after Close

	tooLong, full atomic.Uint64
}

var _ Device = (*Kernel)(nil)

// An Interface is one whose traffic is captured.
type Interface struct {
	Name  string
	Index int
	MTU   int // bytes

	v4, v6     bool // has an address
	advertised bool // has a default route from a router advertisement
}

func (i Interface) has(family int) bool {
	if family == unix.AF_INET {
		return i.v4
	}
	return i.v6
}

// Drops counts the packets that a device has lost, by reason.
type Drops struct {
	TooLong uint64 // longer than the buffer of the reader
	Full    uint64 // the kernel had no room for what was written
}

// Open captures the traffic of cfg.Netns and returns the device to which it is led. When it returns an error, or ctx ends
// meanwhile, everything that it has done is taken back.
//
// What a dead process left is adopted. A device that a living process holds, and rules, routes or a device of others that
// stand where ztun's have to be, are errors that name them.
func Open(ctx context.Context, cfg Config) (*Kernel, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	own, err := cfg.Netns.dup()
	if err != nil {
		return nil, err
	}
	cfg.Netns = own
	s := &setup{cfg: cfg, log: cfg.Log.With("netns", cfg.Netns.String(), "uid", cfg.UID), fd: -1}
	if err := cfg.Netns.Do(func() error { return s.run(ctx) }); err != nil {
		err = fmt.Errorf("tun: netns %s: %w", cfg.Netns, err)
		return nil, errors.Join(err, own.Close())
	}
	return &Kernel{
		cfg: cfg, index: s.link.Attrs().Index, ifaces: s.ifaces, addrs: s.addrs, families: s.families,
		state: s.state, markedBy: s.markedBy, fd: s.fd,
	}, nil
}

// complete fills in defaults and checks all that can be checked without the kernel's help.
func (c *Config) complete() error {
	if c.Netns == nil {
		return errors.New("tun: config: Netns is missing")
	}
	if c.UID == "" || strings.ContainsAny(c.UID, " \n") {
		return fmt.Errorf("tun: config: UID %q is not a pod uid", c.UID)
	}
	if c.Name == "" {
		c.Name = DefaultName
	}
	if len(c.Name) >= unix.IFNAMSIZ || strings.ContainsAny(c.Name, "/ %:\n") || c.Name == "." || c.Name == ".." {
		return fmt.Errorf("tun: config: Name %q is not the name of an interface", c.Name)
	}
	if c.MTU != 0 && (c.MTU < 1280 || c.MTU > MaxPacket) { // RFC 8200, section 5
		return fmt.Errorf("tun: config: MTU %d is not between 1280 and %d", c.MTU, MaxPacket)
	}
	m := &c.Marks
	if m.OwnMask == 0 {
		m.OwnMask = DefaultMarkMask
	}
	if m.Own == 0 || m.Deliver == 0 || m.Own == m.Deliver || (m.Own|m.Deliver)&^m.OwnMask != 0 {
		return fmt.Errorf("tun: config: Marks %#x and %#x are not two different non-zero values inside %#x", m.Own, m.Deliver, m.OwnMask)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c.notOwnNetns()
}

// notOwnNetns refuses the namespace of this process and, where that is to be seen, of the machine: capturing its own
// traffic, a proxy that dies cuts off the machine. What cannot be told apart is refused too.
//
// The calling thread is asked, not /proc/self: that is the first thread of the process, which may be just the one that is
// in a pod's netns, or was left there.
func (c *Config) notOwnNetns() error {
	var own, host unix.Stat_t
	if err := unix.Stat(threadNetns, &own); err != nil {
		return fmt.Errorf("tun: netns %s: cannot be told from this process's own: %s: %w; mount /proc", c.Netns, threadNetns, err)
	}
	if c.Netns.is(&own) {
		return fmt.Errorf("tun: netns %s: is this process's own network namespace; name that of a pod", c.Netns)
	}
	if err := unix.Stat("/proc/1/ns/net", &host); err == nil && c.Netns.is(&host) { // only a privileged process may look
		return fmt.Errorf("tun: netns %s: is the host's own network namespace; name that of a pod", c.Netns)
	}
	return nil
}

// A setup is one run of Open, Unenrol or Remove. All its methods run on a thread in the netns.
type setup struct {
	cfg  Config
	log  *slog.Logger
	h    *netlink.Handle
	proc *procfs
	undo undo

	// what was found
	link         netlink.Link // the device; nil until it exists
	loopback     int          // index
	linkNames    []string     // all but the device
	ifaces       []Interface  // captured
	addrs        []netip.Addr // of the pod
	families     []int        // AF_INET, AF_INET6: those that the pod has an address of
	src          map[int]netip.Addr
	mtu          int
	leftovers    bool // an earlier start has set up something
	clsactBefore []string

	// what was done
	fd       int
	adopted  bool
	state    *state
	before   []sysctl
	markedBy string
}

func (s *setup) has(family int) bool { return slices.Contains(s.families, family) }

// connect opens what every step needs.
func (s *setup) connect() (closeAll func(), err error) {
	if s.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if s.proc, err = openProcfs(); err != nil {
		s.h.Close()
		return nil, err
	}
	return func() { s.proc.close(); s.h.Close() }, nil
}

// run does all of Open. The order is such that at every moment packets go where they went before, or where they should,
// or nowhere.
func (s *setup) run(ctx context.Context) (err error) {
	closeAll, err := s.connect()
	if err != nil {
		return err
	}
	defer closeAll()
	defer func() {
		if err != nil {
			err = errors.Join(err, s.undo.run())
		}
	}()
	steps := []func() error{s.inspect, s.openDevice, s.keepState, s.configureDevice, s.setSysctls, s.setMark}
	steps = append(steps, s.eachFamily(s.setRoutes), s.eachFamily(s.setRules))
	for _, step := range append(steps, func() error { return s.selfCheck(ctx) }) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if !s.has(unix.AF_INET6) {
		s.log.Info("IPv6 is not captured: the pod has no IPv6 address")
	}
	return nil
}

func (s *setup) eachFamily(f func(family int) error) func() error {
	return func() error {
		for _, family := range s.families {
			if err := f(family); err != nil {
				return err
			}
		}
		return nil
	}
}

// inspect finds out what is there, changes nothing, and refuses what is in the way.
func (s *setup) inspect() (err error) {
	if s.link, err = findDevice(s.h, s.cfg.Name); err != nil {
		return err
	}
	if err := s.findInterfaces(); err != nil {
		return err
	}
	if err := s.findAddresses(); err != nil {
		return err
	}
	if s.leftovers, err = s.findLeftovers(); err != nil {
		return err
	}
	for _, i := range s.ifaces {
		has, err := s.hasClsact(i.Index)
		if err != nil {
			return err
		}
		ours, err := s.filters(i.Index)
		if err != nil {
			return err
		}
		if has && len(ours) == 0 { // with a filter of an earlier start, it was that which made the qdisc
			s.clsactBefore = append(s.clsactBefore, i.Name)
		}
	}
	return nil
}

// findInterfaces chooses the interfaces to capture.
func (s *setup) findInterfaces() error {
	links, err := s.h.LinkList()
	if err != nil {
		return fmt.Errorf("links: %w", err)
	}
	for _, link := range links {
		a := link.Attrs()
		if a.RawFlags&unix.IFF_LOOPBACK != 0 {
			s.loopback = a.Index
		}
		if s.link != nil && a.Index == s.link.Attrs().Index {
			continue
		}
		s.linkNames = append(s.linkNames, a.Name)
		if s.cfg.Interface != "" && a.Name != s.cfg.Interface || a.RawFlags&(unix.IFF_LOOPBACK|unix.IFF_UP) != unix.IFF_UP {
			continue
		}
		s.ifaces = append(s.ifaces, Interface{Name: a.Name, Index: a.Index, MTU: a.MTU})
		s.mtu = max(s.mtu, a.MTU)
	}
	if s.cfg.MTU != 0 {
		s.mtu = s.cfg.MTU
	}
	s.mtu = min(s.mtu, MaxPacket)
	switch {
	case len(s.ifaces) > 0:
		return nil
	case s.cfg.Interface != "" && !slices.Contains(s.linkNames, s.cfg.Interface):
		return fmt.Errorf("interface %s: does not exist; there are %s", s.cfg.Interface, strings.Join(s.linkNames, ", "))
	case s.cfg.Interface != "":
		return fmt.Errorf("interface %s: is loopback, or not up", s.cfg.Interface)
	}
	return errors.New("no interface to capture is up; is the pod's network ready?")
}

// findAddresses finds the pod's addresses, those of the interface with the default route first, and with them the
// families to capture. Addresses of interfaces that are not captured count too: the kernel answers to each of its addresses
// on every interface.
func (s *setup) findAddresses() error {
	s.src = make(map[int]netip.Addr)
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		if family == unix.AF_INET6 && s.cfg.NoIPv6 {
			continue
		}
		if err := s.findDefaultRoute(family); err != nil {
			return err
		}
		list, err := s.h.AddrList(nil, family)
		if err != nil {
			return fmt.Errorf("addresses: %w", err)
		}
		captured := false
		rank := func(a netlink.Addr) int {
			i := slices.IndexFunc(s.ifaces, func(i Interface) bool { return i.Index == a.LinkIndex })
			if i < 0 {
				return len(s.ifaces)
			}
			return i
		}
		slices.SortStableFunc(list, func(a, b netlink.Addr) int { return rank(a) - rank(b) })
		for _, entry := range list {
			a, ok := netip.AddrFromSlice(entry.IP)
			if a = a.Unmap(); !ok || s.link != nil && entry.LinkIndex == s.link.Attrs().Index {
				continue
			}
			at := rank(entry)
			if at < len(s.ifaces) {
				if family == unix.AF_INET {
					s.ifaces[at].v4 = true
				} else {
					s.ifaces[at].v6 = true
				}
			}
			if a.IsLoopback() || a.IsLinkLocalUnicast() {
				continue
			}
			captured = captured || at < len(s.ifaces)
			s.addrs = append(s.addrs, a)
			usable := entry.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DEPRECATED|unix.IFA_F_DADFAILED) == 0
			if !s.src[family].IsValid() && at < len(s.ifaces) && usable {
				s.src[family] = a
			}
		}
		if captured {
			s.families = append(s.families, family)
		}
	}
	s.addrs = slices.DeleteFunc(s.addrs, func(a netip.Addr) bool { return !s.has(familyOf(a)) })
	if len(s.families) == 0 {
		return errors.New("no interface to capture has an address; is the pod's network ready?")
	}
	return nil
}

// findDefaultRoute puts the captured interface that has the default route first.
func (s *setup) findDefaultRoute(family int) error {
	routes, err := s.h.RouteList(nil, family)
	if err != nil {
		return fmt.Errorf("routes: %w", err)
	}
	first := true
	for _, r := range routes {
		if ones, _ := maskSize(r.Dst); ones != 0 || r.Type != unix.RTN_UNICAST {
			continue
		}
		at := slices.IndexFunc(s.ifaces, func(i Interface) bool { return i.Index == r.LinkIndex })
		if at < 0 {
			continue
		}
		if family == unix.AF_INET6 && r.Protocol == unix.RTPROT_RA {
			s.ifaces[at].advertised = true
		}
		if first && family == unix.AF_INET {
			s.ifaces[0], s.ifaces[at] = s.ifaces[at], s.ifaces[0]
		}
		first = false
	}
	return nil
}

// findLeftovers reports whether an earlier start has left something, and refuses what is of others.
func (s *setup) findLeftovers() (found bool, err error) {
	found = s.link != nil
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := s.h.RuleList(family)
		if err != nil {
			return false, fmt.Errorf("rules: %w", err)
		}
		if err := foreignRule(rules); err != nil {
			return false, err
		}
		routes, err := s.ourTables(family)
		if err != nil {
			return false, err
		}
		if err := s.foreignRoute(routes); err != nil {
			return false, err
		}
		// What is in our tables is ours by now.
		found = found || len(routes) > 0 || slices.ContainsFunc(rules, func(r netlink.Rule) bool { return r.Protocol == protocol })
	}
	return found, nil
}

// FD implements [Device]; it is -1 after Close.
func (k *Kernel) FD() int {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.fd
}

// Notify does nothing: the descriptor becomes readable.
func (k *Kernel) Notify(func()) {}

// BatchSize implements [Device].
func (k *Kernel) BatchSize() int { return 64 }

// Addrs returns the addresses of the pod whose inbound TCP is captured, those of the interface with the default route
// first.
func (k *Kernel) Addrs() []netip.Addr { return slices.Clone(k.addrs) }

// Interfaces returns the captured interfaces, the one with the default route first.
func (k *Kernel) Interfaces() []Interface { return slices.Clone(k.ifaces) }

// HasIPv4 reports whether IPv4 is captured: whether the pod has an address.
func (k *Kernel) HasIPv4() bool { return slices.Contains(k.families, unix.AF_INET) }

// HasIPv6 reports whether IPv6 is captured.
func (k *Kernel) HasIPv6() bool { return slices.Contains(k.families, unix.AF_INET6) }

// MarkedBy returns MarkedByBPF or MarkedByNFT.
func (k *Kernel) MarkedBy() string { return k.markedBy }

// Drops returns the packets lost so far.
func (k *Kernel) Drops() Drops { return Drops{TooLong: k.tooLong.Load(), Full: k.full.Load()} }

func (k *Kernel) isClosed() bool { return k.FD() < 0 }

// Close lets go of the descriptor, as the death of the process does: the device and all that leads to it stay, and the pod
// gets "no route to host" until a later Open or Remove. See [Kernel.Unenrol].
func (k *Kernel) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fd < 0 {
		return nil
	}
	err := errors.Join(unix.Close(k.fd), k.cfg.Netns.Close())
	k.fd = -1
	if err != nil {
		return fmt.Errorf("tun: device %s: close: %w", k.cfg.Name, err)
	}
	return nil
}

// Unenrol ends the capture: everything is taken back in the reverse order, the sysctls get their earlier values, and the
// device is deleted and closed. The application's traffic flows as if ztun had never been. It is not interrupted by ctx
// once it has begun. After an error it may be called again, until Close.
func (k *Kernel) Unenrol(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if k.isClosed() {
		return os.ErrClosed
	}
	s := &setup{cfg: k.cfg, log: k.cfg.Log, fd: -1, state: k.state}
	err := k.cfg.Netns.Do(func() error {
		closeAll, err := s.connect()
		if err != nil {
			return err
		}
		defer closeAll()
		if s.link, err = findDevice(s.h, k.cfg.Name); err != nil {
			return err
		}
		if s.link != nil && s.link.Attrs().Index != k.index {
			return fmt.Errorf("device %s: is another one by now; use Remove", k.cfg.Name)
		}
		return s.remove()
	})
	if err != nil {
		return fmt.Errorf("tun: netns %s: unenrol: %w", k.cfg.Netns, err)
	}
	return k.Close()
}

// Remove takes away what a dead process has left in cfg.Netns, as [Kernel.Unenrol] does for a living one. It needs Netns,
// Name and StateDir of cfg only. It does nothing where there is nothing, and refuses to disturb a living process, which it
// names. Without the file of the earlier values sysctls stay as they are.
func Remove(ctx context.Context, cfg Config) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if cfg.UID == "" {
		cfg.UID = "-"
	}
	if cfg.Marks == (Marks{}) {
		cfg.Marks = Marks{Own: 1, Deliver: 2} // not used
	}
	if err := cfg.complete(); err != nil {
		return err
	}
	s := &setup{cfg: cfg, log: cfg.Log, fd: -1}
	if err := cfg.Netns.Do(s.removeLeftovers); err != nil {
		return fmt.Errorf("tun: netns %s: remove: %w", cfg.Netns, err)
	}
	return nil
}

func (s *setup) removeLeftovers() (err error) {
	closeAll, err := s.connect()
	if err != nil {
		return err
	}
	defer closeAll()
	if s.link, err = findDevice(s.h, s.cfg.Name); err != nil {
		// Not ours, and so none of our business. What is ours is taken away beside it.
		s.log.Warn("device left alone", "reason", err)
	}
	if s.link != nil {
		fd, err := s.attach(true) // proves that the owner is dead, and keeps others out meanwhile
		if err != nil {
			return err
		}
		defer unix.Close(fd)
	}
	path := statePath(&s.cfg)
	if s.state, err = loadState(path); err != nil {
		return err
	}
	if s.state != nil && s.link == nil {
		// Without the device, are these values of this netns? See keepState.
		if s.leftovers, err = s.hasOurRules(); err != nil {
			return err
		}
		if !s.leftovers {
			return removeState(path)
		}
	}
	return s.remove()
}

func (s *setup) hasOurRules() (bool, error) {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := s.h.RuleList(family)
		if err != nil {
			return false, fmt.Errorf("rules: %w", err)
		}
		if slices.ContainsFunc(rules, func(r netlink.Rule) bool { return r.Protocol == protocol }) {
			return true, nil
		}
	}
	return false, nil
}

// remove takes everything of ztun's away, in the reverse order of run. It goes by what is there, not by what was done, so
// that it works for any start, however far that came.
func (s *setup) remove() error {
	families := []int{unix.AF_INET, unix.AF_INET6}
	for _, family := range families {
		if err := s.removeRules(family); err != nil {
			return err
		}
	}
	var errs []error
	for _, family := range families {
		errs = append(errs, s.removeRoutes(family))
	}
	errs = append(errs, s.removeFilters(), s.removeNFT())
	if s.state != nil {
		errs = append(errs, s.proc.restore(s.state.Sysctls))
	} else if s.link != nil {
		s.log.Warn("sysctls stay as they are: the earlier values are not known")
	}
	if err := errors.Join(errs...); err != nil {
		return err // the device stays: it is what tells a later Remove that there is something left
	}
	if s.link != nil {
		if err := s.h.LinkDel(s.link); err != nil {
			return fmt.Errorf("delete device %s: %w", s.cfg.Name, err)
		}
	}
	return removeState(statePath(&s.cfg))
}
