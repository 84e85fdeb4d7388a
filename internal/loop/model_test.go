package loop

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The model of the loops. Whatever is woken has a turn; whatever has more to move, another; whatever was posted runs once and in
// order; timers fire unless they were stopped; of what goes through connections no byte is lost or changes its place; nothing of
// a task runs while something else of it does, or on another loop than its own; and nobody waits for more turns of others than
// there are others, a few times over. Tasks do at random all that tasks may do.

// A world is the tasks of one run. What is outstanding is counted: units of work, bytes, functions and timers that are to come.
type world struct {
	g           *Group
	threads     bool
	outstanding atomic.Int64
	idle        chan struct{} // told when that is 0
	moves       atomic.Int64
	children    atomic.Int64
	waits       atomic.Int64 // that were compared with their bounds
	lastName    atomic.Int64
	thread      sync.Map // ids, by loop

	loops map[*eventLoop]*loopCount // fixed

	mu     sync.Mutex // guards below
	all    []*unit
	faults []string
}

// A loopCount belongs to its loop.
type loopCount struct {
	turns int // of top-level tasks
}

func newWorld(g *Group, threads bool) *world {
	w := &world{g: g, threads: threads, idle: make(chan struct{}, 1), loops: make(map[*eventLoop]*loopCount)}
	for _, l := range g.loops {
		w.loops[l] = new(loopCount)
	}
	return w
}

func (w *world) fault(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.faults) < 10 {
		w.faults = append(w.faults, fmt.Sprintf(format, args...))
	}
}

func (w *world) count(n int64) {
	if w.outstanding.Add(n) == 0 {
		select {
		case w.idle <- struct{}{}:
		default:
		}
	}
}

// live returns the units that were added so far, some of which have gone.
func (w *world) live() []*unit {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.all)
}

// A unit is a task. Each unit of work counts as 16 KiB moved.
type unit struct {
	w      *world
	name   int64
	ref    *Ref
	parent *unit
	rng    *rand.Rand // of its loop
	stay   bool       // is not removed at random
	eager  bool       // moves all it may and is woken again in each turn, as one is for which bytes come all the time
	link   link       // not nil: moves bytes instead of work

	work atomic.Int64
	gone atomic.Bool
	in   *atomic.Int32 // turns and functions of the top-level task that are running: never more than one

	// Of its loop.
	home     *eventLoop
	kids     []*unit
	out      [2]poster
	timers   []*pendingTimer
	posted   map[*poster]int
	turns    int
	runsKids bool
	owed     *moment // it was woken then
	busy     *moment // it had more to move then
}

const unitBytes = 16 << 10

// A moment is what had happened by then.
type moment struct {
	home   *eventLoop
	turns  int // of top-level tasks of that loop; for a child those of its siblings
	parent int // of the parent
}

type pendingTimer struct {
	t   *Timer
	due time.Time
	end bool // fired or stopped
}

// A poster posts numbered functions, all of them to run soon, or all later.
type poster struct {
	next  map[*unit]int
	later bool
}

// A link moves bytes and returns how many, and whether it can go on.
type link interface {
	attach(r *Ref) error
	move(u *unit, budget int) (n int, more bool)
	close()
}

// roots is how many top-level tasks there may be.
func (w *world) roots() (n int) {
	for _, u := range w.live() {
		if u.parent == nil && !u.gone.Load() {
			n++
		}
	}
	return n
}

func (w *world) newUnit(parent *unit, seed uint64) *unit {
	name := w.lastName.Add(1)
	u := &unit{
		w: w, name: name, parent: parent, rng: rand.New(rand.NewPCG(seed, uint64(name))), in: new(atomic.Int32),
		posted: make(map[*poster]int), out: newPosters(),
	}
	u.eager = u.rng.IntN(4) == 0
	if parent != nil {
		u.in = parent.in
	}
	return u
}

func (w *world) register(u *unit) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, u)
}

// addRoot adds a top-level task, which knows its ref once it has started.
func (w *world) addRoot(seed uint64, change func(*unit)) (*unit, *Ref) {
	u := w.newUnit(nil, seed)
	if change != nil {
		change(u)
	}
	w.count(1)
	ref := w.g.Add(func(r *Ref) Task {
		w.count(-1)
		u.begin(r)
		return u
	})
	if ref == nil {
		w.fault("a task is refused")
	}
	return u, ref
}

