package underlay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/stack"
)

// The ports to which istio-cni's rules redirect captured connections.
const (
	OutboundPort = 15001
	InboundPort  = 15006
	DNSPort      = 15053
)

// DefaultMaxPending is how many redirected connections of a pod may be without a decision, as with unanswered SYNs.
const DefaultMaxPending = 2048

// A Redirect is the redirect backend of one pod: listeners in its namespace, to which the rules that istio-cni has installed
// lead what is captured. The kernel has accepted each connection before a Handler decides about it: refusals of every kind are
// resets there, and nothing is given back to the kernel.
type Redirect struct {
	u       *Underlay
	handler stack.Handler
	limits  *stack.Limits
	max     int
	tcp     []*Listener
	udp     []*udpListener

	mu      sync.Mutex // guards below
	pending map[*redirected]struct{}
	oldest  []*redirected // in the order of their arrival; ended ones are skipped
	evicted uint64
	limited uint64
}

// A RedirectConfig configures a Redirect.
type RedirectConfig struct {
	Handler    stack.Handler
	Limits     *stack.Limits // shared by the process; nil: none
	MaxPending int           // of this pod; 0 means DefaultMaxPending
	IPv6       bool
}

// ListenRedirect binds the ports of the redirect backend. Accepting begins with Start.
func (u *Underlay) ListenRedirect(cfg RedirectConfig) (_ *Redirect, err error) {
	if cfg.MaxPending == 0 {
		cfg.MaxPending = DefaultMaxPending
	}
	r := &Redirect{u: u, handler: cfg.Handler, limits: cfg.Limits, max: cfg.MaxPending, pending: make(map[*redirected]struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close(context.Background()))
		}
	}()
	wildcard, loopback := netip.IPv4Unspecified(), []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	if cfg.IPv6 {
		wildcard, loopback = netip.IPv6Unspecified(), append(loopback, netip.IPv6Loopback())
	}
	addrs := []netip.AddrPort{netip.AddrPortFrom(wildcard, OutboundPort), netip.AddrPortFrom(wildcard, InboundPort)}
	for _, a := range loopback {
		addrs = append(addrs, netip.AddrPortFrom(a, DNSPort))
	}
	for _, a := range addrs {
		l, err := u.listenApplications(a)
		if err != nil {
			return nil, err
		}
		r.tcp = append(r.tcp, l)
	}
	for _, a := range loopback {
		l, err := u.listenUDP(netip.AddrPortFrom(a, DNSPort))
		if err != nil {
			return nil, err
		}
		r.udp = append(r.udp, l)
	}
	return r, nil
}

// Start gives what arrives to the handler.
func (r *Redirect) Start() error {
	for _, l := range r.tcp {
		if err := l.Start(r.accepted); err != nil {
			return err
		}
	}
	for _, l := range r.udp {
		if err := l.start(r.handler); err != nil {
			return err
		}
	}
	return nil
}

// Addrs are the addresses that the backend listens on.
func (r *Redirect) Addrs() (list []netip.AddrPort) {
	for _, l := range r.tcp {
		list = append(list, l.Addr())
	}
	return list
}

// Refused counts connections that were refused: at the pod's limit, for newer ones, and at that of the process.
func (r *Redirect) Refused() (evicted, limited uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.evicted, r.limited
}

// Close closes the listeners and resets connections without a decision.
func (r *Redirect) Close(ctx context.Context) (err error) {
	for _, l := range r.tcp {
		err = errors.Join(err, l.Close(ctx))
	}
	for _, l := range r.udp {
		err = errors.Join(err, l.close(ctx))
	}
	r.mu.Lock()
	left := make([]*redirected, 0, len(r.pending))
	for q := range r.pending {
		left = append(left, q)
	}
	r.mu.Unlock()
	for _, q := range left {
		q.end(stack.ErrGone)
		q.Reset()
	}
	return err
}

// accepted is called on the loop of a listener.
func (r *Redirect) accepted(c loop.Conn) {
	conn := c.(*Conn)
	flow := stack.Flow{Proto: stack.TCP, Src: conn.remote, Dst: conn.local}
	if dst, ok := originalDestination(conn.fd, conn.remote.Addr().Is4()); ok {
		flow.Dst = dst
	}
	// As the other backend's connections: the local end is what the application dialled.
	conn.local = flow.Dst
	q := &redirected{r: r, conn: conn, flow: flow}
	ctx, cancel := context.WithCancelCause(context.Background())
	q.cancel = cancel
	// An application that hangs up ends its request. A FIN alone is no hang-up: `printf x | nc`. The watch is there before
	// anybody else can see the request.
	q.watch = r.u.cfg.Group.Add(func(ref *loop.Ref) loop.Task {
		if err := ref.Watch(conn.fd, func(ev loop.Events) {
			if ev&(loop.HangUp|loop.Failed) != 0 {
				q.end(stack.ErrGone)
			}
		}); err != nil {
			q.end(err)
		}
		return pendingTask{}
	})
	if !r.admit(q) {
		q.refuse()
		return
	}
	r.handler.ServeTCP(ctx, q)
}

