package stack

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"ztun.dev/ztun/internal/loop"
)

// Causes of the end of a request's ctx; all are ErrGone as well.
var (
	errEvicted = fmt.Errorf("%w: given up for a newer attempt", ErrGone)
	errGaveUp  = fmt.Errorf("%w: the application gave up", ErrGone)
	errAged    = fmt.Errorf("%w: no answer for %v", ErrGone, maxAttempt)
	errStopped = fmt.Errorf("%w: the stack was closed", ErrGone)
)

var errNotTaken = errors.New("stack: the netstack did not take the SYN")

// A table holds the requests of a stack, from the SYN to the answer or to the end of the handshake, oldest first.
//
// The netstack's handshakes are kept apart: one outlives its request when that is given up in the middle, and a later
// request of the same flow waits for its end.
type table struct {
	s *Stack

	steering sync.Mutex // held while a decision is made: from asking whether the request still counts to noting it; taken before mu

	mu             sync.Mutex // guards below, and the fields of requests that say so
	requests       map[Flow]*request
	oldest, newest *request // a list in the order of deadlines
	handshakes     map[Flow]*request
	steered        steered
	closed         bool
	timer          *loop.Timer // for the oldest deadline, or an earlier one; nil: none
	warned         time.Time   // when a limit was last logged

	running sync.WaitGroup // handshakes; added to with mu held and the table not closed
	ending  atomic.Int32   // calls of handshakeDone; added to with mu held
}

// A request is a SYN and what became of it. It implements TCPRequest.
type request struct {
	t      *table
	flow   Flow
	seq    uint32
	raw    []byte // the packet with its headroom, as it was read; immutable
	syn    []byte // the packet, part of raw
	header int    // bytes of it that are IP and TCP header
	born   time.Time
	cancel context.CancelCauseFunc

	// Guarded by table.mu.
	state      requestState
	deadline   time.Time
	prev, next *request
	wake       func()    // of Accept, once it waits
	conn       loop.Conn // the outcome of a handshake: this,
	err        error     // or this
	taken      bool      // the netstack has begun the handshake
	accepted   bool      // by the Steerer's listener
	successor  *request  // a later request of the flow, whose handshake waits for the end of this one
}

var _ TCPRequest = (*request)(nil)

type requestState uint8

const (
	pending     requestState = iota // no verb was called
	handshaking                     // Accept was called
	ended                           // answered, accepted or given up; not in the table any more
)

func (t *table) init(s *Stack) {
	t.s = s
	t.requests = make(map[Flow]*request)
	t.handshakes = make(map[Flow]*request)
}

// syn takes a SYN; vnet and b are borrowed. It is called on the loop of the reader.
func (t *table) syn(p *packet, vnet, b []byte) {
	s, flow := t.s, p.flow()
	t.mu.Lock()
	old, running := t.requests[flow], t.handshakes[flow]
	if old != nil && old.seq == p.seq || old == nil && running != nil && running.seq == p.seq {
		again := s.cfg.Steerer != nil && old.state == handshaking
		t.mu.Unlock()
		s.count.duplicates.Add(1)
		if again { // what was written back is lost; the netstack has a timer of its own for that
			_ = old.lead() // the next one may work
		}
		return
	}
	if s.cfg.Steerer != nil && old == nil && t.known(flow, p.seq, vnet, b) {
		return
	}
	if old == nil && running == nil && s.cfg.Steerer == nil {
		t.mu.Unlock() // only we add requests
		if ep, state := s.find(flow); ep != nil && state != tcp.StateTimeWait {
			// A connection that only we still know of: the netstack answers as RFC 5961, section 4, says, and the
			// application's RST then ends it.
			s.link.deliver(p.v6, b[:p.payload], b[p.payload:p.end], nil)
			return
		}
		t.mu.Lock()
	}
	var replaced, evicted *request
	if old != nil && old.state != ended {
		// The application closed its socket, of which it tells nobody, and connects again from the same port.
		replaced = old
		t.unlink(old)
		s.count.gaveUp.Add(1)
	}
	if t.closed {
		t.mu.Unlock()
		return
	}
	if len(t.requests) >= s.cfg.MaxInFlight {
		evicted = t.oldest
		t.unlink(evicted)
		s.count.drop(DropEvicted)
	}
	var r *request
	var ctx context.Context
	if s.cfg.Limits.Acquire() {
		r = &request{t: t, flow: flow, seq: p.seq, raw: append(append(make([]byte, 0, headroom+p.end), vnet...), b...), header: p.payload, born: s.cfg.Group.Now()}
		r.syn = r.raw[headroom:]
		ctx, r.cancel = context.WithCancelCause(context.Background()) // no parent: it needs no end to be freed
		t.requests[flow] = r
		t.pushBack(r)
		s.count.requests.Add(1)
		s.count.inFlight.Add(1)
	} else {
		s.count.drop(DropLimit)
	}
	warn := (evicted != nil || r == nil) && t.mayWarn()
	t.mu.Unlock()
	replaced.end(errGaveUp)
	evicted.end(errEvicted)
	if warn {
		s.cfg.Log.Warn("too many connection attempts without an answer", "in_flight", s.count.inFlight.Load(),
			"limit", s.cfg.MaxInFlight, "process", s.cfg.Limits.InFlight(), "process_limit", s.cfg.Limits.max)
	}
	if r != nil {
		s.cfg.Handler.ServeTCP(ctx, r)
	}
}

