package underlay

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// A splicer moves bytes from one Conn to another as a relay does.
type splicer struct {
	r        *loop.Ref
	from, to *Conn
	rest     []byte
	behind   int // how often to did not take everything
	done     chan error
}

func (s *splicer) Turn(int) bool {
	for {
		var n int
		var err error
		if len(s.rest) > 0 {
			n, err = s.to.TryWrite(s.rest)
			s.rest = s.rest[n:]
		} else if n, s.rest, err = s.from.TrySplice(s.to, pipeBytes); len(s.rest) > 0 {
			s.behind++
		} else if n == 0 && err == nil {
			s.rest = make([]byte, 64<<10)
			n, err = s.from.TryRead(s.rest)
			s.rest = s.rest[:n]
		}
		switch err {
		case nil:
		case loop.ErrAgain:
			return false
		case io.EOF:
			s.end(s.to.CloseWrite())
			return false
		default:
			s.end(err)
			return false
		}
	}
}

func (s *splicer) end(err error) {
	s.done <- err
	s.from.Close()
	s.to.Close()
	s.r.Remove()
}

// pairs listens, and returns what opens a connection and returns both ends of it.
func pairs(t *testing.T, u *Underlay) func(t *testing.T) (client, server *Conn) {
	t.Helper()
	a, conns := listen(t, u, "127.0.0.1")
	return func(t *testing.T) (client, server *Conn) {
		t.Helper()
		c, err := u.Dial(t.Context(), a)
		if err != nil {
			t.Fatal(err)
		}
		return c.(*Conn), (<-conns).(*Conn)
	}
}

func TestNetnsSplice(t *testing.T) {
	u := newUnderlay(t)
	open := pairs(t, u)
	t.Run("every byte, in order, past a reader that pauses", func(t *testing.T) {
		first, from := open(t)
		to, last := open(t)
		if err := unix.SetsockoptInt(to.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 64<<10); err != nil {
			t.Fatal(err)
		}
		w, r := u.cfg.Group.Blocking(t.Context(), first), u.cfg.Group.Blocking(t.Context(), last)
		defer w.Close()
		defer r.Close()
		s := &splicer{from: from, to: to, done: make(chan error, 1)}
		u.cfg.Group.Add(func(ref *loop.Ref) loop.Task {
			s.r = ref
			if err := errors.Join(from.Attach(ref), to.Attach(ref)); err != nil {
				t.Error(err)
			}
			return s
		})
		const total = 64 << 20
		sent := make(chan []byte, 1)
		go func() {
			sum, random := sha256.New(), rand.NewChaCha8([32]byte{1})
			buf := make([]byte, 200_000)
			for left := total; left > 0; {
				p := buf[:min(left, 1+rand.IntN(len(buf)))]
				random.Read(p)
				sum.Write(p)
				if _, err := w.Write(p); err != nil {
					t.Error(err)
					break
				}
				left -= len(p)
			}
			if err := w.CloseWrite(); err != nil {
				t.Error(err)
			}
			sent <- sum.Sum(nil)
		}()
		sum := sha256.New()
		buf := make([]byte, 1<<20)
		got := 0
		for i := 0; ; i++ {
			n, err := r.Read(buf)
			sum.Write(buf[:n])
			got += n
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if i%16 == 0 { // until everything behind it is full
				time.Sleep(5 * time.Millisecond)
			}
		}
		if err := <-s.done; err != nil {
			t.Errorf("the end: %v", err)
		}
		if want := <-sent; got != total || !bytes.Equal(sum.Sum(nil), want) {
			t.Errorf("%d bytes with another sum, want %d", got, total)
		}
		if s.behind == 0 {
			t.Error("the destination took everything at once: nothing was tested")
		}
	})
	t.Run("nothing to read, the end, and none of the kernel", func(t *testing.T) {
		first, from := open(t)
		to, last := open(t)
		defer from.Close()
		defer to.Close()
		defer last.Close()
		if n, rest, err := from.TrySplice(to, 100); n != 0 || rest != nil || err != nil {
			t.Errorf("with nothing to read: %d, %q, %v", n, rest, err)
		}
		memory, other := loop.Pipe()
		defer memory.Close()
		defer other.Close()
		if _, _, err := from.TrySplice(memory, 100); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("to a Conn in memory: %v, want ErrUnsupported", err)
		}
		first.Close()
		if n, rest, err := from.TrySplice(to, 100); n != 0 || rest != nil || err != nil {
			t.Errorf("at the end: %d, %q, %v", n, rest, err)
		}
		if _, err := from.TryRead(make([]byte, 1)); err != io.EOF {
			t.Errorf("at the end a read says %v, want EOF", err)
		}
	})
	t.Run("past an urgent byte", func(t *testing.T) {
		first, from := open(t)
		to, last := open(t)
		r := u.cfg.Group.Blocking(t.Context(), last)
		defer r.Close()
		part := bytes.Repeat([]byte("0123456789abcdef"), 4<<10)
		write := func(p []byte, flags int) {
			t.Helper()
			if n, err := unix.SendmsgN(first.fd, p, nil, nil, flags); n != len(p) || err != nil {
				t.Fatalf("%d of %d bytes: %v", n, len(p), err)
			}
		}
		write(part, 0)
		write([]byte("!"), unix.MSG_OOB)
		write(part, 0)
		first.Close()
		s := &splicer{from: from, to: to, done: make(chan error, 1)}
		u.cfg.Group.Add(func(ref *loop.Ref) loop.Task {
			s.r = ref
			if err := errors.Join(from.Attach(ref), to.Attach(ref)); err != nil {
				t.Error(err)
			}
			return s
		})
		got, err := io.ReadAll(r)
		if want := append(slices.Clone(part), part...); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes and %v, want the %d around it", len(got), err, len(want))
		}
		if err := <-s.done; err != nil {
			t.Errorf("the end: %v", err)
		}
	})
	t.Run("a reset of the source", func(t *testing.T) {
		first, from := open(t)
		to, last := open(t)
		defer from.Close()
		defer to.Close()
		defer last.Close()
		first.Reset()
		if _, _, err := from.TrySplice(to, 100); !errors.Is(err, loop.ErrReset) {
			t.Errorf("%v, want ErrReset", err)
		}
	})
	t.Run("a reset of the destination", func(t *testing.T) {
		first, from := open(t)
		to, last := open(t)
		defer first.Close()
		defer from.Close()
		defer to.Close()
		if _, err := first.TryWrite([]byte("for nobody")); err != nil {
			t.Fatal(err)
		}
		last.Reset()
		var send *loop.SendError
		if _, _, err := from.TrySplice(to, 100); !errors.As(err, &send) || !errors.Is(err, loop.ErrReset) {
			t.Errorf("%v, want the reset as a SendError", err)
		}
	})
}
