package tun

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// nftBackend steers without BPF, by sets of nftables that have the addresses and ports of each flow. What is in them goes on
// when the process has died, and a later start goes on with them. For each family, in table inet ztun:
//
//	chain pre   { type filter hook prerouting priority mangle
//		iifname eth0 tcp flags & (syn|ack) != syn  meta mark set own
//		iifname eth0 socket mark own               meta mark set own
//		iifname ztun0 tcp flags & rst != 0         meta mark set own
//		iifname ztun0 tcp flags & (syn|ack) == syn, by set:
//			network, application   meta mark set own, accept
//			listener               tproxy to the listener, meta mark set deliver, accept
//			listener_in            tproxy to the listener, meta mark set own, accept
//			none                   drop
//	}
//	chain out   { type route hook output priority mangle
//		tcp flags & (syn|ack) != syn, by set:
//			network   meta mark set own
//			listener  meta mark set deliver
//	}
//	chain guard { type filter hook postrouting priority mangle
//		oifname eth0 l4proto tcp, mark not own, no probe: drop
//	}
//
// A SYN to the network is forwarded by the kernel, which counts a hop.
type nftBackend struct {
	cfg   *SteeringConfig
	watch *endWatch
}

func newNFTBackend(cfg *SteeringConfig) (backend, error) {
	watch, err := newEndWatch(cfg.Log)
	if err != nil {
		return nil, err
	}
	return &nftBackend{cfg: cfg, watch: watch}, nil
}

func (b *nftBackend) name() string { return SteerByNFT }

func (b *nftBackend) close() error { return b.watch.close() }

func (b *nftBackend) run(ctx context.Context, _, ended func(EndedFlow)) error {
	return b.watch.run(ctx, ended)
}

func (b *nftBackend) lost() uint64 { return b.watch.missed.Load() }

// nftNetns is nftBackend in one netns.
type nftNetns struct {
	*handedFlows // all that are in the sets; its lock guards what is below conn, too

	b      *nftBackend
	device string
	ifaces []Interface
	marks  Marks

	conn  *nftables.Conn
	table *nftables.Table
	sets  map[Way][2]*nftables.Set // IPv4, IPv6
	at    [2]netip.AddrPort        // the listeners
	guard bool
}

// nftSets are the names of the sets, without the 4 or 6 behind.
var nftSets = map[Way]string{ToNetwork: "network", ToApplication: "application", ToListener: "listener", ToListenerInbound: "listener_in"}

func (b *nftBackend) mark(s *setup) error {
	s.markedBy = MarkedByNFT
	// What an earlier start did with BPF. The rest is done by attach.
	return s.removeFilters(filters...)
}

func (b *nftBackend) attach(s *setup) (_ netnsSteerer, err error) {
	n := &nftNetns{b: b, device: s.cfg.Name, ifaces: s.ifaces, marks: s.cfg.Marks, sets: make(map[Way][2]*nftables.Set)}
	if n.handedFlows, err = watchHanded(b.watch, s, n.remove); err != nil {
		return nil, err
	}
	s.nft = n
	if err := n.open(s); err != nil {
		return nil, errors.Join(err, n.close())
	}
	b.watch.add(n)
	return n, nil
}

func (n *nftNetns) open(s *setup) (err error) {
	if n.conn, err = nftables.New(nftables.AsLasting()); err != nil { // in the netns of this thread
		return fmt.Errorf("nftables: %w", err)
	}
	had := false
	tables, err := n.conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	for _, t := range tables {
		had = had || t.Name == nftTable
	}
	n.table = &nftables.Table{Family: nftables.TableFamilyINet, Name: nftTable}
	if had {
		if err := n.adopt(); err != nil { // of another kind: begin anew
			if err := s.removeNFT(); err != nil {
				return err
			}
			clear(n.flows)
			had = false
		}
	}
	n.guard = had && !s.cfg.FailOpenRoute // of an earlier start: it stays throughout
	if err := n.write(had); err != nil {
		return err
	}
	if !had {
		s.undo.add(s.removeNFT)
	}
	return nil
}

// adopt reads the flows that an earlier start has left.
func (n *nftNetns) adopt() error {
	for w, name := range nftSets {
		for i, version := range []string{"4", "6"} {
			set, err := n.conn.GetSetByName(n.table, name+version)
			if err != nil {
				return err
			}
			elements, err := n.conn.GetSetElements(set)
			if err != nil {
				return err
			}
			for _, e := range elements {
				key, ok := nftFlowKey(n.cookie, e.Key, i == 1)
				if !ok {
					return fmt.Errorf("set %s: element of %d bytes", set.Name, len(e.Key))
				}
				n.flows[key] = &handedFlow{way: w}
			}
		}
	}
	return nil
}

