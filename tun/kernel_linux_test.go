package tun

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// open opens the device and has it closed when the test ends.
func open(t *testing.T, cfg Config) *Kernel {
	t.Helper()
	k, err := Open(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { _ = k.Close() })
	return k
}

// rulesOf lists the rules of a family as ip-rule(8) would.
func rulesOf(t *testing.T, ns *Netns, family int) (list []string) {
	t.Helper()
	must(t, ns.Do(func() error {
		rules, err := netlink.RuleList(family)
		for _, r := range rules {
			list = append(list, ruleKey(&r))
		}
		return err
	}))
	return list
}

func routesOf(t *testing.T, ns *Netns, family int) (list []string) {
	t.Helper()
	must(t, ns.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		s := &setup{h: h}
		routes, err := s.ourTables(family)
		for _, r := range routes {
			list = append(list, s.routeKey(&r))
		}
		return err
	}))
	slices.Sort(list)
	return list
}

func TestNetnsOpenSetsUpExactly(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	k := open(t, testConfig(l.pod))

	want4 := []string{
		"pref 900 fwmark 0x15c/0xfff iif lo lookup 1338 protocol 133",
		"pref 1000 fwmark 0x2a5/0xfff goto 1900 protocol 133",
		"pref 1001 to 169.254.7.127/32 goto 1900 protocol 133",
		"pref 1002 from 169.254.7.127/32 goto 1900 protocol 133",
		"pref 1020 iif eth0 ipproto 6 lookup 1337 protocol 133",
		"pref 1021 iif eth0 ipproto 6 unreachable protocol 133",
		"pref 1100 lookup 255 protocol 133",
		"pref 1110 iif lo ipproto 6 lookup 1337 protocol 133",
		"pref 1111 iif lo ipproto 6 unreachable protocol 133",
		"pref 1120 iif lo ipproto 17 dport 53-53 lookup 1337 protocol 133",
		"pref 1900 lookup 255 protocol 133",
		"pref 32766 lookup 254 protocol 2",
		"pref 32767 lookup 253 protocol 2",
	}
	if diff := cmp.Diff(want4, rulesOf(t, l.pod, unix.AF_INET)); diff != "" {
		t.Errorf("IPv4 rules (-want +got):\n%s", diff)
	}
	var want6 []string
	for _, r := range want4[:len(want4)-1] { // IPv6 has no table default
		r = strings.NewReplacer("169.254.7.127/32", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128").Replace(r)
		want6 = append(want6, "-6 "+r)
	}
	if diff := cmp.Diff(want6, rulesOf(t, l.pod, unix.AF_INET6)); diff != "" {
		t.Errorf("IPv6 rules (-want +got):\n%s", diff)
	}

	if diff := cmp.Diff([]string{
		"default dev ztun0 table 1337 src 10.77.0.10 protocol 133",
		"local default dev lo table 1338 protocol 133",
		"unreachable default table 1337 metric 4278198272 protocol 133",
	}, routesOf(t, l.pod, unix.AF_INET)); diff != "" {
		t.Errorf("IPv4 routes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{
		"-6 default dev ztun0 table 1337 src fd77::10 metric 1024 protocol 133",
		"-6 local default dev lo table 1338 metric 1024 protocol 133",
		"-6 unreachable default table 1337 metric 4278198272 protocol 133",
	}, routesOf(t, l.pod, unix.AF_INET6)); diff != "" {
		t.Errorf("IPv6 routes (-want +got):\n%s", diff)
	}

	must(t, l.pod.Do(func() error {
		want := map[string]string{
			"ipv4/conf/eth0/forwarding": "1", "ipv4/conf/ztun0/forwarding": "1", "ipv4/conf/ztun0/accept_local": "1",
			"ipv4/conf/all/rp_filter": "0", "ipv4/conf/eth0/rp_filter": "0", "ipv4/conf/ztun0/rp_filter": "0",
			"ipv4/ip_forward": "0", "ipv4/tcp_early_demux": "0", "ipv4/tcp_fwmark_accept": "1",
			"ipv4/fwmark_reflect": "1", "ipv6/fwmark_reflect": "1",
			"ipv4/conf/ztun0/ignore_routes_with_linkdown": "1", "ipv6/conf/ztun0/ignore_routes_with_linkdown": "1",
		}
		if _, err := os.Stat("/proc/sys/net/ipv6/conf/lo/force_forwarding"); err == nil {
			want["ipv6/conf/eth0/force_forwarding"], want["ipv6/conf/ztun0/force_forwarding"] = "1", "1"
			want["ipv6/conf/all/forwarding"] = "0"
		} else {
			want["ipv6/conf/all/forwarding"] = "1"
		}
		for name, value := range want {
			b, err := os.ReadFile("/proc/sys/net/" + name)
			if got := strings.TrimSpace(string(b)); err != nil || got != value {
				t.Errorf("sysctl %s = %q, %v, want %s", name, got, err, value)
			}
		}
		link, err := netlink.LinkByName("ztun0")
		if err != nil {
			return err
		}
		a := link.Attrs()
		got := fmt.Sprintf("%s alias %q mtu %d txqueuelen %d up %v", link.Type(), a.Alias, a.MTU, a.TxQLen, a.RawFlags&unix.IFF_UP != 0)
		if want := `tuntap alias "ztun 5f0c1d2e-test 7" mtu 1500 txqueuelen 8192 up true`; got != want {
			t.Errorf("device: %s\nwant %s", got, want)
		}
		addrs, err := netlink.AddrList(link, unix.AF_UNSPEC)
		if len(addrs) > 0 {
			t.Errorf("device has addresses %v, want none", addrs)
		}
		return err
	}))

	if diff := cmp.Diff([]string{"10.77.0.10", "fd77::10"}, addrStrings(k.Addrs())); diff != "" {
		t.Errorf("Addrs (-want +got):\n%s", diff)
	}
	if i := k.Interfaces(); len(i) != 1 || i[0].Name != "eth0" || i[0].MTU != 1500 {
		t.Errorf("Interfaces = %+v, want eth0 of 1500", i)
	}
	if mtu, err := k.MTU(); mtu != 1500 || err != nil {
		t.Errorf("MTU = %d, %v, want 1500", mtu, err)
	}
	if !k.HasIPv4() || !k.HasIPv6() || k.MarkedBy() != MarkedByBPF {
		t.Errorf("HasIPv4 %v, HasIPv6 %v, MarkedBy %q, want true, true, bpf", k.HasIPv4(), k.HasIPv6(), k.MarkedBy())
	}
}

func addrStrings(addrs []netip.Addr) (list []string) {
	for _, a := range addrs {
		list = append(list, a.String())
	}
	return list
}

func TestNetnsUnenrolLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, old := range []bool{false, true} { // a kernel without BPF and force_forwarding
		for _, ipv6 := range []bool{true, false} {
			t.Run(fmt.Sprintf("old=%v/ipv6=%v", old, ipv6), func(t *testing.T) {
				t.Parallel()
				l := newLab(t, ipv6)
				before := dump(t, l.pod)
				cfg := testConfig(l.pod)
				cfg.noBPF, cfg.noForceForwarding, cfg.StateDir = old, old, t.TempDir()
				k := open(t, cfg)
				if got := k.HasIPv6(); got != ipv6 {
					t.Errorf("HasIPv6 = %v, want %v", got, ipv6)
				}
				if during := dump(t, l.pod); during == before {
					t.Error("the dump does not see the set-up")
				}
				must(t, k.Unenrol(t.Context()))
				if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
					t.Errorf("after Unenrol (-before +after):\n%s", diff)
				}
				if left, _ := filepath.Glob(cfg.StateDir + "/*"); len(left) > 0 {
					t.Errorf("Unenrol leaves files %v", left)
				}
				if nft := nftTables(t, l.pod); len(nft) > 0 {
					t.Errorf("Unenrol leaves nft tables %v", nft)
				}
				must(t, Remove(t.Context(), cfg)) // nothing to do is no error
			})
		}
	}
}

