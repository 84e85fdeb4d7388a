package stack

import (
	"errors"
	"fmt"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A Steerer has the kernel do with flows what was decided about them: each call is followed by the flow's SYN, which is written back
// to the device. Its methods are called from any goroutine and must not block.
type Steerer interface {
	HandBack(f Flow) error // the kernel carries the flow, to the network or to the application
	Accept(f Flow) error   // a listener accepts it in its destination's place; what it accepts is given to Stack.Accepted
	Unsteer(f Flow)        // neither
}

// steered is what a table remembers of flows that the kernel has.
type steered struct {
	handed   map[Flow]uint32   // sequence number of the SYN: until Stack.Ended
	led      map[Flow]*request // those that the listener is to accept and whose decision stands: until Accept returns
	answered map[Flow]answered // accepted by the listener after a while
}

// A retransmitted SYN that is in the queue of the device when its flow is accepted is no new flow. Kernels retransmit after a second
// (RFC 6298, section 2), so that there is none of a flow that was answered sooner; and what is in the queue is read within moments.
const (
	retransmitted = 900 * time.Millisecond
	queued        = 5 * time.Second
	maxAnswered   = 4096
)

type answered struct {
	seq   uint32
	until time.Time
}

// known takes a SYN that is one more of a flow that the kernel has, and reports whether it is; vnet and b are borrowed. mu is held, and
// released if it is.
func (t *table) known(flow Flow, seq uint32, vnet, b []byte) bool {
	k := &t.steered
	first, handed := k.handed[flow]
	switch {
	case handed && first == seq:
		// Nobody has answered the first one yet: until then every SYN comes this way.
		t.mu.Unlock()
		t.s.count.duplicates.Add(1)
		if err := t.s.cfg.Steerer.HandBack(flow); err == nil {
			t.s.writeBack(append(append(make([]byte, 0, len(vnet)+len(b)), vnet...), b...))
		}
		return true
	case handed:
		delete(k.handed, flow) // another connection, from the same port
	}
	if a, ok := k.answered[flow]; ok {
		delete(k.answered, flow)
		if a.seq == seq && t.s.cfg.Group.Now().Before(a.until) {
			t.mu.Unlock()
			t.s.count.duplicates.Add(1)
			return true
		}
	}
	return false
}

// steer says what becomes of the flow of r, if r still is in the state that this takes. done is called, with mu held, once it was said.
//
// A later request of the flow may take r's place at any time, and then what is decided about that one has to stand. So decisions are
// made one after the other, and one that came too late is taken back before the next.
func (r *request) steer(state requestState, way func(Flow) error, done func(*steered)) error {
	t := r.t
	t.steering.Lock()
	defer t.steering.Unlock()
	t.mu.Lock()
	counts := r.state == state
	t.mu.Unlock()
	if !counts {
		return ErrGone
	}
	if err := way(r.flow); err != nil {
		return err
	}
	t.mu.Lock()
	counts = r.state == state
	if counts {
		done(&t.steered)
	}
	stands := counts || r.accepted // by an earlier SYN of the same request: the connection may need what was said
	t.mu.Unlock()
	if !stands {
		t.s.cfg.Steerer.Unsteer(r.flow)
	}
	if !counts {
		return ErrGone
	}
	return nil
}

// lead has the listener accept r.
func (r *request) lead() error {
	err := r.steer(handshaking, r.t.s.cfg.Steerer.Accept, func(k *steered) {
		if k.led == nil {
			k.led = make(map[Flow]*request)
		}
		k.led[r.flow] = r
	})
	switch {
	case err == nil && !r.t.s.writeBack(r.raw):
		return ErrGone
	case err == nil, errors.Is(err, ErrGone):
		return err
	}
	return fmt.Errorf("stack: steer %v: %w", r.flow, err)
}

// takeBack takes back what lead has said, if nothing was decided about a later request of the flow since.
func (r *request) takeBack() {
	t := r.t
	t.steering.Lock()
	defer t.steering.Unlock()
	t.mu.Lock()
	stands := t.steered.led[r.flow] == r
	if stands {
		delete(t.steered.led, r.flow)
	}
	t.mu.Unlock()
	if stands {
		t.s.cfg.Steerer.Unsteer(r.flow)
	}
}

// Accepted takes a connection that the Steerer's listener has accepted, and reports whether somebody waits for it: otherwise it stays
// the caller's, who resets it. c.RemoteAddr is who opened the flow, c.LocalAddr to whom. It may be called from any goroutine.
func (s *Stack) Accepted(c loop.Conn) bool {
	flow := Flow{Proto: TCP, Src: c.RemoteAddr(), Dst: c.LocalAddr()}
	t := &s.table
	t.mu.Lock()
	r := t.requests[flow]
	if r == nil || r.state != handshaking || r.wake == nil { // without wake it was not steered yet: that is an earlier attempt's
		t.mu.Unlock()
		return false
	}
	t.unlink(r)
	r.conn, r.accepted = c, true
	delete(t.steered.led, flow)
	if now := s.cfg.Group.Now(); now.Sub(r.born) >= retransmitted {
		t.steered.remember(r, now)
	}
	wake := r.wake
	t.mu.Unlock()
	s.count.accepted.Add(1)
	wake()
	return true
}

// remember keeps the SYN of a flow that was accepted. mu is held.
func (k *steered) remember(r *request, now time.Time) {
	if k.answered == nil {
		k.answered = make(map[Flow]answered)
	}
	if len(k.answered) >= maxAnswered {
		for f, a := range k.answered {
			if !now.Before(a.until) {
				delete(k.answered, f)
			}
		}
		if len(k.answered) >= maxAnswered {
			return
		}
	}
	k.answered[r.flow] = answered{r.seq, now.Add(queued)}
}

// HandBack implements TCPRequest.
func (r *request) HandBack() error {
	t := r.t
	if t.s.cfg.Steerer == nil {
		return ErrUnsupported
	}
	err := r.steer(pending, t.s.cfg.Steerer.HandBack, func(k *steered) {
		t.unlink(r)
		delete(k.led, r.flow) // an earlier request's
		if k.handed == nil {
			k.handed = make(map[Flow]uint32)
		}
		k.handed[r.flow] = r.seq
	})
	switch {
	case errors.Is(err, ErrGone):
		return err
	case err != nil:
		return fmt.Errorf("stack: hand %v back: %w", r.flow, err)
	}
	t.s.count.handedBack.Add(1)
	t.s.writeBack(r.raw) // lost, it is sent again
	return nil
}

// Ended says that the kernel has no socket of a flow any more that was handed back. It may be called from any goroutine.
func (s *Stack) Ended(f Flow) {
	s.table.mu.Lock()
	delete(s.table.steered.handed, f)
	s.table.mu.Unlock()
}
