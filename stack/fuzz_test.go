package stack

import (
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"
)

// FuzzPacket gives the stack any bytes for a vnet header and a packet, beside a live connection, by both ways into it.
func FuzzPacket(f *testing.F) {
	none := make([]byte, headroom)
	superpacket := segment{flow: flow4, seq: 1001, ack: 1, flags: flagACK, data: make([]byte, copyLimit+200)}.packet()
	for _, p := range [][]byte{
		nil, syn(flow4, 1), syn(flow6, 1), udpPacket(dns4, "query"), udpPacket(dns6, "query"), superpacket,
		changed(udpPacket(dns4, "fragment"), 6, 0x20), changed(syn(flow6, 1), 6, protoFrag), changed(syn(flow4, 1), 0, 0x46),
		segment{flow: flow4, seq: 1001, ack: 1, flags: flagACK, options: []byte{8, 10, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1}}.packet(),
		segment{flow: flow4, seq: 1001, flags: flagRST}.packet(),
	} {
		f.Add(none, p, byte(52))
	}
	f.Add([]byte{1, 1, 40, 0, 0xb4, 5, 20, 0, 16, 0}, superpacket, byte(72))
	f.Fuzz(func(t *testing.T, vnet, data []byte, predicted byte) {
		if len(vnet) < headroom || len(data) > viewBytes {
			return
		}
		vnet = vnet[:headroom]
		r := newRig(t, nil)
		c, _ := r.handshake(flow4, 1000)
		r.s.receive(vnet, append([]byte(nil), data...))
		r.s.settle()

		r.rd.predicted = min(max(int(predicted), ipv4Len+tcpLen), maxHeaders)
		r.rd.view = buffer.NewViewSize(viewBytes)
		hdr := r.rd.hdr[:headroom+r.rd.predicted]
		copy(hdr, vnet)
		n := copy(hdr[headroom:], data)
		copy(r.rd.view.AsSlice(), data[n:])
		r.rd.split(hdr, r.rd.view.AsSlice(), headroom+len(data))
		r.rd.dropView()
		r.s.settle()

		for i, a := range r.asked[1:] {
			r.received()
			if i%2 == 0 {
				a.req.Reset()
			} else {
				a.req.Unreachable(Prohibited)
			}
			r.one()
		}
		for _, g := range r.grams {
			if err := g.conn.Reply([]byte(g.Payload)); err != nil {
				t.Error(err)
			}
		}
		var p packet
		if _, ok := p.parse(data, len(data)); ok {
			if p.transport > p.payload || p.payload > p.end || p.end > len(data) {
				t.Errorf("parse(%x) = %+v: offsets out of order", data, p)
			}
		}
		c.Reset()
		r.close()
	})
}