func TestNetnsMarkedSocketsGoDirect(t *testing.T) {
	t.Parallel()
	for _, noBPF := range []bool{false, true} {
		t.Run(fmt.Sprintf("nft=%v", noBPF), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, true)
			cfg := testConfig(l.pod)
			cfg.noBPF = noBPF
			k := open(t, cfg)
			for _, a := range []netip.Addr{remote4, remote6} {
				to := netip.AddrPortFrom(a, 8080)
				listen(t, l.remote, to)
				fd, err := connect(t, l.pod, to, testOwnSocket, 3000)
				if err != nil {
					t.Fatalf("marked connect to %s: %v", to, err)
				}
				if _, err := unix.Write(fd, []byte("hello")); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 16)
				n, err := unix.Read(fd, b)
				if err != nil || string(b[:n]) != "hello" {
					t.Errorf("echo from %s: %q, %v", to, b[:max(n, 0)], err)
				}
			}
			if packets, _ := readAll(t, k, 8, Headroom); len(packets) > 0 {
				t.Errorf("%d packets of marked sockets on the device, want none", len(packets))
			}
			for _, a := range []netip.Addr{remote4, remote6} { // positive control: without the mark it is captured
				to := netip.AddrPortFrom(a, 8080)
				if _, err := connect(t, l.pod, to, 0, 50); !errors.Is(err, unix.EINPROGRESS) {
					t.Errorf("unmarked connect to %s: %v, want a timeout: nobody reads the device", to, err)
				}
				packets, headers := readAll(t, k, 8, Headroom)
				if len(packets) == 0 || headers[0].Flags&VnetNeedsChecksum == 0 || headers[0].Check(len(packets[0])) != nil {
					t.Errorf("unmarked connect to %s: packets %d, headers %+v, want a SYN without checksum", to, len(packets), headers)
				}
			}
		})
	}
}

