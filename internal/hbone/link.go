package hbone

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// recordHeader is the length of a TLS record's header, maxRecord the largest plain text of one (RFC 8446, section 5.1).
const (
	recordHeader = 5
	maxRecord    = 16 << 10
)

// A recordConn is the net.Conn under crypto/tls. During the handshake it is blocking, on a loop.Blocked; after adopt it has
// no socket at all: the link puts in what arrived and takes out what was sealed.
//
// It never returns bytes beyond the record that is being read, and in the second phase it begins only records that are
// whole. So crypto/tls holds nothing that no event would tell of, and an empty in means that everything was delivered.
// "Nothing there" is a temporary net.Error, the only error of a read that does not poison a tls.Conn; writes never fail.
type recordConn struct {
	blocked *loop.Blocked // nil after adopt
	in      []byte        // bytes that arrived and were not read
	left    int           // bytes of the record that is being read
	eof     bool          // nothing follows in
	out     []byte        // sealed, to be sent; after adopt
}

// nothingYet is the answer to a read for which no whole record is there.
type nothingYet struct{}

func (nothingYet) Error() string   { return "hbone: no whole record" }
func (nothingYet) Timeout() bool   { return true }
func (nothingYet) Temporary() bool { return true }

var errNothingYet error = nothingYet{}

func (c *recordConn) Read(p []byte) (int, error) {
	if c.left == 0 {
		if err := c.begin(); err != nil {
			return 0, err
		}
	}
	if len(c.in) == 0 {
		if err := c.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, c.in[:min(c.left, len(c.in))])
	c.in = c.in[n:]
	c.left -= n
	return n, nil
}

// begin finds the end of the next record.
func (c *recordConn) begin() error {
	for len(c.in) < recordHeader {
		if err := c.fill(); err != nil {
			if errors.Is(err, io.EOF) && len(c.in) > 0 {
				return io.ErrUnexpectedEOF
			}
			return err
		}
	}
	n := recordHeader + int(binary.BigEndian.Uint16(c.in[3:]))
	if c.blocked == nil && len(c.in) < n && n <= recordHeader+maxRecord+2048 {
		return c.fill() // a longer one is left to crypto/tls to refuse
	}
	c.left = n
	return nil
}

// fill waits for bytes in the first phase. In the second it only says that there are none.
func (c *recordConn) fill() error {
	switch {
	case c.blocked == nil && c.eof:
		return io.EOF
	case c.blocked == nil:
		return errNothingYet
	}
	b := make([]byte, 4<<10)
	n, err := c.blocked.Read(b)
	c.in = append(c.in, b[:n]...)
	if n > 0 {
		return nil
	}
	return err
}

func (c *recordConn) Write(p []byte) (int, error) {
	if c.blocked != nil {
		return c.blocked.Write(p)
	}
	c.out = append(c.out, p...)
	return len(p), nil
}

// adopt ends the first phase and returns the connection. What it read ahead stays in in.
func (c *recordConn) adopt() loop.Conn {
	conn := c.blocked.Detach()
	c.blocked = nil
	return conn
}

func (c *recordConn) Close() error {
	if c.blocked != nil {
		return c.blocked.Close()
	}
	return nil // the link closes the socket
}

func (c *recordConn) LocalAddr() net.Addr  { return nil }
func (c *recordConn) RemoteAddr() net.Addr { return nil }

// crypto/tls sets write deadlines of its own when it closes.

func (c *recordConn) SetDeadline(time.Time) error      { return nil }
func (c *recordConn) SetReadDeadline(time.Time) error  { return nil }
func (c *recordConn) SetWriteDeadline(time.Time) error { return nil }

// handshake makes a link of a connection that is not attached and of which ahead was read; it fails when ctx ends. The connection is closed if it fails.
func handshake(ctx context.Context, g *loop.Group, conn loop.Conn, ahead []byte, cfg *tls.Config, server bool) (*link, error) {
	rc := &recordConn{in: ahead}
	if r := carrier(conn); r != nil {
		rc.blocked = r.Blocking(ctx, conn)
	} else {
		rc.blocked = g.Blocking(ctx, conn)
	}
	cfg = cfg.Clone()
	cfg.NextProtos = []string{"h2"}
	cfg.DynamicRecordSizingDisabled = true // we write large batches or what there is
	cfg.SessionTicketsDisabled = true      // each handshake proves an identity anew
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
			err = ctx.Err()
		}
		return nil, err
	}
	c := rc.adopt()
	if c == nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, loop.ErrReset
	}
	l := &link{conn: c, tls: tc, rc: rc, kept: rc.in, whole: len(rc.in) > 0}
	rc.in = nil
	return l, nil
}

// A link is the secured connection under a tunnel: what arrives is opened and what leaves is sealed in batches, and nothing
// blocks. Without TLS it passes bytes through. It is used on the tunnel's loop only.
type link struct {
	conn    loop.Conn
	tls     *tls.Conn // nil: no TLS
	rc      *recordConn
	buffers *buffers

	kept   []byte // ciphertext that was not opened: of a record that is not whole, or left over from the handshake
	whole  bool   // kept may hold whole records, and no event will tell
	store  []byte // where unsent lies
	unsent []byte // sealed, and not taken by the socket

	over   bool // the peer has ended its side, or the connection broke
	closed bool
}

// peerLeaf is the peer's certificate, or nil.
func (l *link) peerLeaf() *x509.Certificate {
	if l.tls == nil {
		return nil
	}
	if certs := l.tls.ConnectionState().PeerCertificates; len(certs) > 0 {
		return certs[0]
	}
	return nil
}

// read appends to p what arrived, opened, within p's capacity and about limit bytes. scratch is used meanwhile. again means
// that nothing more is there now; io.EOF and any other error that the connection is over, after what comes with it.
func (l *link) read(p, scratch []byte, limit int) (_ []byte, again bool, err error) {
	if l.tls == nil {
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
			l.rc.eof, l.over = true, true
		case err != nil:
			l.over = true
			return p, false, err
		}
		l.whole = false
		l.rc.in = scratch[:kept+n]
		p, err = l.open(p)
		if l.kept = append(l.kept[:0], l.rc.in...); len(l.kept) == 0 {
			l.kept = nil
		}
		l.rc.in = nil
		if err != nil {
			l.over = l.over || errors.Is(err, io.EOF) // a close_notify
			return p, false, err
		}
	}
	return p, false, nil
}

// open appends the plain text of all whole records. There is room for it: no record grows when it is opened.
func (l *link) open(p []byte) ([]byte, error) {
	for {
		n, err := l.tls.Read(p[len(p):cap(p)])
		p = p[:len(p)+n]
		switch {
		case errors.Is(err, errNothingYet):
			return p, nil
		case err != nil:
			return p, err
		}
	}
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
func (l *link) pending() bool { return l.rc != nil && len(l.rc.out) > 0 }

// send seals p and gives it to the socket in one write. It may be called when flush is done. scratch is used meanwhile.
func (l *link) send(p, scratch []byte) error {
	b := p
	if l.tls != nil {
		l.rc.out = append(scratch[:0], l.rc.out...)
		if len(p) > 0 {
			if _, err := l.tls.Write(p); err != nil {
				l.rc.out = nil
				return err
			}
		}
		b = l.rc.out
		l.rc.out = nil
	}
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
	if done && err == nil && l.send(p, scratch) == nil && l.tls != nil && len(l.unsent) == 0 {
		_ = l.tls.Close() // the alert goes to rc.out
		_ = l.send(nil, scratch)
	}
	l.kept = nil
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
	l.kept = nil
	l.drop()
}
