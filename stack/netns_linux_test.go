package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// A kernelHost is a network namespace of its own whose default route is a TUN: the real peer of a Stack.
type kernelHost struct {
	t    testing.TB
	work chan func() // runs on a thread in the namespace
	dev  *socketDevice
}

func newKernelHost(t testing.TB) *kernelHost {
	t.Helper()
	h := &kernelHost{t: t, work: make(chan func())}
	up := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = h.setUp()
		}
		up <- err
		for f := range h.work {
			f()
		}
	}()
	t.Cleanup(func() { close(h.work) })
	if err := <-up; err != nil {
		if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
			t.Fatal(err)
		}
		t.Skipf("needs the privilege to make a network namespace with a TUN: %v", err)
	}
	return h
}

func (h *kernelHost) setUp() error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/net/tun: %w", err)
	}
	h.dev = &socketDevice{fd: fd}
	ifr, err := unix.NewIfreq("ztun0")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return fmt.Errorf("TUNSETIFF: %w", err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6|unix.TUN_F_TSO_ECN); err != nil {
		return fmt.Errorf("TUNSETOFFLOAD: %w", err)
	}
	link, err := netlink.LinkByName("ztun0")
	if err != nil {
		return err
	}
	for _, a := range []string{"10.0.0.7/32", "2001:db8::7/128"} {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("address %s: %w", a, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	for _, dst := range []string{"0.0.0.0/0", "::/0"} {
		_, all, err := net.ParseCIDR(dst)
		if err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: all, Scope: netlink.SCOPE_LINK}); err != nil {
			return fmt.Errorf("route %s: %w", dst, err)
		}
	}
	return nil
}

// dial connects from the namespace.
func (h *kernelHost) dial(to netip.AddrPort) (*net.TCPConn, error) {
	var c *net.TCPConn
	var err error
	done := make(chan struct{})
	h.work <- func() {
		defer close(done)
		var nc net.Conn
		if nc, err = (&net.Dialer{Timeout: 5 * time.Second}).Dial("tcp", to.String()); err == nil {
			c = nc.(*net.TCPConn)
		}
	}
	<-done
	return c, err
}

