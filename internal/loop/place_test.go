package loop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// startLoops runs a group of sparse and bulk threads until the test ends.
func startLoops(t testing.TB, bulk, sparse int) *Group {
	t.Helper()
	g, err := New(Config{Loops: bulk, Sparse: sparse, Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if got := g.Stats(); got != (Stats{}) {
			t.Errorf("after the end the group holds %+v, want nothing", got)
		}
	})
	return g
}

func TestTasksMoveBetweenSparseAndBulkLoops(t *testing.T) {
	m := NewManualLoops(epoch, 1, 1)
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	var moves int // bytes that each turn moves
	turns := 0
	ticks := 0
	r := m.Group().Add(func(r *Ref) Task {
		r.After(time.Second, func() { ticks++ })
		return turnFunc(func(int) bool { turns++; r.Moved(moves); return false })
	})
	wake := func() { r.Wake(); m.Settle() }
	m.Settle()
	if r.home().bulk {
		t.Fatal("a new task begins on a bulk loop")
	}
	posted := 0
	moves = bulkBytes/2 + 1
	wake()
	m.Advance(bulkWindow + time.Millisecond) // too slowly for bulk
	wake()
	wake()
	if r.home().bulk {
		t.Error("a task that moved its bytes slowly went to a bulk loop")
	}
	for range 5 {
		r.PostLater(func() { posted = turns })
	}
	wake()
	wake()
	if posted != turns-1 {
		t.Errorf("functions that were posted for later before a move ran after turn %d, want %d: they go along", posted, turns-1)
	}
	if !r.home().bulk {
		t.Error("a task that moved more than 1 MiB within 100 ms is not on a bulk loop")
	}
	before := turns
	wake()
	if turns == before {
		t.Error("after its move the task is not woken")
	}
	moves = 1000
	m.Advance(sparseWindow)
	wake() // ends the window of the bulk bytes
	m.Advance(sparseWindow)
	wake()
	if r.home().bulk {
		t.Error("a task that moved little for 200 ms is still on a bulk loop")
	}
	m.Advance(time.Second)
	if ticks != 1 {
		t.Errorf("a timer of a task that moved twice fired %d times, want once", ticks)
	}
	r.Post(r.Remove)
	m.Settle()
}

// TestMovesLoseNothing lets tasks with watches, timers, children and posts move between loops all the time.
func TestMovesLoseNothing(t *testing.T) {
	g := startLoops(t, 2, 2)
	var wg sync.WaitGroup
	for i := range 6 {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		task := &mover{fd: pair[0], rng: rand.New(rand.NewPCG(2, uint64(i)))}
		ref := g.Add(task.start)
		wg.Go(func() { // what is written comes back in order, through the child
			rng := rand.New(rand.NewPCG(3, uint64(i)))
			var posted []int
			n := 0
			for round := range 300 {
				size := 1 + rng.IntN(64<<10)
				if err := exchange(pair[1], byte(round), size); err != nil {
					t.Errorf("task %d, round %d: %v", i, round, err)
					break
				}
				for range rng.IntN(4) {
					k := n
					n++
					if !ref.Post(func() { posted = append(posted, k) }) {
						t.Errorf("task %d: a post is refused", i)
					}
				}
			}
			got := make(chan struct{})
			ref.Post(func() {
				if len(posted) != n || !slices.IsSorted(posted) {
					t.Errorf("task %d: %d of %d posts ran, sorted %v", i, len(posted), n, slices.IsSorted(posted))
				}
				if task.ticks == 0 {
					t.Errorf("task %d: its timer does not fire", i)
				}
				if task.homes < 3 {
					t.Errorf("task %d: moved %d times; the test is to be about moves", i, task.homes)
				}
				ref.Remove()
				close(got)
			})
			<-got
			unix.Close(pair[0])
			unix.Close(pair[1])
		})
	}
	wg.Wait()
}

