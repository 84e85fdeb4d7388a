package stack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

// A host is the other end of a device: a second netstack in the role of the pod's kernel, whose connections are the
// applications'.
type host struct {
	net   *stack.Stack
	link  *link
	count counters
	wake  chan struct{}
	quit  chan struct{}
	done  sync.WaitGroup

	mu   sync.Mutex // guards below
	deaf bool       // packets to the host are lost
}

func newHost(t testing.TB, dev tun.Device, addrs ...netip.Addr) *host {
	t.Helper()
	h := &host{wake: make(chan struct{}, 1), quit: make(chan struct{})}
	h.link = newLink(dev, 1500, &h.count)
	h.net = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	rack, timeWait := tcpip.TCPRecovery(0), tcpip.TCPTimeWaitTimeoutOption(time.Millisecond)
	h.net.SetTransportProtocolOption(tcp.ProtocolNumber, &rack)
	h.net.SetTransportProtocolOption(tcp.ProtocolNumber, &timeWait)
	if err := h.net.CreateNIC(nicID, h.link); err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		proto := header.IPv4ProtocolNumber
		if a.Is6() {
			proto = header.IPv6ProtocolNumber
		}
		pa := tcpip.ProtocolAddress{Protocol: proto, AddressWithPrefix: tcpipAddr(a).WithPrefix()}
		if err := h.net.AddProtocolAddress(nicID, pa, stack.AddressProperties{}); err != nil {
			t.Fatal(err)
		}
	}
	h.net.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nicID}, {Destination: header.IPv6EmptySubnet, NIC: nicID},
	})
	dev.Notify(func() {
		select {
		case h.wake <- struct{}{}:
		default:
		}
	})
	h.done.Go(h.pump)
	return h
}

// pump delivers what the device has.
func (h *host) pump() {
	bufs, sizes := make([][]byte, 16), make([]int, 16)
	for i := range bufs {
		bufs[i] = make([]byte, frameBytes)
	}
	for {
		n, err := h.link.dev.Read(bufs, sizes, headroom)
		for i := range n {
			if h.isDeaf() {
				continue
			}
			b := bufs[i][headroom:][:sizes[i]]
			_, _, at := addresses(b)
			hdr := min(at+int(b[at+12]>>4)*4, len(b))
			h.link.deliver(b[0]>>4 == 6, b[:hdr], b[hdr:], nil)
		}
		if errors.Is(err, tun.ErrAgain) {
			var timeout <-chan time.Time
			if h.link.fd >= 0 {
				timeout = time.After(50 * time.Microsecond)
			}
			select {
			case <-h.wake:
			case <-timeout:
			case <-h.quit:
				return
			}
		} else if err != nil {
			return
		}
	}
}

func (h *host) isDeaf() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.deaf
}

func (h *host) close() {
	h.net.Close()
	h.net.Wait()
	close(h.quit)
	h.done.Wait()
	h.link.dev.Close()
}

// dial connects from an address of the host.
func (h *host) dial(ctx context.Context, f Flow) (*gonet.TCPConn, error) {
	proto := header.IPv4ProtocolNumber
	if f.Src.Addr().Is6() {
		proto = header.IPv6ProtocolNumber
	}
	full := func(a netip.AddrPort) tcpip.FullAddress {
		return tcpip.FullAddress{NIC: nicID, Addr: tcpipAddr(a.Addr()), Port: a.Port()}
	}
	return gonet.DialTCPWithBind(ctx, h.net, full(f.Src), full(f.Dst), proto)
}

// A socketDevice is a device with a descriptor: one end of a pair of datagram sockets, which keep packets apart as a TUN does.
type socketDevice struct {
	fd     int
	closed sync.Once
}

func socketPair(t testing.TB) (a, b *socketDevice) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 8<<20)
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 8<<20)
	}
	return &socketDevice{fd: fds[0]}, &socketDevice{fd: fds[1]}
}

