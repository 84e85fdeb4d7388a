package hbone

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// An owner is the Pool or Server behind a tunnel. Its methods are called on the tunnel's loop.
type owner interface {
	request(t *tunnel, s *stream, authority string, h Headers)
	peerLimit(t *tunnel, streams uint32)
	noNewStreams(t *tunnel)
	busyChanged(t *tunnel, busy bool) // bulk, or out of connection credit
	released(t *tunnel)               // a stream has ended and its user let go of it
	gone(t *tunnel, err error)
	refused(t *tunnel, err error) // a request that is none
}

// errTunnelClosed is why the streams of a tunnel end that this side closed.
var errTunnelClosed = errors.New("hbone: the tunnel was closed")

// A tunnel is one Engine over one link, as a task. In a turn it opens what arrived and lends it to the streams, lets their
// relays have their turns, seals once what all of them wrote, and writes that once. What the relays did not take is copied
// to the streams then: nothing large is held between turns but for slow readers.
type tunnel struct {
	ref     *loop.Ref
	link    *link
	eng     *Engine
	owner   owner
	peer    workload.Identity
	buffers *buffers
	local   netip.AddrPort
	remote  netip.AddrPort

	streams  map[uint32]*stream
	account  loop.Account // what it holds between turns
	unread   int          // bytes in the queues of streams
	queued   int          // bytes of their own memory
	lent     []*stream    // those that hold pieces of the turn's buffer
	vec      [][]byte     // for TryWriteTo
	inTurn   bool
	err      error     // set once the tunnel is over
	ended    bool      // what is left is to close the link, and streams that were received in full
	cutting  bool      // nothing is left
	parent   *loop.Ref // of the tunnel that carries it, or nil
	metrics  *Metrics
	meter    meter
	settle   *loop.Timer // until the peer's SETTINGS arrive
	times    Times
	requests int  // CONNECTs without a response
	probing  bool // a timer looks after them
}

// lingerTime is how long a tunnel that was closed waits for the peer to close its side too.
const lingerTime = time.Second

type tunnelConfig struct {
	group    *loop.Group
	link     *link
	server   bool
	settings Settings
	owner    owner
	peer     workload.Identity
	buffers  *buffers
	budget   *loop.Budget
	metrics  *Metrics
	settle   time.Duration // for the peer's SETTINGS
	failed   func()
	age      time.Duration // after which it takes no new streams; 0: any
	times    Times
}

// startTunnel makes a task of a link, or, if the link is over a stream, a child of the tunnel that carries it. ready is called
// on its loop, before its first turn; cfg.failed instead if the group, or that tunnel, has ended: the link is closed then.
func startTunnel(cfg tunnelConfig, ready func(t *tunnel)) {
	t := &tunnel{
		link:    cfg.link,
		owner:   cfg.owner,
		peer:    cfg.peer,
		buffers: cfg.buffers,
		local:   cfg.link.conn.LocalAddr(),
		remote:  cfg.link.conn.RemoteAddr(),
		streams: make(map[uint32]*stream),
		account: loop.NewAccount(cfg.budget),
		metrics: cfg.metrics,
		times:   cfg.times,
		parent:  carrier(cfg.link.conn),
	}
	start := func(r *loop.Ref) loop.Task {
		t.ref = r
		t.eng = NewEngine(EngineConfig{
			Server: cfg.server, Settings: cfg.settings, buffers: cfg.buffers, level: t.account.Level(),
		}, (*tunnelEvents)(t), r.Now())
		if err := t.link.conn.Attach(r); err != nil {
			t.die(err)
		}
		t.arm()
		t.settle = r.After(cfg.settle, func() {
			t.die(fmt.Errorf("hbone: waiting for SETTINGS: %w", context.DeadlineExceeded))
		})
		if cfg.age > 0 {
			r.After(cfg.age, func() {
				t.owner.noNewStreams(t)
				t.drain()
			})
		}
		ready(t)
		return t
	}
	addTask(cfg.group, cfg.link.conn, start, func() {
		giveUp(cfg.link.conn)
		cfg.failed()
	})
}

