package proxy_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"ztun.dev/ztun/dnsproxy"
	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/identity"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/stack"
	"ztun.dev/ztun/tun"
)

// A mesh is everything: the netstack before one pod, whose packets the test writes and reads, and a proxy with a real end of HBONE for
// each workload that something is sent to. One clock and one thing at a time, so that a script has one outcome.
type mesh struct {
	*loop.Manual
	t       *testing.T
	log     strings.Builder // what happens
	store   workload.Store
	records *telemetry.Recorder
	access  bytes.Buffer
	metrics *prometheus.Registry
	conns   *proxy.Connections
	manager *identity.Manager
	random  *rand.Rand
	nodes   map[string]*node         // by uid
	gates   map[string]*hbone.Server // gateways to other networks, by uid
	ends    []func(context.Context) error
	behave  map[netip.AddrPort]string // of what is connected to: refuse, unreachable or silent
	names   map[string][]netip.Addr   // of endpoints
	world   map[string]string         // records of the resolver, by "A name."
	ports   uint16                    // of connections
	stack   *stack.Stack
	far     *tun.PipeEnd
	pod     *node
	apps    []*app
	servers map[string]loop.Conn // the other ends of connections, by name
	ended   map[string]bool
	opening string // the connection that is being opened
	stop    context.CancelFunc
	reading chan error
}

// A node is the proxy of one pod, and its ends of HBONE.
type node struct {
	m      *mesh
	uid    string
	proxy  *proxy.Proxy
	pool   *hbone.Pool
	server *hbone.Server
}

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

var quiet = slog.New(slog.DiscardHandler)

func newMesh(t *testing.T, st workload.State) *mesh {
	t.Helper()
	m := &mesh{
		Manual: loop.NewManual(epoch), t: t, metrics: prometheus.NewRegistry(), nodes: make(map[string]*node), gates: make(map[string]*hbone.Server),
		behave: make(map[netip.AddrPort]string), names: make(map[string][]netip.Addr), world: make(map[string]string), servers: make(map[string]loop.Conn), ended: make(map[string]bool),
		ports: 50000, random: rand.New(rand.NewPCG(1, 2)),
	}
	m.store.Replace(st)
	var err error
	m.records, err = telemetry.NewRecorder(telemetry.Config{
		Now: m.Group().Now, Access: &m.access, Log: quiet, Classify: proxy.ClassifyError, ErrorText: proxy.ErrorText, Registerer: m.metrics, Store: &m.store, Fields: []string{"response_flags", "policy"},
	})
	if err == nil {
		m.conns, err = proxy.NewConnections(proxy.ConnectionsConfig{Store: &m.store, Group: m.Group(), Log: quiet})
	}
	if err != nil {
		t.Fatal(err)
	}
	authority, err := ca.New(m.Group().Now)
	if err == nil {
		m.manager, err = identity.New(identity.Config{CA: authority, Now: m.Group().Now, Log: quiet})
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	m.stop = stop
	m.Group().Go(ctx, func(ctx context.Context) { _ = m.conns.Run(ctx) })
	t.Cleanup(m.close)
	return m
}

func (m *mesh) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *mesh) say(format string, args ...any) { fmt.Fprintf(&m.log, "  "+format+"\n", args...) }

// workload is what a node serves, now.
func (n *node) workload() *workload.Workload { return n.m.store.Snapshot().Workload(n.uid) }

