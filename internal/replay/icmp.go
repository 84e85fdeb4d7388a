package replay

import "encoding/binary"

const icmpLen = 8

// quoted reads the beginning of the packet that an ICMP error quotes: addresses and ports, and with TCP the sequence number.
func quoted(k *packet) (q packet, ok bool) {
	b := k.captured()
	if len(b) < icmpLen {
		return q, false
	}
	switch {
	case k.proto == protoICMP && b[0] == 3, k.proto == protoICMPv6 && b[0] == 1: // destination unreachable
	default:
		return q, false
	}
	b = b[icmpLen:]
	if len(b) < 1 {
		return q, false
	}
	// Of TCP 8 bytes are enough (RFC 792), of which parse would want more.
	long := make([]byte, len(b)+tcpLen)
	copy(long, b)
	at := ipv6Len
	if b[0]>>4 == 4 {
		at = int(b[0]&15) * 4
	}
	if len(b) < at+8 {
		return q, false
	}
	long[at+12] = tcpLen / 4 << 4
	if q.parse(long, 1<<17) != "" || q.proto != protoTCP || q.transport != at {
		return q, false
	}
	q.seq = binary.BigEndian.Uint32(b[at+4:])
	return q, true
}

// icmp takes an error of the network for the answer to a SYN.
func (p *Player) icmp(k *packet) {
	q, ok := quoted(k)
	if !ok || p.cfg.Peer != PeerRecorded {
		p.skip("icmp")
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.flows[pair{q.src, q.dst}]
	if f == nil || f.Kind != Played || f.isn != q.seq {
		p.skip("icmp")
		return
	}
	p.counts.Played++
	if !f.skipped {
		p.record(k)
	}
	state := connectNoHost
	if k.captured()[1] == 0 { // the network, with both versions
		state = connectNoNetwork
	}
	f.settleConnect(state)
}