// exchange writes size bytes and reads them back.
func exchange(fd int, b byte, size int) error {
	out := make([]byte, size)
	for i := range out {
		out[i] = b
	}
	in, limit := 0, time.Now().Add(10*time.Second)
	buf := make([]byte, 64<<10)
	for in < size {
		n := 0
		if len(out) > 0 {
			if k, err := unix.Write(fd, out); err == nil {
				out, n = out[k:], k
			}
		}
		k, err := unix.Read(fd, buf)
		switch {
		case err == nil && k == 0:
			return io.ErrUnexpectedEOF
		case err == nil:
			for _, x := range buf[:k] {
				if x != b {
					return fmt.Errorf("read %d, want %d", x, b)
				}
			}
			in += k
		case !errors.Is(err, unix.EAGAIN):
			return err
		case n == 0:
			if time.Now().After(limit) {
				return fmt.Errorf("%d of %d bytes came back: a wake-up was lost", in, size)
			}
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			if len(out) > 0 {
				p[0].Events |= unix.POLLOUT
			}
			if _, err := unix.Poll(p, 1000); err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
		}
	}
	return nil
}

// A mover echoes by a child, and claims to move much or little by turns, so that it is moved.
type mover struct {
	fd    int
	rng   *rand.Rand
	r     *Ref
	last  *eventLoop
	homes int
	ticks int
	left  []byte
}

func (m *mover) start(r *Ref) Task {
	m.r = r
	m.tick()
	c := r.Child(func(*Ref) Task { return turnFunc(m.echo) })
	if err := r.Watch(m.fd, func(Events) { c.WakeLocal() }); err != nil {
		return nil
	}
	return turnFunc(func(budget int) bool {
		if h := r.home(); h != m.last {
			m.last = h
			m.homes++
		}
		r.Moved(m.rng.IntN(3 * bulkBytes / 2))
		r.place.since = r.place.since.Add(-sparseWindow / 4) // windows pass quickly
		if m.rng.IntN(2) == 0 {
			r.place.moved = 0
		}
		return r.RunChildren(budget)
	})
}

func (m *mover) tick() {
	m.r.After(time.Millisecond, func() { m.ticks++; m.r.Wake(); m.tick() })
}

func (m *mover) echo(int) bool {
	p := m.r.Scratch()[:8<<10]
	for {
		if len(m.left) > 0 {
			n, err := unix.Write(m.fd, m.left)
			if err != nil {
				return false
			}
			m.left = m.left[n:]
			continue
		}
		n, err := unix.Read(m.fd, p)
		if err != nil || n == 0 {
			return false
		}
		m.left = slices.Clone(p[:n])
	}
}

// A bulkTask claims to move n bytes in each turn.
type bulkTask struct {
	r    *Ref
	n    int
	more bool
	log  func()
}

func (b *bulkTask) Turn(int) bool {
	if b.log != nil {
		b.log()
	}
	b.r.Moved(b.n)
	return b.more
}

