package proxy

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/identity"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

// A peer is somebody else's end of HBONE: a real pool, with real TLS, over pipes to the server of the bench's pod.
type peer struct {
	*bench
	pool     *hbone.Pool
	server   *hbone.Server
	from, to netip.AddrPort // of the tunnel
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
	p := &peer{bench: b, from: netip.MustParseAddrPort("10.244.9.9:41000"), to: netip.MustParseAddrPort(podAddr)}
	p.server, err = hbone.NewServer(hbone.ServerConfig{
		Group: b.Group(), TLS: manager.Server(m.client.Identity()), Handler: b.Proxy, Refused: b.Refused, Log: slog.New(slog.DiscardHandler),
	})
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
	near, far := loop.PipeAddrs(p.from, dst)
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
			NextHop: p.to, Authority: authority, Accept: []workload.Identity{p.mesh.client.Identity()}, Headers: h,
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
		{"DP-85 no port", nil, nil, "10.244.0.5", "", 400, `no valid authority pseudo header: 10.244.0.5"`},
		{"DP-85 a host that is none", nil, nil, strings.Repeat("x", 300) + ":80", "", 400, "no valid authority pseudo header: " + strings.Repeat("x", 253) + `"`},
		{"DP-86 another address", nil, nil, "10.244.1.7:8080", "", 400, "ip mismatch: 10.244.0.5 != 10.244.1.7"},
		{"DP-87 by name", serves, nil, "web.default.svc.cluster.local:80", "deliver from 10.244.9.9 to 10.244.0.5:8080", 200, `dst.service="web.default.svc.cluster.local"`},
		{"DP-88 port of the endpoint", func(m *mesh) {
			m.web.Ports[80] = 0
			m.client.Services[webKey] = workload.PortMap{80: 9090}
		}, nil, "web.default.svc.cluster.local:80", "deliver from 10.244.9.9 to 10.244.0.5:9090", 200, ""},
		{"DP-89 no port at all", func(m *mesh) { m.web.Ports[80] = 0 }, nil, "web.default.svc.cluster.local:80", "", 503, "cannot resolve port"},
		{"DP-90 unknown name", nil, nil, "nope.example.com:80", "", 503, "no service or workload for hostname: nope.example.com"},
		{"DP-91 a port of the proxy", nil, nil, "10.244.0.5:15006", "", 503, "attempted recursive call to ourselves"},
		{"DP-92 closed port", nil, syscall.ECONNREFUSED, "10.244.0.5:8080", "deliver from 10.244.9.9 to 10.244.0.5:8080", 503, `error="connection failed: Connection refused (os error 111)" response_flags="CONNECT"`},
		{"DP-93 denied", func(m *mesh) { m.more.Policies = []*workload.Policy{only("cluster.local/ns/default/sa/other")} }, nil, "10.244.0.5:8080", "", 401, `error="connection closed due to policy rejection: allow policies exist, but none allowed" response_flags="DENY"`},
		{"allowed by its identity", func(m *mesh) { m.more.Policies = []*workload.Policy{only(somebody.Principal())} }, nil, "10.244.0.5:8080", "deliver from 10.244.9.9 to 10.244.0.5:8080", 200, ""},
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

// What is refused before there is a request is logged and counted as well.
func TestInboundRefusedEarly(t *testing.T) {
	t.Run("DP-94 a peer of another trust domain", func(t *testing.T) {
		alien := somebody
		alien.TrustDomain = "other.local"
		p := newPeer(t, newMesh(), alien)
		if _, err := p.open(t, "10.244.0.5:8080", hbone.Headers{}); err == nil {
			t.Error("opened")
		}
		want := "warn\taccess\tconnection failed\tsrc.addr=10.244.9.9:41000 dst.addr=10.244.0.5:15008 direction=\"inbound\" error=\"tls handshake error: "
		got := p.lines(t)
		if !strings.Contains(got, want) || !strings.Contains(got, "did not present the expected trustdomain (cluster.local), got "+alien.String()) {
			t.Errorf("access log %q lacks %q, or the trust domains", got, want)
		}
	})
	for _, tt := range []struct {
		name   string
		err    error
		line   string
		flag   telemetry.Flag
		reason telemetry.Reason
	}{
		{"DP-84 another method", &hbone.RequestError{Reason: "expected method CONNECT, got GET"}, `error="expected method CONNECT, got GET"`, telemetry.FlagConnect, telemetry.ReasonBadRequest},
		{"DP-95 no TLS", &hbone.HandshakeError{Err: errors.New("no")}, `error="tls handshake error: no"`, telemetry.FlagTLSFailure, telemetry.ReasonTLS},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, newMesh())
			b.Refused(netip.MustParseAddrPort(podAddr), netip.MustParseAddrPort("[::ffff:10.244.9.9]:41000"), tt.err)
			want := "connection failed\tsrc.addr=10.244.9.9:41000 dst.addr=10.244.0.5:15008 direction=\"inbound\" " + tt.line
			if got := b.lines(t); !strings.Contains(got, want) {
				t.Errorf("access log %q lacks %q", got, want)
			}
			if s := b.records.Stats(); s.Failed != 1 || s.Opened != 0 {
				t.Errorf("%+v, want one early failure", s)
			}
			if bad, ok := errors.AsType[*hbone.RequestError](tt.err); ok { // as Refused has it
				tt.err = reject(400, "%s", bad.Reason)
			}
			if flag, reason := ClassifyError(tt.err); flag != tt.flag || reason != tt.reason {
				t.Errorf("counts as %v, %s; want %v, %s", flag, reason, tt.flag, tt.reason)
			}
		})
	}
}