func (u *unit) begin(r *Ref) {
	u.ref, u.home = r, r.home()
	if u.link != nil {
		if err := u.link.attach(r); err != nil {
			u.w.fault("unit %d: attach: %v", u.name, err)
		}
	}
	u.w.register(u)
}

func (u *unit) addChild(change func(*unit)) {
	c := u.w.newUnit(u, u.rng.Uint64())
	if change != nil {
		change(c)
	}
	ref := u.ref.Child(func(r *Ref) Task {
		c.begin(r)
		return c
	})
	if ref == nil {
		u.w.fault("unit %d: a child is refused", u.name)
		return
	}
	u.w.children.Add(1)
	u.kids = append(u.kids, c)
	c.owe()
	u.owe()
}

// enter checks that nothing else of the top-level task is running, but for the parent's turn that the turn of a child is in.
func (u *unit) enter(what string) (leave func()) {
	n := u.in.Add(1)
	if u.parent != nil && what == "a turn" {
		if !u.parent.runsKids {
			u.w.fault("unit %d: a turn that its parent does not give", u.name)
		}
	} else if n != 1 {
		u.w.fault("unit %d: %s while something else of the task is running", u.name, what)
	}
	if l := u.ref.home(); u.w.threads {
		// A loop has one thread: the first that was seen.
		if first, seen := u.w.thread.LoadOrStore(l, unix.Gettid()); seen && first != unix.Gettid() {
			u.w.fault("unit %d: %s on another loop than its own", u.name, what)
		}
	}
	if l := u.ref.home(); l != u.home && u.parent == nil {
		u.home = l
		u.w.moves.Add(1)
	}
	return func() { u.in.Add(-1) }
}

// Turn implements Task.
func (u *unit) Turn(budget int) (more bool) {
	last := u.gone.Load() || u.ref.Removed() || u.parent != nil && u.parent.gone.Load()
	if last {
		u.leave()
		return false
	}
	defer u.enter("a turn")()
	u.checkWait()
	u.turns++
	if u.parent == nil {
		u.w.loops[u.ref.home()].turns++
	}
	if budget <= 0 || budget > leaderSlices*u.w.g.cfg.Slice {
		u.w.fault("unit %d: a budget of %d", u.name, budget)
	}
	if u.link == nil {
		u.misbehave()
		if u.gone.Load() {
			return false
		}
	}
	kidsMore := false
	if len(u.kids) > 0 {
		u.runsKids = true
		kidsMore = u.ref.RunChildren(budget)
		u.runsKids = false
		if u.gone.Load() {
			return false
		}
	}
	n := 0
	if u.link != nil {
		n, more = u.link.move(u, budget)
	} else {
		n = int(min(u.work.Load(), int64(budget/unitBytes)))
		if n > 1 && !u.eager {
			n = 1 + u.rng.IntN(n)
		}
		left := u.work.Add(int64(-n))
		u.w.count(int64(-n))
		more = left > 0
		n *= unitBytes
		if more && u.eager {
			u.ref.WakeLocal()
			u.owe()
			more = false
		}
	}
	u.ref.Moved(n)
	if (more || kidsMore) && u.ref.in == nil { // else it was woken meanwhile, and has a better place already
		u.busy, u.owed = u.now(), nil
	}
	return more || kidsMore
}

// owe notes that the unit was woken, by something on its loop. One that waits for a turn because it has more to move keeps its place.
func (u *unit) owe() {
	if u.owed != nil || u.busy != nil {
		return
	}
	u.owed = u.now()
}

// now is what has happened so far.
func (u *unit) now() *moment {
	m := &moment{home: u.ref.home()}
	if u.parent == nil {
		m.turns = u.w.loops[m.home].turns
	} else {
		m.turns, m.parent = u.parent.kidTurns(), u.parent.turns
	}
	return m
}

func (u *unit) kidTurns() (n int) {
	for _, k := range u.kids {
		n += k.turns
	}
	return n
}

