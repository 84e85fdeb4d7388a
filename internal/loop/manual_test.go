package loop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newManual(t *testing.T) *Manual {
	t.Helper()
	m := NewManual(epoch)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if got := m.Group().Stats(); got != (Stats{}) {
			t.Errorf("after the end the group holds %+v, want nothing", got)
		}
	})
	return m
}

// A stepTask logs its turns and has more to move for as many turns as it was given.
type stepTask struct {
	name string
	log  *[]string
	left int
	then func()
}

func (s *stepTask) Turn(int) bool {
	*s.log = append(*s.log, s.name)
	if s.then != nil {
		s.then()
	}
	if s.left > 0 {
		s.left--
		return true
	}
	return false
}

func add(g *Group, t Task) *Ref { return g.Add(func(*Ref) Task { return t }) }

func TestWokenTasksGoBeforeBusyOnes(t *testing.T) {
	m := newManual(t)
	var log []string
	bulk1 := add(m.Group(), &stepTask{name: "bulk1", log: &log, left: 3})
	bulk2 := add(m.Group(), &stepTask{name: "bulk2", log: &log, left: 3})
	quiet := add(m.Group(), &stepTask{name: "quiet", log: &log})
	for range 6 { // three starts, three first turns
		m.Step()
	}
	m.Step() // bulk1 is busy
	quiet.Wake()
	quiet.Wake() // no second turn for a second wake before the first
	bulk2.Wake() // busy already: keeps its place
	m.Settle()
	want := []string{"bulk1", "bulk2", "quiet", "bulk1", "quiet", "bulk2", "bulk1", "bulk2", "bulk1", "bulk2"}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Errorf("order of turns (-want +got):\n%s", diff)
	}
	for _, r := range []*Ref{bulk1, bulk2, quiet} {
		r.Post(r.Remove)
	}
}

func TestChildrenTakeTurnsInTheirParents(t *testing.T) {
	m := newManual(t)
	var log []string
	var a, b *Ref
	root := m.Group().Add(func(r *Ref) Task {
		a = r.Child(func(*Ref) Task { return &stepTask{name: "a", log: &log, left: 2} })
		b = r.Child(func(*Ref) Task { return &stepTask{name: "b", log: &log} })
		return turnFunc(func(budget int) bool {
			log = append(log, "parent")
			return r.RunChildren(budget)
		})
	})
	m.Settle()
	b.Wake() // from outside: the parent gets a turn for it
	m.Settle()
	want := []string{"parent", "a", "b", "parent", "a", "parent", "a", "parent", "b"}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Errorf("order of turns (-want +got):\n%s", diff)
	}

	log = nil
	root.Post(root.Remove)
	m.Settle()
	if len(log) != 2 {
		t.Errorf("last turns of the children: %v, want one each", log)
	}
	if a.Post(func() {}) || b.Post(func() {}) {
		t.Error("Post to a child of a removed task is taken")
	}
}

// A download, whose bytes wake its relay in each turn and use the budget up, does not stop an upload through the same tunnel.
func TestBusyChildrenGetOnBesideWokenOnes(t *testing.T) {
	m := newManual(t)
	turns, download, upload := 0, 0, 0
	root := m.Group().Add(func(r *Ref) Task {
		woken := r.Child(func(c *Ref) Task {
			return turnFunc(func(budget int) bool {
				download++
				c.Moved(budget)
				return false
			})
		})
		r.Child(func(*Ref) Task {
			return turnFunc(func(int) bool {
				upload++
				return upload < 50
			})
		})
		return turnFunc(func(budget int) bool {
			turns++
			if turns < 100 {
				woken.WakeLocal() // bytes have arrived for it
			}
			r.RunChildren(budget)
			return turns < 100
		})
	})
	m.Settle()
	if upload != 50 || download < 99 {
		t.Errorf("in %d turns of the tunnel the download had %d turns and the upload %d, want 50", turns, download, upload)
	}
	root.Post(root.Remove)
}

