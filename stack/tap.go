package stack

import (
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// A Tap is shown each packet that is read from the device, or written to it, in pieces, by whoever moves it. It must not wait, and
// the pieces are borrowed.
type Tap func(written bool, pieces ...[]byte)

// SetTap shows all packets to t from now on; nil: to nobody, which costs one comparison for each packet. A Tap that is replaced may
// still be called by those who have begun to.
func (s *Stack) SetTap(t Tap) {
	if t == nil {
		s.link.tap.Store(nil)
		return
	}
	s.link.tap.Store(&t)
}

// show shows a packet that the netstack writes to the tap.
func (l *link) show(tap Tap, pkt *stack.PacketBuffer) {
	var pieces [][]byte
	list, skip := pkt.AsViewList()
	for v := list.Front(); v != nil; v = v.Next() {
		b := v.AsSlice()
		n := min(skip, len(b))
		skip -= n
		pieces = append(pieces, b[n:])
	}
	tap(true, pieces...)
}