// node is the proxy of a workload, made the first time that it is asked for.
func (m *mesh) node(w *workload.Workload) *node {
	m.t.Helper()
	if n := m.nodes[w.UID]; n != nil {
		return n
	}
	n := &node{m: m, uid: w.UID}
	m.nodes[w.UID] = n
	var err error
	n.pool, err = hbone.NewPool(hbone.PoolConfig{Group: m.Group(), Dialer: n, TLS: m.manager.Client(w.Identity()), Log: quiet})
	m.must(err)
	server, err := dnsproxy.New(dnsproxy.Config{Store: &m.store, Network: w.Network, Upstream: m, Now: m.Group().Now, Rand: m.random.Uint64, Log: quiet})
	m.must(err)
	n.proxy, err = proxy.New(proxy.Config{
		Client: &workload.Client{UID: w.UID, Name: w.Name, Namespace: w.Namespace, ServiceAccount: w.ServiceAccount}, Network: w.Network,
		Local: func(a netip.Addr) bool { w := n.workload(); return w != nil && slices.Contains(w.Addresses, a) },
		Store: &m.store, Underlay: pathsOf{n}, Tunnel: n.pool, DNS: server, Resolver: m, Records: m.records, Connections: m.conns,
		Group: m.Group(), Rand: m.random.Uint64, Log: quiet,
	})
	m.must(err)
	n.server, err = hbone.NewServer(hbone.ServerConfig{Group: m.Group(), TLS: m.manager.Server(w.Identity()), Handler: n.proxy, Refused: n.proxy.Refused, Log: quiet})
	m.must(err)
	m.ends = append(m.ends, n.pool.Close, n.server.Close)
	return n
}

// start puts the netstack before a pod.
func (m *mesh) start(w *workload.Workload) {
	m.t.Helper()
	m.pod = m.node(w)
	near, far := tun.Pipe()
	m.far = far
	var err error
	m.stack, err = stack.New(stack.Config{Device: near, Group: m.Group(), Handler: m.pod.proxy, Log: quiet, Manual: true, Rand: rand.NewChaCha8([32]byte{})})
	m.must(err)
	ctx, stop := context.WithCancel(context.Background())
	m.reading = make(chan error, 1)
	before := m.Group().Stats().Tasks
	go func() { m.reading <- m.stack.Read(ctx) }() // it adds its task at once, which runs by hand, and waits
	for m.Group().Stats().Tasks == before {
		runtime.Gosched()
	}
	m.Settle()
	m.ends = append(m.ends, func(context.Context) error { stop(); return nil })
}

// close ends everything; nothing may be left.
func (m *mesh) close() {
	for _, a := range m.apps {
		if !a.over {
			m.write(a.packet(header.TCPFlagRst|header.TCPFlagAck, ""))
		}
	}
	for _, name := range m.serverNames() {
		m.servers[name].Reset()
	}
	m.Settle()
	m.stop()
	for _, end := range m.ends {
		m.Group().Go(context.Background(), func(ctx context.Context) {
			ctx, cancel := m.Group().WithTimeout(ctx, time.Second)
			defer cancel()
			_ = end(ctx)
		})
	}
	m.Advance(5 * time.Second)
	for waiting := m.reading != nil; waiting; {
		m.Settle()
		select {
		case err := <-m.reading:
			if err != nil {
				m.t.Error(err)
			}
			waiting = false
		default:
			runtime.Gosched()
		}
	}
	if m.stack != nil {
		if err := m.stack.Close(); err != nil {
			m.t.Error(err)
		}
	}
	m.Settle()
	m.manager.Close()
	if err := m.Close(); err != nil {
		m.t.Error(err)
	}
}

// connect is a connection to an address, as it behaves; name says who and what for.
func (m *mesh) connect(ctx context.Context, what string, dst netip.AddrPort) error {
	how := m.behave[dst]
	if what != "" {
		m.say("%s%s", what, map[string]string{"": "", "refuse": ": refused", "unreachable": ": unreachable", "silent": ": no answer"}[how])
	}
	switch how {
	case "refuse":
		return syscall.ECONNREFUSED
	case "unreachable":
		return syscall.EHOSTUNREACH
	case "silent":
		return loop.Await(ctx, func(func()) {})
	}
	return nil
}

func (m *mesh) pipe(from netip.Addr, dst netip.AddrPort) (near, far loop.Conn) {
	m.ports++
	return loop.PipeAddrs(netip.AddrPortFrom(from, m.ports), dst)
}

