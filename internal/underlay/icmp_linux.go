package underlay

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// Numbers of the protocols and messages that are relayed.
const (
	icmpUnreachable     = 3 // RFC 792: "fragmentation needed" is a code of it
	icmp6Unreachable    = 1 // RFC 4443, section 3.1
	icmp6PacketTooBig   = 2 // RFC 4443, section 3.2
	protoICMPv6         = 58
	ipv6Header          = 40
	icmpPacketsPerTurn  = 64
	solICMP6            = 58
	icmp6FilterOpt      = 1 // ICMPV6_FILTER of linux/icmpv6.h
	maxICMPPacket       = 2048
	maxControl          = 128
	ipv6PktinfoAddrSize = 16
)

// An ICMPRelay hears the ICMP errors that the pod's kernel receives and hands them on: those about connections that end in a
// netstack find no socket in the kernel, and without them a smaller MTU on the path is a black hole (measured: a download
// through a 1300-byte hop stands still). It is a task.
type ICMPRelay struct {
	u      *Underlay
	fds    [2]int // IPv4, IPv6; -1: none
	handle *loop.Ref
	ref    *loop.Ref // the same, for what begins on the loop
	inject func(packet []byte) bool
}

// ListenICMP opens raw sockets in the pod's namespace, for IPv6 only where that exists.
func (u *Underlay) ListenICMP(ipv6 bool) (_ *ICMPRelay, err error) {
	r := &ICMPRelay{u: u, fds: [2]int{-1, -1}}
	defer func() {
		if err != nil {
			err = fmt.Errorf("underlay: ICMP relay in netns %s: %w", u.cfg.Netns, errors.Join(err, r.closeSockets()))
		}
	}()
	if r.fds[0], err = u.cfg.Netns.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMP); err != nil {
		return nil, err
	}
	filter := ^uint32(1 << icmpUnreachable)
	if err := unix.SetsockoptInt(r.fds[0], unix.SOL_RAW, unix.ICMP_FILTER, int(int32(filter))); err != nil {
		return nil, fmt.Errorf("ICMP_FILTER: %w", err)
	}
	if !ipv6 {
		return r, nil
	}
	if r.fds[1], err = u.cfg.Netns.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMPV6); err != nil {
		return nil, err
	}
	block := bytes.Repeat([]byte{0xff}, 32) // struct icmp6_filter: a set bit blocks a type
	block[0] &^= 1<<icmp6Unreachable | 1<<icmp6PacketTooBig
	if err := unix.SetsockoptString(r.fds[1], solICMP6, icmp6FilterOpt, string(block)); err != nil {
		return nil, fmt.Errorf("ICMPV6_FILTER: %w", err)
	}
	if err := unix.SetsockoptInt(r.fds[1], unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1); err != nil {
		return nil, fmt.Errorf("IPV6_RECVPKTINFO: %w", err)
	}
	return r, nil
}

// Start gives each error, as a whole IP packet that the callee keeps, to inject, on a loop.
func (r *ICMPRelay) Start(inject func(packet []byte) bool) error {
	r.inject = inject
	r.handle = r.u.cfg.Group.Add(func(ref *loop.Ref) loop.Task {
		r.ref = ref
		for _, fd := range r.fds {
			if fd < 0 {
				continue
			}
			if err := ref.Watch(fd, func(loop.Events) { ref.Wake() }); err != nil {
				r.u.cfg.Log.Error("ICMP relay does not hear", "error", err.Error())
			}
		}
		return r
	})
	if r.handle == nil {
		return loop.ErrStopped
	}
	return nil
}

func (r *ICMPRelay) String() string { return "the ICMP relay" }

// Turn implements loop.Task.
func (r *ICMPRelay) Turn(int) (more bool) {
	for i, fd := range r.fds {
		if fd < 0 {
			continue
		}
		n := 0
		for ; n < icmpPacketsPerTurn; n++ {
			packet, err := r.read(fd, i == 1)
			if err == unix.EAGAIN {
				break
			}
			if packet != nil {
				r.inject(packet)
			}
		}
		more = more || n == icmpPacketsPerTurn
	}
	return more
}

// read returns one error as an IP packet; nil if it cannot be made one.
func (r *ICMPRelay) read(fd int, ipv6 bool) ([]byte, error) {
	scratch := r.ref.Scratch()
	buf, oob := scratch[:maxICMPPacket], scratch[maxICMPPacket:][:maxControl]
	if !ipv6 { // raw IPv4 sockets give the IP header along
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil || n == 0 {
			return nil, err
		}
		return append([]byte(nil), buf[:n]...), nil
	}
	n, oobn, _, from, err := unix.Recvmsg(fd, buf, oob, 0)
	if err != nil {
		return nil, err
	}
	src, ok := from.(*unix.SockaddrInet6)
	if !ok {
		return nil, nil
	}
	dst, ok := destination(oob[:oobn])
	if !ok {
		return nil, nil
	}
	return ipv6Packet(src.Addr, dst.As16(), buf[:n]), nil
}

// ipv6Packet puts an IPv6 header (RFC 8200, section 3) before an ICMPv6 message.
func ipv6Packet(src, dst [16]byte, payload []byte) []byte {
	p := make([]byte, ipv6Header, ipv6Header+len(payload))
	p[0] = 6 << 4
	binary.BigEndian.PutUint16(p[4:], uint16(len(payload)))
	p[6], p[7] = protoICMPv6, 64
	copy(p[8:], src[:])
	copy(p[24:], dst[:])
	return append(p, payload...)
}

// destination is the address that a packet was sent to, of its control messages.
func destination(oob []byte) (netip.Addr, bool) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}, false
	}
	for _, m := range list {
		if m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= ipv6PktinfoAddrSize {
			return netip.AddrFrom16([16]byte(m.Data[:ipv6PktinfoAddrSize])), true
		}
	}
	return netip.Addr{}, false
}

// Close ends the task and closes the sockets.
func (r *ICMPRelay) Close(ctx context.Context) error {
	if r.handle == nil {
		return r.closeSockets()
	}
	var closed error
	err := loop.Await(ctx, func(wake func()) {
		if !r.handle.Post(func() { r.handle.Remove(); closed = r.closeSockets(); wake() }) {
			wake()
		}
	})
	return errors.Join(err, closed)
}

func (r *ICMPRelay) closeSockets() (err error) {
	for i, fd := range r.fds {
		if fd >= 0 {
			err = errors.Join(err, unix.Close(fd))
			r.fds[i] = -1
		}
	}
	return err
}
