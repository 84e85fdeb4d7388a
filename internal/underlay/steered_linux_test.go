package underlay

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// A mark of the listener's own would win over that of the SYN: answers to inbound clients would be led to the pod, or those to the pod's
// programs out of it.
func TestNetnsSteeredListenersHaveNoMark(t *testing.T) {
	u := newUnderlay(t)
	s, err := u.ListenSteered(true)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(t.Context())
	v4, v6 := s.Descriptors()
	for _, o := range []struct{ fd, level, opt, want int }{
		{v4, unix.SOL_SOCKET, unix.SO_MARK, 0},
		{v6, unix.SOL_SOCKET, unix.SO_MARK, 0},
		{v4, unix.SOL_IP, unix.IP_TRANSPARENT, 1},
		{v6, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1},
		{v4, unix.SOL_SOCKET, unix.SO_PROTOCOL, unix.IPPROTO_TCP}, // not MPTCP
		{v6, unix.SOL_SOCKET, unix.SO_PROTOCOL, unix.IPPROTO_TCP},
	} {
		if got, err := unix.GetsockoptInt(o.fd, o.level, o.opt); err != nil || got != o.want {
			t.Errorf("option %d/%d = %d, %v, want %d", o.level, o.opt, got, err, o.want)
		}
	}
}

// Port 15001 is that of another proxy, or of an application that listens on all addresses.
func TestNetnsSteeredListenersBesideAnApplication(t *testing.T) {
	u := newUnderlay(t)
	for _, on := range []netip.AddrPort{
		netip.AddrPortFrom(netip.IPv4Unspecified(), 15001), // alone, as it takes nothing from IPv6
		netip.AddrPortFrom(netip.IPv6Unspecified(), 15001),
	} {
		application, err := u.Listen(on)
		if err != nil {
			t.Fatal(err)
		}
		s, err := u.ListenSteered(true)
		if err != nil {
			t.Errorf("beside an application on %s: %v", on, err)
		} else {
			for _, l := range s.all() {
				if port := l.Addr().Port(); port == 0 || port == on.Port() {
					t.Errorf("beside an application on %s the listener is at %s", on, l.Addr())
				}
			}
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if err := application.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