// pendingTask holds the watch of a connection without a decision.
type pendingTask struct{}

func (pendingTask) Turn(int) bool  { return false }
func (pendingTask) String() string { return "a redirected connection without a decision" }

// admit takes a place for a connection. At the pod's limit the oldest without a decision gives up its own.
func (r *Redirect) admit(q *redirected) bool {
	if r.limits != nil && !r.limits.Acquire() {
		r.mu.Lock()
		r.limited++
		r.mu.Unlock()
		return false
	}
	var evicted *redirected
	r.mu.Lock()
	if len(r.pending) >= r.max {
		r.evicted++
		evicted = r.takeOldest()
	}
	r.pending[q] = struct{}{}
	r.oldest = append(r.oldest, q)
	r.mu.Unlock()
	if evicted != nil {
		evicted.end(stack.ErrGone)
		evicted.Reset()
	}
	return true
}

// takeOldest is called with mu held.
func (r *Redirect) takeOldest() *redirected {
	for len(r.oldest) > 0 {
		q := r.oldest[0]
		r.oldest[0] = nil
		r.oldest = r.oldest[1:]
		if _, ok := r.pending[q]; ok {
			return q
		}
	}
	return nil
}

func (r *Redirect) settled(q *redirected) {
	r.mu.Lock()
	delete(r.pending, q)
	// The list holds at most twice as many as are pending.
	if len(r.oldest) > 64 && len(r.oldest) > 2*len(r.pending) {
		kept := r.oldest[:0]
		for _, o := range r.oldest {
			if _, ok := r.pending[o]; ok {
				kept = append(kept, o)
			}
		}
		clear(r.oldest[len(kept):])
		r.oldest = kept
	}
	r.mu.Unlock()
	if r.limits != nil {
		r.limits.Release()
	}
}

// A redirected connection is a stack.TCPRequest whose handshake is over.
type redirected struct {
	r      *Redirect
	conn   *Conn
	flow   stack.Flow
	watch  *loop.Ref
	cancel context.CancelCauseFunc

	mu      sync.Mutex // guards below
	settled bool
	gone    bool // the application hung up, or a limit took the place
}

var _ stack.TCPRequest = (*redirected)(nil)

func (q *redirected) Flow() stack.Flow { return q.flow }

// end makes the request's context end.
func (q *redirected) end(cause error) {
	q.mu.Lock()
	q.gone = true
	q.mu.Unlock()
	q.cancel(cause)
}

// settle reports whether this is the first verb.
func (q *redirected) settle() (first, gone bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	first = !q.settled
	q.settled = true
	return first, q.gone
}

// Accept implements stack.TCPRequest: the connection changes hands.
func (q *redirected) Accept(ctx context.Context) (loop.Conn, error) {
	first, gone := q.settle()
	if !first {
		return nil, stack.ErrGone
	}
	defer q.cancel(nil)
	defer q.r.settled(q)
	err := q.unwatch(ctx)
	if err != nil || gone {
		return nil, errors.Join(stack.ErrGone, err, q.conn.Reset())
	}
	return q.conn, nil
}

// unwatch returns once the watch is gone, so that another may begin.
func (q *redirected) unwatch(ctx context.Context) error {
	if q.watch == nil {
		return loop.ErrStopped
	}
	return loop.Await(context.WithoutCancel(ctx), func(wake func()) {
		if !q.watch.Post(func() { q.watch.Remove(); wake() }) {
			wake()
		}
	})
}

// Reset implements stack.TCPRequest.
func (q *redirected) Reset() {
	if first, _ := q.settle(); !first {
		return
	}
	q.r.settled(q)
	q.refuse()
}

// refuse resets the connection.
func (q *redirected) refuse() {
	q.cancel(nil)
	reset := func() { _ = q.conn.Reset() }
	if q.watch == nil || !q.watch.Post(func() { q.watch.Remove(); reset() }) {
		reset()
	}
}

// Unreachable implements stack.TCPRequest: too late to say so.
func (q *redirected) Unreachable(stack.Cause) { q.Reset() }

// Drop implements stack.TCPRequest.
func (q *redirected) Drop() { q.Reset() }

// HandBack implements stack.TCPRequest.
func (q *redirected) HandBack() error { return stack.ErrUnsupported }

