package replay

import (
	"encoding/binary"
	"net/netip"
)

// Protocol numbers (IANA) and sizes of headers, in bytes.
const (
	protoICMP    = 1
	protoTCP     = 6
	protoUDP     = 17
	protoFrag    = 44
	protoICMPv6  = 58
	ipv4Len      = 20 // without options
	ipv6Len      = 40
	tcpLen       = 20 // without options
	udpLen       = 8
	fragLen      = 8
	protoHopOpts = 0
	protoRouting = 43
	protoDstOpts = 60
)

// Flags of a TCP header.
const (
	flagFIN = 1 << iota
	flagSYN
	flagRST
	flagPSH
	flagACK
)

// A packet is what was found in the headers of an IP packet.
type packet struct {
	b        []byte // from the IP header on, as much as was captured; without what follows the IP packet
	length   int    // of the IP packet
	v6       bool
	proto    byte
	src, dst netip.AddrPort // ports are 0 in fragments
	extended bool           // it has IPv6 extension headers, beside that of a fragment

	fragment bool
	more     bool
	offset   int // of a fragment's payload, in bytes
	id       uint32

	transport int // offset in b
	payload   int // offset in b of what TCP or UDP carry; with fragments of the piece

	flags  byte // TCP, as the next
	seq    uint32
	ack    uint32
	window uint16
}

// carried is how many bytes TCP or UDP carry; those that were captured may be fewer.
func (p *packet) carried() int { return p.length - p.payload }

// captured are those of them that were captured.
func (p *packet) captured() []byte { return p.b[min(p.payload, len(p.b)):] }

func (p *packet) options() []byte {
	if p.proto != protoTCP {
		return nil
	}
	return p.b[p.transport+tcpLen : p.payload]
}

// parse reads the headers; it returns what the packet is not fit for, or "". wire is how long it was on the wire, b what was captured
// of it.
func (p *packet) parse(b []byte, wire int) string {
	*p = packet{}
	if len(b) < 1 {
		return "empty"
	}
	var src, dst netip.Addr
	switch b[0] >> 4 {
	case 4:
		if len(b) < ipv4Len {
			return "malformed"
		}
		p.transport = int(b[0]&15) * 4
		p.length = int(binary.BigEndian.Uint16(b[2:]))
		if p.length == 0 { // segmentation offload: longer than the field can say, or not filled in yet
			p.length = wire
		}
		if p.transport < ipv4Len || p.transport > len(b) || p.length < p.transport || p.length > wire {
			return "malformed"
		}
		p.proto = b[9]
		frag := binary.BigEndian.Uint16(b[6:])
		p.more, p.offset = frag&0x2000 != 0, int(frag&0x1fff)*8
		p.fragment = p.more || p.offset > 0
		p.id = uint32(binary.BigEndian.Uint16(b[4:]))
		src, dst = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
	case 6:
		if len(b) < ipv6Len {
			return "malformed"
		}
		p.v6, p.transport, p.proto = true, ipv6Len, b[6]
		p.length = ipv6Len + int(binary.BigEndian.Uint16(b[4:]))
		if p.length == ipv6Len && p.proto != 59 { // 59: no next header
			p.length = wire
		}
		if p.length > wire {
			return "malformed"
		}
		src, dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		if why := p.extensions(b); why != "" {
			return why
		}
	default:
		return "not_ip"
	}
	p.b = b[:min(len(b), p.length)]
	p.src, p.dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	p.payload = p.transport
	if p.fragment {
		return ""
	}
	return p.ports()
}