// newKernelLive is newLive with a kernel at the other end.
func newKernelLive(t testing.TB) (*live, *kernelHost) {
	t.Helper()
	h := newKernelHost(t)
	g, err := loop.New(loop.Config{Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &live{TB: t, g: g, ctx: ctx, reqs: make(chan TCPRequest, 16)}
	if l.s, err = New(Config{Device: h.dev, Group: g, Handler: l}); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	gctx, stopGroup := context.WithCancel(context.Background())
	all.Go(func() {
		defer stopGroup()
		if err := l.s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	all.Go(func() {
		if err := g.Run(gctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		all.Wait()
	})
	return l, h
}

func (l *live) kernelPair(h *kernelHost, to netip.AddrPort) (*loop.Blocked, *net.TCPConn) {
	l.Helper()
	var app *net.TCPConn
	var dialErr error
	var dialling sync.WaitGroup
	dialling.Go(func() { app, dialErr = h.dial(to) })
	c, err := (<-l.reqs).Accept(l.ctx)
	dialling.Wait()
	if err != nil || dialErr != nil {
		l.Fatalf("accept: %v, dial: %v", err, dialErr)
	}
	b := l.g.Blocking(l.ctx, c)
	for _, c := range []net.Conn{b, app} {
		c.SetDeadline(time.Now().Add(30 * time.Second))
	}
	return b, app
}

func TestNetnsKernelUnderstandsTheAnswers(t *testing.T) {
	l, h := newKernelLive(t)
	v4, v6 := flow4.Dst, flow6.Dst
	unreachable := func(c Cause) func(TCPRequest) { return func(r TCPRequest) { r.Unreachable(c) } }
	tests := []struct {
		name string
		to   netip.AddrPort
		verb func(TCPRequest)
		want syscall.Errno
	}{
		{"v4 reset", v4, TCPRequest.Reset, syscall.ECONNREFUSED},
		{"v4 host", v4, unreachable(HostUnreachable), syscall.EHOSTUNREACH},
		{"v4 network", v4, unreachable(NetworkUnreachable), syscall.ENETUNREACH},
		{"v4 prohibited", v4, unreachable(Prohibited), syscall.EHOSTUNREACH},
		{"v6 reset", v6, TCPRequest.Reset, syscall.ECONNREFUSED},
		{"v6 host", v6, unreachable(HostUnreachable), syscall.EHOSTUNREACH},
		{"v6 network", v6, unreachable(NetworkUnreachable), syscall.ENETUNREACH},
		{"v6 prohibited", v6, unreachable(Prohibited), syscall.EACCES},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			go func() { tt.verb(<-l.reqs) }()
			_, err := h.dial(tt.to)
			if !errors.Is(err, tt.want) {
				t.Errorf("connect: %v, want %v", err, tt.want)
			}
		})
	}
}

func TestNetnsBytesBothWays(t *testing.T) {
	l, h := newKernelLive(t)
	for _, to := range []netip.AddrPort{flow4.Dst, flow6.Dst} {
		t.Run(to.Addr().String(), func(t *testing.T) {
			b, app := l.kernelPair(h, to)
			defer b.Close()
			defer app.Close()
			before := l.s.Stats()
			transfer(t, b, app, 100<<20)
			st := l.s.Stats()
			if size := (st.RxBytes - before.RxBytes) / (st.RxPackets - before.RxPackets); size < 1500 {
				t.Errorf("the mean packet read has %d bytes: no superpackets", size)
			}
			if n := st.Drops; n[DropMalformed]+n[DropChecksum]+n[DropTooLong] != 0 {
				t.Errorf("drops %v, want none but of the link", n)
			}
		})
	}
}

func TestNetnsReset(t *testing.T) {
	l, h := newKernelLive(t)
	t.Run("of the stack's end", func(t *testing.T) {
		b, app := l.kernelPair(h, flow4.Dst)
		defer app.Close()
		b.Reset()
		if _, err := app.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the application read %v, want %v", err, syscall.ECONNRESET)
		}
	})
	t.Run("of the application", func(t *testing.T) {
		b, app := l.kernelPair(h, flow6.Dst)
		defer b.Close()
		app.SetLinger(0)
		app.Close()
		if _, err := b.Read(make([]byte, 1)); !errors.Is(err, loop.ErrReset) {
			t.Errorf("the stack's end read %v, want %v", err, loop.ErrReset)
		}
	})
}

func TestNetnsRunEndsWhenTheDeviceIsDeleted(t *testing.T) {
	h := newKernelHost(t)
	g, err := loop.New(loop.Config{Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	gctx, stopGroup := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	loops.Go(func() {
		if err := g.Run(gctx); err != nil {
			t.Error(err)
		}
	})
	defer loops.Wait()
	defer stopGroup()
	s, err := New(Config{Device: h.dev, Group: g, Handler: refuser{}})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(context.Background()) }()
	if _, err := h.dial(flow4.Dst); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("connect: %v, want %v", err, syscall.ECONNREFUSED)
	}
	deleted := make(chan error, 1)
	h.work <- func() {
		link, err := netlink.LinkByName("ztun0")
		if err == nil {
			err = netlink.LinkDel(link)
		}
		deleted <- err
	}
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, syscall.EBADFD) {
			t.Errorf("Run() = %v, want %v", err, syscall.EBADFD)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Run goes on 10 s after its device was deleted")
	}
}

func BenchmarkNetnsBulk(b *testing.B) {
	for _, up := range []bool{true, false} {
		b.Run(fmt.Sprintf("up=%v", up), func(b *testing.B) {
			l, h := newKernelLive(b)
			end, app := l.kernelPair(h, flow4.Dst)
			defer end.Close()
			defer app.Close()
			var from, to net.Conn = end, app
			if up {
				from, to = app, end
			}
			bulk(b, from, to)
		})
	}
}

// bulk moves 1 MiB for each iteration.
func bulk(b *testing.B, from io.Writer, to io.Reader) {
	const chunk = 1 << 20
	b.SetBytes(chunk)
	var wg sync.WaitGroup
	n := int64(b.N) * chunk
	b.ResetTimer()
	wg.Go(func() {
		buf := make([]byte, 256<<10)
		for left := n; left > 0; left -= int64(len(buf)) {
			if _, err := from.Write(buf); err != nil {
				b.Error(err)
				return
			}
		}
	})
	buf := make([]byte, 256<<10)
	for got := int64(0); got < n; {
		k, err := to.Read(buf)
		if err != nil {
			b.Fatal(err)
		}
		got += int64(k)
	}
	wg.Wait()
}