// addTask starts the task of a connection: of its own, or, for a stream, as a child of the tunnel that carries it. failed is
// called instead if the group, or that tunnel, has ended.
func addTask(g *loop.Group, c loop.Conn, start func(r *loop.Ref) loop.Task, failed func()) {
	parent := carrier(c)
	if parent == nil {
		if g.Add(start) == nil {
			failed()
		}
		return
	}
	posted := parent.Post(func() {
		if parent.Child(start) == nil {
			failed()
		}
	})
	if !posted {
		failed()
	}
}

// carrier is the Ref of the tunnel whose stream a connection is, or nil.
func carrier(c loop.Conn) *loop.Ref {
	if s, ok := c.(interface{ Ref() *loop.Ref }); ok {
		return s.Ref()
	}
	return nil
}

// giveUp resets a connection that is not attached; safe from any goroutine.
func giveUp(c loop.Conn) {
	if r := carrier(c); r != nil {
		r.Post(func() { _ = c.Reset() })
		return
	}
	_ = c.Reset()
}

func (t *tunnel) String() string { return fmt.Sprintf("tunnel %v-%v", t.local, t.remote) }

// Turn implements loop.Task.
func (t *tunnel) Turn(budget int) (more bool) {
	if t.ended {
		return t.linger(budget)
	}
	t.inTurn = true
	var plain []byte
	if t.err == nil {
		t.eng.SetLevel(t.account.Level())
		plain, more = t.receive(budget)
	}
	if t.runRelays(budget) {
		more = true
	}
	t.keepLent()
	t.eng.Holds(t.unread)
	moved := len(plain)
	t.buffers.put(plain)
	if t.err == nil {
		moved += t.transmit()
	}
	if t.err == nil {
		t.measure(moved)
	}
	t.inTurn = false
	if t.err == nil && t.eng.Drained() && len(t.streams) == 0 && len(t.eng.Output()) == 0 && len(t.link.unsent) == 0 {
		t.die(errTunnelClosed)
	}
	if t.err != nil {
		t.end()
		return false // what is left to do wakes it
	}
	t.settleAccount()
	return more
}

// settleAccount tells the process what the tunnel holds between turns: what applications did not take, and what the socket did
// not. The rest, of a few KiB, is what every tunnel has.
func (t *tunnel) settleAccount() {
	t.account.Set(t.queued + cap(t.eng.out) + cap(t.link.store) + cap(t.link.kept))
}

// receive feeds the engine with what arrived. The plain text that it returns is lent to streams.
func (t *tunnel) receive(budget int) (plain []byte, more bool) {
	plain, again, err := t.link.read(t.buffers.get(), t.ref.Scratch(), budget)
	if ferr := t.eng.Feed(plain, t.ref.Now()); ferr != nil {
		if ce, ok := errors.AsType[*ConnError](ferr); ok {
			t.metrics.fault(t.eng.cfg.Server, "connection", ce.Code)
		}
		t.die(ferr)
		return plain, false
	}
	if err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("hbone: the peer closed the tunnel: %w", io.ErrUnexpectedEOF)
		}
		t.die(err)
		return plain, false
	}
	return plain, !again
}

// runRelays lets the relays move what arrived and what is to be sent. What arrived is a turn's worth, of however few streams:
// relays that get only a share of the budget go on while it saves a copy.
func (t *tunnel) runRelays(budget int) (more bool) {
	const rounds = 8
	for range rounds {
		more = t.ref.RunChildren(budget)
		if !more || !slices.ContainsFunc(t.lent, func(s *stream) bool { return s.ref != nil && !s.queue.empty() }) {
			break
		}
	}
	return more
}

// transmit seals and sends until there is nothing left, or the socket takes no more. Streams that found no room are woken
// when there is some. It returns how many bytes went.
func (t *tunnel) transmit() (n int) {
	done, err := t.link.flush()
	if done && err == nil && (len(t.eng.Output()) > 0 || t.link.pending()) {
		n = len(t.eng.Output())
		err = t.link.send(t.eng.Output(), t.ref.Scratch())
		t.eng.Sent()
	}
	if err != nil {
		t.die(err)
	}
	return n
}

