package hbone

import (
	"container/list"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// helloBytes is how much of its first record a peer has to have sent before a handshake is worth a goroutine: all of it, or
// this much. A ClientHello with a post-quantum key share has 1.8 KiB.
const helloBytes = 4 << 10

// recordHandshake is the type of a TLS connection's first record (RFC 8446, section 5.1).
const recordHandshake = 22

// errNotTLS is why a connection that begins with something else is closed at once: it would be waited for.
var errNotTLS = errors.New("the peer does not speak TLS")

// errEvicted is why a connection that waited was closed for a newer one.
var errEvicted = errors.New("hbone: too many connections wait for a handshake")

// arrivalState is where an arrival stands.
type arrivalState uint8

const (
	arrivalSilent  arrivalState = iota // its ClientHello has not arrived
	arrivalReady                       // waits for its turn
	arrivalGranted                     // has a handshake
	arrivalGone                        // is to be reset
)

// An arrival is a connection that was accepted and has no handshake yet: a small task with a timer, no goroutine. Its peer has
// shown nothing of itself, so there may be many of them.
type arrival struct {
	s     *Server
	conn  loop.Conn
	from  netip.Addr
	start time.Time

	// Of the loop; of the handshake once it is granted.
	ahead []byte // what was read

	// Guarded by Server.mu.
	state arrivalState
	ref   *loop.Ref     // nil until the task has started
	at    *list.Element // in Server.arrivals
	why   error         // it is gone
}

// arrivals are those of a Server, in the order in which they came, guarded by its mu.
type arrivals struct {
	all    list.List
	byPeer map[netip.Addr]int // how many
	ready  int
}

func (l *arrivals) add(a *arrival) {
	a.at = l.all.PushBack(a)
	l.byPeer[a.from]++
}

func (l *arrivals) remove(a *arrival) {
	if a.at == nil {
		return
	}
	l.all.Remove(a.at)
	a.at = nil
	if a.state == arrivalReady {
		l.ready--
	}
	if l.byPeer[a.from]--; l.byPeer[a.from] == 0 {
		delete(l.byPeer, a.from)
	}
}

// victim returns what has to go first: of the address that has the most, the oldest that is silent, or else the oldest.
func (l *arrivals) victim() *arrival {
	most := 0
	for _, n := range l.byPeer {
		most = max(most, n)
	}
	var oldest *arrival
	for e := l.all.Front(); e != nil; e = e.Next() {
		a, _ := e.Value.(*arrival)
		if l.byPeer[a.from] != most {
			continue
		}
		if a.state == arrivalSilent {
			return a
		}
		if oldest == nil {
			oldest = a
		}
	}
	return oldest
}

// Serve takes an accepted connection that is not attached. It returns at once; safe from any goroutine. A handshake, of which
// only so many are in progress at once, begins when the peer's ClientHello has arrived. Of the connections that have none yet
// only so many are kept; the oldest of the address with the most of them is reset for a new one.
func (s *Server) Serve(conn loop.Conn) {
	a := &arrival{s: s, conn: conn, from: conn.RemoteAddr().Addr().Unmap(), start: s.cfg.Group.Now()}
	s.mu.Lock()
	if s.draining {
		s.mu.Unlock()
		giveUp(conn)
		return
	}
	if s.arrivals.all.Len() >= s.cfg.MaxArrivals {
		s.dismiss(s.arrivals.victim(), errEvicted)
	}
	s.arrivals.add(a)
	s.setups++
	s.mu.Unlock()
	addTask(s.cfg.Group, conn, a.begin, func() {
		s.mu.Lock()
		s.arrivals.remove(a)
		s.mu.Unlock()
		s.setUpDone(a, loop.ErrStopped)
	})
}

// Accepting reports whether the owner may go on accepting. It is false while many peers that have sent their ClientHello wait
// for a handshake, and all handshakes are in progress: more of them are better off in the backlog of the listener. When it
// becomes true again, ServerConfig.Resume is called.
func (s *Server) Accepting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.full()
}