// checkWait compares what others did while this one waited with what they may have done.
func (u *unit) checkWait() {
	w, now := u.w, u.now()
	others := w.roots()
	if u.parent != nil {
		others = len(u.parent.kids)
	}
	if o := u.owed; o != nil && o.home == now.home {
		// Everybody who was woken before, once; who has more to move, once for each of them that leads; and the same again, if
		// the wake came just after the inbox was looked at.
		w.waits.Add(1)
		if n := now.turns - o.turns; n > 2*others+3 {
			w.fault("unit %d waited for %d turns of %d others after it was woken", u.name, n, others)
		}
	}
	if b := u.busy; b != nil && b.home == now.home {
		switch {
		case u.parent != nil:
			// In each turn of the parent one child that has more to move gets on.
			w.waits.Add(1)
			if n := now.parent - b.parent; n > others+1 {
				w.fault("unit %d had more to move for %d turns of its parent, with %d children", u.name, n, others)
			}
		case w.threads:
			// Between two turns of those that have more to move each of the others has one. By hand those that are woken go first.
			w.waits.Add(1)
			if n := now.turns - b.turns; n > (others+2)*(others+2) {
				w.fault("unit %d had more to move for %d turns of %d others", u.name, n, others)
			}
		}
	}
	u.owed, u.busy = nil, nil
}

// misbehave does what tasks may do in a turn.
func (u *unit) misbehave() {
	switch u.rng.IntN(26) {
	case 0:
		if len(u.kids) < 4 && u.depth() < 3 {
			u.addChild(nil)
		}
	case 1:
		for _, k := range u.kids {
			if !k.stay && k.link == nil && len(k.kids) == 0 {
				k.remove()
				break
			}
		}
	case 2:
		if !u.stay && u.rng.IntN(8) == 0 && len(u.kids) == 0 {
			u.remove()
		}
	case 3, 4:
		u.startTimer(time.Duration(u.rng.IntN(3000)) * time.Microsecond)
	case 5:
		for _, p := range u.timers {
			if !p.end {
				p.t.Stop()
				p.end = true
				u.w.count(-1)
				break
			}
		}
	case 6, 7:
		u.give(int64(u.rng.IntN(12))) // to itself, in its turn
		u.ref.Wake()
	case 8, 9: // to a relative, which has its turn in this one of the parent
		if len(u.kids) > 0 {
			k := u.kids[u.rng.IntN(len(u.kids))]
			if !k.gone.Load() {
				k.give(int64(u.rng.IntN(24)))
				k.ref.WakeLocal()
				k.owe()
			}
		}
	case 10, 11:
		if all := u.w.live(); len(all) > 0 { // to anybody
			v := all[u.rng.IntN(len(all))]
			v.give(int64(u.rng.IntN(8)))
			v.ref.Wake()
			if v.ref.home() == u.ref.home() && !u.w.threads && !v.gone.Load() {
				v.owe()
			}
		}
	case 14, 15:
		if all := u.w.live(); len(all) > 0 {
			p := &u.out[u.rng.IntN(2)]
			for range 1 + u.rng.IntN(3) {
				p.post(all[u.rng.IntN(len(all))], func() {})
			}
		}
	case 12:
		if u.parent == nil {
			u.ref.Lead()
		}
	case 13:
		if all := u.w.live(); len(all) > 0 {
			if v := all[u.rng.IntN(len(all))]; v.parent == nil && v != u {
				u.ref.Beside(v.ref, u.rng.IntN(2) == 0)
			}
		}
	}
}

func (u *unit) depth() (n int) {
	for p := u.parent; p != nil; p = p.parent {
		n++
	}
	return n
}

// give adds work; what a unit is given that has gone is nobody's. The caller wakes it.
func (u *unit) give(n int64) {
	if u.link == nil {
		u.add(n)
	}
}

func (u *unit) add(n int64) {
	u.w.count(n)
	u.work.Add(n)
	if u.gone.Load() {
		u.w.count(-u.work.Swap(0))
	}
}

