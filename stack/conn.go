package stack

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"ztun.dev/ztun/internal/loop"
)

// TCP as the netstack speaks it with the applications. The link neither loses nor reorders, and the peer is a kernel at its
// other end.
const (
	timeWait = 1 * time.Second  // 5,000 connections a second would keep 300,000 endpoints in 60 s
	finWait2 = 30 * time.Second // of a connection that was closed, for the application's FIN

	// maxRetries limits unanswered zero-window probes; retransmissions end with the user timeout.
	maxRetries = 8

	// bufferSize is that of the buffers each way, and bufferShort that while the process's memory is full. 256 KiB costs 5-10 % of
	// throughput, 4 MiB gains nothing (measured). What may wait in one to be read is half of it, the netstack's allowance for overhead.
	bufferSize  = 1 << 20
	bufferShort = loop.TightBytes
)

// setOptions sets what an endpoint does not have from the stack.
func (s *Stack) setOptions(ep tcpip.Endpoint) {
	c := &s.cfg
	if c.KeepaliveTime > 0 {
		idle := tcpip.KeepaliveIdleOption(c.KeepaliveTime)
		interval := tcpip.KeepaliveIntervalOption(c.KeepaliveInterval)
		_ = ep.SetSockOpt(&idle) // never fails, nor do the others
		_ = ep.SetSockOpt(&interval)
		_ = ep.SetSockOptInt(tcpip.KeepaliveCountOption, c.KeepaliveRetries)
		ep.SocketOptions().SetKeepAlive(true)
	}
	if c.UserTimeout > 0 {
		timeout := tcpip.TCPUserTimeoutOption(c.UserTimeout)
		_ = ep.SetSockOpt(&timeout)
	}
}

// A conn is a netstack endpoint as a loop.Conn. It holds no buffer: bytes are the endpoint's.
type conn struct {
	ep            tcpip.Endpoint
	queue         *waiter.Queue
	entry         waiter.Entry
	local, remote netip.AddrPort
	feeder        *loop.Ref // reads the device

	ref atomic.Pointer[loop.Ref] // whom the netstack's goroutines wake

	census  *census
	touched atomic.Bool  // the census will look at it
	atFIN   atomic.Int64 // bytes that waited to be acknowledged when the FIN was queued behind them; -1: it was not

	// Of the census.
	counted int  // bytes that it holds, as they were counted
	short   bool // its buffers are bufferShort

	// Of the loop.
	attached bool // entry is registered
	finSent  bool
	released bool
	broken   error             // not nil: what the netstack said, once, of the end of the connection
	reader   bytes.Reader      // what TryWrite passes: the arguments of interfaces would escape, one allocation for each call
	fill     filling           // what TryFill passes
	slice    tcpip.SliceWriter // what TryRead passes
	send     sendWriter        // what TryWriteTo passes
}

var (
	_ loop.Conn   = (*conn)(nil)
	_ loop.Sender = (*conn)(nil)
	_ loop.Filler = (*conn)(nil)
	_ loop.Fed    = (*conn)(nil)

	_ loop.Checked = (*conn)(nil)

	_ waiter.EventListener = (*conn)(nil)
)

func newConn(s *Stack, ep tcpip.Endpoint, queue *waiter.Queue, flow Flow) *conn {
	c := &conn{ep: ep, queue: queue, local: flow.Dst, remote: flow.Src, feeder: s.reader.Load(), census: &s.census}
	c.atFIN.Store(-1)
	c.resize(s.cfg.Budget.Level())
	c.entry.Init(c, waiter.ReadableEvents|waiter.WritableEvents|waiter.EventRdHUp|waiter.EventHUp|waiter.EventErr)
	return c
}

// NotifyEvent implements waiter.EventListener. The queue's lock is held, and perhaps the endpoint's.
func (c *conn) NotifyEvent(waiter.EventMask) {
	c.touch()
	if r := c.ref.Load(); r != nil {
		r.Wake()
	}
}

// Attach implements loop.Conn.
func (c *conn) Attach(r *loop.Ref) error {
	if c.released {
		return loop.ErrReset
	}
	c.ref.Store(r)
	if r == nil {
		c.unregister()
		return nil
	}
	if !c.attached {
		c.attached = true
		c.queue.EventRegister(&c.entry)
	}
	c.touch() // for what came before
	r.Wake()
	return nil
}

func (c *conn) unregister() {
	if c.attached {
		c.attached = false
		c.queue.EventUnregister(&c.entry)
	}
}

// TryRead implements loop.Conn.
func (c *conn) TryRead(p []byte) (int, error) {
	if c.released {
		return 0, loop.ErrReset
	}
	if len(p) == 0 {
		return 0, nil
	}
	c.slice = p
	res, err := c.ep.Read(&c.slice, tcpip.ReadOptions{})
	c.slice = nil
	if err != nil {
		return 0, c.readError(err)
	}
	return res.Count, nil
}

// readError is goError for what a Read returned.
func (c *conn) readError(err tcpip.Error) error {
	if _, ok := err.(*tcpip.ErrClosedForReceive); !ok {
		return c.failure(err)
	}
	if err := c.Check(); err != nil {
		return err
	}
	return io.EOF
}

// Check implements loop.Checked.
func (c *conn) Check() error {
	switch state := tcp.EndpointState(c.ep.State()); {
	case c.released:
		return loop.ErrReset
	case c.broken != nil:
		return c.broken
	case state == tcp.StateError, state == tcp.StateClose && !c.finSent:
		// After the application's FIN its RST closes the endpoint; else only our own FIN does.
		return loop.ErrReset
	}
	return nil
}

