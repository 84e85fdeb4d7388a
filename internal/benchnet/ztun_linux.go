package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/lab"
)

// A member is a pod of the mesh.
type member struct {
	host *lab.Host
	node *lab.Host
	name string
}

// A service has one endpoint, a pod outside the mesh, and the ports of the servers.
type service struct {
	endpoint *lab.Host
	addr     netip.Addr
}

// writeMesh writes what the nodes have in common: the state of the mesh and a CA.
func writeMesh(dir string, members []member, services []service) error {
	authority, err := ca.New(time.Now)
	if err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	root, err := authority.PEM()
	if err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	var b strings.Builder
	b.WriteString("workloads:\n")
	for _, m := range members {
		fmt.Fprintf(&b, "- {uid: %[1]s, name: %[1]s, namespace: bench, serviceAccount: %[1]s, node: %[2]s, workloadIps: [%[3]q], protocol: HBONE, services: {}}\n",
			m.name, m.node.Name, m.host.Addr4.String())
	}
	ports := fmt.Sprintf("{%[1]d: %[1]d, %[2]d: %[2]d, %[3]d: %[3]d}", smallPort, bulkPort, onePort)
	for i, s := range services {
		fmt.Fprintf(&b, "- {uid: outside-%[1]d, name: outside-%[1]d, namespace: bench, node: outside, workloadIps: [%[2]q], services: {bench/outside-%[1]d.bench: %[3]s}}\n",
			i, s.endpoint.Addr4.String(), ports)
	}
	b.WriteString("services:\n")
	for i, s := range services {
		fmt.Fprintf(&b, "- {name: outside-%[1]d, namespace: bench, hostname: outside-%[1]d.bench, vips: [%[2]q], ports: %[3]s}\n", i, "/"+s.addr.String(), ports)
	}
	if err := os.WriteFile(filepath.Join(dir, "mesh.yaml"), []byte(b.String()), 0o600); err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "root.pem"), root, 0o600); err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	return nil
}

// A ztun is one node's process.
type ztun struct {
	name    string
	node    *lab.Host
	cmd     *lab.Cmd
	ready   chan struct{}
	records atomic.Int64 // lines of the access log

	mu      sync.Mutex // guards below
	log     []byte
	isReady bool // ready is closed
}

// Limits of a process.
const (
	readyWithin = 30 * time.Second
	endWithin   = 15 * time.Second
)

// startZtun starts the process of a node, which serves those of the members that are there, and waits until it does. It
// outlives ctx: it is to end in order.
func startZtun(ctx context.Context, binary, dir string, node *lab.Host, members []member, settings string) (*ztun, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "nodeName: %[2]s\nlocalXdsPath: %[1]s/mesh.yaml\nfakeCa: true\nfakeCaRoot: %[1]s/root.pem\nhandoverSocket: %[1]s/%[2]s/ztun.sock\n%[3]spods:\n", dir, node.Name, settings)
	for _, m := range members {
		if m.node == node {
			fmt.Fprintf(&b, "- {netns: %[2]s, uid: %[1]s, name: %[1]s, namespace: bench, serviceAccount: %[1]s}\n", m.name, m.host.NetnsPath())
		}
	}
	file := filepath.Join(dir, node.Name+".yaml")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	z := &ztun{name: node.Name, node: node, ready: make(chan struct{})}
	z.cmd = node.Command(context.WithoutCancel(ctx), binary, "proxy", "--config", file)
	z.cmd.Env, z.cmd.Dir, z.cmd.Stdout, z.cmd.Stderr = environment, dir, accessLog{&z.records}, (*ztunLog)(z)
	if err := z.cmd.Start(); err != nil {
		return nil, err
	}
	limit := time.NewTimer(readyWithin)
	defer limit.Stop()
	var err error
	select {
	case <-z.ready:
		return z, nil
	case <-z.cmd.Done():
		err = errors.New("ended before it was ready")
	case <-limit.C:
		err = fmt.Errorf("not ready within %v", readyWithin)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	_ = z.cmd.Stop(endWithin)
	return nil, fmt.Errorf("benchnet: %s: ztun: %w%s", z.name, err, z.lastWords())
}

func (z *ztun) stop() error {
	if err := z.cmd.Stop(endWithin); err != nil {
		return fmt.Errorf("benchnet: %s: ztun: %w%s", z.name, err, z.lastWords())
	}
	return nil
}

// lastWords is the last line that the process has logged, to stand behind an error.
func (z *ztun) lastWords() string {
	z.mu.Lock()
	defer z.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(z.log)), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return ": " + last
	}
	return ""
}

// served waits until the process has logged a connection since there were before of them: a path that it was not on would be
// measured as fast.
func (z *ztun) served(ctx context.Context, before int64) error {
	const within, step = 3 * time.Second, 5 * time.Millisecond
	for range within / step {
		if z.records.Load() > before {
			return nil
		}
		if err := pause(ctx, step); err != nil {
			return err
		}
	}
	return fmt.Errorf("benchnet: %s: ztun has logged no connection: the traffic was not led through it%s", z.name, z.lastWords())
}

// An accessLog counts lines. It reads as a container runtime does, so that writing costs ztun what it costs in a cluster.
type accessLog struct{ lines *atomic.Int64 }

func (a accessLog) Write(p []byte) (int, error) {
	a.lines.Add(int64(bytes.Count(p, []byte{'\n'})))
	return len(p), nil
}

// A ztunLog keeps the end of the other log, and looks for the line that says ready.
type ztunLog ztun

var readyLine = regexp.MustCompile(`(?m)(\bmsg=|\t)ready(\s|$)`)

// keptBytes of a log are enough for a start with some hundred pods.
const keptBytes = 256 << 10

func (z *ztunLog) Write(p []byte) (int, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.log = append(z.log, p...)
	if !z.isReady && readyLine.Match(z.log) {
		z.isReady = true
		close(z.ready)
	}
	if len(z.log) > keptBytes {
		z.log = append(z.log[:0], z.log[len(z.log)-keptBytes/2:]...)
	}
	return len(p), nil
}
