package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"ztun.dev/ztun/internal/lab"
)

// timeWaitBuckets is small: with tens of thousands of connections in TIME_WAIT it is the search for a port that is measured.
const timeWaitBuckets = 128

// Pods of each node by number. The first two are in the mesh once ztun runs, the others never.
const (
	podMesh = iota
	podMeshNeighbour
	podPlain
	podPlainNeighbour
	podCount
)

// Ports of the relays. Each serves the small port's traffic at its number and that of the bulk ports at the next two.
const (
	relayPort    = 7100 // the plain relay, and relay A of the pair, which are on the node of the client
	tlsRelayPort = 7200
	tlsInnerPort = 7300 // relay B, on the node of the server
)

// A path is a way from one client to one server, or a part of it that is measured.
type path struct {
	name              string
	client, neighbour *lab.Host // two pods of one node
	addr              string
	port              int // of small messages; the bulk ports follow

	// The processes on the way: their CPU time and, of ztun, memory are measured. 0 is none.
	source, destination func() int
	through             func() []*ztun // all of these log each connection
}

func (p *path) small() string { return fmt.Sprintf("%s:%d", p.addr, p.port) }
func (p *path) bulk() string  { return fmt.Sprintf("%s:%d", p.addr, p.port+1) }
func (p *path) one() string   { return fmt.Sprintf("%s:%d", p.addr, p.port+2) }

// settings are those of each node beside the default ones.
var settings = [...]string{2: "offload: off\n", 3: "offload: off\n", 4: "connectCache: 1s\n"}

// A bed is the network with all that serves in it.
type bed struct {
	lab      *lab.Lab
	dir      string
	binary   string
	members  []member
	services []service
	nodes    [len(settings)]*ztun // nil while it does not run; settings says how they differ
	paths    []*path              // direct first
}

// newBed builds everything but ztun's processes. dir is for files.
func newBed(ctx context.Context, binary, dir string) (_ *bed, err error) {
	b := &bed{dir: dir, binary: binary}
	if b.lab, err = lab.New(ctx, lab.Config{Nodes: len(settings), PodsPerNode: podCount, TimeWaitBuckets: timeWaitBuckets}); err != nil {
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.lab.Close())
		}
	}()
	for i := range b.nodes {
		for j := podMesh; j <= podMeshNeighbour; j++ {
			b.members = append(b.members, member{host: b.lab.Pod(i, j), node: b.lab.Node(i), name: fmt.Sprintf("pod-%d-%d", i, j)})
		}
	}
	for i, node := range []int{1, 3} {
		b.services = append(b.services, service{endpoint: b.lab.Pod(node, podPlainNeighbour), addr: netip.AddrFrom4([4]byte{10, 96, 0, byte(1 + i)})})
	}
	if err := writeMesh(dir, b.members, b.services); err != nil {
		return nil, err
	}
	return b, b.serve(ctx)
}

