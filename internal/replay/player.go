package replay

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A Peer says what is at the other end of a connection.
type Peer uint8

// The peers.
const (
	PeerRecorded Peer = iota // what the capture has of the other direction
	PeerNone                 // nobody answers
	PeerAccept               // takes every connection, sends nothing and ends when the application does
	PeerEcho                 // sends back what comes
	PeerFile                 // sends Config.Replies to each connection
)

// A Checksums says what becomes of packets whose TCP or UDP checksum is wrong. Those that hold the sum of the pseudo-header, whose rest
// is left to the network card, are right in any case.
type Checksums uint8

// The ways.
const (
	// ChecksumsAuto takes a wrong checksum for one that the network card would have filled in while at least half of those of
	// the same sender are wrong, and drops the packet otherwise.
	ChecksumsAuto Checksums = iota
	ChecksumsOff
	ChecksumsStrict // drops
)

// What a capture's clock does from one packet to the next.
const (
	MaxGap  = 24 * time.Hour // the clock does not go further at once
	MaxBack = time.Minute    // what packets may be out of order; a larger step back is that of a clock that was set
)

// Defaults of a Config.
const (
	DefaultMTU     = 65535
	DefaultMaxOpen = 16384 // 8 KiB each, most of it the netstack's (measured)

	maxOver    = 8192            // flows that are over and may still get a packet
	timeWait   = time.Second     // of package stack: how long its end of a connection stays that it has ended first
	lingerTime = 2 * time.Minute // without a packet, after which a flow that is over is told of: twice the maximum segment lifetime of Linux
	maxSenders = 1 << 16         // whose checksums are counted, and questioners whose answers are kept
)

// A Config says how packets are played. Manual, Local and Done are required.
type Config struct {
	Manual *loop.Manual
	Local  func(netip.Addr) bool // whether an address is that of a pod that is served
	Done   func(f *Flow)         // is told of each flow once it is over

	// Uncaptured says why a packet between two addresses never comes to the netstack of a pod, by a key of Counts.NotPlayed, or "". nil:
	// none is known.
	Uncaptured func(src, dst netip.Addr) string

	Start     int64 // nanoseconds since 1970: the time of the first packet, at which the clock of Manual stands
	Peer      Peer
	Replies   []byte
	Checksums Checksums
	Decap     bool // look into GRE, VXLAN and Geneve

	// Only, if set, says of each flow, and of each packet that is no flow's, whether it is played. Those that are not have ids all
	// the same.
	Only func(f *Flow) bool

	Recorded *Writer // gets the packets of flows that are played, as they were captured; nil: none
	Played   *Writer // gets what the netstack reads and writes; nil: none

	Seed func(f *Flow) // is called before a flow is played, so that what is random about it depends on it alone; nil: none

	MaxOpen int // flows that are open at a time; above it the longest without a packet is given up. 0 means 16384
}

// A Player plays packets to the netstack at its Device. Its methods belong to the goroutine of its loop.Manual, with the exception
// of what the Underlay, the Tunnel and the netstack call.
type Player struct {
	cfg    Config
	m      *loop.Manual
	dev    *Device
	tunnel tunnel

	now     int64 // of the capture's clock, in nanoseconds since 1970
	shift   int64 // what the capture's times are ahead of Manual's
	begun   bool
	asked   uint64 // id of the question that is played
	carried bool   // the packet that is played has CarriedNote
	frags   defragmenter
	senders map[netip.Addr]*[2]uint32 // right and wrong checksums
	chosen  map[pair]bool             // by resolver and client: their answers are kept, too

	mu       sync.Mutex // guards below, and the fields of flows
	flows    map[pair]*Flow
	open     flowList // in the order of their last packet
	over     flowList
	lastID   uint64
	latest   uint64          // packet of what has it
	untold   map[uint64]bool // packets that began a flow of which Done has not been told
	past     past
	leftover []*Flow              // whose ports were used again
	waiting  map[pair][]*exchange // DNS questions, by resolver and client
	err      error                // of a writer
	held     int                  // bytes of what flows hold: their weights

	counts Counts
}

// A pair is who sends and who gets a packet, or who opened a flow and to whom.
type pair struct{ src, dst netip.AddrPort }

