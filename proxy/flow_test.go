package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

func TestOutboundConnectsFirstAndAnswersThen(t *testing.T) {
	tests := []struct {
		name   string
		target string
		fails  error // of the connection to the next hop
		change func(*mesh)
		want   string // the answer to the SYN
		line   string // part of the access log
	}{
		{"passthrough", "1.2.3.4:80", nil, nil, "accepted", ""},
		{"over HBONE", "10.96.0.10:80", nil, nil, "accepted", ""},
		{"refused upstream", "1.2.3.4:80", syscall.ECONNREFUSED, nil, "RST", `error="io error: Connection refused (os error 111)"`},
		{"unreachable host", "1.2.3.4:80", syscall.EHOSTUNREACH, nil, "unreachable 0", `error="io error: No route to host (os error 113)"`},
		{"unreachable network", "1.2.3.4:80", syscall.ENETUNREACH, nil, "unreachable 1", `error="io error: Network is unreachable (os error 101)"`},
		{"kernel's time limit", "1.2.3.4:80", syscall.ETIMEDOUT, nil, "nothing", `error="io error: Connection timed out (os error 110)"`},
		{"unreachable node", "10.96.0.10:80", &hbone.OpenError{Err: syscall.EHOSTUNREACH}, nil, "unreachable 0", `error="io error: No route to host (os error 113)"`},
		{"DP-71 node without an answer", "10.96.0.10:80", &hbone.OpenError{NextHop: netip.MustParseAddrPort("10.244.1.7:15008"), Err: context.DeadlineExceeded}, nil, "nothing", "error=\"connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed\" response_flags=\"NETWORK_POLICY\""},
		{"DP-72 denied by the peer", "10.96.0.10:80", &hbone.OpenError{Phase: hbone.PhaseResponse, Err: &hbone.StatusError{Code: 401}}, nil, "RST", `error="http status: 401 Unauthorized"`},
		{"DP-70 unknown peer", "10.96.0.10:80", &hbone.OpenError{Err: hbone.ErrUnknownPeer}, nil, "RST", hbone.ErrUnknownPeer.Error()},
		{"no endpoint", "10.96.0.10:80", nil, func(m *mesh) { m.server.Services = nil }, "RST", "connection failed\tsrc.addr=10.244.0.5:40000 dst.addr=10.96.0.10:80 direction=\"outbound\" error=\"no healthy upstream: 10.96.0.10:80\""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			if tt.change != nil {
				tt.change(m)
			}
			b := newBench(t, m)
			b.net.fail = map[netip.AddrPort]error{netip.MustParseAddrPort(tt.target): tt.fails}
			b.tunnel.fail = map[netip.AddrPort]error{netip.MustParseAddrPort("10.244.1.7:15008"): tt.fails}
			req := request(tt.target)
			b.ServeTCP(t.Context(), req)
			b.Settle()
			if req.answer != tt.want {
				t.Errorf("the SYN was answered by %q, want %q", req.answer, tt.want)
			}
			if req.app != nil {
				req.app.Reset()
				b.Settle()
			}
			if got := b.lines(t); !strings.Contains(got, tt.line) || strings.Count(got, "\n") != 1 {
				t.Errorf("access log %q, want one line with %q", got, tt.line)
			}
		})
	}
}

// TestResetWhileNothingMoves: a reset reaches the other side although that takes nothing, and so nothing is read of what came before.
func TestResetWhileNothingMoves(t *testing.T) {
	for _, tt := range []struct{ name, target string }{
		{"DP-127 outside the mesh", "1.2.3.4:80"},
		{"DP-127 through the mesh", "10.96.0.10:80"},
	} {
		for _, first := range []string{"application", "server"} {
			t.Run(tt.name+", by the "+first, func(t *testing.T) {
				b := newBench(t, newMesh())
				req := request(tt.target)
				b.ServeTCP(t.Context(), req)
				b.Settle()
				far := slices.Concat(b.net.far, b.tunnel.far)
				from, to := req.app, far[0]
				if first == "server" {
					from, to = to, from
				}
				for {
					_, err := from.TryWrite(make([]byte, 100_000))
					if errors.Is(err, loop.ErrAgain) {
						break
					} else if err != nil {
						t.Fatal(err)
					}
					b.Settle()
				}
				from.Reset()
				b.Settle()
				if _, err := to.TryWrite([]byte("x")); !errors.Is(err, loop.ErrReset) {
					t.Errorf("the other side is not reset: %v", err)
				}
				if n := len(openConns(b)); n != 0 {
					t.Errorf("%d connections are open", n)
				}
			})
		}
	}
}

