package proxy_test

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// An app is one TCP connection of an application, by its packets. The way to the stack loses nothing and keeps the order, so that it
// acknowledges what comes and repeats nothing.
type app struct {
	name     string
	src, dst netip.AddrPort
	seq, ack uint32 // of the next byte that is sent, and that is expected
	over     bool   // it was reset, or told that there is no way
}

// packet is a TCP packet of the application.
func (a *app) packet(flags header.TCPFlags, data string) []byte {
	const size = header.TCPMinimumSize
	b, t := ipPacket(header.TCPProtocolNumber, a.src.Addr(), a.dst.Addr(), size+len(data))
	copy(t[size:], data)
	tcp := header.TCP(t)
	tcp.Encode(&header.TCPFields{
		SrcPort: a.src.Port(), DstPort: a.dst.Port(), SeqNum: a.seq, AckNum: a.ack, DataOffset: size, Flags: flags, WindowSize: 65535,
	})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, address(a.src.Addr()), address(a.dst.Addr()), uint16(len(t)))
	tcp.SetChecksum(^checksum.Checksum(t, sum))
	a.seq += uint32(len(data))
	if flags&(header.TCPFlagSyn|header.TCPFlagFin) != 0 {
		a.seq++
	}
	return b
}

// takes says what a packet for the application means, and whether it has to be acknowledged; "" for one that says nothing new.
func (a *app) takes(t header.TCP) (what string, answer bool) {
	flags, data := t.Flags(), t.Payload()
	var parts []string
	switch {
	case flags.Contains(header.TCPFlagRst):
		a.over = true
		return "RST", false
	case flags.Contains(header.TCPFlagSyn | header.TCPFlagAck):
		a.ack = t.SequenceNumber() + 1
		return "SYN-ACK", true
	case t.SequenceNumber() != a.ack:
		return "", true // a probe, whether this side lives
	}
	if len(data) > 0 {
		parts = append(parts, "reads "+shown(string(data)))
	}
	a.ack += uint32(len(data))
	if flags.Contains(header.TCPFlagFin) {
		a.ack++
		parts = append(parts, "FIN")
	}
	return strings.Join(parts, ", "), len(parts) > 0
}

// shown is data for the transcript.
func shown(s string) string {
	if len(s) > 40 {
		return fmt.Sprintf("%d bytes %q…", len(s), s[:20])
	}
	return fmt.Sprintf("%q", s)
}

func address(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

// ipPacket is an IP packet with room for n bytes of transport.
func ipPacket(proto tcpip.TransportProtocolNumber, src, dst netip.Addr, n int) (b, transport []byte) {
	if src.Is4() {
		b = make([]byte, header.IPv4MinimumSize+n)
		ip := header.IPv4(b)
		ip.Encode(&header.IPv4Fields{TotalLength: uint16(len(b)), TTL: 64, Protocol: uint8(proto), SrcAddr: address(src), DstAddr: address(dst)})
		ip.SetChecksum(^ip.CalculateChecksum())
		return b, b[header.IPv4MinimumSize:]
	}
	b = make([]byte, header.IPv6MinimumSize+n)
	header.IPv6(b).Encode(&header.IPv6Fields{PayloadLength: uint16(n), TransportProtocol: proto, HopLimit: 64, SrcAddr: address(src), DstAddr: address(dst)})
	return b, b[header.IPv6MinimumSize:]
}

// udpPacket is a datagram.
func udpPacket(src, dst netip.AddrPort, data []byte) []byte {
	b, u := ipPacket(header.UDPProtocolNumber, src.Addr(), dst.Addr(), header.UDPMinimumSize+len(data))
	copy(u[header.UDPMinimumSize:], data)
	udp := header.UDP(u)
	udp.Encode(&header.UDPFields{SrcPort: src.Port(), DstPort: dst.Port(), Length: uint16(len(u))})
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, address(src.Addr()), address(dst.Addr()), uint16(len(u)))
	udp.SetChecksum(^checksum.Checksum(u, sum))
	return b
}

// A heard is a packet that the stack has sent, as far as the transcript needs it.
type heard struct {
	src, dst netip.AddrPort
	tcp      header.TCP
	udp      header.UDP
	icmp     string // what it says about the packet from dst to src
}

func hear(b []byte) (h heard) {
	var src, dst tcpip.Address
	var proto tcpip.TransportProtocolNumber
	var payload []byte
	if header.IPVersion(b) == 4 {
		ip := header.IPv4(b)
		src, dst, proto, payload = ip.SourceAddress(), ip.DestinationAddress(), ip.TransportProtocol(), ip.Payload()
	} else {
		ip := header.IPv6(b)
		src, dst, proto, payload = ip.SourceAddress(), ip.DestinationAddress(), tcpip.TransportProtocolNumber(ip.NextHeader()), ip.Payload()
	}
	at := func(a tcpip.Address, port uint16) netip.AddrPort {
		ip, _ := netip.AddrFromSlice(a.AsSlice())
		return netip.AddrPortFrom(ip, port)
	}
	switch proto {
	case header.TCPProtocolNumber:
		h.tcp = payload
		h.src, h.dst = at(src, h.tcp.SourcePort()), at(dst, h.tcp.DestinationPort())
	case header.UDPProtocolNumber:
		h.udp = payload
		h.src, h.dst = at(src, h.udp.SourcePort()), at(dst, h.udp.DestinationPort())
	case header.ICMPv4ProtocolNumber:
		icmp := header.ICMPv4(payload)
		h.icmp = map[header.ICMPv4Code]string{header.ICMPv4HostUnreachable: "host unreachable", header.ICMPv4NetUnreachable: "network unreachable"}[icmp.Code()]
		inner := hear(icmp.Payload())
		h.src, h.dst = inner.dst, inner.src
	case header.ICMPv6ProtocolNumber:
		icmp := header.ICMPv6(payload)
		h.icmp = map[header.ICMPv6Code]string{header.ICMPv6AddressUnreachable: "host unreachable", header.ICMPv6NetworkUnreachable: "network unreachable"}[icmp.Code()]
		inner := hear(icmp.Payload())
		h.src, h.dst = inner.dst, inner.src
	}
	return h
}

// answerText is a DNS answer in short.
func answerText(b []byte) string {
	var m dns.Msg
	if err := m.Unpack(b); err != nil {
		return "an answer that cannot be read: " + err.Error()
	}
	out := []string{dns.RcodeToString[m.Rcode]}
	for _, rr := range m.Answer {
		out = append(out, strings.ReplaceAll(rr.String(), "\t", " "))
	}
	return strings.Join(out, "; ")
}
