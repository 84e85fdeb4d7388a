package proxy

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
)

// A Relay is the task that moves the bytes of one established connection between its two sides: what one sends the other gets,
// byte for byte; a FIN becomes a FIN, a reset a reset. It holds nothing while it is idle.
type Relay struct {
	ref  *loop.Ref
	conn *connection
	up   half // from downstream, which opened the connection, to upstream
	down half
	done bool

	moved uint64 // as the record was told
	ended bool   // of one side, as the record was told

	account    loop.Account // what was read and did not fit
	limit      time.Duration
	halfClosed *halfClosed // while it is
}

// A halfClosed watches a relay of which one side has sent its FIN: after limit without a byte it is over. It keeps time where nothing
// else does: a side that is alive and silent answers every probe.
type halfClosed struct {
	moved uint64    // in both directions, at since
	since time.Time // when the last byte was moved
}

// How much a relay reads, in bytes, before it knows whether that fits.
const (
	// readBytes may be more than a turn's share, which is charged for it: between kernel sockets twice the share is a tenth faster, at
	// a tenth less CPU for each byte (measured).
	readBytes = 256 << 10

	// bulkBytes is what a read has to bring for the next to be without a copy. Where the kernel moves it, one stream is a quarter faster,
	// at half the CPU for each byte, eight on one thread 5 % at 0.6 of it; into the netstack, one stream is a fifth faster, at 0.8 of
	// the CPU (measured).
	bulkBytes = 32 << 10

	// readAhead is that while the process's memory is full. A read of less would cost more than it holds.
	readAhead = 16 << 10
)

// A half is one direction.
type half struct {
	name     string
	src, dst loop.Conn
	checked  loop.Checked   // src, if it can be asked
	sender   loop.Sender    // src, if it can write from its own memory
	receiver hbone.Receiver // dst, if it can be read into
	measured loop.Measured  // src, if dst is a filler
	filler   loop.Filler    // dst, if it reads src by itself
	splicer  loop.Splicer   // src, if the kernel can move its bytes
	behind   bool           // dst did not take the last read at once
	bulk     bool           // the last read was large
	count    *atomic.Uint64
	left     []byte // was read and did not fit into dst
	ended    bool   // src's FIN was passed on
}

// startRelay returns what begins a Relay on the loop of its Ref, or as the child of a tunnel. The Relay owns both Conns.
func (p *Proxy) startRelay(downstream, upstream loop.Conn, conn *connection) func(r *loop.Ref) loop.Task {
	return func(r *loop.Ref) loop.Task {
		y := &Relay{
			ref: r, conn: conn, account: loop.NewAccount(p.cfg.Budget), limit: p.cfg.HalfClosedTimeout,
			up:   newHalf("send", downstream, upstream, &conn.Received),
			down: newHalf("receive", upstream, downstream, &conn.Sent),
		}
		if err := errors.Join(downstream.Attach(r), upstream.Attach(r)); err != nil {
			downstream.Reset()
			upstream.Reset()
			conn.Finish(&brokenError{"relay", err})
			return nil
		}
		if f, ok := downstream.(loop.Fed); ok {
			if leader := f.Feeder(); leader != nil {
				_, encrypts := upstream.(hbone.Stream)
				r.Beside(leader, encrypts)
			}
		}
		conn.Established(r.Now())
		conn.SetCloser(func(cause error) { r.PostLater(func() { y.abort(cause) }) })
		return y
	}
}

func newHalf(name string, src, dst loop.Conn, count *atomic.Uint64) half {
	h := half{name: name, src: src, dst: dst, count: count}
	h.checked, _ = src.(loop.Checked)
	h.sender, _ = src.(loop.Sender)
	h.receiver, _ = dst.(hbone.Receiver)
	h.measured, _ = src.(loop.Measured)
	if h.filler, _ = dst.(loop.Filler); h.measured == nil || h.filler == nil {
		h.measured, h.filler = nil, nil
		h.splicer, _ = src.(loop.Splicer)
	}
	return h
}

