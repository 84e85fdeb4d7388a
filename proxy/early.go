package proxy

import (
	"errors"
	"sync"
	"time"

	"ztun.dev/ztun/internal/telemetry"
)

// selfCallLine is how often a pod's access log has a line about flows that would lead the proxy to itself: what makes one, a scan or
// a loop, makes many.
const selfCallLine = time.Minute

// fail records a flow that failed before anything was decided about it.
func (p *Proxy) fail(f telemetry.Facts, err error) {
	if errors.Is(err, errSelfCall) {
		var due bool
		if f.Suppressed, due = p.selfCalls.due(p.cfg.Group.Now(), selfCallLine); !due {
			p.cfg.Records.FailUnlogged(f, err)
			return
		}
	}
	p.cfg.Records.Fail(f, err)
}

// An occasional event is told of once in a while, and counted in between. It is safe for concurrent use.
type occasional struct {
	mu     sync.Mutex // guards below
	next   time.Time  // when it is told of again
	passed uint64     // since it was told of last
}

// due reports whether the event of now is told of, and how many were passed over before it.
func (o *occasional) due(now time.Time, every time.Duration) (passed uint64, due bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now.Before(o.next) {
		o.passed++
		return 0, false
	}
	passed, o.passed, o.next = o.passed, 0, now.Add(every)
	return passed, true
}
