package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/identity"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// A peer is somebody else's end of HBONE: a real pool, with real TLS, over pipes to the server of the bench's pod.
type peer struct {
	*bench
	pool   *hbone.Pool
	server *hbone.Server
}

const podAddr = "10.244.0.5:15008" // of the bench's pod

func newPeer(t *testing.T, m *mesh, id workload.Identity) *peer {
	t.Helper()
	b := newBench(t, m)
	now := b.Group().Now
	authority, err := ca.New(now)
	if err != nil {
		t.Fatal(err)
	}
	manager, err := identity.New(identity.Config{CA: authority, Now: now, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{bench: b}
	p.server, err = hbone.NewServer(hbone.ServerConfig{Group: b.Group(), TLS: manager.Server(m.client.Identity()), Handler: b.Proxy, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	p.pool, err = hbone.NewPool(hbone.PoolConfig{Group: b.Group(), Dialer: p, TLS: manager.Client(id), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, end := range []func(context.Context) error{p.pool.Close, p.server.Close} {
			b.Group().Go(context.Background(), func(ctx context.Context) {
				ctx, cancel := b.Group().WithTimeout(ctx, time.Second)
				defer cancel()
				_ = end(ctx)
			})
		}
		b.Advance(3 * time.Second)
		manager.Close()
	})
	return p
}

// Dial implements hbone.Dialer.
func (p *peer) Dial(_ context.Context, dst netip.AddrPort) (loop.Conn, error) {
	near, far := loop.PipeAddrs(netip.MustParseAddrPort("10.244.9.9:41000"), dst)
	p.server.Serve(far)
	return near, nil
}

// open asks for a stream to authority.
func (p *peer) open(t *testing.T, authority string, h hbone.Headers) (hbone.Stream, error) {
	t.Helper()
	var s hbone.Stream
	err := errors.New("the set-up has not ended")
	p.Group().Go(t.Context(), func(ctx context.Context) {
		s, err = p.pool.Open(ctx, hbone.Target{
			NextHop: netip.MustParseAddrPort(podAddr), Authority: authority, Accept: []workload.Identity{p.mesh.client.Identity()}, Headers: h,
		})
	})
	p.Settle()
	p.Advance(2 * time.Second) // for policies that are waited for
	return s, err
}

var somebody = workload.Identity{TrustDomain: "cluster.local", Namespace: "default", ServiceAccount: "somebody"}

func only(principal string) *workload.Policy {
	return &workload.Policy{
		Name: "only", Namespace: "default", Scope: workload.ScopePolicyNamespace,
		Groups: []workload.Group{{{{Principals: []workload.StringMatch{{Value: principal}}}}}},
	}
}

func TestInboundHBONE(t *testing.T) {
	serves := func(m *mesh) { m.client.Services[webKey] = nil } // the bench's pod is an endpoint of web
	tests := []struct {
		name      string
		change    func(*mesh)
		fails     error // of the connection to the application
		authority string
		dials     string // what the application saw
		status    int
		line      string
	}{
		{"DP-83 to the pod's address", nil, nil, "10.244.0.5:8080", "deliver from 10.244.9.9 to 10.244.0.5:8080", 200, `src.identity="spiffe://cluster.local/ns/default/sa/somebody"`},
		{"DP-85 no port", nil, nil, "10.244.0.5", "", 400, `no valid authority pseudo header: \"10.244.0.5\"`},
		{"DP-86 another address", nil, nil, "10.244.1.7:8080", "", 400, "ip mismatch: 10.244.0.5 != 10.244.1.7"},
		{"DP-87 by name", serves, nil, "web.default.svc.cluster.local:80", "deliver from 10.244.9.9 to 10.244.0.5:8080", 200, `dst.service="web.default.svc.cluster.local"`},
		{"DP-88 port of the endpoint", func(m *mesh) {
			m.web.Ports[80] = 0
			m.client.Services[webKey] = workload.PortMap{80: 9090}
		}, nil, "web.default.svc.cluster.local:80", "deliver from 10.244.9.9 to 10.244.0.5:9090", 200, ""},
		{"DP-89 no port at all", func(m *mesh) { m.web.Ports[80] = 0 }, nil, "web.default.svc.cluster.local:80", "", 503, "cannot resolve port"},
		{"DP-90 unknown name", nil, nil, "nope.example.com:80", "", 503, "no service or workload for hostname: nope.example.com"},
		{"DP-91 a port of the proxy", nil, nil, "10.244.0.5:15006", "", 503, "attempted recursive call to ourselves"},
		{"DP-92 closed port", nil, syscall.ECONNREFUSED, "10.244.0.5:8080", "deliver from 10.244.9.9 to 10.244.0.5:8080", 503, "connection failed: connection refused"},
		{"DP-93 denied", func(m *mesh) { m.more.Policies = []*workload.Policy{only("cluster.local/ns/default/sa/other")} }, nil, "10.244.0.5:8080", "", 401, "connection closed due to policy rejection: allow policies exist, but none allowed"},
		{"allowed by its identity", func(m *mesh) { m.more.Policies = []*workload.Policy{only(somebody.Principal())} }, nil, "10.244.0.5:8080", "deliver from 10.244.9.9 to 10.244.0.5:8080", 200, ""},
		{"DP-98 for a waypoint", func(m *mesh) { m.web.Waypoint = byIP("10.244.0.5") }, nil, "10.96.0.10:80", "deliver from 10.244.9.9 to 10.244.0.5:80", 200, ""},
		{"DP-96 for a waypoint of a workload", func(m *mesh) { m.server.Waypoint = byIP("10.244.0.5") }, nil, "10.244.1.7:80", "deliver from 10.244.9.9 to 10.244.0.5:80", 200, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			if tt.change != nil {
				tt.change(m)
			}
			p := newPeer(t, m, somebody)
			p.net.fail = map[netip.AddrPort]error{netip.MustParseAddrPort("10.244.0.5:8080"): tt.fails}
			s, err := p.open(t, tt.authority, hbone.Headers{Baggage: "k8s.namespace.name=default"})
			status := 200
			if err != nil {
				var se *hbone.StatusError
				if !errors.As(err, &se) {
					t.Fatalf("open: %v", err)
				}
				status = se.Code
			}
			if status != tt.status {
				t.Errorf("status %d, want %d", status, tt.status)
			}
			if got := strings.Join(p.net.dials, "; "); got != tt.dials {
				t.Errorf("connections %q, want %q", got, tt.dials)
			}
			if s != nil {
				if got := s.Response().Baggage; !strings.Contains(got, "k8s.cluster.name=Kubernetes") {
					t.Errorf("baggage of the response: %q", got)
				}
				s.Ref().Post(func() { s.Reset() })
				p.Settle()
				if _, then := all(p.net.far[0]); then != loop.ErrReset.Error() {
					t.Errorf("after a reset of the stream the application reads %q, want a reset", then)
				}
			}
			if got := p.lines(t); !strings.Contains(got, tt.line) || !strings.Contains(got, `direction="inbound"`) {
				t.Errorf("access log %q lacks %q", got, tt.line)
			}
		})
	}
}

func TestPolicyThatComesInTimeDecides(t *testing.T) {
	m := newMesh()
	m.client.AuthorizationPolicies = []string{"default/only"}
	p := newPeer(t, m, somebody)
	policy := only(somebody.Principal())
	policy.Scope = workload.ScopePolicyWorkload
	p.Group().After(500*time.Millisecond, func() {
		st := m.state()
		st.Policies = []*workload.Policy{policy}
		p.store.Replace(st)
	})
	s, err := p.open(t, "10.244.0.5:8080", hbone.Headers{})
	if err != nil {
		t.Fatalf("open: %v, want it allowed once the policy is there", err)
	}
	s.Ref().Post(func() { s.Reset() })
	p.Settle()
}

func TestForwardedHost(t *testing.T) {
	for in, want := range map[string]string{
		`for="1.1.1.1:1";host=web.default`:     "web.default",
		`for="1.1.1.1:1"; host="example.com" `: "example.com",
		"host=":                                "",
		"for=x":                                "",
		"host=bücher.example":                  "",
		"host=" + strings.Repeat("x", 254):     "",
	} {
		if got := forwardedHost(in); got != want {
			t.Errorf("DP-108: forwardedHost(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzForwardedHost(f *testing.F) {
	f.Add(`for="1.1.1.1:1";host="a"`)
	f.Fuzz(func(t *testing.T, s string) {
		if h := forwardedHost(s); strings.ContainsAny(h, ";") || len(h) > maxHostname {
			t.Errorf("host %q of %q", h, s)
		}
	})
}

func FuzzSplitAuthority(f *testing.F) {
	f.Add("[::1]:80")
	f.Add("a:0")
	f.Fuzz(func(t *testing.T, s string) {
		if host, port, err := splitAuthority(s); err == nil && (host == "" || port == 0) {
			t.Errorf("splitAuthority(%q) = %q, %d", s, host, port)
		}
	})
}
