package stack

import (
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"ztun.dev/ztun/internal/loop"
)

// How the census goes about it.
const (
	censusEvery = 100 * time.Millisecond // from one round to the next
	censusBatch = 64                     // connections that are looked at in one go: 20 µs
	censusPause = time.Millisecond       // then others have their turn
)

// A census counts what the buffers of the netstack hold, and makes them smaller where the process has no memory left. A
// connection is looked at some time after something was written to it or came for it, and then until it holds nothing, also
// after it was closed. An idle one costs nothing, and a busy one the same however many packets it moves.
type census struct {
	group  *loop.Group
	budget *loop.Budget // nil: nothing is counted

	mu      sync.Mutex // guards below. The netstack calls with its own locks held: it is a leaf
	touched []*conn    // for the next round
	timer   *loop.Timer
	closed  bool

	looking sync.Mutex // guards below
	round   []*conn    // to be looked at
	held    int
	account loop.Account
}

func (cs *census) init(g *loop.Group, b *loop.Budget) {
	cs.group, cs.budget = g, b
	cs.account = loop.NewAccount(b)
}

// touch makes the census look at a connection; safe from any goroutine.
func (c *conn) touch() {
	if c.census.budget != nil && !c.touched.Load() && !c.touched.Swap(true) {
		c.census.add(c)
	}
}

func (cs *census) add(x *conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.closed {
		return
	}
	cs.touched = append(cs.touched, x)
	if cs.timer == nil {
		cs.timer = cs.group.After(censusEvery, cs.look)
	}
}

// look is one batch of a round.
func (cs *census) look() {
	cs.looking.Lock()
	defer cs.looking.Unlock()
	if len(cs.round) == 0 {
		cs.mu.Lock()
		cs.round, cs.touched = cs.touched, nil
		cs.mu.Unlock()
	}
	level := cs.budget.Level()
	n := min(len(cs.round), censusBatch)
	for i, x := range cs.round[:n] {
		cs.round[i] = nil
		x.touched.Store(false) // what comes from here on is seen in the next round
		x.resize(level)
		held := x.holds()
		cs.held += held - x.counted
		if x.counted = held; held > 0 {
			x.touch()
		}
	}
	cs.round = cs.round[n:]
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.timer = nil
	switch {
	case cs.closed:
		cs.account.Set(0)
		return
	case len(cs.round) > 0:
		cs.timer = cs.group.After(censusPause, cs.look)
	case len(cs.touched) > 0:
		cs.timer = cs.group.After(censusEvery, cs.look)
	}
	cs.account.Set(cs.held)
}

// close ends the counting.
func (cs *census) close() {
	cs.mu.Lock()
	cs.closed = true
	if cs.timer != nil {
		cs.timer.Stop()
		cs.timer = nil
	}
	cs.touched = nil
	cs.mu.Unlock()
	cs.looking.Lock() // a look that has begun already is over
	defer cs.looking.Unlock()
	cs.round, cs.held = nil, 0
	cs.account.Set(0)
}

// resize gives the connection the buffers of a level. What they hold they keep, and what was invited still comes.
func (c *conn) resize(l loop.Level) {
	short := l == loop.Full
	if short == c.short {
		return
	}
	c.short = short
	size := int64(bufferSize)
	if short {
		size = bufferShort
	}
	opts := c.ep.SocketOptions()
	opts.SetReceiveBufferSize(size, true)
	opts.SetSendBufferSize(size, true)
}

// holds is how many bytes the connection's buffers hold, those to be sent rounded.
func (c *conn) holds() int {
	received, err := c.ep.GetSockOptInt(tcpip.ReceiveQueueSizeOption)
	if err != nil {
		received = 0
	}
	switch tcp.EndpointState(c.ep.State()) {
	case tcp.StateEstablished, tcp.StateCloseWait, tcp.StateFinWait1, tcp.StateClosing, tcp.StateLastAck:
		if n := c.atFIN.Load(); n >= 0 {
			return received + int(n) // until all of it, and the FIN, is acknowledged
		}
		return received + c.unacknowledged()
	}
	return received
}

// beforeFIN is called before a FIN is queued: after it nobody can tell what is before it.
func (c *conn) beforeFIN() {
	if c.census.budget != nil {
		c.atFIN.Store(int64(c.unacknowledged()))
		c.touch()
	}
}

// probeStep is how exact unacknowledged is.
const probeStep = 4 << 10

// unacknowledged is how many bytes wait in the send buffer, rounded down to 4 KiB. The netstack has no such figure; it tells
// whether it is less than the size of the buffer. So that size is varied, under the endpoint's lock, which whoever writes has. A
// resize that comes in between is lost; nothing is written after a FIN.
func (c *conn) unacknowledged() int {
	ep, ok := c.ep.(*tcp.Endpoint)
	if !ok {
		return 0
	}
	ep.LockUser()
	defer ep.UnlockUser()
	opts := ep.SocketOptions()
	size := opts.GetSendBufferSize()
	less := func(n int) bool {
		opts.SetSendBufferSize(int64(n), false)
		return ep.Readiness(waiter.WritableEvents) != 0
	}
	low, high := 0, 1 // steps: at least low, less than high
	for !less(high * probeStep) {
		low, high = high, 2*high
	}
	for high-low > 1 {
		if mid := (low + high) / 2; less(mid * probeStep) {
			high = mid
		} else {
			low = mid
		}
	}
	opts.SetSendBufferSize(size, false)
	return low * probeStep
}
