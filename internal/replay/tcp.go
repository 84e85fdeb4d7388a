package replay

import (
	"encoding/binary"
	"math"
	"net/netip"
	"slices"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/tun"
)

// The options of TCP that matter (RFC 9293, section 3.2; RFC 7323; RFC 2018).
const (
	optEnd    = 0
	optNop    = 1
	optMSS    = 2
	optScale  = 3
	optSACKOK = 4
	optSACK   = 5
	optStamps = 8
)

// synOptions are those of a SYN or SYN-ACK.
type synOptions struct {
	scale  uint8 // valid with scaled
	scaled bool
	sackOK bool
	stamps bool
	time   uint32
}

// eachOption calls f for every option that is whole.
func eachOption(b []byte, f func(kind byte, v []byte)) {
	for len(b) > 0 {
		switch b[0] {
		case optEnd:
			return
		case optNop:
			b = b[1:]
			continue
		}
		if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
			return
		}
		f(b[0], b[2:b[1]])
		b = b[b[1]:]
	}
}

func readSYN(options []byte) (o synOptions) {
	eachOption(options, func(kind byte, v []byte) {
		switch {
		case kind == optScale && len(v) == 1:
			o.scale, o.scaled = min(v[0], 14), true // RFC 7323, section 2.3
		case kind == optSACKOK:
			o.sackOK = true
		case kind == optStamps && len(v) == 8:
			o.stamps, o.time = true, binary.BigEndian.Uint32(v)
		}
	})
	return o
}

// tcp plays a segment.
func (p *Player) tcp(k *packet) {
	p.mu.Lock()
	defer p.mu.Unlock()
	syn := k.flags&(flagSYN|flagACK) == flagSYN
	f := p.flows[pair{k.src, k.dst}]
	if f != nil && syn && (f.Kind == Midstream || f.isn != k.seq || f.answered && f.list == &p.over && !f.carried) {
		p.reuse(f)
		f = nil
	}
	if f == nil {
		if g := p.flows[pair{k.dst, k.src}]; g != nil && !syn {
			p.touch(g, k, &g.Received, endReceived)
			if !g.skipped {
				p.record(k)
				p.fromPeer(g, k)
			}
			return
		}
		switch {
		case syn:
			p.past.remove(pair{k.src, k.dst})
		case p.past.has(pair{k.src, k.dst}), p.past.has(pair{k.dst, k.src}):
			p.skip("after_the_end")
			return
		}
		if f = p.begin(k, syn); f == nil {
			return
		}
	}
	p.touch(f, k, &f.Sent, endSent)
	if f.skipped {
		p.skip("not_chosen")
		return
	}
	p.record(k)
	p.fromSource(f, k, syn)
}

// begin makes a flow of the first packet that is seen of it; nil if it is nobody's.
func (p *Player) begin(k *packet, syn bool) *Flow {
	local := p.cfg.Local(k.src.Addr())
	if !local && !p.cfg.Local(k.dst.Addr()) {
		p.skip("not_of_a_pod")
		return nil
	}
	f := &Flow{
		ID: p.nextID(), Packet: p.counts.Packets, Src: k.src, Dst: k.dst, Inbound: !local, Start: p.now, End: p.now, auto: p.cfg.Peer != PeerRecorded, held: &p.held,
		up: assembler{discard: true, fin: noFIN}, down: assembler{fin: noFIN},
	}
	f.skipped = p.cfg.Only != nil && !p.cfg.Only(f)
	if !f.skipped {
		p.untold[f.Packet] = true
	}
	p.flows[pair{f.Src, f.Dst}] = f
	switch {
	case !syn:
		f.Kind = Midstream
		p.over.push(f)
	case k.dst.Port() == hbone.Port:
		f.Kind = TunnelLeg
		p.over.push(f)
	default:
		f.isn, f.options = k.seq, readSYN(k.options())
		if f.skipped {
			p.over.push(f)
			break
		}
		if isDNS(f.Dst) && local {
			f.auto, f.stream = true, new(stream)
		}
		p.open.push(f)
	}
	return f
}

// reuse ends a flow whose ports are used again: the application has closed its socket, although the capture does not say so.
func (p *Player) reuse(f *Flow) {
	if f.list == &p.open {
		f.Cut = CutReused
		p.abandon(f)
		p.settle()
	}
	p.forget(f)
	p.leftover = append(p.leftover, f)
}

