package underlay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

// A Config configures an Underlay.
type Config struct {
	Netns *tun.Netns // borrowed
	Group *loop.Group
	Marks tun.Marks
	Rand  func() uint64 // chooses ports
	Log   *slog.Logger

	Descriptors *Descriptors // of the process; nil: connections may take all

	OwnSource bool // deliver from the pod's own address, not from the client's

	// Keepalive finds dead peers (defaults: 45 s, 15 s, 3). On tunnels, whose both ends always read, unacknowledged data may
	// also not be older than their sum, 90 s (TCP_USER_TIMEOUT). Not on connections of applications: the kernel would cut one
	// whose reader pauses, because a window of zero counts as no acknowledgement (measured).
	KeepaliveTime, KeepaliveInterval time.Duration // a negative time: none
	KeepaliveRetries                 int
	NoUserTimeout                    bool
}

// An Underlay makes sockets in one network namespace.
type Underlay struct {
	cfg   Config
	local func(netip.Addr) bool // nil: not known
}

// SetLocal says which addresses are the pod's own. It is called before anything is connected.
func (u *Underlay) SetLocal(local func(netip.Addr) bool) { u.local = local }

// ownMark is that of a socket that connects to dst. It is without the secret where that is in the pod: what a program accepts gets the mark of the
// SYN, which it can read, and so can who listens to packets of the loopback interface.
func (u *Underlay) ownMark(dst netip.Addr) uint32 {
	if dst.IsLoopback() || u.local != nil && u.local(dst) {
		return u.cfg.Marks.Own
	}
	return u.cfg.Marks.OwnSocket()
}

// New checks the configuration.
func New(cfg Config) (*Underlay, error) {
	if cfg.Netns == nil || cfg.Group == nil || cfg.Rand == nil || cfg.Log == nil || cfg.Marks.Own == 0 || cfg.Marks.Deliver == 0 {
		return nil, errors.New("underlay: config: Netns, Group, Rand, Log and Marks are required")
	}
	if cfg.KeepaliveTime == 0 {
		cfg.KeepaliveTime, cfg.KeepaliveInterval, cfg.KeepaliveRetries = 45*time.Second, 15*time.Second, 3
	}
	return &Underlay{cfg: cfg}, nil
}

// notSentLowat bounds what the kernel holds unsent of a tunnel, so that the order of what its streams send next stays ours.
const notSentLowat = 128 << 10

// Dial connects to dst past the capture, from the pod's own address. Errors are those of connect(2), wrapped.
func (u *Underlay) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	c, err := u.dial(ctx, dst, u.ownMark(dst.Addr()), nil)
	if err != nil {
		return nil, fmt.Errorf("underlay: connect %s: %w", dst, err)
	}
	return c, nil
}

// DialPeer is Dial for tunnels: data that the peer does not acknowledge ends the connection.
func (u *Underlay) DialPeer(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	c, err := u.dial(ctx, dst, u.ownMark(dst.Addr()), u.tuneTunnel)
	if err != nil {
		return nil, fmt.Errorf("underlay: connect %s: %w", dst, err)
	}
	return c, nil
}

// tuneTunnel sets what tunnels have beside tune.
func (u *Underlay) tuneTunnel(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT, notSentLowat); err != nil {
		return fmt.Errorf("TCP_NOTSENT_LOWAT: %w", err)
	}
	if u.cfg.NoUserTimeout {
		return nil
	}
	d := max(u.cfg.KeepaliveTime, 0) + time.Duration(u.cfg.KeepaliveRetries)*u.cfg.KeepaliveInterval
	if err := unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_USER_TIMEOUT, int(d/time.Millisecond)); err != nil {
		return fmt.Errorf("TCP_USER_TIMEOUT: %w", err)
	}
	return nil
}

// DialLoopback connects to an address of the loopback interface, which is never captured.
func (u *Underlay) DialLoopback(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	if !dst.Addr().IsLoopback() {
		return nil, fmt.Errorf("underlay: connect %s: not a loopback address", dst)
	}
	return u.Dial(ctx, dst)
}

// Ports that deliveries are made from: below the ephemeral range, because the client uses those. A delivery with the client's
// own port would have the 4-tuple of the captured connection itself.
const (
	firstDeliveryPort = 1024
	lastDeliveryPort  = 32767
	deliveryAttempts  = 16
)

// Deliver connects to an application of the pod at dst, from the address of the client, so that the application sees who it
// talks to; the port is another one. A client that is the pod itself, or of another family, cannot be imitated: then the
// connection comes from the pod's own address.
func (u *Underlay) Deliver(ctx context.Context, client, dst netip.AddrPort) (loop.Conn, error) {
	if u.cfg.OwnSource || client.Addr() == dst.Addr() || client.Addr().Is4() != dst.Addr().Is4() {
		return u.Dial(ctx, dst)
	}
	var c *Conn
	var err error
	for range deliveryAttempts {
		port := firstDeliveryPort + u.cfg.Rand()%(lastDeliveryPort-firstDeliveryPort+1)
		from := netip.AddrPortFrom(client.Addr(), uint16(port))
		if from == client {
			continue
		}
		c, err = u.dial(ctx, dst, u.cfg.Marks.Deliver, func(fd int) error { return bindTransparent(fd, from) })
		if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("underlay: deliver to %s from %s: %w", dst, client.Addr(), err)
	}
	return c, nil
}

