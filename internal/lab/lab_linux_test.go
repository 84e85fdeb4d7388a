package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// needPrivilege skips the test where namespaces cannot be made, unless ZTUN_REQUIRE_NETNS says that they have to.
func needPrivilege(t testing.TB) {
	t.Helper()
	ns, err := newNetns()
	if err == nil {
		ns.Close()
		return
	}
	if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
		t.Fatal(err)
	}
	t.Skip(err)
}

func newLab(t testing.TB, cfg Config) *Lab {
	t.Helper()
	needPrivilege(t)
	l, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// echo serves one connection at a time until ln closes, and tells whom it served.
func echo(t testing.TB, ln net.Listener) <-chan netip.AddrPort {
	clients := make(chan netip.AddrPort, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			clients <- netip.MustParseAddrPort(c.RemoteAddr().String())
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	return clients
}

// exchange sends msg, half-closes and returns what came back.
func exchange(t testing.TB, c net.Conn, msg string) string {
	t.Helper()
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, msg); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestConfigErrors(t *testing.T) {
	tests := []struct {
		cfg  Config
		want string
	}{
		{Config{}, "lab: 0 nodes; want 1 to 250"},
		{Config{Nodes: 1, PodsPerNode: 241}, "lab: 241 pods for each node; want 0 to 240"},
		{Config{Nodes: 1, MTU: 100}, "lab: MTU 100; want 576 to 65535"},
		{Config{Nodes: 1, HopMTU: 1501}, "lab: MTU 1501 of the router; want 576 to 1500, with IPv6 1280 at least"},
		{Config{Nodes: 1, HopMTU: 1000, IPv6: true}, "lab: MTU 1000 of the router; want 576 to 1500, with IPv6 1280 at least"},
		{Config{Nodes: 1, MTU: 1000, IPv6: true}, "lab: MTU 1000; IPv6 wants 1280 at least (RFC 8200, section 5)"},
	}
	for _, tt := range tests {
		if _, err := New(t.Context(), tt.cfg); err == nil || err.Error() != tt.want {
			t.Errorf("New(%+v) = %v, want %s", tt.cfg, err, tt.want)
		}
	}
}

func TestNetnsEveryoneReachesEveryone(t *testing.T) {
	l := newLab(t, Config{Nodes: 2, PodsPerNode: 2, IPv6: true})
	if cc := l.CongestionControl(); cc != "cubic" && cc != "reno" {
		t.Errorf("congestion control is %q, want cubic or reno", cc)
	}
	server := l.Pod(1, 0)
	clients := append(l.Pods(), l.Node(0), l.Node(1), l.Wire().Host)
	for _, addr := range []netip.Addr{server.Addr4, server.Addr6} {
		at := netip.AddrPortFrom(addr, 8080).String()
		ln, err := server.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		seen := echo(t, ln)
		for _, h := range clients {
			if h == server {
				continue
			}
			c, err := h.Dial(within(t), "tcp", at)
			if err != nil {
				t.Fatalf("%s to %s: %v", h.Name, at, err)
			}
			if got := exchange(t, c, "hello"); got != "hello" {
				t.Errorf("%s to %s: echo of hello is %q", h.Name, at, got)
			}
			want := h.Addr4
			if addr.Is6() {
				want = h.Addr6
			}
			if got := (<-seen).Addr(); got != want {
				t.Errorf("%s to %s: the server saw %s, want %s", h.Name, at, got, want)
			}
		}
	}
}

func TestNetnsWhereTheLabEndsConnectionsFailAtOnce(t *testing.T) {
	l := newLab(t, Config{Nodes: 1, PodsPerNode: 1, IPv6: true})
	for _, addr := range []string{"192.0.2.1:80", "[2001:db8::1]:80"} {
		if _, err := l.Pod(0, 0).Dial(within(t), "tcp", addr); !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("dial %s: %v, want unreachable", addr, err)
		}
	}
}

func TestNetnsWithoutIPv6ThereIsNone(t *testing.T) {
	l := newLab(t, Config{Nodes: 1, PodsPerNode: 1})
	pod := l.Pod(0, 0)
	if pod.Addr6.IsValid() {
		t.Errorf("the pod has the IPv6 address %s", pod.Addr6)
	}
	if _, err := pod.Listen("tcp6", "[::1]:0"); err == nil {
		t.Error("a listener on ::1 works, want none")
	}
}

func TestNetnsInterfaceSettings(t *testing.T) {
	l := newLab(t, Config{Nodes: 1, PodsPerNode: 1, MTU: 9000, TimeWaitBuckets: 77})
	pod := l.Pod(0, 0)
	out, err := pod.Command(within(t), "cat", "/proc/sys/net/ipv4/tcp_congestion_control", "/proc/sys/net/ipv4/tcp_max_tw_buckets",
		"/proc/sys/net/ipv4/ip_local_port_range").Output()
	if err != nil {
		t.Fatal(err)
	}
	want := l.CongestionControl() + "\n77\n16384\t65535\n"
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Errorf("sysctls (-want +got):\n%s", diff)
	}
	err = pod.Do(func() error {
		for name, up := range map[string]bool{"lo": false, "eth0": true} {
			ifi, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			if ifi.Flags&net.FlagUp == 0 {
				t.Errorf("%s is down", name)
			}
			if up && ifi.MTU != 9000 {
				t.Errorf("%s has MTU %d, want 9000", name, ifi.MTU)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestNetnsPathOpensInChildren(t *testing.T) {
	l := newLab(t, Config{Nodes: 1, PodsPerNode: 1})
	pod := l.Pod(0, 0)
	// From the node's namespace, as a proxy would.
	out, err := l.Node(0).Command(within(t), "stat", "-L", "-c", "%i", pod.NetnsPath()).Output()
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(pod.File().Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.TrimSpace(string(out)), fmt.Sprint(st.Ino); got != want {
		t.Errorf("inode of %s is %s, want %s", pod.NetnsPath(), got, want)
	}
}

func TestNetnsDoComesHome(t *testing.T) {
	l := newLab(t, Config{Nodes: 1})
	here := func() string {
		s, err := os.Readlink(threadNetns)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	home, boom := here(), errors.New("boom")
	var there string
	err := l.Node(0).Do(func() error {
		there = here()
		return boom
	})
	if err != boom {
		t.Errorf("Do returned %v, want the error of its function as it is", err)
	}
	if there == home || here() != home {
		t.Errorf("namespaces before, within and after Do: %s, %s, %s", home, there, here())
	}
}

func TestNetnsCounterIsOfTheNamespace(t *testing.T) {
	l := newLab(t, Config{Nodes: 1})
	host := l.Node(0)
	count := func(name string) uint64 {
		n, err := host.Counter(name)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := count("TCPAbortOnData")
	ln, err := host.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := host.Dial(t.Context(), "tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
	if n := count("TCPAbortOnData"); n != before+1 {
		t.Errorf("%d after one connection was reset, %d before", n, before)
	}
	if n, err := host.Counter("TCPNothing"); err == nil {
		t.Errorf("a counter that there is not: %d", n)
	}
}

func TestNetnsCommandHasItsOwnResolvConf(t *testing.T) {
	machine, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		t.Skip(err)
	}
	l := newLab(t, Config{Nodes: 1, PodsPerNode: 1, ResolvConf: "nameserver 10.77.0.1\n"})
	pod := l.Pod(0, 0)
	read := func(resolv string) string {
		c := pod.Command(within(t), "cat", "/etc/resolv.conf")
		c.ResolvConf = resolv
		out, err := c.Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	if got := read(""); got != "nameserver 10.77.0.1\n" {
		t.Errorf("resolv.conf of the lab's Config reads %q", got)
	}
	if got := read("nameserver 10.77.0.2\n"); got != "nameserver 10.77.0.2\n" {
		t.Errorf("resolv.conf of the Cmd reads %q", got)
	}
	if now, err := os.ReadFile("/etc/resolv.conf"); err != nil || !bytes.Equal(now, machine) {
		t.Errorf("the machine's own resolv.conf reads %q, %v; want %q", now, err, machine)
	}
}

// A program's own resolver asks the server that its resolv.conf names, through its own namespace.
func TestNetnsNamesAreAskedInside(t *testing.T) {
	l := newLab(t, Config{Nodes: 1, PodsPerNode: 1, ResolvConf: "nameserver 10.77.0.1\noptions timeout:1 attempts:1\n"})
	pc, err := l.Wire().ListenPacket("udp4", "10.77.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	asked := make(chan string, 1)
	go func() {
		buf := make([]byte, 512)
		n, from, err := pc.ReadFrom(buf)
		asked <- fmt.Sprintf("%q from %v, %v", buf[:n], from, err)
	}()
	// The answer never comes: the question alone is looked at.
	_ = l.Pod(0, 0).Command(within(t), "getent", "ahostsv4", "lab-question.example").Run()
	_ = pc.SetReadDeadline(time.Now().Add(5 * time.Second))
	if got := <-asked; !strings.Contains(got, "lab-question") || !strings.Contains(got, "10.77.1.10:") {
		t.Errorf("the name server was asked %s; want lab-question.example from 10.77.1.10", got)
	}
}

func TestNetnsCommandEnds(t *testing.T) {
	l := newLab(t, Config{Nodes: 1})
	// A program that leaves another one behind in its process group. The read ends when all of the group have.
	start := func(ctx context.Context) (*Cmd, *os.File) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Close() })
		c := l.Node(0).Command(ctx, "sh", "-c", "trap '' TERM; sleep 600 & echo started; wait; wait")
		c.Stdout = w
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		w.Close()
		line := make([]byte, len("started\n"))
		if _, err := io.ReadFull(r, line); err != nil {
			t.Fatal(err)
		}
		return c, r
	}
	gone := func(t *testing.T, r *os.File) {
		t.Helper()
		_ = r.SetReadDeadline(time.Now().Add(10 * time.Second))
		if b, err := io.ReadAll(r); err != nil || len(b) > 0 {
			t.Errorf("the process group still holds its output: %q, %v", b, err)
		}
	}
	t.Run("with its context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		c, r := start(ctx)
		cancel()
		if err := c.Wait(); err == nil {
			t.Error("Wait returned nil for a killed program")
		}
		gone(t, r)
	})
	t.Run("with Stop, killed after the time of grace", func(t *testing.T) {
		c, r := start(t.Context())
		if err := c.Stop(10 * time.Millisecond); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Errorf("Stop = %v, want an error that says killed", err)
		}
		gone(t, r)
	})
	t.Run("by itself, with what it left behind", func(t *testing.T) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		c := l.Node(0).Command(t.Context(), "sh", "-c", "sleep 600 &")
		c.Stdout = w
		err = c.Run()
		w.Close()
		if err != nil {
			t.Error(err)
		}
		gone(t, r)
	})
	t.Run("with the lab", func(t *testing.T) {
		c, r := start(t.Context())
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		select {
		case <-c.Done():
		default:
			t.Error("the program outlived Close")
		}
		gone(t, r)
		if err := l.Node(0).Command(t.Context(), "true").Run(); err == nil {
			t.Error("a program started after Close")
		}
	})
}

func TestNetnsSniffer(t *testing.T) {
	l := newLab(t, Config{Nodes: 2, PodsPerNode: 1, IPv6: true})
	tests := []struct {
		name           string
		from, to       *Host
		v6             bool
		network        string
		port           uint16
		clear, tunnel  uint64 // of TCP payload
		hits, hidden   uint64
		other, crosses bool
	}{
		{"clear over IPv4", l.Pod(0, 0), l.Pod(1, 0), false, "tcp", 8080, 32, 0, 2, 0, false, true},
		{"clear over IPv6", l.Pod(0, 0), l.Pod(1, 0), true, "tcp", 8080, 32, 0, 2, 0, false, true},
		{"a marker in the tunnel is a leak of its own", l.Pod(0, 0), l.Pod(1, 0), true, "tcp", 15008, 0, 32, 2, 32, false, true},
		{"to the host of the wire", l.Pod(0, 0), l.Wire().Host, false, "tcp", 8080, 32, 0, 2, 0, false, true},
		{"from the host of the wire", l.Wire().Host, l.Pod(0, 0), true, "tcp", 8080, 32, 0, 2, 0, false, true},
		{"within a node nothing crosses", l.Node(0), l.Pod(0, 0), false, "tcp", 8080, 0, 0, 0, 0, false, false},
		{"a marker in UDP", l.Pod(0, 0), l.Pod(1, 0), true, "udp", 53, 0, 0, 1, 16, true, true},
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			marker := fmt.Sprintf("marker-%09d", i)
			addr := tt.to.Addr4
			if tt.v6 {
				addr = tt.to.Addr6
			}
			at := netip.AddrPortFrom(addr, tt.port).String()
			s, err := l.Wire().Sniff(SniffConfig{Markers: [][]byte{[]byte(marker), []byte("never sent")}})
			if err != nil {
				t.Fatal(err)
			}
			if tt.network == "udp" {
				pc, err := tt.to.ListenPacket("udp", at)
				if err != nil {
					t.Fatal(err)
				}
				defer pc.Close()
				c, err := tt.from.Dial(within(t), "udp", at)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				_, _ = io.WriteString(c, marker)
				_ = pc.SetReadDeadline(time.Now().Add(10 * time.Second))
				if _, _, err := pc.ReadFrom(make([]byte, 100)); err != nil {
					t.Fatal(err)
				}
			} else {
				ln, err := tt.to.Listen("tcp", at)
				if err != nil {
					t.Fatal(err)
				}
				echo(t, ln)
				c, err := tt.from.Dial(within(t), "tcp", at)
				if err != nil {
					t.Fatal(err)
				}
				exchange(t, c, marker)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			got := s.Count()
			if (got.Packets > 0) != tt.crosses || (got.OtherBytes > 0) != tt.other {
				t.Errorf("%d packets and %d bytes of others; want any: %v, %v", got.Packets, got.OtherBytes, tt.crosses, tt.other)
			}
			got.Packets, got.OtherBytes = 0, 0
			want := Count{ClearBytes: tt.clear, TunnelBytes: tt.tunnel, Hits: []uint64{tt.hits, 0}, HiddenBytes: tt.hidden}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("count (-want +got):\n%s", diff)
			}
		})
	}
}

// Each byte of a fast transfer is seen, and none is lost without a word.
func TestNetnsSnifferKeepsUp(t *testing.T) {
	l := newLab(t, Config{Nodes: 2, PodsPerNode: 1})
	const size = 64 << 20
	ln, err := l.Pod(1, 0).Listen("tcp", "10.77.2.10:8080")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	s, err := l.Wire().Sniff(SniffConfig{Markers: [][]byte{[]byte("a marker that is not there")}})
	if err != nil {
		t.Fatal(err)
	}
	received := make(chan int64, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			received <- -1
			return
		}
		defer c.Close()
		n, _ := io.Copy(io.Discard, c)
		received <- n
	}()
	c, err := l.Pod(0, 0).Dial(within(t), "tcp", "10.77.2.10:8080")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Error(err)
	}
	c.Close()
	if n := <-received; n != size {
		t.Errorf("received %d bytes of %d", n, size)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	got := s.Count()
	if got.ClearBytes+got.Dropped*65536 < size {
		t.Errorf("saw %d bytes and lost %d packets of %d bytes", got.ClearBytes, got.Dropped, size)
	}
	t.Logf("%d packets, %d lost", got.Packets, got.Dropped)
}

func TestNetnsCloseLeavesNothing(t *testing.T) {
	needPrivilege(t)
	before := descriptors(t)
	l, err := New(t.Context(), Config{Nodes: 2, PodsPerNode: 2, IPv6: true})
	if err != nil {
		t.Fatal(err)
	}
	// Cables into a namespace of the test's own: one end is gone when the namespace of the other is.
	watch, err := newNetns()
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	w := &Host{Name: "watch", lab: l, ns: watch}
	hosts := append(l.Pods(), l.Node(0), l.Node(1), l.Wire().Host)
	links := func() (names []string) {
		err := w.Do(func() error {
			all, err := netlink.LinkList()
			for _, link := range all {
				if link.Type() == "veth" {
					names = append(names, link.Attrs().Name)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	for i, h := range hosts {
		err := w.Do(func() error {
			return netlink.LinkAdd(&netlink.Veth{
				LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("watch%d", i)}, PeerName: "watch", PeerNamespace: netlink.NsFd(h.ns.Fd()),
			})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := len(links()); n != len(hosts) {
		t.Fatalf("%d cables, want %d", n, len(hosts))
	}
	c := l.Pod(0, 0).Command(t.Context(), "sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Wire().Sniff(SniffConfig{}); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if err := unix.Kill(c.Pid(), 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("process %d: %v, want it gone", c.Pid(), err)
	}
	deadline := time.Now().Add(20 * time.Second) // the kernel takes namespaces down in its own time, one after the other
	for len(links()) > 0 && time.Now().Before(deadline) {
		time.Sleep(20 * time.Millisecond)
	}
	if left := links(); len(left) > 0 {
		t.Errorf("namespaces still there, by their cables: %v", left)
	}
	watch.Close()
	if diff := cmp.Diff(before, descriptors(t)); diff != "" {
		t.Errorf("namespaces and sockets held (-before +after):\n%s", diff)
	}
}

// descriptors are the namespaces and sockets that this process holds open, by kind.
func descriptors(t *testing.T) map[string]int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	kinds := make(map[string]int)
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil {
			continue // the directory's own
		}
		// Pipes come and go with the pool that splice(2) takes them from.
		if kind, _, _ := strings.Cut(to, ":"); kind == "net" || kind == "socket" {
			kinds[kind]++
		}
	}
	return kinds
}
