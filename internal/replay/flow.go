package replay

import (
	"context"
	"net/netip"
	"slices"

	"ztun.dev/ztun/internal/loop"
)

// A Kind says how far a flow is played.
type Kind uint8

// The kinds.
const (
	Played    Kind = iota // from its SYN on
	Midstream             // the capture does not have its SYN: nothing is decided about it
	TunnelLeg             // to port 15008: a kernel socket, which is never captured
)

// A Cut says why a flow was ended before its time.
type Cut uint8

// The cuts.
const (
	NotCut     Cut = iota
	CutEnd         // the capture ends
	CutTooMany     // more flows were open than can be
	CutReused      // its ports were used again
	CutCarried     // the kernel carries it: the capture has its SYN only
)

// A Count is packets of one direction of a flow, as they are in the capture.
type Count struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"` // that TCP carries, retransmissions included
}

// A Flow is a TCP connection of the capture, or what there is of it.
type Flow struct {
	ID         uint64
	Packet     uint64         // number of the first one, from 1 on, of all that are played
	Src, Dst   netip.AddrPort // who opened it, and to whom; of a Midstream, of the first packet
	Kind       Kind
	Inbound    bool  // it was not a pod that opened it
	Start, End int64 // nanoseconds since 1970
	Cut        Cut
	Sent       Count // by Src
	Received   Count
	Note       any // of whoever decides

	warnings []string
	skipped  bool // Config.Only does not want it
	carried  bool // the kernel carries it: what follows its SYN is not in the capture
	script   bool // a Script plays it: what the netstack sends is kept
	seen     []seenSegment

	list       *flowList
	prev, next *Flow
	last       int64 // time of the last packet, by Player.clock
	ended      int64 // when Player.Over was called, by the same

	// The recorded connection. Numbers are from the first byte of data on.
	isn       uint32 // of the SYN
	options   synOptions
	up        assembler // what Src sent, without the bytes
	peerISN   uint32    // of the recorded SYN-ACK
	peerSeen  bool      // there was one, or an acknowledgement of it
	peerShift uint8     // the recorded peer took no window scale: by how much windows are smaller than the netstack takes them
	down      assembler // what Dst sent
	acked     int64     // what Src has acknowledged of it

	ends byte // which sides have ended it: endSent, endReceived

	// The netstack's end of it.
	auto      bool   // Src acknowledges whatever comes
	answered  bool   // by SYN-ACK
	refused   bool   // by RST or ICMP, or reset later: what Src sends then has no place
	stackISN  uint32 // of the SYN-ACK
	stackNext int64  // what it has sent
	stackFIN  bool   // that it has ended it
	timeWait  bool   // it has ended it before Src: its end stays for a while
	stackAck  uint32 // what it has acknowledged, as a sequence number of Src
	ackSent   int64  // what Src has acknowledged of it
	stamps    bool   // both have agreed on timestamps
	sack      bool   // and on selective acknowledgements
	stackTime uint32 // the last timestamp of the netstack
	srcTime   uint32 // the last one of Src
	window    uint16 // the last one of Src, as the netstack takes it

	// The other end.
	connect connectState
	waiters []func()
	peer    *peer
	early   []byte  // what the recorded peer sent before there was a peer
	written int64   // what the peer has sent
	left    bool    // there was no room: the rest of what the peer has to send is left out
	held    *int    // Player.held; nil: the flow was told of
	weight  int     // the part of it that is this flow's
	stream  *stream // the recorded peer's answers to DNS questions; nil: of another flow
}

// Warnings are what a reader of the outcome should know.
func (f *Flow) Warnings() []string { return f.warnings }

// Warn adds a warning, once.
func (f *Flow) Warn(text string) {
	if !slices.Contains(f.warnings, text) {
		f.warnings = append(f.warnings, text)
	}
}

// A connectState is what became of the recorded peer's answer to the SYN.
type connectState uint8

const (
	connectPending connectState = iota
	connectAccepted
	connectRefused
	connectNoHost
	connectNoNetwork
)

