package underlay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// backlog is the accept queue of a listener; peers beyond it retry.
const backlog = 1024

// A Listener is a listening socket as a task: it accepts by system call, without a goroutine.
type Listener struct {
	u      *Underlay
	fd     int
	addr   netip.AddrPort
	accept func(loop.Conn)
	may    func() bool // nil: always
	handle *loop.Ref   // nil until Start

	// Of the loop.
	ref    *loop.Ref
	paused *loop.Timer
}

// Listen binds and listens on addr for tunnels, with our mark: what it accepts inherits it, so that replies are not captured. An
// unspecified IPv6 address takes IPv4 as well. Accepting begins with Start.
func (u *Underlay) Listen(addr netip.AddrPort) (*Listener, error) {
	return u.listen(addr, backlog, u.mark, u.tune, u.tuneTunnel)
}

// listenApplications is Listen for connections of applications, whose readers may pause.
func (u *Underlay) listenApplications(addr netip.AddrPort) (*Listener, error) {
	return u.listen(addr, backlog, u.mark, u.tune)
}

// mark gives a listening socket our mark, without the secret: the pod's programs may connect to it, and see the mark of what it answers.
func (u *Underlay) mark(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(u.cfg.Marks.Own)); err != nil {
		return markError(err)
	}
	return nil
}

// listen applies options to the listening socket, which what it accepts inherits. The kernel chooses the port if that is 0.
func (u *Underlay) listen(addr netip.AddrPort, queue int, options ...func(fd int) error) (*Listener, error) {
	domain, sa := sockaddr(addr)
	fd, err := u.cfg.Netns.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
	if err != nil {
		return nil, err
	}
	if err := u.bindAndListen(fd, domain, sa, queue, options); err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("underlay: listen on %s in netns %s: %w; stop the process that holds the port (ss -ltnp in that namespace names it)", addr, u.cfg.Netns, err)
		}
		return nil, fmt.Errorf("underlay: listen on %s in netns %s: %w", addr, u.cfg.Netns, err)
	}
	if addr.Port() == 0 {
		if sa, err = unix.Getsockname(fd); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("underlay: listen on %s in netns %s: getsockname: %w", addr, u.cfg.Netns, err)
		}
		addr = addrPort(sa)
	}
	return &Listener{u: u, fd: fd, addr: addr}, nil
}

func (u *Underlay) bindAndListen(fd, domain int, sa unix.Sockaddr, queue int, options []func(fd int) error) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("SO_REUSEADDR: %w", err)
	}
	if domain == unix.AF_INET6 {
		if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
			return fmt.Errorf("IPV6_V6ONLY: %w", err)
		}
	}
	for _, set := range options {
		if err := set(fd); err != nil {
			return err
		}
	}
	if err := unix.Bind(fd, sa); err != nil {
		return err
	}
	return unix.Listen(fd, queue)
}

// Start accepts connections and gives each to accept, on a loop; accept must not block.
func (l *Listener) Start(accept func(loop.Conn)) error {
	l.accept = accept
	ref := l.u.cfg.Group.Add(func(r *loop.Ref) loop.Task {
		l.ref = r
		if err := r.Watch(l.fd, func(loop.Events) { r.Wake() }); err != nil {
			l.u.cfg.Log.Error("listener does not accept", "address", l.addr.String(), "error", err.Error())
		}
		return l
	})
	if ref == nil {
		return loop.ErrStopped
	}
	l.handle = ref
	return nil
}

// Limit makes the listener accept only while may returns true; Resume is called when that has become so again. Meanwhile
// connections wait in the backlog. It is called before Start.
func (l *Listener) Limit(may func() bool) { l.may = may }

// Resume makes the listener look again; from any goroutine.
func (l *Listener) Resume() {
	if l.handle != nil {
		l.handle.Wake()
	}
}

// acceptsPerTurn bounds a turn: other tasks of the loop wait for it.
const acceptsPerTurn = 64

// Turn implements loop.Task.
func (l *Listener) Turn(int) bool {
	if l.fd < 0 || l.paused != nil {
		return false
	}
	for range acceptsPerTurn {
		if l.may != nil && !l.may() {
			return false
		}
		if !l.u.cfg.Descriptors.left(l.fd) {
			l.pause()
			return false
		}
		fd, _, err := unix.Accept4(l.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch err {
		case nil:
			c, err := newConn(fd)
			if err != nil { // gone already
				unix.Close(fd)
				continue
			}
			l.accept(c)
		case unix.EINTR, unix.ECONNABORTED:
		case unix.EAGAIN:
			return false
		default: // out of memory, for example
			l.u.cfg.Log.Warn("listener cannot accept", "address", l.addr.String(), "error", err.Error())
			l.pause()
			return false
		}
	}
	return true
}

// pause makes the listener look again after a while. The backlog keeps what comes.
func (l *Listener) pause() {
	l.paused = l.ref.After(acceptPause, func() { l.paused = nil; l.ref.Wake() })
}

func (l *Listener) String() string { return "the listener on " + l.addr.String() }

// Addr is what the listener is bound to.
func (l *Listener) Addr() netip.AddrPort { return l.addr }

// Close stops listening and waits until the socket is closed. Connections in the backlog are reset by the kernel.
func (l *Listener) Close(ctx context.Context) error {
	if l.handle == nil {
		fd := l.fd
		l.fd = -1
		return unix.Close(fd)
	}
	return loop.Await(ctx, func(wake func()) {
		if !l.handle.Post(func() {
			if l.fd >= 0 {
				l.handle.Remove()
				unix.Close(l.fd)
				l.fd = -1
			}
			wake()
		}) {
			wake()
		}
	})
}
