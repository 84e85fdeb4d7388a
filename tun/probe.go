package tun

import "net/netip"

// The address from which istio-cni has kubelet's probes come.
var (
	probe4 = netip.MustParseAddr("169.254.7.127")
	probe6 = netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff")
)

// Probes are the addresses that IsProbe knows.
func Probes() []netip.Addr { return []netip.Addr{probe4, probe6} }

// IsProbe reports whether an address is the one from which istio-cni has kubelet's probes come. What a pod gets from it and sends to it is not
// captured.
func IsProbe(a netip.Addr) bool { return a == probe4 || a == probe6 }
