package loop

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// A Blocked is a blocking net.Conn on a Conn, for the few that need one: handshakes, resolvers that speak TCP, tests. It is
// a small task that tries again when the Conn is ready; where a set-up runs by hand, its calls pass the baton on.
type Blocked struct {
	g    *Group
	ctx  context.Context
	conn Conn

	mu      sync.Mutex // guards below; held while the Conn is tried
	ref     *Ref       // nil until the task has started
	gone    bool       // the task has been removed, or never starts
	ended   error      // not nil: why calls fail from now on
	last    func()     // what the task does before it is removed
	pending map[*blockedOp]struct{}
	rd, wr  deadline
}

// A blockedOp is a call that waits.
type blockedOp struct {
	try      func() bool // on the loop; reports whether it is done
	wake     func()
	deadline *deadline // nil: none
	done     bool
	err      error
}

type deadline struct {
	at    time.Time
	timer *Timer
}

// Blocking returns a blocking view of a Conn that is not attached. Its calls also fail once ctx ends. It must be closed,
// reset or detached.
func (g *Group) Blocking(ctx context.Context, c Conn) *Blocked {
	b := newBlocked(ctx, g, c)
	if g.Add(b.start) == nil {
		b.removed()
	}
	return b
}

// Blocking returns a blocking view of a Conn of the task. Its calls run on the task's loop; see [Group.Blocking].
func (r *Ref) Blocking(ctx context.Context, c Conn) *Blocked {
	b := newBlocked(ctx, r.Group(), c)
	posted := r.Post(func() {
		if r.Child(b.start) == nil {
			b.removed()
		}
	})
	if !posted {
		b.removed()
	}
	return b
}

func newBlocked(ctx context.Context, g *Group, c Conn) *Blocked {
	return &Blocked{g: g, ctx: ctx, conn: c, pending: make(map[*blockedOp]struct{})}
}

func (b *Blocked) start(r *Ref) Task {
	err := b.conn.Attach(r)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ref = r
	if err != nil && b.ended == nil {
		b.ended = err
	}
	return (*blockedTask)(b)
}

// removed lets every call fail that waits: nobody will try it again.
func (b *Blocked) removed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = true
	if b.ended == nil {
		b.ended = net.ErrClosed
	}
	for op := range b.pending {
		b.finish(op, b.ended)
	}
	if last := b.last; last != nil {
		b.last = nil
		last()
	}
}

// finish is called with mu held.
func (b *Blocked) finish(op *blockedOp, err error) {
	op.done, op.err = true, err
	delete(b.pending, op)
	op.wake()
}

// A blockedTask is a Blocked as a task.
type blockedTask Blocked

// Turn tries again whatever waits.
func (t *blockedTask) Turn(int) bool {
	b := (*Blocked)(t)
	b.mu.Lock()
	for op := range b.pending {
		if b.ended != nil {
			b.finish(op, b.ended)
		} else if op.try() {
			b.finish(op, nil)
		}
	}
	leave := b.last != nil
	b.mu.Unlock()
	if leave {
		b.ref.Remove() // comes back by removed, which does what is to be done last
	}
	return false
}

func (t *blockedTask) removed() { (*Blocked)(t).removed() }

func (t *blockedTask) String() string { return "a blocking connection" }

