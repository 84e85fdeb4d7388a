package tun

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Addresses of the self-test's netns, which nothing leaves: RFC 2544 and RFC 5737.
var (
	selfTestPod      = netip.MustParseAddr("198.18.0.2")
	selfTestServer   = netip.MustParseAddrPort("198.51.100.1:80")
	selfTestListener = netip.MustParseAddrPort("192.0.2.1:15001")
)

// selfTestWaitMS is how long each of its steps may take, in milliseconds; all of them together take some 50.
const selfTestWaitMS = 2000

// tryOut opens two connections, one to a listener and one to the network, in a netns of its own, the whole way: what loads
// and attaches may still not do what it should, where something else on the machine does otherwise.
func (s *Steering) tryOut() error {
	netns, err := anonymousNetns()
	if err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	defer netns.Close()
	out := -1
	defer func() {
		if out >= 0 {
			_ = unix.Close(out)
		}
	}()
	if err := netns.Do(func() (err error) { out, err = selfTestNetwork(); return err }); err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	k, err := Open(context.Background(), Config{Netns: netns, UID: "self-test", Marks: s.cfg.Marks, NoIPv6: true, Steering: s})
	if err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	s.selfTest = k.Cookie()
	t := &selfTest{k: k, netns: netns, out: out}
	err = errors.Join(t.toListener(), t.toNetwork())
	if err = errors.Join(err, k.Unenrol(context.Background()), k.Close()); err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	return nil
}

// anonymousNetns makes a netns that is gone with its last descriptor. The thread that made it ends with the goroutine, which
// stays locked to it.
func anonymousNetns() (netns *Netns, err error) {
	made := make(chan struct{})
	go func() {
		defer close(made)
		runtime.LockOSThread()
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("unshare: %w", err)
			return
		}
		netns, err = CurrentNetns()
	}()
	<-made
	return netns, err
}

// selfTestNetwork gives the netns of this thread an interface: a TUN too, whose other end is the descriptor.
func selfTestNetwork() (out int, err error) {
	const name = "net0"
	out, err = unix.Open(defaultTunPath, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", defaultTunPath, err)
	}
	err = func() error {
		ifr, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(out, unix.TUNSETIFF, ifr); err != nil {
			return fmt.Errorf("device %s: TUNSETIFF: %w", name, err)
		}
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("netlink: %w", err)
		}
		defer h.Close()
		for _, n := range []string{"lo", name} {
			link, err := h.LinkByName(n)
			if err != nil {
				return fmt.Errorf("interface %s: %w", n, err)
			}
			if n == name {
				if err := h.AddrAdd(link, &netlink.Addr{IPNet: hostNet(selfTestPod)}); err != nil {
					return fmt.Errorf("interface %s: %w", n, err)
				}
			}
			if err := h.LinkSetUp(link); err != nil {
				return fmt.Errorf("interface %s: %w", n, err)
			}
			if n != name {
				continue
			}
			all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
			if err := h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: all, Scope: netlink.SCOPE_LINK}); err != nil {
				return fmt.Errorf("default route: %w", err)
			}
		}
		return nil
	}()
	if err != nil {
		_ = unix.Close(out)
		return -1, err
	}
	return out, nil
}

// A selfTest is one run of Steering.tryOut.
type selfTest struct {
	k     *Kernel
	netns *Netns
	out   int // the network's side of the interface
}

// toListener sends a byte to a listener in the server's place.
func (t *selfTest) toListener() (err error) {
	defer wrap(&err, "connection to a listener")
	listener, err := t.socket(selfTestListener, func(fd int) error {
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1),
			unix.Bind(fd, &unix.SockaddrInet4{Port: int(selfTestListener.Port()), Addr: selfTestListener.Addr().As4()}), unix.Listen(fd, 1))
	})
	if err != nil {
		return err
	}
	defer unix.Close(listener)
	if err := t.k.SteerListeners(listener, -1); err != nil {
		return err
	}
	app, err := t.steer(ToListener)
	if err != nil {
		return err
	}
	defer unix.Close(app)
	if !waitForEvent(listener, unix.POLLIN) {
		return errors.New("the listener gets none")
	}
	accepted, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	defer unix.Close(accepted)
	if _, err := unix.Write(app, []byte{1}); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if !waitForEvent(accepted, unix.POLLIN) {
		return errors.New("the first byte does not arrive")
	}
	return t.onlySYNs()
}

// toNetwork shakes hands with a server outside, and ends the connection.
func (t *selfTest) toNetwork() (err error) {
	defer wrap(&err, "connection to the network")
	app, err := t.steer(ToNetwork)
	if err != nil {
		return err
	}
	defer unix.Close(app)
	syn, err := t.sent(0x02)
	if err != nil {
		return err
	}
	if _, err := unix.Write(t.out, synAckFor(syn)); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	if _, err := t.sent(0x10); err != nil {
		return err
	}
	if err := t.onlySYNs(); err != nil {
		return err
	}
	src, dst, _, _ := tcpHeader(syn)
	if err := t.k.DestroySocket(src, dst); err != nil { // so a change of policy reaches what was handed back
		return fmt.Errorf("end it: %w; the kernel needs CONFIG_INET_DIAG_DESTROY", err)
	}
	return nil
}