// What is known of the source, and the service that the peer may have meant.
func TestInboundFacts(t *testing.T) {
	const claim = "k8s.cluster.name=far,k8s.namespace.name=there,k8s.deployment.name=caller-v2,service.name=caller,service.version=v2"
	const claimed = `src.workload="caller" src.namespace="there" src.identity="spiffe://cluster.local/ns/default/sa/somebody" src.cluster="far" dst.addr`
	const known = `src.workload="somebody" src.namespace="default" src.identity="spiffe://cluster.local/ns/default/sa/somebody" src.cluster="Kubernetes" dst.addr`
	const nothing = `src.addr=10.244.9.9:41000 src.identity="spiffe://cluster.local/ns/default/sa/somebody" dst.addr`
	record := func(m *mesh) { m.more.Workloads = append(m.more.Workloads, pod0("somebody", "10.244.9.9")) }
	two := func(m *mesh) { // two services that lead to the pod's port 8080
		other := *m.web
		other.Hostname = "another.default.svc.cluster.local"
		m.more.Services = append(m.more.Services, &other)
		m.client.Services[webKey], m.client.Services[other.Key()] = nil, nil
	}
	tests := []struct {
		name    string
		change  func(*mesh)
		headers hbone.Headers
		without bool // baggage
		line    string
		answer  string // baggage of the answer
	}{
		{"a record, and a claim", record, hbone.Headers{Baggage: claim}, false, known, "k8s.cluster.name=Kubernetes,k8s.namespace.name=default"},
		{"no record", nil, hbone.Headers{Baggage: claim}, false, claimed, "k8s.cluster.name=Kubernetes,k8s.namespace.name=default"},
		{"DP-104 through a gateway", record, hbone.Headers{Baggage: claim, ForwardedNetwork: "other", CrossNetwork: true}, false, claimed, "k8s.cluster.name=Kubernetes,k8s.namespace.name=default"},
		{"from our own network", record, hbone.Headers{Baggage: claim, ForwardedNetwork: "HOME", CrossNetwork: true}, false, known, "k8s.cluster.name=Kubernetes,k8s.namespace.name=default"},
		{"DP-107 without baggage", nil, hbone.Headers{Baggage: claim}, true, nothing, ""},
		{"DP-105 the service that the peer names", two, hbone.Headers{Forwarded: `for="1.1.1.1:1";host=web.default.svc.cluster.local`}, false, `src.addr=10.244.9.9:41000 src.identity="spiffe://cluster.local/ns/default/sa/somebody" dst.addr=10.244.0.5:15008 dst.hbone_addr=10.244.0.5:8080 dst.service="web.default.svc.cluster.local"`, "k8s.cluster.name=Kubernetes,k8s.namespace.name=default"},
		{"DP-106 a service without the pod", two, hbone.Headers{Forwarded: "host=wp.default.svc.cluster.local"}, false, `dst.service="another.default.svc.cluster.local"`, "k8s.cluster.name=Kubernetes,k8s.namespace.name=default"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			if tt.change != nil {
				tt.change(m)
			}
			p := newPeer(t, m, somebody)
			p.cfg.NoBaggage = tt.without
			if tt.headers.ForwardedNetwork == "HOME" {
				p.cfg.Network = "home"
				for _, w := range m.state().Workloads {
					w.Network = "home"
				}
				p.store.Replace(m.state())
			}
			s, err := p.open(t, "10.244.0.5:8080", tt.headers)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.Response().Baggage; got != tt.answer {
				t.Errorf("baggage of the answer %q, want %q", got, tt.answer)
			}
			s.Ref().Post(func() { s.Reset() })
			p.Settle()
			if got := p.lines(t); !strings.Contains(got, tt.line) {
				t.Errorf("access log\n%s lacks\n%s", got, tt.line)
			}
		})
	}
}

