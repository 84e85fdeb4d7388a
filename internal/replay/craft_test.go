package replay

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"net/netip"
	"strings"
	"time"
)

// epoch is when the sample captures begin.
var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// A frame is a packet of a capture that is being made.
type frame struct {
	at   time.Duration // since epoch
	ip   []byte
	wire int // 0: as long as it is
}

// A side is one end of a TCP connection that is being made.
type side struct {
	addr    netip.AddrPort
	seq     uint32 // the next
	options []byte // of its SYN
	stamps  bool
	clock   uint32
}

// A talk makes the packets of conversations.
type talk struct {
	frames []frame
	now    time.Duration
}

// step is the time between two packets.
const step = 500 * time.Microsecond

func (t *talk) add(ip []byte) []byte {
	t.frames = append(t.frames, frame{at: t.now, ip: ip})
	t.now += step
	return ip
}

func ipPacket(src, dst netip.Addr, proto byte, transport []byte) []byte {
	n := ipv4Len
	if src.Is6() {
		n = ipv6Len
	}
	b := make([]byte, n+len(transport))
	copy(putIP(b, src, dst, proto), transport)
	return b
}

func transportSum(src, dst netip.Addr, proto byte, t []byte) uint16 {
	sum := sum16(src.AsSlice(), uint64(proto)+uint64(len(t)))
	return ^fold(sum16(t, sum16(dst.AsSlice(), sum)))
}

func tcpPacket(src, dst netip.AddrPort, seq, ack uint32, flags byte, window uint16, options, data []byte) []byte {
	for len(options)%4 != 0 {
		options = append(options, optNop)
	}
	t := make([]byte, tcpLen, tcpLen+len(options)+len(data))
	binary.BigEndian.PutUint16(t, src.Port())
	binary.BigEndian.PutUint16(t[2:], dst.Port())
	binary.BigEndian.PutUint32(t[4:], seq)
	binary.BigEndian.PutUint32(t[8:], ack)
	t[12], t[13] = byte(tcpLen+len(options))/4<<4, flags
	binary.BigEndian.PutUint16(t[14:], window)
	t = append(append(t, options...), data...)
	binary.BigEndian.PutUint16(t[16:], transportSum(src.Addr(), dst.Addr(), protoTCP, t))
	return ipPacket(src.Addr(), dst.Addr(), protoTCP, t)
}

func udpPacket(src, dst netip.AddrPort, data []byte) []byte {
	u := make([]byte, udpLen, udpLen+len(data))
	binary.BigEndian.PutUint16(u, src.Port())
	binary.BigEndian.PutUint16(u[2:], dst.Port())
	binary.BigEndian.PutUint16(u[4:], uint16(udpLen+len(data)))
	u = append(u, data...)
	binary.BigEndian.PutUint16(u[6:], transportSum(src.Addr(), dst.Addr(), protoUDP, u))
	return ipPacket(src.Addr(), dst.Addr(), protoUDP, u)
}

// A call is a TCP connection.
type call struct {
	t    *talk
	a, b side // who opens it, and the peer
}

func (t *talk) call(a, b string, isnA, isnB uint32) *call {
	syn := []byte{2, 4, 0x05, 0xb4, optSACKOK, 2, optStamps, 10, 0, 0, 0, 1, 0, 0, 0, 0, optNop, optScale, 3, 7}
	return &call{
		t,
		side{addr: netip.MustParseAddrPort(a), seq: isnA, options: syn, stamps: true, clock: 1000},
		side{addr: netip.MustParseAddrPort(b), seq: isnB, options: syn, stamps: true, clock: 9000},
	}
}

// send makes a segment; it does not count the sequence number up.
func (c *call) segment(from, to *side, flags byte, seq, ack uint32, extra, data []byte) []byte {
	var options []byte
	switch {
	case flags&flagSYN != 0:
		options = append(options, from.options...)
	case from.stamps && to.stamps && flags&flagRST == 0:
		from.clock++
		options = append(options, optNop, optNop, optStamps, 10)
		options = binary.BigEndian.AppendUint32(options, from.clock)
		options = binary.BigEndian.AppendUint32(options, to.clock)
	}
	return tcpPacket(from.addr, to.addr, seq, ack, flags, 502, append(options, extra...), data)
}