func (y *Relay) String() string { return fmt.Sprintf("the relay of connection %d", y.conn.ID) }

// Turn implements loop.Task.
func (y *Relay) Turn(budget int) bool {
	if y.done {
		return false
	}
	full := y.account.Level() == loop.Full
	upMore, upErr := y.up.pump(y.ref, budget, full)
	// The other direction goes on even if this one broke: an answer that has arrived is delivered before the reset.
	downMore, downErr := y.down.pump(y.ref, budget, full)
	y.account.Set(len(y.up.left) + len(y.down.left))
	switch {
	case upErr != nil:
		y.abort(upErr)
	case downErr != nil:
		y.abort(downErr)
	case y.up.ended && y.down.ended:
		y.done = true
		y.up.src.Close()
		y.up.dst.Close()
		y.conn.Finish(nil)
		y.ref.Remove()
	default:
		y.report()
		y.watchHalfClosed()
		return upMore || downMore
	}
	return false
}

// report tells the record how far the connection is, for whoever lists connections.
func (y *Relay) report() {
	if moved := y.conn.Received.Load() + y.conn.Sent.Load(); moved != y.moved {
		y.moved = moved
		y.conn.Active(y.ref.LoopTime(), len(y.up.left)+len(y.down.left))
	}
	if ended := y.up.ended || y.down.ended; ended != y.ended {
		y.ended = ended
		y.conn.Ended(y.up.ended, y.down.ended)
	}
}

// watchHalfClosed sets the timer once one side has ended, and notes when bytes were moved since.
func (y *Relay) watchHalfClosed() {
	if y.up.ended == y.down.ended || y.limit <= 0 {
		return
	}
	moved := y.conn.Received.Load() + y.conn.Sent.Load()
	switch h := y.halfClosed; {
	case h == nil:
		y.halfClosed = &halfClosed{moved, y.ref.Now()}
		y.awaitBytes(y.limit)
	case h.moved != moved:
		h.moved, h.since = moved, y.ref.Now()
	}
}

func (y *Relay) awaitBytes(d time.Duration) {
	y.ref.After(d, func() {
		if idle := y.ref.Now().Sub(y.halfClosed.since); idle < y.limit {
			y.awaitBytes(y.limit - idle)
			return
		}
		y.abort(&halfClosedError{y.limit})
	})
}

// abort resets both sides.
func (y *Relay) abort(cause error) {
	if y.done {
		return
	}
	y.done = true
	y.account.Set(0)
	cause = y.meant(cause)
	y.up.src.Reset()
	y.up.dst.Reset()
	y.conn.Finish(cause)
	y.ref.Remove()
}

// meant is nil for a reset that one of the sides meant: an ordinary end. Others are the loss of a tunnel, or what the other end of it
// calls an error.
func (y *Relay) meant(cause error) error {
	if !errors.Is(cause, loop.ErrReset) {
		return cause
	}
	for _, h := range []*half{&y.up, &y.down} {
		if s, ok := h.src.(hbone.Stream); ok && s.Broken() != nil {
			return &brokenError{h.name, s.Broken()}
		}
	}
	return nil
}

// A brokenError is the end of a connection that was established.
type brokenError struct {
	what string
	err  error
}

