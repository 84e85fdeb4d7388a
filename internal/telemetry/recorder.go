package telemetry

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// A Config configures a Recorder.
type Config struct {
	Now    func() time.Time
	Access io.Writer // the access log; nil: none
	Opened bool      // a line when a connection opens, too
	JSON   bool      // lines are JSON objects
	Log    *slog.Logger

	QueueLines int // lines that may wait for the writer: 10 000, ztunnel's; above it lines are dropped and counted
}

// A Recorder keeps the records of the open connections. Its methods may be called from any goroutine.
type Recorder struct {
	cfg    Config
	lastID atomic.Uint64
	log    accessLog

	mu   sync.Mutex // guards below
	open map[*Conn]struct{}

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
	r := &Recorder{cfg: cfg, open: make(map[*Conn]struct{})}
	r.log.init(cfg.QueueLines)
	return r, nil
}

// Run writes the access log until ctx ends, and then what is left in the queue.
func (r *Recorder) Run(ctx context.Context) error {
	return r.log.run(ctx, r.cfg.Access)
}

// Open begins the record of a connection, whose set-up ends by close if it has to end before its time.
func (r *Recorder) Open(f Facts, closer func(cause error)) *Conn {
	c := &Conn{ID: r.lastID.Add(1), Start: r.cfg.Now(), Facts: f, rec: r, close: closer}
	r.mu.Lock()
	r.open[c] = struct{}{}
	r.mu.Unlock()
	r.opened.Add(1)
	if r.cfg.Opened && r.cfg.Access != nil {
		r.log.put(r.line(c, "debug", "connection opened", nil, false), false)
	}
	return c
}

// Fail records a flow that failed before anything was decided about it.
func (r *Recorder) Fail(f Facts, err error) {
	f.EarlyFailure = true
	c := &Conn{ID: r.lastID.Add(1), Start: r.cfg.Now(), Facts: f, rec: r, finished: true}
	r.failed.Add(1)
	if r.cfg.Access != nil {
		r.log.put(r.line(c, "warn", "connection failed", err, false), true)
	}
}

func (r *Recorder) finish(c *Conn, err error) {
	r.mu.Lock()
	delete(r.open, c)
	r.mu.Unlock()
	r.closed.Add(1)
	level := "info"
	if err != nil {
		level = "error"
	}
	if r.cfg.Access != nil {
		r.log.put(r.line(c, level, "connection complete", err, true), err != nil)
	}
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
	LinesDropped   uint64 // lines that found the queue full
}

// Stats counts.
func (r *Recorder) Stats() Stats {
	r.mu.Lock()
	open := len(r.open)
	r.mu.Unlock()
	return Stats{Opened: r.opened.Load(), Closed: r.closed.Load(), Failed: r.failed.Load(), Open: open, LinesDropped: r.log.dropped.Load()}
}
