package stack

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/waiter"

	"ztun.dev/ztun/internal/loop"
)

// TestConnIsANetConn runs all of nettest over a blocking view of a netstack connection and the application's socket. A net.Conn has no
// half-close and no reset: TestHalfClose and TestReset have them.
func TestConnIsANetConn(t *testing.T) {
	for kind := range devices {
		t.Run(kind, func(t *testing.T) {
			l := newLive(t, kind)
			nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
				c, app := l.connect(flow4)
				b := l.g.Blocking(l.ctx, c)
				return b, app, func() { b.Close(); app.Close() }, nil
			})
		})
	}
}

// transfer sends n random bytes each way, verifies them and the ends of both streams.
func transfer(t *testing.T, a, b halfCloser, n int64) {
	t.Helper()
	var wg sync.WaitGroup
	send := func(name string, w halfCloser, seed uint64, sum *[32]byte) {
		h := sha256.New()
		src := io.LimitReader(rand.NewChaCha8([32]byte{byte(seed)}), n)
		if _, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(w, h)}, src, make([]byte, 100_000)); err != nil {
			t.Errorf("%s: write: %v", name, err)
		}
		if err := w.CloseWrite(); err != nil {
			t.Errorf("%s: close write: %v", name, err)
		}
		h.Sum(sum[:0])
	}
	receive := func(name string, r io.Reader, sum *[32]byte) {
		h := sha256.New()
		got, err := io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{r}, make([]byte, 100_000))
		if err != nil || got != n {
			t.Errorf("%s: read %d bytes, %v, want %d", name, got, err, n)
		}
		h.Sum(sum[:0])
	}
	var sent, got [2][32]byte
	wg.Go(func() { send("a", a, 1, &sent[0]) })
	wg.Go(func() { send("b", b, 2, &sent[1]) })
	wg.Go(func() { receive("b", b, &got[0]) })
	wg.Go(func() { receive("a", a, &got[1]) })
	wg.Wait()
	if sent != got {
		t.Errorf("checksums differ: sent %x, got %x", sent, got)
	}
}

type halfCloser interface {
	net.Conn
	CloseWrite() error
}

func TestBytesBothWays(t *testing.T) {
	for kind := range devices {
		for _, flow := range []Flow{flow4, flow6} {
			t.Run(fmt.Sprint(kind, " ", flow.Src.Addr()), func(t *testing.T) {
				l := newLive(t, kind)
				b, app := l.pair(flow)
				defer b.Close()
				defer app.Close()
				transfer(t, b, app, 20<<20)
				for i, n := range l.s.Stats().Drops {
					if n != 0 && DropReason(i) != DropWrite {
						t.Errorf("%d packets dropped: %v", n, DropReason(i))
					}
				}
			})
		}
	}
}

func TestHalfClose(t *testing.T) {
	ends := func(l *live, swap bool) (x, y halfCloser) {
		b, app := l.pair(flow4)
		if swap {
			return app, b
		}
		return b, app
	}
	for _, swap := range []bool{false, true} {
		t.Run(fmt.Sprintf("FP-05 application=%v", swap), func(t *testing.T) {
			l := newLive(t, "memory")
			x, y := ends(l, swap)
			defer x.Close()
			defer y.Close()
			if _, err := x.Write([]byte("question")); err != nil {
				t.Fatal(err)
			}
			if err := x.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(y); string(got) != "question" || err != nil {
				t.Fatalf("read %q, %v, want the question and EOF", got, err)
			}
			if _, err := y.Write([]byte("answer")); err != nil {
				t.Fatal(err)
			}
			if err := y.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(x); string(got) != "answer" || err != nil {
				t.Fatalf("read %q, %v, want the answer and EOF", got, err)
			}
		})
	}
}