func TestTasksAreBesideTheirLeader(t *testing.T) {
	m := NewManualLoops(epoch, 3, 1)
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	tasks := make([]*bulkTask, 4)
	for i := range tasks {
		b := new(bulkTask)
		tasks[i] = b
		m.Group().Add(func(r *Ref) Task {
			b.r = r
			switch i {
			case 0:
				r.Lead()
			case 1, 2:
				r.Beside(tasks[0].r, false)
			}
			return b
		})
		m.Settle()
	}
	for _, b := range tasks {
		b.n = bulkBytes + 1
	}
	leader, early, late, other := tasks[0].r, tasks[1].r, tasks[2].r, tasks[3].r
	wake := func(refs ...*Ref) {
		for _, r := range refs {
			r.Wake()
			m.Settle()
		}
	}
	wake(early, late, leader, other) // two move much before their leader does, and go where there is least
	if !early.home().bulk || late.home() != leader.home() || !late.home().bulk {
		t.Error("a leader that moves much did not go to the loop of the last that waits for it")
	}
	if other.home() == leader.home() {
		t.Error("a task that has no leader is beside one although there is a loop with less")
	}
	if early.home() == leader.home() {
		t.Fatal("the early task is beside its leader already; the test is to see it follow")
	}
	m.Advance(sparseWindow)
	wake(early)
	if early.home() != leader.home() {
		t.Error("after its window a task is not beside its leader")
	}
	early.place.relieved = true // as relief has it
	m.Advance(sparseWindow)
	wake(early)
	if early.home() != leader.home() {
		t.Error("a task that was moved to relieve a loop is moved without need")
	}
	tasks[2].n = 0
	m.Advance(sparseWindow)
	wake(late) // ends the window of the bulk bytes
	m.Advance(sparseWindow)
	wake(late)
	tasks[2].n = bulkBytes + 1
	if wake(late); late.home() != leader.home() || !late.home().bulk {
		t.Error("a task that moves much did not go to its leader's loop")
	}
	for _, b := range tasks {
		b.n = 0
	}
	m.Advance(sparseWindow)
	wake(leader, early, late, other)
	m.Advance(sparseWindow)
	wake(leader, early, late, other)
	if early.place.relieved {
		t.Error("a task that moves little still counts as relieved")
	}
	for _, b := range tasks {
		b.r.Post(b.r.Remove)
	}
	m.Settle()
}

// A leader that brings little but acknowledgements is beside whoever moves much and waits for them, and where nobody does keeps to the sparse
// loop: so it does where there are several with much work, which would not be beside it.
func TestALeaderGoesToWhoWaitsForIt(t *testing.T) {
	const nobody = -1
	for _, tt := range []struct {
		works []bool // each that moves much
		to    int    // to whom of them the leader goes
	}{
		{nil, nobody},
		{[]bool{false}, 0},
		{[]bool{true}, 0},
		{[]bool{true, true}, nobody},
		{[]bool{true, true, false}, 2},
		{[]bool{false, true, true}, 0},
		{[]bool{true, false}, 1},
	} {
		t.Run(fmt.Sprint("works=", tt.works), func(t *testing.T) {
			m := NewManualLoops(epoch, 3, 1)
			defer func() {
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}()
			leader := &bulkTask{n: sparseBytes + 1}
			add := func(b *bulkTask, start func(r *Ref)) {
				m.Group().Add(func(r *Ref) Task {
					b.r = r
					start(r)
					return b
				})
				m.Settle()
			}
			add(leader, (*Ref).Lead)
			m.Advance(bulkWindow + 1)
			leader.n = 0
			leader.r.Wake()
			m.Settle() // a new window
			var all []*bulkTask
			for _, works := range tt.works {
				b := &bulkTask{n: bulkBytes + 1}
				add(b, func(r *Ref) { r.Beside(leader.r, works) })
				if all = append(all, b); !b.r.home().bulk {
					t.Fatal("a task that moves much is not on a bulk loop")
				}
			}
			leader.n = sparseBytes
			leader.r.Wake()
			m.Settle()
			if leader.r.home().bulk {
				t.Error("a leader that moves little is on a bulk loop")
			}
			leader.n = 1
			leader.r.Wake()
			m.Settle()
			if tt.to == nobody {
				if leader.r.home().bulk {
					t.Error("a leader that nobody waits for is on a bulk loop")
				}
			} else if want := all[tt.to].r.home(); leader.r.home() != want {
				t.Errorf("the leader is on loop %d, who waits for it on %d", leader.r.home().index, want.index)
			}
			// After their windows who has much work is beside the leader if it is the only one that has, the others are in any case.
			m.Advance(sparseWindow)
			for _, b := range all {
				b.r.Wake()
				m.Settle()
			}
			for i, b := range all {
				works := 0
				for _, w := range tt.works {
					if w {
						works++
					}
				}
				if want := tt.to != nobody && (!tt.works[i] || works == 1); (b.r.home() == leader.r.home()) != want {
					t.Errorf("task %d is on loop %d, the leader on %d; want that they are beside each other: %v", i, b.r.home().index, leader.r.home().index, want)
				}
			}
			for _, b := range append(all, leader) {
				b.r.Post(b.r.Remove)
			}
			m.Settle()
			if n, w := leader.r.place.followers.Load(), leader.r.place.workers.Load(); n != 0 || w != 0 {
				t.Errorf("%d followers are counted, %d of them with much work; all have gone", n, w)
			}
		})
	}
}

