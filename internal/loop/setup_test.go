//go:build linux

package loop

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// idleTask has nothing to move.
type idleTask struct{}

func (idleTask) Turn(int) bool  { return false }
func (idleTask) String() string { return "an idle task" }

// onLoop calls f on the loop of a task that lives as long as the test, and waits until f returns.
func onLoop(t *testing.T, g *Group, f func(r *Ref)) {
	t.Helper()
	done := make(chan struct{})
	ref := g.Add(func(r *Ref) Task {
		defer close(done)
		f(r)
		return idleTask{}
	})
	<-done
	t.Cleanup(func() { ref.Post(ref.Remove) })
}

// A set-up of a task runs on the thread of the task, also after it has waited, whoever wakes it.
func TestSetUpsRunOnTheLoopOfTheirTask(t *testing.T) {
	g := startGroup(t, 2)
	var loops, ran [6]int
	var errs [3]error
	ended := make(chan struct{})
	canceled, cancel := context.WithCancel(t.Context())
	onLoop(t, g, func(r *Ref) {
		began := false
		r.Go(t.Context(), func(ctx context.Context) {
			defer close(ended)
			began = true
			loops[0] = threadID()
			errs[0] = Await(ctx, func(wake func()) { wake() }) // at once
			loops[1] = threadID()
			errs[0] = errors.Join(errs[0], Await(ctx, func(wake func()) { go func() { ran[2] = threadID(); wake(); wake() }() }))
			loops[2] = threadID()
			errs[0] = errors.Join(errs[0], Await(ctx, func(wake func()) { r.Post(wake) }))
			loops[3] = threadID()
			inner, stop := context.WithCancelCause(ctx)
			errs[1] = Await(inner, func(func()) { go stop(context.DeadlineExceeded) })
			loops[4] = threadID()
			cancel() // has ended already
			errs[2] = Await(canceled, func(func()) {})
			runtime.LockOSThread() // as who goes to another namespace for a moment
			loops[5] = threadID()
			runtime.UnlockOSThread()
			_ = Await(ctx, func(wake func()) { go wake() })
		})
		if began {
			t.Error("it ran within the caller's turn")
		}
		ran[0] = threadID()
	})
	<-ended
	for i, id := range loops {
		if id != ran[0] {
			t.Errorf("step %d ran on thread %d, the loop is %d", i, id, ran[0])
		}
	}
	if ran[2] == ran[0] {
		t.Error("who wakes it is the loop itself")
	}
	if errs[0] != nil || !errors.Is(errs[1], context.DeadlineExceeded) || errs[2] == nil {
		t.Errorf("waiting ended with %v", errs)
	}
}

// Elsewhere than on its task's loop a set-up is a goroutine, and so is one of the Group that a set-up starts with its own context.
func TestSetUpsElsewhereAreGoroutines(t *testing.T) {
	g := startGroup(t, 1)
	var ref *Ref
	var loop int
	onLoop(t, g, func(r *Ref) { ref, loop = r, threadID() })
	var all sync.WaitGroup
	check := func(ctx context.Context) {
		defer all.Done()
		for range 3 {
			if err := Await(ctx, func(wake func()) { ref.Post(wake) }); err != nil {
				t.Error(err)
			}
			if threadID() == loop {
				t.Error("it is on the loop")
			}
		}
	}
	all.Add(2)
	ref.Go(t.Context(), check)
	onLoop(t, g, func(r *Ref) {
		r.Go(t.Context(), func(ctx context.Context) { g.Go(context.WithoutCancel(ctx), check) })
	})
	all.Wait()
}

// Thousands of set-ups wait at once, for other set-ups, goroutines and timers, in any order: each wake arrives, and none is one too many.
func TestSetUpsMissNoWake(t *testing.T) {
	g := startGroup(t, 3)
	const setups, waits = 500, 20
	var waiting [3]chan func()
	var wakers sync.WaitGroup
	for i := range waiting {
		waiting[i] = make(chan func(), setups*waits)
		wakers.Go(func() {
			for wake := range waiting[i] {
				wake()
				if rand.IntN(4) == 0 {
					wake() // late
				}
			}
		})
	}
	var ended atomic.Int32
	var all sync.WaitGroup
	for range 3 {
		onLoop(t, g, func(r *Ref) {
			for range setups {
				all.Add(1)
				r.Go(t.Context(), func(ctx context.Context) {
					defer all.Done()
					for range waits {
						n := 0
						err := Await(ctx, func(wake func()) {
							switch n = rand.IntN(5); n {
							case 3:
								g.After(time.Microsecond, wake)
							case 4:
								r.Post(wake)
							default:
								waiting[n] <- wake
							}
						})
						if err != nil {
							t.Error(err)
						}
					}
					ended.Add(1)
				})
			}
		})
	}
	all.Wait()
	for _, w := range waiting {
		close(w)
	}
	wakers.Wait()
	if n := ended.Load(); n != 3*setups {
		t.Errorf("%d set-ups have ended, of %d", n, 3*setups)
	}
}

