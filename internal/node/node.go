// Package node builds one pipeline for each network namespace and runs all of it: it is the composition root, which alone
// knows clocks, randomness and the order in which things start and end.
//
// [Run] validates the whole configuration before it touches the system, captures the pods last, and in an orderly end gives
// each pod its network back. A process that dies leaves its pods captured and closed; the next one adopts them.
package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"ztun.dev/ztun/dnsproxy"
	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/identity"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/underlay"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/stack"
	"ztun.dev/ztun/tun"
)

// A Node is the process.
type Node struct {
	cfg         *config.Config
	log         *slog.Logger
	group       *loop.Group
	store       workload.Store
	records     *telemetry.Recorder
	conns       *proxy.Connections
	identities  *identity.Manager
	limits      *stack.Limits // unanswered SYNs
	questions   *stack.Limits // DNS
	budget      *loop.Budget  // bytes that connections hold
	descriptors *underlay.Descriptors
	steering    *tun.Steering // nil: no flow is given back to the kernel
	carriers    carriers
	netns       *tun.Netns         // the process's own
	resolver    *dnsproxy.Resolver // of endpoints that have only a hostname; asks from there
	marks       tun.Marks
	stateDir    string
	generation  uint64
	workers     int // threads that move bytes
	rand        func() uint64
	reload      <-chan os.Signal
	specs       []podSpec
	quit        context.CancelCauseFunc // ends the process in order; set by run
	levels      *telemetry.Levels
	readiness   *admin.Readiness
	ready       *admin.Task
	gate        gate
	admin       *admin.Server
	registry    *prometheus.Registry
	captures    captures
	tunnels     *hbone.Metrics
	metrics     *metrics

	processors sync.Mutex // held while GOMAXPROCS is another than usual

	podsMu sync.Mutex // guards below
	pods   []*pod

	failOpenRoute bool // tests only: the positive control of what fails closed
	noICMPRelay   bool // tests only: the positive control of the relay
}

// gcPercent is the garbage collector's headroom, of the live heap.
const gcPercent = 50

// maxQuestions is how many DNS questions of all pods may be without an answer: each that is forwarded holds a socket.
const maxQuestions = 4096

// ErrInvalid is wrapped by errors that the user mends in the configuration, or in a file that it names.
var ErrInvalid = errors.New("invalid configuration")

// Options are what the caller of Run gives beside the configuration.
type Options struct {
	Stdout io.Writer // the access log
	Stderr io.Writer // everything else

	Ports admin.Ports // where the admin server listens, in place of what is configured
	Build admin.Build // what it and the metrics say of the program

	// Reload has the mesh state read again for each value. One that is not valid is logged, and the state stays as it was. nil: never.
	Reload <-chan os.Signal

	// FailOpenRoute leaves out the route that holds traffic back when the process is dead, so that a test can see its
	// detector work. No configuration leads here.
	FailOpenRoute bool

	// NoICMPRelay leaves the netstacks without the ICMP errors that the kernel receives, so that a test can see what the relay
	// is for. No configuration leads here.
	NoICMPRelay bool
}

// Run serves the pods of the configuration until ctx ends, then ends in order. An error that wraps ErrInvalid is the
// user's to mend; nothing was touched then. Nothing is begun either, or logged, where the process may not do what it has to.
func Run(ctx context.Context, cfg *config.Config, o Options) error {
	if err := checkPrivilege(); err != nil {
		return err
	}
	n, err := build(cfg, o)
	if err != nil {
		return err
	}
	defer n.close()
	return n.run(ctx)
}