// settle lets everything happen that is due. mu is held, but not meanwhile.
func (p *Player) settle() {
	p.mu.Unlock()
	p.m.Settle()
	p.mu.Lock()
}

// abandon lets the application reset the connection, or give the attempt up.
func (p *Player) abandon(f *Flow) {
	if f.refused {
		return
	}
	seq := f.isn + 1
	if f.answered {
		seq = f.stackAck
	}
	p.inject(p.control(f, seq, flagRST))
	f.refuse()
}

// touch counts a packet of a flow.
func (p *Player) touch(f *Flow, k *packet, c *Count, side byte) {
	c.Packets++
	switch {
	case k.flags&flagRST != 0:
		f.ends = endSent | endReceived
	case k.flags&flagFIN != 0:
		f.ends |= side
	}
	if n := k.carried(); n > 0 {
		c.Bytes += uint64(n)
	}
	f.last = p.clock()
	if f.list == &p.over && f.Kind != Played {
		f.End = p.now
	}
	if l := f.list; l != nil && l.last != f {
		l.remove(f)
		l.push(f)
	}
}

// fromSource plays a segment of who opened the flow.
func (p *Player) fromSource(f *Flow, k *packet, syn bool) {
	switch {
	case f.Kind == Midstream:
		p.skip("midstream")
		return
	case f.Kind == TunnelLeg:
		p.skip("tunnel")
		return
	case syn && (f.carried || p.carried && f.Sent.Packets > 1): // it has been played: this is the one that was given to the kernel, or one more
		p.counts.Played++
		if p.carried {
			p.carry(f)
		}
		return
	case syn:
		p.playSYN(f, k)
		if p.carried {
			p.carry(f)
		}
		return
	case f.refused:
		p.skip("after_the_end")
		return
	case k.flags&flagRST != 0 && !f.answered:
		p.playControl(f, k.seq, flagRST)
		return
	}
	if !f.answered && !p.inferPeer(f, k) {
		p.skip("before_the_answer")
		return
	}
	p.playSegment(f, k)
}

// inferPeer takes a segment of a connection whose SYN-ACK is not in the capture as a sign that there was one. It reports whether the
// netstack has answered the SYN by now.
func (p *Player) inferPeer(f *Flow, k *packet) bool {
	if p.cfg.Peer != PeerRecorded || f.peerSeen || k.flags&flagACK == 0 {
		return false
	}
	f.peerSeen, f.peerISN = true, k.ack-1
	f.Warn("the peer's answer to the SYN is not in the capture")
	f.settleConnect(connectAccepted)
	p.settle()
	return f.answered && !f.refused
}

func (p *Player) playSYN(f *Flow, k *packet) {
	if len(k.b) < k.length {
		f.Warn("not all of the SYN was captured")
	}
	whole, b := p.dev.buffer(k.length)
	clear(b[copy(b, k.b):])
	setLength(b, k.v6, k.length)
	if p.cfg.Seed != nil {
		p.cfg.Seed(f)
	}
	p.counts.Played++
	p.inject(whole, b)
}

// playControl gives the netstack a segment without data.
func (p *Player) playControl(f *Flow, seq uint32, flags byte) {
	p.counts.Played++
	p.inject(p.control(f, seq, flags))
}

