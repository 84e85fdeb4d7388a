package underlay

import (
	"context"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// The addresses of the listeners that connections of applications are steered to are nobody's (RFC 5737, RFC 6666): no application
// can connect to them. The kernel chooses the ports: an application that listens on all addresses may have any certain one, or want it.
var (
	steeredAddr4 = netip.MustParseAddrPort("192.0.2.1:0")
	steeredAddr6 = netip.MustParseAddrPort("[100::1]:0")
)

// steeredBacklog is the kernel's own limit by default (net.core.somaxconn): the SYNs of 5 000 connects at once come in moments.
const steeredBacklog = 4096

// A Steered is the listeners, one for each family, that accept connections in the place of whom they were addressed to: the kernel
// steers their SYNs here. What they accept has the addresses and ports of the flow, and inherits the mark of its SYN: the listeners
// themselves have none, for that would win.
type Steered struct {
	v4, v6 *Listener // v6 is nil without IPv6
}

// ListenSteered makes the listeners. Accepting begins with Start.
func (u *Underlay) ListenSteered(ipv6 bool) (*Steered, error) {
	s := new(Steered)
	var err error
	if s.v4, err = u.listen(steeredAddr4, steeredBacklog, transparent(unix.AF_INET), u.tune); err != nil {
		return nil, err
	}
	if !ipv6 {
		return s, nil
	}
	if s.v6, err = u.listen(steeredAddr6, steeredBacklog, transparent(unix.AF_INET6), u.tune); err != nil {
		return nil, errors.Join(err, s.Close(context.Background()))
	}
	return s, nil
}

// Descriptors are those of the listeners; -1: there is none for IPv6.
func (s *Steered) Descriptors() (v4, v6 int) {
	if s.v6 == nil {
		return s.v4.fd, -1
	}
	return s.v4.fd, s.v6.fd
}

// Start gives each connection to accepted, which reports whether it takes it, on a loop; it must not block. Others are reset.
func (s *Steered) Start(accepted func(loop.Conn) bool) error {
	for _, l := range s.all() {
		if err := l.Start(func(c loop.Conn) {
			if !accepted(c) {
				_ = c.Reset() // nobody has it
			}
		}); err != nil {
			return err
		}
	}
	return nil
}

// Close stops listening.
func (s *Steered) Close(ctx context.Context) (err error) {
	for _, l := range s.all() {
		err = errors.Join(err, l.Close(ctx))
	}
	return err
}

func (s *Steered) all() []*Listener {
	if s.v6 == nil {
		return []*Listener{s.v4}
	}
	return []*Listener{s.v4, s.v6}
}