// build makes everything that does not touch the system.
func build(cfg *config.Config, o Options) (*Node, error) {
	n := &Node{
		cfg: cfg, reload: o.Reload, rand: rand.Uint64, failOpenRoute: o.FailOpenRoute, noICMPRelay: o.NoICMPRelay,
		generation: uint64(time.Now().UnixNano()), limits: stack.NewLimits(int(cfg.MaxInFlight)), questions: stack.NewLimits(maxQuestions), budget: loop.NewBudget(int64(cfg.BufferLimitBytes)),
		workers: cfg.WorkerThreads.Count(runtime.NumCPU()),
	}
	if err := n.observe(o); err != nil {
		return nil, err
	}
	if ignored := cfg.Ignored(); len(ignored) > 0 {
		n.log.Warn("settings without effect so far", "names", strings.Join(ignored, " "))
	}
	st, err := loadState(cfg)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	n.store.Replace(st)
	authority, err := n.loadCA()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if n.identities, err = identity.New(identity.Config{CA: authority, Now: time.Now, Log: n.log}); err != nil {
		return nil, err
	}
	for i := range cfg.Pods {
		spec, err := n.newPodSpec(&cfg.Pods[i])
		if err != nil {
			n.close()
			return nil, err
		}
		n.specs = append(n.specs, spec)
	}
	if n.stateDir, err = openStateDir(cfg.HandoverSocket); err != nil {
		n.close()
		return nil, err
	}
	n.nameLeftovers()
	if n.marks, err = loadMarks(n.stateDir, n.rand); err != nil {
		n.close()
		return nil, err
	}
	// A loop's thread that waits in epoll holds no P but needs one to go on, beside what ordinary goroutines use.
	sparse := max(1, n.workers/2)
	runtime.GOMAXPROCS(runtime.NumCPU() + n.workers + sparse)
	if _, set := os.LookupEnv("GOGC"); !set {
		// Moving bytes allocates nothing, so there is little garbage: less headroom for it costs nothing that can be seen.
		debug.SetGCPercent(gcPercent)
	}
	if n.descriptors, err = underlay.NewDescriptors(time.Now, n.log); err != nil {
		n.close()
		return nil, err
	}
	n.group, err = loop.New(loop.Config{Loops: n.workers, Sparse: sparse, Now: time.Now})
	if err == nil {
		n.conns, err = proxy.NewConnections(proxy.ConnectionsConfig{
			Store: &n.store, Group: n.group, Log: n.log.With(telemetry.TargetKey, "proxy"), Registerer: n.registry,
			AllowMissingPolicy: n.cfg.UnknownPolicy == config.UnknownPolicyAllow,
		})
	}
	if err == nil {
		n.resolver, err = n.newResolver()
	}
	if err != nil {
		n.close()
		return nil, err
	}
	n.gate = gate{task: n.ready, group: n.group, pods: n.listPods, limit: cfg.ReadyIgnorePending, now: time.Now}
	return n, nil
}

// close lets go of what build has made.
func (n *Node) close() {
	if n.identities != nil {
		n.identities.Close()
	}
	for _, s := range n.specs {
		s.netns.Close()
	}
	if n.netns != nil {
		n.netns.Close()
	}
}

func loadState(cfg *config.Config) (workload.State, error) {
	name, data := "LOCAL_XDS", []byte(cfg.LocalXDS)
	if cfg.LocalXDSPath != "" {
		var err error
		if data, err = os.ReadFile(cfg.LocalXDSPath); err != nil {
			return workload.State{}, fmt.Errorf("state file: %w; is LOCAL_XDS_PATH (localXdsPath in the file) right?", err)
		}
		name = cfg.LocalXDSPath
	} else if cfg.LocalXDS == "" {
		return workload.State{}, errors.New("no state: set LOCAL_XDS_PATH (localXdsPath in the file) to a mesh state file")
	}
	return workload.ParseStatic(name, data)
}

func (n *Node) loadCA() (identity.CA, error) {
	switch {
	case !n.cfg.FakeCA:
		return nil, errors.New("no certificate authority: set FAKE_CA=true (fakeCa in the file) for the built-in one")
	case n.cfg.FakeCARoot != "":
		c, err := ca.Load(n.cfg.FakeCARoot, time.Now)
		if err != nil {
			return nil, fmt.Errorf("%w; ZTUN_FAKE_CA_ROOT (fakeCaRoot in the file) has to name a PEM file with a valid root certificate and its ECDSA key; "+
				"the README says how to make one (Run it)", err)
		}
		n.log.Warn("certificates come from a key in a file: for trials only", "root", n.cfg.FakeCARoot)
		return c, nil
	}
	n.log.Warn("certificates come from a root of this process alone: no other node trusts it; share one by ZTUN_FAKE_CA_ROOT")
	return ca.New(time.Now)
}

func (n *Node) newPodSpec(p *config.Pod) (podSpec, error) {
	netns, err := tun.OpenNetns(p.Netns)
	if err != nil {
		if !errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		return podSpec{}, fmt.Errorf("pod %s/%s: %w", p.Namespace, p.Name, err)
	}
	for _, other := range n.specs {
		if sameNetns(other.netns, netns) {
			netns.Close()
			return podSpec{}, fmt.Errorf("%w: pod %s/%s: its netns %s is that of pod %s as well", ErrInvalid, p.Namespace, p.Name, p.Netns, other.String())
		}
	}
	s := podSpec{
		client: workload.Client{UID: p.UID, Name: p.Name, Namespace: p.Namespace, ServiceAccount: p.ServiceAccount, Node: n.cfg.NodeName},
		uid:    p.UID, netns: netns,
	}
	n.warnUnknown(&s)
	if s.uid == "" {
		s.uid = p.Namespace + "." + p.Name
	}
	return s, nil
}

