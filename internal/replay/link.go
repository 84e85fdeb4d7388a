package replay

import (
	"encoding/binary"
	"strconv"
)

// A LinkType says how the packets of an interface begin: the LINKTYPE_ values of tcpdump.org.
type LinkType uint16

// The link types that are understood.
const (
	LinkNull     LinkType = 0   // BSD loopback: the address family in the byte order of the host
	LinkEthernet LinkType = 1   //
	LinkDLTRaw   LinkType = 12  // raw IP, as some systems number it
	LinkDLTRaw14 LinkType = 14  // raw IP, as OpenBSD numbers it
	LinkRaw      LinkType = 101 // raw IP
	LinkLoop     LinkType = 108 // OpenBSD loopback: the address family in network byte order
	LinkSLL      LinkType = 113 // Linux cooked
	LinkIPv4     LinkType = 228
	LinkIPv6     LinkType = 229
	LinkSLL2     LinkType = 276 // Linux cooked, version 2
)

var linkNames = map[LinkType]string{
	LinkNull: "null", LinkEthernet: "ethernet", LinkDLTRaw: "raw", LinkDLTRaw14: "raw", LinkRaw: "raw", LinkLoop: "loop",
	LinkSLL: "linux cooked v1", LinkIPv4: "ipv4", LinkIPv6: "ipv6", LinkSLL2: "linux cooked v2",
}

func (l LinkType) String() string {
	if name := linkNames[l]; name != "" {
		return name
	}
	return "link type " + strconv.Itoa(int(l))
}

// Known reports whether packets of this type can be read.
func (l LinkType) Known() bool { return linkNames[l] != "" }

// EtherTypes (IEEE 802 Numbers of IANA).
const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
	etherVLAN = 0x8100
	etherQinQ = 0x88a8
	etherOld  = 0x9100 // QinQ before 802.1ad
)

// maxTags is how many VLAN tags are taken off.
const maxTags = 4

// network returns where the IP packet begins; false if there is none.
func (l LinkType) network(b []byte) (int, bool) {
	switch l {
	case LinkRaw, LinkDLTRaw, LinkDLTRaw14, LinkIPv4, LinkIPv6:
		return 0, len(b) > 0
	case LinkEthernet:
		return etherType(b, 12)
	case LinkSLL: // 16 bytes, of which the last two are the protocol
		return etherType(b, 14)
	case LinkSLL2: // the protocol first, then 18 bytes more
		if len(b) < 20 {
			return 0, false
		}
		switch binary.BigEndian.Uint16(b) {
		case etherIPv4, etherIPv6:
			return 20, true
		case etherVLAN, etherQinQ, etherOld:
			return etherType(b, 22)
		}
		return 0, false
	case LinkNull, LinkLoop:
		// 2 is AF_INET everywhere; AF_INET6 is 10, 24, 28 or 30. The packet itself says it as well.
		return 4, len(b) > 4 && (b[4]>>4 == 4 || b[4]>>4 == 6)
	}
	return 0, false
}

// etherType looks at the type at an offset, behind VLAN tags.
func etherType(b []byte, at int) (int, bool) {
	for range maxTags + 1 {
		if len(b) < at+2 {
			return 0, false
		}
		switch binary.BigEndian.Uint16(b[at:]) {
		case etherIPv4, etherIPv6:
			return at + 2, true
		case etherVLAN, etherQinQ, etherOld:
			at += 4
		default:
			return 0, false
		}
	}
	return 0, false
}
