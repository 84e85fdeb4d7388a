package underlay

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/net/nettest"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newNetns makes an empty network namespace with loopback up.
func newNetns(t *testing.T) *tun.Netns {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
			t.Fatal("needs root")
		}
		t.Skip("needs root; ZTUN_REQUIRE_NETNS=1 makes this an error")
	}
	type result struct {
		ns  *tun.Netns
		err error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- result{err: err}
			return
		}
		ns, err := tun.CurrentNetns()
		if err == nil {
			var lo netlink.Link
			if lo, err = netlink.LinkByName("lo"); err == nil {
				err = netlink.LinkSetUp(lo)
			}
			// An address that is not loopback, as a pod has.
			if err == nil {
				err = netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 1, 0, 1), Mask: net.CIDRMask(32, 32)}})
			}
		}
		made <- result{ns, err}
	}()
	r := <-made
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { r.ns.Close() })
	return r.ns
}

func startGroup(t *testing.T) *loop.Group {
	t.Helper()
	g, err := loop.New(loop.Config{Loops: 2, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if s := g.Stats(); s != (loop.Stats{}) {
			t.Errorf("after the end the group holds %+v", s)
		}
	})
	return g
}

func newUnderlay(t *testing.T) *Underlay {
	t.Helper()
	ns := newNetns(t)
	u, err := New(Config{
		Netns: ns, Group: startGroup(t), Marks: tun.Marks{Own: 0x539, Deliver: 0x111}, Rand: rand.Uint64, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// listen accepts into a channel on some port of addr.
func listen(t *testing.T, u *Underlay, addr string) (netip.AddrPort, <-chan loop.Conn) {
	t.Helper()
	a := netip.AddrPortFrom(netip.MustParseAddr(addr), 7000)
	l, err := u.Listen(a)
	if err != nil {
		t.Fatal(err)
	}
	conns := make(chan loop.Conn, 16)
	if err := l.Start(func(c loop.Conn) { conns <- c }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return a, conns
}

// TestNetnsConnsBehaveAsNetConns runs all of nettest over blocking views of kernel connections. A net.Conn has no half-close and no
// reset: TestNetnsHalfCloseAndReset has them.
func TestNetnsConnsBehaveAsNetConns(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1"} {
		t.Run(addr, func(t *testing.T) {
			u := newUnderlay(t)
			a, conns := listen(t, u, addr)
			nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
				c, err := u.Dial(t.Context(), a)
				if err != nil {
					return nil, nil, nil, err
				}
				s := <-conns
				if s.RemoteAddr() != c.LocalAddr() || s.LocalAddr() != a || c.RemoteAddr() != a {
					return nil, nil, nil, errors.New("the ends disagree about their addresses")
				}
				x, y := u.cfg.Group.Blocking(context.Background(), c), u.cfg.Group.Blocking(context.Background(), s)
				return x, y, func() { x.Close(); y.Close() }, nil
			})
		})
	}
}

func TestNetnsHalfCloseAndReset(t *testing.T) {
	u := newUnderlay(t)
	a, conns := listen(t, u, "127.0.0.1")
	open := func() (*loop.Blocked, *loop.Blocked) {
		t.Helper()
		c, err := u.Dial(t.Context(), a)
		if err != nil {
			t.Fatal(err)
		}
		return u.cfg.Group.Blocking(t.Context(), c), u.cfg.Group.Blocking(t.Context(), <-conns)
	}
	c, s := open()
	data := bytes.Repeat([]byte("0123456789"), 400_000)
	go func() {
		c.Write(data)
		c.CloseWrite()
	}()
	got, err := io.ReadAll(s)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes and %v, want %d bytes and EOF", len(got), err, len(data))
	}
	if _, err := s.Write([]byte("still open")); err != nil {
		t.Errorf("after a half-close the other direction fails: %v", err)
	}
	s.Close()
	if got, err := io.ReadAll(c); err != nil || string(got) != "still open" {
		t.Errorf("%q, %v", got, err)
	}
	c.Close()

	c, s = open()
	c.Reset()
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, loop.ErrReset) || !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("after a reset: %v, want ErrReset", err)
	}
	s.Close()
}

// A task that waits for its connection to break, and reads nothing.
type checker struct {
	c    *Conn
	r    *loop.Ref
	done chan error
}

func (k *checker) Turn(int) bool {
	if err := k.c.Check(); err != nil {
		k.done <- err
		k.c.Reset()
		k.r.Remove()
	}
	return false
}

