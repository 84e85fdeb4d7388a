package stack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

// nicID is the netstack's only interface.
const nicID tcpip.NICID = 1

// A Stack turns the packets of one device into flows. See the package comment.
type Stack struct {
	cfg   Config
	link  *link
	net   *stack.Stack
	fwd   *tcp.Forwarder
	clock *loopClock // nil: the runtime's timers
	count counters

	table  table // unanswered SYNs
	batch  batch // of the reader's loop
	census census

	reader atomic.Pointer[loop.Ref] // of the latest Read

	// life is held for reading by whoever writes to the device from outside the netstack.
	life sync.RWMutex // guards below
	dead bool         // the device is closed, or about to be
}

// New checks cfg and builds a Stack. It starts nothing but the netstack's processors, one goroutine for each of GOMAXPROCS;
// a Stack that never runs is ended with Close.
func New(cfg Config) (*Stack, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	mtu, err := cfg.Device.MTU()
	if err != nil {
		return nil, fmt.Errorf("stack: MTU of the device: %w", err)
	}
	if err := checkMTU(mtu); err != nil {
		return nil, err
	}
	s := &Stack{cfg: cfg}
	s.table.init(s)
	s.batch.s = s
	s.census.init(cfg.Group, cfg.Budget)
	s.link = newLink(cfg.Device, mtu, &s.count)
	opts := stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol}, // tcp.NewProtocol is reno
		SecureRNG:          cfg.Rand,
		IPTables:           new(stack.IPTables), // without rules; the default tables, which are not used either, are 9 KiB (measured)
	}
	if cfg.Manual {
		s.clock = newLoopClock(cfg.Group, s.settle)
		opts.Clock = s.clock
	}
	s.net = stack.New(opts)
	if err := s.configure(); err != nil {
		s.closeNet()
		return nil, err
	}
	return s, nil
}

func checkMTU(mtu int) error {
	if mtu < header.IPv6MinimumMTU {
		return fmt.Errorf("stack: MTU of the device: %d is less than the %d of RFC 8200", mtu, header.IPv6MinimumMTU)
	}
	return nil
}

// SetMTU tells the stack that the device has another MTU, in bytes. Connections that are opened from then on have it; established
// ones learn of a smaller one from the path. It may be called from any goroutine.
func (s *Stack) SetMTU(mtu int) error {
	if err := checkMTU(mtu); err != nil {
		return err
	}
	s.link.SetMTU(uint32(mtu))
	return nil
}

// configure sets the options of the netstack.
func (s *Stack) configure() error {
	var (
		recovery = tcpip.TCPRecovery(0)       // RACK: 6-586 false retransmissions in loss-free runs (measured)
		sack     = tcpip.TCPSACKEnabled(true) //
		moderate = tcpip.TCPModerateReceiveBufferOption(false)
		timeWait = tcpip.TCPTimeWaitTimeoutOption(timeWait)
		finWait2 = tcpip.TCPLingerTimeoutOption(finWait2)
		retries  = tcpip.TCPMaxRetriesOption(maxRetries)
		receive  = tcpip.TCPReceiveBufferSizeRangeOption{Min: bufferShort, Default: bufferSize, Max: bufferSize}
		send     = tcpip.TCPSendBufferSizeRangeOption{Min: bufferShort, Default: bufferSize, Max: bufferSize}
	)
	for _, o := range []tcpip.SettableTransportProtocolOption{
		&recovery, &sack, &moderate, &timeWait, &finWait2, &retries, &receive, &send,
	} {
		if err := s.net.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fmt.Errorf("stack: set %T: %s", o, err)
		}
	}
	// A window of 0 means the default; there is no limit here because the table has one.
	s.fwd = tcp.NewForwarder(s.net, 0, 1<<30, s.serveHandshake)
	s.net.SetTransportProtocolHandler(tcp.ProtocolNumber, s.unmatched)
	s.net.SetTransportProtocolHandler(udp.ProtocolNumber, s.reassembled)
	if err := s.net.CreateNICWithOptions(nicID, s.link, stack.NICOptions{QDisc: s.link}); err != nil {
		return fmt.Errorf("stack: create the interface: %s", err)
	}
	if err := s.net.SetPromiscuousMode(nicID, true); err != nil { // accept packets for any address
		return fmt.Errorf("stack: accept any address: %s", err)
	}
	if err := s.net.SetSpoofing(nicID, true); err != nil { // and answer from it
		return fmt.Errorf("stack: answer from any address: %s", err)
	}
	s.net.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nicID},
		{Destination: header.IPv6EmptySubnet, NIC: nicID},
	})
	return nil
}