// playSegment rewrites a segment for the netstack, whose sequence numbers are not those of the recorded peer.
func (p *Player) playSegment(f *Flow, k *packet) {
	n := max(0, k.carried())
	data := k.captured()
	from := relative(k.seq, f.isn+1, f.up.next)
	if len(data) < n {
		f.Warn("not all of its packets was captured: zeros stand for the rest")
	}
	if from > f.up.next && f.room() < pieceBytes {
		f.Warn(noRoom)
	} else {
		f.up.add(from, nil, n, func([]byte, int) {})
	}
	if k.flags&flagFIN != 0 {
		f.up.fin = from + int64(n)
	}
	var sack [][2]uint32
	f.srcTime = max(f.srcTime, f.options.time)
	eachOption(k.options(), func(kind byte, v []byte) {
		switch {
		case kind == optStamps && len(v) == 8:
			f.srcTime = binary.BigEndian.Uint32(v)
		case kind == optSACK && f.sack && f.peerSeen:
			sack = f.translateSACK(v)
		}
	})
	f.window = k.window >> f.peerShift
	if k.flags&flagACK != 0 && f.peerSeen && (!f.auto || f.stream != nil) {
		if a := relative(k.ack, f.peerISN+1, f.acked); a <= f.down.next+int64(f.down.held)+maxLoss { // else it is damaged
			f.acked = max(f.acked, a)
		}
		if f.up.fin != noFIN && f.down.fin == noFIN && f.acked == f.down.next+1 && len(f.down.pieces) == 0 {
			f.down.fin = f.down.next // the last number that is acknowledged after a FIN is that of the other's
			if f.peer != nil {
				f.peer.end(false)
			}
		} else {
			for { // each hole
				if _, lost := f.down.proven(f.acked, f.deliver); lost == 0 {
					break
				}
				f.warnLost()
			}
			if f.down.ended() && f.peer != nil {
				f.peer.end(false)
			}
		}
	}
	p.counts.Played++
	flags := k.flags &^ flagSYN
	for {
		part := min(n, tun.MaxPacket-p.headerBytes(f, sack))
		last := part == n
		piece := flags
		if !last {
			piece &^= flagFIN | flagPSH
		}
		whole, b := p.segment(f, k.seq, piece, sack, data[:min(part, len(data))], part)
		p.inject(whole, b)
		if last {
			return
		}
		n -= part
		k.seq += uint32(part)
		data = data[min(part, len(data)):]
	}
}

func (f *Flow) warnLost() { f.Warn("the capture has not all packets: zeros stand for what was lost") }

// translateSACK turns blocks of the recorded peer's numbers into the netstack's. Those that it has not sent in this run are left out.
func (f *Flow) translateSACK(v []byte) (blocks [][2]uint32) {
	for ; len(v) >= 8 && len(blocks) < 3; v = v[8:] {
		left := relative(binary.BigEndian.Uint32(v), f.peerISN+1, f.acked)
		right := relative(binary.BigEndian.Uint32(v[4:]), f.peerISN+1, f.acked)
		if left >= right || left < f.acked || right > f.stackNext {
			continue
		}
		blocks = append(blocks, [2]uint32{f.stackISN + 1 + uint32(left), f.stackISN + 1 + uint32(right)})
	}
	return blocks
}

// acknowledges is what the application acknowledges now: of what the netstack has sent as much as of the recorded peer's.
func (f *Flow) acknowledges() int64 {
	if f.auto || !f.peerSeen {
		return f.stackNext
	}
	return max(f.ackSent, min(f.acked, f.stackNext))
}

// headerBytes is the length of the headers that segment makes.
func (p *Player) headerBytes(f *Flow, sack [][2]uint32) int {
	n := ipv4Len + tcpLen
	if f.Src.Addr().Is6() {
		n = ipv6Len + tcpLen
	}
	if f.stamps {
		n += 12
	}
	if len(sack) > 0 {
		n += 4 + 8*len(sack)
	}
	return n
}

// segment makes a segment of the application for the netstack: n bytes, of which data are the first and zeros the others.
func (p *Player) segment(f *Flow, seq uint32, flags byte, sack [][2]uint32, data []byte, n int) (whole, b []byte) {
	header := p.headerBytes(f, sack)
	whole, b = p.dev.buffer(header + n)
	t := putIP(b, f.Src.Addr(), f.Dst.Addr(), protoTCP)
	binary.BigEndian.PutUint16(t, f.Src.Port())
	binary.BigEndian.PutUint16(t[2:], f.Dst.Port())
	binary.BigEndian.PutUint32(t[4:], seq)
	ack := uint32(0)
	if flags&flagACK != 0 && f.answered {
		f.ackSent = f.acknowledges()
		f.weigh()
		ack = f.stackISN + 1 + uint32(f.ackSent)
	}
	binary.BigEndian.PutUint32(t[8:], ack)
	t[12], t[13] = byte(len(t)-n)/4<<4, flags
	binary.BigEndian.PutUint16(t[14:], f.window)
	t[16], t[17], t[18], t[19] = 0, 0, 0, 0
	o := t[tcpLen : len(t)-n]
	if f.stamps {
		o[0], o[1], o[2], o[3] = optNop, optNop, optStamps, 10
		binary.BigEndian.PutUint32(o[4:], f.srcTime)
		binary.BigEndian.PutUint32(o[8:], f.stackTime)
		o = o[12:]
	}
	if len(sack) > 0 {
		o[0], o[1], o[2], o[3] = optNop, optNop, optSACK, byte(2+8*len(sack))
		for i, block := range sack {
			binary.BigEndian.PutUint32(o[4+8*i:], block[0])
			binary.BigEndian.PutUint32(o[8+8*i:], block[1])
		}
	}
	clear(t[len(t)-n+copy(t[len(t)-n:], data):])
	sum := sum16(b[len(b)-len(t)-addressBytes(f.Src.Addr()):len(b)-len(t)], uint64(protoTCP)+uint64(len(t)))
	binary.BigEndian.PutUint16(t[16:], ^fold(sum16(t, sum)))
	return whole, b
}