func TestNetnsResetIsSeenWithoutReading(t *testing.T) {
	u := newUnderlay(t)
	a, conns := listen(t, u, "127.0.0.1")
	c, err := u.Dial(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	k := &checker{c: (<-conns).(*Conn), done: make(chan error, 1)}
	u.cfg.Group.Add(func(r *loop.Ref) loop.Task {
		k.r = r
		if err := k.c.Attach(r); err != nil {
			t.Error(err)
		}
		return k
	})
	if _, err := c.TryWrite([]byte("not read")); err != nil {
		t.Fatal(err)
	}
	c.Reset()
	select {
	case err := <-k.done:
		if !errors.Is(err, loop.ErrReset) {
			t.Errorf("Check = %v, want ErrReset", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the reset is not seen")
	}
}

func TestNetnsDialErrors(t *testing.T) {
	u := newUnderlay(t)
	if _, err := u.Dial(t.Context(), netip.MustParseAddrPort("127.0.0.1:1")); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("closed port: %v, want connection refused", err)
	}
	if _, err := u.Dial(t.Context(), netip.MustParseAddrPort("192.0.2.1:1")); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("no route: %v, want network unreachable", err)
	}
	if _, err := u.DialLoopback(t.Context(), netip.MustParseAddrPort("10.1.0.1:1")); err == nil || !strings.Contains(err.Error(), "not a loopback address") {
		t.Errorf("DialLoopback elsewhere: %v", err)
	}
	// A listener with a full backlog answers nothing: the wait ends with its context.
	a, conns := listen(t, u, "127.0.0.1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := u.Dial(ctx, a)
	select { // loopback may be quicker than the cancelled context
	case c := <-conns:
		c.Close()
	case <-time.After(100 * time.Millisecond):
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestNetnsListenerWaitsWhileItMayNotAccept(t *testing.T) {
	u := newUnderlay(t)
	a := netip.MustParseAddrPort("127.0.0.1:7001")
	l, err := u.Listen(a)
	if err != nil {
		t.Fatal(err)
	}
	var may atomic.Bool
	asked := make(chan struct{}, 64)
	l.Limit(func() bool { asked <- struct{}{}; return may.Load() })
	conns := make(chan loop.Conn, 1)
	if err := l.Start(func(c loop.Conn) { conns <- c }); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	<-asked // its first turn
	c, err := u.Dial(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	<-asked // for the connection
	select {
	case <-conns:
		t.Error("accepted although it may not")
	default:
	}
	may.Store(true)
	l.Resume()
	(<-conns).Close()
}

// Connections leave the last descriptors to others, and go on when there are more again.
func TestNetnsDescriptorsAreReserved(t *testing.T) {
	t.Run("FP-19", func(t *testing.T) {
		u := newUnderlay(t)
		lowest := func() int {
			fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			return fd
		}
		fd := lowest()
		unix.Close(fd)
		var log lockedBuffer
		looks := make(chan struct{}, 1024)
		d := &Descriptors{limit: fd + 60, first: fd + 20, log: slog.New(slog.NewTextHandler(&log, nil)), now: func() time.Time {
			looks <- struct{}{}
			return time.Unix(1e9, 0)
		}}
		limited, err := New(u.cfg)
		if err != nil {
			t.Fatal(err)
		}
		limited.cfg.Descriptors = d
		a, conns := listen(t, limited, "127.0.0.1")
		for range 2 { // while there are some
			c, err := limited.Dial(t.Context(), a)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			defer (<-conns).Close()
		}
		var taken []int
		for len(taken) == 0 || taken[len(taken)-1] < d.first {
			taken = append(taken, lowest())
		}
		if _, err := limited.Dial(t.Context(), a); !errors.Is(err, unix.EMFILE) || d.Refused() != 1 {
			t.Errorf("a connection beyond the limit: %v, %d counted", err, d.Refused())
		}
		if _, err := limited.Exchange(t.Context(), a, nil, nil, nil); !errors.Is(err, unix.EMFILE) {
			t.Errorf("a question beyond the limit: %v", err)
		}
		for len(looks) > 0 {
			<-looks
		}
		c, err := u.Dial(t.Context(), a) // of somebody else
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for range 3 { // the listener has looked, and looks again
			<-looks
		}
		select {
		case <-conns:
			t.Error("accepted beyond the limit")
		default:
		}
		for _, fd := range taken {
			unix.Close(fd)
		}
		(<-conns).Close()
		if n := strings.Count(log.String(), "descriptor limit reached"); n != 1 {
			t.Errorf("%d lines in a minute, want one:\n%s", n, log.String())
		}
	})
}

// A lockedBuffer is a log that several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

func TestNetnsListenerNamesAPortThatIsTaken(t *testing.T) {
	u := newUnderlay(t)
	a, _ := listen(t, u, "127.0.0.1")
	if _, err := u.Listen(a); !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), "stop the process that holds the port") {
		t.Errorf("got %v, want the cause and the next step", err)
	}
}

func TestNetnsSocketsCarryMarksAndLimits(t *testing.T) {
	u := newUnderlay(t)
	a, conns := listen(t, u, "127.0.0.1")
	c, err := u.DialPeer(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	s := <-conns
	for name, conn := range map[string]loop.Conn{"dialled": c, "accepted": s} {
		fd := conn.(*Conn).fd
		for _, o := range []struct {
			level, opt, want int
			name             string
		}{
			{unix.SOL_SOCKET, unix.SO_MARK, 0x539, "mark"},
			{unix.SOL_TCP, unix.TCP_NODELAY, 1, "nodelay"},
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1, "keepalive"},
			{unix.SOL_TCP, unix.TCP_KEEPIDLE, 45, "keepalive time"},
			{unix.SOL_TCP, unix.TCP_KEEPINTVL, 15, "keepalive interval"},
			{unix.SOL_TCP, unix.TCP_KEEPCNT, 3, "keepalive retries"},
			{unix.SOL_TCP, unix.TCP_USER_TIMEOUT, 90_000, "user timeout"},
		} {
			if o.name == "mark" && name == "accepted" {
				continue // inherited only with tcp_fwmark_accept or from the listener, which is another test's concern
			}
			if got, err := unix.GetsockoptInt(fd, o.level, o.opt); err != nil || got != o.want {
				t.Errorf("%s of the %s socket is %d (%v), want %d", o.name, name, got, err, o.want)
			}
		}
	}
	c.Close()
	s.Close()
}

// D29: what the settings switch off is off, also on what listeners accept; connections of applications have no user timeout.
func TestNetnsTimersFollowTheConfiguration(t *testing.T) {
	u := newUnderlay(t)
	for _, tt := range []struct {
		name                            string
		time                            time.Duration
		noUserTimeout, peer             bool
		keepalive, idle, userTimeoutMil int
	}{
		{"a tunnel", 45 * time.Second, false, true, 1, 45, 90_000},
		{"an application", 45 * time.Second, false, false, 1, 45, 0},
		{"another time", 10 * time.Second, false, true, 1, 10, 55_000},
		{"no keepalive", -1, false, true, 0, 7200, 45_000},
		{"no user timeout", 45 * time.Second, true, true, 1, 45, 0},
	} {
		cfg := u.cfg
		cfg.KeepaliveTime, cfg.NoUserTimeout = tt.time, tt.noUserTimeout
		v, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		options := []func(int) error{v.tune}
		dial := v.Dial
		if tt.peer {
			options, dial = append(options, v.tuneTunnel), v.DialPeer
		}
		l, err := v.listen(netip.MustParseAddrPort("127.0.0.1:7011"), backlog, append(options, v.mark)...)
		if err != nil {
			t.Fatal(err)
		}
		conns := make(chan loop.Conn, 1)
		if err := l.Start(func(c loop.Conn) { conns <- c }); err != nil {
			t.Fatal(err)
		}
		c, err := dial(t.Context(), l.Addr())
		if err != nil {
			t.Fatal(err)
		}
		s := <-conns
		for end, conn := range map[string]loop.Conn{"dialled": c, "accepted": s} {
			for _, o := range []socketOption{
				{unix.SOL_SOCKET, unix.SO_KEEPALIVE, tt.keepalive, "keepalive"},
				{unix.SOL_TCP, unix.TCP_KEEPIDLE, tt.idle, "keepalive time"},
				{unix.SOL_TCP, unix.TCP_USER_TIMEOUT, tt.userTimeoutMil, "user timeout"},
			} {
				if got, err := unix.GetsockoptInt(conn.(*Conn).fd, o.level, o.opt); err != nil || got != o.value {
					t.Errorf("%s, %s: %s is %d (%v), want %d", tt.name, end, o.name, got, err, o.value)
				}
			}
		}
		c.Reset()
		s.Close()
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// What the kernel holds of a near peer's bytes is bounded, on both ends and also when nothing was received yet.
func TestNetnsBacklogOfANearPeerIsBounded(t *testing.T) {
	u := newUnderlay(t)
	addr, conns := listen(t, u, "127.0.0.1")
	c, err := u.DialPeer(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	s := <-conns
	for end, conn := range map[string]loop.Conn{"dialled": c, "accepted": s} {
		conn.(loop.Backlogged).BoundBacklog()
		if got, err := unix.GetsockoptInt(conn.(*Conn).fd, unix.SOL_SOCKET, unix.SO_RCVBUF); err != nil || got != 2*nearBacklog {
			t.Errorf("%s: the receive buffer is %d (%v), want %d", end, got, err, 2*nearBacklog)
		}
		conn.Close()
	}
}

func TestNetnsDeliverIsFromTheClientsAddress(t *testing.T) {
	u := newUnderlay(t)
	// What the capture sets up: replies to the delivery mark come back to us.
	if err := u.cfg.Netns.Do(func() error {
		rule := netlink.NewRule()
		rule.Priority, rule.Mark, rule.Table = 900, 0x111, 1338
		mask := uint32(0xfff)
		rule.Mask = &mask
		if err := netlink.RuleAdd(rule); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		_, all, _ := net.ParseCIDR("0.0.0.0/0")
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: all, Table: 1338, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}); err != nil {
			return err
		}
		return os.WriteFile("/proc/sys/net/ipv4/tcp_fwmark_accept", []byte("1"), 0)
	}); err != nil {
		t.Fatal(err)
	}
	// The application: a listener without a mark of its own, which would break the inheritance of ours.
	var l net.Listener
	if err := u.cfg.Netns.Do(func() (err error) { l, err = net.Listen("tcp", "10.1.0.1:7000"); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a := netip.MustParseAddrPort("10.1.0.1:7000")
	client := netip.MustParseAddrPort("192.0.2.7:40000")
	c, err := u.Deliver(t.Context(), client, a)
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if got := s.RemoteAddr().(*net.TCPAddr).AddrPort(); got.Addr() != client.Addr() || got.Port() == client.Port() || got.Port() > lastDeliveryPort || got.Port() < firstDeliveryPort {
		t.Errorf("the application sees %v, want the client's address and a port of ours", got)
	}
	x := u.cfg.Group.Blocking(t.Context(), c)
	go func() { x.Write([]byte("hello")); x.CloseWrite() }()
	if got, err := io.ReadAll(s); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	x.Close()
	s.Close()

	// A pod that reaches itself cannot be imitated.
	c, err = u.Deliver(t.Context(), netip.MustParseAddrPort("10.1.0.1:40000"), a)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	if got := s.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != a.Addr() {
		t.Errorf("self-call: the application sees %v, want %v", got, a.Addr())
	}
	c.Close()
	s.Close()
}

// Without the privilege to speak from another's address the check says so, and what it takes; with it, or with half of it, nothing.
func TestNetnsTransparencyIsChecked(t *testing.T) {
	u := newUnderlay(t)
	const admin, raw = 1 << unix.CAP_NET_ADMIN, 1 << unix.CAP_NET_RAW
	check := func(without uint32) (err error) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // the thread ends with the goroutine
			head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var caps [2]unix.CapUserData
			if err = unix.Capget(&head, &caps[0]); err != nil {
				return
			}
			caps[0].Effective &^= without
			if err = unix.Capset(&head, &caps[0]); err == nil {
				err = u.CheckTransparent()
			}
		}()
		<-done
		return err
	}
	for without, want := range map[uint32]bool{0: true, admin: true, raw: true, admin | raw: false} {
		if err := check(without); (err == nil) != want {
			t.Errorf("without capabilities %#x: %v, want it allowed: %v", without, err, want)
		} else if !want && (!errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "needs CAP_NET_ADMIN or CAP_NET_RAW")) {
			t.Errorf("without capabilities %#x: %v, want EPERM and what it takes", without, err)
		}
	}
}

func TestNetnsExchange(t *testing.T) {
	u := newUnderlay(t)
	fd, err := u.cfg.Netns.Socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 53, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	go func() { // a resolver that first sends something else
		p := make([]byte, 512)
		n, from, err := unix.Recvfrom(fd, p, 0)
		if err != nil {
			return
		}
		unix.Sendto(fd, []byte("noise"), 0, from)
		unix.Sendto(fd, append([]byte("re:"), p[:n]...), 0, from)
	}()
	server := netip.MustParseAddrPort("127.0.0.1:53")
	got, err := u.Exchange(t.Context(), server, []byte("question"), make([]byte, 512), func(p []byte) bool { return bytes.HasPrefix(p, []byte("re:")) })
	if err != nil || string(got) != "re:question" {
		t.Errorf("%q, %v", got, err)
	}
	ctx, cancel := u.cfg.Group.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := u.Exchange(ctx, server, []byte("x"), make([]byte, 512), func([]byte) bool { return true }); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v, want the deadline", err)
	}
	if _, err := u.Exchange(t.Context(), netip.MustParseAddrPort("127.0.0.1:54"), []byte("x"), make([]byte, 512), func([]byte) bool { return true }); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("no resolver: %v, want refused", err)
	}
}