// open connects to an application, whose end gets the name of the connection that is being opened.
func (n *node) open(ctx context.Context, what string, from netip.Addr, dst netip.AddrPort) (loop.Conn, error) {
	m := n.m
	if err := m.connect(ctx, fmt.Sprintf("%s %s %s", n.workload().Name, what, dst), dst); err != nil {
		return nil, err
	}
	near, far := m.pipe(from, dst)
	m.servers[m.opening+".server"] = far
	delete(m.ended, m.opening+".server")
	return near, nil
}

// pathsOf are the sockets of a pod.
type pathsOf struct{ n *node }

func (p pathsOf) own(like netip.Addr) netip.Addr {
	for _, a := range p.n.workload().Addresses {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	return netip.IPv6Unspecified()
}

func (p pathsOf) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return p.n.open(ctx, "dials", p.own(dst.Addr()), dst)
}

func (p pathsOf) Deliver(ctx context.Context, client, dst netip.AddrPort) (loop.Conn, error) {
	return p.n.open(ctx, "delivers from "+client.Addr().String()+" to", client.Addr(), dst)
}

func (p pathsOf) DialLoopback(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return p.n.open(ctx, "dials", dst.Addr(), dst)
}

// Dial implements hbone.Dialer: to the node, or the gateway, that has the address.
func (n *node) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	m := n.m
	if err := m.connect(ctx, fmt.Sprintf("%s opens a tunnel to %s", n.workload().Name, dst), dst); err != nil {
		return nil, err
	}
	at := m.at(dst.Addr())
	if at == nil {
		return nil, syscall.EHOSTUNREACH
	}
	near, far := m.pipe(pathsOf{n}.own(dst.Addr()), dst)
	if dst.Port() == hbone.Port {
		m.node(at).server.Serve(far)
	} else {
		m.gateway(at).Serve(far)
	}
	return near, nil
}

// at is the workload with an address, on whatever network.
func (m *mesh) at(a netip.Addr) *workload.Workload {
	for _, w := range m.store.Snapshot().State().Workloads {
		if slices.Contains(w.Addresses, a) || slices.Contains(m.names[w.Hostname], a) {
			return w
		}
	}
	return nil
}

// gateway is one to another network: what it gets for a service it passes on to that network's endpoint.
func (m *mesh) gateway(w *workload.Workload) *hbone.Server {
	if s := m.gates[w.UID]; s != nil {
		return s
	}
	s, err := hbone.NewServer(hbone.ServerConfig{Group: m.Group(), TLS: m.manager.Server(w.Identity()), Handler: gatewayOf{m}, Log: quiet})
	m.must(err)
	m.gates[w.UID] = s
	m.ends = append(m.ends, s.Close)
	return s
}

type gatewayOf struct{ m *mesh }

func (g gatewayOf) ServeConnect(_ context.Context, r *hbone.Request) {
	m := g.m
	m.say("the gateway is asked for %s", r.Authority)
	host, _, _ := net.SplitHostPort(r.Authority)
	for _, w := range m.store.Snapshot().State().Workloads {
		for key := range w.Services {
			if key.Hostname == host && w.Network != m.pod.workload().Network {
				_ = r.Accept(hbone.Headers{}, func(s hbone.Stream) {
					m.node(w).server.Serve(arrived{s, netip.AddrPortFrom(m.pod.workload().Addresses[0], 1), netip.AddrPortFrom(w.Addresses[0], hbone.Port)})
				})
				return
			}
		}
	}
	r.Reject(404, "no such service")
}

// An arrived stream is what a gateway passes on, as the node of the destination has it: with its own address.
type arrived struct {
	hbone.Stream
	remote, local netip.AddrPort
}

func (a arrived) LocalAddr() netip.AddrPort  { return a.local }
func (a arrived) RemoteAddr() netip.AddrPort { return a.remote }

