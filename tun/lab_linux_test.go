package tun

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Addresses of the lab.
var (
	pod4    = netip.MustParseAddr("10.77.0.10")
	pod6    = netip.MustParseAddr("fd77::10")
	remote4 = netip.MustParseAddr("10.77.0.2")
	remote6 = netip.MustParseAddr("fd77::2")
)

const (
	testOwn     = 0x2a5
	testDeliver = 0x15c
	testSecret  = 0x5a3c4000

	testOwnSocket = testOwn | testSecret // of ztun's own sockets
)

func testConfig(ns *Netns) Config {
	return Config{Netns: ns, UID: "5f0c1d2e-test", Generation: 7, Marks: Marks{Own: testOwn, Deliver: testDeliver, Secret: testSecret}}
}

// A lab is a pod and a remote host, each a netns with an interface eth0, joined by a cable.
type lab struct{ pod, remote *Netns }

// newLab makes a lab of anonymous namespaces, which are gone with their last descriptor.
func newLab(t testing.TB, ipv6 bool) *lab {
	t.Helper()
	needPrivilege(t)
	l := &lab{pod: newNetns(t), remote: newNetns(t)}
	must(t, l.remote.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(l.pod.File().Fd()),
		})
	}))
	if !ipv6 {
		must(t, l.pod.Do(func() error {
			return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0)
		}))
	}
	configure := func(v4, v6, gw4, gw6 netip.Addr, ipv6 bool) func() error {
		return func() error {
			for _, name := range []string{"lo", "eth0"} {
				link, err := netlink.LinkByName(name)
				if err != nil {
					return err
				}
				if err := netlink.LinkSetUp(link); err != nil {
					return err
				}
				if name == "lo" {
					continue
				}
				for _, a := range []netip.Addr{v4, v6} {
					if a.Is6() && !ipv6 {
						continue
					}
					ones := 24
					if a.Is6() {
						ones = 64
					}
					addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(ones, a.BitLen())}, Flags: unix.IFA_F_NODAD}
					if err := netlink.AddrAdd(link, addr); err != nil {
						return fmt.Errorf("%s: %w", a, err)
					}
				}
				for _, gw := range []netip.Addr{gw4, gw6} {
					if gw.Is6() && !ipv6 {
						continue
					}
					if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw.AsSlice()}); err != nil {
						return fmt.Errorf("via %s: %w", gw, err)
					}
				}
			}
			return nil
		}
	}
	must(t, l.pod.Do(configure(pod4, pod6, remote4, remote6, ipv6)))
	must(t, l.remote.Do(configure(remote4, remote6, pod4, pod6, true)))
	waitFor(t, "the cable", func() bool {
		up := true
		for _, ns := range []*Netns{l.pod, l.remote} {
			must(t, ns.Do(func() error {
				link, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}
				up = up && link.Attrs().OperState == netlink.OperUp
				addrs, err := netlink.AddrList(link, unix.AF_INET6)
				for _, a := range addrs { // link-local addresses do duplicate detection, and a dump would see it
					up = up && a.Flags&unix.IFA_F_TENTATIVE == 0
				}
				return err
			}))
		}
		return up
	})
	return l
}

func needPrivilege(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		if _, err := os.Stat(defaultTunPath); err == nil {
			return
		}
	}
	cannotRun(t, "needs root and /dev/net/tun")
}

// cannotRun skips a test for what this machine does not have, unless ZTUN_REQUIRE_NETNS says that none is left out.
func cannotRun(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
		t.Fatal(why)
	}
	t.Skip(why + "; ZTUN_REQUIRE_NETNS=1 makes this an error")
}

// newNetns makes a namespace. The thread that made it ends with the goroutine, which stays locked to it.
func newNetns(t testing.TB) *Netns {
	t.Helper()
	type result struct {
		ns  *Netns
		err error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- result{err: err}
			return
		}
		ns, err := CurrentNetns()
		made <- result{ns, err}
	}()
	r := <-made
	must(t, r.err)
	t.Cleanup(func() { _ = r.ns.Close() })
	return r.ns
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// waitFor polls with a bound, for events that the kernel announces to nobody.
func waitFor(t testing.TB, what string, f func() bool) {
	t.Helper()
	for range 500 {
		if f() {
			return
		}
		_, _ = unix.Poll(nil, 10)
	}
	t.Fatalf("waited 5 s in vain for %s", what)
}