// failure is goError that keeps an error for later calls: the netstack tells it once.
func (c *conn) failure(err tcpip.Error) error {
	switch err.(type) {
	case *tcpip.ErrWouldBlock:
		return loop.ErrAgain
	case *tcpip.ErrClosedForSend:
		if c.broken != nil {
			return c.broken
		}
		return loop.ErrReset
	}
	c.broken = goError(err)
	return c.broken
}

// TryWrite implements loop.Conn.
func (c *conn) TryWrite(p []byte) (int, error) {
	if c.released || c.finSent {
		return 0, loop.ErrReset
	}
	if len(p) == 0 {
		return 0, nil
	}
	// The netstack copies what it takes, with its lock held (Atomic): it would let go of it otherwise, and allocate.
	c.reader.Reset(p)
	n, err := c.ep.Write(&c.reader, tcpip.WriteOptions{Atomic: true})
	c.reader.Reset(nil)
	c.touch()
	if err != nil {
		return 0, c.failure(err)
	}
	return int(n), nil
}

// TryFill implements loop.Filler: src is read into the netstack's own buffers, as much as they take. What does not fit stays in src.
func (c *conn) TryFill(src loop.Measured, limit int) (int, error) {
	if c.released || c.finSent {
		return 0, loop.ErrReset
	}
	most := min(src.Readable(), limit)
	if most <= 0 {
		return 0, nil
	}
	c.fill = filling{src: src, left: most}
	// As in TryWrite the endpoint's lock is held, here while src reads: a system call that does not wait. What arrives for the endpoint
	// meanwhile is queued.
	n, err := c.ep.Write(&c.fill, tcpip.WriteOptions{Atomic: true})
	broke, started := c.fill.err, c.fill.left < most
	c.fill = filling{}
	c.touch()
	switch {
	case (broke == loop.ErrAgain || broke == io.ErrUnexpectedEOF) && !started:
		return 0, nil
	case broke != nil && !started:
		return 0, broke
	case broke != nil:
		return 0, fmt.Errorf("stack: read %d bytes that were there: %w", most, broke) // what was read is lost
	case err != nil:
		return 0, c.failure(err)
	case int(n) < most:
		return int(n), loop.ErrAgain
	}
	return int(n), nil
}

// A filling is the next bytes of a source, as the netstack reads them. The netstack goes on reading until it has all that Len promised:
// an end before would never stop it, so that it is given another error. After an error it drops what it has read.
type filling struct {
	src  loop.Measured
	left int // that the netstack has not read
	err  error
}

// Len implements tcpip.Payloader.
func (f *filling) Len() int { return f.left }

// Read implements tcpip.Payloader.
func (f *filling) Read(p []byte) (int, error) {
	if len(p) == 0 { // so the netstack asks whether there is an end
		return 0, nil
	}
	n, err := f.src.TryRead(p)
	if f.left -= n; err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	f.err = err
	return n, err
}

// TryWriteTo implements loop.Sender: each buffer of a received segment is written straight to dst.
func (c *conn) TryWriteTo(dst loop.Conn, limit int) (int, error) {
	if c.released {
		return 0, loop.ErrReset
	}
	if limit <= 0 {
		return 0, nil
	}
	c.send = sendWriter{dst: dst, left: limit}
	res, err := c.ep.Read(&c.send, tcpip.ReadOptions{})
	sendErr := c.send.err
	c.send = sendWriter{}
	switch {
	case res.Count > 0:
		return res.Count, nil // an error of dst comes again
	case sendErr == nil && err == nil: // dst took nothing and said nothing
		return 0, loop.ErrAgain
	case sendErr == nil:
		return 0, c.readError(err)
	case errors.Is(sendErr, loop.ErrAgain):
		return 0, loop.ErrAgain
	default:
		return 0, &loop.SendError{Err: sendErr}
	}
}

// A sendWriter is a Conn as the io.Writer that the netstack writes to.
type sendWriter struct {
	dst  loop.Conn
	left int
	err  error
}

func (w *sendWriter) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) && w.left > 0 && w.err == nil {
		var n int
		n, w.err = w.dst.TryWrite(p[done:min(len(p), done+w.left)])
		done += n
		w.left -= n
		if n == 0 && w.err == nil {
			break
		}
	}
	if done < len(p) {
		return done, io.ErrShortWrite
	}
	return done, nil
}

// CloseWrite implements loop.Conn.
func (c *conn) CloseWrite() error {
	if c.released {
		return loop.ErrReset
	}
	if c.finSent {
		return nil
	}
	c.beforeFIN()
	if err := c.ep.Shutdown(tcpip.ShutdownWrite); err != nil {
		return c.failure(err)
	}
	c.finSent = true
	return nil
}

// Reset implements loop.Conn.
func (c *conn) Reset() error {
	if c.released {
		return nil
	}
	c.release()
	c.ep.Abort()
	c.ep.Close()
	return nil
}

// Close implements loop.Conn. The endpoint lingers until the application has taken all and closed its side, at most for the
// user timeout and then finWait2.
func (c *conn) Close() error {
	if c.released {
		return nil
	}
	c.release()
	// Bytes that nobody read would make the netstack reset the connection, and drop what was accepted.
	for {
		if _, err := c.ep.Read(io.Discard, tcpip.ReadOptions{}); err != nil {
			break
		}
	}
	if !c.finSent {
		c.beforeFIN()
	}
	c.ep.Close()
	return nil
}

func (c *conn) release() {
	c.released = true
	c.ref.Store(nil)
	c.unregister()
}

// Feeder implements loop.Fed.
func (c *conn) Feeder() *loop.Ref { return c.feeder }

// LocalAddr implements loop.Conn.
func (c *conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr implements loop.Conn.
func (c *conn) RemoteAddr() netip.AddrPort { return c.remote }

// String names the connection in reports.
func (c *conn) String() string { return fmt.Sprintf("netstack connection %v -> %v", c.remote, c.local) }
