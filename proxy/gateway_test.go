package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/identity"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// A network is another one, with a gateway, and behind it a node with one application.
type network struct {
	*bench
	echo     *workload.Service
	gateway  *hbone.Server
	node     *hbone.Server
	manager  *identity.Manager
	who      workload.Identity // of the application
	baggage  string
	deny     bool
	hold     bool // the gateway keeps what comes
	held     []hbone.Stream
	decided  int
	requests []*hbone.Request // to the node
	streams  []hbone.Stream   // of the application
}

var (
	gatewayHop = netip.MustParseAddrPort("10.22.1.1:15009")
	echoID     = workload.Identity{TrustDomain: "cluster.local", Namespace: "default", ServiceAccount: "echo"}
)

type gatewayHandler struct{ n *network }

func (h gatewayHandler) ServeConnect(_ context.Context, r *hbone.Request) {
	_ = r.Accept(hbone.Headers{}, func(s hbone.Stream) {
		if h.n.hold {
			h.n.held = append(h.n.held, s)
			return
		}
		h.n.node.Serve(s)
	})
}

type nodeHandler struct{ n *network }

func (h nodeHandler) ServeConnect(_ context.Context, r *hbone.Request) {
	n := h.n
	n.requests = append(n.requests, r)
	if n.deny {
		r.Reject(401, "policy")
		return
	}
	_ = r.Accept(hbone.Headers{Baggage: n.baggage}, func(s hbone.Stream) { n.streams = append(n.streams, s) })
}

