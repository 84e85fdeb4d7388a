package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"ztun.dev/ztun/internal/lab"
)

// A figure is one value of a row.
type figure struct {
	row   string
	value float64
}

// A measurement gives the figures of one or more rows.
type measurement struct {
	name     string
	rows     []row
	connects bool // it is about new connections
	take     func(ctx context.Context, b *bed, p *path, d time.Duration) ([]figure, error)
}

// isOn reports whether it is taken on a path. What is remembered makes a difference for new connections only, and fairness is shown
// on the other paths.
func (m *measurement) isOn(path string) bool {
	switch path {
	case pathRemembered:
		return m.connects
	case pathService, pathNetstackService:
		return !strings.HasPrefix(m.name, "beside/")
	}
	return true
}

// measurements are those of a round, in the order of their rows.
func measurements() []measurement {
	var all []measurement
	for _, streams := range []int{1, 8} {
		for _, direction := range []string{"up", "down"} {
			all = append(all, bulkMeasurement(streams, direction, false))
		}
	}
	for _, direction := range []string{"up", "down"} {
		all = append(all, bulkMeasurement(8, direction, true))
	}
	for _, conns := range []int{1, 32} {
		all = append(all, pingpongMeasurement(conns))
	}
	for _, workers := range []int{1, 32} {
		all = append(all, connectMeasurement(workers))
	}
	for _, direction := range []string{"up", "down"} {
		for _, which := range []string{"same-pod", "other-pod", "joined"} {
			all = append(all, besideMeasurement(which, direction))
		}
	}
	return append(all, slowMeasurement())
}

// through takes a measurement and makes sure that ztun was on the path, where it is to be.
func (m *measurement) through(ctx context.Context, b *bed, p *path, d time.Duration) ([]figure, error) {
	nodes := p.through()
	before := make([]int64, len(nodes))
	for i, z := range nodes {
		before[i] = z.records.Load()
	}
	figures, err := m.take(ctx, b, p, d)
	if err != nil {
		return nil, err
	}
	for i, z := range nodes {
		if err := z.served(ctx, before[i]); err != nil {
			return nil, err
		}
	}
	return figures, nil
}

func bulkMeasurement(streams int, direction string, oneThread bool) measurement {
	kind := fmt.Sprintf("%d/%s", streams, direction)
	text := fmt.Sprintf("%s %s", plural(streams, "stream"), direction)
	if oneThread {
		kind, text = fmt.Sprintf("%d-one-thread/%s", streams, direction), text+" on one thread"
	}
	name, cpu := "bulk/"+kind, "cpu/"+kind
	return measurement{
		name: name,
		rows: []row{
			{Name: name, Title: text, Unit: "Gbit/s", Better: higher},
			{Name: cpu + "/source", Title: "CPU at the source, " + text, Unit: "s/GB", Better: lower},
			{Name: cpu + "/destination", Title: "CPU at the destination, " + text, Unit: "s/GB", Better: lower},
		},
		take: func(ctx context.Context, b *bed, p *path, d time.Duration) ([]figure, error) {
			sides := []struct {
				name string
				pid  int
				used float64
			}{{name: "source", pid: p.source()}, {name: "destination", pid: p.destination()}}
			clock := func(sign float64) error {
				for i := range sides {
					if s := &sides[i]; s.pid != 0 {
						t, err := cpuTime(s.pid)
						if err != nil {
							return err
						}
						s.used += sign * t
					}
				}
				return nil
			}
			if err := clock(-1); err != nil {
				return nil, err
			}
			var r bulkResult
			addr := p.bulk()
			if oneThread {
				addr = p.one()
			}
			err := runTool(ctx, p.client, d, &r, "bench-bulk", "-addr", addr, fmt.Sprintf("-one-thread=%t", oneThread), "-streams", fmt.Sprint(streams), fmt.Sprintf("-down=%t", direction == "down"), "-time", d.String())
			if err != nil {
				return nil, err
			}
			if err := clock(1); err != nil {
				return nil, err
			}
			figures := []figure{{name, r.gbits()}}
			for _, s := range sides {
				if s.pid != 0 {
					figures = append(figures, figure{cpu + "/" + s.name, s.used / (float64(r.Bytes) / 1e9)})
				}
			}
			return figures, nil
		},
	}
}