func TestClaimed(t *testing.T) {
	long := strings.Repeat("x", 257)
	for _, tt := range []struct {
		name, in string
		want     *workload.Workload
	}{
		{"DP-109 nothing", "", nil},
		{"DP-109 empty values", "k8s.namespace.name=,service.name=,x=y", nil},
		{"all", "k8s.cluster.name=c,k8s.namespace.name=n,k8s.job.name=j,service.name=s,service.version=v,cloud.region=r,cloud.availability_zone=z", &workload.Workload{
			ClusterID: "c", Namespace: "n", WorkloadName: "j", CanonicalName: "s", CanonicalRevision: "v", Locality: workload.Locality{Region: "r", Zone: "z"},
		}},
		{"the last one counts", "service.name=a,service.name=b,k8s.pod.name=p,k8s.cronjob.name=c", &workload.Workload{CanonicalName: "b", WorkloadName: "c"}},
		{"taken back", "service.name=a,service.version=1,service.name=", &workload.Workload{CanonicalRevision: "1"}},
		{"spaces and properties", " service.name = a b ;p=1 , service.version=2", &workload.Workload{CanonicalName: "a b", CanonicalRevision: "2"}},
		{"percent-encoding", "service.name=a%2Cb%3D", &workload.Workload{CanonicalName: "a,b="}},
		{"no text", "service.name=a%00b,service.version=%zz,cloud.region=%c3%bc,cloud.availability_zone=b\u00fc", nil},
		{"too long", "service.name=" + long, nil},
		{"as long as it may be", "service.name=" + long[1:], &workload.Workload{CanonicalName: long[1:]}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, claimed(tt.in)); diff != "" {
				t.Errorf("claimed(%q) (-want +got):\n%s", tt.in, diff)
			}
		})
	}
}

func FuzzClaimed(f *testing.F) {
	f.Add("k8s.namespace.name=n,service.name=%41;p")
	f.Fuzz(func(t *testing.T, s string) {
		w := claimed(s)
		if w == nil {
			return
		}
		for _, v := range []string{w.ClusterID, w.Namespace, w.WorkloadName, w.CanonicalName, w.CanonicalRevision, w.Locality.Region, w.Locality.Zone} {
			if len(v) > maxClaim || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("%q of %q", v, s)
			}
		}
	})
}

// Of what a peer says of itself only what its certificate proves counts.
func TestPeersAreWhoTheyProve(t *testing.T) {
	const lie = "k8s.namespace.name=trusted,k8s.deployment.name=boss,service.name=boss"
	trusted := workload.Identity{TrustDomain: "cluster.local", Namespace: "trusted", ServiceAccount: "boss"}
	allow := func(m workload.Match) *workload.Policy {
		p := only("")
		p.Groups = []workload.Group{{{m}}}
		return p
	}
	tests := []struct {
		name   string
		policy *workload.Policy
	}{
		{"FP-101 by principal", only(trusted.Principal())},
		{"FP-101 by namespace", allow(workload.Match{Namespaces: []workload.StringMatch{{Value: "trusted"}}})},
		{"FP-101 by address", allow(workload.Match{SourceIPs: []netip.Prefix{netip.MustParsePrefix("10.66.0.0/16")}})},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			m.more.Workloads = append(m.more.Workloads, pod0("boss", "10.66.0.1"))
			m.more.Policies = []*workload.Policy{tt.policy}
			p := newPeer(t, m, somebody)
			_, err := p.open(t, "10.244.0.5:8080", hbone.Headers{Baggage: lie, Forwarded: `for="10.66.0.1:1234";host=web.default.svc.cluster.local`})
			status, ok := errors.AsType[*hbone.StatusError](err)
			if !ok || status.Code != 401 || len(p.net.dials) != 0 {
				t.Errorf("open: %v, and the application saw %v; want it denied", err, p.net.dials)
			}
			line := p.lines(t)
			if !strings.Contains(line, `src.identity="spiffe://cluster.local/ns/default/sa/somebody"`) || !strings.Contains(line, "src.addr=10.244.9.9:41000") {
				t.Errorf("line %q, want what was proven", line)
			}
		})
	}
}

