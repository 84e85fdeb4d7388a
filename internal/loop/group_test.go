package loop

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/nettest"
)

// startGroup runs a group of threads until the test ends.
func startGroup(t testing.TB, loops int) *Group {
	t.Helper()
	return startLoops(t, loops, 0)
}

// TestBlockingViewsBehaveAsNetConns runs all of nettest over blocking views of a Pipe, the model of every other Conn.
func TestBlockingViewsBehaveAsNetConns(t *testing.T) {
	g := startGroup(t, 2)
	nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
		a, b := Pipe()
		va, vb := g.Blocking(context.Background(), a), g.Blocking(context.Background(), b)
		return va, vb, func() { va.Close(); vb.Close() }, nil
	})
}

// An echoTask returns what it reads.
type echoTask struct {
	r    *Ref
	c    Conn
	left []byte
}

func newEcho(c Conn) func(*Ref) Task {
	return func(r *Ref) Task {
		if err := c.Attach(r); err != nil {
			return nil
		}
		return &echoTask{r: r, c: c}
	}
}

func (e *echoTask) Turn(budget int) bool {
	p := e.r.Scratch()
	for budget > 0 {
		for len(e.left) > 0 {
			n, err := e.c.TryWrite(e.left)
			if errors.Is(err, ErrAgain) {
				return false
			}
			if err != nil {
				return e.end()
			}
			e.left = e.left[n:]
		}
		n, err := e.c.TryRead(p[:min(budget, len(p))])
		if errors.Is(err, ErrAgain) {
			return false
		}
		if err != nil {
			return e.end()
		}
		budget -= n
		e.left = bytes.Clone(p[:n])
	}
	return true
}

func (e *echoTask) end() bool {
	e.c.Close()
	e.r.Remove()
	return false
}

func TestTasksOnThreadsMoveEveryByteInOrder(t *testing.T) {
	g := startGroup(t, 2)
	var wg sync.WaitGroup
	for i := range 8 {
		a, b := Pipe()
		if g.Add(newEcho(b)) == nil {
			t.Fatal("no task added")
		}
		v := g.Blocking(t.Context(), a)
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			want := make([]byte, 1<<20)
			for j := range want {
				want[j] = byte(rng.Uint32())
			}
			var in sync.WaitGroup
			in.Go(func() {
				got := make([]byte, len(want))
				if _, err := io.ReadFull(v, got); err != nil {
					t.Errorf("connection %d: %v", i, err)
				}
				if !bytes.Equal(got, want) {
					t.Errorf("connection %d: bytes came back changed", i)
				}
			})
			for p := want; len(p) > 0; {
				n := min(len(p), 1+rng.IntN(100_000))
				if _, err := v.Write(p[:n]); err != nil {
					t.Errorf("connection %d: %v", i, err)
					break
				}
				p = p[n:]
			}
			in.Wait()
			v.Close()
		})
	}
	wg.Wait()
}

func TestRunNamesTasksThatDoNotGo(t *testing.T) {
	g, err := New(Config{Now: time.Now, StopTimeout: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	a, _ := Pipe()
	g.Blocking(context.Background(), a)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err = g.Run(ctx)
	if err == nil || !strings.Contains(err.Error(), "a blocking connection") {
		t.Errorf("Run returned %v, want the name of the task", err)
	}
	if g.Add(func(*Ref) Task { return nil }) != nil {
		t.Error("a task can be added after the end")
	}
}

func TestPostsAndTimersReachASleepingLoop(t *testing.T) {
	g := startGroup(t, 1)
	fired := make(chan string, 3)
	r := g.Add(func(r *Ref) Task {
		r.After(20*time.Millisecond, func() { fired <- "timer" })
		return turnFunc(func(int) bool { return false })
	})
	g.After(10*time.Millisecond, func() { fired <- "group timer" })
	for _, want := range []string{"group timer", "timer"} {
		if got := <-fired; got != want {
			t.Errorf("fired %q, want %q", got, want)
		}
	}
	if !r.Post(func() { fired <- "post"; r.Remove() }) {
		t.Fatal("Post refused")
	}
	if got := <-fired; got != "post" {
		t.Errorf("fired %q, want the post", got)
	}
}

// However many functions may wait, what must not wait does not.
func TestPostLaterHoldsNobodyUp(t *testing.T) {
	g := startGroup(t, 1)
	ref := add(g, turnFunc(func(int) bool { return false }))
	const n = 20_000
	var ran atomic.Int32
	all := make(chan struct{})
	begin := make(chan struct{})
	for range n {
		ref.PostLater(func() {
			<-begin
			for end := time.Now().Add(10 * time.Microsecond); time.Now().Before(end); {
			}
			if ran.Add(1) == n {
				close(all)
			}
		})
	}
	before := make(chan int32, 1)
	ref.Post(func() { before <- ran.Load() })
	close(begin)
	// One slice of them may have begun before the post was seen, and another one may follow.
	if got := <-before; got > 2*int32(lateSlice/(10*time.Microsecond)) {
		t.Errorf("%d of %d functions that may wait ran first", got, n)
	}
	<-all
	ref.Post(ref.Remove)
}

func TestTimersOutliveTheGroup(t *testing.T) {
	m := NewManual(epoch)
	_, cancel := m.Group().WithTimeout(t.Context(), time.Hour)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	cancel() // stops a timer of a loop that has ended
	if s := m.Group().Stats(); s != (Stats{}) {
		t.Errorf("the group holds %+v", s)
	}
}

func TestWakeBeforeTheStart(t *testing.T) {
	m := newManual(t)
	for range 2 * maxPosts { // so many that the start has to wait
		m.Group().loops[0].post(func() {})
	}
	turns := 0
	r := add(m.Group(), turnFunc(func(int) bool { turns++; return false }))
	r.Wake()
	m.Settle()
	if turns != 1 {
		t.Errorf("%d turns, want 1", turns)
	}
	r.Wake()
	m.Settle()
	if turns != 2 {
		t.Errorf("%d turns after another wake, want 2", turns)
	}
	r.Post(r.Remove)
}

func TestConfigIsChecked(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("New takes a Config without a clock")
	}
	if _, err := New(Config{Now: time.Now, Loops: -1}); err == nil {
		t.Error("New takes a negative number of loops")
	}
}

func TestWakeDoesNotAllocate(t *testing.T) {
	m := newManual(t)
	r := add(m.Group(), turnFunc(func(int) bool { return false }))
	m.Settle()
	if n := testing.AllocsPerRun(1000, func() { r.Wake(); m.Step() }); n != 0 {
		t.Errorf("a wake and its turn allocate %v times, want 0", n)
	}
	r.Post(r.Remove)
}