// addressBytes is the length of both addresses at the end of an IP header.
func addressBytes(a netip.Addr) int {
	if a.Is4() {
		return 8
	}
	return 32
}

// control is a segment without data.
func (p *Player) control(f *Flow, seq uint32, flags byte) (whole, b []byte) {
	return p.segment(f, seq, flags, nil, nil, 0)
}

// putIP writes a header without options for the whole of b and returns what follows it.
func putIP(b []byte, src, dst netip.Addr, proto byte) []byte {
	if src.Is4() {
		h := b[:ipv4Len]
		clear(h)
		h[0], h[6], h[8], h[9] = 4<<4|ipv4Len/4, 0x40, 64, proto // not to be fragmented; a TTL of 64 (RFC 1700)
		binary.BigEndian.PutUint16(h[2:], uint16(len(b)))
		s, d := src.As4(), dst.As4()
		copy(h[12:], s[:])
		copy(h[16:], d[:])
		headerSum(h)
		return b[ipv4Len:]
	}
	h := b[:ipv6Len]
	clear(h)
	h[0], h[6], h[7] = 6<<4, proto, 64
	binary.BigEndian.PutUint16(h[4:], uint16(len(b)-ipv6Len))
	s, d := src.As16(), dst.As16()
	copy(h[8:], s[:])
	copy(h[24:], d[:])
	return b[ipv6Len:]
}

// setLength fills in the length of a packet that was captured without it, and the checksum of its IP header.
func setLength(b []byte, v6 bool, n int) {
	if v6 {
		binary.BigEndian.PutUint16(b[4:], uint16(n-ipv6Len))
		return
	}
	binary.BigEndian.PutUint16(b[2:], uint16(n))
	headerSum(b[:int(b[0]&15)*4])
}

// fromPeer takes a segment of the recorded peer.
func (p *Player) fromPeer(f *Flow, k *packet) {
	switch f.Kind {
	case Midstream:
		p.skip("midstream")
		return
	case TunnelLeg:
		p.skip("tunnel")
		return
	}
	p.counts.Played++
	if k.flags&flagRST != 0 {
		if f.connect == connectPending {
			f.settleConnect(connectRefused)
		} else if f.peer != nil && !f.auto {
			f.peer.end(true)
		}
		return
	}
	if k.flags&flagSYN != 0 {
		if o := readSYN(k.options()); !f.peerSeen && f.options.scaled && !o.scaled {
			f.peerShift = f.options.scale
		}
		f.peerSeen, f.peerISN = true, k.seq
		f.carried = false // it is here after all
		f.settleConnect(connectAccepted)
		return
	}
	if !f.peerSeen && k.flags&flagACK != 0 { // its SYN-ACK was lost by the capture
		f.peerSeen, f.peerISN = true, k.seq-1
		f.Warn("the peer's answer to the SYN is not in the capture")
		f.settleConnect(connectAccepted)
	}
	if f.refused {
		return
	}
	if !f.auto || f.stream != nil {
		n := max(0, k.carried())
		from := relative(k.seq, f.peerISN+1, f.down.next)
		if k.flags&flagFIN != 0 {
			f.down.fin = from + int64(n)
		}
		if from > f.down.next && f.room() < len(k.captured())+pieceBytes {
			f.Warn(noRoom)
		} else {
			f.down.add(from, k.captured(), n, f.deliver)
			f.weigh()
		}
		if f.down.ended() && f.peer != nil {
			f.peer.end(false)
		}
	}
	if k.flags&flagACK != 0 && f.answered {
		p.fillLost(f, relative(k.ack, f.isn+1, f.up.next))
	}
}