// do runs try on the loop, again and again, until it reports that it is done. mu is held meanwhile, and a call that gives up
// leaves pending first: its buffer is not touched after it returned.
func (b *Blocked) do(d *deadline, try func() bool) error {
	op := &blockedOp{try: try, deadline: d}
	err := Await(b.ctx, func(wake func()) {
		b.mu.Lock()
		defer b.mu.Unlock()
		op.wake = wake
		switch {
		case b.ended != nil:
			b.finish(op, b.ended)
		case d != nil && d.passed(b.g.Now()):
			b.finish(op, os.ErrDeadlineExceeded)
		default:
			b.pending[op] = struct{}{}
			b.kick()
		}
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	if op.done {
		return op.err
	}
	delete(b.pending, op)
	return err
}

// kick gives the task a turn; before its start, its first one is due by itself. mu is held.
func (b *Blocked) kick() {
	if b.ref != nil {
		b.ref.Wake()
	}
}

// Read implements net.Conn.
func (b *Blocked) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	var n int
	var err error
	failed := b.do(&b.rd, func() bool {
		n, err = b.conn.TryRead(p)
		return !errors.Is(err, ErrAgain)
	})
	if failed != nil {
		return 0, b.opError("read", failed)
	}
	return n, b.opError("read", err)
}

// Write implements net.Conn.
func (b *Blocked) Write(p []byte) (int, error) {
	done := 0
	var err error
	failed := b.do(&b.wr, func() bool {
		for done < len(p) && err == nil {
			var n int
			n, err = b.conn.TryWrite(p[done:])
			done += n
		}
		if errors.Is(err, ErrAgain) {
			err = nil
			return false
		}
		return true
	})
	if failed != nil {
		return done, b.opError("write", failed)
	}
	return done, b.opError("write", err)
}

// CloseWrite sends a FIN.
func (b *Blocked) CloseWrite() error {
	var err error
	failed := b.do(nil, func() bool { err = b.conn.CloseWrite(); return true })
	return b.opError("close", errors.Join(failed, err))
}

// Close implements net.Conn: calls that wait fail with net.ErrClosed.
func (b *Blocked) Close() error { return b.end(Conn.Close) }

// Reset ends the connection as Conn.Reset does.
func (b *Blocked) Reset() error { return b.end(Conn.Reset) }

// Detach ends the view and returns the Conn, unattached, or nil if the view has ended. No call may be in progress.
func (b *Blocked) Detach() Conn {
	if err := b.end(func(c Conn) error { return c.Attach(nil) }); err != nil {
		return nil
	}
	return b.conn
}

// end lets the task do last and removes it. What was opened is closed even if ctx has ended.
func (b *Blocked) end(last func(Conn) error) error {
	var err error
	failed := Await(context.WithoutCancel(b.ctx), func(wake func()) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.last != nil || errors.Is(b.ended, net.ErrClosed) && !b.gone {
			err = net.ErrClosed
			wake()
			return
		}
		if b.ended == nil {
			b.ended = net.ErrClosed
		}
		for op := range b.pending {
			b.finish(op, net.ErrClosed)
		}
		b.rd.set(time.Time{}, nil)
		b.wr.set(time.Time{}, nil)
		b.last = func() { err = last(b.conn); wake() }
		if b.gone { // nobody else touches the Conn
			b.last()
			b.last = func() {}
			return
		}
		b.kick()
	})
	return b.opError("close", errors.Join(failed, err))
}

func (b *Blocked) opError(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: b.LocalAddr(), Addr: b.RemoteAddr(), Err: err}
}

// LocalAddr implements net.Conn.
func (b *Blocked) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(b.conn.LocalAddr()) }

// RemoteAddr implements net.Conn.
func (b *Blocked) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(b.conn.RemoteAddr()) }

func (d *deadline) passed(now time.Time) bool { return !d.at.IsZero() && !now.Before(d.at) }

// set replaces the deadline; expire is called when it passes.
func (d *deadline) set(t time.Time, arm func() *Timer) {
	d.at = t
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if !t.IsZero() {
		d.timer = arm()
	}
}

// SetDeadline implements net.Conn, on the Group's clock.
func (b *Blocked) SetDeadline(t time.Time) error {
	return errors.Join(b.SetReadDeadline(t), b.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn, on the Group's clock.
func (b *Blocked) SetReadDeadline(t time.Time) error { return b.setDeadline(&b.rd, t) }

// SetWriteDeadline implements net.Conn, on the Group's clock.
func (b *Blocked) SetWriteDeadline(t time.Time) error { return b.setDeadline(&b.wr, t) }

func (b *Blocked) setDeadline(d *deadline, t time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended != nil {
		return b.opError("set", b.ended)
	}
	now := b.g.Now()
	d.set(t, func() *Timer { return b.g.After(max(0, t.Sub(now)), func() { b.expire(d) }) })
	if d.passed(now) {
		b.expireLocked(d)
	}
	return nil
}

func (b *Blocked) expire(d *deadline) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if d.passed(b.g.Now()) { // it may have been set anew
		b.expireLocked(d)
	}
}

func (b *Blocked) expireLocked(d *deadline) {
	for op := range b.pending {
		if op.deadline == d {
			b.finish(op, os.ErrDeadlineExceeded)
		}
	}
}