// A flood brings more set-ups than a loop has steps for: the others are goroutines, and what is posted meanwhile does not stand behind them.
func TestSetUpsOfAFloodDoNotPileUp(t *testing.T) {
	g := startGroup(t, 1)
	var all sync.WaitGroup
	var here, waiting int // of the loop
	posted := make(chan struct{})
	onLoop(t, g, func(r *Ref) {
		loop := threadID()
		for range 2000 {
			all.Add(1)
			r.Go(t.Context(), func(context.Context) {
				defer all.Done()
				if threadID() == loop {
					here++
				}
			})
			waiting = max(waiting, r.home().steps.size())
		}
		r.Post(func() { close(posted) })
	})
	<-posted
	all.Wait()
	onLoop(t, g, func(*Ref) {
		if waiting != maxSteps || here < maxSteps {
			t.Errorf("%d of 2000 set-ups ran on the loop, and %d waited; want %d", here, waiting, maxSteps)
		}
	})
}

// What may wait until the loop wakes by itself wakes nobody, is not lost, and comes before what wakes it.
func TestPostIdleWaitsForOthers(t *testing.T) {
	g := startGroup(t, 1)
	var ref *Ref
	onLoop(t, g, func(r *Ref) { ref = r })
	for _, wake := range []bool{true, false} {
		l := ref.home()
		for asleep := false; !asleep; {
			l.mu.Lock()
			asleep = l.asleep
			l.mu.Unlock()
		}
		ran := make(chan string, 2)
		ref.PostIdle(func() { ran <- "idle" })
		l.mu.Lock()
		interrupted := !l.asleep
		l.mu.Unlock()
		if interrupted && len(ran) == 0 { // by itself it wakes once a second
			t.Error("the loop was woken")
		}
		if wake {
			ref.Post(func() { ran <- "post" })
		}
		began := time.Now()
		if first := <-ran; first != "idle" {
			t.Errorf("%s came first", first)
		}
		if wake {
			<-ran
			if took := time.Since(began); took > maxSleep/2 {
				t.Errorf("the post took %v", took)
			}
		}
	}
}

// A timer that is due before the loop wakes by itself wakes it; one that is not is in time all the same.
func TestTimersOfASleepingLoopAreInTime(t *testing.T) {
	g := startGroup(t, 1)
	for _, d := range []time.Duration{50 * time.Millisecond, maxSleep - 50*time.Millisecond, maxSleep + 200*time.Millisecond} {
		fired := make(chan time.Duration, 1)
		time.Sleep(20 * time.Millisecond) // until the loop sleeps
		began := time.Now()
		g.After(d, func() { fired <- time.Since(began) })
		if took := <-fired; took < d || took > d+400*time.Millisecond {
			t.Errorf("a timer of %v fired after %v", d, took)
		}
	}
}

// However many set-ups there are, a task that is woken has its turn between two of them, after a fifth of a millisecond at most of others.
func TestSetUpsHoldNoTaskUp(t *testing.T) {
	g := startGroup(t, 1)
	const setups, steps, work = maxSteps, 30, 20 * time.Microsecond
	var ended, turns int // of the loop
	done := make(chan struct{})
	ref := g.Add(func(r *Ref) Task {
		for range setups {
			r.Go(t.Context(), func(ctx context.Context) {
				for range steps {
					for end := time.Now().Add(work); time.Now().Before(end); {
					}
					_ = Await(ctx, func(wake func()) { r.Post(wake) })
				}
				if ended++; ended == setups {
					close(done)
				}
			})
		}
		return turnFunc(func(int) bool {
			turns++
			return ended < setups
		})
	})
	<-done
	counted := make(chan int)
	ref.Post(func() { counted <- turns; ref.Remove() })
	if n := <-counted; n < setups*steps*int(work)/int(2*lateSlice) {
		t.Errorf("%d turns beside %d steps of %v each", n, setups*steps, work)
	}
}

// The end of the Group ends the contexts of set-ups, waits for them, and names those that do not go.
func TestSetUpsEndWithTheGroup(t *testing.T) {
	for _, tt := range []struct{ stubborn bool }{{false}, {true}} {
		g, err := New(Config{Loops: 1, Now: time.Now, StopTimeout: 100 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- g.Run(ctx) }()
		var cause, last error
		waits, ended := make(chan struct{}), make(chan struct{})
		g.Add(func(r *Ref) Task {
			r.Go(context.Background(), func(ctx context.Context) {
				defer close(ended)
				cause = Await(ctx, func(func()) { close(waits) })
				if tt.stubborn {
					last = Await(context.WithoutCancel(ctx), func(func()) {})
				}
			})
			return nil
		})
		<-waits
		stop()
		err = <-ran
		if named := err != nil && strings.Contains(err.Error(), "the set-up of a connection"); named != tt.stubborn {
			t.Errorf("Run returns %v", err)
		}
		<-ended
		if !errors.Is(cause, ErrStopped) || tt.stubborn && last != ErrStopped {
			t.Errorf("the set-up waited until %v, and %v", cause, last)
		}
	}
}

// BenchmarkSetUp is a set-up that waits twice for what its own loop does, as a connection does for its tunnel.
func BenchmarkSetUp(b *testing.B) {
	for _, name := range []string{"loop", "goroutine"} {
		b.Run(name, func(b *testing.B) {
			g := startGroup(b, 1)
			ref := g.Add(func(*Ref) Task { return idleTask{} })
			done := make(chan struct{})
			setup := func(ctx context.Context) {
				for range 2 {
					_ = Await(ctx, func(wake func()) { ref.Post(wake) })
				}
				done <- struct{}{}
			}
			for b.Loop() {
				ref.Post(func() {
					if name == "loop" {
						ref.Go(context.Background(), setup)
					} else {
						g.Go(context.Background(), setup)
					}
				})
				<-done
			}
			ref.Post(ref.Remove)
		})
	}
}