func TestCloseDeliversWhatWasAccepted(t *testing.T) {
	l := newLive(t, "memory")
	b, app := l.pair(flow4)
	defer app.Close()
	if _, err := app.Write([]byte("never read")); err != nil {
		t.Fatal(err)
	}
	c := b.Detach()
	data := bytes.Repeat([]byte("0123456789abcdef"), 40_000)
	n, err := c.TryWrite(data)
	if n == 0 || err != nil {
		t.Fatalf("TryWrite = %d, %v", n, err)
	}
	waitFor(t, "the application's bytes are there", func() bool { return c.(*conn).ep.Readiness(readable) != 0 })
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(app)
	if err != nil || !bytes.Equal(got, data[:n]) {
		t.Errorf("the application read %d bytes, %v, want the %d that were accepted", len(got), err, n)
	}
	if _, err := c.TryRead(make([]byte, 1)); !errors.Is(err, loop.ErrReset) {
		t.Errorf("TryRead after Close = %v, want %v", err, loop.ErrReset)
	}
}

func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for limit := time.Now().Add(10 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("after 10 s still not: %s", what)
		}
	}
}

func TestReset(t *testing.T) {
	t.Run("of the stack's end is seen by the application", func(t *testing.T) {
		l := newLive(t, "memory")
		b, app := l.pair(flow6)
		defer app.Close()
		if err := b.Reset(); err != nil {
			t.Fatal(err)
		}
		if _, err := app.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("the application read %v, want a reset", err)
		}
	})
	t.Run("of the application is seen by the stack's end", func(t *testing.T) {
		r := newRig(t, nil)
		c, seq := r.handshake(flow4, 1000)
		defer c.Close()
		r.send(segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK | flagPSH, data: []byte("last words")}.packet())
		r.send(segment{flow: flow4, seq: 1011, ack: seq, flags: flagRST}.packet())
		r.until("the endpoint is reset", func() bool { ep, _ := r.s.find(flow4); return ep == nil })
		buf := make([]byte, 100)
		if n, err := c.TryRead(buf); string(buf[:n]) != "last words" || err != nil {
			t.Errorf("TryRead = %q, %v, want what came before the RST", buf[:n], err)
		}
		for range 2 {
			if _, err := c.TryRead(buf); !errors.Is(err, loop.ErrReset) || !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("TryRead = %v, want %v", err, loop.ErrReset)
			}
			if _, err := c.TryWrite(buf); !errors.Is(err, loop.ErrReset) {
				t.Errorf("TryWrite = %v, want %v", err, loop.ErrReset)
			}
		}
	})
	t.Run("of the application is seen although nothing is read", func(t *testing.T) {
		r := newRig(t, nil)
		conn, seq := r.handshake(flow4, 1000)
		defer conn.Close()
		c := conn.(loop.Checked)
		r.send(segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK | flagPSH, data: []byte("unread")}.packet())
		if err := c.Check(); err != nil {
			t.Errorf("Check = %v before the reset", err)
		}
		r.send(segment{flow: flow4, seq: 1007, ack: seq, flags: flagRST}.packet())
		r.until("the endpoint is reset", func() bool { return c.Check() != nil })
		if err := c.Check(); !errors.Is(err, loop.ErrReset) {
			t.Errorf("Check = %v, want %v", err, loop.ErrReset)
		}
	})
	t.Run("after the application's FIN", func(t *testing.T) {
		r := newRig(t, nil)
		c, seq := r.handshake(flow4, 1000)
		defer c.Close()
		r.send(segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK | flagFIN}.packet())
		r.until("EOF", func() bool { _, err := c.TryRead(make([]byte, 1)); return errors.Is(err, io.EOF) })
		r.send(segment{flow: flow4, seq: 1002, ack: seq, flags: flagRST}.packet())
		r.until("the reset", func() bool { _, err := c.TryRead(make([]byte, 1)); return errors.Is(err, loop.ErrReset) })
		if _, err := c.TryWrite([]byte("x")); !errors.Is(err, loop.ErrReset) {
			t.Errorf("TryWrite = %v, want %v", err, loop.ErrReset)
		}
	})
	t.Run("sends RST although bytes wait both ways", func(t *testing.T) {
		r := newRig(t, nil)
		c, seq := r.handshake(flow4, 1000)
		r.send(segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK, data: []byte("unread")}.packet())
		if _, err := c.TryWrite(make([]byte, 200_000)); err != nil {
			t.Fatal(err)
		}
		r.received()
		if err := c.Reset(); err != nil {
			t.Fatal(err)
		}
		if p, _ := r.parsed(r.one()); p.flags&flagRST == 0 {
			t.Errorf("flags %#x, want RST", p.flags)
		}
		if ep, _ := r.s.find(flow4); ep != nil {
			t.Error("the endpoint is still there")
		}
	})
}

