package tun

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Verdicts of an agent beside the ways.
const (
	refuse Way = 100 // is answered with RST
	ignore Way = 101
)

// An agent plays what a proxy does: it reads the SYNs of a device, and steers them.
type agent struct {
	k      *Kernel
	decide func(src, dst netip.AddrPort) Way

	syns, other atomic.Int64 // TCP packets read

	mu    sync.Mutex // guards below
	steps []string   // what went wrong
}

// startAgent reads k's device until the test ends, or until stop is called, which has to be before k is closed.
func startAgent(t *testing.T, k *Kernel, decide func(src, dst netip.AddrPort) Way) (a *agent, stop func()) {
	t.Helper()
	a = &agent{k: k, decide: decide}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.run(wake)
	}()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			_, _ = unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
			<-done
			_ = unix.Close(wake)
		})
	}
	t.Cleanup(func() {
		stop()
		for _, s := range a.steps {
			t.Error(s)
		}
	})
	return a, stop
}

func (a *agent) run(wake int) {
	const batch = 16
	bufs, sizes := make([][]byte, batch), make([]int, batch)
	for i := range bufs {
		bufs[i] = make([]byte, Headroom+MaxPacket)
	}
	for {
		fds := []unix.PollFd{{Fd: int32(a.k.FD()), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
			a.wrong("poll: " + err.Error())
			return
		}
		if fds[1].Revents != 0 {
			return
		}
		n, err := a.k.Read(bufs, sizes, Headroom)
		if err != nil && !errors.Is(err, ErrAgain) {
			a.wrong("read: " + err.Error())
			return
		}
		for i := range n {
			a.packet(bufs[i][:Headroom+sizes[i]])
		}
	}
}

func (a *agent) wrong(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.steps = append(a.steps, "agent: "+what)
}

func (a *agent) packet(b []byte) {
	src, dst, flags, ok := tcpHeader(b[Headroom:])
	if !ok {
		return
	}
	if flags&0x12 != 2 { // SYN without ACK
		a.other.Add(1)
		if flags&4 == 0 {
			a.write(append(make([]byte, Headroom), resetOf(b[Headroom:])...))
		}
		return
	}
	a.syns.Add(1)
	switch w := a.decide(src, dst); w {
	case refuse:
		a.write(append(make([]byte, Headroom), resetOf(b[Headroom:])...))
	case ignore:
	default:
		if err := a.k.Steer(src, dst, w); err != nil {
			a.wrong(err.Error())
			return
		}
		a.write(b)
	}
}

func (a *agent) write(b []byte) {
	if _, err := a.k.Write([][]byte{b}, Headroom); err != nil {
		a.wrong("write: " + err.Error())
	}
}

// resetOf answers a packet with RST (RFC 9293, section 3.10.7.1).
func resetOf(p []byte) []byte {
	var b, tcp, from []byte
	if p[0]>>4 == 4 {
		from = p[int(p[0]&15)*4:]
		b = make([]byte, 40)
		tcp = b[20:]
		b[0], b[3], b[8], b[9] = 0x45, 40, 64, unix.IPPROTO_TCP
		copy(b[12:], p[16:20])
		copy(b[16:], p[12:16])
		binary.BigEndian.PutUint16(b[10:], ^checksum(b[:20]))
	} else {
		from = p[40:]
		b = make([]byte, 60)
		tcp = b[40:]
		b[0], b[5], b[6], b[7] = 0x60, 20, unix.IPPROTO_TCP, 64
		copy(b[8:], p[24:40])
		copy(b[24:], p[8:24])
	}
	copy(tcp, from[2:4])
	copy(tcp[2:], from[0:2])
	tcp[12] = 5 << 4
	if from[13]&0x10 != 0 { // ACK: it says where to go on
		copy(tcp[4:], from[8:12])
		tcp[13] = 4
	} else {
		binary.BigEndian.PutUint32(tcp[8:], binary.BigEndian.Uint32(from[4:])+1)
		tcp[13] = 0x14
	}
	addrs := b[12:20]
	if len(b) == 60 {
		addrs = b[8:40]
	}
	binary.BigEndian.PutUint16(tcp[16:], ^checksum(addrs, []byte{0, unix.IPPROTO_TCP, 0, 20}, tcp))
	return b
}

// Where an agent's listeners are: at addresses that nobody has (RFC 5737, RFC 6666).
var (
	listener4 = netip.MustParseAddrPort("192.0.2.1:15001")
	listener6 = netip.MustParseAddrPort("[100::1]:15001")
)

// listenTransparent makes a listener of an agent's.
func listenTransparent(t *testing.T, ns *Netns, at netip.AddrPort) (fd int) {
	t.Helper()
	fd, err := transparentListener(ns, at)
	must(t, err)
	closeAtEnd(t, fd)
	return fd
}

func transparentListener(ns *Netns, at netip.AddrPort) (fd int, err error) {
	if fd, err = ns.Socket(familyOf(at.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0); err != nil {
		return -1, err
	}
	if at.Addr().Is4() {
		err = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	} else {
		err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
	}
	return fd, errors.Join(err, unix.Bind(fd, sockaddrOf(at)), unix.Listen(fd, 4096))
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// listenerOf listens on a port of ns, of an address that is its own.
func listenerOf(t *testing.T, ns *Netns, at netip.AddrPort, mark int) (fd int) {
	t.Helper()
	fd, err := ns.Socket(familyOf(at.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	closeAtEnd(t, fd)
	must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark))
	must(t, unix.Bind(fd, sockaddrOf(at)))
	must(t, unix.Listen(fd, 4096))
	return fd
}

// closed tells of each descriptor whether its test has closed it: by the end it may be another test's.
var closed sync.Map // int to *atomic.Bool

func closeAtEnd(t *testing.T, fd int) {
	t.Helper()
	gone := new(atomic.Bool)
	closed.Store(fd, gone)
	t.Cleanup(func() {
		if !gone.Swap(true) {
			_ = unix.Close(fd)
		}
	})
}

// closeNow closes a descriptor of closeAtEnd's.
func closeNow(t *testing.T, fd int) {
	t.Helper()
	gone, ok := closed.Load(fd)
	if !ok || gone.(*atomic.Bool).Swap(true) {
		t.Fatalf("descriptor %d is closed already", fd)
	}
	must(t, unix.Close(fd))
}

// reset closes a connection with RST.
func reset(t *testing.T, fd int) {
	t.Helper()
	must(t, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	closeNow(t, fd)
}

// A dial is a connection in the making.
type dial struct {
	fd int
	to netip.AddrPort
}

// startDial begins to connect in ns; from may leave out the port, or all.
func startDial(t *testing.T, ns *Netns, from, to netip.AddrPort, prepare func(fd int) error) dial {
	t.Helper()
	fd, err := ns.Socket(familyOf(to.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	closeAtEnd(t, fd)
	if from.IsValid() {
		must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
		must(t, unix.Bind(fd, sockaddrOf(from)))
	}
	if prepare != nil {
		must(t, prepare(fd))
	}
	if err := unix.Connect(fd, sockaddrOf(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return dial{-1, to}
	}
	return dial{fd, to}
}

// wait returns how it went, or EINPROGRESS after ms milliseconds without an answer.
func (d dial) wait(t *testing.T, ms int) error {
	t.Helper()
	if d.fd < 0 {
		return unix.EHOSTUNREACH
	}
	if !ready(d.fd, unix.POLLOUT, ms) {
		return unix.EINPROGRESS
	}
	errno, err := unix.GetsockoptInt(d.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	must(t, err)
	if errno != 0 {
		return unix.Errno(errno)
	}
	return nil
}

// ready waits for events on fd, at most ms milliseconds.
func ready(fd int, events int16, ms int) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, ms)
		if !errors.Is(err, unix.EINTR) {
			return n == 1
		}
	}
}

// accept takes a connection that comes within 3 s.
func accept(t *testing.T, listener int) (fd int, peer netip.AddrPort) {
	t.Helper()
	if !ready(listener, unix.POLLIN, 3000) {
		t.Fatal("no connection to accept within 3 s")
	}
	fd, sa, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	must(t, err)
	closeAtEnd(t, fd)
	return fd, addrPortOf(sa)
}

// send writes on one end what the other is to read.
func send(t *testing.T, from, to int, what string) {
	t.Helper()
	if n, err := unix.Write(from, []byte(what)); n != len(what) || err != nil {
		t.Fatalf("write of %q: %d, %v", what, n, err)
	}
	b := make([]byte, len(what)+1)
	if !ready(to, unix.POLLIN, 3000) {
		t.Fatalf("%q did not arrive within 3 s", what)
	}
	if n, err := unix.Read(to, b); err != nil || string(b[:n]) != what {
		t.Fatalf("read %q, %v, want %q", b[:max(n, 0)], err, what)
	}
}

// applicationBit is APPLICATION of bpf/steer.c.
const applicationBit = 1 << 31

// markOf is the mark of a socket, without the bit that says that it is an application's.
func markOf(t *testing.T, fd int) int {
	t.Helper()
	m, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK)
	must(t, err)
	return int(uint32(m) &^ applicationBit)
}

// setRule adds a rule in front that does the same with all packets of this netns: only what comes is let in.
func setRule(kind uint8, family int) error {
	r := netlink.NewRule()
	r.Family, r.Priority, r.Type, r.IifName = family, 1, kind, "lo"
	if err := netlink.RuleAdd(r); err != nil {
		return err
	}
	return nil
}