// Dial implements hbone.Dialer.
func (n *network) Dial(_ context.Context, dst netip.AddrPort) (loop.Conn, error) {
	near, far := loop.PipeAddrs(netip.MustParseAddrPort("10.244.0.5:50000"), dst)
	n.gateway.Serve(far)
	return near, nil
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{bench: newBench(t, newMesh()), who: echoID, baggage: "k8s.namespace.name=default,k8s.deployment.name=echo,service.name=echo-canonical"}
	n.echo = &workload.Service{
		Name: "echo", Namespace: "default", Hostname: "echo.default.svc.cluster.local", Ports: workload.PortMap{80: 8080},
		SubjectAltNames: []workload.Identity{echoID},
	}
	gw := pod0("gateway", "10.22.1.1")
	gw.Network, gw.WorkloadName = "net-b", "gateway"
	n.classify = func(_ *workload.Snapshot, q *Query) Decision {
		n.decided++
		return Decision{Route: DoubleHBONE, NextHop: gatewayHop, Host: n.echo.Hostname, Target: q.Target, Service: n.echo, Destination: gw, beyond: n.echo}
	}
	now := n.Group().Now
	authority, err := ca.New(now)
	if err != nil {
		t.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	if n.manager, err = identity.New(identity.Config{CA: authority, Now: now, Log: quiet}); err != nil {
		t.Fatal(err)
	}
	if n.gateway, err = hbone.NewServer(hbone.ServerConfig{Group: n.Group(), TLS: n.manager.Server(gw.Identity()), Handler: gatewayHandler{n}, Log: quiet}); err != nil {
		t.Fatal(err)
	}
	pool, err := hbone.NewPool(hbone.PoolConfig{Group: n.Group(), Dialer: n, TLS: n.manager.Client(n.mesh.client.Identity()), Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	n.cfg.Tunnel = pool
	t.Cleanup(func() {
		for _, end := range []func(context.Context) error{pool.Close, n.node.Close, n.gateway.Close} {
			n.Group().Go(context.Background(), func(ctx context.Context) {
				ctx, cancel := n.Group().WithTimeout(ctx, time.Second)
				defer cancel()
				_ = end(ctx)
			})
		}
		n.Advance(5 * time.Second)
		n.manager.Close()
	})
	return n
}

// connect has an application connect to the service.
func (n *network) connect(t *testing.T) *fakeRequest {
	t.Helper()
	var err error
	if n.node, err = hbone.NewServer(hbone.ServerConfig{
		Group: n.Group(), TLS: n.manager.Server(n.who), Handler: nodeHandler{n}, Log: slog.New(slog.DiscardHandler),
	}); err != nil {
		t.Fatal(err)
	}
	req := request("10.96.0.10:80")
	n.ServeTCP(t.Context(), req)
	n.Settle()
	return req
}

// at runs f on the loop of the application's stream.
func (n *network) at(f func(s hbone.Stream)) {
	s := n.streams[0]
	s.Ref().Post(func() { f(s) })
	n.Settle()
}

func TestGateway(t *testing.T) {
	t.Run("DP-69 who is beyond the gateway is recorded", func(t *testing.T) {
		n := newNetwork(t)
		n.hold = true
		req := n.connect(t)
		if len(n.held) != 1 || len(openConns(n.bench)) != 0 || req.answer != "" {
			t.Fatalf("%d streams at the gateway, %d records, the SYN was answered by %q; want one, none, and no answer yet", len(n.held), len(openConns(n.bench)), req.answer)
		}
		n.node.Serve(n.held[0])
		n.Settle()
		if req.answer != "accepted" || len(openConns(n.bench)) != 1 {
			t.Fatalf("the SYN was answered by %q, %d records", req.answer, len(openConns(n.bench)))
		}
		n.exchange(t, req.app, "there")
		n.at(func(s hbone.Stream) {
			if got, then := all(s); got != "there" || then != "EOF" {
				t.Errorf("the other application reads %q, then %q", got, then)
			}
			if _, err := s.TryWrite([]byte("and back")); err != nil {
				t.Error(err)
			}
			_ = s.CloseWrite()
			_ = s.Close()
		})
		if got, then := all(req.app); got != "and back" || then != "EOF" {
			t.Errorf("the application reads %q, then %q", got, then)
		}
		n.Advance(2 * time.Second)
		if n.node.Tunnels() != 0 || n.gateway.Tunnels() != 1 {
			t.Errorf("%d inner tunnels and %d outer ones are left, want none and one", n.node.Tunnels(), n.gateway.Tunnels())
		}
		want := `src.identity="spiffe://cluster.local/ns/default/sa/client" src.cluster="Kubernetes" dst.addr=10.22.1.1:15009 dst.hbone_addr=echo.default.svc.cluster.local:80 ` +
			`dst.service="echo.default.svc.cluster.local" dst.workload="echo" dst.namespace="default" dst.identity="spiffe://cluster.local/ns/default/sa/echo" ` +
			`direction="outbound" bytes_sent=5 bytes_recv=8`
		if got := n.lines(t); !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
			t.Errorf("access log\n%s lacks\n%s", got, want)
		}
	})
	t.Run("without baggage only the identity", func(t *testing.T) {
		n := newNetwork(t)
		n.baggage = ""
		req := n.connect(t)
		req.app.Reset()
		n.Settle()
		want := `dst.service="echo.default.svc.cluster.local" dst.identity="spiffe://cluster.local/ns/default/sa/echo" direction=`
		if got := n.lines(t); !strings.Contains(got, want) {
			t.Errorf("access log\n%s lacks\n%s", got, want)
		}
	})
	for _, name := range []string{"net-a", ""} {
		t.Run("DP-67 what the other side is told, from network "+name, func(t *testing.T) {
			n := newNetwork(t)
			n.cfg.Network = name
			req := n.connect(t)
			defer req.app.Reset()
			got := *n.requests[0]
			want := hbone.Headers{
				Baggage:   "k8s.cluster.name=Kubernetes,k8s.namespace.name=default",
				Forwarded: `for="10.244.0.5:40000";host=echo.default.svc.cluster.local`, Traceparent: traceparent(7, 7, 7),
				ForwardedNetwork: name, CrossNetwork: true,
			}
			if diff := cmp.Diff(want, got.Headers); diff != "" || got.Authority != "echo.default.svc.cluster.local:80" || got.Peer != n.mesh.client.Identity() {
				t.Errorf("%s from %v (-want +got):\n%s", got.Authority, got.Peer, diff)
			}
		})
	}
	t.Run("DP-127 resets go all the way", func(t *testing.T) {
		n := newNetwork(t)
		req := n.connect(t)
		req.app.Reset()
		n.Settle()
		n.at(func(s hbone.Stream) {
			if _, then := all(s); then != loop.ErrReset.Error() {
				t.Errorf("the other application reads %q, want a reset", then)
			}
			_ = s.Reset()
		})
	})
	t.Run("DP-128 and back", func(t *testing.T) {
		n := newNetwork(t)
		req := n.connect(t)
		n.at(func(s hbone.Stream) { _ = s.Reset() })
		if _, then := all(req.app); then != loop.ErrReset.Error() {
			t.Errorf("the application reads %q, want a reset", then)
		}
	})
}

func TestGatewayFails(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*network)
		answer string
		line   string
	}{
		{"DP-68 the peer is somebody else", func(n *network) { n.who = somebody }, "RST", `beyond the gateway: peer did not present an accepted identity`},
		{"DP-68 the service has no names", func(n *network) { n.echo.SubjectAltNames = nil }, "RST", `beyond the gateway: peer did not present an accepted identity`},
		{"the peer denies", func(n *network) { n.deny = true }, "RST", `beyond the gateway: http status: 401 Unauthorized: policy" response_flags="CONNECT"`},
		{"nobody is beyond the gateway", func(n *network) { n.hold = true }, "nothing", `beyond the gateway: context deadline exceeded" response_flags="H2_HANDSHAKE_FAILURE"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNetwork(t)
			tt.change(n)
			req := n.connect(t)
			n.Advance(30 * time.Second)
			if req.answer != tt.answer {
				t.Errorf("the SYN was answered by %q, want %q", req.answer, tt.answer)
			}
			if n.decided != 1 {
				t.Errorf("%d endpoints were tried, want one", n.decided)
			}
			got := n.lines(t)
			if !strings.Contains(got, tt.line) || !strings.Contains(got, "dst.addr=10.22.1.1:15009") || strings.Count(got, "\n") != 1 {
				t.Errorf("access log\n%s lacks %s", got, tt.line)
			}
			// Nobody beyond it is known, so the destination is the gateway (datapath 12.2).
			if want := `dst.workload="gateway" dst.namespace="default" dst.identity="spiffe://cluster.local/ns/default/sa/gateway"`; !strings.Contains(got, want) {
				t.Errorf("access log\n%s lacks\n%s", got, want)
			}
			l := n.labels(t, "istio_tcp_connections_failed_total")
			if l["destination_workload"] != "gateway" || l["destination_principal"] != "spiffe://cluster.local/ns/default/sa/gateway" || l["destination_service"] != n.echo.Hostname || l["connection_security_policy"] != "mutual_tls" {
				t.Errorf("labels %v", l)
			}
			if strings.HasPrefix(tt.name, "DP-68") && !strings.Contains(got, `response_flags="TLS_FAILURE"`) {
				t.Errorf("access log\n%s lacks the flag of a TLS failure", got)
			}
			if n.node.Tunnels() != 0 || n.gateway.Tunnels() != 1 || len(openConns(n.bench)) != 0 {
				t.Errorf("%d inner tunnels, %d outer ones, %d connections are left", n.node.Tunnels(), n.gateway.Tunnels(), len(openConns(n.bench)))
			}
			for _, s := range n.held { // the stream to the gateway has ended
				s.Ref().Post(func() {
					if _, err := s.TryWrite([]byte("x")); !errors.Is(err, loop.ErrReset) {
						t.Errorf("the gateway's stream still takes bytes: %v", err)
					}
				})
			}
			n.Settle()
		})
	}
}
