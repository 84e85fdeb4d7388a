package loop

import (
	"errors"
	"net/netip"
	"syscall"
)

// ErrAgain means that nothing can be read, or nothing can be written, without waiting. Once the condition ends, the Ref
// that the Conn is attached to is woken.
var ErrAgain = errors.New("loop: nothing to move now")

// ErrReset means that the connection was reset: by the peer, by the network, or by Reset.
var ErrReset error = resetError{}

// resetError is ErrReset; it is also syscall.ECONNRESET for errors.Is, so that blocking views behave as sockets do.
type resetError struct{}

func (resetError) Error() string { return "loop: connection reset" }

func (resetError) Is(target error) bool { return target == syscall.ECONNRESET }

// A Conn is one end of an established connection, driven by an event loop: nothing blocks, and nothing is held while it
// is idle. Netstack endpoints, kernel sockets, HBONE streams and Pipe ends implement it.
//
// After Attach, every method but LocalAddr and RemoteAddr is called on the loop of the Ref only.
type Conn interface {
	// TryRead reads what is there now, at most len(p) bytes. It returns ErrAgain when that is nothing, io.EOF once the
	// peer's FIN was reached, and ErrReset (or the error of the transport) when the connection broke. It never returns
	// bytes together with an error.
	TryRead(p []byte) (int, error)

	// TryWrite takes as much of p as it can now, perhaps less than len(p), and returns ErrAgain when it takes nothing.
	// p is the caller's again when the call returns.
	TryWrite(p []byte) (int, error)

	// CloseWrite sends a FIN after everything that TryWrite accepted.
	CloseWrite() error

	// Reset ends the connection at once: bytes that were accepted but not yet sent are dropped and the peer sees a
	// reset. It releases the Conn, as Close does.
	Reset() error

	// Close releases the Conn. Bytes that were accepted are still delivered.
	Close() error

	// Attach makes the readiness of the Conn wake r from now on, and wakes r once at once, for what came before. It is
	// called on the loop of r. Attach(nil) detaches: it is called on the loop of the Ref attached so far.
	Attach(r *Ref) error

	// LocalAddr and RemoteAddr are the ends of the connection as the peer sees them; safe from any goroutine.
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort
}

// Vectored is implemented by Conns that move several buffers in one call, with the errors of TryRead and TryWrite.
type Vectored interface {
	TryReadv(bufs [][]byte) (int, error)
	TryWritev(bufs [][]byte) (int, error)
}

// Sender is implemented by Conns that hold received bytes in their own memory and can write them straight to another Conn:
// at most max bytes are moved, without a copy in between. It has the errors of TryRead; an error of dst is wrapped in a
// *SendError, and what dst did not take stays readable.
type Sender interface {
	TryWriteTo(dst Conn, max int) (int, error)
}

// Splicer is implemented by Conns of the kernel, which moves bytes between two of them that nobody has to see: at most max, of which
// n reached dst and rest did not; those are the caller's. Nothing, without an error, says that TryRead has to be asked why. An error of
// dst is wrapped in a *SendError. errors.ErrUnsupported itself says that these two have to be read and written.
type Splicer interface {
	TrySplice(dst Conn, max int) (n int, rest []byte, err error)
}

// Measured is implemented by Conns that know how much there is to read: TryRead brings the next Readable bytes, in as many calls as it
// takes, before it has nothing or an error. 0 says nothing about what TryRead would return.
type Measured interface {
	Conn
	Readable() int
}

// Filler is implemented by Conns that a source can be read into without a copy in between: at most max bytes, of those that are there.
// It has the errors of TryWrite, ErrAgain also when some bytes were taken and no more are now, and those of src but for its end; nothing,
// without an error, says that TryRead of src has to be asked why.
type Filler interface {
	TryFill(src Measured, max int) (int, error)
}

// Checked is implemented by Conns that tell whether they broke without being read: a relay that cannot write on what it would
// read has no other way to learn that its sender has gone. Bytes that were not read are lost then, as those of a TCP connection
// that was reset.
type Checked interface {
	Check() error // nil, or the error that TryRead returns in the end
}

// Backlogged is implemented by Conns whose transport holds what it has received until it is read, and grows the room for it with the
// rate. Where many share the connection that is a queue in front of all of them: BoundBacklog bounds it for a near peer.
type Backlogged interface {
	BoundBacklog()
}

// Fed is implemented by Conns whose bytes come from a task: what moves them on is best beside it (Ref.Beside).
type Fed interface {
	Feeder() *Ref // nil: none
}

// A SendError tells that the writing side of TryWriteTo failed, not the reading one. Err is never ErrAgain.
type SendError struct{ Err error }

func (e *SendError) Error() string { return e.Err.Error() }

// Unwrap returns the error of the writing side.
func (e *SendError) Unwrap() error { return e.Err }

// A Task moves the bytes of one tunnel or one relay. Turn runs on the task's loop, alone. It moves at most about budget
// bytes in each direction and reports whether more can be moved without waiting: if so, it gets another turn after the
// others had theirs; if not, its next turn comes after a Wake.
//
// A Task that implements fmt.Stringer is named so in the report of Group.Run.
type Task interface {
	Turn(budget int) (more bool)
}