// dump writes down a netns: rules, routes of all tables, addresses, links, qdiscs and filters as the kernel sends them, and
// the sysctls. Only what counts or ages by itself is left out.
func dump(t *testing.T, ns *Netns) string {
	t.Helper()
	var b strings.Builder
	must(t, ns.Do(func() error {
		for _, d := range []struct {
			name         string
			family       int
			request, ans uint16
			header       int
			skip         []uint16
		}{
			{"rule", unix.AF_INET, unix.RTM_GETRULE, unix.RTM_NEWRULE, unix.SizeofRtMsg, nil},
			{"rule", unix.AF_INET6, unix.RTM_GETRULE, unix.RTM_NEWRULE, unix.SizeofRtMsg, nil},
			{"route", unix.AF_INET, unix.RTM_GETROUTE, unix.RTM_NEWROUTE, unix.SizeofRtMsg, []uint16{unix.RTA_CACHEINFO}},
			{"route", unix.AF_INET6, unix.RTM_GETROUTE, unix.RTM_NEWROUTE, unix.SizeofRtMsg, []uint16{unix.RTA_CACHEINFO}},
			{"addr", unix.AF_UNSPEC, unix.RTM_GETADDR, unix.RTM_NEWADDR, unix.SizeofIfAddrmsg, []uint16{unix.IFA_CACHEINFO}},
			{"link", unix.AF_UNSPEC, unix.RTM_GETLINK, unix.RTM_NEWLINK, unix.SizeofIfInfomsg, []uint16{unix.IFLA_STATS, unix.IFLA_STATS64, unix.IFLA_AF_SPEC}},
			{"qdisc", unix.AF_UNSPEC, unix.RTM_GETQDISC, unix.RTM_NEWQDISC, nl.SizeofTcMsg, []uint16{nl.TCA_STATS, nl.TCA_STATS2}},
		} {
			req := nl.NewNetlinkRequest(int(d.request), unix.NLM_F_DUMP)
			if d.name == "qdisc" {
				req.AddData(&nl.TcMsg{})
			} else {
				req.AddData(nl.NewIfInfomsg(d.family))
			}
			msgs, err := req.Execute(unix.NETLINK_ROUTE, d.ans)
			if err != nil {
				return fmt.Errorf("dump of %ss: %w", d.name, err)
			}
			for _, m := range msgs {
				attrs, err := nl.ParseRouteAttr(m[d.header:])
				if err != nil {
					return err
				}
				fmt.Fprintf(&b, "%s %x", d.name, m[:d.header])
				for _, a := range attrs {
					if !slices.Contains(d.skip, a.Attr.Type) {
						fmt.Fprintf(&b, " %d=%s", a.Attr.Type, hex.EncodeToString(a.Value))
					}
				}
				b.WriteByte('\n')
			}
		}
		for _, dir := range []string{"/proc/sys/net/ipv4", "/proc/sys/net/ipv6"} {
			err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err != nil || d.IsDir() {
					return err
				}
				value, err := os.ReadFile(path)
				if err == nil { // some are only to be written
					fmt.Fprintf(&b, "%s = %s\n", path, strings.TrimSpace(string(value)))
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	return b.String()
}

// listen serves one connection after another on addr in ns: each gets back what it sends.
func listen(t *testing.T, ns *Netns, addr netip.AddrPort) {
	t.Helper()
	var ln net.Listener
	must(t, ns.Do(func() (err error) {
		ln, err = net.Listen("tcp", addr.String())
		return err
	}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			var b [64]byte
			n, _ := c.Read(b[:])
			_, _ = c.Write(b[:n])
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
}

// connect connects a kernel socket of ns, with a mark if that is not 0, and waits at most ms milliseconds.
func connect(t *testing.T, ns *Netns, to netip.AddrPort, mark int, ms int64) (fd int, err error) {
	t.Helper()
	family := familyOf(to.Addr())
	fd, err = ns.Socket(family, unix.SOCK_STREAM, 0)
	must(t, err)
	closed := false
	t.Cleanup(func() {
		if !closed {
			_ = unix.Close(fd)
		}
	})
	if mark != 0 {
		must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark))
	}
	timeout := unix.NsecToTimeval(ms * 1e6)
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout))
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout))
	var sa unix.Sockaddr
	if family == unix.AF_INET {
		sa = &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	} else {
		sa = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	}
	err = unix.Connect(fd, sa)
	for errors.Is(err, unix.EINTR) { // by the runtime's signal for preemption
		err = unix.Connect(fd, sa)
	}
	if errors.Is(err, unix.EALREADY) { // what the second call says of a timeout
		err = unix.EINPROGRESS
	}
	if err != nil {
		closed = true
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