// Counts are numbers of packets of captures.
type Counts struct {
	Packets     uint64            `json:"packets"`
	Bytes       uint64            `json:"bytes"` // on the wire
	Played      uint64            `json:"played"`
	Injected    uint64            `json:"madeUp,omitempty"`            // acknowledgements that stand for those of the application, and what the capture has lost
	NotPlayed   map[string]uint64 `json:"notPlayed,omitempty"`         // by reason
	LinkTypes   map[string]uint64 `json:"unsupportedLinks,omitempty"`  // packets of link types that are not understood, by their number
	Checksums   uint64            `json:"wrongChecksums,omitempty"`    // of packets that were taken all the same
	CutOff      uint64            `json:"cutOff,omitempty"`            // packets of which not all was captured
	Backwards   uint64            `json:"timeWentBackwards,omitempty"` // packets that are earlier than the one before
	Gaps        uint64            `json:"gapsShortened,omitempty"`     // times without a packet that were longer than a day
	Reassembled uint64            `json:"reassembled,omitempty"`       // packets that were put together of fragments
}

// New returns a Player.
func New(cfg Config) (*Player, error) {
	if cfg.Manual == nil || cfg.Local == nil || cfg.Done == nil {
		return nil, errors.New("replay: config: Manual, Local and Done are required")
	}
	if cfg.MaxOpen == 0 {
		cfg.MaxOpen = DefaultMaxOpen
	}
	p := &Player{
		cfg: cfg, m: cfg.Manual, now: cfg.Start, flows: make(map[pair]*Flow), senders: make(map[netip.Addr]*[2]uint32), chosen: make(map[pair]bool), waiting: make(map[pair][]*exchange), untold: make(map[uint64]bool),
		counts: Counts{NotPlayed: make(map[string]uint64), LinkTypes: make(map[string]uint64)},
	}
	p.dev = &Device{mtu: DefaultMTU, wrote: p.written}
	p.tunnel.p = p
	return p, nil
}

// Device is what the netstack works on.
func (p *Player) Device() *Device { return p.dev }

// Counts are the numbers so far.
func (p *Player) Counts() Counts {
	p.mu.Lock()
	c := p.counts
	p.mu.Unlock()
	c.NotPlayed, c.LinkTypes = maps.Clone(c.NotPlayed), maps.Clone(c.LinkTypes)
	return c
}

func (p *Player) skip(why string) { p.counts.NotPlayed[why]++ }

// Play plays a packet. first says that it is the first of a capture: its clock may be another.
func (p *Player) Play(c *Packet, first bool) error {
	p.advance(c.Time, first)
	p.carried = c.Carried
	p.counts.Packets++
	p.counts.Bytes += uint64(c.Length)
	if len(c.Data) < c.Length {
		p.counts.CutOff++
	}
	if !c.Link.Known() {
		p.counts.LinkTypes[fmt.Sprintf("%d", c.Link)]++
		p.skip("unsupported_link")
		return p.failed()
	}
	at, ok := c.Link.network(c.Data)
	if !ok {
		p.skip("not_ip")
		return p.failed()
	}
	p.ip(c.Data[at:], c.Length-at, 0)
	p.m.Settle()
	p.expire()
	return p.failed()
}

func (p *Player) failed() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// advance sets the clock to the time of a packet. Manual's never goes back: a packet that is a little earlier than the one before happens at
// the same time, but one that is much earlier, or the first of another capture, begins a time of its own.
func (p *Player) advance(t int64, first bool) {
	if !p.begun {
		p.begun = true
		p.now, p.shift = t, t-p.clock()
		return
	}
	d := time.Duration(t - p.now)
	switch {
	case first && (d < 0 || d > MaxGap), d < -MaxBack:
		if !first {
			p.counts.Backwards++
		}
		p.shift += int64(d)
		p.now = t
		return
	case d < 0:
		p.counts.Backwards++
		return
	case d > MaxGap:
		p.counts.Gaps++
		p.shift += int64(d - MaxGap)
		d = MaxGap
	}
	if d > 0 {
		p.m.Advance(d)
	}
	p.now = t
}

// When is the capture's time of what happens now.
func (p *Player) When() int64 { return p.clock() + p.shift }

// clock is Manual's time, in nanoseconds since 1970. The capture's may go back.
func (p *Player) clock() int64 { return p.m.Group().Now().UnixNano() }

