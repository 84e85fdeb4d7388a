package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"ztun.dev/ztun/internal/workload"
)

// A Config configures a Recorder.
type Config struct {
	Now    func() time.Time
	Access io.Writer // the access log; nil: none
	Opened bool      // a line when a connection opens, too; without Levels
	Levels *Levels   // which lines are written: those of AccessTarget; nil: all but those of Opened
	JSON   bool      // lines are JSON objects
	Fields []string  // of AccessFields, that lines have beside ztunnel's
	Log    *slog.Logger

	Registerer prometheus.Registerer          // of the traffic metrics; nil: none
	DropLabels []string                       // labels of the traffic metrics that are left out, of DroppableLabels
	Classify   func(err error) (Flag, Reason) // how an error counts; nil: errors have a method Telemetry, or are FlagConnect and ReasonOther
	ErrorText  func(err error) string         // what lines say of an error; nil: its own text
	Store      *workload.Store                // which workloads there are: series of others end; nil: none ends

	// Opening, if set, is told of every connection when its record begins. It must not wait.
	Opening func(c *Conn)

	// Ended, if set, is told of every connection that has ended and of every flow that failed early, by whoever ended it; err is nil if
	// it ended by itself. It must not wait.
	Ended func(c *Conn, err error)

	MaxSeries  int //  sets of labels of the traffic metrics: 10 000; above it connections count in sets whose names are all other
	QueueLines int // lines that may wait for the writer: 10 000, ztunnel's; above it lines are dropped and counted
}

// A Recorder keeps the records of the open connections. Its methods may be called from any goroutine.
type Recorder struct {
	cfg    Config
	lastID atomic.Uint64
	log    accessLog

	mu      sync.Mutex // guards below
	open    map[*Conn]struct{}
	kernel  int // of open: those that the kernel carries
	metrics *metrics

	opened, failed, closed atomic.Uint64
}

// NewRecorder returns a Recorder. Its Run writes the access log.
func NewRecorder(cfg Config) (*Recorder, error) {
	if cfg.Now == nil || cfg.Log == nil {
		return nil, errors.New("telemetry: config: Now and Log are required")
	}
	if cfg.QueueLines == 0 {
		cfg.QueueLines = 10_000
	}
	if cfg.MaxSeries == 0 {
		cfg.MaxSeries = 10_000
	}
	if cfg.ErrorText == nil {
		cfg.ErrorText = error.Error
	}
	if cfg.Classify == nil {
		cfg.Classify = classify
	}
	r := &Recorder{cfg: cfg, open: make(map[*Conn]struct{}), metrics: newMetrics(cfg.MaxSeries, cfg.DropLabels)}
	r.log.init(cfg.QueueLines)
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(r); err != nil {
			return nil, fmt.Errorf("telemetry: traffic metrics: %w", err)
		}
	}
	return r, nil
}

// Run writes the access log until ctx ends, and then what is left in the queue.
func (r *Recorder) Run(ctx context.Context) error {
	return r.log.run(ctx, r.cfg.Access)
}

// Open begins the record of a connection, whose set-up ends by close if it has to end before its time.
func (r *Recorder) Open(f Facts, closer func(cause error)) *Conn {
	c := &Conn{ID: r.lastID.Add(1), Start: r.cfg.Now(), Facts: f, rec: r, close: closer}
	labels, about := f.labels(r.metrics.keep)
	state := r.state()
	r.mu.Lock()
	c.series = r.metrics.of(&labels, about, c.Start, state)
	r.open[c] = struct{}{}
	r.mu.Unlock()
	r.opened.Add(1)
	if r.logs(slog.LevelDebug) {
		r.write(c, "debug", "connection opened", nil, false)
	}
	if r.cfg.Opening != nil {
		r.cfg.Opening(c)
	}
	return c
}

func (r *Recorder) state() *workload.Snapshot {
	if r.cfg.Store == nil {
		return nil
	}
	return r.cfg.Store.Snapshot()
}

// logs reports whether lines of a level are written.
func (r *Recorder) logs(l slog.Level) bool {
	switch {
	case r.cfg.Access == nil:
		return false
	case r.cfg.Levels != nil:
		return l >= r.cfg.Levels.Level(AccessTarget)
	}
	return l > slog.LevelDebug || r.cfg.Opened
}

// Fail records a flow that failed before anything was decided about it.
func (r *Recorder) Fail(f Facts, err error) {
	c := r.failedEarly(f, err)
	if r.logs(slog.LevelWarn) {
		r.write(c, "warn", "connection failed", err, false)
	}
	r.tellEnded(c, err)
}

// FailUnlogged is Fail without a line in the access log: for failures of which there are many of one kind. The next that has a line
// says how many there were (Facts.Suppressed).
func (r *Recorder) FailUnlogged(f Facts, err error) {
	r.tellEnded(r.failedEarly(f, err), err)
}

// failedEarly counts a failure.
func (r *Recorder) failedEarly(f Facts, err error) *Conn {
	r.failed.Add(1)
	_, reason := r.cfg.Classify(err)
	reason = reason.known()
	r.mu.Lock()
	r.metrics.early[f.Direction][reason]++
	r.metrics.ends[f.Direction][reason]++
	r.mu.Unlock()
	f.EarlyFailure = true
	return &Conn{ID: r.lastID.Add(1), Start: r.cfg.Now(), Facts: f, rec: r, finished: true}
}

func (r *Recorder) tellEnded(c *Conn, err error) {
	if r.cfg.Ended != nil {
		r.cfg.Ended(c, err)
	}
}

func (r *Recorder) finish(c *Conn, err error) {
	flag, reason := FlagNone, Reason("")
	if err != nil {
		flag, reason = r.cfg.Classify(err)
	}
	c.flag = min(flag, flagCount-1)
	now := r.cfg.Now()
	r.mu.Lock()
	delete(r.open, c)
	if c.Kernel() {
		r.kernel--
	}
	c.count()
	c.series.closed[c.flag]++
	if c.series.open--; c.series.open == 0 {
		c.series.idle = now
	}
	if flag != FlagNone {
		r.metrics.ends[c.Direction][reason.known()]++
	}
	r.mu.Unlock()
	r.closed.Add(1)
	level, name := slog.LevelInfo, "info"
	if err != nil {
		level, name = slog.LevelError, "error"
	}
	if r.logs(level) {
		r.write(c, name, "connection complete", err, true)
	}
	r.tellEnded(c, err)
}

// Each calls f for every open connection, on a copy of the list.
func (r *Recorder) Each(f func(*Conn)) {
	r.mu.Lock()
	list := make([]*Conn, 0, len(r.open))
	for c := range r.open {
		list = append(list, c)
	}
	r.mu.Unlock()
	for _, c := range list {
		f(c)
	}
}

// Stats are counts since the start.
type Stats struct {
	Opened, Closed uint64 // connections
	Failed         uint64 // flows that failed early
	Open           int    // connections now
	Kernel         int    // of them: those that the kernel carries
	LinesDropped   uint64 // lines that found the queue full
}

// Stats counts.
func (r *Recorder) Stats() Stats {
	r.mu.Lock()
	open, kernel := len(r.open), r.kernel
	r.mu.Unlock()
	return Stats{Opened: r.opened.Load(), Closed: r.closed.Load(), Failed: r.failed.Load(), Open: open, Kernel: kernel, LinesDropped: r.log.dropped.Load() + r.log.droppedImportant.Load()}
}