// A leader on a bulk loop that nobody waits for any more goes back when it moves little for a bulk task, and stays if it moves much.
func TestALeaderLeavesWhenNobodyWaits(t *testing.T) {
	for name, follower := range map[string]bool{"nobody": false, "somebody": true} {
		t.Run(name, func(t *testing.T) {
			m := NewManualLoops(epoch, 2, 1)
			defer func() {
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}()
			leader, task := &bulkTask{n: bulkBytes + 1}, &bulkTask{n: bulkBytes + 1}
			m.Group().Add(func(r *Ref) Task { leader.r = r; r.Lead(); return leader })
			m.Group().Add(func(r *Ref) Task {
				if task.r = r; follower {
					r.Beside(leader.r, false)
				}
				return task
			})
			m.Settle()
			round := func() {
				m.Advance(sparseWindow)
				task.r.Wake()
				leader.r.Wake()
				m.Settle()
			}
			if round(); !leader.r.home().bulk {
				t.Fatal("a leader that moves much is not on a bulk loop")
			}
			leader.n = bulkBytes - 1
			round()
			if round(); leader.r.home().bulk != follower {
				t.Errorf("the leader is on a bulk loop: %v, want %v", leader.r.home().bulk, follower)
			}
			for _, b := range []*bulkTask{leader, task} {
				b.r.Post(b.r.Remove)
			}
			m.Settle()
		})
	}
}

// Who gets another leader counts among that one's followers after its window, and no longer among those of the first.
func TestFollowersOfAnotherLeader(t *testing.T) {
	m := NewManualLoops(epoch, 2, 1)
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	var tasks [3]bulkTask
	for i := range tasks {
		m.Group().Add(func(r *Ref) Task { tasks[i].r = r; return &tasks[i] })
	}
	m.Settle()
	first, second, follower := tasks[0].r, tasks[1].r, &tasks[2]
	expect := func(what string, leader *Ref, followers, workers int32) {
		t.Helper()
		if n, w := leader.place.followers.Load(), leader.place.workers.Load(); n != followers || w != workers {
			t.Errorf("%s: %d followers, %d of them with much work, are counted; want %d, %d", what, n, w, followers, workers)
		}
	}
	window := func() {
		m.Advance(sparseWindow)
		follower.r.Wake()
		m.Settle()
	}
	follower.n = bulkBytes + 1
	follower.r.Beside(first, true)
	follower.r.Wake()
	m.Settle()
	expect("the first", first, 1, 1)
	follower.r.Beside(second, true)
	window()
	expect("the first, which it left", first, 0, 0)
	expect("the second", second, 1, 1)
	follower.r.Beside(second, false)
	window()
	expect("the second, without much work", second, 1, 0)
	follower.r.Beside(first, true)
	follower.r.Post(follower.r.Remove)
	m.Settle()
	expect("the first, after the end", first, 0, 0)
	expect("the second, after the end", second, 0, 0)
	for _, r := range []*Ref{first, second} {
		r.Post(r.Remove)
	}
	m.Settle()
}