// nameLeftovers names pods that a dead process left captured, and that nobody serves any more: they are cut off.
func (n *Node) nameLeftovers() {
	list, err := tun.Leftovers(n.stateDir)
	if err != nil {
		n.log.Warn("state of earlier processes cannot be read", "error", err.Error())
	}
	for _, l := range list {
		served := slices.ContainsFunc(n.specs, func(s podSpec) bool {
			dev, ino := s.netns.ID()
			return dev == l.Dev && ino == l.Ino
		})
		if !served {
			n.log.Warn("a pod may still be captured by an earlier process and is not configured: serve it, or let its netns end",
				"uid", l.UID, "netns", fmt.Sprintf("net:[%d]", l.Ino), "state", l.Path)
		}
	}
}

func sameNetns(a, b *tun.Netns) bool {
	aDev, aIno := a.ID()
	bDev, bIno := b.ID()
	return aDev == bDev && aIno == bIno
}

// run starts the pods, serves, and ends.
func (n *Node) run(ctx context.Context) error {
	// Loops and log outlive ctx: the end needs them.
	ctx, n.quit = context.WithCancelCause(ctx)
	defer n.quit(nil)
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	if err := n.admin.Listen(ctx); err != nil {
		return n.nameHolder(err)
	}
	if err := n.openSteering(); err != nil {
		return err
	}
	var g errgroup.Group
	if n.steering != nil {
		g.Go(func() error { n.hearEnds(background); return nil })
		g.Go(func() error { n.watchCarried(background); return nil })
		defer n.store.Subscribe(n.forgetDestinations)()
	}
	g.Go(func() error { return n.group.Run(background) })
	g.Go(func() error { return n.records.Run(background) })
	g.Go(func() error { return n.watchPeers(background) })
	g.Go(func() error { n.heedReloads(background); return nil })
	g.Go(func() error { return n.conns.Run(background) }) // to the end: what policy denies does not stay open because the node drains

	serving, stopServing := context.WithCancel(background)
	defer stopServing()
	g.Go(func() error { return n.serveAdmin(serving) })
	var pods errgroup.Group
	err := n.start(ctx, n.startPod, func(p *pod) { pods.Go(func() error { n.supervise(serving, p); return nil }) })
	if err == nil {
		debug.FreeOSMemory() // what only the start has needed
		n.gate.start()
		n.log.Info("ready", "pods", len(n.pods), "pending", len(n.pendingPods()), "workers", n.workers, "workloads", len(n.store.Snapshot().State().Workloads))
		<-ctx.Done()
		n.gate.close()
	}
	if ctx.Err() != nil { // also in the midst of the start
		n.log.Info("ending", "cause", context.Cause(ctx).Error())
		err = nil
	}
	err = errors.Join(err, n.end(background, stopServing, &pods, ctx.Err() != nil))
	stop()
	err = errors.Join(err, g.Wait())
	if n.steering != nil {
		err = errors.Join(err, n.steering.Close())
	}
	return err
}

// nameHolder turns ports in use into the name of the process that has them, if that is a ztun which serves our pods.
func (n *Node) nameHolder(err error) error {
	if !errors.Is(err, syscall.EADDRINUSE) {
		return err
	}
	for _, s := range n.specs {
		if held := tun.InUse(s.netns, tun.DefaultName); held != nil {
			return fmt.Errorf("pod %s: %w", s.String(), held)
		}
	}
	return err
}

// start captures one pod after the other and serves each at once. A pod that cannot be captured is left as it was found, open or closed, and is
// tried again while the others are served: what stands in its way may be the pod's own doing, a program that has taken a port of ours.
// Where no pod can be captured, that is an error.
func (n *Node) start(ctx context.Context, capture func(context.Context, *pod) error, serve func(*pod)) error {
	var first error
	var failed []*pod
	for _, spec := range n.specs {
		p := &pod{spec: spec, stateDir: n.stateDir, log: n.log.With("pod", spec.client.String())}
		err := capture(ctx, p)
		if err != nil {
			if first == nil || ctx.Err() != nil {
				first = fmt.Errorf("pod %s: %w", spec.String(), err)
			}
			if ctx.Err() != nil {
				return first
			}
			failed = append(failed, p)
			n.notCaptured(p, err)
		}
		n.podsMu.Lock()
		n.pods = append(n.pods, p)
		n.podsMu.Unlock()
		if err == nil {
			serve(p)
		}
	}
	if len(failed) == len(n.pods) {
		return first
	}
	for _, p := range failed {
		serve(p)
	}
	return nil
}