func pingpongMeasurement(conns int) measurement {
	name := fmt.Sprintf("pingpong/%d", conns)
	title := plural(conns, "connection")
	return measurement{
		name: name,
		rows: []row{
			{Name: name + "/p50", Title: "ping-pong p50, " + title, Unit: "µs", Better: lower},
			{Name: name + "/p99", Title: "ping-pong p99, " + title, Unit: "µs", Better: lower},
		},
		take: func(ctx context.Context, b *bed, p *path, d time.Duration) ([]figure, error) {
			var r pingpongResult
			if err := runTool(ctx, p.client, d, &r, "bench-pingpong", "-addr", p.small(), "-conns", fmt.Sprint(conns), "-time", d.String()); err != nil {
				return nil, err
			}
			return []figure{{name + "/p50", r.P50 * 1e6}, {name + "/p99", r.P99 * 1e6}}, nil
		},
	}
}

// mostFailed is how many connections there are at least for each that may fail: where the SYN, the ACK and the data of a connection are
// processed on different cores, Linux 6.18 resets one in 20,000 to 90,000, of which the lookup falls between the removal of the request and
// the insertion of the socket (a guess from a packet capture).
const mostFailed = 10_000

func connectMeasurement(workers int) measurement {
	name := fmt.Sprintf("connect/%d", workers)
	return measurement{
		name:     name,
		rows:     []row{{Name: name, Title: "connect-request-close, " + plural(workers, "worker"), Unit: "1/s", Better: higher}},
		connects: true,
		take: func(ctx context.Context, b *bed, p *path, d time.Duration) ([]figure, error) {
			var r connectResult
			if err := runTool(ctx, p.client, d, &r, "bench-connect", "-addr", p.small(), "-workers", fmt.Sprint(workers), "-time", d.String()); err != nil {
				return nil, err
			}
			if r.Failed > max(1, r.Connections/mostFailed) {
				return nil, fmt.Errorf("benchnet: %d of %d connections failed, the first: %s", r.Failed, r.Failed+r.Connections, r.FirstError)
			}
			return []figure{{name, float64(r.Connections) / r.Seconds}}, nil
		},
	}
}

// besideMeasurement is a ping-pong while a pod sends eight streams to the same server, or receives them: the pod of the ping-pong, or
// another one of its node. Where it says joined, the ping-pong was there first, and the streams find its tunnel.
func besideMeasurement(which, direction string) measurement {
	name := "beside/" + which + "/" + direction
	title := "beside 8 streams " + direction + " " + map[string]string{
		"same-pod": "of the same pod", "other-pod": "of another pod", "joined": "that joined it",
	}[which]
	return measurement{
		name: name,
		rows: pingpongRows(name, title),
		take: func(ctx context.Context, b *bed, p *path, d time.Duration) ([]figure, error) {
			asks := p.client
			if which == "other-pod" {
				asks = p.neighbour
			}
			warmup := d / 5
			startBulk := func() (*background, error) {
				return startBackground(ctx, p.client, slack, running, "bench-bulk", "-addr", p.bulk(), "-streams", "8", "-announce",
					fmt.Sprintf("-down=%t", direction == "down"), "-time", (d + slack).String())
			}
			if which == "joined" {
				return joined(ctx, name, p, d, warmup, startBulk)
			}
			bulk, err := startBulk()
			if err != nil {
				return nil, err
			}
			defer bulk.end()
			// They are known to move much before it comes. In its first milliseconds their tunnel is as good as any.
			if err := pause(ctx, firstTime); err != nil {
				return nil, err
			}
			return pingpongBeside(ctx, name, asks, p, d, warmup)
		},
	}
}

// firstTime is how long a ping-pong is alone before the streams join it, and the streams before it comes.
const firstTime = 300 * time.Millisecond

func joined(ctx context.Context, name string, p *path, d, warmup time.Duration, startBulk func() (*background, error)) ([]figure, error) {
	type outcome struct {
		figures []figure
		err     error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan outcome, 1)
	go func() {
		f, err := pingpongBeside(ctx, name, p.client, p, d, 2*firstTime+warmup)
		done <- outcome{f, err}
	}()
	err := pause(ctx, firstTime)
	var bulk *background
	if err == nil {
		if bulk, err = startBulk(); err == nil {
			defer bulk.end()
		}
	}
	if err != nil {
		cancel()
	}
	o := <-done
	if err != nil {
		return nil, err
	}
	return o.figures, o.err
}

// fillTime is how long it takes at least until all windows and buffers of slow readers are full.
const fillTime = 2 * time.Second