// mayWarn reports, once a minute, that a limit may be logged. mu is held.
func (t *table) mayWarn() bool {
	now := t.s.cfg.Group.Now()
	if !t.warned.IsZero() && now.Sub(t.warned) < time.Minute {
		return false
	}
	t.warned = now
	return true
}

// rst takes a RST and reports whether it ended a request that had no answer yet.
func (t *table) rst(p *packet) bool {
	if t.s.count.inFlight.Load() == 0 {
		return false
	}
	t.mu.Lock()
	r := t.requests[p.flow()]
	if r == nil || r.state != pending || p.seq-r.seq > 1 { // its number is that of the SYN, or the next
		t.mu.Unlock()
		return false
	}
	t.unlink(r)
	t.mu.Unlock()
	t.s.count.gaveUp.Add(1)
	r.end(errGaveUp)
	return true
}

// pushBack gives r a new deadline, the latest of all. mu is held.
func (t *table) pushBack(r *request) {
	now := t.s.cfg.Group.Now()
	r.deadline = now.Add(maxAttempt)
	r.prev, r.next = t.newest, nil
	if t.newest != nil {
		t.newest.next = r
	} else {
		t.oldest = r
	}
	t.newest = r
	t.arm(now)
}

func (t *table) unlist(r *request) {
	if r.prev != nil {
		r.prev.next = r.next
	} else {
		t.oldest = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	} else {
		t.newest = r.prev
	}
	r.prev, r.next = nil, nil
}

// unlink takes r out of the table and frees its slots. mu is held.
func (t *table) unlink(r *request) {
	t.unlist(r)
	delete(t.requests, r.flow)
	r.state = ended
	t.s.count.inFlight.Add(^uint64(0))
	t.s.cfg.Limits.Release()
}

// arm makes sure that age is called at the oldest deadline. mu is held.
func (t *table) arm(now time.Time) {
	if t.timer == nil && t.oldest != nil && !t.closed {
		t.timer = t.s.cfg.Group.After(t.oldest.deadline.Sub(now), t.age)
	}
}

// age gives up what has passed its deadline.
func (t *table) age() {
	now := t.s.cfg.Group.Now()
	var aged []*request
	t.mu.Lock()
	t.timer = nil
	for r := t.oldest; r != nil && !r.deadline.After(now); r = t.oldest {
		t.unlink(r)
		aged = append(aged, r)
	}
	t.arm(now)
	t.mu.Unlock()
	for _, r := range aged {
		t.s.count.drop(DropAged)
		r.end(errAged)
	}
}

// close ends all requests and waits for the handshakes.
func (t *table) close() {
	t.mu.Lock()
	t.closed = true
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	var all, running []*request
	for t.oldest != nil {
		all = append(all, t.oldest)
		t.unlink(t.oldest)
	}
	for _, r := range t.handshakes {
		running = append(running, r)
	}
	t.mu.Unlock()
	for _, r := range all {
		r.end(errStopped)
	}
	for _, r := range running {
		for !t.abort(r) { // the netstack's goroutine is about to create the endpoint
			runtime.Gosched()
		}
	}
	t.running.Wait()
}

