package hbone

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A recordConn is the net.Conn under crypto/tls. During the handshake it is blocking, on a loop.Blocked; after adopt it has
// no socket at all: a tlsLayer puts in what arrived and takes out what was sealed.
//
// It never returns bytes beyond the record that is being read, and in the second phase it begins only records that are
// whole. So crypto/tls holds nothing that no event would tell of, and an empty in means that everything was delivered.
// "Nothing there" is a temporary net.Error, the only error of a read that does not poison a tls.Conn; writes never fail.
type recordConn struct {
	blocked *loop.Blocked // nil after adopt
	in      []byte        // bytes that arrived and were not read
	left    int           // bytes of the record that is being read
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
	if c.blocked == nil {
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

// A tlsLayer is crypto/tls as a recordLayer.
type tlsLayer struct {
	tls *tls.Conn
	rc  *recordConn
}

func (l *tlsLayer) open(p, in []byte) (_, rest []byte, err error) {
	l.rc.in = in
	for err == nil {
		var n int
		n, err = l.tls.Read(p[len(p):cap(p)])
		p = p[:len(p)+n]
	}
	if errors.Is(err, errNothingYet) {
		err = nil
	}
	rest, l.rc.in = l.rc.in, nil
	return p, rest, err
}

func (l *tlsLayer) seal(dst, p []byte) ([]byte, error) {
	l.rc.out = append(dst, l.rc.out...)
	var err error
	if len(p) > 0 {
		_, err = l.tls.Write(p)
	}
	dst, l.rc.out = l.rc.out, nil
	return dst, err
}

func (l *tlsLayer) owes() bool { return len(l.rc.out) > 0 }

func (l *tlsLayer) closing(dst []byte) []byte {
	_ = l.tls.Close() // the alert goes to rc.out
	dst, l.rc.out = append(dst, l.rc.out...), nil
	return dst
}