// Resolve implements proxy.Resolver.
func (m *mesh) Resolve(_ context.Context, hostname string) ([]netip.Addr, error) {
	addrs, ok := m.names[hostname]
	m.say("%s is looked for", hostname)
	if !ok {
		return nil, errors.New("no such name")
	}
	return addrs, nil
}

// Exchange implements dnsproxy.Upstream.
func (m *mesh) Exchange(_ context.Context, server netip.AddrPort, _ bool, msg, buf []byte, accept func([]byte) bool) ([]byte, error) {
	var q dns.Msg
	if err := q.Unpack(msg); err != nil {
		return nil, err
	}
	key := dns.TypeToString[q.Question[0].Qtype] + " " + q.Question[0].Name
	m.say("%s is asked for %s", server, key)
	a := new(dns.Msg).SetReply(&q)
	if text := m.world[key]; text == "" {
		a.Rcode = dns.RcodeNameError
	} else if rr, err := dns.NewRR(text); err != nil {
		return nil, err
	} else {
		a.Answer = append(a.Answer, rr)
	}
	packed, err := a.Pack()
	if err != nil || !accept(packed) {
		return nil, errors.Join(err, errors.New("no answer"))
	}
	return append(buf[:0], packed...), nil
}

// write gives a packet to the stack.
func (m *mesh) write(packet []byte) {
	buf := append(make([]byte, tun.Headroom), packet...)
	tun.VnetHdr{}.Encode(buf)
	if _, err := m.far.Write([][]byte{buf}, tun.Headroom); err != nil {
		m.t.Fatal(err)
	}
	m.Settle()
}

// settle lets everything happen that follows now, and tells what the applications and servers see of it.
func (m *mesh) settle() {
	buf, sizes := [][]byte{make([]byte, tun.Headroom+tun.MaxPacket)}, make([]int, 1)
	for again := true; again; {
		m.Settle()
		again = false
		for {
			n, err := m.far.Read(buf, sizes, tun.Headroom)
			if n == 0 || err != nil {
				break
			}
			again = true
			m.hear(bytes.Clone(buf[0][tun.Headroom:][:sizes[0]]))
		}
		for _, name := range m.serverNames() {
			if m.readServer(name) {
				again = true
			}
		}
	}
}

func (m *mesh) serverNames() (names []string) {
	for name := range m.servers {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// hear tells what a packet of the stack means, and acknowledges it.
func (m *mesh) hear(b []byte) {
	h := hear(b)
	if h.udp != nil {
		m.say("answer to %s: %s", h.dst, answerText(h.udp.Payload()))
		return
	}
	i := slices.IndexFunc(m.apps, func(a *app) bool { return a.src == h.dst && a.dst == h.src })
	if i < 0 {
		m.say("a packet from %s to %s, of nobody", h.src, h.dst)
		return
	}
	a := m.apps[i]
	if h.icmp != "" {
		a.over = true
		m.say("%s: %s", a.name, h.icmp)
		return
	}
	what, answer := a.takes(h.tcp)
	if what != "" {
		m.say("%s: %s", a.name, what)
	}
	if answer {
		m.write(a.packet(header.TCPFlagAck, ""))
	}
}

// readServer reads what has come to the other end of a connection; true: it was something.
func (m *mesh) readServer(name string) (some bool) {
	if m.ended[name] {
		return false
	}
	var all []byte
	p := make([]byte, 64<<10)
	for {
		n, err := m.servers[name].TryRead(p)
		all = append(all, p[:n]...)
		if err == nil {
			m.Settle()
			continue
		}
		if len(all) > 0 {
			some = true
			m.say("%s: reads %s", name, shown(string(all)))
		}
		switch {
		case errors.Is(err, loop.ErrAgain):
			return some
		case errors.Is(err, io.EOF):
			m.say("%s: FIN", name)
		default:
			m.say("%s: RST", name)
			delete(m.servers, name)
		}
		m.ended[name] = true
		return true
	}
}