// retryPod is how long a pod that was not captured, or was lost, waits for the next attempt (ztunnel's default).
const retryPod = 5 * time.Second

// notCaptured makes a pod pending.
func (n *Node) notCaptured(p *pod, err error) {
	p.set(nil, err)
	p.log.Warn("pod not captured: it stays as it was found", "error", err.Error(), "next_try", retryPod.String())
}

// supervise serves a pod until ctx ends. A pod whose capture fails, of which others notice nothing, stays closed until it is
// captured again.
func (n *Node) supervise(ctx context.Context, p *pod) {
	for {
		if p.current() == nil && !n.captureLater(ctx, p) {
			return
		}
		err := p.run(ctx)
		if ctx.Err() != nil {
			return
		}
		p.log.Error("pod lost: it stays closed until it is captured again", "error", err.Error(), "next_try", retryPod.String())
		n.metrics.lost.Inc()
		p.fail(ctx, err)
		n.gate.check()
	}
}

// captureLater tries to capture a pod until that works; false: ctx has ended before.
func (n *Node) captureLater(ctx context.Context, p *pod) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(retryPod):
		}
		err := n.startPod(ctx, p)
		if err == nil {
			p.log.Info("the pod is not pending any more")
			n.gate.check()
			return true
		}
		n.notCaptured(p, err)
	}
}

// end lets open connections finish for a while, cuts the rest, and ends the pods. After an orderly end, and only then, each has
// its network back; otherwise one that this process found captured stays captured, and closed.
func (n *Node) end(ctx context.Context, stopServing func(), pods *errgroup.Group, orderly bool) error {
	for _, p := range n.pods {
		p.drain(ctx)
	}
	if open := n.awaitIdle(n.cfg.TerminationDeadline); open > 0 {
		n.log.Warn("drain duration expired with pending connections, forcefully shutting down", "connections", open)
	}
	n.conns.Close(proxy.DrainError())
	n.awaitIdle(time.Second)
	stopServing()
	err := pods.Wait()
	ctx, cancel := context.WithTimeout(ctx, undoTime)
	defer cancel()
	for _, p := range n.pods {
		err = errors.Join(err, p.end(ctx, orderly))
	}
	return err
}

// awaitIdle waits until no connection is open, at most d, and returns how many are. Those that the kernel carries do not count.
func (n *Node) awaitIdle(d time.Duration) (open int) {
	const step = 10 * time.Millisecond
	for {
		st := n.records.Stats()
		if open = st.Open - st.Kernel; open == 0 || d <= 0 {
			return open
		}
		time.Sleep(step)
		d -= step
	}
}

func (n *Node) clientTLS(self func() workload.Identity) func(context.Context, []workload.Identity) (*tls.Config, error) {
	return func(ctx context.Context, accept []workload.Identity) (*tls.Config, error) {
		return n.identities.Client(self())(ctx, accept)
	}
}

func (n *Node) serverTLS(self func() workload.Identity) func(context.Context) (*tls.Config, error) {
	return func(ctx context.Context) (*tls.Config, error) { return n.identities.Server(self())(ctx) }
}

func (n *Node) newDNS(u *underlay.Underlay) (*dnsproxy.Server, error) {
	return dnsproxy.New(dnsproxy.Config{
		Store: &n.store, Network: n.cfg.Network, ClusterDomain: n.cfg.ClusterDomain, PreferredNamespace: n.cfg.PreferredServiceNamespace,
		Upstream: resolver{u, func() []netip.AddrPort { return nameservers(n.cfg.DNSResolvConf) }}, Now: time.Now, Rand: n.rand, Log: n.log, NoIPv6: !n.cfg.IPv6Enabled,
	})
}

// openStateDir makes the directory beside the handover socket, in which what has to survive the process is kept.
func openStateDir(socket string) (string, error) {
	dir := filepath.Join(filepath.Dir(socket), "ztun-state")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("state directory: %w; set ZTUN_HANDOVER_SOCKET (handoverSocket in the file) to a path in a writable directory", err)
	}
	return dir, nil
}