// One that was quiet does not stand behind those that move much and are woken for the room that there is for them.
func TestQuietChildrenGoBeforeHungryOnes(t *testing.T) {
	m := newManual(t)
	var log []string
	var bulk []*Ref
	var quiet *Ref
	root := m.Group().Add(func(r *Ref) Task {
		for i := range 3 {
			bulk = append(bulk, r.Child(func(c *Ref) Task {
				return turnFunc(func(budget int) bool {
					log = append(log, fmt.Sprint("bulk", i))
					c.Moved(budget)
					return false // its peer's window
				})
			}))
		}
		quiet = r.Child(func(*Ref) Task { return &stepTask{name: "quiet", log: &log} })
		return turnFunc(r.RunChildren)
	})
	m.Settle()
	log = nil
	root.Post(func() {
		for _, b := range bulk {
			b.WakeLocal()
		}
		quiet.WakeLocal()
	})
	m.Settle()
	want := []string{"quiet", "bulk0", "bulk1", "bulk2"}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Errorf("order of turns (-want +got):\n%s", diff)
	}
	root.Post(root.Remove)
}

type turnFunc func(int) bool

func (f turnFunc) Turn(budget int) bool { return f(budget) }

func TestTimersFollowTheManualClock(t *testing.T) {
	m := newManual(t)
	var log []string
	r := m.Group().Add(func(r *Ref) Task {
		at := func(d time.Duration, name string) *Timer {
			return r.After(d, func() { log = append(log, fmt.Sprint(name, " ", r.Now().Sub(epoch))) })
		}
		at(3*time.Second, "three")
		at(time.Second, "one")
		at(2*time.Second, "two").Stop()
		at(time.Hour, "never: the task has gone by then")
		return turnFunc(func(int) bool { return false })
	})
	m.Advance(10 * time.Second)
	r.Post(r.Remove)
	m.Advance(2 * time.Hour)
	if diff := cmp.Diff([]string{"one 1s", "three 3s"}, log); diff != "" {
		t.Errorf("timers (-want +got):\n%s", diff)
	}
}

func TestSetUpsByHandRunOneAtATime(t *testing.T) {
	m := newManual(t)
	g := m.Group()
	var log []string
	var wake func()
	g.Go(t.Context(), func(ctx context.Context) {
		log = append(log, "first waits")
		if err := Await(ctx, func(w func()) { wake = w }); err != nil {
			t.Error(err)
		}
		log = append(log, "first goes on")
	})
	g.Go(t.Context(), func(ctx context.Context) {
		log = append(log, "second wakes the first")
		wake()
		ctx, cancel := g.WithTimeout(ctx, time.Second)
		defer cancel()
		err := Await(ctx, func(func()) {})
		log = append(log, fmt.Sprint("second: ", err, ", ", ctx.Err()))
	})
	m.Settle()
	m.Advance(time.Second)
	m.Settle()
	want := []string{"first waits", "second wakes the first", "first goes on", "second: context deadline exceeded, context deadline exceeded"}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestBlockingViewByHand(t *testing.T) {
	m := newManual(t)
	a, b := Pipe()
	var got string
	m.Group().Go(t.Context(), func(ctx context.Context) {
		v := m.Group().Blocking(ctx, a)
		p, err := io.ReadAll(v)
		got = string(p)
		if err != nil {
			t.Error(err)
		}
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	})
	m.Settle()
	for _, s := range []string{"one ", "two"} {
		if _, err := b.TryWrite([]byte(s)); err != nil {
			t.Fatal(err)
		}
		m.Settle()
	}
	if err := b.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	m.Settle()
	if got != "one two" {
		t.Errorf("read %q, want %q", got, "one two")
	}
}

func TestManualCloseNamesWhatIsLeft(t *testing.T) {
	m := NewManual(epoch)
	add(m.Group(), turnFunc(func(int) bool { return false }))
	var cause error
	m.Group().Go(context.Background(), func(ctx context.Context) { cause = Await(ctx, func(func()) {}) })
	err := m.Close()
	if err == nil {
		t.Fatal("Close reports nothing")
	}
	if !errors.Is(cause, ErrStopped) {
		t.Errorf("the set-up ended with %v, want ErrStopped", cause)
	}
	if m.Group().Add(func(*Ref) Task { return nil }) != nil {
		t.Error("a task can be added after the end")
	}
}
