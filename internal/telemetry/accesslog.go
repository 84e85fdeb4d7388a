package telemetry

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
)

// An accessLog is a bounded queue of lines and its writer: the data path never waits for a log. Lines of connections that
// ended by themselves may fill three quarters of it; the last quarter is kept for errors and denials.
type accessLog struct {
	limit int
	wake  chan struct{}

	dropped, droppedImportant atomic.Uint64

	mu    sync.Mutex // guards below
	lines [][]byte
}

func (l *accessLog) init(limit int) {
	l.limit, l.wake = limit, make(chan struct{}, 1)
}

func (l *accessLog) put(line []byte, important bool) {
	l.mu.Lock()
	limit := l.limit
	if !important {
		limit -= limit / 4
	}
	if len(l.lines) >= limit {
		l.mu.Unlock()
		if important {
			l.droppedImportant.Add(1)
		} else {
			l.dropped.Add(1)
		}
		return
	}
	l.lines = append(l.lines, line)
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// run writes the lines, many in one write.
func (l *accessLog) run(ctx context.Context, w io.Writer) error {
	var buf []byte
	for {
		ended := false
		select {
		case <-l.wake:
		case <-ctx.Done():
			ended = true
		}
		l.mu.Lock()
		lines := l.lines
		l.lines = nil
		l.mu.Unlock()
		buf = buf[:0]
		for _, line := range lines {
			buf = append(buf, line...)
		}
		if len(buf) > 0 && w != nil {
			if _, err := w.Write(buf); err != nil {
				return fmt.Errorf("telemetry: access log: %w", err)
			}
		}
		if ended {
			return nil
		}
	}
}
