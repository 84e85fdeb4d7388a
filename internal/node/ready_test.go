package node

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
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

// A pod may have a port of ours, or nothing else that we need.
func TestPodThatCannotBeCapturedEndsNoOther(t *testing.T) {
	taken := errors.New("port 15008 is taken")
	tests := []struct {
		name   string
		broken []string
		want   string // pods in the order in which they are served
		err    error
	}{
		{"none", nil, "one two three", nil},
		{"the first", []string{"one"}, "two three one", nil},
		{"all but one", []string{"one", "three"}, "two one three", nil},
		{"all", []string{"one", "two", "three"}, "", taken},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := &Node{log: slog.New(slog.DiscardHandler)}
			for _, name := range []string{"one", "two", "three"} {
				n.specs = append(n.specs, podSpec{client: workload.Client{Namespace: "shop", Name: name}})
			}
			var served []string
			err := n.start(t.Context(), func(_ context.Context, p *pod) error {
				if slices.Contains(tt.broken, p.spec.client.Name) {
					return taken
				}
				p.set(&pipeline{}, nil)
				return nil
			}, func(p *pod) { served = append(served, p.spec.client.Name) })
			if !errors.Is(err, tt.err) || strings.Join(served, " ") != tt.want {
				t.Errorf("start = %v, served %q; want %v, %q", err, served, tt.err, tt.want)
			}
			if reasons := n.pendingPods(); len(reasons) != len(tt.broken) {
				t.Errorf("reasons of pods that are pending: %q, want those of %q", reasons, tt.broken)
			}
		})
	}
}
