package telemetry

import (
	"net/netip"
	"sync/atomic"
	"time"
)

// A State is where a connection is in its life. Local is the side of this node's pod, remote the other.
type State uint8

// The states.
const (
	Connecting State = iota // its set-up is not over
	Open
	HalfClosedLocal  // the pod has sent its end
	HalfClosedRemote // the other side has
	Closing          // it was told to end before its time
	Draining         // open, of a pod that takes no new ones
)

var stateNames = []string{"connecting", "open", "half-closed-local", "half-closed-remote", "closing", "draining"}

func (s State) String() string { return stateNames[s] }

// A Step is a part of the set-up of a connection that takes time.
type Step uint8

// The steps. A tunnel that is there already takes no time to connect and no TLS.
const (
	StepClassify Step = iota // the decision about it
	StepPolicy               // inbound: the decision of policy, with the wait for one that has not arrived
	StepResolve              // of the hostname of its endpoint
	StepConnect              // of TCP, to the next hop or the application
	StepTLS                  // the handshake of the tunnel
	StepResponse             // the answer to the CONNECT
	stepCount
)

var stepNames = [stepCount]string{"classify", "policy", "resolve", "connect", "tls", "response"}

func (s Step) String() string { return stepNames[s] }

// progress is what becomes of an open connection: written by its set-up and its relay, read by whoever looks.
type progress struct {
	established atomic.Bool
	downEnded   atomic.Bool // the side that opened it has sent its end
	upEnded     atomic.Bool
	draining    atomic.Bool
	active      atomic.Int64 // when bytes moved last, in nanoseconds of Unix time
	buffered    atomic.Int64
	steps       [stepCount]atomic.Int64 // nanoseconds
}

// Took adds to the time that a step of the set-up has taken.
func (c *Conn) Took(s Step, d time.Duration) { c.steps[s].Add(int64(d)) }

// Established says that both sides are connected.
func (c *Conn) Established(now time.Time) {
	c.active.Store(now.UnixNano())
	c.established.Store(true)
}

// Active says that bytes were moved just now, and how many wait in this process.
func (c *Conn) Active(now time.Time, buffered int) {
	c.active.Store(now.UnixNano())
	c.buffered.Store(int64(buffered))
}

// Ended says which sides have sent their end: the one that opened the connection, and the other.
func (c *Conn) Ended(downstream, upstream bool) {
	c.downEnded.Store(downstream)
	c.upEnded.Store(upstream)
}

// Drain says that the pod takes no new connections.
func (c *Conn) Drain() { c.draining.Store(true) }

// SetPolicy says which policy has decided.
func (c *Conn) SetPolicy(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.finished {
		c.Policy = key
	}
}

// SetTunnel says which is the node's end of the tunnel.
func (c *Conn) SetTunnel(local netip.AddrPort) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.finished {
		c.TunnelLocal = local
	}
}

// A Status is a look at a connection.
type Status struct {
	State    State
	Idle     time.Duration // since bytes moved last; of one that is connecting: since its begin
	Buffered int64         // bytes that one side has sent and the other not taken, in this process's relay
	Policy   string        // that allowed it
	Tunnel   netip.AddrPort
	Steps    [stepCount]time.Duration // by Step
}

// Status is what is known of the connection now. It may be called from any goroutine.
func (c *Conn) Status(now time.Time) Status {
	c.mu.Lock()
	s := Status{Policy: c.Policy, Tunnel: c.TunnelLocal, Buffered: c.buffered.Load()}
	closing := c.cause != nil
	c.mu.Unlock()
	localEnded, remoteEnded := c.downEnded.Load(), c.upEnded.Load()
	if c.Direction == Inbound {
		localEnded, remoteEnded = remoteEnded, localEnded
	}
	since := c.Start
	established := c.established.Load()
	if established {
		since = time.Unix(0, c.active.Load())
	}
	s.Idle = max(0, now.Sub(since))
	for i := range s.Steps {
		s.Steps[i] = time.Duration(c.steps[i].Load())
	}
	switch {
	case closing:
		s.State = Closing
	case !established:
	case localEnded:
		s.State = HalfClosedLocal
	case remoteEnded:
		s.State = HalfClosedRemote
	case c.draining.Load():
		s.State = Draining
	default:
		s.State = Open
	}
	return s
}
