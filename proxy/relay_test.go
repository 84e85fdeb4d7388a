package proxy

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
)

func TestHalfClosedConnectionWithoutBytes(t *testing.T) {
	const over = `error="half-closed without a byte for 1h0m0s" response_flags="STREAM_RESET"`
	half := func(t *testing.T, limit time.Duration) (*bench, *fakeRequest, loop.Conn) {
		b := newBench(t, newMesh())
		if limit != 0 {
			b.cfg.HalfClosedTimeout = limit
		}
		req := request("1.2.3.4:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		return b, req, b.net.far[0]
	}
	isReset := func(conns ...loop.Conn) bool {
		for _, c := range conns {
			if _, then := all(c); then != loop.ErrReset.Error() {
				return false
			}
		}
		return true
	}
	for _, who := range []string{"client", "server"} {
		t.Run("FP-06 FIN of the "+who, func(t *testing.T) {
			b, req, server := half(t, 0)
			from, to := req.app, server
			if who == "server" {
				from, to = server, req.app
			}
			b.exchange(t, from, "last")
			b.Advance(59 * time.Minute)
			if text, then := all(to); text != "last" || then != "EOF" {
				t.Fatalf("the other side reads %q, then %q", text, then)
			}
			b.push(t, to, from, "one more byte") // an hour anew
			b.Advance(59*time.Minute + 59*time.Second)
			if isReset(from) {
				t.Fatal("cut within an hour of the last byte")
			}
			b.Advance(2 * time.Second)
			if !isReset(from, to) {
				t.Error("not cut after an hour without a byte")
			}
			if got := b.lines(t); !strings.Contains(got, over) {
				t.Errorf("access log %q lacks %q", got, over)
			}
		})
	}
	t.Run("FP-04 open in both directions", func(t *testing.T) {
		b, req, server := half(t, 0)
		b.Advance(100 * time.Hour)
		b.push(t, req.app, server, "still there")
		b.push(t, server, req.app, "still there")
		if n := b.Group().Stats().Timers; n != 0 {
			t.Errorf("%d timers", n)
		}
		req.app.Reset()
		b.Settle()
	})
	t.Run("the other side ends as well", func(t *testing.T) {
		b, req, server := half(t, 0)
		b.exchange(t, req.app, "x")
		if n := b.Group().Stats().Timers; n != 1 {
			t.Errorf("%d timers while it is half closed, want 1", n)
		}
		b.exchange(t, server, "y")
		if n := b.Group().Stats(); n.Timers != 0 || n.Tasks != 0 {
			t.Errorf("left: %+v", n)
		}
		if got := b.lines(t); strings.Contains(got, "error=") {
			t.Errorf("access log %q", got)
		}
	})
	t.Run("FP-06 no limit", func(t *testing.T) {
		b, req, server := half(t, -1)
		b.exchange(t, req.app, "x")
		b.Advance(100 * time.Hour)
		b.push(t, server, req.app, "still there")
		req.app.Reset()
		b.Settle()
	})
}

// A deaf Conn takes nothing more, though it goes on sending.
type deaf struct {
	loop.Conn
	err *error
}

func (d deaf) TryWrite(p []byte) (int, error) {
	if *d.err != nil {
		return 0, *d.err
	}
	return d.Conn.TryWrite(p)
}

// Once one direction cannot be written its source is not read any more, but reset: it would go on sending into nothing.
func TestDirectionThatCannotBeWritten(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		line string
	}{
		{"reset", loop.ErrReset, `response_flags="-"`},
		{"another error", errors.New("connection timed out"), `error="send: connection timed out" response_flags="STREAM_RESET"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, newMesh())
			var broken error
			b.net.wrap = func(c loop.Conn) loop.Conn { return deaf{c, &broken} }
			req := request("1.2.3.4:80")
			b.ServeTCP(t.Context(), req)
			b.Settle()
			server := b.net.far[0]
			b.push(t, req.app, server, "request")
			broken = tt.err
			server.TryWrite([]byte("answer"))
			req.app.TryWrite([]byte("more"))
			if n, err := all(req.app); n != "" || err != "" {
				t.Fatalf("before the relay's turn: %q, %q", n, err)
			}
			b.Step()
			b.Settle()
			for name, c := range map[string]loop.Conn{"client": req.app, "server": server} {
				if _, then := all(c); then != loop.ErrReset.Error() {
					t.Errorf("the %s reads %q, want a reset", name, then)
				}
			}
			if got := b.lines(t); !strings.Contains(got, tt.line) || !strings.Contains(got, "bytes_recv=6") {
				t.Errorf("access log %q lacks %q, or the answer, which had arrived", got, tt.line)
			}
			if n := b.Group().Stats(); n.Tasks != 0 {
				t.Errorf("left: %+v", n)
			}
		})
	}
}

// What broke a connection is told apart from what somebody meant.
func TestResetThatNobodyMeant(t *testing.T) {
	for _, tt := range []struct {
		name   string
		broken error
		line   string
	}{
		{"a lost tunnel", errors.New("tunnel lost: unexpected EOF"), `error="receive: tunnel lost: unexpected EOF" response_flags="STREAM_RESET"`},
		{"a reset by the peer", nil, `response_flags="-"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, newMesh())
			req := request("10.96.0.10:80")
			b.ServeTCP(t.Context(), req)
			b.Settle()
			b.tunnel.broken = tt.broken
			b.tunnel.far[0].Reset()
			b.Settle()
			if _, then := all(req.app); then != loop.ErrReset.Error() {
				t.Errorf("the client reads %q, want a reset", then)
			}
			if got := b.lines(t); !strings.Contains(got, tt.line) || tt.broken == nil && strings.Contains(got, "error=") {
				t.Errorf("access log %q lacks %q", got, tt.line)
			}
		})
	}
}