func (u *unit) startTimer(d time.Duration) {
	p := &pendingTimer{due: u.w.g.Now().Add(d)}
	u.w.count(1)
	p.t = u.ref.After(d, func() {
		defer u.enter("a timer")()
		switch {
		case p.end:
			u.w.fault("unit %d: a timer that was stopped, or has fired, fires", u.name)
		case u.ref.Removed():
			u.w.fault("unit %d: a timer of a task that was removed fires", u.name)
		case u.w.g.Now().Before(p.due):
			u.w.fault("unit %d: a timer fires early", u.name)
		}
		p.end = true
		u.w.count(-1)
	})
	u.timers = append(slices.DeleteFunc(u.timers, func(p *pendingTimer) bool { return p.end }), p)
}

// remove ends a unit on its loop.
func (u *unit) remove() {
	u.leave()
	u.ref.Remove()
	if u.parent != nil {
		u.parent.kids = slices.DeleteFunc(u.parent.kids, func(k *unit) bool { return k == u })
	}
}

// leave takes what a unit has outstanding away.
func (u *unit) leave() {
	u.gone.Store(true)
	u.w.count(-u.work.Swap(0))
	for _, p := range u.timers {
		if !p.end {
			p.end = true
			u.w.count(-1)
		}
	}
	if u.link != nil {
		u.link.close()
	}
}

func newPosters() [2]poster {
	return [2]poster{{next: make(map[*unit]int)}, {next: make(map[*unit]int), later: true}}
}

// post sends a unit a function; those of one poster run in order.
func (p *poster) post(u *unit, f func()) {
	n := p.next[u] + 1
	u.w.count(1)
	post := u.ref.Post
	if p.later {
		post = u.ref.PostLater
	}
	ok := post(func() {
		u.w.count(-1)
		if u.ref.Removed() {
			return
		}
		defer u.enter("a function")()
		if u.posted[p]+1 != n {
			u.w.fault("unit %d: function %d of a poster after %d", u.name, n, u.posted[p])
		}
		u.posted[p] = n
		f()
	})
	if !ok {
		if !u.gone.Load() && !u.w.threads {
			u.w.fault("unit %d: a function is refused", u.name)
		}
		u.w.count(-1)
		return
	}
	p.next[u] = n
}

// A chain carries numbered bytes from a unit through a relay to another, which compares them.
type chain struct {
	w    *world
	head *unit // give it bytes to send
	sent atomic.Int64
	got  atomic.Int64
}

type source struct {
	c    Conn
	ch   *chain
	next byte
}

func (s *source) attach(r *Ref) error { return s.c.Attach(r) }
func (s *source) close()              {}

func (s *source) move(u *unit, budget int) (moved int, more bool) {
	p := make([]byte, 4<<10)
	for moved < budget {
		n := int(min(u.work.Load(), int64(len(p)), int64(budget-moved)))
		if n == 0 {
			return moved, false
		}
		for i := range p[:n] {
			p[i] = s.next + byte(i)
		}
		k, err := s.c.TryWrite(p[:n])
		if errors.Is(err, ErrAgain) {
			return moved, false
		}
		if err != nil {
			u.w.fault("unit %d: write: %v", u.name, err)
			return moved, false
		}
		s.next += byte(k)
		u.work.Add(int64(-k)) // the sink counts it
		s.ch.sent.Add(int64(k))
		moved += k
	}
	return moved, u.work.Load() > 0
}

type relay struct {
	from, to Conn
	left     []byte
}

func (y *relay) attach(r *Ref) error { return errors.Join(y.from.Attach(r), y.to.Attach(r)) }
func (y *relay) close()              {}

func (y *relay) move(u *unit, budget int) (moved int, more bool) {
	p := make([]byte, 8<<10)
	for moved < budget {
		if len(y.left) == 0 {
			n, err := y.from.TryRead(p[:min(len(p), budget-moved)])
			if err != nil {
				return moved, false
			}
			y.left = slices.Clone(p[:n])
		}
		n, err := y.to.TryWrite(y.left)
		if err != nil {
			return moved, false
		}
		y.left = y.left[n:]
		moved += n
	}
	return moved, true
}

type sink struct {
	c    Conn
	ch   *chain
	next byte
}

func (s *sink) attach(r *Ref) error { return s.c.Attach(r) }
func (s *sink) close()              {}