// Without the mark on the interface, the answer to a marked SYN is captured as inbound: this is what the mark is for.
func TestNetnsWithoutIngressMarkRepliesAreCaptured(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	k := open(t, testConfig(l.pod))
	to := netip.AddrPortFrom(remote4, 8080)
	listen(t, l.remote, to)
	must(t, l.pod.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		return (&setup{h: h}).removeFilters(ingressFilter)
	}))
	if _, err := connect(t, l.pod, to, testOwnSocket, 100); !errors.Is(err, unix.EINPROGRESS) {
		t.Errorf("connect: %v, want a timeout", err)
	}
	packets, _ := readAll(t, k, 8, Headroom)
	if len(packets) == 0 || netip.AddrFrom4([4]byte([]byte(packets[0][12:16]))) != remote4 {
		t.Errorf("%d packets captured, want the SYN-ACK of %s", len(packets), remote4)
	}
}

func TestNetnsInboundIsCapturedAndAnswered(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	k := open(t, testConfig(l.pod))
	listen(t, l.pod, netip.AddrPortFrom(pod4, 8080)) // not marked: no reason to pass
	for _, a := range []netip.Addr{pod4, pod6} {
		if _, err := connect(t, l.remote, netip.AddrPortFrom(a, 8080), 0, 50); !errors.Is(err, unix.EINPROGRESS) {
			t.Errorf("connect to %s: %v, want a timeout: nobody reads the device", a, err)
		}
		if packets, _ := readAll(t, k, 8, Headroom); len(packets) == 0 {
			t.Errorf("connect to %s: no packet on the device", a)
		}
	}

	// A RST written to the device reaches the peer as the pod's own answer.
	client, err := l.remote.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	defer unix.Close(client)
	if err := unix.Connect(client, &unix.SockaddrInet4{Port: 81, Addr: pod4.As4()}); !errors.Is(err, unix.EINPROGRESS) {
		t.Fatalf("connect: %v", err)
	}
	bufs, sizes := [][]byte{make([]byte, Headroom+MaxPacket)}, make([]int, 1)
	waitFor(t, "the SYN", func() bool {
		_, err := k.Read(bufs, sizes, Headroom)
		return err == nil
	})
	rst := resetOf(bufs[0][Headroom : Headroom+sizes[0]])
	if n, err := k.Write([][]byte{append(make([]byte, Headroom), rst...)}, Headroom); n != 1 || err != nil {
		t.Fatalf("Write = %d, %v", n, err)
	}
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(client), Events: unix.POLLOUT}}, 3000); n != 1 || err != nil {
		t.Fatalf("no answer: %d, %v", n, err)
	}
	if errno, err := unix.GetsockoptInt(client, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || unix.Errno(errno) != unix.ECONNREFUSED {
		t.Errorf("connect: %v, %v, want connection refused", unix.Errno(errno), err)
	}
}

func TestNetnsClosedFailsAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	cfg := testConfig(l.pod)
	k := open(t, cfg)
	must(t, k.Close())
	for _, a := range []netip.Addr{remote4, remote6} {
		to := netip.AddrPortFrom(a, 8080)
		listen(t, l.remote, to)
		waitFor(t, "no route to host", func() bool {
			_, err := connect(t, l.pod, to, 0, 50)
			if err == nil {
				t.Fatalf("connect to %s with a dead owner: connected, want no route to host", to)
			}
			return errors.Is(err, unix.EHOSTUNREACH)
		})
		if _, err := connect(t, l.pod, to, 0, 50); !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("connect to %s: %v, want no route to host within 50 ms", to, err)
		}
	}
	if _, err := k.Read([][]byte{make([]byte, 2000)}, make([]int, 1), Headroom); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read after Close: %v, want os.ErrClosed", err)
	}
	if _, err := k.Write([][]byte{make([]byte, 100)}, Headroom); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Write after Close: %v, want os.ErrClosed", err)
	}
	if _, err := k.MTU(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("MTU after Close: %v, want os.ErrClosed", err)
	}
	if err := k.Unenrol(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Unenrol after Close: %v, want os.ErrClosed", err)
	}

	cfg.Generation++
	open(t, cfg) // revives the routes
	for _, a := range []netip.Addr{remote4, remote6} {
		if _, err := connect(t, l.pod, netip.AddrPortFrom(a, 8080), 0, 50); !errors.Is(err, unix.EINPROGRESS) {
			t.Errorf("connect to %s after the second Open: %v, want capture", a, err)
		}
	}
}

// The positive control of the above: without the unreachable route a dead owner lets traffic out.
func TestNetnsFailOpenRouteLetsTrafficOut(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	cfg := testConfig(l.pod)
	cfg.FailOpenRoute = true
	k := open(t, cfg)
	must(t, k.Close())
	for _, a := range []netip.Addr{remote4, remote6} {
		to := netip.AddrPortFrom(a, 8080)
		listen(t, l.remote, to)
		waitFor(t, "traffic in clear", func() bool {
			_, err := connect(t, l.pod, to, 0, 50)
			return err == nil
		})
	}
}

func TestNetnsOwners(t *testing.T) {
	t.Parallel()
	l, other := newLab(t, true), newLab(t, true)
	before := dump(t, l.pod)
	cfg := testConfig(l.pod)
	cfg.StateDir = t.TempDir()

	otherPID, _ := startOwner(t, other.pod, t.TempDir(), "") // same name of device, not to be mistaken for the owner
	pid, kill := startOwner(t, l.pod, cfg.StateDir, "")
	during := dump(t, l.pod)
	if err := InUse(newLab(t, true).pod, ""); err != nil {
		t.Errorf("InUse of a netns without a device: %v", err)
	}
	for name, err := range map[string]error{
		"Open": second(Open(t.Context(), cfg)), "Remove": Remove(t.Context(), cfg), "InUse": InUse(l.pod, ""),
	} {
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("in use by pid %d (", pid)) {
			t.Errorf("%s with a living owner: %v, want an error naming pid %d (not %d)", name, err, pid, otherPID)
		}
	}
	if diff := cmp.Diff(during, dump(t, l.pod)); diff != "" {
		t.Errorf("refused attempts changed something:\n%s", diff)
	}

	kill()
	cfg.Marks.Own++ // a new start has new marks
	k := open(t, cfg)
	if rules := strings.Join(rulesOf(t, l.pod, unix.AF_INET), "\n"); !strings.Contains(rules, "0x2a6") || strings.Contains(rules, "0x2a5") {
		t.Errorf("rules after adoption:\n%s\nwant those of the new mark only", rules)
	}
	to := netip.AddrPortFrom(remote4, 8080)
	listen(t, l.remote, to)
	if _, err := connect(t, l.pod, to, int(cfg.Marks.OwnSocket()), 3000); err != nil {
		t.Errorf("marked connect after adoption: %v", err)
	}
	must(t, k.Unenrol(t.Context())) // restores what the dead owner found
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
		t.Errorf("after adoption and Unenrol (-before +after):\n%s", diff)
	}
}

