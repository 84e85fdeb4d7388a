package proxy

import (
	"errors"
	"net/netip"
	"slices"
)

// StaysInPod reports whether what a pod with own addresses sends to an address is delivered by its kernel: no packet of it comes to a
// proxy.
func StaysInPod(own []netip.Addr, to netip.Addr) bool {
	return to.IsLoopback() || to.IsUnspecified() || slices.Contains(own, to)
}

var (
	errMulticast = errors.New("no TCP connection has a multicast or broadcast address")
	errLinkLocal = errors.New("TCP to and from link-local IPv6 addresses is refused: a flow does not say of which interface they are")

	broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})
)

// CheckAddress says why TCP to and from an address is refused before a proxy is asked: by the netstack (RFC 9293, section 3.9.2.3), or by the
// rules that capture it.
func CheckAddress(a netip.Addr) error {
	switch {
	case a.IsMulticast(), a == broadcast:
		return errMulticast
	case a.Is6() && a.IsLinkLocalUnicast():
		return errLinkLocal
	}
	return nil
}
