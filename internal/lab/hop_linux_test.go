package lab

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// What passes the router arrives whole, and its sender has learnt the smaller MTU.
func TestNetnsDetour(t *testing.T) {
	l := newLab(t, Config{Nodes: 2, PodsPerNode: 1, IPv6: true, HopMTU: 1300})
	a, b := l.Pod(0, 0), l.Pod(1, 0)
	if err := l.Detour(a, b); err != nil {
		t.Fatal(err)
	}
	const size = 1 << 20
	for _, way := range [][2]*Host{{a, b}, {b, a}} {
		for _, addr := range []netip.Addr{way[1].Addr4, way[1].Addr6} {
			at := netip.AddrPortFrom(addr, 8080).String()
			ln, err := way[1].Listen("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			echo(t, ln)
			c, err := way[0].Dial(within(t), "tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			deadline, _ := within(t).Deadline()
			_ = c.SetDeadline(deadline)
			sent := make(chan error, 1)
			go func() { _, err := c.Write(make([]byte, size)); sent <- err }()
			n, err := io.CopyN(io.Discard, c, size)
			if err = errors.Join(err, <-sent); err != nil {
				t.Errorf("%s to %s: %d bytes, %v", way[0].Name, at, n, err)
			}
			if mtu, err := pathMTU(c, addr.Is6()); err != nil || mtu != 1300 {
				t.Errorf("%s to %s: path MTU %d, %v, want 1300", way[0].Name, at, mtu, err)
			}
			_ = c.Close()
			_ = ln.Close()
		}
	}
}

func TestNetnsDetourNeedsARouter(t *testing.T) {
	l := newLab(t, Config{Nodes: 1, PodsPerNode: 2})
	if err := l.Detour(l.Pod(0, 0), l.Pod(0, 1)); err == nil || l.Hop() != nil {
		t.Errorf("Detour without a router: %v", err)
	}
}

func pathMTU(c net.Conn, ipv6 bool) (mtu int, err error) {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	level, opt := unix.SOL_IP, unix.IP_MTU
	if ipv6 {
		level, opt = unix.SOL_IPV6, unix.IPV6_MTU
	}
	ctrl := raw.Control(func(fd uintptr) { mtu, err = unix.GetsockoptInt(int(fd), level, opt) })
	return mtu, errors.Join(err, ctrl)
}
