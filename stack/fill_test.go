package stack

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A store is a Conn with bytes that are there already, and an error behind them.
type store struct {
	loop.Conn
	data   []byte
	err    error
	claims int // more than there are
	reads  int
}

func (s *store) Readable() int { return len(s.data) + s.claims }

func (s *store) TryRead(p []byte) (int, error) {
	s.reads++
	if len(s.data) == 0 {
		return 0, s.err
	}
	n := copy(p, s.data)
	s.data = s.data[n:]
	return n, nil
}

func TestTryFill(t *testing.T) {
	reset := errors.New("reset by peer")
	for _, tt := range []struct {
		name  string
		src   store
		limit int
		n     int
		err   error // is, or is in, what is returned
		left  int   // in src
		lost  bool  // bytes were read and are nowhere
		used  int   // bytes that the buffer holds before
	}{
		{name: "nothing there", src: store{err: reset}, limit: 1000},
		{name: "no more than asked for", src: store{data: make([]byte, 5000)}, limit: 3000, n: 3000, left: 2000},
		{name: "several buffers", src: store{data: make([]byte, 300_000)}, limit: 1 << 20, n: 300_000},
		{name: "no more than fits", src: store{data: make([]byte, 300_000)}, limit: 1 << 20, used: bufferSize - 100_001, n: 100_001, err: loop.ErrAgain, left: 199_999},
		{name: "nothing fits", src: store{data: make([]byte, 300_000)}, limit: 1 << 20, used: bufferSize, err: loop.ErrAgain, left: 300_000},
		{name: "broke before the first byte", src: store{claims: 10, err: reset}, limit: 1000, err: reset},
		{name: "nothing there after all", src: store{claims: 10, err: loop.ErrAgain}, limit: 1000},
		{name: "ended before the first byte", src: store{claims: 10, err: io.EOF}, limit: 1000},
		{name: "broke between two buffers", src: store{data: make([]byte, 64<<10), claims: 10, err: reset}, limit: 1 << 20, err: reset, lost: true},
		{name: "ended between two buffers", src: store{data: make([]byte, 64<<10), claims: 10, err: io.EOF}, limit: 1 << 20, err: io.ErrUnexpectedEOF, lost: true},
		{name: "broke in a buffer", src: store{data: make([]byte, 10), claims: 10, err: loop.ErrAgain}, limit: 1 << 20, err: loop.ErrAgain, lost: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, nil)
			c, _ := r.handshake(flow4, 1000)
			defer c.Reset()
			if n, err := c.TryWrite(make([]byte, tt.used)); n != tt.used || err != nil {
				t.Fatalf("TryWrite = %d, %v", n, err)
			}
			src := tt.src
			n, err := c.(loop.Filler).TryFill(&src, tt.limit)
			if n != tt.n || !errors.Is(err, tt.err) || len(src.data) != tt.left {
				t.Errorf("TryFill = %d, %v, and %d bytes are left; want %d, %v, %d", n, err, len(src.data), tt.n, tt.err, tt.left)
			}
			if tt.lost && (err == loop.ErrAgain || err == io.EOF) {
				t.Errorf("TryFill returns a plain %v although bytes are lost", err)
			}
			if held := c.(*conn).unacknowledged(); held != (tt.used+tt.n)/probeStep*probeStep {
				t.Errorf("the send buffer holds %d bytes, want about %d", held, tt.used+tt.n)
			}
			if f := c.(*conn).fill; f != (filling{}) {
				t.Errorf("the connection keeps %+v", f)
			}
		})
	}
	t.Run("FP-09 it is counted", func(t *testing.T) {
		c := newCounts(t, 64<<20)
		conn, seq := c.handshake(flow4, 1000)
		c.attach(conn)
		src := store{data: make([]byte, 200_000)}
		if n, err := conn.(loop.Filler).TryFill(&src, 200_000); n != 200_000 || err != nil {
			t.Fatalf("TryFill = %d, %v", n, err)
		}
		c.expect("filled", 200_000)
		c.acknowledge(1001, seq, 200_000)
		c.expect("taken", 0)
		conn.Reset()
	})
	t.Run("the connection broke", func(t *testing.T) {
		r := newRig(t, nil)
		c, seq := r.handshake(flow4, 1000)
		defer c.Reset()
		r.send(segment{flow: flow4, seq: 1001, ack: seq, flags: flagRST | flagACK}.packet())
		src := store{data: make([]byte, 10)}
		for range 2 {
			if n, err := c.(loop.Filler).TryFill(&src, 10); n != 0 || err != loop.ErrReset || src.reads != 0 {
				t.Errorf("TryFill = %d, %v, after %d reads", n, err, src.reads)
			}
		}
	})
	t.Run("after the FIN", func(t *testing.T) {
		r := newRig(t, nil)
		c, _ := r.handshake(flow4, 1000)
		defer c.Reset()
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		src := store{data: make([]byte, 10)}
		if n, err := c.(loop.Filler).TryFill(&src, 10); n != 0 || err != loop.ErrReset || src.reads != 0 {
			t.Errorf("TryFill = %d, %v, after %d reads", n, err, src.reads)
		}
	})
}

// What is filled in arrives, whole and in order, whatever fits at a time.
func TestFilledBytesArrive(t *testing.T) {
	for kind := range devices {
		t.Run(kind, func(t *testing.T) {
			l := newLive(t, kind)
			c, app := l.connect(flow4)
			defer app.Close()
			app.SetDeadline(time.Now().Add(20 * time.Second))
			src := &store{data: make([]byte, 8<<20)}
			rand.NewChaCha8([32]byte{1}).Read(src.data)
			want := sha256.Sum256(src.data)
			got, end := sha256.New(), make(chan error, 1)
			go func() {
				_, err := io.Copy(got, app)
				end <- err
			}()
			partial := 0
			for len(src.data) > 0 {
				n, err := c.(loop.Filler).TryFill(src, 200_001)
				switch {
				case err == nil:
				case err != loop.ErrAgain:
					t.Fatal(err)
				case n > 0:
					partial++
				default:
					runtime.Gosched()
				}
			}
			c.Close()
			if err := <-end; err != nil {
				t.Error(err)
			}
			if !bytes.Equal(got.Sum(nil), want[:]) {
				t.Error("other bytes arrived")
			}
			if partial == 0 {
				t.Error("everything fitted; the test is to see parts")
			}
		})
	}
}
