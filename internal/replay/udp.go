package replay

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"ztun.dev/ztun/internal/loop"
)

// dnsPort is where questions go. Of UDP nothing else is captured.
const dnsPort = 53

func isDNS(a netip.AddrPort) bool { return a.Port() == dnsPort }

// udp plays a datagram: a question of a pod, or the recorded answer of a resolver.
func (p *Player) udp(k *packet) {
	switch {
	case isDNS(k.dst) && p.cfg.Local(k.src.Addr()):
		p.question(k)
	case isDNS(k.src) && p.cfg.Local(k.dst.Addr()):
		p.counts.Played++
		if p.chosen[pair{k.src, k.dst}] {
			p.record(k)
		}
		p.answered(pair{k.src, k.dst}, k.captured())
	default:
		p.skip("udp")
	}
}

func (p *Player) question(k *packet) {
	f := &Flow{ID: p.NextID(), Packet: p.counts.Packets, Src: k.src, Dst: k.dst, Start: p.now, End: p.now}
	switch {
	case p.cfg.Only != nil && !p.cfg.Only(f):
		p.skip("not_chosen")
		return
	case len(k.b) < k.length:
		p.skip("question_cut_off")
		return
	}
	p.record(k)
	if p.cfg.Recorded != nil && len(p.chosen) < maxSenders {
		p.chosen[pair{k.dst, k.src}] = true
	}
	p.counts.Played++
	p.asked = f.ID
	if p.cfg.Seed != nil {
		p.cfg.Seed(f)
	}
	whole, b := p.dev.buffer(k.length)
	copy(b, k.b)
	setLength(b, k.v6, k.length)
	p.inject(whole, b)
}

// Asked is the id of the question that the netstack has just got, and the number of its packet. Others, put together of fragments,
// get the next id.
func (p *Player) Asked() (id, packet uint64) {
	if id := p.asked; id != 0 {
		p.asked = 0
		return id, p.counts.Packets
	}
	return p.NextID(), p.counts.Packets
}

// answered gives the recorded answer of a resolver to the first question that it fits.
func (p *Player) answered(who pair, msg []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.waiting[who] {
		if e.take(msg) {
			return
		}
	}
}

// An exchange waits for the recorded answer to a question.
type exchange struct {
	id     uint16 // of the recorded question
	msg    []byte // the question as it is forwarded
	accept func(msg []byte) bool
	wake   func()
	answer []byte
}

// take looks whether a recorded answer is the one.
func (e *exchange) take(msg []byte) bool {
	if e.answer != nil || len(msg) < 2 || binary.BigEndian.Uint16(msg) != e.id {
		return false
	}
	msg = append(slices.Clone(e.msg[:2]), msg[2:]...)
	if !e.accept(msg) {
		return false
	}
	e.answer = msg
	e.wake()
	return true
}

// A stream is what a recorded resolver sent on a connection: messages, each behind its length (RFC 1035, section 4.2.2).
type stream struct {
	buf      []byte
	messages [][]byte
	waiter   *exchange // one question at a time is in progress
}

// maxMessages is how many answers without a question are kept.
const maxMessages = 64

func (s *stream) add(data []byte, zeros int) {
	s.buf = appendZeros(append(s.buf, data...), zeros)
	at := 0
	defer func() { s.buf = s.buf[:copy(s.buf, s.buf[at:])] }()
	for len(s.buf)-at >= 2 {
		n := 2 + int(binary.BigEndian.Uint16(s.buf[at:]))
		if len(s.buf)-at < n {
			return
		}
		msg := slices.Clone(s.buf[at+2 : at+n])
		at += n
		if s.waiter != nil && s.waiter.take(msg) {
			continue
		}
		if len(s.messages) < maxMessages {
			s.messages = append(s.messages, msg)
		}
	}
}

// memory is what it takes.
func (s *stream) memory() int {
	n := cap(s.buf)
	for _, msg := range s.messages {
		n += cap(msg)
	}
	return n
}

func (s *stream) wait(e *exchange) {
	for i, msg := range s.messages {
		if e.take(msg) {
			s.messages = slices.Delete(s.messages, i, i+1)
			return
		}
	}
	s.waiter = e
}

type questionKey struct{}

// A Question is a DNS question as the application has sent it, for [Resolver].
type Question struct {
	Client netip.AddrPort
	ID     uint16 // of the message
	Flow   *Flow  // over TCP
	Local  bool   // nobody was asked: no Exchange has begun
}

// WithQuestion returns a context that says which question is answered.
func WithQuestion(ctx context.Context, q *Question) context.Context {
	return context.WithValue(ctx, questionKey{}, q)
}

func (q *Question) stream() *stream {
	if q.Flow == nil {
		return nil
	}
	return q.Flow.stream
}

var errNoResolver = errors.New("nobody answers")

// A Resolver plays the resolvers that applications address: by the recorded answers, or not at all.
type Resolver struct{ p *Player }

// Resolver returns that of the Player.
func (p *Player) Resolver() Resolver { return Resolver{p} }

// Exchange waits for the recorded answer to the question of ctx. The answer is given with the id of msg.
func (r Resolver) Exchange(ctx context.Context, server netip.AddrPort, tcp bool, msg, buf []byte, accept func([]byte) bool) ([]byte, error) {
	q, ok := ctx.Value(questionKey{}).(*Question)
	if !ok || len(msg) < 2 {
		return nil, errNoResolver
	}
	q.Local = false
	p := r.p
	if p.cfg.Peer != PeerRecorded {
		if p.cfg.Peer == PeerNone {
			return nil, loop.Await(ctx, func(func()) {})
		}
		return nil, errNoResolver
	}
	e := &exchange{id: q.ID, msg: msg, accept: accept}
	key := pair{server, q.Client}
	err := loop.Await(ctx, func(wake func()) {
		p.mu.Lock()
		defer p.mu.Unlock()
		e.wake = wake
		if s := q.stream(); s != nil {
			s.wait(e)
			return
		}
		p.waiting[key] = append(p.waiting[key], e)
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := q.stream(); s != nil {
		s.waiter = nil
	} else if list := slices.DeleteFunc(p.waiting[key], func(x *exchange) bool { return x == e }); len(list) > 0 {
		p.waiting[key] = list
	} else {
		delete(p.waiting, key)
	}
	if e.answer == nil {
		return nil, err
	}
	if !tcp && len(e.answer) > len(buf) {
		return append(buf[:0], e.answer[:len(buf)]...), nil
	}
	return append(buf[:0], e.answer...), nil
}