func second[T any](_ T, err error) error { return err }

func TestNetnsRemoveAfterCrash(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	before := dump(t, l.pod)
	cfg := Config{Netns: l.pod, StateDir: t.TempDir()}
	_, kill := startOwner(t, l.pod, cfg.StateDir, "")
	kill()
	for range 2 {
		must(t, Remove(t.Context(), cfg))
	}
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
		t.Errorf("after Remove (-before +after):\n%s", diff)
	}
}

func TestNetnsOpenAgainChangesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	cfg := testConfig(l.pod)
	must(t, open(t, cfg).Close())
	waitFor(t, "the carrier to go", func() bool { return !lowerUp(t, l.pod) })
	before := dump(t, l.pod)
	must(t, open(t, cfg).Close())
	waitFor(t, "the carrier to go", func() bool { return !lowerUp(t, l.pod) })
	// The counters of carrier changes and the number of the filter's program are new, the rest is not.
	diff := cmp.Diff(withoutLinks(before), withoutLinks(dump(t, l.pod)))
	if diff != "" {
		t.Errorf("second Open (-before +after):\n%s", diff)
	}
}

func withoutLinks(dump string) []string {
	return slices.DeleteFunc(strings.Split(dump, "\n"), func(line string) bool { return strings.HasPrefix(line, "link ") })
}

func lowerUp(t *testing.T, ns *Netns) (up bool) {
	t.Helper()
	must(t, ns.Do(func() error {
		link, err := netlink.LinkByName(DefaultName)
		if err == nil {
			up = link.Attrs().RawFlags&unix.IFF_LOWER_UP != 0
			var routes []netlink.Route
			routes, err = netlink.RouteListFiltered(unix.AF_INET, &netlink.Route{Table: tableCapture}, netlink.RT_FILTER_TABLE)
			for _, r := range routes {
				up = up || r.LinkIndex == link.Attrs().Index && r.Flags&unix.RTNH_F_LINKDOWN == 0
			}
		}
		return err
	}))
	return up
}

