package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// An Underlay is bound to one pod's network namespace.
type Underlay interface {
	// Dial connects past the capture, from the pod's own address.
	Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error)
	// Deliver connects to the pod's application from the client's address.
	Deliver(ctx context.Context, client, dst netip.AddrPort) (loop.Conn, error)
	// DialLoopback connects to an address of the pod's loopback interface.
	DialLoopback(ctx context.Context, dst netip.AddrPort) (loop.Conn, error)
}

// A Tunnel opens streams to peers with the pod's identity.
type Tunnel interface {
	Open(ctx context.Context, t hbone.Target) (hbone.Stream, error)
	// OpenThrough opens a stream to a peer on another network, through its gateway.
	OpenThrough(ctx context.Context, gateway, t hbone.Target) (hbone.Stream, error)
}

// A DNS answers one message; server is the resolver that the application addressed. The answer is in buf, if it fits, or nil if
// there is none to give.
type DNS interface {
	ServeDNS(ctx context.Context, client *workload.Client, from, server netip.AddrPort, tcp bool, msg, buf []byte) ([]byte, error)
}

// A Resolver finds the addresses of endpoints that have only a hostname, of both families, unmapped. None and no error: the name has
// no address.
type Resolver interface {
	Resolve(ctx context.Context, hostname string) ([]netip.Addr, error)
}

// A Config configures a Proxy. The zero values of the limits are the defaults named beside them.
type Config struct {
	Client      *workload.Client      // which workload the pod is
	Local       func(netip.Addr) bool // whether an address is the pod's own, now; any goroutine
	Network     string
	Store       *workload.Store
	Underlay    Underlay
	Tunnel      Tunnel
	Kernel      Kernel // nil: all bytes pass through here
	DNS         DNS
	Resolver    Resolver // nil: finds nothing
	Records     *telemetry.Recorder
	Connections *Connections // of all pods
	Group       *loop.Group
	Budget      *loop.Budget  // of the process's memory for connections; nil: none
	Rand        func() uint64 // safe for concurrent use
	Log         *slog.Logger

	ConnectTimeout time.Duration // of a TCP connection: 10 s
	AttemptTimeout time.Duration // of all endpoints that are tried: 40 s
	WorkloadWait   time.Duration // for the pod's own workload to become known: 5 s, ztunnel's
	PolicyWait     time.Duration // for a policy that the workload lists: 1 s
	DNSTimeout     time.Duration // of one question: 10 s

	LogPolicyAtInfo       bool // decisions of policies, not at debug
	AvoidFailed           bool // endpoints that could not be connected to are passed over for a while
	OwnSource             bool // applications see the pod itself as their client: plaintext passes through here
	NoBaggage             bool // neither say who answers nor heed what peers say of themselves
	AppTunnelOnPodAddress bool // application tunnels listen on the pod's address, not on its loopback address

	HalfClosedTimeout time.Duration // of a connection without bytes of which one side has ended: 1 h; negative: none

	MaxQuestions  int           // of the pod without an answer, and connections for them: 512
	MaxUnanswered int           // connections in the kernel whose sockets nobody has seen: 2048 (D27); beyond it the oldest is given up, if it has none
	Questions     *stack.Limits // the same for the process; nil: none
}

// A Proxy serves one pod.
type Proxy struct {
	cfg      Config
	conns    *podConnections
	classify func(*workload.Snapshot, *Query) Decision // Classify, but in tests

	tables   atomic.Pointer[sourceTables]
	failures failures
	handed   handedBack

	questions        atomic.Int64 // in progress
	questionsRefused atomic.Uint64
	strays           atomic.Uint64
	evicted          atomic.Uint64
	late             atomic.Int64 // until when connections may come to be whose records have ended; in nanoseconds since 1970
	draining         atomic.Bool
	selfCalls        occasional
}

var (
	_ stack.Handler = (*Proxy)(nil)
	_ hbone.Handler = (*Proxy)(nil)
)

