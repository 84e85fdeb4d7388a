package hbone

import (
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A tunnel is bulk from when it moved more than bulkBytes within bulkTime until it moves less than calmBytes in calmTime. Its
// connection window counts as used up after stallTime: a window that is merely full is credited within a round trip.
const (
	bulkBytes = 1 << 20
	bulkTime  = 100 * time.Millisecond
	calmBytes = 256 << 10
	calmTime  = 200 * time.Millisecond
	stallTime = 100 * time.Millisecond
)

// A meter tells whether a tunnel is one that further streams had better not share.
type meter struct {
	since   time.Time // when counting began
	moved   int       // bytes since then
	bulk    bool
	stalled bool // the peer gives no connection credit
	waits   bool // a timer will look whether it is stalled
	told    bool // what the owner knows
}

// measure counts what a turn moved, either way.
func (t *tunnel) measure(n int) {
	m := &t.meter
	m.moved += n
	if !m.bulk && m.moved > bulkBytes/8 { // no look at the clock for what is far from bulk
		now := t.ref.Now()
		switch {
		case now.Sub(m.since) > bulkTime:
			m.since, m.moved = now, n
		case m.moved > bulkBytes:
			m.bulk, m.moved = true, 0
			if b, ok := t.link.conn.(loop.Backlogged); ok {
				b.BoundBacklog()
			}
			t.ref.After(calmTime, t.remeasure)
		}
	}
	switch {
	case !t.eng.exhausted():
		m.stalled = false
	case !m.stalled && !m.waits:
		m.waits = true
		t.ref.After(stallTime, func() {
			m.waits = false
			m.stalled = t.err == nil && t.eng.exhausted()
			t.tellBusy()
		})
	}
	t.tellBusy()
}

// remeasure looks whether a bulk tunnel has become calm.
func (t *tunnel) remeasure() {
	m := &t.meter
	if m.bulk = m.moved >= calmBytes && t.err == nil; m.bulk {
		t.ref.After(calmTime, t.remeasure)
	}
	m.since, m.moved = t.ref.Now(), 0
	t.tellBusy()
}

func (t *tunnel) tellBusy() {
	m := &t.meter
	if busy := m.bulk || m.stalled; busy != m.told {
		m.told = busy
		t.owner.busyChanged(t, busy)
	}
}
