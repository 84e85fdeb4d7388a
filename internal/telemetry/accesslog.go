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
	text  []byte     // the lines, one behind the other
	lines int
}

// keptText is how much memory stays for text between bursts, in bytes.
const keptText = 1 << 20

func (l *accessLog) init(limit int) {
	l.limit, l.wake = limit, make(chan struct{}, 1)
}

// put copies a line.
func (l *accessLog) put(line []byte, important bool) {
	l.mu.Lock()
	limit := l.limit
	if !important {
		limit -= limit / 4
	}
	if l.lines >= limit {
		l.mu.Unlock()
		if important {
			l.droppedImportant.Add(1)
		} else {
			l.dropped.Add(1)
		}
		return
	}
	l.text = append(l.text, line...)
	l.lines++
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// take returns what was put, and has text in its place.
func (l *accessLog) take(text []byte) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	text, l.text = l.text, text[:0]
	l.lines = 0
	return text
}

// run writes the lines, many in one write.
func (l *accessLog) run(ctx context.Context, w io.Writer) error {
	var text []byte
	for {
		ended := false
		select {
		case <-l.wake:
		case <-ctx.Done():
			ended = true
		}
		if cap(text) > keptText {
			text = nil
		}
		text = l.take(text)
		if len(text) > 0 && w != nil {
			if _, err := w.Write(text); err != nil {
				return fmt.Errorf("telemetry: access log: %w", err)
			}
		}
		if ended {
			return nil
		}
	}
}
