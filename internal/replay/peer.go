package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"syscall"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

const (
	echoBytes   = 256 << 10 // that an echo keeps before it stops reading
	maxToSend   = 16 << 20  // that a peer may be ahead of the netstack
	maxHeldAll  = 64 << 20  // that all flows may hold together: a packet may say that it was longer than what is captured of it
	unreadBytes = 64 << 10
)

// A peer is the other end of a connection that the proxy has opened: a task that sends what it was given and reads what comes.
type peer struct {
	p    *Player
	f    *Flow
	conn loop.Conn
	ref  *loop.Ref
	echo bool

	// Guarded by the mutex of the Player.
	out     []byte // to be sent, from at
	at      int
	fin     bool // and then the end
	rst     bool // or a reset
	finSent bool
	eof     bool // the application has ended
	gone    bool
}

// send gives the peer something to send. mu is held.
func (e *peer) send(data []byte, zeros int) {
	if e.gone || e.f.left {
		return
	}
	if len(e.out)-e.at > maxToSend || e.f.room() < len(data)+zeros {
		e.f.leave("the application takes nothing: the rest was left out")
		return
	}
	defer e.f.weigh()
	if e.at > 0 {
		e.out, e.at = append(e.out[:0], e.out[e.at:]...), 0
	}
	e.out = appendZeros(append(e.out, data...), zeros)
	e.ref.Wake()
}

// end lets the peer end, once it has sent everything. mu is held.
func (e *peer) end(reset bool) {
	if reset {
		e.rst = true
	} else {
		e.fin = true
	}
	e.ref.Wake()
}

// start is called on the loop.
func (e *peer) start(r *loop.Ref) loop.Task {
	e.ref = r
	e.p.mu.Lock()
	defer e.p.mu.Unlock()
	e.f.peer, e.f.written = e, e.f.ackSent
	switch e.p.cfg.Peer {
	case PeerRecorded:
		e.out, e.f.early = e.f.early, nil
		e.f.weigh()
		e.fin = e.f.down.ended()
	case PeerEcho:
		e.echo = true
	case PeerFile:
		e.send(e.p.cfg.Replies, 0)
	}
	if e.conn.Attach(r) != nil {
		return nil
	}
	return e
}

func (e *peer) String() string { return "the peer of a recorded connection" }

// Turn implements loop.Task.
func (e *peer) Turn(int) bool {
	e.p.mu.Lock()
	defer e.p.mu.Unlock()
	for !e.gone {
		before := len(e.out) - e.at
		n, err := e.read()
		if err == nil {
			err = e.write()
		}
		if err != nil {
			e.close(e.conn.Close)
			return false
		}
		switch {
		case e.at < len(e.out):
		case e.rst:
			e.close(e.conn.Reset)
			return false
		case e.finSent && e.eof:
			e.close(e.conn.Close)
			return false
		}
		if n == 0 && before == len(e.out)-e.at {
			break
		}
	}
	return false
}

func (e *peer) close(how func() error) {
	_ = how() // the other end is the proxy's
	e.gone, e.out, e.at = true, nil, 0
	e.f.weigh()
	e.ref.Remove()
}

// read takes what the application has sent.
func (e *peer) read() (n int, err error) {
	if e.eof || e.echo && len(e.out)-e.at >= echoBytes && e.f.room() > maxHeldAll/2 { // with less room the rest is left out
		return 0, e.conn.(loop.Checked).Check()
	}
	b := e.ref.Scratch()[:unreadBytes]
	n, err = e.conn.TryRead(b)
	switch {
	case errors.Is(err, loop.ErrAgain):
		return 0, nil
	case errors.Is(err, io.EOF):
		e.eof = true
		e.fin = e.fin || e.p.cfg.Peer != PeerRecorded // which ends as the recorded one did
		return 0, nil
	case err != nil:
		return 0, err
	case e.echo:
		e.send(b[:n], 0)
	}
	return n, nil
}

func (e *peer) write() error {
	defer e.f.weigh()
	for e.at < len(e.out) {
		n, err := e.conn.TryWrite(e.out[e.at:])
		if errors.Is(err, loop.ErrAgain) {
			return nil
		}
		if err != nil {
			return err
		}
		e.at += n
		e.f.written += int64(n)
	}
	if e.out, e.at = e.out[:0], 0; cap(e.out) > unreadBytes {
		e.out = nil
	}
	if e.fin && !e.finSent {
		e.finSent = true
		return e.conn.CloseWrite()
	}
	return nil
}

// connect gives the near end of a connection to the peer of the flow that ctx serves, once that has taken it.
func (p *Player) connect(ctx context.Context, from, dst netip.AddrPort) (loop.Conn, error) {
	f := FlowOf(ctx)
	if f == nil {
		return nil, errors.New("replay: a connection for no flow of the capture")
	}
	switch p.cfg.Peer {
	case PeerNone:
		return nil, loop.Await(ctx, func(func()) {})
	case PeerRecorded:
		state, err := p.awaitConnect(ctx, f)
		switch {
		case err != nil:
			return nil, err
		case state == connectRefused:
			return nil, syscall.ECONNREFUSED
		case state == connectNoHost:
			return nil, syscall.EHOSTUNREACH
		case state == connectNoNetwork:
			return nil, syscall.ENETUNREACH
		}
	}
	near, far := loop.PipeAddrs(from, dst)
	e := &peer{p: p, f: f, conn: far}
	if p.m.Group().Add(e.start) == nil {
		return nil, loop.ErrStopped
	}
	return near, nil
}

