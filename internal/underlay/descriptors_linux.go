package underlay

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Descriptors keep a reserve of the process's descriptors from the sockets of connections, for everything else: the admin server, logs,
// the control plane, new pods. Nobody has to count for that: the kernel gives out the lowest number that is free (POSIX, section
// 2.6), so that a number says how many are in use at least. It is safe for concurrent use; nil keeps nothing.
type Descriptors struct {
	limit int // RLIMIT_NOFILE
	first int // number of the reserve
	now   func() time.Time
	log   *slog.Logger

	refused atomic.Uint64
	mu      sync.Mutex // guards below
	warned  time.Time
}

// The reserve is an eighth of the limit, within these bounds.
const (
	minReserve = 32
	maxReserve = 1024
)

// NewDescriptors reads the limit of the process. Go has raised it to the hard one by then (package os).
func NewDescriptors(now func() time.Time, log *slog.Logger) (*Descriptors, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return nil, fmt.Errorf("underlay: descriptor limit: %w", err)
	}
	limit := int(min(l.Cur, 1<<30))
	return &Descriptors{limit: limit, first: limit - min(max(limit/8, minReserve), maxReserve), now: now, log: log}, nil
}

// Refused counts the connections that were not made because only the reserve was left.
func (d *Descriptors) Refused() uint64 { return d.refused.Load() }

// socket is Netns.Socket for a connection.
func (u *Underlay) socket(domain, typ, proto int) (int, error) {
	d := u.cfg.Descriptors
	fd, err := u.cfg.Netns.Socket(domain, typ, proto)
	if d == nil {
		return fd, err
	}
	if err == nil && fd >= d.first {
		_ = unix.Close(fd)
		err = fmt.Errorf("underlay: all of the %d descriptors but %d are in use, and those are reserved: %w", d.limit, d.limit-d.first, unix.EMFILE)
	}
	if errors.Is(err, unix.EMFILE) {
		d.refused.Add(1)
		d.warn()
		return -1, err
	}
	return fd, err
}

// left reports whether a connection may be accepted; fd is any descriptor.
func (d *Descriptors) left(fd int) bool {
	if d == nil {
		return true
	}
	lowest, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(lowest)
		if lowest < d.first {
			return true
		}
	}
	d.warn()
	return false
}

// warn writes a line, at most once a minute.
func (d *Descriptors) warn() {
	now := d.now()
	d.mu.Lock()
	due := d.warned.IsZero() || now.Sub(d.warned) >= time.Minute
	if due {
		d.warned = now
	}
	d.mu.Unlock()
	if due {
		d.log.Warn("descriptor limit reached: new connections are refused, or wait to be accepted; raise it by ulimit -n, LimitNOFILE= of the unit or that of the container",
			"limit", d.limit, "in_use", d.first, "reserved", d.limit-d.first)
	}
}