// maxNesting is how many encapsulations are looked into.
const maxNesting = 4

// ip plays a packet from its IP header on.
func (p *Player) ip(b []byte, wire, depth int) {
	var k packet
	if why := k.parse(b, wire); why != "" {
		p.skip(why)
		return
	}
	if k.fragment {
		p.fragment(&k, depth)
		return
	}
	if p.cfg.Decap && depth < maxNesting {
		if at := inner(&k); at > 0 {
			p.ip(k.b[min(at, len(k.b)):], k.length-at, depth+1)
			return
		}
	}
	switch {
	case k.extended:
		p.skip("ipv6_extension")
	case k.proto == protoTCP, k.proto == protoUDP:
		if p.cfg.Uncaptured != nil {
			if why := p.cfg.Uncaptured(k.src.Addr(), k.dst.Addr()); why != "" {
				p.skip(why)
				return
			}
		}
		if !p.sumFits(&k) {
			p.skip("checksum")
			return
		}
		if k.proto == protoTCP {
			p.tcp(&k)
		} else {
			p.udp(&k)
		}
	case k.proto == protoICMP, k.proto == protoICMPv6:
		p.icmp(&k)
	default:
		p.skip(fmt.Sprintf("protocol_%d", k.proto))
	}
}

// sumFits looks at the checksum.
func (p *Player) sumFits(k *packet) bool {
	if p.cfg.Checksums == ChecksumsOff {
		return true
	}
	state := k.checkSum()
	if state == sumUnknown {
		return true
	}
	c := p.senders[k.src.Addr()]
	if c == nil {
		c = new([2]uint32)
		if len(p.senders) < maxSenders {
			p.senders[k.src.Addr()] = c
		}
	}
	if state == sumRight {
		c[0]++
		return true
	}
	c[1]++
	if p.cfg.Checksums == ChecksumsStrict || state == sumWrong && c[1] < c[0] {
		return false
	}
	p.counts.Checksums++
	return true
}

// fragment puts together what the netstack would not: it takes the fragments of datagrams that a pod sends as they are.
func (p *Player) fragment(k *packet, depth int) {
	if k.proto == protoUDP && p.cfg.Local(k.src.Addr()) && len(k.b) == k.length && !k.extended && p.cfg.Only == nil {
		p.counts.Played++
		whole, b := p.dev.buffer(k.length)
		copy(b, k.b)
		if !k.v6 {
			headerSum(b[:k.transport])
		}
		p.inject(whole, b)
		return
	}
	b, why := p.frags.add(k, p.clock())
	switch {
	case why != "":
		p.skip(why)
	case b == nil:
		p.skip("fragment_held")
	default:
		p.counts.Reassembled++
		p.ip(b, len(b), depth)
	}
}

// inject gives the netstack a packet that is complete but for its transport checksum.
func (p *Player) inject(whole, b []byte) {
	p.write(p.cfg.Played, DirOutbound, b) // of the pod, as tcpdump has it on a TUN device
	p.dev.put(whole)
}

func (p *Player) write(w *Writer, dir Direction, b []byte) {
	if w == nil {
		return
	}
	if err := w.Packet(0, time.Unix(0, p.When()), dir, b, len(b), ""); err != nil && p.err == nil {
		p.err = fmt.Errorf("replay: write: %w", err)
	}
}

// record keeps a packet of a flow that is played.
func (p *Player) record(k *packet) {
	if p.cfg.Recorded == nil {
		return
	}
	note := ""
	if p.carried {
		note = CarriedNote
	}
	if err := p.cfg.Recorded.Packet(0, time.Unix(0, p.now), DirUnknown, k.b, k.length, note); err != nil && p.err == nil {
		p.err = fmt.Errorf("replay: write: %w", err)
	}
}

// Finish ends all flows that are left, in the order of their beginning, once the last packet was played. cut has to bring about that
// those which are open end; they have this cause already.
func (p *Player) Finish(cut func()) {
	p.mu.Lock()
	for f := p.open.first; f != nil; f = f.next {
		f.Cut = CutEnd
	}
	p.mu.Unlock()
	cut()
	p.m.Settle()
	p.mu.Lock()
	rest := slices.SortedFunc(maps.Values(p.flows), func(a, b *Flow) int { return int(int64(a.ID) - int64(b.ID)) })
	clear(p.flows)
	p.open, p.over = flowList{}, flowList{}
	p.mu.Unlock()
	for _, f := range rest {
		p.done(f)
	}
	p.tunnel.close()
}