func TestSlowUpstreamGetsNoAnswer(t *testing.T) {
	t.Run("FP-15", func(t *testing.T) {
		b := newBench(t, newMesh())
		b.net.never = map[netip.AddrPort]bool{netip.MustParseAddrPort("1.2.3.4:80"): true}
		req := request("1.2.3.4:80")
		b.ServeTCP(t.Context(), req)
		b.Advance(9 * time.Second)
		if req.answer != "" {
			t.Fatalf("answered by %q before the limit", req.answer)
		}
		b.Advance(2 * time.Second)
		b.Settle()
		if req.answer != "nothing" {
			t.Errorf("after the limit: %q, want the attempt dropped without an answer", req.answer)
		}
	})
}

// Flows that would lead the proxy to itself are refused, all of them counted and few of them logged.
func TestSelfCalls(t *testing.T) {
	t.Run("FP-102", func(t *testing.T) {
		b := newBench(t, newMesh())
		call := func(n int) {
			for range n {
				req := inboundRequest("10.244.9.9:1234", "10.244.0.5:15006")
				b.ServeTCP(t.Context(), req)
				b.Settle()
				if req.answer != "RST" {
					t.Errorf("answer %q, want RST", req.answer)
				}
			}
		}
		call(3)
		b.Advance(59 * time.Second)
		call(4)
		b.Advance(time.Second)
		call(2)
		if s := b.records.Stats(); s.Failed != 9 || s.Opened != 0 {
			t.Errorf("%+v, want 9 early failures", s)
		}
		lines := strings.Split(strings.TrimSuffix(b.lines(t), "\n"), "\n")
		if len(lines) != 2 || len(b.net.dials) != 0 {
			t.Fatalf("%d lines and %d connections, want a line each minute:\n%s", len(lines), len(b.net.dials), strings.Join(lines, "\n"))
		}
		const text = `src.addr=10.244.9.9:1234 dst.addr=10.244.0.5:15006 direction="inbound" error="attempted recursive call to ourselves"`
		if !strings.HasSuffix(lines[0], text) || !strings.HasSuffix(lines[1], text+" suppressed=6") {
			t.Errorf("lines\n%s\nwant\n%s\nand the second with suppressed=6", strings.Join(lines, "\n"), text)
		}
	})
}

