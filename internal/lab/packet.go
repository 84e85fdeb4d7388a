package lab

import "encoding/binary"

// tunnelPort is the port of HBONE, where everything is encrypted.
const tunnelPort = 15008

// A packetClass says what of a packet could be read by who sees it.
type packetClass uint8

const (
	classLink   packetClass = iota // ARP, neighbour discovery and multicast listeners: the link's own, nothing of an application
	classClear                     // TCP outside the tunnel port
	classTunnel                    // TCP from or to the tunnel port
	classOther                     // all other
)

// Numbers of the headers looked at.
const (
	etherHeader = 14 // IEEE 802.3
	etherIPv4   = 0x0800
	etherARP    = 0x0806
	etherVLAN   = 0x8100
	etherIPv6   = 0x86dd

	protoHopByHop = 0 // RFC 8200, section 4
	protoTCP      = 6
	protoRouting  = 43
	protoFragment = 44
	protoICMPv6   = 58
	protoDstOpts  = 60
)

// classify returns the class of an Ethernet frame and the length of its payload in bytes: that of TCP, or all behind the IP
// header, or all behind the Ethernet header. What cannot be read to its end counts as clear or other, whole: the error is
// never in favour of what is measured. The frame may be a segmentation-offload packet of more than 64 KiB.
func classify(frame []byte) (packetClass, int) {
	if len(frame) < etherHeader {
		return classOther, len(frame)
	}
	ether, p := binary.BigEndian.Uint16(frame[12:]), frame[etherHeader:]
	if ether == etherVLAN && len(p) >= 4 {
		ether, p = binary.BigEndian.Uint16(p[2:]), p[4:]
	}
	switch ether {
	case etherARP:
		return classLink, len(p)
	case etherIPv4:
		return classifyIPv4(p)
	case etherIPv6:
		return classifyIPv6(p)
	}
	return classOther, len(p)
}

func classifyIPv4(p []byte) (packetClass, int) {
	if len(p) < 20 {
		return classOther, len(p)
	}
	header := int(p[0]&0xf) * 4
	total := int(binary.BigEndian.Uint16(p[2:]))
	if total == 0 || total > len(p) { // zero: longer than the field can say (BIG TCP)
		total = len(p)
	}
	if header < 20 || header > total {
		return classOther, len(p)
	}
	offset := binary.BigEndian.Uint16(p[6:]) & 0x1fff
	return classifyTransport(p[9], p[header:total], offset != 0)
}

func classifyIPv6(p []byte) (packetClass, int) {
	if len(p) < 40 {
		return classOther, len(p)
	}
	next, rest := p[6], p[40:]
	if n := int(binary.BigEndian.Uint16(p[4:])); n != 0 && n < len(rest) {
		rest = rest[:n]
	}
	fragment := false
	for {
		length := 8
		switch next {
		case protoHopByHop, protoRouting, protoDstOpts:
			if len(rest) >= 8 {
				length = 8 + int(rest[1])*8
			}
		case protoFragment:
			if len(rest) >= 8 {
				fragment = fragment || binary.BigEndian.Uint16(rest[2:])&0xfff8 != 0
			}
		default:
			return classifyTransport(next, rest, fragment)
		}
		if len(rest) < length {
			return classOther, len(rest)
		}
		next, rest = rest[0], rest[length:]
	}
}

// classifyTransport looks at what follows the IP headers. A later fragment has no header of its own there.
func classifyTransport(proto byte, p []byte, laterFragment bool) (packetClass, int) {
	switch {
	case proto == protoTCP && laterFragment:
		return classClear, len(p)
	case proto == protoTCP && len(p) >= 20:
		header := int(p[12]>>4) * 4
		if header < 20 || header > len(p) {
			return classClear, len(p)
		}
		src, dst := binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:])
		if src == tunnelPort || dst == tunnelPort {
			return classTunnel, len(p) - header
		}
		return classClear, len(p) - header
	case proto == protoTCP:
		return classClear, len(p)
	case proto == protoICMPv6 && len(p) > 0 && !laterFragment && linkICMPv6(p[0]):
		return classLink, len(p)
	}
	return classOther, len(p)
}

// linkICMPv6 are multicast listener discovery (RFC 2710, RFC 3810) and neighbour discovery (RFC 4861).
func linkICMPv6(kind byte) bool {
	return kind >= 130 && kind <= 137 || kind == 143
}
