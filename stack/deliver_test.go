package stack

import (
	"bytes"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// A sinkDispatcher keeps the pieces of what is delivered.
type sinkDispatcher struct {
	stack.NetworkDispatcher
	pieces [][]byte
}

func (d *sinkDispatcher) DeliverNetworkPacket(_ tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	list, _ := pkt.AsViewList()
	for v := list.Front(); v != nil; v = v.Next() {
		d.pieces = append(d.pieces, bytes.Clone(v.AsSlice()))
	}
}

// The payload of a large segment stays in one piece, whatever the length of its headers: it is written to the socket with one system call.
func TestPayloadIsDeliveredInOnePiece(t *testing.T) {
	for _, headers := range []int{40, 52, 60, 64, 72, 100} {
		var l link
		d := new(sinkDispatcher)
		l.Attach(d)
		hdr, payload := bytes.Repeat([]byte{1}, headers), bytes.Repeat([]byte{2}, 60_000)
		l.deliver(false, hdr, nil, buffer.NewViewWithData(payload))
		if len(d.pieces) != 2 || !bytes.Equal(d.pieces[0], hdr) || !bytes.Equal(d.pieces[1], payload) {
			var lengths []int
			for _, p := range d.pieces {
				lengths = append(lengths, len(p))
			}
			t.Errorf("headers of %d bytes: pieces of %v, want %d and %d", headers, lengths, len(hdr), len(payload))
		}
	}
}
