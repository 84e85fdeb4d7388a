package underlay

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// pipeBytes is the size of a pipe: what one splice moves at most.
const pipeBytes = 256 << 10

// A pipe is what bytes pass through from one socket to another, as pages that nobody copies. It is empty between two uses.
type pipe struct{ r, w int }

// spare are pipes that nobody uses; a loop uses one at a time.
var spare = make(chan pipe, 4)

func takePipe() (pipe, error) {
	select {
	case p := <-spare:
		return p, nil
	default:
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return pipe{}, fmt.Errorf("pipe: %w", err)
	}
	// Where the limit of the user is reached it stays at 64 KiB.
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeBytes)
	return pipe{fds[0], fds[1]}, nil
}

func (p pipe) release() {
	select {
	case spare <- p:
	default:
		p.close()
	}
}

func (p pipe) close() {
	_ = unix.Close(p.r)
	_ = unix.Close(p.w)
}

var _ loop.Splicer = (*Conn)(nil)

// TrySplice implements loop.Splicer.
func (c *Conn) TrySplice(to loop.Conn, most int) (n int, rest []byte, err error) {
	dst, ok := to.(*Conn)
	if !ok {
		return 0, nil, errors.ErrUnsupported
	}
	if c.empty {
		return 0, nil, nil
	}
	p, err := takePipe()
	if err != nil {
		return 0, nil, errors.ErrUnsupported // copying needs no descriptor
	}
	in, err := splice(c.fd, p.w, most)
	if err != nil || in == 0 {
		p.release()
		return 0, nil, c.spliceError(err)
	}
	for n < in {
		out, err := splice(p.r, dst.fd, in-n)
		if err == unix.EAGAIN {
			break
		}
		if err != nil {
			p.close() // with what is in it
			return n, nil, &loop.SendError{Err: connError(err)}
		}
		n += out
	}
	if n == in {
		p.release()
		return n, nil, nil
	}
	rest = make([]byte, in-n)
	for at := 0; at < len(rest); {
		got, err := unix.Read(p.r, rest[at:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || got == 0 { // it is all there
			p.close()
			return n, nil, fmt.Errorf("read of a pipe: %d bytes: %w", got, err)
		}
		at += got
	}
	p.release()
	return n, rest, nil
}

// spliceError is what it means that nothing came out of the socket. That there is nothing, or no more, is for a read to say: before an
// urgent byte (RFC 9293, section 3.8.5) splice(2) says the same, and never gets past it.
func (c *Conn) spliceError(err error) error {
	switch err {
	case nil, unix.EAGAIN:
		return nil
	case unix.ENOSYS, unix.EOPNOTSUPP, unix.EINVAL, unix.EPERM, unix.EACCES: // a filter of system calls, perhaps
		return errors.ErrUnsupported
	}
	return c.readError(err)
}

// splice is one splice(2). It ends no process: Go ignores SIGPIPE of descriptors other than 1 and 2.
func splice(from, to, most int) (int, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, most, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if err != unix.EINTR {
			return int(n), err
		}
	}
}