func TestTasksWithMuchWorkLeaveTheirLeader(t *testing.T) {
	m := NewManualLoops(epoch, 2, 1)
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	tasks := make([]*bulkTask, 3)
	for i := range tasks {
		b := new(bulkTask)
		tasks[i] = b
		m.Group().Add(func(r *Ref) Task {
			if b.r = r; i == 0 {
				r.Lead()
			} else {
				r.Beside(tasks[0].r, true)
			}
			return b
		})
	}
	m.Settle()
	turn := func(n int, which ...*bulkTask) {
		for _, b := range which {
			b.n = n
			b.r.Wake()
			m.Settle()
		}
	}
	leader, one, two := tasks[0], tasks[1], tasks[2]
	turn(bulkBytes+1, leader, one)
	if one.r.home() != leader.r.home() {
		t.Error("the only task with much work is not beside its leader")
	}
	turn(bulkBytes+1, two)
	m.Advance(sparseWindow)
	turn(bulkBytes+1, leader, one, two)
	for i, b := range []*bulkTask{one, two} {
		if !b.r.home().bulk || b.r.home() == leader.r.home() {
			t.Errorf("task %d of two with much work is not on a bulk loop apart from the leader's", i)
		}
	}
	two.r.Post(two.r.Remove)
	m.Settle()
	m.Advance(sparseWindow)
	turn(bulkBytes+1, leader, one)
	if one.r.home() != leader.r.home() {
		t.Error("the one task that is left is not beside its leader")
	}
	m.Advance(sparseWindow)
	turn(0, one)
	m.Advance(sparseWindow)
	turn(0, one)
	if n := leader.r.place.workers.Load(); n != 0 || one.r.home().bulk {
		t.Errorf("%d followers are counted, none moves much", n)
	}
	for _, b := range []*bulkTask{leader, one} {
		b.r.Post(b.r.Remove)
	}
	m.Settle()
}

// Of what only moves bytes a saturated loop gives some away where there is a core for it alone.
func TestASaturatedLoopKeepsItsLeaderAndGivesOthersAway(t *testing.T) {
	for cores, leaves := range map[int]bool{2: false, 3: true} {
		t.Run(fmt.Sprint("cores=", cores), func(t *testing.T) { checkSaturatedLoop(t, cores, leaves) })
	}
}

func checkSaturatedLoop(t *testing.T, cores int, leaves bool) {
	m := NewManualLoops(epoch, 2, 1)
	m.Group().cfg.Cores = cores
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	m.Group().ran = func() time.Duration { return m.Group().Now().Sub(epoch) } // all the time
	tasks := make([]*bulkTask, 3)
	for i := range tasks {
		b := &bulkTask{n: bulkBytes + 1}
		tasks[i] = b
		m.Group().Add(func(r *Ref) Task {
			if b.r = r; i == 0 {
				r.Lead()
			} else {
				r.Beside(tasks[0].r, false)
			}
			return b
		})
		m.Settle()
	}
	leader := tasks[0].r.home()
	apart := func() (n int) {
		for _, b := range tasks[1:] {
			if b.r.home() != leader {
				n++
			}
		}
		return n
	}
	if apart() != 0 {
		t.Fatal("the tasks are not beside their leader; the test is to see one go")
	}
	for range 20 { // their windows end in the same round, the leader's first
		m.Advance(sparseWindow)
		for _, b := range tasks {
			b.r.Wake()
		}
		m.Settle()
	}
	if (apart() > 0) != leaves || tasks[0].r.home() != leader {
		t.Errorf("%d tasks have left the saturated loop, the leader stayed: %v; want that some have left: %v, and that it did", apart(), tasks[0].r.home() == leader, leaves)
	}
	for _, b := range tasks {
		b.r.Post(b.r.Remove)
	}
	m.Settle()
}

func TestALeaderHasEverySecondTurn(t *testing.T) {
	m := newManual(t)
	var order []byte
	var refs []*Ref
	for _, name := range []byte("Labc") {
		refs = append(refs, m.Group().Add(func(r *Ref) Task {
			if name == 'L' {
				r.Lead()
			}
			return &bulkTask{r: r, more: true, log: func() { order = append(order, name) }}
		}))
	}
	for len(order) < 20 {
		m.Step()
	}
	if got := string(order[8:]); !strings.Contains(got, "LaLbLcLa") { // after the beginning, when all were new
		t.Errorf("busy tasks had their turns in the order %s, want the leader between any two", order)
	}
	for _, r := range refs {
		r.Post(r.Remove)
	}
	m.Settle()
}