// settle says what the peer has answered. mu is held.
func (f *Flow) settleConnect(s connectState) {
	if f.connect != connectPending {
		return
	}
	f.connect = s
	for _, wake := range f.waiters {
		wake()
	}
	f.waiters = nil
}

// The sides of a recorded connection that have ended it; a reset is both.
const (
	endSent = 1 << iota
	endReceived
)

// goesOn reports whether the capture may have more packets of a flow.
func (f *Flow) goesOn() bool {
	return f.Kind == Played && f.ends != endSent|endReceived && f.Sent.Packets+f.Received.Packets > 1
}

// room is how many bytes more all flows may hold. mu is held, as by the next.
func (f *Flow) room() int {
	if f.held == nil {
		return 0
	}
	return maxHeldAll - *f.held
}

// weigh counts what is held of a flow: what waits for other packets or for the peer, what the peer has to send, and what it has sent
// and the application has not acknowledged, which is in the netstack or on the way to it.
func (f *Flow) weigh() {
	if f.held == nil {
		return
	}
	n := len(f.early) + f.up.memory + f.down.memory
	if f.stream != nil {
		n += f.stream.memory()
	}
	if f.peer != nil {
		n += cap(f.peer.out)
	}
	if !f.refused {
		n += int(max(0, f.written-f.ackSent))
	}
	*f.held += n - f.weight
	f.weight = n
}

// unweigh counts nothing of it from now on.
func (f *Flow) unweigh() {
	if f.held != nil {
		*f.held -= f.weight
	}
	f.held, f.weight = nil, 0
}

// refuse notes that the netstack's end is gone.
func (f *Flow) refuse() {
	f.refused = true
	f.weigh()
}

// stays reports whether the netstack keeps its end as long as nothing comes.
func (f *Flow) stays() bool {
	over := f.stackFIN && f.ackSent == f.stackNext && f.up.ended()
	return f.answered && !f.refused && !over
}

// A past is the connections that were told of and whose packets may go on, so that these are not taken for others. Above 2 × maxPast the
// oldest are forgotten.
type past [2]map[pair]bool

const maxPast = 1 << 15

func (p *past) add(x pair) {
	if p[0] == nil || len(p[0]) == maxPast {
		p[0], p[1] = make(map[pair]bool), p[0]
	}
	p[0][x] = true
}

func (p *past) has(x pair) bool { return p[0][x] || p[1][x] }

func (p *past) remove(x pair) {
	delete(p[0], x)
	delete(p[1], x)
}

// A flowList is a list in the order of the last packet, the oldest first.
type flowList struct {
	first, last *Flow
	n           int
}

func (l *flowList) push(f *Flow) {
	f.list, f.prev, f.next = l, l.last, nil
	if l.last != nil {
		l.last.next = f
	} else {
		l.first = f
	}
	l.last = f
	l.n++
}

func (l *flowList) remove(f *Flow) {
	if f.prev != nil {
		f.prev.next = f.next
	} else {
		l.first = f.next
	}
	if f.next != nil {
		f.next.prev = f.prev
	} else {
		l.last = f.prev
	}
	f.list, f.prev, f.next = nil, nil, nil
	l.n--
}

type flowKey struct{}

// WithFlow returns a context that says which flow is served, for the Underlay and the Tunnel.
func WithFlow(ctx context.Context, f *Flow) context.Context {
	return context.WithValue(ctx, flowKey{}, f)
}

// FlowOf is the flow that a context says is served, or nil.
func FlowOf(ctx context.Context) *Flow {
	f, _ := ctx.Value(flowKey{}).(*Flow)
	return f
}

// awaitConnect waits until the recorded peer has answered.
func (p *Player) awaitConnect(ctx context.Context, f *Flow) (connectState, error) {
	state := connectPending
	err := loop.Await(ctx, func(wake func()) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if f.connect == connectPending {
			f.waiters = append(f.waiters, wake)
			return
		}
		wake()
	})
	p.mu.Lock()
	state = f.connect
	p.mu.Unlock()
	if state == connectPending {
		return state, err
	}
	return state, nil
}
