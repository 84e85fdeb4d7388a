package hbone

import (
	"context"
	"fmt"
	"io"
	"net/netip"

	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// A Receiver is implemented by Conns that have a place for bytes to be sent, into which a source can be read without a copy
// in between: at most limit bytes of src are moved. It has the errors of TryWrite, ErrAgain also when src has nothing; an
// error of src, io.EOF included, is wrapped in a *SourceError. Streams are Receivers, and loop.Senders.
type Receiver interface {
	TryReadFrom(src loop.Conn, limit int) (int, error)
}

// A SourceError tells that the reading side of TryReadFrom failed, not the writing one. Err is never ErrAgain.
type SourceError struct{ Err error }

func (e *SourceError) Error() string { return e.Err.Error() }

// Unwrap returns the error of the reading side.
func (e *SourceError) Unwrap() error { return e.Err }

// A stream is a Stream of either side. It is 0.2 KiB (the engine keeps 48 bytes more), and what was received and not taken.
type stream struct {
	t        *tunnel
	id       uint32
	ref      *loop.Ref
	response Headers
	queue    queue
	mem      int // of the queue, as the tunnel knows it
	trickle  trickle
	opening  *opening           // until the response
	cancel   context.CancelFunc // of the set-up of a request, until it has returned

	lending  bool // the queue holds pieces of the turn's buffer
	gotEnd   bool
	noWrite  bool // RST_STREAM with NO_ERROR or after END_STREAM: the peer wants nothing more; what it sent is good, but no end without END_STREAM
	reset    bool
	why      error // of the reset, if neither side meant it
	answered bool  // of a request
	released bool
}

var (
	_ Stream        = (*stream)(nil)
	_ loop.Vectored = (*stream)(nil)
	_ loop.Sender   = (*stream)(nil)
	_ loop.Checked  = (*stream)(nil)
	_ Receiver      = (*stream)(nil)
)

func (s *stream) Ref() *loop.Ref          { return s.t.ref }
func (s *stream) Peer() workload.Identity { return s.t.peer }
func (s *stream) Response() Headers       { return s.response }

// Broken implements Stream.
func (s *stream) Broken() error {
	switch {
	case s.released:
		return nil
	case s.why == nil && !s.gotEnd:
		return s.t.broken()
	}
	return s.why
}

// Times are when the stream's tunnel was made. Streams of a Pool have them.
func (s *stream) Times() Times { return s.t.times }

func (s *stream) LocalAddr() netip.AddrPort { return s.t.local }

func (s *stream) RemoteAddr() netip.AddrPort { return s.t.remote }

func (s *stream) Attach(r *loop.Ref) error {
	s.ref = r
	s.wake()
	return nil
}

func (s *stream) wake() {
	if s.ref != nil {
		s.ref.WakeLocal()
	}
}

// broken reports that nothing can be sent any more.
func (s *stream) broken() bool { return s.reset || s.released || s.t.dead() }

// unreadable reports that nothing can be read any more. What was received in full does not need the tunnel.
func (s *stream) unreadable() bool {
	return s.reset || s.released || s.t.ref.Removed() || s.t.err != nil && !s.gotEnd
}

// nothing is the error of a read that finds the queue empty.
func (s *stream) nothing() error {
	switch {
	case s.gotEnd:
		return io.EOF
	case s.noWrite:
		return loop.ErrReset // truncated
	}
	return loop.ErrAgain
}

func (s *stream) took(n int) {
	if n > 0 {
		s.t.unread -= n
		s.countMemory()
		s.t.eng.Took(s.id, n)
		s.t.kick()
	}
}

// countMemory tells the tunnel what the queue's memory is now.
func (s *stream) countMemory() {
	s.t.queued += s.queue.mem - s.mem
	s.mem = s.queue.mem
}

// dropQueue gives up what was received and not taken.
func (s *stream) dropQueue() {
	s.t.unread -= s.queue.size()
	s.queue = queue{}
	s.countMemory()
}

func (s *stream) TryRead(p []byte) (int, error) {
	if s.unreadable() {
		return 0, loop.ErrReset
	}
	if s.queue.empty() {
		return 0, s.nothing()
	}
	n := s.queue.read(p)
	s.took(n)
	return n, nil
}

func (s *stream) TryReadv(bufs [][]byte) (int, error) {
	total := 0
	for _, p := range bufs {
		n, err := s.TryRead(p)
		if err != nil {
			if total > 0 {
				break
			}
			return 0, err
		}
		total += n
	}
	return total, nil
}

// Check implements loop.Checked.
func (s *stream) Check() error {
	if s.unreadable() {
		return loop.ErrReset
	}
	return nil
}

// TryWriteTo implements loop.Sender: what arrived in this turn goes to dst from where it was decrypted.
func (s *stream) TryWriteTo(dst loop.Conn, limit int) (int, error) {
	if s.unreadable() {
		return 0, loop.ErrReset
	}
	if s.queue.empty() {
		return 0, s.nothing()
	}
	total := 0
	vectored, _ := dst.(loop.Vectored)
	for total < limit && !s.queue.empty() {
		bufs := s.queue.peek(s.t.vec[:0], limit-total)
		s.t.vec = bufs
		var n int
		var err error
		if vectored != nil && len(bufs) > 1 {
			n, err = vectored.TryWritev(bufs)
		} else {
			n, err = dst.TryWrite(bufs[0])
		}
		clear(s.t.vec)
		if err != nil {
			if total > 0 {
				break // the error comes again
			}
			if err == loop.ErrAgain {
				return 0, err
			}
			return 0, &loop.SendError{Err: err}
		}
		s.queue.drop(n)
		total += n
	}
	s.took(total)
	return total, nil
}

func (s *stream) TryWrite(p []byte) (int, error) {
	if s.broken() || s.noWrite {
		return 0, loop.ErrReset
	}
	if len(p) == 0 {
		return 0, nil
	}
	n, err := s.t.eng.Write(s.id, p)
	if n > 0 {
		s.t.kick()
	}
	return n, err
}

func (s *stream) TryWritev(bufs [][]byte) (int, error) {
	total := 0
	for _, p := range bufs {
		n, err := s.TryWrite(p)
		if err != nil {
			if total > 0 {
				break
			}
			return 0, err
		}
		if total += n; n < len(p) {
			break
		}
	}
	return total, nil
}

// TryReadFrom implements Receiver: src is read into the place of a DATA frame.
func (s *stream) TryReadFrom(src loop.Conn, limit int) (int, error) {
	if s.broken() {
		return 0, loop.ErrReset
	}
	if s.noWrite {
		// Only bytes are refused: until there are some, the other direction goes on, and src may end by itself.
		n, err := src.TryRead(s.t.ref.Scratch()[:1])
		switch {
		case n > 0:
			return 0, loop.ErrReset
		case err != nil && err != loop.ErrAgain:
			err = &SourceError{err}
		}
		return 0, err
	}
	if s.pauses() {
		return 0, loop.ErrAgain
	}
	p, err := s.t.eng.Reserve(s.id, limit)
	if err != nil {
		return 0, err
	}
	n, err := src.TryRead(p)
	s.t.eng.Commit(n)
	if n > 0 {
		s.sent(n)
		s.t.kick()
	}
	if err != nil && err != loop.ErrAgain {
		err = &SourceError{err}
	}
	return n, err
}

func (s *stream) CloseWrite() error {
	if s.broken() {
		return loop.ErrReset
	}
	if s.noWrite {
		return nil
	}
	err := s.t.eng.CloseWrite(s.id)
	s.t.kick()
	return err
}

// Reset sends RST_STREAM(CANCEL). Bytes that were accepted in this turn are sent before it; the peer drops them.
func (s *stream) Reset() error {
	if s.release() {
		s.t.eng.Reset(s.id, http2.ErrCodeCancel)
		s.t.kick()
	}
	return nil
}

// Close ends our side cleanly. If the peer's has not ended, it is told that nothing more is wanted.
func (s *stream) Close() error {
	if s.release() {
		_ = s.t.eng.CloseWrite(s.id)
		s.t.eng.Reset(s.id, http2.ErrCodeNo)
		s.t.kick()
	}
	return nil
}

// release lets the tunnel forget the stream. False: it has before, or the tunnel is over.
func (s *stream) release() bool {
	if s.released {
		return false
	}
	s.released = true
	s.ref = nil
	s.dropQueue()
	if s.cancel != nil {
		s.cancel()
	}
	if s.t.streams[s.id] == s {
		delete(s.t.streams, s.id)
	}
	s.t.owner.released(s.t)
	if s.t.dead() {
		s.t.wakeEnded()
		return false
	}
	return true
}

// wasReset is the peer's RST_STREAM, or what amounts to one.
func (s *stream) wasReset(code http2.ErrCode, err error) {
	if o := s.endOpening(); o != nil {
		s.reset, s.released = true, true
		delete(s.t.streams, s.id)
		s.t.opened(o, nil, err)
		return
	}
	if code == http2.ErrCodeNo || s.gotEnd {
		s.noWrite = true
	} else {
		s.reset = true
		if code != http2.ErrCodeCancel {
			s.why = fmt.Errorf("stream reset: %s", code)
		}
		s.dropQueue()
	}
	if s.cancel != nil {
		s.reset = s.reset || !s.answered // nothing of a request that was not answered is wanted
		s.cancel()
	}
	s.wake()
}

// endOpening is the end of the wait for a response; nil: there is none.
func (s *stream) endOpening() *opening {
	o := s.opening
	if o != nil {
		s.opening = nil
		s.t.requests--
	}
	return o
}

// complete reports that the stream needs its tunnel no more: all that its application can still get is in the queue.
func (s *stream) complete() bool {
	return s.gotEnd && !s.reset && !s.released && s.opening == nil && (s.answered || !s.t.eng.cfg.Server)
}

// lost is the end of the tunnel.
func (s *stream) lost(err error) {
	delete(s.t.streams, s.id)
	s.reset = true
	s.why = s.t.broken()
	s.dropQueue()
	if s.cancel != nil {
		s.cancel()
	}
	if o := s.endOpening(); o != nil {
		s.released = true
		if o.reused {
			err = fmt.Errorf("%w: %w", errLost, err)
		}
		s.t.opened(o, nil, err)
	}
	s.wake()
}