func TestNetnsRefusals(t *testing.T) {
	t.Parallel()
	veth := func(name string) func() error {
		return func() error {
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer"})
		}
	}
	rule := func(family, pref int) func() error {
		return func() error {
			r := netlink.NewRule()
			r.Family, r.Priority, r.Table, r.IifName = family, pref, 100, "lo"
			return netlink.RuleAdd(r)
		}
	}
	route := func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		_, dst, _ := net.ParseCIDR("192.0.2.0/24")
		return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Table: tableCapture, Protocol: unix.RTPROT_STATIC})
	}
	tests := []struct {
		name    string
		prepare func() error // in the pod
		change  func(*Config)
		want    string
	}{
		{name: "foreign device", prepare: veth("ztun0"), want: `device ztun0: exists and is not ztun's (veth, alias "")`},
		{name: "foreign rule", prepare: rule(unix.AF_INET, 1005), want: "rule pref 1005 iif lo lookup 100 protocol 0: exists and is not ztun's"},
		{name: "foreign IPv6 rule", prepare: rule(unix.AF_INET6, 1110), want: "rule -6 pref 1110 iif lo lookup 100 protocol 0: exists and is not ztun's"},
		{name: "foreign route", prepare: route, want: "route 192.0.2.0/24 dev eth0 table 1337 protocol 4: exists and is not ztun's"},
		{name: "rule in front", prepare: rule2(500, unix.RT_TABLE_MAIN), want: "self-check: IPv4 TCP of the pod is captured: not so, the kernel says dev eth0, table 254"},
		{name: "no device node", change: func(c *Config) { c.tunPath = "/nonexistent/tun" }, want: "open /nonexistent/tun: no such file or directory; load the tun module"},
		{name: "no such interface", change: func(c *Config) { c.Interface = "eth7" }, want: "interface eth7: does not exist; there are lo, eth0"},
		{name: "not a tun", change: func(c *Config) { c.tunPath = "/dev/null" }, want: "TUNSETIFF: inappropriate ioctl for device"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, true)
			if tt.prepare != nil {
				must(t, l.pod.Do(tt.prepare))
			}
			before := dump(t, l.pod)
			cfg := testConfig(l.pod)
			cfg.StateDir = t.TempDir()
			if tt.change != nil {
				tt.change(&cfg)
			}
			k, err := Open(t.Context(), cfg)
			if err == nil {
				_ = k.Unenrol(context.Background())
				t.Fatalf("Open: no error, want %q", tt.want)
			}
			if !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("Open: %v\nwant one line with %s", err, tt.want)
			}
			if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
				t.Errorf("a failed Open leaves (-before +after):\n%s", diff)
			}
			if left, _ := filepath.Glob(cfg.StateDir + "/*"); len(left) > 0 {
				t.Errorf("a failed Open leaves files %v", left)
			}
		})
	}
}

func rule2(pref, table int) func() error {
	return func() error {
		r := netlink.NewRule()
		r.Priority, r.Table, r.IifName = pref, table, "lo"
		return netlink.RuleAdd(r)
	}
}

// cancelAfter is a context that ends when it has been asked n times: at each step of Open once.
type cancelAfter struct {
	context.Context
	n *int
}

func (c cancelAfter) Err() error {
	if *c.n--; *c.n < 0 {
		return context.Canceled
	}
	return nil
}

func TestNetnsCancelLeavesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	before := strings.Split(dump(t, l.pod), "\n")
	for n := 0; ; n++ {
		left := n
		k, err := Open(cancelAfter{t.Context(), &left}, testConfig(l.pod))
		if err == nil {
			must(t, k.Unenrol(t.Context()))
			if n < 8 {
				t.Errorf("Open asked for its context %d times only", n)
			}
			return
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("Open ended after step %d: %v, want context.Canceled", n, err)
		}
		if diff := cmp.Diff(before, strings.Split(dump(t, l.pod), "\n")); diff != "" {
			t.Fatalf("Open ended after step %d leaves (-before +after):\n%s", n, diff)
		}
	}
}

// Asks the guard itself and never Open or Remove: should it fail, the machine's own traffic is not at stake. It has to hold
// while other threads, the first of the process included, are in other namespaces.
func TestNetnsOwnNamespaceIsRefused(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	own, err := CurrentNetns()
	must(t, err)
	defer own.Close()
	cfg := testConfig(own)
	if err := cfg.complete(); err == nil || !strings.Contains(err.Error(), "own network namespace; name that of a pod") {
		t.Errorf("the test's own netns: %v, want a refusal", err)
	}
	other := testConfig(newNetns(t))
	if err := other.complete(); err != nil {
		t.Errorf("another netns: %v", err)
	}
	must(t, other.Netns.Do(func() error { // seen from there, it is the other way round
		if err := other.notOwnNetns(); err == nil {
			t.Error("the netns of a thread that has moved: not refused")
		}
		return nil
	}))
}

