package node

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/loop"
)

func TestReadinessWhilePodsArePending(t *testing.T) {
	m := loop.NewManual(time.Now())
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	now := m.Group().Now
	r := admin.NewReadiness(now, slog.New(slog.DiscardHandler))
	one, two := &pod{}, &pod{}
	g := gate{task: r.Add("workload proxy manager", nil), group: m.Group(), pods: func() []*pod { return []*pod{one, two} }, limit: 30 * time.Second, now: now}
	expect := func(what string, want bool) {
		t.Helper()
		m.Settle()
		if r.Ready() != want {
			t.Errorf("%s: ready is %v, want %v", what, r.Ready(), want)
		}
	}
	lose := func(p *pod) {
		p.set(nil, errors.New("lost"))
		p.since = now()
		g.check()
	}
	expect("before the start", false)
	lose(one)
	one.set(&pipeline{}, nil)
	g.check()
	expect("a pod that is served, before the start", false)
	g.start()
	expect("after the start", true)
	lose(one)
	expect("a pod was lost", false)
	m.Advance(20 * time.Second)
	lose(two)
	m.Advance(10 * time.Second)
	expect("D6: the first for 30 s, the second for 10 s", false)
	one.set(nil, errors.New("still"))
	g.check()
	m.Advance(20 * time.Second)
	expect("D6: both for 30 s", true)
	two.set(&pipeline{}, nil)
	g.check()
	expect("one is served again", true)
	lose(two)
	expect("and lost again", false)
	two.set(&pipeline{}, nil)
	g.check()
	expect("and served again", true)
	g.limit = 0
	lose(two)
	m.Advance(time.Hour)
	expect("without a limit", false)
	g.close()
	g.check()
	if n := m.Group().Stats().Timers; n != 0 {
		t.Errorf("%d timers after the end", n)
	}
}