// Run reads the device until ctx ends or the device fails; then it ends every request and connection, lets go of the device
// and returns nil for the end of ctx. It is called once.
func (s *Stack) Run(ctx context.Context) error {
	return errors.Join(s.Read(ctx), s.Close())
}

// Read reads the device until ctx ends or the device fails, and returns nil for the former. It closes nothing: requests and
// connections go on, packets wait in the device's queue, and Read may be called again. It is one half of Run.
func (s *Stack) Read(ctx context.Context) error {
	rd := &reader{s: s, done: make(chan error, 1)}
	ref := s.startReader(rd)
	if ref == nil {
		return fmt.Errorf("stack: read the device: %w", loop.ErrStopped)
	}
	select {
	case err := <-rd.done:
		return err
	case <-ctx.Done():
		if !ref.Post(func() { rd.stop(nil) }) && len(rd.done) == 0 {
			return nil // the Group removed it
		}
		return <-rd.done
	}
}

// startReader adds the task that reads the device; nil means that the Group has ended.
func (s *Stack) startReader(rd *reader) *loop.Ref {
	ref := s.cfg.Group.Add(rd.start)
	s.reader.Store(ref)
	return ref
}

// Inject takes packet as if it had been read from the device, with complete checksums, soon and in the order of the calls. It
// keeps packet. False means that nobody reads the device.
func (s *Stack) Inject(packet []byte) bool {
	ref := s.reader.Load()
	return ref != nil && ref.Post(func() {
		s.receive(make([]byte, headroom), packet)
		s.batch.end()
	})
}

// Close ends all requests and connections, the latter with RST, and closes the device. It must not be called during Read. It is
// idempotent, and one half of Run.
func (s *Stack) Close() error {
	s.life.Lock()
	if s.dead {
		s.life.Unlock()
		return nil
	}
	s.dead = true
	s.life.Unlock()
	s.table.close()
	s.closeNet()
	s.census.close()
	if err := s.cfg.Device.Close(); err != nil {
		return fmt.Errorf("stack: close the device: %w", err)
	}
	return nil
}

func (s *Stack) closeNet() {
	s.net.Close()
	s.net.Wait()
	if s.clock != nil {
		s.clock.close()
	}
}

// settle waits until the netstack has nothing left to do now.
func (s *Stack) settle() {
	s.batch.end()
	s.net.Pause() // returns once the processors' queues are empty
	s.net.Resume()
	s.table.settle()
}

// write writes a packet with headroom to the device, unless that is closed. It may be called from any goroutine.
func (s *Stack) write(buf []byte) bool {
	tun.VnetHdr{}.Encode(buf)
	return s.writeBack(buf)
}

// writeBack is write for a packet that was read from a device: its header says what of its checksum is still to be done.
func (s *Stack) writeBack(buf []byte) bool {
	s.life.RLock()
	defer s.life.RUnlock()
	if s.dead {
		return false
	}
	s.link.write(buf)
	return true
}

// receive takes a packet that was read from the device. b is borrowed.
func (s *Stack) receive(vnet, b []byte) {
	s.count.rxPackets.Add(1)
	s.count.rxBytes.Add(uint64(len(b)))
	if tap := s.link.tap.Load(); tap != nil {
		(*tap)(false, b)
	}
	var p packet
	if why, ok := p.parse(b, len(b)); !ok {
		s.count.drop(why)
		return
	}
	var h tun.VnetHdr
	h.Decode(vnet)
	if h.Check(len(b)) != nil {
		s.count.drop(DropMalformed)
		return
	}
	if p.fragment {
		s.batch.end()
		s.link.deliver(p.v6, b[:p.payload], b[p.payload:p.end], nil) // comes back by reassembled
		return
	}
	if h.Flags&(tun.VnetNeedsChecksum|tun.VnetChecksumValid) == 0 && !p.sumIsRight(b) {
		s.count.drop(DropChecksum)
		return
	}
	s.batch.begin(&p)
	if p.proto == UDP {
		s.datagram(p.flow(), b[p.payload:p.end])
		return
	}
	switch {
	case p.flags&(flagSYN|flagACK) == flagSYN:
		s.table.syn(&p, vnet, b[:p.end])
	case p.flags&flagRST != 0 && s.table.rst(&p):
	default:
		s.link.deliver(p.v6, b[:p.payload], b[p.payload:p.end], nil)
	}
}