func wrap(err *error, what string) {
	if *err != nil {
		*err = fmt.Errorf("%s: %w", what, *err)
	}
}

func (t *selfTest) socket(at netip.AddrPort, prepare func(fd int) error) (fd int, err error) {
	fd, err = t.netns.Socket(familyOf(at.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err := prepare(fd); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("socket of %s: %w", at, err)
	}
	return fd, nil
}

// steer connects to the server and steers the SYN.
func (t *selfTest) steer(w Way) (app int, err error) {
	app, err = t.socket(selfTestServer, func(fd int) error {
		return unix.Connect(fd, &unix.SockaddrInet4{Port: int(selfTestServer.Port()), Addr: selfTestServer.Addr().As4()})
	})
	if err != nil {
		return -1, err
	}
	err = func() error {
		bufs, sizes := [][]byte{make([]byte, Headroom+MaxPacket)}, make([]int, 1)
		for waitForEvent(t.k.FD(), unix.POLLIN) {
			if _, err := t.k.Read(bufs, sizes, Headroom); errors.Is(err, ErrAgain) {
				continue
			} else if err != nil {
				return err
			}
			src, dst, flags, ok := tcpHeader(bufs[0][Headroom : Headroom+sizes[0]])
			if !ok || flags&0x12 != 0x02 || dst != selfTestServer {
				continue
			}
			if err := t.k.Steer(src, dst, w); err != nil {
				return err
			}
			_, err := t.k.Write([][]byte{bufs[0][:Headroom+sizes[0]]}, Headroom)
			return err
		}
		return errors.New("no SYN on the device")
	}()
	if err != nil {
		_ = unix.Close(app)
		return -1, err
	}
	return app, nil
}

// sent waits for a packet to the network with these of the flags SYN and ACK.
func (t *selfTest) sent(flags byte) ([]byte, error) {
	b := make([]byte, MaxPacket)
	for waitForEvent(t.out, unix.POLLIN) {
		n, err := unix.Read(t.out, b)
		if err != nil {
			continue
		}
		if _, dst, got, ok := tcpHeader(b[:n]); ok && dst == selfTestServer && got&0x12 == flags {
			return b[:n], nil
		}
	}
	return nil, fmt.Errorf("no packet with the flags %#x leaves", flags)
}

// onlySYNs checks that the device has no other TCP.
func (t *selfTest) onlySYNs() error {
	bufs, sizes := [][]byte{make([]byte, Headroom+MaxPacket)}, make([]int, 1)
	for {
		if _, err := t.k.Read(bufs, sizes, Headroom); errors.Is(err, ErrAgain) {
			return nil
		} else if err != nil {
			return err
		}
		if _, _, flags, ok := tcpHeader(bufs[0][Headroom : Headroom+sizes[0]]); ok && flags&0x12 != 0x02 {
			return fmt.Errorf("a packet with the flags %#x comes to the device", flags)
		}
	}
}

// waitForEvent waits for one of events on fd.
func waitForEvent(fd int, events int16) bool {
	for range 100 { // interruptions
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, selfTestWaitMS)
		if !errors.Is(err, unix.EINTR) {
			return n == 1
		}
	}
	return false
}

// tcpHeader reads addresses, ports and flags of a TCP packet without extension headers.
func tcpHeader(p []byte) (src, dst netip.AddrPort, flags byte, ok bool) {
	var from, to netip.Addr
	var tcp []byte
	switch {
	case len(p) >= 20 && p[0]>>4 == 4 && p[9] == unix.IPPROTO_TCP && len(p) >= int(p[0]&15)*4:
		from, to, tcp = netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20])), p[int(p[0]&15)*4:]
	case len(p) >= 40 && p[0]>>4 == 6 && p[6] == unix.IPPROTO_TCP:
		from, to, tcp = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40])), p[40:]
	}
	if len(tcp) < 20 {
		return src, dst, 0, false
	}
	be := binary.BigEndian
	return netip.AddrPortFrom(from, be.Uint16(tcp)), netip.AddrPortFrom(to, be.Uint16(tcp[2:])), tcp[13], true
}

// synAckFor answers an IPv4 SYN (RFC 9293, section 3.5).
func synAckFor(syn []byte) []byte {
	be := binary.BigEndian
	from := syn[int(syn[0]&15)*4:]
	b := make([]byte, 40)
	b[0], b[3], b[8], b[9] = 0x45, 40, 64, unix.IPPROTO_TCP
	copy(b[12:], syn[16:20])
	copy(b[16:], syn[12:16])
	be.PutUint16(b[10:], ^checksum(b[:20]))
	tcp := b[20:]
	copy(tcp, from[2:4])
	copy(tcp[2:], from[0:2])
	be.PutUint32(tcp[4:], 1)
	be.PutUint32(tcp[8:], be.Uint32(from[4:])+1)
	tcp[12], tcp[13] = 5<<4, 0x12
	be.PutUint16(tcp[14:], 0xffff)
	be.PutUint16(tcp[16:], ^checksum(b[12:20], []byte{0, unix.IPPROTO_TCP, 0, 20}, tcp))
	return b
}

// checksum is that of RFC 1071, before it is inverted, of parts of even length.
func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, part := range parts {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
