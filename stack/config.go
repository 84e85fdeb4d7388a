package stack

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

// Defaults of Config and Limits.
const (
	DefaultMaxInFlight        = 2048 // unanswered SYNs of one stack; a cap of 64 cost seconds in a burst of 1500 dials (measured)
	DefaultMaxInFlightProcess = 8192 // unanswered SYNs of the process

	DefaultKeepaliveTime     = 45 * time.Second // with the two below, a dead peer is found within 90 s
	DefaultKeepaliveInterval = 15 * time.Second
	DefaultKeepaliveRetries  = 3

	// maxAttempt bounds an unanswered SYN, and then once more its handshake (SYN-RECEIVED): the 75 s that BSD gives a
	// connection attempt.
	maxAttempt = 75 * time.Second
)

// A Config says what a Stack works on. Device, Group and Handler are required; other zero fields mean the defaults.
type Config struct {
	Device  tun.Device   // owned: the end of Run closes it
	Group   *loop.Group  // runs the task that reads Device; set-ups wait by it
	Handler Handler      // decides what becomes of flows
	Log     *slog.Logger // what an operator can change: limits that were reached. nil: nothing is logged

	// Steerer has the kernel carry or accept TCP flows, so that the netstack never does; nil: there is none, and HandBack returns
	// ErrUnsupported.
	Steerer Steerer

	Budget *loop.Budget // of the process's memory for connections; nil: none

	MaxInFlight int     // SYNs without an answer or in a handshake; at the limit the oldest is given up. 0 means 2048
	Limits      *Limits // shared by the stacks of the process; nil: limits of its own

	// Keepalive of established connections: the first probe after Time without a segment from the application, further
	// ones each Interval, and the end after Retries without an answer. Time < 0 turns probes off.
	KeepaliveTime     time.Duration // 0 means 45 s
	KeepaliveInterval time.Duration // 0 means 15 s
	KeepaliveRetries  int           // 0 means 3

	// UserTimeout is how long sent data may stay without an acknowledgement (RFC 5482). 0 means KeepaliveTime +
	// KeepaliveRetries * KeepaliveInterval, as long as a dead peer takes to be found on an idle connection; < 0 means
	// retransmission alone limits it.
	UserTimeout time.Duration

	// Stray, if set, is shown each TCP segment that belongs to no connection and is not a SYN, and reports whether it took
	// care of it; otherwise the netstack answers with RST. packet is borrowed: valid until Stray returns. It is called by
	// the task that reads the device.
	Stray func(flow Flow, packet []byte) bool

	// Manual is for loop.Manual: the netstack's timers run on the Group's clock and its loops, and a turn of the reader, a
	// timer and the beginning of a handshake end only when the netstack's goroutines have done what follows from them. The
	// same calls then have the same results. In production that would make retransmissions take turns with the data path.
	Manual bool

	// Rand seeds initial sequence numbers, timestamps and hashes. nil means crypto/rand.
	Rand io.Reader
}

func (c *Config) check() error {
	switch {
	case c.Device == nil:
		return errors.New("stack: config: no device")
	case c.Group == nil:
		return errors.New("stack: config: no group of loops")
	case c.Handler == nil:
		return errors.New("stack: config: no handler")
	case c.MaxInFlight < 0:
		return fmt.Errorf("stack: config: MaxInFlight: %d is negative", c.MaxInFlight)
	case c.KeepaliveRetries < 0 || c.KeepaliveInterval < 0:
		return fmt.Errorf("stack: config: keepalive of %d probes every %v: must not be negative", c.KeepaliveRetries, c.KeepaliveInterval)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.Limits == nil {
		c.Limits = NewLimits(0)
	}
	if c.KeepaliveTime == 0 {
		c.KeepaliveTime = DefaultKeepaliveTime
	}
	if c.KeepaliveInterval == 0 {
		c.KeepaliveInterval = DefaultKeepaliveInterval
	}
	if c.KeepaliveRetries == 0 {
		c.KeepaliveRetries = DefaultKeepaliveRetries
	}
	if c.UserTimeout == 0 {
		c.UserTimeout = max(c.KeepaliveTime, 0) + time.Duration(c.KeepaliveRetries)*c.KeepaliveInterval
	}
	return nil
}

// Limits are what the stacks of a process share: the number of SYNs in flight. At the limit a new SYN is dropped.
type Limits struct {
	max      int64
	inFlight atomic.Int64
}

// NewLimits returns limits of maxInFlight SYNs in flight; 0 means 8192.
func NewLimits(maxInFlight int) *Limits {
	if maxInFlight == 0 {
		maxInFlight = DefaultMaxInFlightProcess
	}
	return &Limits{max: int64(maxInFlight)}
}

// InFlight is the number of SYNs in flight now.
func (l *Limits) InFlight() int { return int(l.inFlight.Load()) }

// Acquire takes a place; false if there is none. Backends other than a Stack use it, too.
func (l *Limits) Acquire() bool {
	if l.inFlight.Add(1) > l.max {
		l.inFlight.Add(-1)
		return false
	}
	return true
}

// Release gives a place back.
func (l *Limits) Release() { l.inFlight.Add(-1) }