// receiveSegment takes a TCP segment whose headers and payload are apart: hdr and the beginning of the payload, rest, are
// borrowed, view is owned.
func (s *Stack) receiveSegment(vnet, hdr, rest []byte, view *buffer.View) {
	total := len(hdr) + len(rest) + view.Size()
	s.count.rxPackets.Add(1)
	s.count.rxBytes.Add(uint64(total))
	if tap := s.link.tap.Load(); tap != nil {
		(*tap)(false, hdr, rest, view.AsSlice())
	}
	var p packet
	why, ok := p.parse(hdr, total)
	var h tun.VnetHdr
	h.Decode(vnet)
	switch {
	case !ok:
	case p.proto != TCP || p.fragment || p.payload != len(hdr) || p.end <= total-view.Size():
		why, ok = DropMalformed, false
	case h.Check(total) != nil || p.flags&(flagSYN|flagRST) != 0: // neither carries kilobytes
		why, ok = DropMalformed, false
	case h.Flags&(tun.VnetNeedsChecksum|tun.VnetChecksumValid) == 0:
		view.CapLength(p.end - len(hdr) - len(rest))
		why, ok = DropChecksum, segmentSumIsRight(&p, hdr[p.transport:], rest, view.AsSlice())
	}
	if !ok {
		view.Release()
		s.count.drop(why)
		return
	}
	s.batch.begin(&p)
	s.link.deliver(p.v6, hdr, rest, view) // the netstack takes off what is behind the end of the IP packet
}

func segmentSumIsRight(p *packet, hdr, rest, body []byte) bool {
	var sum checksum.Checksumer
	sum.Add(hdr)
	sum.Add(rest)
	sum.Add(body)
	pseudo := pseudoSum(TCP, p.src.Addr(), p.dst.Addr(), len(hdr)+len(rest)+len(body))
	return checksum.Combine(sum.Checksum(), pseudo) == 0xffff
}

// unmatched is called by the netstack for a segment that belongs to no connection, and reports whether it was dealt with;
// if not, the netstack answers with RST.
func (s *Stack) unmatched(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	flags := header.TCP(pkt.TransportHeader().Slice()).Flags()
	if flags&(header.TCPFlagSyn|header.TCPFlagAck) == header.TCPFlagSyn {
		return s.table.handshakeBegins(id, pkt)
	}
	s.count.strays.Add(1)
	if s.cfg.Stray == nil {
		return false
	}
	v := pkt.ToView()
	defer v.Release()
	return s.cfg.Stray(flowOf(TCP, id), v.AsSlice())
}

// reassembled is called by the netstack for the datagrams that it put together.
func (s *Stack) reassembled(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	v := pkt.Data().AsRange().ToView()
	defer v.Release()
	hdr, body := pkt.TransportHeader().Slice(), v.AsSlice()
	flow := flowOf(UDP, id)
	n := int(binary.BigEndian.Uint16(hdr[4:]))
	if n < udpLen || n-udpLen > len(body) {
		s.count.drop(DropMalformed)
		return true
	}
	body = body[:n-udpLen]
	if sum := binary.BigEndian.Uint16(hdr[6:]); sum != 0 || flow.Src.Addr().Is6() {
		got := checksum.Combine(checksum.Checksum(hdr, pseudoSum(UDP, flow.Src.Addr(), flow.Dst.Addr(), n)), checksum.Checksum(body, 0))
		if sum == 0 || got != 0xffff {
			s.count.drop(DropChecksum)
			return true
		}
	}
	s.datagram(flow, body)
	return true
}

func flowOf(proto Proto, id stack.TransportEndpointID) Flow {
	return Flow{
		Proto: proto,
		Src:   netip.AddrPortFrom(addrOf(id.RemoteAddress), id.RemotePort),
		Dst:   netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort),
	}
}

func addrOf(a tcpip.Address) netip.Addr {
	if a.Len() == ipv4AddrLen {
		return netip.AddrFrom4(a.As4())
	}
	return netip.AddrFrom16(a.As16())
}

func tcpipAddr(a netip.Addr) tcpip.Address {
	if a.Is4() {
		return tcpip.AddrFrom4(a.As4())
	}
	return tcpip.AddrFrom16(a.As16())
}

const ipv4AddrLen = 4

// find returns the netstack's endpoint of a flow, or nil, and its state.
func (s *Stack) find(f Flow) (tcpip.Endpoint, tcp.EndpointState) {
	proto := header.IPv4ProtocolNumber
	if f.Dst.Addr().Is6() {
		proto = header.IPv6ProtocolNumber
	}
	ep, _ := s.net.FindTransportEndpoint(proto, tcp.ProtocolNumber, stack.TransportEndpointID{
		LocalAddress: tcpipAddr(f.Dst.Addr()), LocalPort: f.Dst.Port(),
		RemoteAddress: tcpipAddr(f.Src.Addr()), RemotePort: f.Src.Port(),
	}, nicID).(tcpip.Endpoint)
	if ep == nil {
		return nil, tcp.StateClose
	}
	return ep, tcp.EndpointState(ep.State())
}