// A spliced Conn is one whose bytes the kernel moves: of each splice the destination gets a part, and the rest is the relay's.
type spliced struct {
	loop.Conn
	s *splices
}

type splices struct {
	whole, parted int
	err           error // of the next one
	stuck         bool  // moves nothing, though there is something
}

func (c spliced) TrySplice(dst loop.Conn, most int) (int, []byte, error) {
	if c.s.err != nil || c.s.stuck {
		return 0, nil, c.s.err
	}
	p := make([]byte, most)
	n, err := c.TryRead(p)
	if err == loop.ErrAgain || err == io.EOF {
		return 0, nil, nil
	}
	if err != nil {
		return 0, nil, err
	}
	part := n
	if (c.s.whole+c.s.parted)%3 == 1 {
		part = n / 2
	}
	took, err := dst.TryWrite(p[:part])
	if err != nil && err != loop.ErrAgain {
		return took, nil, &loop.SendError{Err: err}
	}
	if took == n {
		c.s.whole++
		return n, nil, nil
	}
	c.s.parted++
	return took, p[took:n], nil
}

// What is large is moved by the kernel, where both ends are its sockets.
func TestRelayHasTheKernelMoveWhatIsLarge(t *testing.T) {
	start := func(t *testing.T) (*bench, *fakeRequest, loop.Conn, *splices) {
		b, s := newBench(t, newMesh()), new(splices)
		b.net.wrap = func(c loop.Conn) loop.Conn { return spliced{c, s} }
		req := request("1.2.3.4:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		return b, req, b.net.far[0], s
	}
	var large strings.Builder
	for i := 0; large.Len() < 3<<20; i++ {
		fmt.Fprintf(&large, "%d ", i)
	}
	text := large.String()

	t.Run("every byte, and the end", func(t *testing.T) {
		b, req, server, s := start(t)
		b.push(t, server, req.app, "small")
		if s.whole+s.parted != 0 {
			t.Errorf("%+v: what is small is read and written", *s)
		}
		b.push(t, server, req.app, text)
		if s.whole == 0 || s.parted == 0 {
			t.Errorf("%+v: not all kinds of splices were taken", *s)
		}
		s.stuck = true // before an urgent byte, which only a read gets past
		b.push(t, server, req.app, text)
		s.stuck = false
		b.push(t, req.app, server, "the other direction")
		b.exchange(t, server, "last")
		if got, then := all(req.app); got != "last" || then != "EOF" {
			t.Errorf("the client reads %q, then %q", got, then)
		}
		b.exchange(t, req.app, "")
		want := fmt.Sprintf("bytes_sent=19 bytes_recv=%d", len("small")+2*len(text)+len("last"))
		if got := b.lines(t); !strings.Contains(got, want) {
			t.Errorf("access log %q lacks %q", got, want)
		}
	})
	t.Run("what the kernel cannot move", func(t *testing.T) {
		b, req, server, s := start(t)
		s.err = errors.ErrUnsupported
		b.push(t, server, req.app, text)
		s.err = nil
		b.push(t, server, req.app, text)
		if s.whole+s.parted != 0 {
			t.Errorf("%+v: it is asked again", *s)
		}
		req.app.Reset()
		b.Settle()
	})
	t.Run("an error of the destination", func(t *testing.T) {
		b, req, server, s := start(t)
		b.push(t, server, req.app, text[:64<<10])
		s.err = &loop.SendError{Err: errors.New("no route to host")}
		server.TryWrite([]byte(text[:64<<10]))
		b.Settle()
		if _, then := all(server); then != loop.ErrReset.Error() {
			t.Errorf("the server reads %q, want a reset", then)
		}
		if got := b.lines(t); !strings.Contains(got, `error="receive: no route to host"`) {
			t.Errorf("access log %q", got)
		}
	})
}

// A peeked Conn knows how much there is to read: it has read it.
type peeked struct {
	loop.Conn
	ahead []byte
}

func (c *peeked) Readable() int {
	p := make([]byte, 300<<10)
	n, _ := c.Conn.TryRead(p)
	c.ahead = append(c.ahead, p[:n]...)
	return len(c.ahead)
}

func (c *peeked) TryRead(p []byte) (int, error) {
	if len(c.ahead) == 0 {
		return c.Conn.TryRead(p)
	}
	n := copy(p, c.ahead)
	c.ahead = c.ahead[n:]
	return n, nil
}

// A filled Conn reads by itself what it sends.
type filled struct {
	loop.Conn
	f *fills
}

type fills struct {
	whole, parted int
	most          int   // bytes that were asked for at once
	err           error // of the next one
	stuck         bool  // moves nothing, though there is something
}

func (c filled) TryFill(src loop.Measured, most int) (int, error) {
	if c.f.err != nil || c.f.stuck {
		return 0, c.f.err
	}
	c.f.most = max(c.f.most, most)
	s := src.(*peeked)
	want := min(s.Readable(), most)
	n, err := c.TryWrite(s.ahead[:want])
	s.ahead = s.ahead[n:]
	switch {
	case want == 0 || err != nil:
	case n < want:
		c.f.parted++
		err = loop.ErrAgain
	default:
		c.f.whole++
	}
	return n, err
}

// What is large is read by the destination itself, where it can.
func TestRelayHasTheDestinationReadWhatIsLarge(t *testing.T) {
	start := func(t *testing.T) (*bench, *fakeRequest, loop.Conn, *fills) {
		b, f := newBench(t, newMesh()), new(fills)
		b.net.wrap = func(c loop.Conn) loop.Conn { return &peeked{Conn: c} }
		req := request("1.2.3.4:80")
		req.wrap = func(c loop.Conn) loop.Conn { return filled{c, f} }
		b.ServeTCP(t.Context(), req)
		b.Settle()
		return b, req, b.net.far[0], f
	}
	var large strings.Builder
	for i := 0; large.Len() < 3<<20; i++ {
		fmt.Fprintf(&large, "%d ", i)
	}
	text := large.String()

	t.Run("every byte, and the end", func(t *testing.T) {
		b, req, server, f := start(t)
		b.push(t, server, req.app, "small")
		if f.whole+f.parted != 0 {
			t.Errorf("%+v: what is small is read and written", *f)
		}
		b.push(t, server, req.app, text)
		if f.whole == 0 || f.most > 128<<10 {
			t.Errorf("%+v: what is large is read and written, or more than the share of a turn at once", *f)
		}
		b.push(t, req.app, server, "the other direction")
		before := *f
		for range 4 { // until the application's buffer, of 256 KiB, is full
			if _, err := server.TryWrite([]byte(text[:200<<10])); err != nil && err != loop.ErrAgain {
				t.Fatal(err)
			}
			b.Settle()
		}
		if f.parted == before.parted {
			t.Errorf("%+v: nothing was too much; the test is to see that", *f)
		}
		held := ""
		for part, _ := all(req.app); part != ""; part, _ = all(req.app) {
			held += part
			b.Settle()
		}
		if want := strings.Repeat(text[:200<<10], 4); len(held) < 256<<10 || !strings.HasPrefix(want, held) {
			t.Errorf("%d bytes arrived behind a full buffer, or others", len(held))
		}
		f.stuck = true // before an urgent byte, which only a read gets past
		b.push(t, server, req.app, text)
		f.stuck = false
		b.exchange(t, server, "last")
		if got, then := all(req.app); got != "last" || then != "EOF" {
			t.Errorf("the client reads %q, then %q", got, then)
		}
		b.exchange(t, req.app, "")
		want := fmt.Sprintf("bytes_sent=19 bytes_recv=%d", len("small")+2*len(text)+len(held)+len("last"))
		if got := b.lines(t); !strings.Contains(got, want) {
			t.Errorf("access log %q lacks %q", got, want)
		}
	})
	t.Run("small ones after large ones are read and written", func(t *testing.T) {
		b, req, server, f := start(t)
		b.push(t, server, req.app, text)
		b.push(t, server, req.app, "small")
		before := *f
		b.push(t, server, req.app, "small")
		if *f != before {
			t.Errorf("%+v, before %+v", *f, before)
		}
		req.app.Reset()
		b.Settle()
	})
	t.Run("FP-09 while memory is full little is read", func(t *testing.T) {
		b, f := newBench(t, newMesh()), new(fills)
		b.cfg.Budget = loop.NewBudget(1 << 20)
		b.net.wrap = func(c loop.Conn) loop.Conn { return &peeked{Conn: c} }
		req := request("1.2.3.4:80")
		req.wrap = func(c loop.Conn) loop.Conn { return filled{c, f} }
		b.ServeTCP(t.Context(), req)
		b.Settle()
		b.push(t, b.net.far[0], req.app, text)
		before := *f
		hog := loop.NewAccount(b.cfg.Budget)
		hog.Set(1 << 20)
		b.push(t, b.net.far[0], req.app, text)
		hog.Set(0)
		if before.whole == 0 || *f != before {
			t.Errorf("%+v, before memory was full %+v", *f, before)
		}
		req.app.Reset()
		b.Settle()
	})
	t.Run("what is left of a turn is no sign of little", func(t *testing.T) {
		near, far := loop.Pipe()
		app, _ := loop.Pipe()
		far.TryWrite([]byte(text[:200<<10]))
		h := newHalf("receive", &peeked{Conn: near}, filled{app, new(fills)}, new(atomic.Uint64))
		h.bulk = true
		if n, err := h.uncopied(1000); n != 1000 || err != nil || !h.bulk {
			t.Errorf("%d bytes of 1000, %v; there is as much as before: %v", n, err, h.bulk)
		}
	})
	t.Run("a source that does not know what it has", func(t *testing.T) {
		near, _ := loop.Pipe()
		if h := newHalf("receive", near, filled{near, new(fills)}, new(atomic.Uint64)); h.filler != nil || h.measured != nil {
			t.Errorf("%+v: the destination is to read from it", h)
		}
	})
	t.Run("an error", func(t *testing.T) {
		b, req, server, f := start(t)
		b.push(t, server, req.app, text[:64<<10])
		f.err = errors.New("no memory")
		server.TryWrite([]byte(text[:64<<10]))
		b.Settle()
		if _, then := all(server); then != loop.ErrReset.Error() {
			t.Errorf("the server reads %q, want a reset", then)
		}
		if got := b.lines(t); !strings.Contains(got, `error="receive: no memory"`) {
			t.Errorf("access log %q", got)
		}
	})
}