func (e *brokenError) Error() string { return e.what + ": " + e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

// Telemetry tells how it is counted: not as failed, because it was established.
func (e *brokenError) Telemetry() (telemetry.Flag, telemetry.Reason) {
	return telemetry.FlagReset, telemetry.ReasonReset
}

// A halfClosedError is the end of a connection of which one side had ended and the other was silent.
type halfClosedError struct{ limit time.Duration }

func (e *halfClosedError) Error() string {
	return fmt.Sprintf("half-closed without a byte for %v", e.limit)
}

// Telemetry tells how it is counted.
func (e *halfClosedError) Telemetry() (telemetry.Flag, telemetry.Reason) {
	return telemetry.FlagReset, telemetry.ReasonTimeout
}

// pump moves about budget bytes, or what one read brings, and reports whether there may be more to move without waiting. full: the
// process's memory is.
func (h *half) pump(r *loop.Ref, budget int, full bool) (more bool, err error) {
	if h.ended {
		return false, h.lost(r)
	}
	for budget > 0 && !h.ended {
		n, err := h.step(r, budget, full)
		budget -= n
		h.count.Add(uint64(n))
		r.Moved(n)
		switch err {
		case nil:
		case loop.ErrAgain:
			return false, h.broken()
		case io.EOF:
			h.ended = true
			if err := h.dst.CloseWrite(); err != nil {
				return false, &brokenError{"while closing connection: " + h.name, err}
			}
		default:
			return false, &brokenError{h.name, err}
		}
	}
	return !h.ended, nil
}

// broken looks whether src was reset, although dst takes nothing that could be read of it.
func (h *half) broken() error {
	if h.checked == nil {
		return nil
	}
	if err := h.checked.Check(); err != nil {
		return &brokenError{h.name, err}
	}
	return nil
}

// lost looks whether a side that has sent its FIN was reset since: while the other direction is idle, nothing else would tell.
func (h *half) lost(r *loop.Ref) error {
	_, err := h.src.TryRead(r.Scratch()[:1])
	if err == nil || err == loop.ErrAgain || err == io.EOF {
		return nil
	}
	return &brokenError{h.name, err}
}

// uncopied moves bytes once without the copy that a read and a write need. Where nothing is moved, a read tells why.
func (h *half) uncopied(limit int) (int, error) {
	if h.filler != nil {
		most := min(limit, readBytes)
		n, err := h.filler.TryFill(h.measured, most)
		h.bulk = n == 0 || n >= min(most, bulkBytes) || err == loop.ErrAgain
		return n, err
	}
	n, rest, err := h.splicer.TrySplice(h.dst, readBytes)
	if n > 0 || len(rest) > 0 {
		h.left, h.behind, h.bulk = rest, len(rest) > 0, n+len(rest) >= bulkBytes
	}
	if send, ok := errors.AsType[*loop.SendError](err); ok {
		return n, send.Err
	}
	return n, err
}

// step moves bytes once, by the shortest way that the two ends have. It counts what dst took. io.EOF is src's; ErrAgain may
// be of either end, and both wake the relay.
func (h *half) step(r *loop.Ref, limit int, full bool) (int, error) {
	switch {
	case len(h.left) > 0:
		n, err := h.dst.TryWrite(h.left)
		if h.left = h.left[n:]; len(h.left) == 0 {
			h.left = nil
		}
		return n, err
	case h.receiver != nil:
		n, err := h.receiver.TryReadFrom(h.src, limit)
		var source *hbone.SourceError
		if err != nil && errors.As(err, &source) {
			return n, source.Err
		}
		return n, err
	case h.sender != nil:
		return h.sender.TryWriteTo(h.dst, limit)
	}
	if h.bulk && !full && !h.behind {
		n, err := h.uncopied(limit)
		switch {
		case err == errors.ErrUnsupported:
			h.splicer, h.bulk = nil, false
		case err != nil || n > 0 || len(h.left) > 0:
			return n, err
		}
	}
	p := r.Scratch()
	most := readBytes
	switch {
	case full:
		most = min(limit, readAhead)
	case h.behind:
		most = min(limit, readBytes/2)
	}
	n, err := h.src.TryRead(p[:min(most, len(p))])
	if err != nil {
		return 0, err
	}
	taken, err := h.dst.TryWrite(p[:n])
	if err != nil && err != loop.ErrAgain {
		return taken, err
	}
	h.bulk = n >= bulkBytes && (h.filler != nil || h.splicer != nil)
	if h.behind = taken < n; h.behind {
		h.left = append([]byte(nil), p[taken:n]...)
	}
	return taken, err
}