// done tells of a flow.
func (p *Player) done(f *Flow) {
	if f.skipped {
		return
	}
	p.mu.Lock()
	delete(p.untold, f.Packet)
	p.mu.Unlock()
	p.cfg.Done(f)
}

// expire tells of flows that were over for a while, and gives up open ones when there are too many.
func (p *Player) expire() {
	p.mu.Lock()
	leftover := p.leftover
	p.leftover = nil
	p.mu.Unlock()
	for _, f := range leftover {
		p.done(f)
	}
	for {
		p.mu.Lock()
		f := p.over.first
		if f == nil || p.over.n <= maxOver && p.clock()-f.last < int64(lingerTime) {
			f = nil
		} else {
			p.forget(f)
		}
		p.mu.Unlock()
		if f == nil {
			break
		}
		p.m.Settle() // the netstack has let go of it
		p.done(f)
		if f.timeWait && p.clock()-f.ended < int64(timeWait) {
			p.m.Advance(timeWait) // the capture's clock goes on slowly, or not at all
			p.shift -= int64(timeWait)
		}
	}
	for {
		p.mu.Lock()
		f := p.open.first
		if p.open.n <= p.cfg.MaxOpen {
			p.mu.Unlock()
			return
		}
		f.Cut = CutTooMany
		p.abandon(f)
		p.open.remove(f)
		p.over.push(f)
		p.mu.Unlock()
		p.m.Settle() // the netstack has the reset
	}
}

// forget takes a flow out of the table, and what is left of it out of the netstack once that runs. mu is held.
func (p *Player) forget(f *Flow) {
	f.list.remove(f)
	if f.stays() {
		p.abandon(f)
	}
	f.unweigh()
	key := pair{f.Src, f.Dst}
	if p.flows[key] == f {
		delete(p.flows, key)
	}
	if f.goesOn() {
		p.past.add(key)
	}
}

// Find is the flow that the netstack's flow between two addresses is part of, or nil.
func (p *Player) Find(src, dst netip.AddrPort) *Flow {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.flows[pair{src, dst}]
}

// Over says that everything was decided about a flow and what it led to has ended. It may be called more than once.
func (p *Player) Over(f *Flow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.End, f.ended = p.When(), p.clock()
	if f.list == &p.open {
		p.open.remove(f)
		p.over.push(f)
	}
	if p.held > maxHeldAll/2 && f.stays() && f.written > f.ackSent {
		p.abandon(f) // others need the room
	}
}

// Serving says that something is decided about a flow, perhaps once more: the SYN of one that got no answer has come again.
func (p *Player) Serving(f *Flow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.refused = false
	if f.list == &p.over {
		p.over.remove(f)
		p.open.push(f)
	}
}

// NextID numbers what is no flow.
func (p *Player) NextID() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.nextID()
}

// nextID numbers what the packet begins that is being played. mu is held.
func (p *Player) nextID() uint64 {
	p.lastID++
	p.latest = p.counts.Packets
	return p.lastID
}

// Began is the id of what the packet with a number, that which was played last, has begun; 0: nothing.
func (p *Player) Began(packet uint64) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.latest != packet {
		return 0
	}
	return p.lastID
}

// Open reports whether Done has yet to be told of a flow that began with the packet with a number.
func (p *Player) Open(packet uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.untold[packet]
}

// Doubts says in one line what of the packets was played all the same, or "".
func (c *Counts) Doubts() string {
	var parts []string
	for _, x := range []struct {
		n    uint64
		what string
	}{
		{c.CutOff, "not captured in whole"},
		{c.Checksums, "with a wrong checksum"},
		{c.Backwards, "earlier than the one before"},
		{c.Gaps, "more than a day after it"},
	} {
		if x.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", x.n, x.what))
		}
	}
	return strings.Join(parts, ", ")
}

// Unused says in one line what was not played, or "".
func (c *Counts) Unused() string {
	var parts []string
	for _, why := range slices.Sorted(maps.Keys(c.NotPlayed)) {
		parts = append(parts, fmt.Sprintf("%s %d", why, c.NotPlayed[why]))
	}
	return strings.Join(parts, ", ")
}
