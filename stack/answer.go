package stack

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
)

// resetFor returns the RST that answers a SYN (RFC 9293, section 3.10.7.1), with headroom. header is the length of the SYN's
// IP and TCP header; it may carry data (RFC 7413).
func resetFor(syn []byte, headerBytes int) []byte {
	src, dst, transport := addresses(syn)
	t := syn[transport:]
	buf, r := newPacket(TCP, dst, src, tcpLen)
	copy(r[0:], t[2:4]) // ports, exchanged
	copy(r[2:], t[0:2])
	length := uint32(1 + len(syn) - headerBytes) // the SYN itself counts
	binary.BigEndian.PutUint32(r[8:], binary.BigEndian.Uint32(t[4:])+length)
	r[12] = tcpLen / 4 << 4
	r[13] = flagRST | flagACK
	binary.BigEndian.PutUint16(r[16:], ^checksum.Checksum(r, pseudoSum(TCP, dst, src, len(r))))
	return buf
}

// How much of the offending packet an ICMP message quotes: the whole message stays within 576 bytes (RFC 1812, section
// 4.3.2.3) or the minimum MTU (RFC 4443, section 3.1).
const (
	icmpLen   = 8
	quoteMax4 = 576 - ipv4Len - icmpLen
	quoteMax6 = 1280 - ipv6Len - icmpLen
)

// unreachableFor returns the ICMP or ICMPv6 destination unreachable message that answers a packet, with headroom. It comes
// from the packet's destination, which is the one address that the pod's own filters let answer.
func unreachableFor(p []byte, cause Cause) []byte {
	src, dst, _ := addresses(p)
	if src.Is4() {
		quote := p[:min(len(p), quoteMax4)]
		buf, m := newPacket(protoICMP, dst, src, icmpLen+len(quote))
		m[0], m[1] = 3, icmpCode(cause)
		copy(m[icmpLen:], quote)
		binary.BigEndian.PutUint16(m[2:], ^checksum.Checksum(m, 0))
		return buf
	}
	quote := p[:min(len(p), quoteMax6)]
	buf, m := newPacket(protoICMPv6, dst, src, icmpLen+len(quote))
	m[0], m[1] = 1, icmpv6Code(cause)
	copy(m[icmpLen:], quote)
	binary.BigEndian.PutUint16(m[2:], ^checksum.Checksum(m, pseudoSum(protoICMPv6, dst, src, len(m))))
	return buf
}

// icmpCode is a code of RFC 792 and RFC 1812, section 5.2.7.1.
func icmpCode(cause Cause) byte {
	switch cause {
	case NetworkUnreachable:
		return 0 // Linux: ENETUNREACH
	case Prohibited:
		return 13 // communication administratively prohibited; Linux: EHOSTUNREACH
	default:
		return 1 // Linux: EHOSTUNREACH
	}
}

// icmpv6Code is a code of RFC 4443, section 3.1.
func icmpv6Code(cause Cause) byte {
	switch cause {
	case NetworkUnreachable:
		return 0 // no route; Linux: ENETUNREACH
	case Prohibited:
		return 1 // Linux: EACCES
	default:
		return 3 // address unreachable; Linux: EHOSTUNREACH
	}
}

// addresses reads a packet that parse found right.
func addresses(p []byte) (src, dst netip.Addr, transport int) {
	if p[0]>>4 == 4 {
		return netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:])), int(p[0]&15) * 4
	}
	return netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:])), ipv6Len
}
