package lab

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A Wire is the host between the nodes: all that one node sends to another crosses its bridge. As a host it is a place
// outside of any node, for example for servers that are not part of a mesh.
type Wire struct{ *Host }

// A SniffConfig says what to look for.
type SniffConfig struct {
	// Markers are byte strings that are counted wherever they occur, in any packet of any protocol. A marker is found when it lies
	// within one packet: send it in one small write.
	Markers [][]byte
}

// A Count is what crossed the wire. Every packet counts once. TCP may have merged several segments into one packet and sent
// others again: bytes are those of the wire, not those of an application.
type Count struct {
	Packets     uint64   // all but ARP, neighbour discovery and multicast listeners
	ClearBytes  uint64   // payload of TCP outside of port 15008, IPv4 and IPv6
	TunnelBytes uint64   // payload of TCP from or to port 15008
	OtherBytes  uint64   // payload of IP other than TCP, and of protocols other than IP
	Hits        []uint64 // packets with the marker, by marker
	HiddenBytes uint64   // bytes of markers in packets that are not part of ClearBytes: what leaks elsewhere
	Dropped     uint64   // packets the kernel had no room for: if not zero, the other numbers are too small
}

// A Sniffer counts packets until Close.
type Sniffer struct {
	cfg  SniffConfig
	lab  *Lab
	f    *os.File
	done chan struct{}

	mu    sync.Mutex // guards below
	count Count
	err   error
}

// Sizes of the capture. The largest packet that Linux makes is a segmentation-offload packet of 8 * 65535 bytes
// (GSO_MAX_SIZE, include/linux/netdevice.h).
const (
	sniffFrame  = 1 << 20
	sniffBuffer = 128 << 20 // of the socket, in bytes: more than 10 ms of a veth at 80 Gbit/s
)

// Sniff starts to count what crosses the wire. Packets sent before it returns may be missed, none after. The lab closes it at
// the latest.
func (w *Wire) Sniff(cfg SniffConfig) (*Sniffer, error) {
	s := &Sniffer{cfg: cfg, lab: w.lab, done: make(chan struct{}), count: Count{Hits: make([]uint64, len(cfg.Markers))}}
	for i, m := range cfg.Markers {
		if len(m) == 0 {
			return nil, fmt.Errorf("lab: sniff: marker %d is empty", i)
		}
	}
	if err := w.do("sniff", s.open); err != nil {
		return nil, err
	}
	w.lab.mu.Lock()
	closed := w.lab.closed
	w.lab.sniffs[s] = struct{}{}
	w.lab.mu.Unlock()
	go s.run()
	if closed {
		_ = s.Close()
		return nil, fmt.Errorf("lab: sniff: %w", os.ErrClosed)
	}
	return s, nil
}

// open makes the packet socket. It is bound last, after filter and buffer, so that it never holds what they would not allow.
func (s *Sniffer) open() (err error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("packet socket: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, sniffBuffer); err != nil {
		return fmt.Errorf("SO_RCVBUFFORCE: %w", err)
	}
	br0, err := net.InterfaceByName("br0")
	if err != nil {
		return err
	}
	prog, err := sniffFilter(uint32(br0.Index))
	if err != nil {
		return err
	}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, prog); err != nil {
		return fmt.Errorf("SO_ATTACH_FILTER: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL)}); err != nil {
		return fmt.Errorf("bind packet socket: %w", err)
	}
	s.f = os.NewFile(uintptr(fd), "packet socket")
	return nil
}

func htons(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// sniffFilter lets each packet through once: where it comes in at a port of the bridge, or, when the wire's own host sends it,
// where it leaves that. A packet is seen on each interface that it crosses.
func sniffFilter(br0 uint32) (*unix.SockFprog, error) {
	const loopback = 1 // LOOPBACK_IFINDEX
	raw, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtInterfaceIndex},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: loopback, SkipTrue: 6},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: br0, SkipTrue: 2},
		bpf.LoadExtension{Num: bpf.ExtType}, // a port
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipTrue: 3, SkipFalse: 2},
		bpf.LoadExtension{Num: bpf.ExtType}, // br0
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipFalse: 1},
		bpf.RetConstant{Val: 1<<32 - 1},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return nil, fmt.Errorf("filter: %w", err)
	}
	prog := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		prog[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return &unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}, nil
}

// run reads packets until Close sets the deadline, then what is left.
func (s *Sniffer) run() {
	defer close(s.done)
	raw, err := s.f.SyscallConn()
	if err != nil {
		s.fail(err)
		return
	}
	buf := make([]byte, sniffFrame)
	for {
		err := raw.Read(func(fd uintptr) bool { return s.read(int(fd), buf) != 0 })
		if err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				s.fail(err)
			}
			break
		}
	}
	_ = raw.Control(func(fd uintptr) {
		for s.read(int(fd), buf) > 0 {
		}
		st, err := unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil {
			s.fail(fmt.Errorf("PACKET_STATISTICS: %w", err))
			return
		}
		s.mu.Lock()
		s.count.Dropped = uint64(st.Drops)
		s.mu.Unlock()
	})
}

// read counts one packet and returns its length; 0 when none is there.
func (s *Sniffer) read(fd int, buf []byte) int {
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case err == nil && n > 0:
			s.add(buf[:n])
			return n
		case errors.Is(err, unix.EAGAIN):
			return 0
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENETDOWN): // an interface went down: reported once
		default:
			if err == nil {
				return 0
			}
			s.fail(err)
			return 0
		}
	}
}

func (s *Sniffer) fail(err error) {
	s.mu.Lock()
	s.err = fmt.Errorf("lab: sniff: %w", err)
	s.mu.Unlock()
}

func (s *Sniffer) add(frame []byte) {
	class, payload := classify(frame)
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.count
	switch class {
	case classClear:
		c.ClearBytes += uint64(payload)
	case classTunnel:
		c.TunnelBytes += uint64(payload)
	case classOther:
		c.OtherBytes += uint64(payload)
	}
	if class != classLink {
		c.Packets++
	}
	for i, m := range s.cfg.Markers {
		if n := bytes.Count(frame, m); n > 0 {
			c.Hits[i]++
			if class != classClear {
				c.HiddenBytes += uint64(n * len(m))
			}
		}
	}
}

// Count returns what was counted so far. Dropped is known after Close only.
func (s *Sniffer) Count() Count {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.count
	c.Hits = slices.Clone(c.Hits)
	return c
}

// Close counts what has crossed the wire until now and ends. It returns an error if anything kept the sniffer from counting;
// lost packets are in [Count.Dropped].
func (s *Sniffer) Close() error {
	_ = s.f.SetReadDeadline(time.Unix(1, 0))
	<-s.done
	_ = s.f.Close()
	s.lab.mu.Lock()
	delete(s.lab.sniffs, s)
	s.lab.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}