func TestNetnsErrorsNameTheCause(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	for path, want := range map[string]string{
		"/run/netns/nonexistent-ztun": "no such file or directory; is the pod gone",
		file:                          "not a network namespace",
		"/proc/self/ns/mnt":           "not a network namespace",
	} {
		if _, err := OpenNetns(path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("OpenNetns(%s): %v, want %q", path, err, want)
		}
	}
	ns := newNetns(t)
	for name, change := range map[string]func(*Config){
		"Netns is missing":                 func(c *Config) { c.Netns = nil },
		`UID "a b" is not`:                 func(c *Config) { c.UID = "a b" },
		"Name \"sixteen-letters-\" is not": func(c *Config) { c.Name = "sixteen-letters-" },
		"MTU 500 is not":                   func(c *Config) { c.MTU = 500 },
		"Marks 0x1 and 0x1 are not":        func(c *Config) { c.Marks = Marks{Own: 1, Deliver: 1} },
		"Marks 0x1000 and 0x1 are not":     func(c *Config) { c.Marks = Marks{Own: 0x1000, Deliver: 1} },
		"the Secret 0x80001000 of Marks":   func(c *Config) { c.Marks = Marks{Own: 2, Deliver: 1, Secret: 0x80001000} },
		"no interface to capture is up":    func(*Config) {},
	} {
		cfg := testConfig(ns)
		change(&cfg)
		if _, err := Open(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("Open: %v, want %q", err, name)
		}
	}
}

func TestNetnsDoComesBack(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	ns := newNetns(t)
	var inside, nested uint64
	boom := errors.New("boom")
	err := ns.Do(func() error {
		here, err := CurrentNetns()
		if err != nil {
			return err
		}
		defer here.Close()
		_, inside = here.ID()
		return errors.Join(ns.Do(func() error { // where one is already
			again, err := CurrentNetns()
			if err == nil {
				_, nested = again.ID()
				err = again.Close()
			}
			return err
		}), boom)
	})
	if !errors.Is(err, boom) {
		t.Errorf("Do = %v, want the error of f", err)
	}
	after, err := CurrentNetns()
	must(t, err)
	defer after.Close()
	_, want := ns.ID()
	if _, home := after.ID(); inside != want || nested != want || home == want {
		t.Errorf("inside %d, nested %d, after %d; the netns is %d", inside, nested, home, want)
	}
}

func TestNetnsCapturesEveryInterface(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	must(t, l.pod.Do(func() error { // eth1 has the larger MTU and no default route, down is not up
		for _, name := range []string{"eth1", "down"} {
			link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: 9000}, PeerName: name + "-peer", PeerNamespace: netlink.NsFd(l.remote.File().Fd())}
			if err := netlink.LinkAdd(link); err != nil {
				return err
			}
			if name == "down" {
				continue
			}
			addr, err := netlink.ParseAddr("10.78.0.10/24")
			if err != nil {
				return err
			}
			if err := errors.Join(netlink.AddrAdd(link, addr), netlink.LinkSetUp(link)); err != nil {
				return err
			}
		}
		return nil
	}))
	k := open(t, testConfig(l.pod))
	if mtu, err := k.MTU(); mtu != 9000 || err != nil {
		t.Errorf("MTU = %d, %v, want the larger one", mtu, err)
	}
	if i := k.Interfaces(); len(i) != 2 || i[0].Name != "eth0" || i[1].Name != "eth1" {
		t.Errorf("Interfaces = %+v, want eth0, which has the default route, and eth1", i)
	}
	var got []string
	for _, r := range rulesOf(t, l.pod, unix.AF_INET) {
		if strings.HasPrefix(r, "pref 1020 ") {
			got = append(got, r)
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff([]string{
		"pref 1020 iif eth0 ipproto 6 lookup 1337 protocol 133",
		"pref 1020 iif eth1 ipproto 6 lookup 1337 protocol 133",
	}, got); diff != "" {
		t.Errorf("inbound rules (-want +got):\n%s", diff)
	}
}

// An inode number is used again: a file without anything in the netns that would belong to it is of another netns.
func TestNetnsStaleStateIsNotUsed(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	cfg := testConfig(l.pod)
	cfg.StateDir = t.TempDir()
	stale := &state{UID: "old", Sysctls: []sysctl{{"net/ipv4/tcp_early_demux", "0"}, {"net/ipv4/conf/eth0/forwarding", "1"}}}
	must(t, stale.save(statePath(&cfg)))
	before := dump(t, l.pod)
	k := open(t, cfg)
	kept, err := loadState(statePath(&cfg))
	must(t, err)
	if kept.UID != cfg.UID || !slices.Contains(kept.Sysctls, sysctl{"net/ipv4/tcp_early_demux", "1"}) {
		t.Errorf("kept %+v, want the values of this netns", kept)
	}
	must(t, k.Unenrol(t.Context()))
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
		t.Errorf("after Unenrol (-before +after):\n%s", diff)
	}
}

