package loop

import (
	"fmt"
	"testing"
	"time"
)

// once tries until it works, five times: a busy machine may stand still at any of them.
func once(t *testing.T, try func() error) {
	t.Helper()
	var err error
	for range 5 {
		if err = try(); err == nil {
			return
		}
	}
	t.Error(err)
}

// What may wait until the loop wakes by itself wakes nobody, is not lost, and comes before what wakes it.
func TestPostIdleWaitsForOthers(t *testing.T) {
	g := startGroup(t, 1)
	ref := add(g, turnFunc(func(int) bool { return false }))
	defer ref.Post(ref.Remove)
	l := ref.home()
	for _, wake := range []bool{true, false} {
		once(t, func() error {
			for asleep := false; !asleep; {
				l.mu.Lock()
				asleep = l.asleep
				l.mu.Unlock()
			}
			ran := make(chan string, 2)
			ref.PostIdle(func() { ran <- "idle" })
			l.mu.Lock()
			woken := !l.asleep
			l.mu.Unlock()
			began := time.Now()
			if wake {
				ref.Post(func() { ran <- "post" })
			}
			if first := <-ran; first != "idle" {
				t.Errorf("%s came first", first)
			}
			if wake {
				<-ran
			}
			if took := time.Since(began); woken || wake && took > maxSleep/2 {
				return fmt.Errorf("the loop was woken: %t; what wakes it took %v", woken, took)
			}
			return nil
		})
	}
}

// A timer that is due before the loop wakes by itself wakes it; one that is not is in time all the same.
func TestTimersOfASleepingLoopAreInTime(t *testing.T) {
	g := startGroup(t, 1)
	for _, d := range []time.Duration{50 * time.Millisecond, maxSleep - 50*time.Millisecond, maxSleep + 200*time.Millisecond} {
		once(t, func() error {
			fired := make(chan time.Duration, 1)
			time.Sleep(20 * time.Millisecond) // until the loop sleeps
			began := time.Now()
			g.After(d, func() { fired <- time.Since(began) })
			took := <-fired
			if took < d {
				t.Errorf("a timer of %v fired after %v", d, took)
			}
			if took > d+400*time.Millisecond {
				return fmt.Errorf("a timer of %v fired after %v", d, took)
			}
			return nil
		})
	}
}
