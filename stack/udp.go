package stack

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"ztun.dev/ztun/tun"
)

// A udpConn is one datagram. It implements UDPConn.
type udpConn struct {
	s       *Stack
	flow    Flow
	payload []byte
}

var _ UDPConn = (*udpConn)(nil)

// datagram gives a datagram to the Handler; payload is borrowed.
func (s *Stack) datagram(flow Flow, payload []byte) {
	s.count.datagrams.Add(1)
	c := &udpConn{s: s, flow: flow, payload: payload}
	s.cfg.Handler.ServeUDP(context.Background(), c)
	c.payload = nil
}

// Flow implements UDPConn.
func (c *udpConn) Flow() Flow { return c.flow }

// Payload implements UDPConn.
func (c *udpConn) Payload() []byte { return c.payload }

// Reply implements UDPConn. A datagram longer than the MTU is sent in one piece: it goes to the kernel at the other end of
// the device, which has the whole of it to give to the application.
func (c *udpConn) Reply(p []byte) error {
	n := udpLen + len(p)
	if n > tun.MaxPacket-ipv4Len {
		return fmt.Errorf("stack: reply on %v: datagram of %d bytes is too long", c.flow, len(p))
	}
	src, dst := c.flow.Dst, c.flow.Src
	buf, u := newPacket(UDP, src.Addr(), dst.Addr(), n)
	binary.BigEndian.PutUint16(u[0:], src.Port())
	binary.BigEndian.PutUint16(u[2:], dst.Port())
	binary.BigEndian.PutUint16(u[4:], uint16(n))
	copy(u[udpLen:], p)
	sum := ^checksum.Checksum(u, pseudoSum(UDP, src.Addr(), dst.Addr(), n))
	if sum == 0 {
		sum = 0xffff // RFC 768: 0 means none
	}
	binary.BigEndian.PutUint16(u[6:], sum)
	if !c.s.write(buf) {
		return fmt.Errorf("stack: reply on %v: %w", c.flow, os.ErrClosed)
	}
	return nil
}