func (s *sink) move(u *unit, budget int) (moved int, more bool) {
	p := make([]byte, 2<<10)
	for moved < budget {
		n, err := s.c.TryRead(p[:min(len(p), budget-moved)])
		if err != nil {
			return moved, false
		}
		for i, b := range p[:n] {
			if b != s.next+byte(i) {
				u.w.fault("unit %d: byte %d of the chain is %d, want %d", u.name, s.ch.got.Load()+int64(i), b, s.next+byte(i))
				break
			}
		}
		s.next += byte(n)
		s.ch.got.Add(int64(n))
		u.w.count(int64(-n))
		moved += n
	}
	return moved, true
}

// addChain makes a chain, its parts top-level tasks or children of one of their own.
func (w *world) addChain(rng *rand.Rand) *chain {
	ch := &chain{w: w}
	a, b := Pipe()
	c, d := Pipe()
	for _, part := range []link{&source{c: a, ch: ch}, &relay{from: b, to: c}, &sink{c: d, ch: ch}} {
		set := func(u *unit) { u.stay, u.link = true, part }
		if rng.IntN(2) == 0 {
			u, _ := w.addRoot(rng.Uint64(), set)
			if _, ok := part.(*source); ok {
				ch.head = u
			}
			continue
		}
		parent, ref := w.addRoot(rng.Uint64(), func(u *unit) { u.stay = true })
		w.count(1)
		ref.Post(func() {
			w.count(-1)
			parent.addChild(func(u *unit) {
				set(u)
				if _, ok := part.(*source); ok {
					ch.head = u
				}
			})
		})
	}
	return ch
}

// script drives a world by what data says: the same data does the same, by hand.
type script struct {
	w       *world
	data    []byte
	rng     *rand.Rand
	posters [2]poster
	chains  []*chain
}

func newScript(w *world, data []byte) *script {
	h := fnv.New64a()
	h.Write(data)
	return &script{w: w, data: data, rng: rand.New(rand.NewPCG(h.Sum64(), 1)), posters: newPosters()}
}

func (s *script) any() *unit {
	all := s.w.live()
	if len(all) == 0 {
		return nil
	}
	return all[s.rng.IntN(len(all))]
}

// act does one thing.
func (s *script) act(op byte) {
	u := s.any()
	if u == nil {
		return
	}
	switch op % 8 {
	case 0:
		if s.w.roots() < 12 {
			s.w.addRoot(s.rng.Uint64(), nil)
		}
	case 1, 2:
		u.give(int64(s.rng.IntN(200) << s.rng.IntN(3)))
		u.ref.Wake()
	case 3:
		p := &s.posters[s.rng.IntN(2)]
		for range 1 + s.rng.IntN(100) { // more than fit between two looks at the woken tasks
			p.post(u, func() {})
		}
	case 4:
		s.posters[0].post(u, func() {
			if u.link == nil {
				u.misbehave()
			}
		})
	case 5:
		if !u.stay && u.parent == nil && s.rng.IntN(4) == 0 {
			s.posters[0].post(u, func() { u.remove() })
		}
	default:
		ch := s.chains[s.rng.IntN(len(s.chains))]
		if ch.head == nil {
			s.w.fault("a function that was posted at the start has not run")
			return
		}
		ch.head.add(int64(s.rng.IntN(60_000) << s.rng.IntN(4)))
		ch.head.ref.Wake()
	}
}

// end removes everybody.
func (s *script) end() {
	for _, u := range s.w.live() {
		if u.parent == nil {
			u.ref.Post(func() { u.remove() })
		}
	}
}

func (s *script) check(t *testing.T) {
	t.Helper()
	for _, f := range s.w.faults {
		t.Error(f)
	}
	for i, ch := range s.chains {
		if sent, got := ch.sent.Load(), ch.got.Load(); sent != got {
			t.Errorf("chain %d: %d bytes of %d arrived", i, got, sent)
		}
	}
	if n := s.w.outstanding.Load(); n != 0 {
		t.Errorf("%d units of work, bytes, functions and timers are outstanding", n)
	}
}