func TestNetnsReadAndWriteDoNotAllocate(t *testing.T) {
	l := newLab(t, true)
	k := open(t, testConfig(l.pod))
	in, sizes := [][]byte{make([]byte, Headroom+MaxPacket)}, make([]int, 1)
	out := make([]byte, Headroom+28) // UDP without ports that anybody listens on
	copy(out[Headroom:], []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 77, 0, 99, 10, 77, 0, 10})
	bufs := [][]byte{out}
	n := testing.AllocsPerRun(100, func() {
		if n, err := k.Write(bufs, Headroom); n != 1 || err != nil {
			t.Fatalf("Write = %d, %v", n, err)
		}
		if _, err := k.Read(in, sizes, Headroom); err != nil && !errors.Is(err, ErrAgain) {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("Write and Read allocate %v times, want 0", n)
	}
}

func TestNetnsLongPacketsAreDroppedAndCounted(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	k := open(t, testConfig(l.pod))
	if _, err := connect(t, l.pod, netip.AddrPortFrom(remote4, 8080), 0, 50); !errors.Is(err, unix.EINPROGRESS) {
		t.Fatalf("connect: %v, want a timeout: nobody reads the device", err)
	}
	if _, err := k.Read([][]byte{make([]byte, Headroom+30)}, make([]int, 1), Headroom); !errors.Is(err, ErrAgain) {
		t.Errorf("Read of a SYN into 30 bytes: %v, want ErrAgain", err)
	}
	if d := k.Drops(); d.TooLong == 0 || d.Full != 0 {
		t.Errorf("Drops = %+v, want the SYN", d)
	}
}

func TestIsCut(t *testing.T) {
	t.Parallel()
	v4, v6 := make([]byte, 40), make([]byte, 60)
	v4[0], v4[3], v6[0], v6[5] = 0x45, 40, 0x60, 20
	for name, tt := range map[string]struct {
		pkt  []byte
		want bool
	}{
		"IPv4 complete": {v4, false}, "IPv4 cut": {v4[:39], true},
		"IPv6 complete": {v6, false}, "IPv6 cut": {v6[:59], true},
		"less than a header": {v4[:19], true}, "nothing": {nil, true},
	} {
		if got := isCut(tt.pkt); got != tt.want {
			t.Errorf("%s: isCut = %v, want %v", name, got, tt.want)
		}
	}
}

// Who is on the way into a namespace while it is closed gets there or is told so, and never gets anywhere else.
func TestNetnsCloseMeetsUse(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	ns := newNetns(t)
	for range 200 {
		other, err := ns.dup()
		must(t, err)
		dev, ino := other.ID()
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				err := other.Do(func() error {
					here, err := CurrentNetns()
					if err != nil {
						return err
					}
					defer here.Close()
					if d, i := here.ID(); d != dev || i != ino {
						t.Error("in another namespace")
					}
					return nil
				})
				if err != nil && !errors.Is(err, os.ErrClosed) {
					t.Errorf("Do: %v, want os.ErrClosed", err)
				}
			})
		}
		must(t, other.Close())
		all.Wait()
		if err := other.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
			t.Fatalf("Do after Close: %v, want os.ErrClosed", err)
		}
		if again, err := other.dup(); !errors.Is(err, os.ErrClosed) {
			t.Fatalf("dup after Close: %v, %v, want os.ErrClosed", again, err)
		}
	}
}