// An Underlay plays the sockets of a node: every connection leads to the peer of the flow that it is for.
type Underlay struct {
	p    *Player
	seen func(f *Flow, how string, dst netip.AddrPort)
}

// Underlay returns one that tells seen of each connection: "dial", "deliver" or "loopback".
func (p *Player) Underlay(seen func(f *Flow, how string, dst netip.AddrPort)) *Underlay {
	return &Underlay{p, seen}
}

func (u *Underlay) open(ctx context.Context, how string, from, dst netip.AddrPort) (loop.Conn, error) {
	if f := FlowOf(ctx); f != nil {
		u.seen(f, how, dst)
	}
	return u.p.connect(ctx, from, dst)
}

// Dial connects from the pod's own address.
func (u *Underlay) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	from := netip.AddrPort{}
	if f := FlowOf(ctx); f != nil {
		from = f.Src
	}
	return u.open(ctx, "dial", from, dst)
}

// Deliver connects to the pod's application from the client's address.
func (u *Underlay) Deliver(ctx context.Context, client, dst netip.AddrPort) (loop.Conn, error) {
	return u.open(ctx, "deliver", client, dst)
}

// DialLoopback connects to an address of the pod's loopback interface.
func (u *Underlay) DialLoopback(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return u.open(ctx, "loopback", dst, dst)
}

// A Tunnel plays HBONE: no TLS and no HTTP/2, but the answer to each CONNECT, and streams to the peer of the flow.
type Tunnel struct {
	p *Player
	// Admit says what the peer answers to a CONNECT before it connects to the application: nil, or an error.
	admit func(ctx context.Context, f *Flow, gateway *hbone.Target, t *hbone.Target) error
}

// Tunnel returns one that asks admit about every CONNECT; gateway is nil unless there is one between.
func (p *Player) Tunnel(admit func(ctx context.Context, f *Flow, gateway, t *hbone.Target) error) *Tunnel {
	return &Tunnel{p, admit}
}

// Open opens a stream.
func (t *Tunnel) Open(ctx context.Context, target hbone.Target) (hbone.Stream, error) {
	return t.open(ctx, nil, &target)
}

// OpenThrough opens a stream within one to a gateway.
func (t *Tunnel) OpenThrough(ctx context.Context, gateway, target hbone.Target) (hbone.Stream, error) {
	return t.open(ctx, &gateway, &target)
}

func (t *Tunnel) open(ctx context.Context, gateway, target *hbone.Target) (hbone.Stream, error) {
	f := FlowOf(ctx)
	if f == nil {
		return nil, errors.New("replay: a stream for no flow of the capture")
	}
	hop := target.NextHop
	if gateway != nil {
		hop = gateway.NextHop
	}
	if err := t.admit(ctx, f, gateway, target); err != nil {
		return nil, &hbone.OpenError{Phase: hbone.PhaseResponse, NextHop: hop, Err: err}
	}
	near, err := t.p.connect(ctx, f.Src, hop)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return nil, &refusedError{hop, err}
	case err != nil:
		return nil, &hbone.OpenError{Phase: hbone.PhaseResponse, NextHop: hop, Err: err}
	}
	s := played{Conn: near, ref: t.p.tunnel.task()}
	if len(target.Accept) > 0 {
		s.peer = target.Accept[0]
	}
	return s, nil
}

// A refusedError is the recorded refusal of a connection that is carried by HBONE now. Who refused it then, and whether the peer's node was
// there, the capture does not say.
type refusedError struct {
	hop   netip.AddrPort
	cause error
}

func (e *refusedError) Error() string {
	return fmt.Sprintf("the recorded peer: %v; by %s or by the application behind it, the capture does not say", e.cause, e.hop)
}

// Unwrap makes it count as the answer of a node whose application refuses.
func (e *refusedError) Unwrap() error {
	return &hbone.OpenError{Phase: hbone.PhaseResponse, NextHop: e.hop, Err: &hbone.StatusError{Code: http.StatusServiceUnavailable, Reason: "connection failed: " + e.cause.Error()}}
}

// A played is a stream. It implements hbone.Stream.
type played struct {
	loop.Conn
	ref  *loop.Ref
	peer workload.Identity
}

func (s played) Ref() *loop.Ref          { return s.ref }
func (s played) Peer() workload.Identity { return s.peer }
func (s played) Broken() error           { return nil }
func (s played) Response() hbone.Headers { return hbone.Headers{} }
func (s played) Check() error            { return s.Conn.(loop.Checked).Check() }

// A tunnel is the task whose children the relays of streams are.
type tunnel struct {
	p   *Player
	ref *loop.Ref
}

type tunnelTask struct{ ref *loop.Ref }

func (t tunnelTask) Turn(budget int) bool { return t.ref.RunChildren(budget) }
func (t tunnelTask) String() string       { return "the tunnels of a replay" }

func (t *tunnel) task() *loop.Ref {
	if t.ref == nil {
		t.ref = t.p.m.Group().Add(func(r *loop.Ref) loop.Task { return tunnelTask{r} })
	}
	return t.ref
}

func (t *tunnel) close() {
	if t.ref != nil {
		t.ref.Post(t.ref.Remove)
		t.ref = nil
		t.p.m.Settle()
	}
}
