package loop

import (
	"io"
	"net/netip"
	"sync"
)

// pipeBytes bounds what one direction of a Pipe holds.
const pipeBytes = 256 << 10

// Pipe returns the two ends of a connection in memory, with the semantics of a TCP connection: half-close, reset, and
// bounded buffers (256 KiB each way).
func Pipe() (a, b Conn) {
	return PipeAddrs(netip.MustParseAddrPort("192.0.2.1:10001"), netip.MustParseAddrPort("192.0.2.2:10002"))
}

// PipeAddrs is Pipe with chosen addresses: of a, and of b.
func PipeAddrs(a, b netip.AddrPort) (Conn, Conn) {
	mu := new(sync.Mutex)
	x, y := &pipeEnd{mu: mu, local: a}, &pipeEnd{mu: mu, local: b}
	x.peer, y.peer = y, x
	return x, y
}

// A pipeEnd holds what its peer wrote and it has not read.
type pipeEnd struct {
	mu    *sync.Mutex // of both ends; guards below
	peer  *pipeEnd
	local netip.AddrPort
	ref   *Ref

	buf    []byte // written by peer, not read; from at
	at     int
	fin    bool // peer sends no more
	reset  bool // the connection was reset
	closed bool // this end was closed
}

func (e *pipeEnd) TryRead(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.reset || e.closed:
		return 0, ErrReset
	case e.at < len(e.buf):
		full := len(e.buf)-e.at == pipeBytes
		n := copy(p, e.buf[e.at:])
		if e.at += n; e.at == len(e.buf) {
			e.buf, e.at = nil, 0
		}
		if full {
			e.peer.wake()
		}
		return n, nil
	case e.fin:
		return 0, io.EOF
	}
	return 0, ErrAgain
}

// Check implements Checked.
func (e *pipeEnd) Check() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.reset || e.closed {
		return ErrReset
	}
	return nil
}

func (e *pipeEnd) TryWrite(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.reset || e.closed || e.peer.fin {
		return 0, ErrReset
	}
	if len(p) == 0 {
		return 0, nil
	}
	if e.peer.closed { // nobody will read it: the answer to data is a reset
		e.reset = true
		return 0, ErrReset
	}
	q := e.peer
	n := min(len(p), pipeBytes-(len(q.buf)-q.at))
	if n == 0 {
		return 0, ErrAgain
	}
	if q.at > 0 {
		q.buf, q.at = append(q.buf[:0], q.buf[q.at:]...), 0
	}
	q.buf = append(q.buf, p[:n]...)
	q.wake()
	return n, nil
}

func (e *pipeEnd) CloseWrite() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.reset || e.closed {
		return ErrReset
	}
	e.peer.fin = true
	e.peer.wake()
	return nil
}

func (e *pipeEnd) Reset() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed, e.ref = true, nil
	if !e.peer.closed {
		e.peer.reset, e.peer.buf, e.peer.at = true, nil, 0
		e.peer.wake()
	}
	return nil
}

func (e *pipeEnd) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed, e.ref = true, nil
	if e.at < len(e.buf) { // unread bytes: TCP answers with a reset
		e.peer.reset = true
	}
	e.buf = nil
	e.peer.fin = true
	e.peer.wake()
	return nil
}

func (e *pipeEnd) Attach(r *Ref) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ref = r
	e.wake()
	return nil
}

// wake is called with mu held.
func (e *pipeEnd) wake() {
	if e.ref != nil {
		e.ref.Wake()
	}
}

func (e *pipeEnd) LocalAddr() netip.AddrPort  { return e.local }
func (e *pipeEnd) RemoteAddr() netip.AddrPort { return e.peer.local }