// originalDestination asks connection tracking where a redirected connection was going (SO_ORIGINAL_DST, IP6T_SO_ORIGINAL_DST:
// linux/netfilter_ipv4.h and linux/netfilter_ipv6/ip6_tables.h); false if it was not redirected.
func originalDestination(fd int, ipv4 bool) (netip.AddrPort, bool) {
	const originalDst = 80
	if ipv4 {
		var sa unix.RawSockaddrInet4
		if !getsockopt(fd, unix.SOL_IP, originalDst, unsafe.Pointer(&sa), unix.SizeofSockaddrInet4) {
			return netip.AddrPort{}, false
		}
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), networkOrder(sa.Port)), true
	}
	var sa unix.RawSockaddrInet6
	if !getsockopt(fd, unix.SOL_IPV6, originalDst, unsafe.Pointer(&sa), unix.SizeofSockaddrInet6) {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), networkOrder(sa.Port)), true
}

func networkOrder(port uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&port))
	return uint16(b[0])<<8 | uint16(b[1])
}

func getsockopt(fd, level, opt int, p unsafe.Pointer, size uint32) bool {
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(opt), uintptr(p), uintptr(unsafe.Pointer(&size)), 0)
	return errno == 0
}

// A udpListener takes redirected questions. What they were addressed to is not known: connection tracking tells it for TCP only.
type udpListener struct {
	u       *Underlay
	fd      int
	addr    netip.AddrPort
	handler stack.Handler
	handle  *loop.Ref // nil until start
	ref     *loop.Ref // the same, for what begins on the loop
	buf     [65535]byte
}

func (u *Underlay) listenUDP(addr netip.AddrPort) (*udpListener, error) {
	domain, sa := sockaddr(addr)
	fd, err := u.cfg.Netns.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return nil, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(u.cfg.Marks.Own))
	if err == nil {
		err = unix.Bind(fd, sa)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("underlay: listen on udp %s in netns %s: %w", addr, u.cfg.Netns, err)
	}
	return &udpListener{u: u, fd: fd, addr: addr}, nil
}

func (l *udpListener) start(h stack.Handler) error {
	l.handle = l.u.cfg.Group.Add(func(r *loop.Ref) loop.Task {
		l.ref, l.handler = r, h
		if err := r.Watch(l.fd, func(loop.Events) { r.Wake() }); err != nil {
			l.u.cfg.Log.Error("listener does not hear", "address", l.addr.String(), "error", err.Error())
		}
		return l
	})
	if l.handle == nil {
		return loop.ErrStopped
	}
	return nil
}

func (l *udpListener) String() string { return "the listener on udp " + l.addr.String() }

// Turn implements loop.Task.
func (l *udpListener) Turn(int) bool {
	const datagramsPerTurn = 64
	for range datagramsPerTurn {
		if l.fd < 0 {
			return false
		}
		n, from, err := unix.Recvfrom(l.fd, l.buf[:], 0)
		if err != nil {
			return false
		}
		src := addrPort(from)
		if !src.IsValid() {
			continue
		}
		l.handler.ServeUDP(context.Background(), &redirectedUDP{
			l: l, payload: l.buf[:n],
			flow: stack.Flow{Proto: stack.UDP, Src: src, Dst: netip.AddrPortFrom(unspecifiedLike(src.Addr()), dnsPort)},
		})
	}
	return true
}

// dnsPort is where redirected questions were going.
const dnsPort = 53

func unspecifiedLike(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func (l *udpListener) close(ctx context.Context) error {
	shut := func() error {
		fd := l.fd
		l.fd = -1
		if fd < 0 {
			return nil
		}
		return unix.Close(fd)
	}
	if l.handle == nil {
		return shut()
	}
	var closed error
	err := loop.Await(ctx, func(wake func()) {
		if !l.handle.Post(func() { l.handle.Remove(); closed = shut(); wake() }) {
			wake()
		}
	})
	return errors.Join(err, closed)
}

// A redirectedUDP is a stack.UDPConn. Its destination is unspecified: not known.
type redirectedUDP struct {
	l       *udpListener
	flow    stack.Flow
	payload []byte
}

var _ stack.UDPConn = (*redirectedUDP)(nil)

func (c *redirectedUDP) Flow() stack.Flow { return c.flow }
func (c *redirectedUDP) Payload() []byte  { return c.payload }

// Reply implements stack.UDPConn. The listener's descriptor may be closed meanwhile, so the answer is sent on its loop.
func (c *redirectedUDP) Reply(p []byte) error {
	answer := append([]byte(nil), p...)
	_, sa := sockaddr(c.flow.Src)
	if !c.l.ref.Post(func() {
		if c.l.fd >= 0 {
			unix.Sendto(c.l.fd, answer, 0, sa) //nolint:errcheck // lost datagrams are asked for again
		}
	}) {
		return loop.ErrStopped
	}
	return nil
}