func TestWriteAfterCloseWrite(t *testing.T) {
	r := newRig(t, nil)
	c, _ := r.handshake(flow4, 1000)
	defer c.Reset()
	for range 2 {
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
	}
	if p, _ := r.parsed(r.one()); p.flags&flagFIN == 0 {
		t.Errorf("flags %#x, want FIN", p.flags)
	}
	if _, err := c.TryWrite([]byte("x")); err == nil || errors.Is(err, loop.ErrAgain) {
		t.Errorf("TryWrite = %v, want an error", err)
	}
}

func TestWriteStopsAtTheBuffer(t *testing.T) {
	r := newRig(t, nil)
	c, _ := r.handshake(flow4, 1000)
	defer c.Reset()
	total, chunk := 0, make([]byte, 300_000)
	var err error
	for err == nil && total < 100<<20 {
		var n int
		n, err = c.TryWrite(chunk)
		total += n
	}
	if !errors.Is(err, loop.ErrAgain) || total != bufferSize {
		t.Errorf("took %d bytes, then %v; want %d, then %v", total, err, bufferSize, loop.ErrAgain)
	}
	if n, err := c.TryWrite(nil); n != 0 || err != nil {
		t.Errorf("TryWrite(nil) = %d, %v", n, err)
	}
	if _, err := c.TryRead(make([]byte, 1)); !errors.Is(err, loop.ErrAgain) {
		t.Errorf("TryRead = %v, want %v", err, loop.ErrAgain)
	}
}

func TestDeadApplication(t *testing.T) {
	probes := func(r *rig) (n int) {
		for _, b := range r.received() {
			if p, _ := r.parsed(b); p.flags == flagACK {
				n++
			}
		}
		return n
	}
	t.Run("FP-03 is found within 90 s when idle", func(t *testing.T) {
		r := newRig(t, nil)
		c, _ := r.handshake(flow4, 1000)
		defer c.Close()
		r.m.Advance(89 * time.Second)
		if n := probes(r); n != DefaultKeepaliveRetries {
			t.Errorf("%d probes in 89 s, want %d", n, DefaultKeepaliveRetries)
		}
		if _, err := c.TryRead(make([]byte, 1)); !errors.Is(err, loop.ErrAgain) {
			t.Errorf("after 89 s TryRead = %v, want %v", err, loop.ErrAgain)
		}
		r.m.Advance(2 * time.Second)
		for range 2 {
			if _, err := c.TryRead(make([]byte, 1)); !errors.Is(err, syscall.ETIMEDOUT) {
				t.Errorf("after 91 s TryRead = %v, want %v", err, syscall.ETIMEDOUT)
			}
		}
	})
	t.Run("FP-03 is found within 90 s with data on the way", func(t *testing.T) {
		r := newRig(t, nil)
		c, _ := r.handshake(flow4, 1000)
		defer c.Close()
		if _, err := c.TryWrite([]byte("into the void")); err != nil {
			t.Fatal(err)
		}
		r.m.Advance(91 * time.Second)
		if _, err := c.TryRead(make([]byte, 1)); !errors.Is(err, syscall.ETIMEDOUT) {
			t.Errorf("after 91 s TryRead = %v, want %v", err, syscall.ETIMEDOUT)
		}
	})
	t.Run("FP-04 an idle one that answers stays", func(t *testing.T) {
		r := newRig(t, nil)
		c, seq := r.handshake(flow4, 1000)
		defer c.Reset()
		for range 60 {
			r.m.Advance(time.Minute)
			if probes(r) > 0 {
				r.send(segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK}.packet())
				r.until("the answer is taken", func() bool { return c.(*conn).ep.Readiness(readable) == 0 })
			}
		}
		if _, err := c.TryRead(make([]byte, 1)); !errors.Is(err, loop.ErrAgain) {
			t.Errorf("after an hour TryRead = %v, want %v", err, loop.ErrAgain)
		}
	})
	t.Run("FP-01 a closed connection lingers in bounded time", func(t *testing.T) {
		r := newRig(t, nil)
		c, seq := r.handshake(flow4, 1000)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		p, _ := r.parsed(r.one())
		r.send(segment{flow: flow4, seq: 1001, ack: p.seq + 1, flags: flagACK}.packet())
		r.until("FIN-WAIT-2", func() bool { _, s := r.s.find(flow4); return s.String() == "FIN-WAIT2" })
		_ = seq
		r.m.Advance(finWait2)
		r.until("the endpoint is gone", func() bool { ep, _ := r.s.find(flow4); return ep == nil })
	})
}