// nftCarried returns the flows of the netns of this thread that lead to a listener of ztun's.
func nftCarried() map[flowKey]bool {
	conn, err := nftables.New()
	if err != nil {
		return nil // no nftables in this kernel, so no table
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: nftTable}
	found := make(map[flowKey]bool)
	for i, version := range []string{"4", "6"} {
		set, err := conn.GetSetByName(table, nftSets[ToListener]+version)
		if err != nil {
			continue
		}
		elements, err := conn.GetSetElements(set)
		if err != nil {
			continue
		}
		for _, e := range elements {
			if key, ok := nftFlowKey(0, e.Key, i == 1); ok {
				found[key] = true
			}
		}
	}
	return found
}

// nftKey is a flow as the element of a set: addresses and ports as on the wire, each filled up to four bytes.
func nftKey(k *flowKey) (key []byte, ipv6 bool) {
	src, dst := netip.AddrFrom16(k.Src).Unmap(), netip.AddrFrom16(k.Dst).Unmap()
	key = append(src.AsSlice(), k.SrcPort[0], k.SrcPort[1], 0, 0)
	key = append(append(key, dst.AsSlice()...), k.DstPort[0], k.DstPort[1], 0, 0)
	return key, !src.Is4()
}

func nftFlowKey(netns uint64, b []byte, ipv6 bool) (k flowKey, ok bool) {
	size := 4
	if ipv6 {
		size = 16
	}
	if len(b) != 2*size+8 {
		return k, false
	}
	src, _ := netip.AddrFromSlice(b[:size])
	dst, _ := netip.AddrFromSlice(b[size+4 : 2*size+4])
	return keyOf(netns, netip.AddrPortFrom(src, binary.BigEndian.Uint16(b[size:])),
		netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[2*size+4:]))), true
}

