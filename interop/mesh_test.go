package interop

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/identity"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/underlay"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/tun"
)

// Who is who, and where. The port is Istio's.
var (
	ztunID = workload.Identity{TrustDomain: "cluster.local", Namespace: "shop", ServiceAccount: "ztun"}
	peerID = workload.Identity{TrustDomain: "cluster.local", Namespace: "shop", ServiceAccount: "peer"}

	ztunAddr = netip.MustParseAddrPort("127.0.0.3:15008")
	peerAddr = netip.MustParseAddrPort("127.0.0.2:15008")
)

// authority is what peers put into the CONNECTs that they open.
const authority = "10.0.0.1:80"

// patience is how long anything may take that happens at once on an idle machine.
const patience = 60 * time.Second

// A mesh is the ztun side: what a node has for a pod, with the pieces that a node has.
type mesh struct {
	group  *loop.Group
	under  *underlay.Underlay
	ids    *identity.Manager
	server *hbone.Server
	pool   *hbone.Pool
	budget *loop.Budget

	requests chan *hbone.Request // that were accepted, in the order of streams
	streams  chan hbone.Stream
	baggage  string       // that requests have to have
	status   atomic.Int32 // that requests are rejected with; 0: none
}

// A dialer dials tunnels.
type dialer struct{ u *underlay.Underlay }

func (d dialer) Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error) {
	return d.u.DialPeer(ctx, dst)
}

// newMesh returns a mesh whose tunnels take new streams for age only (0: for ever), and then go away gracefully.
func newMesh(t *testing.T, age time.Duration) *mesh {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	m := &mesh{budget: loop.NewBudget(256 << 20), requests: make(chan *hbone.Request, 1000), streams: make(chan hbone.Stream, 1000)}
	var err error
	check := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m.group, err = loop.New(loop.Config{Loops: 2, Sparse: 1, Now: time.Now})
	check()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.group.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if s := m.group.Stats(); s != (loop.Stats{}) {
			t.Errorf("after the end the group holds %+v", s)
		}
	})
	authority, err := ca.New(time.Now)
	check()
	m.ids, err = identity.New(identity.Config{CA: authority, Now: time.Now, Log: log})
	check()
	t.Cleanup(m.ids.Close)
	t.Cleanup(func() {
		if n := m.budget.Held(); n != 0 {
			t.Errorf("%d bytes are held after the end", n)
		}
	})
	ns, err := tun.CurrentNetns()
	check()
	t.Cleanup(func() { ns.Close() })
	m.under, err = underlay.New(underlay.Config{
		Netns: ns, Group: m.group, Marks: tun.Marks{Own: 0x539, Deliver: 0x111}, Rand: rand.Uint64, Log: log,
	})
	check()
	m.newPool(t, hbone.PoolConfig{MaxAge: age})
	m.serve(t, ztunAddr, hbone.ServerConfig{MaxAge: age})
	return m
}

// newPool gives the mesh a pool without tunnels.
func (m *mesh) newPool(t *testing.T, cfg hbone.PoolConfig) {
	t.Helper()
	cfg.Group, cfg.Dialer, cfg.TLS, cfg.Budget = m.group, dialer{m.under}, m.ids.Client(ztunID), m.budget
	pool, err := hbone.NewPool(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.pool = pool
	t.Cleanup(func() { closing(t, "pool", pool.Close) })
}

// serve listens for tunnels.
func (m *mesh) serve(t *testing.T, addr netip.AddrPort, cfg hbone.ServerConfig) {
	t.Helper()
	l, err := m.under.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Group, cfg.TLS, cfg.Handler, cfg.Resume, cfg.Budget = m.group, m.ids.Server(ztunID), m, l.Resume, m.budget
	server, err := hbone.NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.server = server
	l.Limit(server.Accepting)
	if err := l.Start(server.Serve); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closing(t, "server", server.Close)
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// closing is an orderly end, which all streams are given a moment for: tests end theirs.
func closing(t *testing.T, what string, end func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := end(ctx); err != nil {
		t.Errorf("%s: streams are left: %v", what, err)
	}
}

// ServeConnect implements hbone.Handler.
func (m *mesh) ServeConnect(_ context.Context, r *hbone.Request) {
	if status := m.status.Load(); status != 0 {
		r.Reject(int(status), "not today")
		return
	}
	if err := r.Accept(hbone.Headers{Baggage: "service.name=ztun"}, func(s hbone.Stream) {
		m.requests <- r
		m.streams <- s
	}); err != nil && !errors.Is(err, loop.ErrReset) {
		panic(err)
	}
}

// view is a blocking view of a stream, whose calls fail after a while.
func view(t *testing.T, s hbone.Stream) *loop.Blocked {
	b := s.Ref().Blocking(context.Background(), s)
	if err := b.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Error(err)
	}
	return b
}

// open opens a stream by way of the peer at to.
func (m *mesh) open(to netip.AddrPort, authority string) (hbone.Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return m.pool.Open(ctx, hbone.Target{
		NextHop: to, Authority: authority, Accept: []workload.Identity{peerID},
		Headers: hbone.Headers{
			Baggage:     "k8s.cluster.name=Kubernetes,k8s.namespace.name=shop",
			Forwarded:   `for="10.244.2.9:41234"`,
			Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
		},
	})
}

// accepted is the next stream that a peer has opened.
func (m *mesh) accepted(t *testing.T) hbone.Stream {
	t.Helper()
	select {
	case s := <-m.streams:
		if r := <-m.requests; r.Peer != peerID || r.Authority != authority || r.Headers.Baggage != m.baggage {
			t.Errorf("the request is of %v for %s with %+v", r.Peer, r.Authority, r.Headers)
		}
		return s
	case <-time.After(patience):
		t.Fatal("the peer opens no stream")
		return nil
	}
}

// peerFiles writes certificate, key and root of the peer for programs that read files.
func (m *mesh) peerFiles(t *testing.T) (cert, key, root string) {
	t.Helper()
	c, err := m.ids.Certificate(t.Context(), peerID)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(c.TLS.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, typ string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert.pem", "CERTIFICATE", c.TLS.Certificate[0]), write("key.pem", "PRIVATE KEY", der), write("root.pem", "CERTIFICATE", c.RootList[0].Raw)
}
