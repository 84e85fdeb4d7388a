package tun

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// setAddr gives eth0 of ns an address, or takes it away.
func setAddr(t *testing.T, ns *Netns, prefix string, add bool) {
	t.Helper()
	p := netip.MustParsePrefix(prefix)
	must(t, ns.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, Flags: unix.IFA_F_NODAD}
		if add {
			return netlink.AddrAdd(link, a)
		}
		return netlink.AddrDel(link, a)
	}))
}

// linkLocal returns the fe80:: address of eth0 in ns.
func linkLocal(t *testing.T, ns *Netns) (a netip.Addr) {
	t.Helper()
	must(t, ns.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		list, err := netlink.AddrList(link, unix.AF_INET6)
		for _, entry := range list {
			if entry.IP.IsLinkLocalUnicast() {
				a, _ = netip.AddrFromSlice(entry.IP)
			}
		}
		return err
	}))
	if !a.IsValid() {
		t.Fatal("eth0 has no link-local address")
	}
	return a
}

// wantRefused checks that an IPv6 connect from ns that is bound to eth0 has an error.
func wantRefused(t *testing.T, ns *Netns, to netip.Addr) {
	t.Helper()
	fd, err := ns.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "eth0"))
	if err = unix.Connect(fd, &unix.SockaddrInet6{Port: 8080, Addr: to.As16()}); errors.Is(err, unix.EINPROGRESS) {
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 3000); n != 1 || err != nil {
			t.Errorf("connect to %s: no answer: %d, %v", to, n, err)
			return
		}
		errno, failed := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		must(t, failed)
		err = unix.Errno(errno)
	}
	if !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("connect to %s: %v, want unreachable", to, err)
	}
}

// A program may bind its socket to the interface, without privilege, and is not let out that way. For IPv4 no rule can say
// so: the kernel takes a destination without a route for one on the link (ip_route_output_key_hash_rcu of net/ipv4/route.c).
func TestNetnsIPv6SocketsBoundToTheInterfaceAreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	open(t, testConfig(l.pod))
	listen(t, l.remote, netip.AddrPortFrom(remote6, 8080))
	wantRefused(t, l.pod, remote6)
}

// wantCaptured checks that a connect from ns is not answered and has its SYN on the device, where nobody reads.
func wantCaptured(t *testing.T, k *Kernel, ns *Netns, to netip.Addr) {
	t.Helper()
	if _, err := connect(t, ns, netip.AddrPortFrom(to, 8080), 0, 200); !errors.Is(err, unix.EINPROGRESS) {
		t.Errorf("connect to %s: %v, want a timeout", to, err)
	}
	packets, _ := readAll(t, k, 8, Headroom)
	for _, p := range packets {
		if p := []byte(p); len(p) > 40 && (netip.AddrFrom4([4]byte(p[16:20])) == to || netip.AddrFrom16([16]byte(p[24:40])) == to) {
			return
		}
	}
	t.Errorf("connect to %s: %d packets on the device, want its SYN", to, len(packets))
}

// An address that comes after Open, by SLAAC for example, even the first of its family, is captured both ways.
func TestNetnsLateAddressesAreCaptured(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		late        string
		pod, remote netip.Addr
		adopt       bool
	}{
		"IPv6 after IPv4": {"fd77::10/64", pod6, remote6, false},
		"IPv4 after IPv6": {"10.77.0.10/24", pod4, remote4, false},
		"IPv6, adopted":   {"fd77::10/64", pod6, remote6, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, true)
			setAddr(t, l.pod, tt.late, false)
			before := dump(t, l.pod)
			cfg := testConfig(l.pod)
			cfg.StateDir = t.TempDir()
			k := open(t, cfg)
			if tt.adopt {
				must(t, k.Close())
				k = open(t, cfg)
			}
			if got := k.Addrs(); len(got) != 1 || got[0] == tt.pod || k.Local(tt.pod) {
				t.Errorf("Addrs = %v, Local(%s) = %v before there is such an address", got, tt.pod, k.Local(tt.pod))
			}
			setAddr(t, l.pod, tt.late, true)
			listen(t, l.pod, netip.AddrPortFrom(tt.pod, 8080))
			listen(t, l.remote, netip.AddrPortFrom(tt.remote, 8080))
			wantCaptured(t, k, l.pod, tt.remote)
			wantCaptured(t, k, l.remote, tt.pod)
			if got := k.Addrs(); !slices.Contains(got, tt.pod) || !k.Local(tt.pod) || k.Local(tt.remote) {
				t.Errorf("Addrs = %v, Local(%s) = %v, Local(%s) = %v", got, tt.pod, k.Local(tt.pod), tt.remote, k.Local(tt.remote))
			}
			fd, err := connect(t, l.pod, netip.AddrPortFrom(tt.remote, 8080), testOwnSocket, 3000)
			if err != nil {
				t.Fatalf("marked connect to %s: %v", tt.remote, err)
			}
			must(t, unix.Shutdown(fd, unix.SHUT_RDWR)) // while there is an address to send it from

			setAddr(t, l.pod, tt.late, false)
			if got := k.Addrs(); slices.Contains(got, tt.pod) || k.Local(tt.pod) {
				t.Errorf("Addrs = %v, Local(%s) = %v after it has gone", got, tt.pod, k.Local(tt.pod))
			}
			must(t, k.Unenrol(t.Context()))
			if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
				t.Errorf("after Unenrol (-before +after):\n%s", diff)
			}
			if !k.Local(k.Addrs()[0]) {
				t.Error("a closed Kernel has forgotten its addresses")
			}
		})
	}
}

