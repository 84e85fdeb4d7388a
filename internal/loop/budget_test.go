package loop

import (
	"math/rand/v2"
	"sync"
	"testing"
)

func TestBudgetLevels(t *testing.T) {
	const mib = 1 << 20
	b := NewBudget(8 * mib)
	a := NewAccount(b)
	for _, step := range []struct {
		held int
		want Level
		full uint64
	}{
		{0, Calm, 0},
		{4*mib - 1, Calm, 0},
		{4 * mib, Tight, 0},
		{3 * mib, Tight, 0}, // an eighth less: not yet
		{3*mib - quantum, Calm, 0},
		{3 * mib, Calm, 0},
		{8*mib - 1, Tight, 0},
		{8 * mib, Full, 1},
		{7 * mib, Full, 1},
		{9 * mib, Full, 1},
		{7*mib - quantum, Tight, 1},
		{8 * mib, Full, 2},
		{mib, Calm, 2},
		{20 * mib, Full, 3},
		{5 * mib, Tight, 3},
		{0, Calm, 3},
	} {
		a.Set(step.held)
		if got := a.Level(); got != step.want || b.TimesFull() != step.full {
			t.Errorf("with %d bytes held: level %d, %d times full, want %d, %d", step.held, got, b.TimesFull(), step.want, step.full)
		}
		if want := int64(step.held / quantum * quantum); b.Held() != want {
			t.Errorf("held %d, want %d", b.Held(), want)
		}
	}
}

func TestBudgetOfNobody(t *testing.T) {
	a := NewAccount(nil)
	a.Set(1 << 30)
	var b *Budget
	if a.Level() != Calm || b.Held() != 0 || b.TimesFull() != 0 {
		t.Errorf("no budget: level %d, held %d, full %d times", a.Level(), b.Held(), b.TimesFull())
	}
}

// The level is that of what is held once everybody has stopped, in whatever order they were.
func TestBudgetLevelIsNeverStale(t *testing.T) {
	const holders = 4
	for round := range uint64(200) {
		b := NewBudget(1 << 20)
		var wg sync.WaitGroup
		last := make([]int, holders)
		for i := range holders {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(round, uint64(i)))
				a := NewAccount(b)
				for range 50 {
					last[i] = rng.IntN(1 << 19)
					a.Set(last[i])
				}
				if round%2 == 0 {
					last[i] = 0
					a.Set(0)
				}
			})
		}
		wg.Wait()
		var held int64
		for _, n := range last {
			held += int64(n / quantum * quantum)
		}
		if b.Held() != held {
			t.Fatalf("round %d: held %d, want %d", round, b.Held(), held)
		}
		if l := b.Level(); l != b.next(l, held) {
			t.Fatalf("round %d: level %d with %d of %d held, want %d", round, l, held, b.limit, b.next(l, held))
		}
	}
}

func TestBudgetDoesNotAllocate(t *testing.T) {
	a := NewAccount(NewBudget(1 << 20))
	n := 0
	if got := testing.AllocsPerRun(100, func() { n = (n + 100_000) % (2 << 20); a.Set(n) }); got != 0 {
		t.Errorf("Set allocates %v times", got)
	}
}