func TestAnotherEndpointIsTried(t *testing.T) {
	m := newMesh()
	second := pod0("second", "10.244.1.8")
	second.Services[webKey] = nil
	m.more.Workloads = append(m.more.Workloads, second)
	b := newBench(t, m)
	refused := &hbone.OpenError{Phase: hbone.PhaseResponse, Err: &hbone.StatusError{Code: 503}}
	b.tunnel.fail = map[netip.AddrPort]error{}
	req := request("10.96.0.10:80")
	first := Classify(b.store.Snapshot(), &Query{Source: m.client, Target: req.flow.Dst, Rand: 7, Tables: new(Tables)}).NextHop
	b.tunnel.fail[first] = refused
	b.ServeTCP(t.Context(), req)
	b.Settle()
	if req.answer != "accepted" || len(b.tunnel.targets) != 2 {
		t.Errorf("answer %q after %d attempts, want accepted after 2", req.answer, len(b.tunnel.targets))
	}
	req.app.Reset()
	b.Settle()

	// Denied by policy: the same source would be denied elsewhere.
	b.tunnel.targets = nil
	b.tunnel.fail[first] = &hbone.OpenError{Phase: hbone.PhaseResponse, Err: &hbone.StatusError{Code: 401}}
	req = request("10.96.0.10:80")
	b.ServeTCP(t.Context(), req)
	b.Settle()
	if req.answer != "RST" || len(b.tunnel.targets) != 1 {
		t.Errorf("denied: answer %q after %d attempts, want RST after 1", req.answer, len(b.tunnel.targets))
	}

	// Each attempt stands under the endpoint that it was made to.
	var got []string
	for line := range strings.Lines(b.lines(t)) {
		_, dst, _ := strings.Cut(line, "dst.addr=")
		dst, _, _ = strings.Cut(dst, " ")
		got = append(got, fmt.Sprint(dst, " failed: ", strings.Contains(line, "error=")))
	}
	other := "10.244.1.8:15008"
	if first.String() == other {
		other = "10.244.1.7:15008"
	}
	want := []string{first.String() + " failed: true", other + " failed: false", first.String() + " failed: true"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
}

func TestWhatTheTunnelIsAskedFor(t *testing.T) {
	m := newMesh()
	m.client.CanonicalName, m.client.WorkloadName, m.client.CanonicalRevision = "client", "client", "v1"
	m.client.Locality = workload.Locality{Region: "r1", Zone: "z1"}
	t.Run("DP-64 DP-66 of a service", func(t *testing.T) {
		b := newBench(t, m)
		req := request("10.96.0.10:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		got := b.tunnel.targets[0]
		trace := got.Headers.Traceparent
		got.Headers.Traceparent = ""
		want := hbone.Target{
			NextHop: netip.MustParseAddrPort("10.244.1.7:15008"), Authority: "10.244.1.7:8080",
			Accept: []workload.Identity{m.server.Identity()}, PeerUID: m.server.UID,
			Headers: hbone.Headers{
				Baggage:   "k8s.cluster.name=Kubernetes,k8s.namespace.name=default,k8s.deployment.name=client,service.name=client,service.version=v1,cloud.region=r1,cloud.availability_zone=z1",
				Forwarded: `for="10.244.0.5:40000";host=web.default.svc.cluster.local`,
			},
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("target (-want +got):\n%s", diff)
		}
		if len(trace) != 55 || !strings.HasPrefix(trace, "00-") || !strings.HasSuffix(trace, "-00") {
			t.Errorf("traceparent %q", trace)
		}
		req.app.Reset()
		b.Settle()
	})
	t.Run("DP-65 from an IPv6 address, of no service", func(t *testing.T) {
		if h := requestHeaders(m.client, netip.MustParseAddrPort("[::1]:80"), nil, ""); h.Forwarded != `for="[::1]:80"` {
			t.Errorf("forwarded %q", h.Forwarded)
		}
	})
}

// push sends text from one end to the other, through the pipes' buffers.
func (b *bench) push(t *testing.T, from, to loop.Conn, text string) {
	t.Helper()
	got := ""
	for sent := 0; sent < len(text); {
		n, err := from.TryWrite([]byte(text[sent:]))
		if err != nil && err != loop.ErrAgain {
			t.Fatal(err)
		}
		sent += n
		b.Settle()
		part, then := all(to)
		if then != "" {
			t.Fatalf("after %d bytes the other side reads %q", len(got), then)
		}
		got += part
		b.Settle()
	}
	if part, _ := all(to); got+part != text {
		t.Fatalf("%d bytes sent, %d arrived, or others", len(text), len(got+part))
	}
	b.Settle()
}

func TestBytesHalfCloseAndReset(t *testing.T) {
	for _, over := range []string{"1.2.3.4:80", "10.96.0.10:80"} {
		open := func(t *testing.T) (*bench, *fakeRequest, loop.Conn) {
			b := newBench(t, newMesh())
			req := request(over)
			b.ServeTCP(t.Context(), req)
			b.Settle()
			return b, req, append(b.net.far, b.tunnel.far...)[0]
		}
		t.Run("DP-125 half-close of the client first over "+over, func(t *testing.T) {
			b, req, server := open(t)
			b.push(t, req.app, server, strings.Repeat("x", 1<<20))
			b.exchange(t, req.app, "end")
			if text, then := all(server); !strings.HasSuffix(text, "end") || then != "EOF" {
				t.Errorf("server reads %q, then %q; want the end and EOF", text, then)
			}
			b.exchange(t, server, "answer")
			if text, then := all(req.app); text != "answer" || then != "EOF" {
				t.Errorf("client reads %q, then %q; want the answer and EOF", text, then)
			}
			if got := b.lines(t); !strings.Contains(got, fmt.Sprintf("bytes_sent=%d bytes_recv=6", 1<<20+3)) || strings.Contains(got, "error=") {
				t.Errorf("access log %q", got)
			}
		})
		t.Run("DP-126 half-close of the server first over "+over, func(t *testing.T) {
			b, req, server := open(t)
			b.exchange(t, server, "banner")
			if text, then := all(req.app); text != "banner" || then != "EOF" {
				t.Errorf("client reads %q, then %q", text, then)
			}
			b.push(t, req.app, server, strings.Repeat("x", 1<<20))
			b.exchange(t, req.app, "end")
			if text, then := all(server); text != "end" || then != "EOF" {
				t.Errorf("server reads %q, then %q", text, then)
			}
		})
		for _, who := range []string{"client", "server"} {
			t.Run("DP-127 DP-128 reset by the "+who+" over "+over, func(t *testing.T) {
				b, req, server := open(t)
				from, to := req.app, server
				if who == "server" {
					from, to = server, req.app
				}
				from.Reset()
				b.Settle()
				if _, then := all(to); then != loop.ErrReset.Error() {
					t.Errorf("the other side reads %q, want a reset", then)
				}
				if n := b.records.Stats().Open; n != 0 {
					t.Errorf("%d records open, want 0", n)
				}
				if got := b.lines(t); strings.Contains(got, "error=") || !strings.Contains(got, `response_flags="-"`) {
					t.Errorf("access log %q: a reset is an ordinary end", got)
				}
			})
		}
		t.Run("reset after the client's FIN over "+over, func(t *testing.T) {
			b, req, server := open(t)
			b.exchange(t, req.app, "all")
			req.app.Reset()
			b.Settle()
			if text, then := all(server); then != loop.ErrReset.Error() {
				t.Errorf("the server reads %q, then %q; want a reset", text, then)
			}
			if n := b.records.Stats().Open; n != 0 {
				t.Errorf("%d records open, want 0", n)
			}
		})
		t.Run("closed from outside over "+over, func(t *testing.T) {
			b, req, server := open(t)
			for _, c := range openConns(b) {
				c.Close(errors.New("connection closed due to policy change"))
			}
			b.Settle()
			for _, c := range []loop.Conn{req.app, server} {
				if _, then := all(c); then != loop.ErrReset.Error() {
					t.Errorf("a side reads %q, want a reset", then)
				}
			}
			if got := b.lines(t); !strings.Contains(got, "policy change") {
				t.Errorf("access log %q does not say why", got)
			}
		})
	}
}

func TestApplicationThatGaveUpLeavesNothing(t *testing.T) {
	for _, over := range []string{"1.2.3.4:80", "10.96.0.10:80"} {
		b := newBench(t, newMesh())
		req := request(over)
		req.gone = true
		b.ServeTCP(t.Context(), req)
		b.Settle()
		if _, then := all(append(b.net.far, b.tunnel.far...)[0]); then != loop.ErrReset.Error() {
			t.Errorf("%s: upstream reads %q, want a reset", over, then)
		}
		if n := b.records.Stats().Open; n != 0 {
			t.Errorf("%s: %d records open, want 0", over, n)
		}
	}
}

func TestTunnelThatGoesResetsItsFlows(t *testing.T) {
	b := newBench(t, newMesh())
	req := request("10.96.0.10:80")
	b.ServeTCP(t.Context(), req)
	b.Settle()
	b.tunnel.far[0].Reset() // its streams read a reset …
	b.tunnel.close()        // … and the tunnel's task goes
	b.Settle()
	if _, then := all(req.app); then != loop.ErrReset.Error() {
		t.Errorf("the application reads %q, want a reset: a truncated stream is never a clean end", then)
	}
}

func TestLocalWorkloadIsWaitedFor(t *testing.T) {
	t.Run("DP-62", testLocalWorkloadIsWaitedFor)
}

func testLocalWorkloadIsWaitedFor(t *testing.T) {
	m := newMesh()
	b := newBench(t, m)
	state := m.state()
	b.store.Replace(workload.State{})
	req, late := request("1.2.3.4:80"), request("1.2.3.4:81")
	b.ServeTCP(t.Context(), req)
	b.Advance(2 * time.Second)
	b.store.Replace(state)
	b.Settle()
	if req.answer != "accepted" {
		t.Errorf("once the workload is known: %q, want accepted", req.answer)
	}
	req.app.Reset()
	b.store.Replace(workload.State{})
	b.ServeTCP(t.Context(), late)
	b.Advance(6 * time.Second)
	b.Settle()
	if late.answer != "RST" || !strings.Contains(b.lines(t), "failed to fetch information about local workload: client.default (client)") {
		t.Errorf("never known: answer %q", late.answer)
	}
}

// A pod on the same node is reached as one on another is: there is no shorter way past TLS, policy or the records.
func TestSameNode(t *testing.T) {
	t.Run("DP-3", func(t *testing.T) {
		var got []string
		for _, node := range []string{"n1", "n2"} {
			m := newMesh()
			m.client.Node, m.server.Node = "n1", node
			b := newBench(t, m)
			req := request("10.244.1.7:8080")
			b.ServeTCP(t.Context(), req)
			b.Settle()
			if req.answer != "accepted" || len(b.tunnel.targets) != 1 || len(b.net.dials) != 0 {
				t.Fatalf("to a pod on %s: %q, tunnels to %v, other connections %v", node, req.answer, b.tunnel.targets, b.net.dials)
			}
			req.app.Reset()
			b.Settle()
			got = append(got, fmt.Sprintf("%+v\n%s", b.tunnel.targets[0], b.lines(t)))
		}
		if diff := cmp.Diff(got[1], got[0]); diff != "" {
			t.Errorf("what is opened and logged (-on another node +on the same):\n%s", diff)
		}
		for _, want := range []string{"10.244.1.7:15008", "spiffe://cluster.local/ns/default/sa/server", `dst.hbone_addr=10.244.1.7:8080`} {
			if !strings.Contains(got[0], want) {
				t.Errorf("%q lacks %q", got[0], want)
			}
		}
	})
}

func strict() *workload.Policy {
	return &workload.Policy{
		Name: "istio_converted_static_strict", Namespace: "istio-system", Scope: workload.ScopePolicyWorkload, Action: workload.Deny,
		Groups: []workload.Group{{{{NotPrincipals: []workload.StringMatch{{Kind: workload.MatchPresence}}}}}},
	}
}

func TestInboundPlaintext(t *testing.T) {
	tests := []struct {
		name       string
		change     func(*mesh)
		port       string
		want, line string
	}{
		{"DP-112 no policy", func(*mesh) {}, "8080", "accepted", "src.addr=10.244.9.9:1234"},
		{"DP-113 strict", func(m *mesh) {
			m.more.Policies = []*workload.Policy{strict()}
			m.client.AuthorizationPolicies = []string{"istio-system/istio_converted_static_strict"}
		}, "8080", "RST", "connection closed due to policy rejection: explicitly denied by: istio-system/istio_converted_static_strict"},
		{"DP-114 strict but for a port, that port", func(m *mesh) {
			p := strict()
			p.Groups[0] = append(p.Groups[0], workload.Rule{{NotDestinationPorts: []uint16{9090}}})
			m.more.Policies = []*workload.Policy{p}
			m.client.AuthorizationPolicies = []string{p.Key()}
		}, "9090", "accepted", ""},
		{"DP-114 strict but for a port, another", func(m *mesh) {
			p := strict()
			p.Groups[0] = append(p.Groups[0], workload.Rule{{NotDestinationPorts: []uint16{9090}}})
			m.more.Policies = []*workload.Policy{p}
			m.client.AuthorizationPolicies = []string{p.Key()}
		}, "8080", "RST", "explicitly denied by: istio-system/istio_converted_static_strict"},
		{"DP-115 the port for outbound flows", func(*mesh) {}, "15001", "RST", "attempted recursive call to ourselves"},
		{"DP-115 the port for inbound flows", func(*mesh) {}, "15006", "RST", "attempted recursive call to ourselves"},
		{"DP-115 the port for HBONE", func(*mesh) {}, "15008", "RST", "attempted recursive call to ourselves"},
		{"policy that does not come", func(m *mesh) { m.client.AuthorizationPolicies = []string{"default/late"} }, "8080", "RST", "policy not yet received: default/late"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			tt.change(m)
			b := newBench(t, m)
			req := inboundRequest("10.244.9.9:1234", "10.244.0.5:"+tt.port)
			b.ServeTCP(t.Context(), req)
			b.Advance(1500 * time.Millisecond)
			b.Settle()
			if req.answer != tt.want {
				t.Errorf("answer %q, want %q", req.answer, tt.want)
			}
			if tt.want == "accepted" {
				if diff := cmp.Diff([]string{"deliver from 10.244.9.9 to 10.244.0.5:" + tt.port}, b.net.dials); diff != "" {
					t.Errorf("connections (-want +got):\n%s", diff)
				}
				req.app.Reset()
				b.Settle()
			} else if len(b.net.dials) != 0 {
				t.Errorf("the application was contacted: %v", b.net.dials)
			}
			if got := b.lines(t); !strings.Contains(got, tt.line) || !strings.Contains(got, `direction="inbound"`) {
				t.Errorf("access log %q lacks %q", got, tt.line)
			}
		})
	}
}

func TestQuestionsAreAnswered(t *testing.T) {
	b := newBench(t, newMesh())
	udp := &fakeUDP{flow: stack.Flow{Proto: stack.UDP, Src: netip.MustParseAddrPort("10.244.0.5:5353"), Dst: netip.MustParseAddrPort("10.96.0.53:53")}, payload: []byte("one")}
	b.ServeUDP(t.Context(), udp)
	b.Settle()
	if diff := cmp.Diff([]string{"re:one"}, udp.replies); diff != "" {
		t.Errorf("over UDP (-want +got):\n%s", diff)
	}
	req := request("10.96.0.53:53")
	b.ServeTCP(t.Context(), req)
	b.Settle()
	b.exchange(t, req.app, "\x00\x03one\x00\x03two")
	if text, then := all(req.app); text != "\x00\x06re:one\x00\x06re:two" || then != "EOF" {
		t.Errorf("over TCP: %q, then %q", text, then)
	}
	idle := request("10.96.0.53:53")
	b.ServeTCP(t.Context(), idle)
	b.Advance(11 * time.Second)
	b.Settle()
	if _, then := all(idle.app); then != "EOF" {
		t.Errorf("an idle connection reads %q, want it closed", then)
	}
}

func TestFlowsBetweenOthersAreRefused(t *testing.T) {
	b := newBench(t, newMesh())
	req := inboundRequest("10.244.9.9:1234", "10.244.1.7:8080")
	b.ServeTCP(t.Context(), req)
	b.Settle()
	if req.answer != "RST" || len(b.net.dials)+len(b.tunnel.targets) != 0 || b.Strays() != 1 {
		t.Errorf("answer %q, %d connections made, %d counted; want RST, 0, 1", req.answer, len(b.net.dials)+len(b.tunnel.targets), b.Strays())
	}
}

func TestDrainingRefusesNewFlows(t *testing.T) {
	b := newBench(t, newMesh())
	open, slow := request("1.2.3.4:80"), request("1.2.3.5:80")
	b.ServeTCP(t.Context(), open)
	b.ServeTCP(t.Context(), slow)
	b.Drain()
	b.Settle()
	for _, to := range []*fakeRequest{request("1.2.3.4:80"), request("10.96.0.10:80"), request("10.96.0.53:53"), inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")} {
		b.ServeTCP(t.Context(), to)
		b.Settle()
		if to.answer != "RST" {
			t.Errorf("DP-133: a flow to %v is answered by %q, want RST", to.flow.Dst, to.answer)
		}
	}
	udp := &fakeUDP{flow: stack.Flow{Proto: stack.UDP, Src: netip.MustParseAddrPort("10.244.0.5:5353"), Dst: netip.MustParseAddrPort("10.96.0.53:53")}, payload: []byte("one")}
	b.ServeUDP(t.Context(), udp)
	b.Settle()
	if len(udp.replies) != 1 {
		t.Error("a question over UDP is not answered")
	}
	for i, req := range []*fakeRequest{open, slow} { // what had begun goes on
		b.push(t, req.app, b.net.far[i], "more")
		req.app.Reset()
	}
	b.Settle()
}

func TestQuestionsAreLimited(t *testing.T) {
	b := newBench(t, newMesh())
	b.cfg.MaxQuestions = 3
	var conns []*fakeRequest
	for range 5 {
		req := request("10.96.0.53:53")
		b.ServeTCP(t.Context(), req)
		conns = append(conns, req)
	}
	b.Settle()
	for i, want := range []string{"accepted", "accepted", "accepted", "RST", "RST"} {
		if conns[i].answer != want {
			t.Errorf("connection %d is answered by %q, want %q", i, conns[i].answer, want)
		}
	}
	udp := &fakeUDP{flow: stack.Flow{Proto: stack.UDP, Src: netip.MustParseAddrPort("10.244.0.5:5353"), Dst: netip.MustParseAddrPort("10.96.0.53:53")}, payload: []byte("one")}
	b.ServeUDP(t.Context(), udp)
	b.Settle()
	if len(udp.replies) != 0 || b.QuestionsRefused() != 3 {
		t.Errorf("above the limit: %d answers, %d refusals counted; want 0 and 3", len(udp.replies), b.QuestionsRefused())
	}
	conns[0].app.Reset()
	b.Settle()
	b.ServeUDP(t.Context(), udp)
	b.Settle()
	if len(udp.replies) != 1 {
		t.Error("a place that became free is not used")
	}
	b.Advance(11 * time.Second)
}

type fakeUDP struct {
	flow    stack.Flow
	payload []byte
	replies []string
}

func (u *fakeUDP) Flow() stack.Flow     { return u.flow }
func (u *fakeUDP) Payload() []byte      { return u.payload }
func (u *fakeUDP) Reply(p []byte) error { u.replies = append(u.replies, string(p)); return nil }

// The labels of an inbound connection name the service as its state does, whatever its hostname looks like.
func TestServiceOfAnInboundConnection(t *testing.T) {
	t.Run("FP-133", func(t *testing.T) {
		m := newMesh()
		db := &workload.Service{Name: "db-entry", Namespace: "default", Hostname: "db.example.com", Ports: workload.PortMap{80: 8080}}
		m.client.Services[db.Key()] = nil
		m.more.Services = append(m.more.Services, db)
		b := newBench(t, m)
		b.ServeTCP(t.Context(), inboundRequest("10.244.9.9:1234", "10.244.0.5:8080"))
		b.Settle()
		list := openConns(b)
		if len(list) != 1 {
			t.Fatalf("%d connections are open, want 1", len(list))
		}
		got := []string{list[0].Service, list[0].ServiceName, list[0].ServiceNamespace}
		if diff := cmp.Diff([]string{"db.example.com", "db-entry", "default"}, got); diff != "" {
			t.Errorf("service mismatch (-want +got):\n%s", diff)
		}
		list[0].Close(errDrained)
		b.Settle()
	})
}