// extensions passes over the extension headers of IPv6 (RFC 8200, section 4).
func (p *packet) extensions(b []byte) string {
	for range 8 {
		switch p.proto {
		case protoHopOpts, protoRouting, protoDstOpts:
			if p.transport+8 > len(b) {
				return "malformed"
			}
			p.extended = true
			p.proto, p.transport = b[p.transport], p.transport+8+int(b[p.transport+1])*8
		case protoFrag:
			if p.transport+fragLen > len(b) {
				return "malformed"
			}
			h := b[p.transport:]
			frag := binary.BigEndian.Uint16(h[2:])
			p.proto, p.more, p.offset = h[0], frag&1 != 0, int(frag&^7)
			p.fragment = p.more || p.offset > 0
			p.extended = p.extended || !p.fragment // an atomic fragment
			p.id = binary.BigEndian.Uint32(h[4:])
			p.transport += fragLen
			if p.fragment {
				return ""
			}
		default:
			if p.transport > p.length {
				return "malformed"
			}
			return ""
		}
	}
	return "malformed"
}

// ports reads the header of TCP or UDP.
func (p *packet) ports() string {
	switch p.proto {
	case protoTCP:
		if len(p.b) < p.transport+tcpLen {
			return "malformed"
		}
		t := p.b[p.transport:]
		p.payload = p.transport + int(t[12]>>4)*4
		p.seq, p.ack = binary.BigEndian.Uint32(t[4:]), binary.BigEndian.Uint32(t[8:])
		p.flags, p.window = t[13], binary.BigEndian.Uint16(t[14:])
		if p.payload < p.transport+tcpLen || p.payload > len(p.b) {
			return "malformed"
		}
	case protoUDP:
		if len(p.b) < p.transport+udpLen {
			return "malformed"
		}
		n := int(binary.BigEndian.Uint16(p.b[p.transport+4:]))
		if p.payload = p.transport + udpLen; n < udpLen || p.transport+n > p.length {
			return "malformed"
		}
		p.length = p.transport + n
		p.b = p.b[:min(len(p.b), p.length)]
	default:
		return ""
	}
	t := p.b[p.transport:]
	p.src = netip.AddrPortFrom(p.src.Addr(), binary.BigEndian.Uint16(t))
	p.dst = netip.AddrPortFrom(p.dst.Addr(), binary.BigEndian.Uint16(t[2:]))
	return ""
}

// sum16 adds up 16-bit words (RFC 1071), on top of a sum.
func sum16(b []byte, sum uint64) uint64 {
	for len(b) >= 8 {
		v := binary.BigEndian.Uint64(b)
		sum += v>>32 + v&0xffffffff
		b = b[8:]
	}
	for len(b) >= 2 {
		sum += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	return sum
}

func fold(sum uint64) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// pseudo is the sum of the pseudo-header (RFC 9293, section 3.1; RFC 8200, section 8.1).
func (p *packet) pseudo() uint64 {
	n := uint64(p.length - p.transport)
	sum := uint64(p.proto) + n>>16 + n&0xffff
	if p.v6 {
		return sum16(p.b[8:40], sum)
	}
	return sum16(p.b[12:20], sum)
}

// A sumState says what is known of a packet's transport checksum.
type sumState uint8

const (
	sumUnknown sumState = iota // not all of it was captured, or it has none
	sumRight
	sumPartial // that of the pseudo-header alone: the rest was left to the network card
	sumWrong
)

func (p *packet) checkSum() sumState {
	if p.fragment || len(p.b) < p.length || p.proto != protoTCP && p.proto != protoUDP {
		return sumUnknown
	}
	at := p.transport + 16 // TCP
	if p.proto == protoUDP {
		at = p.transport + 6
		if p.b[at] == 0 && p.b[at+1] == 0 && !p.v6 {
			return sumUnknown // RFC 768: none
		}
	}
	pseudo := p.pseudo()
	switch {
	case fold(sum16(p.b[p.transport:], pseudo)) == 0xffff:
		return sumRight
	case binary.BigEndian.Uint16(p.b[at:]) == fold(pseudo):
		return sumPartial
	}
	return sumWrong
}

// headerSum fills in the checksum of an IPv4 header.
func headerSum(h []byte) {
	h[10], h[11] = 0, 0
	binary.BigEndian.PutUint16(h[10:], ^fold(sum16(h, 0)))
}
