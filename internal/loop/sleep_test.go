package loop

import (
	"testing"
	"time"
)

// What may wait until the loop wakes by itself wakes nobody, is not lost, and comes before what wakes it.
func TestPostIdleWaitsForOthers(t *testing.T) {
	g := startGroup(t, 1)
	ref := add(g, turnFunc(func(int) bool { return false }))
	defer ref.Post(ref.Remove)
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