// write puts sets and rules into the kernel, all at once; the sets are there already if had.
func (n *nftNetns) write(had bool) error {
	c := n.conn
	c.AddTable(n.table)
	for w, name := range nftSets {
		var pair [2]*nftables.Set
		for i, version := range []string{"4", "6"} {
			addr := nftables.TypeIPAddr
			if i == 1 {
				addr = nftables.TypeIP6Addr
			}
			pair[i] = &nftables.Set{
				// Of this transaction only. One that AddSet finds is the next of a number that all connections share without a lock.
				ID:    uint32(w)*2 + uint32(i) + 1,
				Table: n.table, Name: name + version, Concatenation: true,
				KeyType: nftables.MustConcatSetType(addr, nftables.TypeInetService, addr, nftables.TypeInetService),
			}
			if !had {
				if err := c.AddSet(pair[i], nil); err != nil {
					return fmt.Errorf("set %s: %w", pair[i].Name, err)
				}
			}
		}
		n.sets[w] = pair
	}
	accept := nftables.ChainPolicyAccept
	chain := func(name string, kind nftables.ChainType, hook *nftables.ChainHook) *nftables.Chain {
		made := c.AddChain(&nftables.Chain{
			Name: name, Table: n.table, Type: kind, Hooknum: hook, Priority: nftables.ChainPriorityMangle, Policy: &accept,
		})
		if had {
			c.FlushChain(made)
		}
		return made
	}
	add := func(to *nftables.Chain, parts ...[]expr.Any) {
		r := &nftables.Rule{Table: n.table, Chain: to}
		for _, p := range parts {
			r.Exprs = append(r.Exprs, p...)
		}
		c.AddRule(r)
	}
	m := nftMatcher(n.marks)
	pre := chain("pre", nftables.ChainTypeFilter, nftables.ChainHookPrerouting)
	for _, i := range n.ifaces {
		add(pre, m.from(i.Name), m.tcp(), m.flags(synAck, syn, false), m.set(n.marks.Own))
		add(pre, m.from(i.Name), m.tcp(), m.socket(n.marks.Own), m.set(n.marks.Own))
	}
	add(pre, m.from(n.device), m.tcp(), m.flags(rst, 0, false), m.set(n.marks.Own), m.verdict(expr.VerdictAccept))
	begins := func(family int, w Way) []expr.Any {
		return append(append(append(m.from(n.device), m.family(family)...), append(m.tcp(), m.flags(synAck, syn, true)...)...),
			m.flow(family, n.sets[w][family])...)
	}
	for family, at := range n.at {
		for _, w := range []Way{ToNetwork, ToApplication} {
			add(pre, begins(family, w), m.set(n.marks.Own), m.verdict(expr.VerdictAccept))
		}
		if at.IsValid() {
			add(pre, begins(family, ToListener), m.tproxy(family, at), m.set(n.marks.Deliver), m.verdict(expr.VerdictAccept))
			add(pre, begins(family, ToListenerInbound), m.tproxy(family, at), m.set(n.marks.Own), m.verdict(expr.VerdictAccept))
		}
	}
	add(pre, m.from(n.device), m.tcp(), m.flags(synAck, syn, true), m.verdict(expr.VerdictDrop))

	out := chain("out", nftables.ChainTypeRoute, nftables.ChainHookOutput)
	for family := range n.at {
		goesOn := append(append(m.family(family), m.tcp()...), m.flags(synAck, syn, false)...)
		add(out, goesOn, m.flow(family, n.sets[ToNetwork][family]), m.set(n.marks.Own), m.verdict(expr.VerdictAccept))
		add(out, goesOn, m.flow(family, n.sets[ToListener][family]), m.set(n.marks.Deliver), m.verdict(expr.VerdictAccept))
	}

	guard := chain("guard", nftables.ChainTypeFilter, nftables.ChainHookPostrouting)
	if n.guard {
		for family, probe := range []netip.Addr{probe4, probe6} {
			for _, source := range []bool{true, false} {
				add(guard, m.family(family), m.address(family, source, probe), m.verdict(expr.VerdictAccept))
			}
		}
		for _, i := range n.ifaces {
			add(guard, m.to(i.Name), m.tcp(), m.mark(n.marks.Own, false), m.verdict(expr.VerdictDrop))
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("table inet %s: %w", nftTable, err)
	}
	return nil
}

func (b *nftBackend) guard(s *setup) error {
	n := s.nft
	n.mu.Lock()
	defer n.mu.Unlock()
	n.guard = true
	return n.write(true)
}

// enrolRunning has what the pod sends on its connections marked.
func (b *nftBackend) enrolRunning(s *setup) error {
	var list []flowKey
	err := eachSocket(func(d *diagSocket) {
		switch d.info.State {
		case tcpSynSent, tcpSynRecv, tcpClose:
		default:
			list = append(list, keyOf(s.cookie, d.local, d.remote))
		}
	})
	if err != nil {
		return fmt.Errorf("connections that are older: %w", err)
	}
	s.nft.mu.Lock()
	defer s.nft.mu.Unlock()
	for i := range list {
		if s.nft.flows[list[i]] != nil {
			continue
		}
		if err := s.nft.put(&list[i], ToNetwork); err != nil {
			return fmt.Errorf("connections that are older: %w", err)
		}
		s.nft.flows[list[i]].ended = true // nobody has handed it back
	}
	return nil
}

func (n *nftNetns) watchOlder(*setup) error { return nil } // see adopt

func (n *nftNetns) stored() *storage { return new(storage) }

func (n *nftNetns) listeners(v4, v6 int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, fd := range []int{v4, v6} {
		n.at[i] = netip.AddrPort{}
		if fd < 0 {
			continue
		}
		sa, err := unix.Getsockname(fd)
		if err != nil {
			return err
		}
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			n.at[i] = netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
		case *unix.SockaddrInet6:
			n.at[i] = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
		}
	}
	return n.write(true)
}

func (n *nftNetns) steer(src, dst netip.AddrPort, w Way, _ int) error {
	key := keyOf(n.cookie, src, dst)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.conn == nil {
		return os.ErrClosed
	}
	return n.put(&key, w)
}

// put adds an element, or moves it.
func (n *nftNetns) put(key *flowKey, w Way) error {
	if f := n.flows[*key]; f != nil {
		if f.way == w {
			*f = handedFlow{way: w}
			return nil
		}
		if err := n.remove(*key); err != nil {
			return err
		}
	}
	b, ipv6 := nftKey(key)
	if err := n.conn.SetAddElements(n.set(w, ipv6), []nftables.SetElement{{Key: b}}); err != nil {
		return err
	}
	if err := n.conn.Flush(); err != nil {
		return err
	}
	n.flows[*key] = &handedFlow{way: w}
	return nil
}

func (n *nftNetns) set(w Way, ipv6 bool) *nftables.Set {
	if ipv6 {
		return n.sets[w][1]
	}
	return n.sets[w][0]
}

// remove deletes elements, all at once: no more than forgetAtOnce. If that fails the kernel has all of them still, but for those that were
// missing already: then each is deleted by itself.
func (n *nftNetns) remove(keys ...flowKey) error {
	err := n.removeAtOnce(keys)
	if err == nil || len(keys) == 1 {
		return err
	}
	for _, key := range keys {
		if err := n.removeAtOnce([]flowKey{key}); err != nil {
			return err
		}
	}
	return nil
}

