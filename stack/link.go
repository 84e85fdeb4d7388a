package stack

import (
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"ztun.dev/ztun/tun"
)

const headroom = tun.Headroom

// A link is the netstack's end of the device. It advertises what makes the netstack move superpackets: receive checksums are
// not verified again (a segment from the pod's kernel carries the sum of its pseudo-header only), and TCP data leaves in one
// packet of up to 64 KiB whose segmentation is left to the kernel (0.30 of a direct connection's throughput, against 0.033
// with segmentation in the netstack; measured). Transmit checksums are not claimed: packets without GSO would then leave
// without any.
type link struct {
	dev   tun.Device
	fd    int           // -1: a device in memory
	mtu   atomic.Uint32 // of the device
	count *counters

	stack atomic.Pointer[dispatcher] // nil: not attached
	tap   atomic.Pointer[Tap]        // nil: nobody looks
	vecs  sync.Pool                  // *txVec
	flat  sync.Pool                  // *flatPacket

	writeMu sync.Mutex // serializes writes to a device in memory, which takes one writer
}

type dispatcher struct{ stack.NetworkDispatcher }

var (
	_ stack.LinkEndpoint = (*link)(nil)
	_ stack.GSOEndpoint  = (*link)(nil)

	_ stack.QueueingDiscipline = (*link)(nil)
)

func newLink(dev tun.Device, mtu int, count *counters) *link {
	l := &link{dev: dev, fd: dev.FD(), count: count}
	l.mtu.Store(uint32(mtu))
	l.vecs.New = func() any { return new(txVec) }
	l.flat.New = func() any {
		f := &flatPacket{buf: make([]byte, headroom+tun.MaxPacket)}
		return f
	}
	return l
}

// deliver gives the netstack a packet made of two pieces that are copied, and of a view whose ownership passes on. The IP
// and TCP headers must be the whole of hdr: the netstack clones the chunk that they are in, which must not be one of 64 KiB
// (17-19 % of the process's CPU, measured).
func (l *link) deliver(v6 bool, hdr, rest []byte, view *buffer.View) {
	d := l.stack.Load()
	if d == nil {
		if view != nil {
			view.Release()
		}
		return
	}
	var b buffer.Buffer
	_ = b.Append(fullView(hdr)) // never fails
	if len(rest) > 0 {
		_ = b.Append(fullView(rest))
	}
	if view != nil {
		_ = b.Append(view)
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: b})
	if v6 {
		d.DeliverNetworkPacket(header.IPv6ProtocolNumber, pkt)
	} else {
		d.DeliverNetworkPacket(header.IPv4ProtocolNumber, pkt)
	}
	pkt.DecRef()
}

// fullView is a view of a copy of p at the end of its memory. In room behind it Buffer.Append would put the first bytes of the payload: 12 behind
// the headers of a segment with timestamps, which then were two writes to the socket, and two segments, for each one read (a fifth
// of the throughput, measured).
func fullView(p []byte) *buffer.View {
	v := buffer.NewView(len(p))
	n := v.AvailableSize()
	v.Grow(n)
	v.TrimFront(n - len(p))
	copy(v.AsSlice(), p)
	return v
}

// WritePacket implements stack.QueueingDiscipline: it writes the packet with one system call, straight from its buffers. What the
// device does not take is dropped, as on any link. The netstack's own discipline would allocate a list for each packet.
func (l *link) WritePacket(pkt *stack.PacketBuffer) tcpip.Error {
	l.writePacket(pkt)
	return nil
}

// WritePackets implements stack.LinkWriter.
func (l *link) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for _, pkt := range pkts.AsSlice() {
		l.writePacket(pkt)
	}
	return pkts.Len(), nil
}

func (l *link) writePacket(pkt *stack.PacketBuffer) {
	if tap := l.tap.Load(); tap != nil {
		l.show(*tap, pkt)
	}
	h := vnetHeader(pkt)
	if l.fd >= 0 {
		v := l.vecs.Get().(*txVec)
		if v.fill(h, pkt) {
			l.wrote(pkt.Size(), v.write(l.fd))
			v.release()
			l.vecs.Put(v)
			return
		}
		v.release()
		l.vecs.Put(v)
	}
	f := l.flat.Get().(*flatPacket)
	if pkt.Size() <= tun.MaxPacket {
		l.writeFlat(f.fill(h, pkt))
	} else {
		l.count.drop(DropTooLong)
	}
	l.flat.Put(f)
}

