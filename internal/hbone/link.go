package hbone

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"sync"

	"ztun.dev/ztun/internal/loop"
)

// handshake makes a link of a connection that is not attached and of which ahead was read; it fails when ctx ends. The connection is closed if it fails.
func handshake(ctx context.Context, g *loop.Group, conn loop.Conn, ahead []byte, cfg *tls.Config, server bool) (*link, error) {
	rc := &recordConn{in: ahead}
	if r := carrier(conn); r != nil {
		rc.blocked = r.Blocking(ctx, conn)
	} else {
		rc.blocked = g.Blocking(ctx, conn)
	}
	var keys secrets
	cfg = forLink(cfg, &keys)
	var tc *tls.Conn
	if server {
		tc = tls.Server(rc, cfg)
	} else {
		tc = tls.Client(rc, cfg)
	}
	// Not HandshakeContext: the view ends with ctx already, without another goroutine.
	if err := tc.Handshake(); err != nil { //nolint:noctx // see above
		_ = rc.Close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	c := rc.adopt()
	if c == nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, loop.ErrReset
	}
	l := &link{conn: c, kept: rc.in, whole: len(rc.in) > 0}
	rc.in = nil
	var err error
	if l.records, err = newRecordLayer(tc, rc, &keys, server); err != nil {
		giveUp(c)
		return nil, err
	}
	l.leaf = leafOf(tc.ConnectionState())
	return l, nil
}

// A link is the secured connection under a tunnel: what arrives is opened and what leaves is sealed in batches, and nothing
// blocks. Without TLS it passes bytes through. It is used on the tunnel's loop only.
type link struct {
	conn    loop.Conn
	records recordLayer       // nil: no TLS
	leaf    *x509.Certificate // the peer's, or nil
	buffers *buffers

	kept   []byte // what was not opened: of a record that is not whole, or left over from the handshake
	whole  bool   // kept may hold whole records, and no event will tell
	store  []byte // where unsent lies
	unsent []byte // sealed, and not taken by the socket

	over   bool // the peer has ended its side, or the connection broke
	closed bool
}

// read appends to p what arrived, opened, within p's capacity and about limit bytes. scratch is used meanwhile. again means
// that nothing more is there now; io.EOF and any other error that the connection is over, after what comes with it.
func (l *link) read(p, scratch []byte, limit int) (_ []byte, again bool, err error) {
	if l.records == nil {
		return l.readPlain(p, limit)
	}
	for start := len(p); len(p)-start < limit; {
		room := min(cap(p)-len(p), len(scratch))
		kept := copy(scratch, l.kept)
		if room < kept+maxRecord {
			return p, false, nil
		}
		n, err := l.conn.TryRead(scratch[kept:min(room, kept+max(start+limit-len(p), maxRecord))])
		switch {
		case errors.Is(err, loop.ErrAgain):
			if !l.whole {
				return p, true, nil
			}
		case errors.Is(err, io.EOF):
			l.over = true
		case err != nil:
			l.over = true
			return p, false, err
		}
		l.whole = false
		var rest []byte
		p, rest, err = l.records.open(p, scratch[:kept+n])
		switch {
		case err != nil:
			l.over = l.over || errors.Is(err, io.EOF) // a close_notify
			return p, false, err
		case l.over && len(rest) > 0:
			return p, false, io.ErrUnexpectedEOF
		case l.over:
			return p, false, io.EOF
		}
		l.keep(rest)
	}
	return p, false, nil
}

// Of a record that arrives in parts, what is there is copied into memory of a pool where it is more than smallPart: a bulk tunnel ends
// most of its turns within a record, which made 4 % of what it received garbage (measured).
const smallPart = 2 << 10

var parts = sync.Pool{New: func() any { return new([recordHeader + maxSealed]byte) }}

// keep copies what was not opened.
func (l *link) keep(rest []byte) {
	if len(rest) == 0 || len(rest) > cap(l.kept) {
		l.dropKept()
		if n := len(rest); n > smallPart && n <= recordHeader+maxSealed {
			l.kept = parts.Get().(*[recordHeader + maxSealed]byte)[:0]
		}
	}
	if len(rest) > 0 {
		l.kept = append(l.kept[:0], rest...)
	}
}

func (l *link) dropKept() {
	if cap(l.kept) == recordHeader+maxSealed {
		parts.Put((*[recordHeader + maxSealed]byte)(l.kept[:recordHeader+maxSealed]))
	}
	l.kept = nil
}

func (l *link) readPlain(p []byte, limit int) (_ []byte, again bool, err error) {
	for end := min(len(p)+limit, cap(p)); len(p) < end; {
		n, err := l.conn.TryRead(p[len(p):end])
		if errors.Is(err, loop.ErrAgain) {
			return p, true, nil
		}
		if err != nil {
			l.over = true
			return p, false, err
		}
		p = p[:len(p)+n]
	}
	return p, false, nil
}

// flush sends what the socket did not take before. done means that nothing is left of it.
func (l *link) flush() (done bool, err error) {
	for b := l.unsent; len(b) > 0; {
		n, err := l.conn.TryWrite(b)
		if errors.Is(err, loop.ErrAgain) {
			l.unsent = b
			return false, nil
		}
		if err != nil {
			l.drop()
			return true, err
		}
		b = b[n:]
	}
	l.drop()
	return true, nil
}

// drop gives the memory of unsent back.
func (l *link) drop() {
	if l.store != nil {
		l.buffers.put(l.store)
		l.store, l.unsent = nil, nil
	}
}

// pending reports whether sealed bytes wait to be sent that no write brought about: alerts and answers to a KeyUpdate.
func (l *link) pending() bool { return l.records != nil && l.records.owes() }

// send seals p and gives it to the socket in one write. It may be called when flush is done. scratch is used meanwhile.
func (l *link) send(p, scratch []byte) error {
	if l.records == nil {
		return l.write(p)
	}
	sealed, err := l.records.seal(scratch[:0], p)
	return cmp.Or(l.write(sealed), err)
}

// write gives b to the socket, and keeps what that does not take.
func (l *link) write(b []byte) error {
	for len(b) > 0 {
		n, err := l.conn.TryWrite(b)
		if errors.Is(err, loop.ErrAgain) {
			l.store = append(l.buffers.get(), b...)
			l.unsent = l.store
			return nil
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// finish ends our side of the connection: p, a close_notify and a FIN are sent, if the socket takes them at once. What it took
// is delivered, provided that discard goes on until the peer has ended its side.
func (l *link) finish(p, scratch []byte) {
	done, err := l.flush()
	if done && err == nil && l.send(p, scratch) == nil && l.records != nil && len(l.unsent) == 0 {
		_ = l.write(l.records.closing(scratch[:0]))
	}
	l.dropKept()
	l.drop()
	if l.over || l.conn.CloseWrite() != nil {
		l.close()
	}
}

// discard drops about limit bytes of what the peer still sends, and closes the connection at its end. more means that there
// may be more now.
func (l *link) discard(scratch []byte, limit int) (more bool) {
	for !l.closed {
		n, err := l.conn.TryRead(scratch)
		switch {
		case errors.Is(err, loop.ErrAgain):
			return false
		case err != nil:
			l.close()
			return false
		}
		if limit -= n; limit <= 0 {
			return true
		}
	}
	return false
}

// close releases the connection.
func (l *link) close() {
	if l.closed {
		return
	}
	l.closed = true
	_ = l.conn.Close()
	l.dropKept()
	l.drop()
}
