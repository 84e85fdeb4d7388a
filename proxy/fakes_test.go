package proxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// A bench is a Proxy driven by hand, with everything around it faked.
type bench struct {
	*loop.Manual
	*Proxy
	mesh    *mesh
	store   *workload.Store
	net     *fakeUnderlay
	tunnel  *fakeTunnel
	names   fakeResolver
	records *telemetry.Recorder
	conns   *Connections
	log     *syncBuffer
	metrics *prometheus.Registry
}

func newBench(t *testing.T, m *mesh) *bench { return newBenchWith(t, m, func(*Config) {}) }

func newBenchWith(t *testing.T, m *mesh, change func(*Config)) *bench {
	t.Helper()
	b := &bench{Manual: loop.NewManual(epoch), mesh: m, store: new(workload.Store), log: new(syncBuffer), metrics: prometheus.NewRegistry()}
	b.net = &fakeUnderlay{}
	b.names = make(fakeResolver)
	b.tunnel = &fakeTunnel{g: b.Group()}
	b.store.Replace(m.state())
	var err error
	b.records, err = telemetry.NewRecorder(telemetry.Config{
		Now: b.Group().Now, Access: b.log, Log: slog.New(slog.DiscardHandler), Classify: ClassifyError, ErrorText: ErrorText, Fields: []string{"response_flags", "policy"}, Registerer: b.metrics,
	})
	if err != nil {
		t.Fatal(err)
	}
	b.conns, err = NewConnections(ConnectionsConfig{Store: b.store, Group: b.Group(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	watch, stop := context.WithCancel(t.Context())
	b.Group().Go(watch, func(ctx context.Context) { _ = b.conns.Run(ctx) })
	b.Settle()
	cfg := Config{
		Client: &workload.Client{Name: "client", Namespace: "default", ServiceAccount: "client"}, Local: func(a netip.Addr) bool { return a == addrs("10.244.0.5")[0] },
		Store: b.store, Underlay: b.net, Tunnel: b.tunnel, DNS: echoDNS{}, Resolver: b.names, Records: b.records, Connections: b.conns, Group: b.Group(),
		Rand: func() uint64 { return 7 }, Log: slog.New(slog.DiscardHandler),
	}
	change(&cfg)
	if b.Proxy, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		b.tunnel.close()
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// lines ends the access log and returns it.
func (b *bench) lines(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.records.Run(ctx); err != nil {
		t.Fatal(err)
	}
	return b.log.String()
}

func (m *mesh) state() workload.State {
	return workload.State{
		Workloads: append([]*workload.Workload{m.client, m.server, m.wp}, m.more.Workloads...),
		Services:  append([]*workload.Service{m.web, m.gateway}, m.more.Services...),
		Policies:  m.more.Policies,
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  []byte
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b = append(s.b, p...)
	return len(p), nil
}

func (s *syncBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return string(s.b) }

// A fakeResolver knows the addresses of hostnames, and for "never" no answer.
type fakeResolver map[string][]netip.Addr

func (f fakeResolver) Resolve(ctx context.Context, hostname string) ([]netip.Addr, error) {
	addrs, ok := f[hostname]
	if hostname == "never" {
		return nil, loop.Await(ctx, func(func()) {})
	}
	if !ok {
		return nil, errors.New("no such name")
	}
	return addrs, nil
}

// A fakeUnderlay connects to pipes, or fails.
type fakeUnderlay struct {
	fail  map[netip.AddrPort]error
	never map[netip.AddrPort]bool // no answer
	dials []string
	far   []loop.Conn               // the other ends, in order
	wrap  func(loop.Conn) loop.Conn // of the near ends; nil: none
}

func (u *fakeUnderlay) open(ctx context.Context, what string, from, dst netip.AddrPort) (loop.Conn, error) {
	u.dials = append(u.dials, what+" "+dst.String())
	if err := u.fail[dst]; err != nil {
		return nil, err
	}
	if u.never[dst] {
		return nil, loop.Await(ctx, func(func()) {})
	}
	near, far := loop.PipeAddrs(from, dst)
	u.far = append(u.far, far)
	if u.wrap != nil {
		near = u.wrap(near)
	}
	return near, nil
}

func (u *fakeUnderlay) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return u.open(ctx, "dial", netip.MustParseAddrPort("10.244.0.5:50000"), dst)
}

func (u *fakeUnderlay) Deliver(ctx context.Context, client, dst netip.AddrPort) (loop.Conn, error) {
	return u.open(ctx, "deliver from "+client.Addr().String()+" to", client, dst)
}

func (u *fakeUnderlay) DialLoopback(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return u.open(ctx, "loopback", dst, dst)
}

// A fakeTunnel is one task whose streams are pipes.
type fakeTunnel struct {
	g       *loop.Group
	ref     *loop.Ref
	fail    map[netip.AddrPort]error
	targets []hbone.Target
	far     []loop.Conn
	broken  error // of all streams
}

type fakeStream struct {
	loop.Conn
	ref    *loop.Ref
	broken *error // what Broken says
}

func (s fakeStream) Ref() *loop.Ref          { return s.ref }
func (s fakeStream) Peer() workload.Identity { return workload.Identity{} }
func (s fakeStream) Broken() error           { return *s.broken }
func (s fakeStream) Response() hbone.Headers { return hbone.Headers{} }
func (s fakeStream) Check() error            { return s.Conn.(loop.Checked).Check() }

type tunnelTask struct{ r *loop.Ref }

func (t tunnelTask) Turn(budget int) bool { return t.r.RunChildren(budget) }

func (f *fakeTunnel) task() *loop.Ref {
	if f.ref == nil {
		f.ref = f.g.Add(func(r *loop.Ref) loop.Task { return tunnelTask{r} })
	}
	return f.ref
}

func (f *fakeTunnel) close() {
	if f.ref != nil {
		f.ref.Post(f.ref.Remove)
	}
}

func (f *fakeTunnel) Open(_ context.Context, t hbone.Target) (hbone.Stream, error) {
	f.targets = append(f.targets, t)
	if err := f.fail[t.NextHop]; err != nil {
		return nil, err
	}
	near, far := loop.Pipe()
	f.far = append(f.far, far)
	return fakeStream{near, f.task(), &f.broken}, nil
}

func (f *fakeTunnel) OpenThrough(_ context.Context, gateway, _ hbone.Target) (hbone.Stream, error) {
	f.targets = append(f.targets, gateway)
	return nil, errors.ErrUnsupported
}

// A fakeRequest is a SYN whose answer is remembered.
type fakeRequest struct {
	flow   stack.Flow
	answer string
	app    loop.Conn                 // the application's end, once accepted
	wrap   func(loop.Conn) loop.Conn // of the near end; nil: none
	gone   bool                      // the application has given up
	kernel bool                      // takes flows back
	refuse error                     // of the kernel
}

func request(dst string) *fakeRequest {
	return &fakeRequest{flow: stack.Flow{Proto: stack.TCP, Src: netip.MustParseAddrPort("10.244.0.5:40000"), Dst: netip.MustParseAddrPort(dst)}}
}

func inboundRequest(src, dst string) *fakeRequest {
	r := request(dst)
	r.flow.Src = netip.MustParseAddrPort(src)
	return r
}

func (r *fakeRequest) say(s string) {
	if r.answer != "" {
		s = r.answer + ", then " + s
	}
	r.answer = s
}

func (r *fakeRequest) Flow() stack.Flow { return r.flow }

func (r *fakeRequest) Accept(context.Context) (loop.Conn, error) {
	if r.gone {
		return nil, stack.ErrGone
	}
	r.say("accepted")
	near, far := loop.PipeAddrs(r.flow.Dst, r.flow.Src)
	r.app = far
	if r.wrap != nil {
		near = r.wrap(near)
	}
	return near, nil
}

func (r *fakeRequest) Reset()                    { r.say("RST") }
func (r *fakeRequest) Unreachable(c stack.Cause) { r.say("unreachable " + string('0'+rune(c))) }
func (r *fakeRequest) Drop()                     { r.say("nothing") }

func (r *fakeRequest) HandBack() error {
	switch {
	case !r.kernel:
		return stack.ErrUnsupported
	case r.refuse != nil:
		return r.refuse
	}
	r.say("handed back")
	return nil
}

type echoDNS struct{}

func (echoDNS) ServeDNS(_ context.Context, _ *workload.Client, _, _ netip.AddrPort, _ bool, msg, _ []byte) ([]byte, error) {
	if len(msg) == 0 {
		return nil, errors.New("empty question")
	}
	return append([]byte("re:"), msg...), nil
}

// exchange sends text and a FIN on c and returns what comes back, by hand.
func (b *bench) exchange(t *testing.T, c loop.Conn, text string) {
	t.Helper()
	if _, err := c.TryWrite([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	b.Settle()
}

// all reads what c has now, and how it goes on: "" (nothing yet), "EOF" or an error.
func all(c loop.Conn) (text, then string) {
	var out []byte
	p := make([]byte, 64<<10)
	for {
		n, err := c.TryRead(p)
		out = append(out, p[:n]...)
		switch err {
		case nil:
		case loop.ErrAgain:
			return string(out), ""
		case io.EOF:
			return string(out), "EOF"
		default:
			return string(out), err.Error()
		}
	}
}

func openConns(b *bench) (list []*telemetry.Conn) {
	b.records.Each(func(c *telemetry.Conn) { list = append(list, c) })
	return list
}