func (d *socketDevice) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	n, err := readFD(d.fd, bufs[0][offset-headroom:])
	if err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, os.ErrClosed
	}
	sizes[0] = n - headroom
	return 1, nil
}

func (d *socketDevice) Write(bufs [][]byte, offset int) (int, error) {
	for i, b := range bufs {
		if err := writeFD(d.fd, b[offset-headroom:]); err != nil {
			return i, err
		}
	}
	return len(bufs), nil
}

func (d *socketDevice) FD() int           { return d.fd }
func (d *socketDevice) Notify(func())     {}
func (d *socketDevice) MTU() (int, error) { return 1500, nil }
func (d *socketDevice) BatchSize() int    { return 1 }

func (d *socketDevice) Close() error {
	d.closed.Do(func() { unix.Close(d.fd) })
	return nil
}

// A live is a Stack on real loops, joined to a host.
type live struct {
	testing.TB
	g    *loop.Group
	s    *Stack
	h    *host
	ctx  context.Context
	port uint16
	reqs chan TCPRequest
	stop func() // ends the stack and waits
}

func (l *live) ServeTCP(_ context.Context, req TCPRequest) { l.reqs <- req }
func (l *live) ServeUDP(context.Context, UDPConn)          {}

// devices are the two kinds that the stack drives differently.
var devices = map[string]func(testing.TB) (tun.Device, tun.Device){
	"memory":     func(testing.TB) (tun.Device, tun.Device) { return pipe() },
	"descriptor": func(t testing.TB) (tun.Device, tun.Device) { return socketPair(t) },
}

func pipe() (*tun.PipeEnd, *tun.PipeEnd) { return tun.Pipe() }

func newLive(t testing.TB, kind string) *live {
	t.Helper()
	return newLiveWith(t, kind, nil)
}

// newLiveWith is newLive with a Budget.
func newLiveWith(t testing.TB, kind string, budget *loop.Budget) *live {
	t.Helper()
	near, far := devices[kind](t)
	g, err := loop.New(loop.Config{Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &live{TB: t, g: g, ctx: ctx, port: 40000, reqs: make(chan TCPRequest, 16)}
	l.s, err = New(Config{Device: near, Group: g, Handler: l, Budget: budget})
	if err != nil {
		t.Fatal(err)
	}
	l.h = newHost(t, far, flow4.Src.Addr(), flow6.Src.Addr())
	var running sync.WaitGroup
	running.Go(func() {
		if err := l.s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	gctx, stopGroup := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	loops.Go(func() {
		if err := g.Run(gctx); err != nil {
			t.Error(err)
		}
	})
	l.stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(func() {
		l.stop()
		stopGroup()
		loops.Wait()
		l.h.close()
	})
	return l
}

// connect opens a connection and returns the stack's end and the application's.
func (l *live) connect(f Flow) (loop.Conn, *gonet.TCPConn) {
	l.Helper()
	f.Src = netip.AddrPortFrom(f.Src.Addr(), l.port)
	l.port++
	var app *gonet.TCPConn
	var dialErr error
	var dialling sync.WaitGroup
	dialling.Go(func() {
		ctx, cancel := context.WithTimeout(l.ctx, 10*time.Second)
		defer cancel()
		app, dialErr = l.h.dial(ctx, f)
	})
	ctx, cancel := context.WithTimeout(l.ctx, 10*time.Second)
	defer cancel()
	c, err := (<-l.reqs).Accept(ctx)
	dialling.Wait()
	if err != nil || dialErr != nil {
		l.Fatalf("accept: %v, dial: %v", err, dialErr)
	}
	return c, app
}

// pair is connect with a blocking view of the stack's end.
func (l *live) pair(f Flow) (*loop.Blocked, *gonet.TCPConn) {
	l.Helper()
	c, app := l.connect(f)
	b := l.g.Blocking(l.ctx, c)
	for _, c := range []net.Conn{b, app} {
		c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return b, app
}