// New checks the configuration.
func New(cfg Config) (*Proxy, error) {
	if cfg.Client == nil || cfg.Local == nil || cfg.Store == nil || cfg.Underlay == nil || cfg.Tunnel == nil || cfg.DNS == nil || cfg.Records == nil || cfg.Connections == nil || cfg.Group == nil || cfg.Rand == nil || cfg.Log == nil {
		return nil, errors.New("proxy: config: Client, Local, Store, Underlay, Tunnel, DNS, Records, Connections, Group, Rand and Log are required")
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&cfg.ConnectTimeout, 10 * time.Second},
		{&cfg.AttemptTimeout, 40 * time.Second},
		{&cfg.WorkloadWait, 5 * time.Second},
		{&cfg.PolicyWait, time.Second},
		{&cfg.DNSTimeout, 10 * time.Second},
		{&cfg.HalfClosedTimeout, time.Hour},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	if cfg.Resolver == nil {
		cfg.Resolver = noResolver{}
	}
	if cfg.MaxQuestions == 0 {
		cfg.MaxQuestions = 512
	}
	if cfg.MaxUnanswered == 0 {
		cfg.MaxUnanswered = 2048
	}
	return &Proxy{cfg: cfg, conns: cfg.Connections.of(cfg.Client), classify: Classify}, nil
}

// dnsPort is where questions go.
const dnsPort = 53

// IsQuestion reports whether what a pod sends to an address, over TCP or UDP, is for the DNS proxy.
func IsQuestion(dst netip.AddrPort) bool { return dst.Port() == dnsPort }

// ServeTCP implements stack.Handler: it tells who opened the flow, the pod or somebody else, and gives it back to the kernel at once, if
// that may carry it, or goes on in a set-up of its own. A flow between others, which a neighbour on the link may send our way, is
// refused: it would get the pod's identity.
func (p *Proxy) ServeTCP(ctx context.Context, req stack.TCPRequest) {
	f := req.Flow()
	var serve func(context.Context, stack.TCPRequest)
	atOnce := func(context.Context, stack.TCPRequest) bool { return false }
	switch {
	case p.cfg.Local(f.Dst.Addr()):
		serve, atOnce = p.inbound, p.inboundAtOnce
	case !p.cfg.Local(f.Src.Addr()):
		p.strays.Add(1)
		req.Reset()
		return
	case IsQuestion(f.Dst):
		serve = p.serveDNSStream
	default:
		serve, atOnce = p.outbound, p.outboundAtOnce
	}
	if p.draining.Load() {
		req.Reset()
		return
	}
	if p.cfg.Kernel != nil && atOnce(ctx, req) {
		return
	}
	p.cfg.Group.Go(ctx, func(ctx context.Context) { serve(ctx, req) })
}

// Drain refuses new TCP flows from now on. Those that are open go on, and so do answers to DNS questions over UDP, which connections
// that are open may need. Of new streams the server of the pod gets none any more.
func (p *Proxy) Drain() {
	p.draining.Store(true)
	if p.cfg.Kernel != nil {
		p.cfg.Kernel.ForgetDestinations()
	}
	p.conns.each(func(c *connection) { c.Drain() })
}

// Strays counts flows neither from nor to the pod.
func (p *Proxy) Strays() uint64 { return p.strays.Load() }

// illegalPort reports whether a port is one of the proxy's own: nothing may be led there through a proxy. They are ztunnel's, with
// both capture backends.
func illegalPort(port uint16) bool {
	return slices.Contains([]uint16{15001, 15006, 15008}, port)
}

// self finds the pod's own workload and waits for it if it is not known yet.
func (p *Proxy) self(ctx context.Context) (*workload.Workload, *workload.Snapshot, error) {
	s := p.cfg.Store.Snapshot()
	if w := s.Local(p.cfg.Client); w != nil {
		return w, s, nil
	}
	ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.WorkloadWait)
	defer cancel()
	for {
		var w *workload.Workload
		var unsubscribe func()
		err := loop.Await(ctx, func(wake func()) {
			unsubscribe = p.cfg.Store.Subscribe(wake)
			s = p.cfg.Store.Snapshot()
			if w = s.Local(p.cfg.Client); w != nil {
				wake()
			}
		})
		unsubscribe()
		if w != nil {
			return w, s, nil
		}
		if err != nil {
			c := p.cfg.Client
			return nil, nil, noRoute(telemetry.ReasonUnknownWorkload, "failed to fetch information about local workload: %s.%s (%s)", c.ServiceAccount, c.Namespace, c.Name)
		}
	}
}
