package underlay

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// acceptPause is how long a listener waits when it cannot accept.
const acceptPause = 100 * time.Millisecond

// Exchange sends one datagram to a resolver past the capture, from the pod's own address and a port of its own, and waits for
// answers until accept takes one. Answers of others do not arrive: the socket is connected.
func (u *Underlay) Exchange(ctx context.Context, server netip.AddrPort, msg, buf []byte, accept func(answer []byte) bool) ([]byte, error) {
	domain, sa := sockaddr(server)
	fd, err := u.socket(domain, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(u.ownMark(server.Addr()))); err != nil {
		return nil, fmt.Errorf("underlay: %w", markError(err))
	}
	if err := unix.Connect(fd, sa); err != nil {
		return nil, fmt.Errorf("underlay: connect %s: %w", server, err)
	}
	if _, err := unix.SendmsgN(fd, msg, nil, nil, unix.MSG_NOSIGNAL); err != nil {
		return nil, fmt.Errorf("underlay: send to %s: %w", server, err)
	}
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case err == unix.EAGAIN:
			if err := u.awaitReady(ctx, fd, loop.Readable); err != nil {
				return nil, fmt.Errorf("underlay: wait for %s: %w", server, err)
			}
		case err == unix.EINTR:
		case err != nil:
			return nil, fmt.Errorf("underlay: answer of %s: %w", server, err)
		case accept(buf[:n]):
			return buf[:n], nil
		}
	}
}

// ExchangeStream opens a TCP connection to a resolver past the capture, as a blocking view for messages with length prefixes
// (RFC 1035, section 4.2.2). The caller closes it.
func (u *Underlay) ExchangeStream(ctx context.Context, server netip.AddrPort) (*loop.Blocked, error) {
	c, err := u.Dial(ctx, server)
	if err != nil {
		return nil, err
	}
	return u.cfg.Group.Blocking(ctx, c), nil
}
