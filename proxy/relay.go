package proxy

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
)

// A Relay is the task that moves the bytes of one established connection between its two sides: what one sends the other gets,
// byte for byte; a FIN becomes a FIN, a reset a reset. It holds nothing while it is idle.
type Relay struct {
	ref  *loop.Ref
	conn *connection
	up   half // from downstream, which opened the connection, to upstream
	down half
	done bool

	account loop.Account // what was read and did not fit
}

// readAhead is how much a relay reads, in bytes, before it knows whether that fits, while the process's memory is full. A read of
// less would cost more than it holds.
const readAhead = 16 << 10

// A half is one direction.
type half struct {
	name     string
	src, dst loop.Conn
	checked  loop.Checked   // src, if it can be asked
	sender   loop.Sender    // src, if it can write from its own memory
	receiver hbone.Receiver // dst, if it can be read into
	count    *atomic.Uint64
	left     []byte // was read and did not fit into dst
	ended    bool   // src's FIN was passed on
}

// startRelay returns what begins a Relay on the loop of its Ref, or as the child of a tunnel. The Relay owns both Conns.
func startRelay(downstream, upstream loop.Conn, conn *connection, budget *loop.Budget) func(r *loop.Ref) loop.Task {
	return func(r *loop.Ref) loop.Task {
		y := &Relay{
			ref: r, conn: conn, account: loop.NewAccount(budget),
			up:   newHalf("send", downstream, upstream, &conn.Received),
			down: newHalf("receive", upstream, downstream, &conn.Sent),
		}
		if err := errors.Join(downstream.Attach(r), upstream.Attach(r)); err != nil {
			downstream.Reset()
			upstream.Reset()
			conn.Finish(fmt.Errorf("relay: %w", err))
			return nil
		}
		if f, ok := downstream.(loop.Fed); ok {
			if leader := f.Feeder(); leader != nil {
				r.Beside(leader)
			}
		}
		conn.SetCloser(func(cause error) { r.PostLater(func() { y.abort(cause) }) })
		return y
	}
}

func newHalf(name string, src, dst loop.Conn, count *atomic.Uint64) half {
	h := half{name: name, src: src, dst: dst, count: count}
	h.checked, _ = src.(loop.Checked)
	h.sender, _ = src.(loop.Sender)
	h.receiver, _ = dst.(hbone.Receiver)
	return h
}

func (y *Relay) String() string { return fmt.Sprintf("the relay of connection %d", y.conn.ID) }

// Turn implements loop.Task.
func (y *Relay) Turn(budget int) bool {
	if y.done {
		return false
	}
	ahead := budget
	if y.account.Level() == loop.Full {
		ahead = readAhead
	}
	upMore, upErr := y.up.pump(y.ref, budget, ahead)
	// The other direction goes on even if this one broke: an answer that has arrived is delivered before the reset.
	downMore, downErr := y.down.pump(y.ref, budget, ahead)
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
		return upMore || downMore
	}
	return false
}

// abort resets both sides. A reset that came from one of them is an ordinary end; any other cause is told.
func (y *Relay) abort(cause error) {
	if y.done {
		return
	}
	y.done = true
	y.account.Set(0)
	y.up.src.Reset()
	y.up.dst.Reset()
	if errors.Is(cause, loop.ErrReset) {
		cause = nil
	}
	y.conn.Finish(cause)
	y.ref.Remove()
}

// pump moves up to about budget bytes and reports whether there may be more to move without waiting. It reads at most ahead bytes
// for which there is perhaps no room.
func (h *half) pump(r *loop.Ref, budget, ahead int) (more bool, err error) {
	if h.ended {
		return false, h.lost(r)
	}
	for budget > 0 && !h.ended {
		n, err := h.step(r, budget, ahead)
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
				return false, fmt.Errorf("while closing connection: %s: %w", h.name, err)
			}
		default:
			return false, fmt.Errorf("%s: %w", h.name, err)
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
		return fmt.Errorf("%s: %w", h.name, err)
	}
	return nil
}

// lost looks whether a side that has sent its FIN was reset since: while the other direction is idle, nothing else would tell.
func (h *half) lost(r *loop.Ref) error {
	_, err := h.src.TryRead(r.Scratch()[:1])
	if err == nil || err == loop.ErrAgain || err == io.EOF {
		return nil
	}
	return fmt.Errorf("%s: %w", h.name, err)
}

// step moves bytes once, by the shortest way that the two ends have. It counts what dst took. io.EOF is src's; ErrAgain may
// be of either end, and both wake the relay.
func (h *half) step(r *loop.Ref, limit, ahead int) (int, error) {
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
	p := r.Scratch()
	n, err := h.src.TryRead(p[:min(limit, ahead, len(p))])
	if err != nil {
		return 0, err
	}
	taken, err := h.dst.TryWrite(p[:n])
	if err != nil && err != loop.ErrAgain {
		return taken, err
	}
	if taken < n {
		h.left = append([]byte(nil), p[taken:n]...)
	}
	return taken, err
}
