package demo

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
)

// lines collects what a process writes, line by line, for readers that wait for one of them.
type lines struct {
	mu      sync.Mutex // guards below
	all     []string
	partial []byte
	more    chan struct{} // closed at the next line
}

// Write implements io.Writer.
func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.partial = append(l.partial, p...)
	for {
		line, rest, ok := bytes.Cut(l.partial, []byte{'\n'})
		if !ok {
			return len(p), nil
		}
		l.all = append(l.all, string(line))
		l.partial = slices.Clone(rest)
		if l.more != nil {
			close(l.more)
			l.more = nil
		}
	}
}

// wait returns nil once match has accepted a line, of those from number first on.
func (l *lines) wait(ctx context.Context, first int, match func(line string) bool) error {
	for {
		l.mu.Lock()
		news := l.all[min(first, len(l.all)):]
		if l.more == nil {
			l.more = make(chan struct{})
		}
		more := l.more
		l.mu.Unlock()
		if slices.ContainsFunc(news, match) {
			return nil
		}
		first += len(news)
		select {
		case <-more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// len is the number of lines so far.
func (l *lines) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.all)
}

// last returns the last n lines and what came after them.
func (l *lines) last(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := slices.Clone(l.all[max(0, len(l.all)-n):])
	if len(l.partial) > 0 {
		out = append(out, string(l.partial))
	}
	return strings.Join(out, "\n")
}