// full is called with mu held.
func (s *Server) full() bool {
	s.wasFull = s.handshakes >= s.cfg.MaxHandshakes && s.arrivals.ready > s.cfg.MaxArrivals/2
	return s.wasFull
}

// dismiss tells an arrival to go. mu is held.
func (s *Server) dismiss(a *arrival, why error) {
	s.arrivals.remove(a)
	a.state, a.why = arrivalGone, why
	if a.ref != nil {
		a.ref.Wake()
	}
}

func (a *arrival) begin(r *loop.Ref) loop.Task {
	if err := a.conn.Attach(r); err != nil {
		r.Post(func() { a.leave(r, err) })
	}
	r.After(a.s.cfg.HandshakeTimeout, func() { a.leave(r, fmt.Errorf("no handshake: %w", context.DeadlineExceeded)) })
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.ref = r
	return a
}

func (a *arrival) String() string { return "the connection from " + a.conn.RemoteAddr().String() }

// Turn implements loop.Task.
func (a *arrival) Turn(int) bool {
	a.s.mu.Lock()
	state, ref := a.state, a.ref
	a.s.mu.Unlock()
	if ref.Removed() {
		return false
	}
	if state == arrivalSilent {
		arrived, err := a.read(ref.Scratch())
		if err != nil {
			a.leave(ref, err)
			return false
		}
		if !arrived {
			return false
		}
		state = a.s.arrived(a)
	}
	switch state {
	case arrivalGone:
		a.leave(ref, a.why)
	case arrivalGranted:
		err := a.conn.Attach(nil)
		ref.Remove()
		a.s.cfg.Group.Go(a.s.ctx, func(ctx context.Context) {
			if err == nil {
				err = a.s.setUp(ctx, a)
			}
			if err != nil {
				a.s.setUpDone(a, err)
			}
		})
	}
	return false
}

// read reports whether the first record has arrived.
func (a *arrival) read(scratch []byte) (bool, error) {
	for len(a.ahead) < helloBytes {
		want := helloBytes
		if len(a.ahead) >= recordHeader {
			if want = recordHeader + int(binary.BigEndian.Uint16(a.ahead[3:])); len(a.ahead) >= want {
				break
			}
		}
		n, err := a.conn.TryRead(scratch[:min(want, helloBytes)-len(a.ahead)])
		if errors.Is(err, loop.ErrAgain) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		a.ahead = append(a.ahead, scratch[:n]...)
		if a.ahead[0] != recordHandshake {
			return false, errNotTLS
		}
	}
	return true, nil
}

// leave resets the connection.
func (a *arrival) leave(r *loop.Ref, why error) {
	if r.Removed() {
		return
	}
	_ = a.conn.Reset()
	r.Remove()
	s := a.s
	s.mu.Lock()
	s.arrivals.remove(a)
	granted := a.state == arrivalGranted
	if granted {
		s.release(a)
	}
	a.state = arrivalGone
	s.mu.Unlock()
	s.setUpDone(a, why)
}

// arrived gives a peer that has sent its ClientHello a handshake, or a place in the queue for one.
func (s *Server) arrived(a *arrival) arrivalState {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.state == arrivalSilent {
		a.state = arrivalReady
		s.arrivals.ready++
		s.grant()
	}
	return a.state
}

// grant starts as many handshakes as may be in progress, for each address at most a quarter of them. mu is held.
func (s *Server) grant() {
	if s.arrivals.ready == 0 {
		return
	}
	for e := s.arrivals.all.Front(); e != nil && s.handshakes < s.cfg.MaxHandshakes; {
		a, _ := e.Value.(*arrival)
		e = e.Next()
		if a.state != arrivalReady || s.handshakesOf[a.from] >= max(1, s.cfg.MaxHandshakes/4) {
			continue
		}
		s.arrivals.remove(a)
		a.state = arrivalGranted
		s.handshakes++
		s.handshakesOf[a.from]++
		a.ref.Wake()
	}
}

// release gives a handshake back. mu is held.
func (s *Server) release(a *arrival) {
	s.handshakes--
	if s.handshakesOf[a.from]--; s.handshakesOf[a.from] == 0 {
		delete(s.handshakesOf, a.from)
	}
	s.grant()
}
