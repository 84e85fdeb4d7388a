package loop

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Sizes of turns. Slice was measured: 32 KiB costs 5-10 % of throughput at the same latency, 256 KiB gains nothing.
const (
	defaultSlice = 128 << 10 // bytes that one turn moves each way
	scratchBytes = 256 << 10 // one scratch buffer per loop
	maxPosts     = 64        // posted functions between two looks at the woken tasks

	lateSlice = 200 * time.Microsecond // of PostLater; as long as the thread of a sparse loop may run at a time
)

// A Config configures a Group.
type Config struct {
	Loops  int // threads; 0 means 1
	Sparse int // further threads, to which tasks that move little keep; 0: all threads are alike
	Cores  int // of the machine, which the threads of bulk tasks share with what they serve; 0 means runtime.NumCPU()

	Slice int              // bytes that one turn moves each way; 0 means 128 KiB
	Now   func() time.Time // the clock of timers and deadlines; required

	// StopTimeout is how long Run waits, after its context has ended, for tasks and set-ups to go by themselves. 0 means 5 s.
	StopTimeout time.Duration
}

// A Group is a set of loops and the set-ups that lead to their tasks. Its methods may be called from any goroutine.
type Group struct {
	cfg     Config
	loops   []*eventLoop         // all
	sparse  []*eventLoop         // where tasks begin
	bulk    []*eventLoop         // where those go that move much; empty if all loops are alike
	manual  *Manual              // nil: threads
	ran     func() time.Duration // how long the calling thread has run; by hand always 0: nothing is ever saturated
	stopped context.Context
	stop    context.CancelFunc
	setups  counter
	next    atomic.Uint32
}

// ErrStopped is the cause of the contexts of set-ups when the Group ends.
var ErrStopped = errors.New("loop: the group has stopped")

// New returns a Group of threads. Tasks may be added before Run starts them.
func New(cfg Config) (*Group, error) {
	if cfg.Now == nil {
		return nil, errors.New("loop: config: no clock")
	}
	if cfg.Loops < 0 || cfg.Sparse < 0 || cfg.Slice < 0 || cfg.Cores < 0 {
		return nil, fmt.Errorf("loop: config: loops %d, sparse %d, slice %d, cores %d: must not be negative", cfg.Loops, cfg.Sparse, cfg.Slice, cfg.Cores)
	}
	g := newGroup(cfg)
	for _, l := range g.loops {
		if err := l.needPoller(); err != nil {
			for _, l := range g.loops {
				if l.poll != nil {
					l.poll.close()
				}
			}
			return nil, err
		}
	}
	return g, nil
}

func newGroup(cfg Config) *Group {
	if cfg.Slice == 0 {
		cfg.Slice = defaultSlice
	}
	if cfg.StopTimeout == 0 {
		cfg.StopTimeout = 5 * time.Second
	}
	if cfg.Loops == 0 {
		cfg.Loops = 1
	}
	if cfg.Cores == 0 {
		cfg.Cores = runtime.NumCPU()
	}
	g := &Group{cfg: cfg, ran: threadTime}
	g.stopped, g.stop = context.WithCancel(context.Background())
	for i := range cfg.Loops + cfg.Sparse {
		l := newEventLoop(g, i, cfg.Sparse > 0 && i >= cfg.Sparse)
		g.loops = append(g.loops, l)
		if l.bulk {
			g.bulk = append(g.bulk, l)
		} else {
			g.sparse = append(g.sparse, l)
		}
	}
	return g
}

// Run runs the loops, each on a thread of its own. After ctx has ended it waits for the tasks to go, which others bring
// about, at most Config.StopTimeout; what is left then is removed and named in the error. Run is called once.
func (g *Group) Run(ctx context.Context) error {
	var threads sync.WaitGroup
	for _, l := range g.loops {
		threads.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the loop
			if !l.bulk {
				tuneThread()
			}
			l.run()
		})
	}
	<-ctx.Done()
	g.stop() // set-ups see it

	ended := make(chan struct{})
	go func() { threads.Wait(); close(ended) }()
	limit := time.NewTimer(g.cfg.StopTimeout) //nolint:forbidigo // the loops that would run a timer of the group are ending
	defer limit.Stop()
	for _, l := range g.loops {
		l.drain()
	}
	select {
	case <-ended:
	case <-limit.C:
		limit.Reset(g.cfg.StopTimeout)
		for _, l := range g.loops {
			l.abandon()
		}
		<-ended
	}
	var left []string
	for _, l := range g.loops {
		left = append(left, l.leftover...)
		l.poll.close()
	}
	select {
	case <-g.setups.idle():
	case <-limit.C:
		left = append(left, "the set-up of a connection")
	}
	if len(left) > 0 {
		return fmt.Errorf("loop: still running at the end: %s", strings.Join(left, ", "))
	}
	return nil
}