// slowMeasurement is a ping-pong beside 99 readers that take next to nothing: as many as fill a tunnel with it.
func slowMeasurement() measurement {
	const name = "beside/slow-readers"
	return measurement{
		name: name,
		rows: pingpongRows(name, "beside 99 slow readers"),
		take: func(ctx context.Context, b *bed, p *path, d time.Duration) ([]figure, error) {
			slow, err := startBackground(ctx, p.client, slack, running, "bench-slow", "-addr", p.one(), "-conns", "99", "-time", (d + fillTime + slack).String())
			if err != nil {
				return nil, err
			}
			defer slow.end()
			return pingpongBeside(ctx, name, p.client, p, d, fillTime)
		},
	}
}

func pingpongRows(name, title string) []row {
	return []row{
		{Name: name + "/p50", Title: "ping-pong p50 " + title, Unit: "µs", Better: lower},
		{Name: name + "/p99", Title: "ping-pong p99 " + title, Unit: "µs", Better: lower},
	}
}

func pingpongBeside(ctx context.Context, name string, asks *lab.Host, p *path, d, warmup time.Duration) ([]figure, error) {
	var r pingpongResult
	if err := runTool(ctx, asks, d+warmup, &r, "bench-pingpong", "-addr", p.small(), "-warmup", warmup.String(), "-time", d.String()); err != nil {
		return nil, err
	}
	return []figure{{name + "/p50", r.P50 * 1e6}, {name + "/p99", r.P99 * 1e6}}, nil
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// measure does everything. What could not be measured is in the report and in the error; the report is nil if nothing was.
func measure(ctx context.Context, o options) (_ *report, err error) {
	if _, err := os.Stat(o.ztun); err != nil {
		return nil, fmt.Errorf("benchnet: the binary: %w", err)
	}
	dir, err := os.MkdirTemp("", "ztun-benchnet-")
	if err != nil {
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r, err := newReport(ctx, o)
	if err != nil {
		return nil, err
	}
	defer r.finish()
	for _, w := range r.Facts.Warnings {
		o.say("warning: %s", w)
	}
	if err := measurePods(ctx, o, dir, r); err != nil {
		return r, err
	}
	b, err := newBed(ctx, o.ztun, dir)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	r.Facts.CongestionControl, r.Facts.MTU = b.lab.CongestionControl(), b.lab.MTU()
	if err := b.measureIdle(ctx, o, r); err != nil {
		return r, err
	}
	if err := b.rounds(ctx, o, r); err != nil {
		return r, err
	}
	return r, r.failures()
}

// rounds takes each measurement on each path as often as asked for, with the paths in another order each time.
func (b *bed) rounds(ctx context.Context, o options, r *report) error {
	all := measurements()
	wanted := false
	for i := range all {
		r.addRows(all[i].rows)
		wanted = wanted || len(b.chosen(o, &all[i], 0)) > 0
	}
	if !wanted {
		return nil
	}
	if err := b.startZtun(ctx); err != nil {
		return err
	}
	for round := range o.rounds {
		o.say("round %d of %d", round+1, o.rounds)
		for _, m := range all {
			for _, p := range b.chosen(o, &m, round) {
				figures, err := m.through(ctx, b, p, o.duration)
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				if err != nil {
					r.fail(m.name, p.name, err)
					continue
				}
				for _, f := range figures {
					r.add(f.row, p.name, round, f.value)
				}
			}
		}
	}
	if o.profile == "" {
		return nil
	}
	return b.profiles(ctx, o, all)
}

// chosen are the paths on which to take a measurement. Direct is with them if any is.
func (b *bed) chosen(o options, m *measurement, round int) []*path {
	var some []*path
	for _, p := range b.paths[1:] {
		if o.wants(m.name, p.name) && m.isOn(p.name) {
			some = append(some, p)
		}
	}
	if len(some) > 0 || o.wants(m.name, pathDirect) {
		some = append([]*path{b.paths[0]}, some...)
	}
	if len(some) > 0 {
		first := round % len(some)
		some = append(some[first:len(some):len(some)], some[:first]...)
	}
	return some
}

// profiles writes a CPU profile of each process of ztun for each measurement.
func (b *bed) profiles(ctx context.Context, o options, all []measurement) error {
	if err := os.MkdirAll(o.profile, 0o755); err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	for _, m := range all {
		for _, p := range b.chosen(o, &m, 0) {
			for _, z := range p.through() {
				file := filepath.Join(o.profile, fmt.Sprintf("%s.%s.%s.pprof", fileName(m.name), p.name, z.name))
				if err := b.profile(ctx, &m, p, z, file); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
