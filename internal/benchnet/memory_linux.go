package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"ztun.dev/ztun/internal/lab"
)

const (
	podsRow  = "rss/namespace"
	idleName = "rss/idle"
	basePods = 2 // that a process has before memory is compared

	openWithin = 30 * time.Second // all idle connections
)

// measurePods compares the memory of a process with few namespaces and with many, in a network of its own.
func measurePods(ctx context.Context, o options, dir string, r *report) (err error) {
	if !o.wants(podsRow, pathZtun) {
		return nil
	}
	o.say("memory of %d namespaces", o.pods)
	r.addRows([]row{
		{Name: "rss/process", Title: fmt.Sprintf("RSS of a process with %d namespaces", basePods), Unit: "MiB", Better: lower},
		{Name: podsRow, Title: fmt.Sprintf("RSS for each of %d more namespaces", o.pods), Unit: "KiB", Better: lower},
	})
	dir = filepath.Join(dir, "pods")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	l, err := lab.New(ctx, lab.Config{Nodes: 1, PodsPerNode: basePods + o.pods})
	if err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	var members []member
	for j, pod := range l.Pods() {
		members = append(members, member{host: pod, node: l.Node(0), name: fmt.Sprintf("pod-%d", j)})
	}
	if err := writeMesh(dir, members, nil); err != nil {
		return err
	}
	var sizes [2]uint64
	for i, some := range [][]member{members[:basePods], members} {
		z, err := startZtun(ctx, o.ztun, dir, l.Node(0), some, "")
		if err != nil {
			return err
		}
		size, err := settledRSS(ctx, z.cmd.Pid())
		if err = errors.Join(err, z.stop()); err != nil {
			return err
		}
		sizes[i] = size
	}
	r.add("rss/process", pathZtun, 0, float64(sizes[0])/(1<<20))
	r.add(podsRow, pathZtun, 0, (float64(sizes[1])-float64(sizes[0]))/float64(o.pods)/(1<<10))
	return nil
}

// measureIdle compares the memory of fresh processes before and after many connections were opened.
func (b *bed) measureIdle(ctx context.Context, o options, r *report) error {
	limit, err := descriptors()
	if err != nil {
		return err
	}
	conns := min(o.idle, (limit-1000)/2) // a connection may need two of them, and there are others
	r.addRows([]row{
		{Name: idleName + "/source", Title: fmt.Sprintf("RSS at the source for each of %d idle connections", conns), Unit: "KiB", Better: lower},
		{Name: idleName + "/destination", Title: fmt.Sprintf("RSS at the destination for each of %d idle connections", conns), Unit: "KiB", Better: lower},
	})
	for _, p := range b.paths {
		if p.name != pathPassthrough && p.name != pathInbound && p.name != pathMesh || !o.wants(idleName, p.name) {
			continue
		}
		o.say("memory of %d idle connections, %s", conns, p.name)
		if err := b.startZtun(ctx); err != nil {
			return err
		}
		err := b.idle(ctx, p, conns, r)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			r.fail(idleName, p.name, err)
		}
		if err := b.stopZtun(); err != nil {
			return err
		}
	}
	return nil
}

func (b *bed) idle(ctx context.Context, p *path, conns int, r *report) error {
	// One connection first: certificates and tunnels are not what is compared.
	warm := pingpongMeasurement(1)
	if _, err := warm.through(ctx, b, p, 100*time.Millisecond); err != nil {
		return err
	}
	sides := []struct {
		row string
		pid int
	}{{idleName + "/source", p.source()}, {idleName + "/destination", p.destination()}}
	var before [2]uint64
	var err error
	for i, s := range sides {
		if s.pid != 0 {
			if before[i], err = settledRSS(ctx, s.pid); err != nil {
				return err
			}
		}
	}
	held, err := startBackground(ctx, p.client, openWithin, opened, "bench-idle", "-addr", p.small(), "-conns", fmt.Sprint(conns))
	if err != nil {
		return err
	}
	for i, s := range sides {
		if s.pid == 0 {
			continue
		}
		after, err := settledRSS(ctx, s.pid)
		if err != nil {
			held.end()
			return err
		}
		r.add(s.row, p.name, 0, (float64(after)-float64(before[i]))/float64(conns)/(1<<10))
	}
	held.finish(5 * time.Second)
	return nil
}
