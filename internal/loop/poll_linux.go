package loop

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Events is a set of what changed on a watched descriptor.
type Events uint32

// The events of a Watch. HangUp and Failed come without being asked for: the next call on the descriptor tells more.
const (
	Readable   Events = unix.EPOLLIN
	Writable   Events = unix.EPOLLOUT
	PeerClosed Events = unix.EPOLLRDHUP // the peer will send no more
	HangUp     Events = unix.EPOLLHUP
	Failed     Events = unix.EPOLLERR
)

const edges = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET

// A watch is a slot of a poller. Its generation tells an event of a closed descriptor from one of its successor.
type watch struct {
	fd         int
	slot       int32
	generation int32
	ready      func(Events)
}

// A poller is one epoll and the eventfd that interrupts it.
type poller struct {
	epfd  int
	event int
	slots []*watch // by slot; nil: free
	free  []int32
	gen   int32
	buf   [128]unix.EpollEvent
}

const eventSlot = -1

func newPoller() (*poller, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epfd)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	p := &poller{epfd: epfd, event: event}
	// Edge-triggered: each write is an edge, and the counter never has to be read (it overflows after 2^64 writes).
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: eventSlot}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, event, &ev); err != nil {
		p.close()
		return nil, fmt.Errorf("epoll: watch the eventfd: %w", err)
	}
	return p, nil
}

func (p *poller) close() {
	unix.Close(p.epfd)
	unix.Close(p.event)
}

// interrupt ends a poll that waits; from any goroutine.
func (p *poller) interrupt() {
	one := [8]byte{1}
	unix.Write(p.event, one[:]) //nolint:errcheck // fails only if an interruption is due already
}

func (p *poller) watch(fd int, ready func(Events)) (*watch, error) {
	p.gen++
	w := &watch{fd: fd, generation: p.gen, ready: ready}
	if n := len(p.free); n > 0 {
		w.slot = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		w.slot = int32(len(p.slots))
		p.slots = append(p.slots, nil)
	}
	p.slots[w.slot] = w
	ev := unix.EpollEvent{Events: edges, Fd: w.slot, Pad: w.generation}
	if err := unix.EpollCtl(p.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		p.release(w)
		return nil, fmt.Errorf("loop: watch descriptor %d: %w", fd, err)
	}
	return w, nil
}

func (p *poller) unwatch(w *watch) {
	p.release(w)
	// An error means that the descriptor was closed before, which is the end of the watch as well.
	unix.EpollCtl(p.epfd, unix.EPOLL_CTL_DEL, w.fd, nil) //nolint:errcheck // see above
}

func (p *poller) release(w *watch) {
	p.slots[w.slot] = nil
	p.free = append(p.free, w.slot)
}

// poll waits for events, at most d (negative: without limit), and hands them out. It reports whether there were any.
func (p *poller) poll(d time.Duration, _ *eventLoop) bool {
	var n int
	if d == 0 {
		// Without telling the scheduler: the call does not block.
		r, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.epfd), uintptr(unsafe.Pointer(&p.buf[0])), uintptr(len(p.buf)), 0, 0, 0)
		if errno == 0 {
			n = int(r)
		}
	} else {
		ms := -1
		if d > 0 {
			ms = int((d + time.Millisecond - 1) / time.Millisecond)
		}
		var err error
		n, err = unix.EpollWait(p.epfd, p.buf[:], ms)
		if err != nil && !errors.Is(err, unix.EINTR) {
			panic("loop: epoll_wait: " + err.Error()) // only a closed epoll descriptor does that
		}
	}
	for i := range max(n, 0) {
		ev := &p.buf[i]
		if ev.Fd == eventSlot {
			continue
		}
		if w := p.slots[ev.Fd]; w != nil && w.generation == ev.Pad {
			w.ready(Events(ev.Events))
		}
	}
	return n > 0
}

// threadTime is the CPU time of the calling thread.
func threadTime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// yieldThread lets other threads of the core run first.
func yieldThread() {
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // cannot fail
}

// sparseSlice is the EEVDF slice that a loop's thread asks for (measured: 200 µs shortens the tail of a ping-pong beside
// bulk flows from 3 to 2 ms).
const sparseSlice = 200 * time.Microsecond

// tuneThread asks the kernel to run the thread soon when it wakes (Linux 6.12 and later; otherwise nothing happens).
func tuneThread() {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL, Runtime: uint64(sparseSlice)}
	unix.SchedSetAttr(0, &attr, 0) //nolint:errcheck // an improvement only
}