// kick gives the tunnel a turn if something was written from outside of one.
func (t *tunnel) kick() {
	if !t.inTurn && t.err == nil {
		t.ref.WakeLocal()
	}
}

// die marks the tunnel as over: from here on every stream that was not received in full reads as reset. What has to be done
// on the way out happens at the end of the turn.
func (t *tunnel) die(err error) {
	if t.err != nil {
		return
	}
	t.err = err
	if t.ref != nil && !t.inTurn {
		t.ref.WakeLocal()
	}
}

// end closes our side. The streams whose end has not arrived are lost.
func (t *tunnel) end() {
	t.ended = true
	t.owner.noNewStreams(t)
	t.eng.Close(http2.ErrCodeNo)
	t.link.finish(t.eng.Output(), t.ref.Scratch())
	t.eng.Sent()
	t.letGo(func(s *stream) bool { return s.complete() })
	t.ref.After(lingerTime, func() {
		t.link.close()
		t.wakeEnded()
	})
	t.linger(maxLinger)
}

// letGo loses the streams that are not to be kept, in an order that replays.
func (t *tunnel) letGo(keep func(s *stream) bool) {
	for _, id := range slices.Sorted(maps.Keys(t.streams)) {
		if s := t.streams[id]; s != nil && !keep(s) {
			s.lost(t.err)
		}
	}
}

// maxLinger bounds a turn of linger, in bytes of the peer's that are dropped.
const maxLinger = 256 << 10

// linger is what is left to do after the end. The peer's frames are read and dropped until it closes its side: a socket that
// is closed with bytes unread resets the connection, and the peer would lose what it has not read. Streams that were received
// in full stay until their applications have taken everything.
func (t *tunnel) linger(budget int) (more bool) {
	if t.cutting || t.parent != nil && t.parent.Removed() {
		t.link.close()
		t.letGo(func(*stream) bool { return false })
	}
	if t.link.discard(t.ref.Scratch(), min(budget, maxLinger)) {
		more = true
	}
	t.settleAccount()
	if len(t.streams) > 0 || !t.link.closed {
		return t.ref.RunChildren(budget) || more
	}
	t.ref.Remove() // the relays have their last turn here
	t.account.Set(0)
	t.owner.gone(t, t.err)
	return false
}

// wakeEnded gives a tunnel that has ended a turn, to see whether it may go.
func (t *tunnel) wakeEnded() {
	if t.ended && !t.ref.Removed() {
		t.ref.WakeLocal()
	}
}

// cut ends the tunnel and all its streams at once.
func (t *tunnel) cut() {
	t.die(errTunnelClosed)
	t.cutting = true
	t.wakeEnded()
}

// dead reports that nothing can be done with the streams any more.
func (t *tunnel) dead() bool { return t.err != nil || t.ref.Removed() }

// broken is why the tunnel is over, if that was not our doing.
func (t *tunnel) broken() error {
	if t.err == nil || errors.Is(t.err, errTunnelClosed) {
		return nil
	}
	return fmt.Errorf("tunnel lost: %w", t.err)
}

// arm sets the timer of the keepalive.
func (t *tunnel) arm() {
	t.ref.After(max(time.Millisecond, t.eng.Deadline().Sub(t.ref.Now())), func() {
		if err := t.eng.Tick(t.ref.Now()); err != nil {
			t.die(err)
			return
		}
		t.kick()
		t.arm()
	})
}

// drain is the graceful end: no new streams; the tunnel closes with the last one.
func (t *tunnel) drain() {
	t.eng.Drain()
	t.kick()
}

// keepLent gives streams memory of their own for what their relays did not take.
func (t *tunnel) keepLent() {
	for i, s := range t.lent {
		s.queue.keep()
		s.countMemory()
		s.lending = false
		t.lent[i] = nil
	}
	t.lent = t.lent[:0]
}