// A counter counts goroutines that may start at any time, also while somebody waits for all of them to end.
type counter struct {
	mu      sync.Mutex // guards below
	n       int
	waiters []chan struct{}
}

func (c *counter) add(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n += n; c.n == 0 {
		for _, w := range c.waiters {
			close(w)
		}
		c.waiters = nil
	}
}

// idle returns a channel that is closed once the count is 0.
func (c *counter) idle() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := make(chan struct{})
	if c.n == 0 {
		close(w)
	} else {
		c.waiters = append(c.waiters, w)
	}
	return w
}

// Add creates a task: start runs on the loop that the task is given to, attaches what the task reads, and returns it.
// The task's first Turn is due at once. A nil task is not added. Add returns nil, and start does not run, when the Group
// has ended.
func (g *Group) Add(start func(r *Ref) Task) *Ref {
	l := leastLoaded(g.sparse)
	r := newRoot(l)
	l.tasks.Add(1)
	if !l.post(func() { l.start(r, start) }) {
		l.tasks.Add(-1)
		return nil
	}
	return r
}

func leastLoaded(loops []*eventLoop) *eventLoop {
	best := loops[0]
	for _, l := range loops[1:] {
		if l.tasks.Load() < best.tasks.Load() {
			best = l
		}
	}
	return best
}

// Go runs the set-up of a connection: a goroutine, or, by hand, one at a time. f may wait only by Await and by what is
// built on it. Its context ends with ctx and, with the cause ErrStopped, with the Group; if the Group has stopped, f runs
// all the same, with a context that has ended.
func (g *Group) Go(ctx context.Context, f func(ctx context.Context)) {
	if g.manual != nil {
		g.manual.spawn(ctx, f)
		return
	}
	g.setups.add(1)
	go func() {
		defer g.setups.add(-1)
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		defer context.AfterFunc(g.stopped, func() { cancel(ErrStopped) })()
		f(ctx)
	}()
}

// Await waits until wake is called, or returns the cause of ctx's end. start is called once, by the caller's goroutine;
// wake may be called from any goroutine, any number of times, also before start returns and after Await has. It is the only
// way in which a set-up waits: where a set-up runs by hand, others go on meanwhile.
func Await(ctx context.Context, start func(wake func())) error {
	if co, ok := ctx.Value(coroutineKey{}).(*coroutine); ok {
		return co.await(ctx, start)
	}
	woken := make(chan struct{}, 1)
	start(func() {
		select {
		case woken <- struct{}{}:
		default:
		}
	})
	select {
	case <-woken:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Now is the time on the Group's clock.
func (g *Group) Now() time.Time { return g.cfg.Now() }

// After calls f on a loop once d has passed on the Group's clock. f must be short.
func (g *Group) After(d time.Duration, f func()) *Timer {
	l := g.loops[int(g.next.Add(1))%len(g.loops)]
	return l.after(d, f)
}

// WithTimeout is context.WithTimeout on the Group's clock.
func (g *Group) WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	inner, cancel := context.WithCancelCause(ctx)
	t := g.After(d, func() { cancel(context.DeadlineExceeded) })
	return timeoutCtx{inner}, func() {
		t.Stop()
		cancel(context.Canceled)
	}
}

// timeoutCtx makes Err agree with a deadline that was the cause.
type timeoutCtx struct{ context.Context }

func (c timeoutCtx) Err() error {
	if errors.Is(context.Cause(c.Context), context.DeadlineExceeded) {
		return context.DeadlineExceeded
	}
	return c.Context.Err()
}

// Stats are sums over the loops of a Group. All are 0 once everything has ended.
type Stats struct {
	Tasks   int // top-level tasks
	Watches int // watched descriptors
	Timers  int // pending timers
}

// Stats counts what the Group holds.
func (g *Group) Stats() Stats {
	var s Stats
	for _, l := range g.loops {
		s.Tasks += int(l.tasks.Load())
		s.Watches += int(l.watches.Load())
		l.mu.Lock()
		s.Timers += len(l.timers)
		l.mu.Unlock()
	}
	return s
}
