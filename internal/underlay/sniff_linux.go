package underlay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A Sniffer sees the TCP packets of one port in the pod's namespace, as they leave and come, on all of its interfaces.
type Sniffer struct{ f *os.File }

// sniffBytes is how much of a packet is read: the longest that IP can have.
const sniffBytes = 1 << 16

// Sniff opens a packet socket for a port. Nothing is lost but what finds its buffer full.
func (u *Underlay) Sniff(port uint16) (*Sniffer, error) {
	fd, err := u.cfg.Netns.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("underlay: packet socket in netns %s: %w", u.cfg.Netns, err)
	}
	prog, err := sniffFilter(port)
	if err == nil {
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, prog)
	}
	if err == nil { // bound last: it never holds what the filter would not let through
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))})
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("underlay: packet socket in netns %s: %w", u.cfg.Netns, err)
	}
	return &Sniffer{os.NewFile(uintptr(fd), "packet socket")}, nil
}

// sniffFilter lets TCP from and to a port through; packets begin with their IP header.
func sniffFilter(port uint16) (*unix.SockFprog, error) {
	p := uint32(port)
	raw, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 6, SkipTrue: 9},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 4, SkipTrue: 13}, // IPv4
		bpf.LoadAbsolute{Off: 9, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 11},
		bpf.LoadMemShift{Off: 0},
		bpf.LoadIndirect{Off: 0, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: p, SkipTrue: 9},
		bpf.LoadIndirect{Off: 2, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: p, SkipTrue: 7},
		bpf.RetConstant{Val: 0},
		bpf.LoadAbsolute{Off: 6, Size: 1}, // IPv6
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 3},
		bpf.LoadAbsolute{Off: 40, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: p, SkipTrue: 2},
		bpf.LoadAbsolute{Off: 42, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: p, SkipTrue: 1},
		bpf.RetConstant{Val: sniffBytes},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return nil, err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, ins := range raw {
		filter[i] = unix.SockFilter{Code: ins.Op, Jt: ins.Jt, Jf: ins.Jf, K: ins.K}
	}
	return &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}, nil
}

// Run calls f with each packet, which is borrowed, until Close.
func (s *Sniffer) Run(f func(outgoing bool, packet []byte)) error {
	raw, err := s.f.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, sniffBytes)
	for {
		var n int
		var from unix.Sockaddr
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, from, failed = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(failed, unix.EAGAIN) && !errors.Is(failed, unix.EINTR)
		})
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case err != nil || failed != nil:
			return fmt.Errorf("underlay: packet socket: %w", errors.Join(err, failed))
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		f(ok && ll.Pkttype == unix.PACKET_OUTGOING, buf[:n])
	}
}

// Close ends Run.
func (s *Sniffer) Close() error { return s.f.Close() }