func (c *call) send(from, to *side, flags byte, data string) {
	ack := to.seq
	if flags&flagACK == 0 {
		ack = 0
	}
	c.t.add(c.segment(from, to, flags, from.seq, ack, nil, []byte(data)))
	from.seq += uint32(len(data))
	if flags&(flagSYN|flagFIN) != 0 {
		from.seq++
	}
}

func (c *call) open() {
	c.send(&c.a, &c.b, flagSYN, "")
	c.send(&c.b, &c.a, flagSYN|flagACK, "")
	c.send(&c.a, &c.b, flagACK, "")
}

// ask sends a request and its answer, each acknowledged.
func (c *call) ask(request, answer string) {
	c.send(&c.a, &c.b, flagACK|flagPSH, request)
	c.send(&c.b, &c.a, flagACK, "")
	c.send(&c.b, &c.a, flagACK|flagPSH, answer)
	c.send(&c.a, &c.b, flagACK, "")
}

func (c *call) close() {
	c.send(&c.a, &c.b, flagFIN|flagACK, "")
	c.send(&c.b, &c.a, flagFIN|flagACK, "")
	c.send(&c.a, &c.b, flagACK, "")
}

const (
	httpRequest  = "GET / HTTP/1.1\r\nHost: web.shop\r\nConnection: close\r\n\r\n"
	httpResponse = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n"
)

// http is a whole connection with one request.
func (t *talk) http(a, b string, isn uint32) {
	c := t.call(a, b, isn, isn+0x10000000)
	c.open()
	c.ask(httpRequest, httpResponse)
	c.close()
}

// dnsMessage makes a question, or with addresses the answer.
func dnsMessage(id uint16, name string, qtype uint16, answers ...string) []byte {
	b := binary.BigEndian.AppendUint16(nil, id)
	flags := uint16(0x0100) // recursion desired
	if answers != nil {
		flags |= 0x8080
	}
	b = binary.BigEndian.AppendUint16(b, flags)
	b = append(b, 0, 1, 0, byte(len(answers)), 0, 0, 0, 0)
	for label := range strings.SplitSeq(name, ".") {
		b = append(append(b, byte(len(label))), label...)
	}
	b = append(b, 0)
	b = binary.BigEndian.AppendUint16(b, qtype)
	b = append(b, 0, 1)
	for _, a := range answers {
		ip := netip.MustParseAddr(a).AsSlice()
		b = append(b, 0xc0, 12)
		b = binary.BigEndian.AppendUint16(b, qtype)
		b = append(b, 0, 1, 0, 0, 0, 60, 0, byte(len(ip)))
		b = append(b, ip...)
	}
	return b
}

// cut cuts a packet into pieces of at most n bytes of payload, a multiple of 8.
func cut(ip []byte, id uint32, n int) (out [][]byte) {
	var k packet
	if why := k.parse(ip, len(ip)); why != "" {
		panic(why)
	}
	header, body := ip[:k.transport], ip[k.transport:]
	for at := 0; at < len(body); at += n {
		piece := body[at:min(len(body), at+n)]
		more := at+n < len(body)
		if k.v6 {
			f := binary.BigEndian.AppendUint16([]byte{k.proto, 0}, uint16(at))
			if more {
				f[3] |= 1
			}
			f = binary.BigEndian.AppendUint32(f, id)
			out = append(out, ipPacket(k.src.Addr(), k.dst.Addr(), protoFrag, append(f, piece...)))
			continue
		}
		b := append(bytes.Clone(header), piece...)
		frag := uint16(at / 8)
		if more {
			frag |= 0x2000
		}
		binary.BigEndian.PutUint16(b[4:], uint16(id))
		binary.BigEndian.PutUint16(b[6:], frag)
		setLength(b, false, len(b))
		out = append(out, b)
	}
	return out
}

// Link layers.

func etherTypeOf(ip []byte) uint16 {
	if ip[0]>>4 == 6 {
		return etherIPv6
	}
	return etherIPv4
}

func ethernet(ip []byte) []byte {
	b := append([]byte{}, 2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1)
	return append(binary.BigEndian.AppendUint16(b, etherTypeOf(ip)), ip...)
}