// An opening is a CONNECT that waits for its response. Its fields belong to the tunnel's loop until done is called.
type opening struct {
	authority string
	headers   Headers
	done      func() // called once, on the loop or by start

	s       *stream
	err     error
	settled bool // the peer spoke HTTP/2 by the time it failed
	reused  bool // … and before it was sent
}

// open sends the CONNECT; safe from any goroutine.
func (t *tunnel) open(o *opening) {
	if !t.ref.Post(func() { t.openHere(o) }) {
		o.err = errGoingAway
		o.done()
	}
}

func (t *tunnel) openHere(o *opening) {
	if t.dead() {
		t.opened(o, nil, errGoingAway)
		return
	}
	id, err := t.eng.Open(o.authority, o.headers)
	if err != nil {
		t.opened(o, nil, err)
		return
	}
	s := t.newStream(id)
	s.opening = o
	t.requests++
	o.s, o.reused = s, t.eng.Settled()
	t.probe()
	t.kick()
}

func (t *tunnel) opened(o *opening, s *stream, err error) {
	o.s, o.err = s, err
	o.settled = t.eng.Settled()
	if s == nil {
		t.owner.released(t)
	}
	o.done()
}

// abandon gives up an opening, or its result; safe from any goroutine, after open.
func (t *tunnel) abandon(o *opening) {
	t.ref.Post(func() { t.abandonHere(o) })
}

func (t *tunnel) abandonHere(o *opening) {
	if s := o.s; s != nil {
		s.endOpening()
		_ = s.Reset()
	}
}

func (t *tunnel) newStream(id uint32) *stream {
	s := &stream{t: t, id: id}
	t.streams[id] = s
	return s
}

// tunnelEvents is the tunnel as its engine sees it.
type tunnelEvents tunnel

var _ Events = (*tunnelEvents)(nil)

func (t *tunnelEvents) StreamRequest(id uint32, authority string, h Headers) {
	u := (*tunnel)(t)
	u.owner.request(u, u.newStream(id), authority, h)
}

func (t *tunnelEvents) StreamResponse(id uint32, status int, h Headers) {
	s := t.streams[id]
	if s == nil || s.opening == nil {
		return
	}
	o, u := s.endOpening(), (*tunnel)(t)
	if status != 200 {
		u.eng.Reset(id, http2.ErrCodeCancel)
		delete(u.streams, id)
		s.released = true
		u.opened(o, nil, &StatusError{Code: status, Reason: h.Reason})
		return
	}
	s.response = h
	u.opened(o, s, nil)
}

func (t *tunnelEvents) StreamData(id uint32, p []byte) {
	s := t.streams[id]
	if s == nil {
		return
	}
	s.queue.lend(p)
	s.trickle.frames = 0 // it is answered
	t.unread += len(p)
	if !s.lending {
		s.lending = true
		t.lent = append(t.lent, s)
	}
	s.wake()
}

func (t *tunnelEvents) StreamEnd(id uint32) {
	if s := t.streams[id]; s != nil {
		s.gotEnd = true
		s.wake()
	}
}

func (t *tunnelEvents) StreamReset(id uint32, code http2.ErrCode, refused bool) {
	s := t.streams[id]
	if s == nil {
		return
	}
	var err error = http2.StreamError{StreamID: id, Code: code}
	if refused {
		err = errRefused
	}
	s.wasReset(code, err)
}

func (t *tunnelEvents) StreamFault(code http2.ErrCode) {
	t.metrics.fault(t.eng.cfg.Server, "stream", code)
}

func (t *tunnelEvents) StreamWritable(id uint32) {
	if s := t.streams[id]; s != nil {
		s.wake()
	}
}

func (t *tunnelEvents) RequestRefused(err error) { t.owner.refused((*tunnel)(t), err) }

func (t *tunnelEvents) PeerSettings(maxStreams uint32) {
	t.settle.Stop()
	t.owner.peerLimit((*tunnel)(t), maxStreams)
}

func (t *tunnelEvents) PeerGoAway(http2.ErrCode) { t.owner.noNewStreams((*tunnel)(t)) }