// write writes a packet that has its header before it. It may be called from any goroutine.
func (l *link) write(buf []byte) {
	if tap := l.tap.Load(); tap != nil {
		(*tap)(true, buf[headroom:])
	}
	if l.fd >= 0 {
		l.wrote(len(buf)-headroom, writeFD(l.fd, buf))
		return
	}
	l.writeFlat([][]byte{buf})
}

func (l *link) writeFlat(bufs [][]byte) {
	n := len(bufs[0]) - headroom
	if l.fd >= 0 {
		l.wrote(n, writeFD(l.fd, bufs[0]))
		return
	}
	l.writeMu.Lock()
	_, err := l.dev.Write(bufs, headroom)
	l.writeMu.Unlock()
	l.wrote(n, err)
}

func (l *link) wrote(n int, err error) {
	if err != nil {
		l.count.drop(DropWrite)
		return
	}
	l.count.txPackets.Add(1)
	l.count.txBytes.Add(uint64(n))
}

// vnetHeader says which work on the packet is left to the kernel.
func vnetHeader(pkt *stack.PacketBuffer) tun.VnetHdr {
	gso := &pkt.GSOOptions
	if gso.Type == stack.GSONone || !gso.NeedsCsum {
		return tun.VnetHdr{}
	}
	l3 := uint16(len(pkt.NetworkHeader().Slice())) // a TUN has no header before it
	h := tun.VnetHdr{
		Flags:          tun.VnetNeedsChecksum,
		HeaderBytes:    uint16(pkt.HeaderSize()),
		ChecksumStart:  l3,
		ChecksumOffset: gso.CsumOffset,
	}
	if pkt.Data().Size() > int(gso.MSS) {
		h.SegmentBytes = gso.MSS
		h.GSOType = tun.VnetGSOTCPv4
		if gso.Type == stack.GSOTCPv6 {
			h.GSOType = tun.VnetGSOTCPv6
		}
	}
	return h
}

// A flatPacket is a packet in one piece, for devices in memory and for packets in more pieces than a txVec has.
type flatPacket struct {
	buf  []byte
	bufs [1][]byte
}

func (f *flatPacket) fill(h tun.VnetHdr, pkt *stack.PacketBuffer) [][]byte {
	h.Encode(f.buf)
	n := headroom
	list, skip := pkt.AsViewList()
	for v := list.Front(); v != nil; v = v.Next() {
		s := v.AsSlice()
		if skip >= len(s) {
			skip -= len(s)
			continue
		}
		n += copy(f.buf[n:], s[skip:])
		skip = 0
	}
	f.bufs[0] = f.buf[:n]
	return f.bufs[:]
}

// MTU implements stack.LinkEndpoint.
func (l *link) MTU() uint32 { return l.mtu.Load() }

// SetMTU implements stack.LinkEndpoint.
func (l *link) SetMTU(mtu uint32) { l.mtu.Store(mtu) }

// MaxHeaderLength implements stack.LinkEndpoint. The vnet header is not part of the packet.
func (l *link) MaxHeaderLength() uint16 { return 0 }

// LinkAddress implements stack.LinkEndpoint.
func (l *link) LinkAddress() tcpip.LinkAddress { return "" }

// SetLinkAddress implements stack.LinkEndpoint.
func (l *link) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities implements stack.LinkEndpoint.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// GSOMaxSize implements stack.GSOEndpoint; the netstack takes the headers off.
func (l *link) GSOMaxSize() uint32 { return tun.MaxPacket }

// SupportedGSO implements stack.GSOEndpoint.
func (l *link) SupportedGSO() stack.SupportedGSO { return stack.HostGSOSupported }

// Attach implements stack.LinkEndpoint.
func (l *link) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		l.stack.Store(nil)
		return
	}
	l.stack.Store(&dispatcher{d})
}

// IsAttached implements stack.LinkEndpoint.
func (l *link) IsAttached() bool { return l.stack.Load() != nil }

// Wait implements stack.LinkEndpoint: there are no goroutines.
func (l *link) Wait() {}

// ARPHardwareType implements stack.LinkEndpoint.
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader implements stack.LinkEndpoint.
func (l *link) AddHeader(*stack.PacketBuffer) {}

// ParseHeader implements stack.LinkEndpoint.
func (l *link) ParseHeader(*stack.PacketBuffer) bool { return true }

// Close implements stack.LinkEndpoint: the device outlives the netstack.
func (l *link) Close() {}

// SetOnCloseAction implements stack.LinkEndpoint.
func (l *link) SetOnCloseAction(func()) {}