// runByHand runs a script on loops that are driven by hand, with the steps in an order that the script says.
func runByHand(t *testing.T, data []byte) *world {
	t.Helper()
	if len(data) < 2 {
		return nil
	}
	m := NewManualLoops(epoch, 1+int(data[0]%3), int(data[1]%3))
	w := newWorld(m.Group(), false)
	s := newScript(w, data)
	for range 2 {
		w.addRoot(s.rng.Uint64(), func(u *unit) { u.stay = true })
		s.chains = append(s.chains, w.addChain(s.rng))
	}
	m.Settle()
	for _, op := range data[2:] {
		switch {
		case op >= 0xf0:
			m.Advance(time.Duration(op&0xf) * 20 * time.Millisecond)
		case op >= 0x80: // some steps, so that what is done next falls into the midst of others
			for range op & 0x3f {
				m.Step()
			}
		default:
			s.act(op)
		}
	}
	m.Settle()
	for _, u := range w.live() {
		if u.link == nil && !u.gone.Load() && u.work.Load() > 0 {
			t.Errorf("unit %d has %d units of work left and no turn to come", u.name, u.work.Load())
		}
		if u.owed != nil && !u.gone.Load() {
			t.Errorf("unit %d was woken and has had no turn since", u.name)
		}
	}
	m.Advance(time.Second) // the last timers
	s.check(t)
	s.end()
	m.Settle()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if got := m.Group().Stats(); got != (Stats{}) {
		t.Errorf("after the end the group holds %+v, want nothing", got)
	}
	return w
}

// TestModelByHand runs many schedules.
func TestModelByHand(t *testing.T) {
	const seeds, ops = 100, 200
	var moves, children, waits int64
	for seed := range uint64(seeds) {
		rng := rand.New(rand.NewPCG(seed, 7))
		data := make([]byte, ops)
		for i := 0; i < len(data); i += 8 {
			var b [8]byte
			binary.NativeEndian.PutUint64(b[:], rng.Uint64())
			copy(data[i:], b[:])
		}
		w := runByHand(t, data)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
		moves += w.moves.Load()
		children += w.children.Load()
		waits += w.waits.Load()
	}
	t.Logf("%d moves between loops, %d children, %d waits compared with their bounds", moves, children, waits)
	if moves < seeds || children < seeds || waits < 100*seeds {
		t.Error("the schedules are not about what they are to be about")
	}
}

// FuzzModel is a schedule for each input.
func FuzzModel(f *testing.F) {
	f.Add([]byte{0, 0, 1, 2, 3, 4, 5, 6, 7, 0x90})
	f.Add([]byte{1, 2, 0, 0, 6, 0xff, 6, 0x85, 6, 0xf4, 1, 0x81, 1, 4, 4, 5, 0xbf})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 2000 {
			t.Skip("longer than it has to be")
		}
		runByHand(t, data)
	})
}

// TestModelOnThreads is the same on threads, with several who act at once.
func TestModelOnThreads(t *testing.T) {
	var moves int64
	for seed := range uint64(6) {
		g := startLoops(t, 2, int(seed%3))
		w := newWorld(g, true)
		scripts := make([]*script, 3)
		for i := range scripts {
			scripts[i] = newScript(w, []byte{byte(seed), byte(i)})
			w.addRoot(scripts[i].rng.Uint64(), func(u *unit) { u.stay = true })
			scripts[i].chains = []*chain{w.addChain(scripts[i].rng)}
		}
		settled := func(what string) bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for w.outstanding.Load() != 0 {
				select {
				case <-w.idle:
				case <-ctx.Done():
					t.Errorf("seed %d, %s: after a minute %d are outstanding", seed, what, w.outstanding.Load())
					return false
				}
			}
			return true
		}
		if !settled("start") {
			return
		}
		var wg sync.WaitGroup
		for _, s := range scripts {
			wg.Go(func() {
				for range 400 {
					s.act(byte(s.rng.Uint32()))
				}
			})
		}
		wg.Wait()
		if !settled("end") {
			return
		}
		for _, s := range scripts {
			s.check(t)
		}
		scripts[0].end()
		moves += w.moves.Load()
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	if moves < 6 {
		t.Errorf("%d moves between loops: the test is to be about them as well", moves)
	}
}