// IPv6 is switched on for one interface while lo and those to come have it off.
func TestNetnsIPv6OfOneInterfaceOnly(t *testing.T) {
	t.Parallel()
	l := newLab(t, false)
	must(t, l.pod.Do(func() error {
		proc, err := openProcfs()
		if err != nil {
			return err
		}
		defer proc.close()
		return proc.write("net/ipv6/conf/eth0/disable_ipv6", "0")
	}))
	waitFor(t, "duplicate detection", func() (done bool) {
		must(t, l.pod.Do(func() error {
			list, err := netlink.AddrList(nil, unix.AF_INET6)
			done = len(list) == 1 && list[0].Flags&unix.IFA_F_TENTATIVE == 0
			return err
		}))
		return done
	})
	before := dump(t, l.pod)
	cfg := testConfig(l.pod)
	cfg.StateDir = t.TempDir()
	k := open(t, cfg)
	setAddr(t, l.pod, "fd77::10/64", true)
	wantCaptured(t, k, l.pod, remote6)
	wantCaptured(t, k, l.remote, pod6)
	setAddr(t, l.pod, "fd77::10/64", false)
	must(t, k.Unenrol(t.Context()))
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
		t.Errorf("after Unenrol (-before +after):\n%s", diff)
	}
}

// Addresses of the link only are ways into the pod, too.
func TestNetnsLinkLocalInboundIsCaptured(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	setAddr(t, l.pod, "169.254.9.9/16", true)
	setAddr(t, l.remote, "169.254.9.1/16", true)
	k := open(t, testConfig(l.pod))
	listen(t, l.pod, netip.MustParseAddrPort("[::]:8080")) // IPv4 too
	wantCaptured(t, k, l.remote, netip.MustParseAddr("169.254.9.9"))

	// IPv6 does not lead such packets to another interface: they are refused, both ways.
	to := linkLocal(t, l.pod)
	wantRefused(t, l.remote, to)
	from := linkLocal(t, l.remote)
	listen(t, l.remote, netip.MustParseAddrPort("[::]:8080"))
	wantRefused(t, l.pod, from)
	for _, a := range []netip.Addr{to, to.WithZone("eth0"), netip.MustParseAddr("169.254.9.9"), netip.MustParseAddr("127.0.0.9"), netip.MustParseAddr("::ffff:10.77.0.10")} {
		if !k.Local(a) {
			t.Errorf("Local(%s) = false, want true", a)
		}
	}
	for _, a := range []netip.Addr{remote4, netip.MustParseAddr("10.77.0.255"), netip.MustParseAddr("::"), {}} {
		if k.Local(a) {
			t.Errorf("Local(%s) = true, want false", a)
		}
	}
	if diff := cmp.Diff([]string{"10.77.0.10", "fd77::10"}, addrStrings(k.Addrs())); diff != "" {
		t.Errorf("Addrs (-want +got):\n%s", diff)
	}
}

func TestNetnsMTUFollows(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	k := open(t, testConfig(l.pod))
	for _, want := range []int{1400, 9000, 9000} {
		must(t, l.pod.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return netlink.LinkSetMTU(link, want)
		}))
		if got, err := k.SyncMTU(); got != want || err != nil {
			t.Errorf("SyncMTU = %d, %v, want %d", got, err, want)
		}
		if got, err := k.MTU(); got != want || err != nil {
			t.Errorf("MTU = %d, %v, want %d", got, err, want)
		}
	}
}

// A pod that forwards for others, a container runtime for example: TCP that comes from outside for what is behind it is led
// to the device too, and Local tells it from the pod's own. What goes out from there passes, as without ztun, when its
// interface is not captured.
func TestNetnsForwardedTCPIsCapturedAndNotLocal(t *testing.T) {
	t.Parallel()
	l, inner := newLab(t, true), newNetns(t)
	behind := netip.MustParseAddr("10.79.0.2")
	must(t, l.pod.Do(func() error { // down at Open, and so not captured
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(inner.File().Fd())}
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		proc, err := openProcfs()
		if err != nil {
			return err
		}
		defer proc.close()
		return proc.write("net/ipv4/ip_forward", "1")
	}))
	k := open(t, testConfig(l.pod))
	up := func(name, addr string, gw net.IP) func() error {
		return func() error {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(addr)
			if err != nil {
				return err
			}
			if err := errors.Join(netlink.AddrAdd(link, a), netlink.LinkSetUp(link)); err != nil || gw == nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw})
		}
	}
	must(t, l.pod.Do(up("eth1", "10.79.0.1/24", nil)))
	must(t, inner.Do(up("eth0", "10.79.0.2/24", net.IPv4(10, 79, 0, 1))))

	listen(t, inner, netip.AddrPortFrom(behind, 8080))
	wantCaptured(t, k, l.remote, behind)
	if k.Local(behind) || !k.Local(netip.MustParseAddr("10.79.0.1")) {
		t.Errorf("Local(%s) = %v, Local of the pod's new address = %v", behind, k.Local(behind), k.Local(netip.MustParseAddr("10.79.0.1")))
	}

	// The SYN from behind goes out, its answer comes in as any TCP does: such connections do not come about.
	listen(t, l.remote, netip.AddrPortFrom(remote4, 8080))
	if _, err := connect(t, inner, netip.AddrPortFrom(remote4, 8080), 0, 300); !errors.Is(err, unix.EINPROGRESS) {
		t.Errorf("connect from behind the pod: %v, want a timeout", err)
	}
	packets, _ := readAll(t, k, 8, Headroom)
	if len(packets) == 0 || netip.AddrFrom4([4]byte([]byte(packets[0][12:16]))) != remote4 {
		t.Errorf("%d packets on the device, want the SYN-ACK of %s", len(packets), remote4)
	}
}