// CheckTransparent reports why connections cannot be delivered from the client's address, if they cannot.
func (u *Underlay) CheckTransparent() error {
	fd, err := u.cfg.Netns.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := transparent(unix.AF_INET)(fd); err != nil {
		return fmt.Errorf("underlay: %w; needs CAP_NET_ADMIN or CAP_NET_RAW", err)
	}
	return nil
}

// bindTransparent binds a socket to an address that is not ours.
func bindTransparent(fd int, from netip.AddrPort) error {
	domain, sa := sockaddr(from)
	if err := transparent(domain)(fd); err != nil {
		return err
	}
	// Ports of connections in TIME_WAIT may be used again: the 4-tuple is checked at connect.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("SO_REUSEADDR: %w", err)
	}
	if err := unix.Bind(fd, sa); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	return nil
}

// transparent lets a socket have an address that is not ours.
func transparent(domain int) func(fd int) error {
	level, opt := unix.SOL_IP, unix.IP_TRANSPARENT
	if domain == unix.AF_INET6 {
		level, opt = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	return func(fd int) error {
		if err := unix.SetsockoptInt(fd, level, opt, 1); err != nil {
			return fmt.Errorf("IP_TRANSPARENT: %w", err)
		}
		return nil
	}
}

// dial makes a socket with a mark, prepares it, and waits until it is connected.
func (u *Underlay) dial(ctx context.Context, dst netip.AddrPort, mark uint32, prepare func(fd int) error) (*Conn, error) {
	domain, sa := sockaddr(dst)
	fd, err := u.socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
	if err != nil {
		return nil, err
	}
	c, err := u.connect(ctx, fd, sa, mark, prepare)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return c, nil
}

func (u *Underlay) connect(ctx context.Context, fd int, sa unix.Sockaddr, mark uint32, prepare func(fd int) error) (*Conn, error) {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return nil, markError(err)
	}
	if err := u.tune(fd); err != nil {
		return nil, err
	}
	if prepare != nil {
		if err := prepare(fd); err != nil {
			return nil, err
		}
	}
	err := unix.Connect(fd, sa)
	if err == unix.EINPROGRESS {
		err = u.awaitConnect(ctx, fd)
	}
	if err != nil {
		return nil, err
	}
	return newConn(fd)
}

// awaitConnect waits for the end of a connect in progress.
func (u *Underlay) awaitConnect(ctx context.Context, fd int) error {
	for {
		settled, err := connected(fd)
		if settled || err != nil {
			return err
		}
		if err := u.awaitReady(ctx, fd, loop.Writable); err != nil {
			return err
		}
	}
}

// markError says what setting a mark needs.
func markError(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("mark a socket: %w; run as root, or with CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN", err)
	}
	return fmt.Errorf("mark a socket: %w", err)
}

// connected reports whether a connect has ended, and how.
func connected(fd int) (bool, error) {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(p, 0)
	if err == unix.EINTR || err == nil && n == 0 {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("poll: %w", err)
	}
	errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return false, fmt.Errorf("SO_ERROR: %w", err)
	}
	if errno != 0 {
		return false, unix.Errno(errno)
	}
	return true, nil
}

// A waitTask watches one descriptor for a set-up; it never has bytes to move.
type waitTask struct{}

func (waitTask) Turn(int) bool  { return false }
func (waitTask) String() string { return "a connect in progress" }

// awaitReady waits until a descriptor is ready for what is wanted, or has failed. That the watch has ended when it returns lets
// the caller close it.
func (u *Underlay) awaitReady(ctx context.Context, fd int, want loop.Events) error {
	var failed error
	r := u.cfg.Group
	var ref *loop.Ref
	err := loop.Await(ctx, func(wake func()) {
		ref = r.Add(func(r *loop.Ref) loop.Task {
			if failed = r.Watch(fd, func(ev loop.Events) {
				if ev&(want|loop.HangUp|loop.Failed) != 0 {
					wake()
				}
			}); failed != nil {
				wake()
			}
			return waitTask{}
		})
		if ref == nil {
			failed = loop.ErrStopped
			wake()
		}
	})
	if ref != nil {
		// Not with ctx: the descriptor must not be closed before its watch is gone.
		gone := loop.Await(context.WithoutCancel(ctx), func(wake func()) {
			if !ref.Post(func() { ref.Remove(); wake() }) {
				wake()
			}
		})
		err = errors.Join(err, gone)
	}
	return errors.Join(err, failed)
}

// tune sets what every TCP socket of the data path has.
func (u *Underlay) tune(fd int) error {
	options := []socketOption{
		{unix.SOL_TCP, unix.TCP_NODELAY, 1, "TCP_NODELAY"},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1, "SO_KEEPALIVE"},
		{unix.SOL_TCP, unix.TCP_KEEPIDLE, int(u.cfg.KeepaliveTime / time.Second), "TCP_KEEPIDLE"},
		{unix.SOL_TCP, unix.TCP_KEEPINTVL, int(u.cfg.KeepaliveInterval / time.Second), "TCP_KEEPINTVL"},
		{unix.SOL_TCP, unix.TCP_KEEPCNT, u.cfg.KeepaliveRetries, "TCP_KEEPCNT"},
	}
	if u.cfg.KeepaliveTime < 0 {
		options = options[:1]
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.opt, o.value); err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
	}
	// A linger time of 0 makes the kernel reset the connection when this process dies: what is cut must not look like the end of
	// what was sent. Conn.Close takes it back.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return fmt.Errorf("SO_LINGER: %w", err)
	}
	return nil
}

type socketOption struct {
	level, opt, value int
	name              string
}