func (n *nftNetns) removeAtOnce(keys []flowKey) error {
	for i := range keys {
		f := n.flows[keys[i]]
		if f == nil {
			continue
		}
		b, ipv6 := nftKey(&keys[i])
		if err := n.conn.SetDeleteElements(n.set(f.way, ipv6), []nftables.SetElement{{Key: b}}); err != nil {
			return err
		}
	}
	if err := n.conn.Flush(); err != nil && (len(keys) > 1 || !errors.Is(err, unix.ENOENT)) {
		return err
	}
	for i := range keys {
		delete(n.flows, keys[i])
	}
	return nil
}

func (n *nftNetns) unsteer(src, dst netip.AddrPort) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.conn == nil {
		return
	}
	if err := n.remove(keyOf(n.cookie, src, dst)); err != nil {
		n.b.cfg.Log.Warn("a decision stays", "src", src, "dst", dst, "reason", err)
	}
}

func (n *nftNetns) close() error {
	n.b.watch.remove(n)
	n.mu.Lock() // run has let go of it
	defer n.mu.Unlock()
	err := n.handedFlows.close()
	if n.conn != nil {
		err = errors.Join(err, n.conn.CloseLasting())
		n.conn = nil
	}
	return err
}

// nftMatcher makes the parts of rules.
type nftMatcher Marks

// Flags of a TCP header, RFC 9293, section 3.1.
const (
	syn    = 0x02
	rst    = 0x04
	synAck = 0x12
)

// nftKeyRegister is the first of those that have the key of a set: 32 bits each.
const nftKeyRegister = unix.NFT_REG32_00

func interfaceName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func (nftMatcher) from(name string) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: interfaceName(name)},
	}
}

func (nftMatcher) to(name string) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: interfaceName(name)},
	}
}

func (nftMatcher) family(i int) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{[]byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}[i]}},
	}
}

func (nftMatcher) tcp() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
	}
}

// flags matches when those of mask are, or are not, as want says.
func (nftMatcher) flags(mask, want byte, are bool) []expr.Any {
	op := expr.CmpOpNeq
	if are {
		op = expr.CmpOpEq
	}
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{mask}, Xor: []byte{0}},
		&expr.Cmp{Op: op, Register: 1, Data: []byte{want}},
	}
}

func (m nftMatcher) masked(mark uint32, is bool) []expr.Any {
	op := expr.CmpOpNeq
	if is {
		op = expr.CmpOpEq
	}
	ne := binaryutil.NativeEndian
	return []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: ne.PutUint32(m.OwnMask), Xor: make([]byte, 4)},
		&expr.Cmp{Op: op, Register: 1, Data: ne.PutUint32(mark)},
	}
}

func (m nftMatcher) mark(mark uint32, is bool) []expr.Any {
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}}, m.masked(mark, is)...)
}

func (m nftMatcher) socket(mark uint32) []expr.Any {
	return append([]expr.Any{&expr.Socket{Key: expr.SocketKeyMark, Register: 1}}, m.masked(mark, true)...)
}

// set changes the part of the mark that is ztun's.
func (m nftMatcher) set(mark uint32) []expr.Any {
	ne := binaryutil.NativeEndian
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: ne.PutUint32(^m.OwnMask), Xor: ne.PutUint32(mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}
}

func (nftMatcher) verdict(kind expr.VerdictKind) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind}}
}

// address loads an address of the network header and compares it.
func (m nftMatcher) address(family int, source bool, with netip.Addr) []expr.Any {
	load := m.loadAddress(family, source, 1)
	return []expr.Any{load, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: with.AsSlice()}}
}

func (nftMatcher) loadAddress(family int, source bool, register uint32) *expr.Payload {
	p := &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
	if family == 1 {
		p.Offset, p.Len = 8, 16
	}
	if !source {
		p.Offset += p.Len
	}
	return p
}

// flow matches when the packet's addresses and ports are in the set.
func (m nftMatcher) flow(family int, in *nftables.Set) []expr.Any {
	words := uint32(1) // of an address
	if family == 1 {
		words = 4
	}
	port := func(offset, register uint32) *expr.Payload {
		return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2}
	}
	const first = nftKeyRegister
	return []expr.Any{
		m.loadAddress(family, true, first), port(0, first+words),
		m.loadAddress(family, false, first+words+1), port(2, first+2*words+1),
		&expr.Lookup{SourceRegister: first, SetName: in.Name, SetID: in.ID},
	}
}

func (nftMatcher) tproxy(family int, at netip.AddrPort) []expr.Any {
	const address, port = nftKeyRegister, nftKeyRegister + 4
	return []expr.Any{
		&expr.Immediate{Register: address, Data: at.Addr().AsSlice()},
		&expr.Immediate{Register: port, Data: binary.BigEndian.AppendUint16(nil, at.Port())},
		&expr.TProxy{
			Family: []byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}[family], TableFamily: unix.NFPROTO_INET,
			RegAddr: address, RegPort: port,
		},
	}
}