// end tells everybody that r, which was unlinked, has ended. mu is not held. r may be nil.
func (r *request) end(cause error) {
	if r == nil {
		return
	}
	r.cancel(cause)
	r.t.mu.Lock()
	wake := r.wake
	r.t.mu.Unlock()
	if wake != nil {
		wake()
		r.t.abort(r)
	}
}

// abort ends the netstack's handshake for r. False means that there is one, but no endpoint yet.
func (t *table) abort(r *request) bool {
	t.mu.Lock()
	running := t.handshakes[r.flow] == r
	t.mu.Unlock()
	if !running {
		return true
	}
	ep, state := t.s.find(r.flow)
	if ep == nil || state == tcp.StateTimeWait {
		return false
	}
	ep.Abort()
	return true
}

// begin starts the netstack's handshake for r, at once or after the one that is in progress for the flow.
func (t *table) begin(r *request, wake func()) {
	t.mu.Lock()
	r.wake = wake
	if r.state != handshaking { // given up since
		t.mu.Unlock()
		wake()
		return
	}
	if t.s.cfg.Steerer != nil {
		t.mu.Unlock()
		if err := r.lead(); err != nil {
			t.fail(r, err)
			wake()
		}
		return
	}
	if other := t.handshakes[r.flow]; other != nil {
		other.successor = r
		t.mu.Unlock()
		return
	}
	t.register(r)
	t.mu.Unlock()
	t.handshake(r)
	if t.s.cfg.Manual {
		t.settle()
	}
}

// fail ends the handshake of r, unless it has ended.
func (t *table) fail(r *request, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.state == handshaking {
		t.unlink(r)
		r.err = err
	}
}

// settle waits for the goroutines that begin or end a handshake and wait for nothing but their turn.
func (t *table) settle() {
	var all []*request
	t.mu.Lock()
	for _, r := range t.handshakes {
		all = append(all, r)
	}
	t.mu.Unlock()
	for _, r := range all {
		for t.unsettled(r) {
			runtime.Gosched()
		}
	}
	for t.ending.Load() > 0 { // out of the table, but nobody was woken yet
		runtime.Gosched()
	}
}

func (t *table) unsettled(r *request) bool {
	t.mu.Lock()
	running := t.handshakes[r.flow] == r && r.taken
	t.mu.Unlock()
	if !running {
		return false
	}
	ep, _ := t.s.find(r.flow)
	if ep == nil {
		return true
	}
	ep.GetRemoteAddress() // has the lock that is held until the SYN-ACK was sent
	state := tcp.EndpointState(ep.State())
	return state != tcp.StateConnecting && state != tcp.StateSynRecv
}

// register is called with mu held and the table not closed.
func (t *table) register(r *request) {
	t.handshakes[r.flow] = r
	t.running.Add(1)
}

// handshake gives the SYN to the netstack, which calls handshakeBegins for it.
func (t *table) handshake(r *request) {
	if ep, state := t.s.find(r.flow); ep != nil && state == tcp.StateTimeWait {
		ep.Abort() // the application has used the port again within TIME-WAIT (RFC 6191); its new SYN ignores our RST
	}
	t.s.link.deliver(r.flow.Src.Addr().Is6(), r.syn[:r.header], r.syn[r.header:], nil)
	t.mu.Lock()
	taken := r.taken
	t.mu.Unlock()
	if !taken {
		t.handshakeDone(r, nil, errNotTaken)
	}
}

// handshakeBegins is called by the netstack for a SYN that belongs to no endpoint. It always takes it.
func (t *table) handshakeBegins(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	t.mu.Lock()
	r := t.handshakes[flowOf(TCP, id)]
	if r == nil || r.taken {
		t.mu.Unlock()
		t.s.count.duplicates.Add(1)
		return true
	}
	r.taken = true
	t.mu.Unlock()
	if !t.s.fwd.HandlePacket(id, pkt) { // starts the netstack's goroutine, which calls serveHandshake
		t.mu.Lock()
		r.taken = false
		t.mu.Unlock()
	}
	return true
}

