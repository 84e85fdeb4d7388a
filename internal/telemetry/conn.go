package telemetry

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"ztun.dev/ztun/internal/workload"
)

// A Direction is relative to the workload that this node serves.
type Direction uint8

// The directions.
const (
	Outbound Direction = iota
	Inbound
)

func (d Direction) String() string {
	if d == Inbound {
		return "inbound"
	}
	return "outbound"
}

// A Protocol is what carries the connection between the nodes.
type Protocol uint8

// The protocols.
const (
	TCP Protocol = iota
	HBONE
	DoubleHBONE // through the gateway of another network
)

func (p Protocol) String() string {
	switch p {
	case HBONE:
		return "HBONE"
	case DoubleHBONE:
		return "DOUBLEHBONE"
	}
	return "TCP"
}

// Facts are what is known of a connection when it opens. Unknown ones are zero.
type Facts struct {
	Direction        Direction
	Protocol         Protocol
	Src              netip.AddrPort // who opened it
	Dst              netip.AddrPort // outbound: the next hop; inbound HBONE: the pod's address and port 15008; else the original destination
	OriginalDst      netip.AddrPort // as the application addressed it
	AppDst           netip.AddrPort // inbound: the application, after every translation; what policies are matched with
	ForwardedHost    string         // inbound: the service that the peer says it has addressed
	HBONEAddr        string         // the authority of the CONNECT
	Service          string         // hostname of the destination service
	ServiceNamespace string         // of the destination service, as the next; for metrics, found by the hostname if empty
	ServiceName      string
	Source           *workload.Workload
	Claimed          *workload.Workload // what the peer says of its workload, where Source is nil
	Destination      *workload.Workload
	SrcIdentity      workload.Identity // proven, or our own
	DstIdentity      workload.Identity // proven, or our own
	TraceID          string            // 32 hexadecimal digits, the same at both ends
	Policy           string            // that decided; once the Conn is open it is set by SetPolicy
	TunnelLocal      netip.AddrPort    // the node's end of the tunnel; as Policy, by SetTunnel
	EarlyFailure     bool              // the flow failed before anything was decided: a short line
	Suppressed       uint64            // how many that failed as this one have no line, since the last that has
}

// A Conn is the record of one connection.
type Conn struct {
	ID    uint64
	Start time.Time
	Facts

	// Counted by whoever moves the bytes, when they were written. Received flowed from the side that opened the connection,
	// Sent to it.
	Received, Sent atomic.Uint64

	progress

	kernel   atomic.Bool // the kernel moves the bytes
	rec      *Recorder
	series   *series    // as counted, guarded by the lock of rec
	counted  [2]uint64  // what of Received and Sent is in series
	flag     Flag       // how it ended
	mu       sync.Mutex // guards below
	close    func(cause error)
	cause    error // of a Close before there was a closer, or of the one in progress
	finished bool
}

// SetCloser says how the connection is ended before its time, in place of the closer before: first the end of its set-up, then
// the reset of both sides. If Close was called before, f runs at once. f may be called from any goroutine, once.
func (c *Conn) SetCloser(f func(cause error)) {
	c.mu.Lock()
	c.close = f
	cause := c.cause
	if cause != nil {
		c.close = nil
	}
	c.mu.Unlock()
	if cause != nil && f != nil {
		f(cause)
	}
}

// CarriedByKernel says whether the kernel moves the bytes of the connection; whoever learns of them then sets the counts.
func (c *Conn) CarriedByKernel(yes bool) {
	r := c.rec
	r.mu.Lock()
	defer r.mu.Unlock()
	was := c.kernel.Swap(yes)
	if _, open := r.open[c]; !open || was == yes {
		return
	}
	if yes {
		r.kernel++
	} else {
		r.kernel--
	}
}

// Resume sets the counts of a connection that an earlier process has counted: what flows from now on is added to the metrics.
func (c *Conn) Resume(received, sent uint64) {
	c.rec.mu.Lock()
	defer c.rec.mu.Unlock()
	c.Received.Store(received)
	c.Sent.Store(sent)
	c.counted = [2]uint64{received, sent}
}

// Kernel reports whether the kernel moves the bytes.
func (c *Conn) Kernel() bool { return c.kernel.Load() }

// Close ends the connection before its time; cause is what its line says. It does not wait.
func (c *Conn) Close(cause error) {
	c.mu.Lock()
	if c.finished || c.cause != nil {
		c.mu.Unlock()
		return
	}
	c.cause = cause
	f := c.close
	c.close = nil
	c.mu.Unlock()
	if f != nil {
		f(cause)
	}
}

// Cause is why Close was called, or nil.
func (c *Conn) Cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// Finish ends the record: its line is written. err is nil for a connection that ended by itself; the cause of a Close wins.
// Only the first call counts.
func (c *Conn) Finish(err error) {
	c.mu.Lock()
	if c.finished {
		c.mu.Unlock()
		return
	}
	c.finished = true
	c.close = nil
	if c.cause != nil {
		err = c.cause
	}
	c.mu.Unlock()
	c.rec.finish(c, err)
}
