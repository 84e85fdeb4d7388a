package loop

import "sync/atomic"

// A Level says how much of a Budget is in use, and so how much a connection may still take before its own reader does.
type Level uint8

// The levels. Each ends at less than where it began (an eighth of the limit), so that they do not go back and forth.
const (
	Calm  Level = iota // less than half of the limit
	Tight              // half of the limit or more: what readers do not take is no longer invited
	Full               // the limit or more: nothing is taken ahead
)

// TightBytes is what one direction of a connection may invite while a Budget is not calm, in bytes.
const TightBytes = 64 << 10

// A Budget counts the bytes that the connections of the process hold: what was received and not taken by those it is for. It
// holds nobody up. Whoever receives asks for its Level from time to time, in each turn say, and slows its senders down. It is
// safe for concurrent use. A nil *Budget counts nothing and is always calm.
type Budget struct {
	limit int64
	level atomic.Uint32 // read in each turn of everybody, written when it changes
	full  atomic.Uint64

	_    [64]byte // apart from what is read often
	held atomic.Int64
}

// NewBudget returns a Budget of limit bytes, at least 1.
func NewBudget(limit int64) *Budget { return &Budget{limit: max(1, limit)} }

// Level is how much is in use now.
func (b *Budget) Level() Level {
	if b == nil {
		return Calm
	}
	return Level(b.level.Load())
}

// Held is how many bytes are held. What one holder has is rounded down to 4 KiB.
func (b *Budget) Held() int64 {
	if b == nil {
		return 0
	}
	return b.held.Load()
}

// TimesFull is how often the limit was reached.
func (b *Budget) TimesFull() uint64 {
	if b == nil {
		return 0
	}
	return b.full.Load()
}

func (b *Budget) add(n int64) {
	b.held.Add(n)
	for {
		// What is held is read again after each change of the level: of two who change both, the last sees both.
		was := Level(b.level.Load())
		level := b.next(was, b.held.Load())
		if level == was {
			return
		}
		if b.level.CompareAndSwap(uint32(was), uint32(level)) && level == Full {
			b.full.Add(1)
		}
	}
}

// next is the level after was at which held bytes stand.
func (b *Budget) next(was Level, held int64) Level {
	back := b.limit / 8
	switch {
	case held >= b.limit, was == Full && held >= b.limit-back:
		return Full
	case held >= b.limit/2, was != Calm && held >= b.limit/2-back:
		return Tight
	}
	return Calm
}

// quantum is what an Account counts in: what is smaller comes and goes with each message, on the cache line that all share.
const quantum = 4 << 10

// An Account is what one holder has of a Budget, for instance a tunnel. It belongs to one goroutine at a time. The zero
// Account counts nothing.
type Account struct {
	budget *Budget
	held   int64
}

// NewAccount returns an Account that holds nothing.
func NewAccount(b *Budget) Account { return Account{budget: b} }

// Set tells how many bytes are held now. It costs nothing while that changes little. Its owner sets it to 0 in the end.
func (a *Account) Set(n int) {
	held := int64(n) / quantum * quantum
	if held == a.held || a.budget == nil {
		return
	}
	a.budget.add(held - a.held)
	a.held = held
}

// Level is that of the Budget.
func (a *Account) Level() Level { return a.budget.Level() }