// serveHandshake is called by the netstack in a goroutine of its own, which ends with the handshake.
func (s *Stack) serveHandshake(fr *tcp.ForwarderRequest) {
	flow := flowOf(TCP, fr.ID())
	s.table.mu.Lock()
	r := s.table.handshakes[flow]
	s.table.mu.Unlock()
	queue := new(waiter.Queue)
	ep, err := fr.CreateEndpoint(queue)
	fr.Complete(false)
	if err != nil {
		s.table.handshakeDone(r, nil, fmt.Errorf("%w: %w", errGaveUp, goError(err)))
		return
	}
	s.setOptions(ep)
	s.table.handshakeDone(r, newConn(s, ep, queue, flow), nil)
}

// handshakeDone settles the request of a handshake, unless that was given up, and starts the flow's next one.
func (t *table) handshakeDone(r *request, c *conn, err error) {
	t.mu.Lock()
	t.ending.Add(1)
	defer t.ending.Add(-1)
	delete(t.handshakes, r.flow)
	next := r.successor
	if next != nil && next.state == handshaking && !t.closed {
		t.register(next)
	} else {
		next = nil
	}
	won := r.state == handshaking
	if won {
		t.unlink(r)
		if r.err = err; c != nil {
			r.conn = c
		}
	}
	wake := r.wake
	t.mu.Unlock()
	switch {
	case !won && c != nil:
		_ = c.Reset() // always succeeds
	case won && err != nil:
		r.cancel(errGaveUp)
		wake()
	case won:
		t.s.count.accepted.Add(1)
		wake()
	}
	if next != nil {
		t.handshake(next)
	}
	t.running.Done()
}

// take lets the caller be the one verb of the request.
func (r *request) take() bool {
	r.t.mu.Lock()
	defer r.t.mu.Unlock()
	if r.state != pending {
		return false
	}
	r.t.unlink(r)
	return true
}

// Flow implements TCPRequest.
func (r *request) Flow() Flow { return r.flow }

// Accept implements TCPRequest.
func (r *request) Accept(ctx context.Context) (loop.Conn, error) {
	t := r.t
	t.mu.Lock()
	if r.state != pending {
		t.mu.Unlock()
		return nil, ErrGone
	}
	r.state = handshaking
	t.unlist(r)
	t.pushBack(r)
	t.mu.Unlock()
	waitErr := loop.Await(ctx, func(wake func()) { t.begin(r, wake) })

	t.mu.Lock()
	c, err := r.conn, r.err
	r.conn = nil
	if r.state == handshaking {
		t.unlink(r)
	}
	t.mu.Unlock()
	if c == nil && t.s.cfg.Steerer != nil {
		r.takeBack()
	}
	switch {
	case waitErr != nil && c != nil:
		_ = c.Reset() // always succeeds
	case waitErr != nil:
		t.abort(r)
	case c != nil:
		return c, nil
	case err == nil:
		return nil, ErrGone
	default:
		return nil, err
	}
	return nil, fmt.Errorf("stack: accept %v: %w", r.flow, waitErr)
}

// Reset implements TCPRequest.
func (r *request) Reset() {
	if r.take() {
		r.t.s.write(resetFor(r.syn, r.header))
	}
}

// icmpAge is how old a SYN is at least when an ICMP error answers it. While connect(2) still holds the socket, the kernel only
// notes such an error and goes on until its next retransmission (tcp_v4_err, tcp_v6_err): seen as a delay of 1 s.
const icmpAge = time.Millisecond

// Unreachable implements TCPRequest.
func (r *request) Unreachable(cause Cause) {
	if !r.take() {
		return
	}
	s, answer := r.t.s, unreachableFor(r.syn, cause)
	if age := s.cfg.Group.Now().Sub(r.born); age < icmpAge {
		s.cfg.Group.After(icmpAge-age, func() { s.write(answer) })
		return
	}
	s.write(answer)
}

// Drop implements TCPRequest.
func (r *request) Drop() { r.take() }
