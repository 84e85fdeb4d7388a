package stack

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"

	"ztun.dev/ztun/tun"
)

// TestSplitRead gives superpackets to the reader as readv would leave them, for right and wrong predictions of where the
// headers end.
func TestSplitRead(t *testing.T) {
	for _, flow := range []Flow{flow4, flow6} {
		for _, predicted := range []int{40, 52, 60, 72, 120} {
			t.Run(fmt.Sprint(flow.Src.Addr(), " predicted ", predicted), func(t *testing.T) {
				r := newRig(t, nil)
				c, seq := r.handshake(flow, 1000)
				defer c.Reset()
				options := []byte{1, 1, 1, 0}
				var want []byte
				for i := range 3 {
					data := bytes.Repeat([]byte{byte(i), 0xa5, byte(i * 7)}, 5000)
					g := segment{flow: flow, seq: 1001 + uint32(len(want)), ack: seq, flags: flagACK, options: options, data: data}
					p := append(g.packet(), "padding"...)
					r.rd.predicted = predicted
					r.rd.view = buffer.NewViewSize(viewBytes)
					hdr := r.rd.hdr[:headroom+predicted]
					tun.VnetHdr{}.Encode(hdr)
					n := copy(hdr[headroom:], p)
					copy(r.rd.view.AsSlice(), p[n:])
					r.rd.split(hdr, r.rd.view.AsSlice(), headroom+len(p))
					r.s.settle()
					want = append(want, data...)
				}
				got := make([]byte, 100_000)
				n, err := c.TryRead(got)
				if err != nil || !bytes.Equal(got[:n], want) {
					t.Errorf("TryRead = %d bytes, %v, want the %d sent", n, err, len(want))
				}
				if d := r.s.Stats().Drops; d != [dropReasons]uint64{} {
					t.Errorf("drops %v, want none", d)
				}
			})
		}
	}
}

func TestSplitReadVerifiesTheSum(t *testing.T) {
	r := newRig(t, nil)
	c, seq := r.handshake(flow4, 1000)
	defer c.Reset()
	p := segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK, data: make([]byte, 9000)}.packet()
	p[8000] ^= 1
	r.rd.view = buffer.NewViewSize(viewBytes)
	hdr := r.rd.hdr[:headroom+r.rd.predicted]
	n := copy(hdr[headroom:], p)
	copy(r.rd.view.AsSlice(), p[n:])
	r.rd.split(hdr, r.rd.view.AsSlice(), headroom+len(p))
	if n := r.s.Stats().Drops[DropChecksum]; n != 1 {
		t.Errorf("%d dropped for their sum, want 1", n)
	}
}

func TestReceiveDoesNotAllocate(t *testing.T) {
	r := newRig(t, nil)
	c, seq := r.handshake(flow4, 1000)
	defer c.Reset()
	vnet, buf := make([]byte, headroom), make([]byte, 4096)
	r.send(syn(flowN(1), 1))
	dup := syn(flowN(1), 1)
	var data [][]byte
	for i := range 2200 {
		data = append(data, segment{flow: flow4, seq: 1001 + uint32(1000*i), ack: seq, flags: flagACK, data: make([]byte, 1000)}.packet())
	}
	next := 0
	tests := []struct {
		name  string
		pools bool // it takes memory from pools
		f     func()
	}{
		{"a duplicate SYN", false, func() { r.s.receive(vnet, dup) }},
		{"a wrong packet", false, func() { r.s.receive(vnet, dup[:39]) }},
		{"a segment, its read and its acknowledgement", true, func() {
			r.s.receive(vnet, data[next])
			next++
			r.s.settle()
			if n, err := c.TryRead(buf); n != 1000 || err != nil {
				t.Fatalf("TryRead = %d, %v", n, err)
			}
			r.s.settle()
		}},
	}
	for _, tt := range tests {
		if tt.pools && !poolsKeep() {
			continue // the race detector makes pools forget at random
		}
		if n := testing.AllocsPerRun(1000, tt.f); n != 0 {
			t.Errorf("%s allocates %v times, want 0", tt.name, n)
		}
		r.received()
	}
}

func poolsKeep() bool {
	var p sync.Pool
	for range 100 {
		x := new(int)
		p.Put(x)
		if p.Get() != any(x) {
			return false
		}
	}
	return true
}
