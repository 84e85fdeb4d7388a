package stack

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// Sizes of the headers (RFC 791, RFC 8200, RFC 9293, RFC 768), in bytes.
const (
	ipv4Len = 20 // without options
	ipv6Len = 40
	tcpLen  = 20 // without options
	udpLen  = 8

	protoICMP   = 1
	protoICMPv6 = 58
	protoFrag   = 44 // IPv6 fragment header
)

// Flags of a TCP header.
const (
	flagFIN = 1 << iota
	flagSYN
	flagRST
	flagPSH
	flagACK
)

// A packet is what parse found in the headers of an IP packet.
type packet struct {
	src, dst netip.AddrPort // ports are 0 in a fragment
	v6       bool
	proto    Proto
	fragment bool

	transport int // offset of the transport header
	payload   int // offset of what follows it
	end       int // offset of the end of the IP packet; what follows is padding

	flags byte   // TCP
	seq   uint32 // TCP
}

func (p *packet) flow() Flow { return Flow{Proto: p.proto, Src: p.src, Dst: p.dst} }

// parse reads the headers of a packet of n bytes whose first bytes are b. b must hold all headers, or is malformed; it
// need not hold the payload. The result is whether it is a packet that the stack takes, and why not.
func (p *packet) parse(b []byte, n int) (DropReason, bool) {
	*p = packet{}
	if len(b) < ipv4Len {
		return DropMalformed, false
	}
	var src, dst netip.Addr
	switch b[0] >> 4 {
	case 4:
		p.transport = int(b[0]&15) * 4
		p.end = int(binary.BigEndian.Uint16(b[2:]))
		if p.transport < ipv4Len || p.transport > len(b) || p.end < p.transport || p.end > n {
			return DropMalformed, false
		}
		if checksum.Checksum(b[:p.transport], 0) != 0xffff {
			return DropChecksum, false
		}
		p.proto = Proto(b[9])
		p.fragment = binary.BigEndian.Uint16(b[6:])&0x3fff != 0 // offset, more fragments
		src, dst = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
	case 6:
		p.v6, p.transport = true, ipv6Len
		if len(b) < ipv6Len {
			return DropMalformed, false
		}
		p.end = ipv6Len + int(binary.BigEndian.Uint16(b[4:]))
		if p.end > n {
			return DropMalformed, false
		}
		p.proto = Proto(b[6])
		src, dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		if src.Is4In6() || dst.Is4In6() {
			return DropMartian, false // never on a wire (RFC 4038, section 4.2)
		}
		if p.proto == protoFrag {
			if p.end < ipv6Len+8 || len(b) < ipv6Len+8 {
				return DropMalformed, false
			}
			p.fragment, p.proto = true, Proto(b[ipv6Len])
			p.transport += 8
		}
	default:
		return DropMalformed, false
	}
	if !src.IsValid() || src.IsUnspecified() || src.IsLoopback() || src.IsMulticast() || src == broadcast ||
		dst.IsUnspecified() || dst.IsLoopback() || p.proto == TCP && (dst.IsMulticast() || dst == broadcast) { // RFC 9293, section 3.9.2.3
		return DropMartian, false
	}
	if p.fragment {
		p.src, p.dst, p.payload = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0), p.transport
		if p.proto != UDP {
			return DropFragment, false
		}
		return 0, true
	}
	switch p.proto {
	case TCP:
		if p.end < p.transport+tcpLen || len(b) < p.transport+tcpLen {
			return DropMalformed, false
		}
		t := b[p.transport:]
		p.payload = p.transport + int(t[12]>>4)*4
		p.seq, p.flags = binary.BigEndian.Uint32(t[4:]), t[13]
		if p.payload < p.transport+tcpLen || p.payload > p.end || p.payload > len(b) {
			return DropMalformed, false
		}
		if p.flags&flagSYN != 0 && p.flags&(flagRST|flagFIN) != 0 {
			return DropMalformed, false
		}
	case UDP:
		if p.end < p.transport+udpLen || len(b) < p.transport+udpLen {
			return DropMalformed, false
		}
		p.payload = p.transport + udpLen
		n := int(binary.BigEndian.Uint16(b[p.transport+4:]))
		if n < udpLen || p.transport+n > p.end {
			return DropMalformed, false
		}
		p.end = p.transport + n
	default:
		return DropProtocol, false
	}
	p.src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(b[p.transport:]))
	p.dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[p.transport+2:]))
	return 0, true
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// sumIsRight verifies the transport checksum over b, the whole packet. A UDP datagram over IPv4 may have none (RFC 768).
func (p *packet) sumIsRight(b []byte) bool {
	seg := b[p.transport:p.end]
	if p.proto == UDP && binary.BigEndian.Uint16(seg[6:]) == 0 {
		return !p.v6 // RFC 8200, section 8.1
	}
	return checksum.Checksum(seg, pseudoSum(p.proto, p.src.Addr(), p.dst.Addr(), len(seg))) == 0xffff
}

// pseudoSum is the sum of the pseudo-header (RFC 9293, section 3.1; RFC 8200, section 8.1).
func pseudoSum(proto Proto, src, dst netip.Addr, n int) uint16 {
	var b [40]byte // zeros do not count in a sum, so one form serves both families
	if src.Is4() {
		s, d := src.As4(), dst.As4()
		copy(b[:16], s[:])
		copy(b[16:32], d[:])
	} else {
		s, d := src.As16(), dst.As16()
		copy(b[:16], s[:])
		copy(b[16:32], d[:])
	}
	binary.BigEndian.PutUint32(b[32:], uint32(n))
	b[39] = byte(proto)
	return checksum.Checksum(b[:], 0)
}

// newPacket returns a packet with n bytes behind its IP header, and where they start; the bytes before the packet are the
// headroom of its vnet header, which says that the packet is complete.
func newPacket(proto Proto, src, dst netip.Addr, n int) (buf, transport []byte) {
	if src.Is4() {
		buf = make([]byte, headroom+ipv4Len+n)
		h := header.IPv4(buf[headroom:])
		h[0] = 4<<4 | ipv4Len/4
		binary.BigEndian.PutUint16(h[2:], uint16(ipv4Len+n))
		h[6] = 0x40 // do not fragment
		h[8], h[9] = ttl, byte(proto)
		copy(h[12:], src.AsSlice())
		copy(h[16:], dst.AsSlice())
		h.SetChecksum(^h.CalculateChecksum())
		return buf, buf[headroom+ipv4Len:]
	}
	buf = make([]byte, headroom+ipv6Len+n)
	h := buf[headroom:]
	h[0] = 6 << 4
	binary.BigEndian.PutUint16(h[4:], uint16(n))
	h[6], h[7] = byte(proto), ttl
	copy(h[8:], src.AsSlice())
	copy(h[24:], dst.AsSlice())
	return buf, buf[headroom+ipv6Len:]
}

const ttl = 64 // RFC 1700
