package replay

import "encoding/binary"

// Ports of tunnels over UDP.
const (
	portVXLAN      = 4789 // RFC 7348
	portVXLANLinux = 8472 // what Linux and flannel use
	portGeneve     = 6081 // RFC 8926

	protoGRE    = 47
	etherBridge = 0x6558 // transparent Ethernet bridging
)

// inner is the offset of the IP packet within one that encapsulates it; 0: it does not.
func inner(k *packet) int {
	b := k.captured()
	switch {
	case k.proto == protoGRE:
		return within(b, k.payload, greBytes)
	case k.proto == protoUDP && (k.dst.Port() == portVXLAN || k.dst.Port() == portVXLANLinux):
		return within(b, k.payload, vxlanBytes)
	case k.proto == protoUDP && k.dst.Port() == portGeneve:
		return within(b, k.payload, geneveBytes)
	}
	return 0
}

// within adds up the lengths of what is around: before the tunnel's header, that, and an Ethernet header in it.
func within(b []byte, before int, header func([]byte) (n int, ether bool)) int {
	n, ether := header(b)
	if n == 0 || n >= len(b) {
		return 0
	}
	if !ether {
		return before + n
	}
	at, ok := etherType(b[n:], 12)
	if !ok {
		return 0
	}
	return before + n + at
}

// greBytes is RFC 2784 and 2890.
func greBytes(b []byte) (n int, ether bool) {
	if len(b) < 4 || b[1]&7 != 0 { // version 0
		return 0, false
	}
	n = 4
	for _, flag := range []byte{0x80, 0x20, 0x10} { // checksum, key, sequence number
		if b[0]&flag != 0 {
			n += 4
		}
	}
	return typed(binary.BigEndian.Uint16(b[2:]), n)
}

func vxlanBytes(b []byte) (n int, ether bool) {
	if len(b) < 8 || b[0]&0x08 == 0 { // the flag that there is a network id
		return 0, false
	}
	return 8, true
}

func geneveBytes(b []byte) (n int, ether bool) {
	if len(b) < 8 || b[0]>>6 != 0 { // version 0
		return 0, false
	}
	n = 8 + int(b[0]&0x3f)*4
	return typed(binary.BigEndian.Uint16(b[2:]), n)
}

// typed is what a header of n bytes that names a protocol says of the packet behind it; 0 bytes: it is neither of IP nor of Ethernet.
func typed(protocol uint16, n int) (_ int, ether bool) {
	switch protocol {
	case etherIPv4, etherIPv6:
		return n, false
	case etherBridge:
		return n, true
	}
	return 0, false
}
