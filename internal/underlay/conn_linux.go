package underlay

import (
	"errors"
	"fmt"
	"io"
	"net/netip"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// A Conn is a kernel TCP socket as a loop.Conn. It does not belong to Go's network poller: its readiness comes from the epoll
// of the loop that it is attached to, and would otherwise wake two threads.
type Conn struct {
	fd     int
	local  netip.AddrPort
	remote netip.AddrPort
	ref    *loop.Ref
	failed bool // the kernel reported an error: a reset, which after the peer's FIN reads as EOF
	empty  bool // there is nothing to read until the next event: of a relay one direction mostly waits, and would ask in each turn
}

var (
	_ loop.Conn       = (*Conn)(nil)
	_ loop.Vectored   = (*Conn)(nil)
	_ loop.Measured   = (*Conn)(nil)
	_ loop.Checked    = (*Conn)(nil)
	_ loop.Backlogged = (*Conn)(nil)
)

func newConn(fd int) (*Conn, error) {
	local, err := unix.Getsockname(fd)
	if err != nil {
		return nil, fmt.Errorf("getsockname: %w", err)
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return nil, fmt.Errorf("getpeername: %w", err)
	}
	return &Conn{fd: fd, local: addrPort(local), remote: addrPort(remote)}, nil
}

// TryRead implements loop.Conn.
func (c *Conn) TryRead(p []byte) (int, error) {
	if c.empty {
		return 0, loop.ErrAgain
	}
	for {
		n, err := unix.Read(c.fd, p)
		if err == nil {
			if n == 0 && len(p) > 0 {
				return 0, c.end()
			}
			return n, nil
		}
		if err != unix.EINTR {
			return 0, c.readError(err)
		}
	}
}

// Readable implements loop.Measured. It counts up to an urgent byte, and no FIN.
func (c *Conn) Readable() int {
	if c.empty {
		return 0
	}
	n, err := unix.IoctlGetUint32(c.fd, unix.SIOCINQ) // the kernel writes an int of C
	if err != nil {
		return 0
	}
	return int(int32(n))
}

// readError turns an error of a read into that of a loop.Conn. The next event of a socket that is attached tells when to ask again.
func (c *Conn) readError(err error) error {
	c.empty = err == unix.EAGAIN && c.ref != nil
	return connError(err)
}

// end is what a read of nothing means.
func (c *Conn) end() error {
	if c.failed {
		return loop.ErrReset
	}
	return io.EOF
}

// Check implements loop.Checked.
func (c *Conn) Check() error {
	if c.failed {
		return loop.ErrReset
	}
	return nil
}

// TryWrite implements loop.Conn.
func (c *Conn) TryWrite(p []byte) (int, error) {
	for {
		n, err := unix.SendmsgN(c.fd, p, nil, nil, unix.MSG_NOSIGNAL)
		if err == nil {
			return n, nil
		}
		if err != unix.EINTR {
			return 0, connError(err)
		}
	}
}

// TryReadv implements loop.Vectored.
func (c *Conn) TryReadv(bufs [][]byte) (int, error) {
	if c.empty {
		return 0, loop.ErrAgain
	}
	for {
		n, err := unix.Readv(c.fd, bufs)
		if err == nil {
			if n == 0 {
				return 0, c.end()
			}
			return n, nil
		}
		if err != unix.EINTR {
			return 0, c.readError(err)
		}
	}
}

// TryWritev implements loop.Vectored.
func (c *Conn) TryWritev(bufs [][]byte) (int, error) {
	for {
		// Without MSG_NOSIGNAL: Go ignores SIGPIPE of descriptors other than 1 and 2.
		n, err := unix.Writev(c.fd, bufs)
		if err == nil {
			return n, nil
		}
		if err != unix.EINTR {
			return 0, connError(err)
		}
	}
}

// A peer is near when its round trip has been seen to take at most nearRoundTrip: what nearBacklog holds is then enough for 8 Gbit/s.
const (
	nearRoundTrip = 500       // µs
	nearBacklog   = 512 << 10 // bytes, of which the kernel takes twice as much memory for its own needs too; 1 MiB: a third longer, as fast (measured)
)

// BoundBacklog implements loop.Backlogged. The kernel's own bound, tcp_rmem, is 32 MiB; a reader that is slower than its peer had 4 to
// 9 MB in front of each message (measured: 8 streams, two cores). Where the bound cannot be set the kernel's stays.
func (c *Conn) BoundBacklog() {
	info, err := unix.GetsockoptTCPInfo(c.fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil || info.Min_rtt > nearRoundTrip {
		return
	}
	_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, nearBacklog)
}

// connError turns what a socket reports into what a loop.Conn reports.
func connError(err error) error {
	switch err {
	case unix.EAGAIN:
		return loop.ErrAgain
	case unix.ECONNRESET, unix.EPIPE, unix.ENOTCONN, unix.ECONNABORTED:
		return loop.ErrReset
	}
	return err
}

// CloseWrite implements loop.Conn.
func (c *Conn) CloseWrite() error {
	if err := unix.Shutdown(c.fd, unix.SHUT_WR); err != nil {
		return connError(err)
	}
	return nil
}

// Reset implements loop.Conn.
func (c *Conn) Reset() error {
	if c.fd < 0 {
		return nil
	}
	return c.shut() // it lingers for no time since it was made
}

// Close implements loop.Conn.
func (c *Conn) Close() error {
	if c.fd < 0 {
		return nil
	}
	err := unix.SetsockoptLinger(c.fd, unix.SOL_SOCKET, unix.SO_LINGER, new(unix.Linger))
	return errors.Join(err, c.shut())
}

func (c *Conn) shut() error {
	err := c.Attach(nil)
	fd := c.fd
	c.fd = -1
	return errors.Join(err, unix.Close(fd))
}

// Attach implements loop.Conn.
func (c *Conn) Attach(r *loop.Ref) error {
	c.empty = false
	if c.ref != nil {
		c.ref.Unwatch(c.fd)
		c.ref = nil
	}
	if r == nil {
		return nil
	}
	if err := r.Watch(c.fd, func(ev loop.Events) {
		if ev&loop.Failed != 0 {
			c.failed = true
		}
		if ev != loop.Writable {
			c.empty = false
		}
		r.WakeLocal()
	}); err != nil {
		return fmt.Errorf("underlay: %w", err)
	}
	c.ref = r
	r.Wake()
	return nil
}

// LocalAddr implements loop.Conn.
func (c *Conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr implements loop.Conn.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.remote }

// addrPort converts a socket address; unmapped.
func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

func sockaddr(a netip.AddrPort) (domain int, sa unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