// Whatever a peer says, a connection has one line, of bounded length.
func TestHeadersOfPeersAreBounded(t *testing.T) {
	t.Run("FP-101", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		random := rand.New(rand.NewPCG(1, 2))
		keys := []string{"k8s.cluster.name", "k8s.namespace.name", "k8s.deployment.name", "service.name", "service.version", "cloud.region", "cloud.availability_zone"}
		junk := func() string {
			b := make([]byte, random.IntN(3000))
			for i := range b {
				if b[i] = byte(0x20 + random.IntN(0x5f)); random.IntN(20) == 0 {
					b[i] = "\",;=%\\\t"[random.IntN(7)]
				}
			}
			return string(b)
		}
		const count = 300
		for i := range count {
			var entries []string
			for _, k := range keys {
				value := junk()
				if random.IntN(2) == 0 {
					value = value[:min(len(value), 250)]
				}
				if random.IntN(4) == 0 {
					value += []string{"%0a", "%1b[2J", "%e2%80%ae", "%00", `"`, "%22 level=%22"}[random.IntN(6)]
				}
				entries = append(entries, k+"="+value)
			}
			h := hbone.Headers{Baggage: strings.Join(entries, ","), Forwarded: "for=" + junk() + ";host=" + junk(), Traceparent: junk(), ForwardedNetwork: junk()}
			authority := "10.244.0.5:8080"
			if i%3 == 0 {
				authority = junk() + ":80"
			}
			if s, err := p.open(t, authority, h); err == nil {
				s.Ref().Post(func() { s.Reset() })
			}
		}
		p.Settle()
		lines := strings.Split(strings.TrimSuffix(p.lines(t), "\n"), "\n")
		if s := p.records.Stats(); s.Opened+s.Failed > count || s.Opened == 0 || s.Failed == 0 || len(lines) != int(s.Opened+s.Failed) {
			t.Errorf("%d lines for %+v of %d requests", len(lines), s, count)
		}
		for _, line := range lines {
			// Seven values of up to 256 bytes, and an authority or a hostname, each escaped.
			if strings.ContainsFunc(line, func(r rune) bool { return r < ' ' && r != '\t' || r > '~' }) || strings.Count(line, "\t") != 4 || len(line) > 6000 {
				t.Errorf("line of %d bytes: %q", len(line), line)
			}
		}
	})
}

// No authority leads elsewhere than to the pod.
func TestOddAuthorities(t *testing.T) {
	t.Run("FP-16", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		for _, authority := range []string{
			"0.0.0.0:80", "255.255.255.255:80", "10.244.255.255:80", "224.0.0.1:80", "127.0.0.1:80", "[::]:80", "[::1]:80", "[ff02::1]:80", "[fe80::1%25eth0]:80",
			"[::ffff:127.0.0.1]:80", "169.254.169.254:80", "240.0.0.1:80", "10.244.0.5:0", "10.244.0.5:65536", "10.244.0.5:-1", "10.244.0.5:", ":80", "localhost:80",
			"0:80", "0x7f000001:80", "127.1:80", "10.244.0.5:15001", "10.244.0.5:15006", "10.244.0.5:15008", "[::ffff:10.244.0.5]:15008", "10.244.0.5:080808", "*:80",
		} {
			_, err := p.open(t, authority, hbone.Headers{})
			status, ok := errors.AsType[*hbone.StatusError](err)
			if !ok || status.Code != 400 && status.Code != 503 {
				t.Errorf("%s: %v, want it refused", authority, err)
			}
		}
		if len(p.net.dials) != 0 {
			t.Errorf("connections were made: %v", p.net.dials)
		}
	})
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
		t.Run("DP-108 "+in[:min(len(in), 20)], func(t *testing.T) {
			if got := forwardedHost(in); got != want {
				t.Errorf("forwardedHost(%q) = %q, want %q", in, got, want)
			}
		})
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