// serve starts the servers and the yardsticks, and lays out the paths.
func (b *bed) serve(ctx context.Context) error {
	wait, cancel := context.WithTimeoutCause(ctx, 10*time.Second, errors.New("not within 10 s"))
	defer cancel()
	start := func(h *lab.Host, port uint16, args ...string) (int, error) {
		c, err := startTool(ctx, h, args...)
		if err != nil {
			return 0, err
		}
		return c.Pid(), errors.Join(h.WaitListening(wait, port), h.WaitListening(wait, port+1), h.WaitListening(wait, port+2))
	}
	mesh, plain := b.lab.Pod(1, podMesh), b.lab.Pod(1, podPlain)
	meshOff, plainOff := b.lab.Pod(3, podMesh), b.lab.Pod(3, podPlain)
	for _, h := range []*lab.Host{mesh, plain, b.services[0].endpoint, meshOff, plainOff, b.services[1].endpoint} {
		if _, err := start(h, smallPort, "bench-server"); err != nil {
			return err
		}
	}
	ports := func(listen int, to *lab.Host, port int) (args []string) {
		for i := range 3 {
			args = append(args, fmt.Sprintf("%d=%s:%d", listen+i, to.Addr4, port+i))
		}
		return args
	}
	identity := filepath.Join(b.dir, "relay.pem")
	if err := writeRelayIdentity(identity, time.Now()); err != nil {
		return fmt.Errorf("benchnet: identity of the relays: %w", err)
	}
	a, z := b.lab.Node(0), b.lab.Node(1)
	relay, err := start(a, relayPort, append([]string{"bench-relay"}, ports(relayPort, plain, smallPort)...)...)
	if err != nil {
		return err
	}
	relayZ, err := start(z, tlsInnerPort, append([]string{"bench-tlsrelay", "-accept", "-identity", identity}, ports(tlsInnerPort, plain, smallPort)...)...)
	if err != nil {
		return err
	}
	relayA, err := start(a, tlsRelayPort, append([]string{"bench-tlsrelay", "-identity", identity}, ports(tlsRelayPort, z, tlsInnerPort)...)...)
	if err != nil {
		return err
	}

	fixed := func(pid int) func() int { return func() int { return pid } }
	running := func(i int) func() int { return func() int { return b.nodes[i].cmd.Pid() } }
	nodes := func(is ...int) func() []*ztun {
		return func() (all []*ztun) {
			for _, i := range is {
				all = append(all, b.nodes[i])
			}
			return all
		}
	}
	none := fixed(0)
	from := func(node, pod, beside int) path {
		return path{client: b.lab.Pod(node, pod), neighbour: b.lab.Pod(node, beside), port: smallPort, source: none, destination: none, through: nodes()}
	}
	fromPlain, fromMesh := from(0, podPlain, podPlainNeighbour), from(0, podMesh, podMeshNeighbour)
	fromPlainOff, fromMeshOff := from(2, podPlain, podPlainNeighbour), from(2, podMesh, podMeshNeighbour)
	add := func(name string, p path, to *lab.Host, change func(p *path)) {
		p.name, p.addr = name, to.Addr4.String()
		change(&p)
		b.paths = append(b.paths, &p)
	}
	add(pathDirect, fromPlain, plain, func(*path) {})
	add(pathControl, from(0, podPlainNeighbour, podPlain), plain, func(*path) {})
	add(pathRelay, fromPlain, a, func(p *path) { p.port, p.source = relayPort, fixed(relay) })
	add(pathRelayPair, fromPlain, a, func(p *path) { p.port, p.source, p.destination = tlsRelayPort, fixed(relayA), fixed(relayZ) })
	add(pathPassthrough, fromMesh, plain, func(p *path) { p.source, p.through = running(0), nodes(0) })
	add(pathRemembered, from(4, podMesh, podMeshNeighbour), plain, func(p *path) { p.source, p.through = running(4), nodes(4) })
	add(pathInbound, fromPlain, mesh, func(p *path) { p.destination, p.through = running(1), nodes(1) })
	add(pathService, fromMesh, b.services[0].endpoint, func(p *path) {
		p.addr, p.source, p.through = b.services[0].addr.String(), running(0), nodes(0)
	})
	add(pathMesh, fromMesh, mesh, func(p *path) { p.source, p.destination, p.through = running(0), running(1), nodes(0, 1) })
	add(pathNetstackPassthrough, fromMeshOff, plainOff, func(p *path) { p.source, p.through = running(2), nodes(2) })
	add(pathNetstackInbound, fromPlainOff, meshOff, func(p *path) { p.destination, p.through = running(3), nodes(3) })
	add(pathNetstackService, fromMeshOff, b.services[1].endpoint, func(p *path) {
		p.addr, p.source, p.through = b.services[1].addr.String(), running(2), nodes(2)
	})
	add(pathNetstackMesh, fromMeshOff, meshOff, func(p *path) { p.source, p.destination, p.through = running(2), running(3), nodes(2, 3) })
	return nil
}

// startZtun starts all nodes.
func (b *bed) startZtun(ctx context.Context) error {
	for i := range b.nodes {
		z, err := startZtun(ctx, b.binary, b.dir, b.lab.Node(i), b.members, settings[i])
		if err != nil {
			return err
		}
		b.nodes[i] = z
	}
	return nil
}

// stopZtun ends all nodes at once.
func (b *bed) stopZtun() error {
	errs := make(chan error)
	n := 0
	for i, z := range b.nodes {
		if z != nil {
			n++
			go func() { errs <- z.stop() }()
			b.nodes[i] = nil
		}
	}
	var all error
	for range n {
		all = errors.Join(all, <-errs)
	}
	return all
}

func (b *bed) close() error { return errors.Join(b.stopZtun(), b.lab.Close()) }