func vlan(ip []byte, outer ...uint16) []byte {
	b := append([]byte{}, 2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1)
	for i, tag := range outer {
		kind := uint16(etherVLAN)
		if i < len(outer)-1 {
			kind = etherQinQ
		}
		b = binary.BigEndian.AppendUint16(b, kind)
		b = binary.BigEndian.AppendUint16(b, tag)
	}
	return append(binary.BigEndian.AppendUint16(b, etherTypeOf(ip)), ip...)
}

func cooked1(ip []byte) []byte {
	b := append([]byte{0, 0, 0, 1, 0, 6}, 2, 0, 0, 0, 0, 1, 0, 0)
	return append(binary.BigEndian.AppendUint16(b, etherTypeOf(ip)), ip...)
}

func cooked2(ip []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, etherTypeOf(ip))
	b = append(b, 0, 0, 0, 0, 0, 2, 0, 1, 0, 6, 2, 0, 0, 0, 0, 1, 0, 0)
	return append(b, ip...)
}

func null(ip []byte) []byte { return append([]byte{2, 0, 0, 0}, ip...) }

// Files.

func pcapFile(order byteOrder, nano bool, link LinkType, wrap func([]byte) []byte, frames []frame) []byte {
	magic, unit := uint32(pcapMicro), time.Microsecond
	if nano {
		magic, unit = pcapNano, time.Nanosecond
	}
	b := order.AppendUint32(nil, magic)
	b = order.AppendUint16(b, 2)
	b = order.AppendUint16(b, 4)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	b = order.AppendUint32(b, 262144)
	b = order.AppendUint32(b, uint32(link))
	for _, f := range frames {
		data := f.ip
		if wrap != nil {
			data = wrap(f.ip)
		}
		at := epoch.Add(f.at)
		b = order.AppendUint32(b, uint32(at.Unix()))
		b = order.AppendUint32(b, uint32(time.Duration(at.Nanosecond())/unit))
		b = order.AppendUint32(b, uint32(len(data)))
		b = order.AppendUint32(b, uint32(max(len(data), f.wire+len(data)-len(f.ip))))
		b = append(b, data...)
	}
	return b
}

// An ngFile is a pcapng file that is being made.
type ngFile struct {
	b     []byte
	order byteOrder
}

func (f *ngFile) block(kind uint32, body []byte) {
	n := uint32(ngMinimum + len(body))
	f.b = f.order.AppendUint32(f.b, kind)
	f.b = f.order.AppendUint32(f.b, n)
	f.b = append(f.b, body...)
	f.b = f.order.AppendUint32(f.b, n)
}

func (f *ngFile) section(order byteOrder) {
	f.order = order
	body := order.AppendUint32(nil, ngMagic)
	body = order.AppendUint16(body, 1)
	body = order.AppendUint16(body, 0)
	f.block(ngSection, order.AppendUint64(body, 1<<64-1))
}

func (f *ngFile) option(b []byte, code uint16, v []byte) []byte {
	b = f.order.AppendUint16(b, code)
	b = f.order.AppendUint16(b, uint16(len(v)))
	return pad(append(b, v...))
}

func (f *ngFile) iface(link LinkType, name string, resolution byte) {
	b := f.order.AppendUint16(nil, uint16(link))
	b = append(b, 0, 0)
	b = f.order.AppendUint32(b, 0)
	b = f.option(b, ngOptName, []byte(name))
	b = f.option(b, ngOptTSResol, []byte{resolution})
	f.block(ngInterface, append(b, 0, 0, 0, 0))
}

func (f *ngFile) packet(id uint32, at uint64, data []byte) {
	b := f.order.AppendUint32(nil, id)
	b = f.order.AppendUint32(b, uint32(at>>32))
	b = f.order.AppendUint32(b, uint32(at))
	b = f.order.AppendUint32(b, uint32(len(data)))
	b = f.order.AppendUint32(b, uint32(len(data)))
	f.block(ngPacket, f.option(pad(append(b, data...)), ngOptComment, []byte("a comment")))
}

func zipped(b []byte) []byte {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write(b); err != nil {
		panic(err)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return z.Bytes()
}