// tryer is a Conn that takes a limited number of bytes at a time.
type tryer struct {
	loop.Conn
	got  []byte
	room int
	err  error
}

func (c *tryer) TryWrite(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	n := min(len(p), c.room)
	if n == 0 {
		return 0, loop.ErrAgain
	}
	c.room -= n
	c.got = append(c.got, p[:n]...)
	return n, nil
}

func TestTryWriteTo(t *testing.T) {
	r := newRig(t, nil)
	c, seq := r.handshake(flow4, 1000)
	defer c.Reset()
	from := c.(loop.Sender)
	var want []byte
	for i := range 4 {
		data := bytes.Repeat([]byte{byte('a' + i)}, 1000)
		r.send(segment{flow: flow4, seq: 1001 + uint32(len(want)), ack: seq, flags: flagACK, data: data}.packet())
		want = append(want, data...)
	}
	r.until("all bytes are there", func() bool {
		n, _ := c.(*conn).ep.GetSockOptInt(receiveQueue)
		return n == len(want)
	})
	dst := &tryer{}
	steps := []struct {
		room, limit int
		fail        error // of dst
		wantN       int
		wantErr     error // if nil, fail in a SendError
	}{
		{0, 5000, nil, 0, loop.ErrAgain},
		{500, 5000, nil, 500, nil},
		{9999, 700, nil, 700, nil},
		{1000, 5000, nil, 1000, nil},
		{9999, 0, nil, 0, nil},
		{9999, 5000, io.ErrClosedPipe, 0, nil},
		{9999, 5000, nil, 1800, nil},
		{9999, 5000, nil, 0, loop.ErrAgain},
	}
	for i, s := range steps {
		dst.room, dst.err = s.room, s.fail
		n, err := from.TryWriteTo(dst, s.limit)
		var failed *loop.SendError
		if got := errors.As(err, &failed); got != (s.fail != nil) || got && !errors.Is(failed.Err, s.fail) {
			t.Errorf("step %d: TryWriteTo: %v, want %v of dst", i, err, s.fail)
		} else if n != s.wantN || !got && !errors.Is(err, s.wantErr) {
			t.Errorf("step %d: TryWriteTo = %d, %v, want %d, %v", i, n, err, s.wantN, s.wantErr)
		}
	}
	if !bytes.Equal(dst.got, want) {
		t.Errorf("the other side got %d bytes that differ from the %d sent", len(dst.got), len(want))
	}
}

const (
	readable     = waiter.ReadableEvents
	receiveQueue = tcpip.ReceiveQueueSizeOption
)

func TestIdleConnectionsHoldNoGoroutine(t *testing.T) {
	r := newRig(t, nil)
	before := runtime.NumGoroutine()
	for i := range 200 {
		c, _ := r.handshake(flowN(i), 1)
		defer c.Reset()
	}
	if n := runtime.NumGoroutine() - before; n > 20 {
		t.Errorf("200 idle connections hold %d goroutines", n)
	}
}