// fillLost gives the netstack zeros for what the peer has acknowledged of the source and the capture does not have.
func (p *Player) fillLost(f *Flow, to int64) {
	for { // each hole
		at, n := f.up.proven(to, func([]byte, int) {})
		if n == 0 {
			return
		}
		f.warnLost()
		for n > 0 {
			part := min(n, tun.MaxPacket-p.headerBytes(f, nil))
			p.counts.Injected++
			p.inject(p.segment(f, f.isn+1+uint32(at), flagACK, nil, nil, part))
			at += int64(part)
			n -= part
		}
	}
}

// deliver gives the other end what the recorded peer sent.
func (f *Flow) deliver(data []byte, zeros int) {
	switch n := len(data) + zeros; {
	case f.left:
	case f.peer != nil && f.stream == nil:
		f.peer.send(data, zeros)
		return
	case f.room() < n, f.stream == nil && len(f.early)+n > maxEarly:
		f.leave(noRoom)
	case f.stream != nil:
		f.stream.add(data, zeros)
	default:
		f.early = appendZeros(append(f.early, data...), zeros)
	}
	f.weigh()
}

// leave leaves out the rest of what the peer has to send.
func (f *Flow) leave(why string) {
	f.left = true
	f.Warn(why)
}

// noRoom is the warning of a flow whose data found no room.
const noRoom = "there was no room for all of it: not everything was played"

// maxEarly is what a peer may send before the proxy has connected to it, in bytes.
const maxEarly = 1 << 20

func appendZeros(b []byte, n int) []byte {
	if n <= 0 {
		return b
	}
	b = slices.Grow(b, n)
	tail := b[len(b) : len(b)+n]
	clear(tail)
	return b[:len(b)+n]
}

// written is called by the netstack for each packet that it sends, by whichever of its goroutines is the only one that runs.
func (p *Player) written(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.write(p.cfg.Played, DirInbound, b)
	var k packet
	if k.parse(b, len(b)) != "" || k.fragment {
		return
	}
	switch k.proto {
	case protoTCP:
		f := p.flows[pair{k.dst, k.src}]
		switch {
		case f == nil || f.Kind != Played:
		case f.script:
			f.seeScripted(&k)
		default:
			p.fromStack(f, &k)
		}
	case protoICMP, protoICMPv6:
		if q, ok := quoted(&k); ok && q.proto == protoTCP {
			if f := p.flows[pair{q.src, q.dst}]; f != nil {
				f.refuse()
				if f.script {
					f.seeScripted(&k)
				}
			}
		}
	}
}

// fromStack follows what the netstack sends to the source, and lets that acknowledge what the recorded one has acknowledged.
func (p *Player) fromStack(f *Flow, k *packet) {
	if k.flags&flagRST != 0 {
		f.refuse()
		return
	}
	if k.flags&flagACK != 0 {
		f.stackAck = k.ack
	}
	o := k.options()
	if k.flags&flagSYN != 0 {
		s := readSYN(o)
		f.answered, f.stackISN = true, k.seq
		f.stamps, f.stackTime = s.stamps && f.options.stamps, s.time
		f.sack = s.sackOK && f.options.sackOK
		f.srcTime = f.options.time
		if f.window == 0 {
			f.window = math.MaxUint16
		}
		switch {
		case f.refused:
		case f.carried:
			p.handOver(f)
		case f.auto:
			p.acknowledge(f)
		}
		return
	}
	eachOption(o, func(kind byte, v []byte) {
		if kind == optStamps && len(v) == 8 {
			f.stackTime = binary.BigEndian.Uint32(v)
		}
	})
	end := relative(k.seq, f.stackISN+1, f.stackNext) + int64(k.carried())
	if k.flags&flagFIN != 0 {
		end++
		f.timeWait = f.timeWait || !f.stackFIN && !f.up.ended()
		f.stackFIN = true
	}
	f.stackNext = max(f.stackNext, end)
	if !f.refused && (f.auto && k.carried() > 0 || f.acknowledges() > f.ackSent) {
		p.acknowledge(f)
	}
}

// acknowledge makes up an acknowledgement of the source.
func (p *Player) acknowledge(f *Flow) {
	p.counts.Injected++
	seq := f.isn + 1 + uint32(f.up.next)
	if f.up.ended() {
		seq++
	}
	p.inject(p.segment(f, seq, flagACK, nil, nil, 0))
}
