package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

// denies is a policy of a name that denies one principal, or, with "", everybody.
func denies(name, principal string, scope workload.PolicyScope) *workload.Policy {
	p := &workload.Policy{Name: name, Namespace: "default", Scope: scope, Action: workload.Deny, Groups: []workload.Group{{}}}
	if principal != "" {
		p.Groups = []workload.Group{{{{Principals: []workload.StringMatch{{Value: principal}}}}}}
	}
	return p
}

// change makes the bench's mesh, after f, the current state. Workloads are copied: those of a snapshot do not change.
func (b *bench) change(f func(*mesh)) {
	client := *b.mesh.client
	b.mesh.client = &client
	f(b.mesh)
	b.store.Replace(b.mesh.state())
	b.Settle()
}

// An openStream is an established stream to the bench's pod and the application's end of it.
type openStream struct {
	hbone.Stream
	app loop.Conn
}

func (p *peer) mustOpen(t *testing.T) *openStream {
	t.Helper()
	s, err := p.open(t, "10.244.0.5:8080", hbone.Headers{})
	if err != nil {
		t.Fatal(err)
	}
	return &openStream{s, p.net.far[len(p.net.far)-1]}
}

// works reports whether bytes still pass in both directions.
func (s *openStream) works(t *testing.T, b *bench) bool {
	t.Helper()
	b.Settle()
	for _, ends := range [][2]loop.Conn{{s.Stream, s.app}, {s.app, s.Stream}} {
		if n, err := ends[0].TryWrite([]byte("x")); n != 1 || err != nil {
			return false
		}
		b.Settle()
		if text, then := all(ends[1]); text != "x" || then != "" {
			return false
		}
		b.Settle()
	}
	return true
}

func (s *openStream) cut() bool {
	_, client := all(s.Stream)
	_, app := all(s.app)
	return client == loop.ErrReset.Error() && app == loop.ErrReset.Error()
}

func TestChangeOfPolicyClosesWhatItDenies(t *testing.T) {
	const listed = workload.ScopePolicyWorkload
	known := func(m *mesh) { m.more.Policies = []*workload.Policy{denies("d", somebody.Principal(), listed)} }
	tests := []struct {
		name          string
		before, after func(*mesh)
		cut           bool
		policy        string
	}{
		{"DP-117 CP-90 a DENY for all", nil, func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", "", workload.ScopePolicyNamespace)}
		}, true, "default/d"},
		{"a global DENY for the peer", nil, func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", somebody.Principal(), workload.ScopePolicyGlobal)}
		}, true, "default/d"},
		{"an ALLOW for another", nil, func(m *mesh) { m.more.Policies = []*workload.Policy{only("cluster.local/ns/default/sa/other")} }, true, ""},
		{"the ALLOW that admitted it goes", func(m *mesh) {
			other := only("cluster.local/ns/default/sa/other")
			other.Name = "other"
			m.more.Policies = []*workload.Policy{only(somebody.Principal()), other}
		}, func(m *mesh) { m.more.Policies = m.more.Policies[1:] }, true, ""},
		{"DP-120 CP-91 the workload lists a policy that was there", known, func(m *mesh) { m.client.AuthorizationPolicies = []string{"default/d"} }, true, "default/d"},
		{"the workload's namespace changes", func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", "", workload.ScopePolicyNamespace)}
			m.more.Policies[0].Namespace = "shop"
		}, func(m *mesh) { m.client.Namespace, m.client.UID = "shop", "client" }, true, "shop/d"},
		{"FP-20 a DENY for another", nil, func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", "cluster.local/ns/default/sa/other", workload.ScopePolicyGlobal)}
		}, false, ""},
		{"FP-20 a DENY of another namespace", nil, func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", "", workload.ScopePolicyNamespace)}
			m.more.Policies[0].Namespace = "shop"
		}, false, ""},
		{"FP-20 an unrelated service", known, func(m *mesh) { m.web.Ports = workload.PortMap{81: 81} }, false, ""},
		{"FP-20 DP-121 a DENY for trial", nil, func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", "", workload.ScopePolicyGlobal)}
			m.more.Policies[0].DryRun = true
		}, false, ""},
		{"the DENY goes", func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", "cluster.local/ns/default/sa/other", workload.ScopePolicyGlobal)}
		}, func(m *mesh) { m.more.Policies = nil }, false, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			m.client.UID = "client"
			if tt.before != nil {
				tt.before(m)
			}
			p := newPeer(t, m, somebody)
			p.cfg.Client.UID = "client"
			s := p.mustOpen(t)
			p.change(tt.after)
			if cut := s.cut(); cut != tt.cut {
				t.Fatalf("closed: %v, want %v", cut, tt.cut)
			}
			if !tt.cut {
				if !s.works(t, p.bench) {
					t.Error("it was left open, but bytes do not pass")
				}
				s.Ref().Post(func() { s.Reset() })
				p.Settle()
				return
			}
			want := `error="connection closed due to policy change" response_flags="DENY"`
			if tt.policy != "" {
				want += ` policy="` + tt.policy + `"`
			}
			if got := p.lines(t); !strings.Contains(got, want) {
				t.Errorf("access log %q lacks %q", got, want)
			}
			if n := p.conns.leaving.Load(); n != 0 || len(p.conns.pods) != 0 {
				t.Errorf("%d connections leaving, %d pods with open ones; want none", n, len(p.conns.pods))
			}
		})
	}
}

// Streams of one peer to one port have the same addresses and identity: they are told apart all the same.
func TestConnectionsWithEqualFacts(t *testing.T) {
	deny := func(m *mesh) {
		m.more.Policies = []*workload.Policy{denies("d", somebody.Principal(), workload.ScopePolicyGlobal)}
	}
	t.Run("DP-118 both are closed", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		a, b := p.mustOpen(t), p.mustOpen(t)
		p.change(deny)
		if !a.cut() || !b.cut() || len(p.conns.pods) != 0 {
			t.Errorf("closed: %v and %v, %d pods with open connections; want both and none", a.cut(), b.cut(), len(p.conns.pods))
		}
	})
	t.Run("DP-119 the first ends", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		a, b := p.mustOpen(t), p.mustOpen(t)
		a.Ref().Post(func() { a.Reset() })
		p.Settle()
		if list := p.Proxy.conns.lists[telemetry.Inbound]; len(list) != 1 {
			t.Fatalf("%d connections, want the other", len(list))
		}
		if !b.works(t, p.bench) {
			t.Error("the other has gone with it")
		}
		p.change(deny)
		if !b.cut() {
			t.Error("the other is not closed by policy any more")
		}
	})
}

func TestChangeOfPolicyClosesPlaintext(t *testing.T) {
	for _, tt := range []struct {
		name string
		when func(*bench, *fakeRequest) // what happens before the change
		want string                     // the answer
	}{
		{"CP-91 an open connection", func(b *bench, _ *fakeRequest) { b.Settle() }, "accepted"},
		{"a connection that is being set up", func(b *bench, _ *fakeRequest) {
			b.net.never = map[netip.AddrPort]bool{netip.MustParseAddrPort("10.244.0.5:8080"): true}
			b.Settle()
		}, "RST"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			m.more.Policies = []*workload.Policy{strict()}
			b := newBench(t, m)
			req := inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")
			b.ServeTCP(t.Context(), req)
			tt.when(b, req)
			b.change(func(m *mesh) { m.client.AuthorizationPolicies = []string{"istio-system/istio_converted_static_strict"} })
			if req.answer != tt.want {
				t.Errorf("answer %q, want %q", req.answer, tt.want)
			}
			if req.app != nil {
				for _, c := range []loop.Conn{req.app, b.net.far[0]} {
					if _, then := all(c); then != loop.ErrReset.Error() {
						t.Errorf("a side reads %q, want a reset", then)
					}
				}
			}
			if got := b.lines(t); !strings.Contains(got, `error="connection closed due to policy change" response_flags="DENY"`) {
				t.Errorf("access log %q", got)
			}
		})
	}
}

func TestOpenConnectionsWhileAPolicyIsMissing(t *testing.T) {
	missing := func(m *mesh) { m.client.AuthorizationPolicies = []string{"default/d"} }
	arrives := func(principal string) func(*mesh) {
		return func(m *mesh) {
			m.more.Policies = []*workload.Policy{denies("d", principal, workload.ScopePolicyWorkload)}
		}
	}
	t.Run("it arrives and does not deny", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		s := p.mustOpen(t)
		p.change(missing)
		p.Advance(900 * time.Millisecond)
		p.change(arrives("cluster.local/ns/default/sa/other"))
		p.Advance(10 * time.Second)
		if !s.works(t, p.bench) {
			t.Error("the connection was closed")
		}
		s.Ref().Post(func() { s.Reset() })
		p.Settle()
	})
	t.Run("it arrives and denies", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		s := p.mustOpen(t)
		p.change(missing)
		p.Advance(500 * time.Millisecond)
		if s.cut() {
			t.Fatal("closed before the policy was known")
		}
		p.change(arrives(""))
		if !s.cut() {
			t.Error("not closed")
		}
	})
	t.Run("it does not arrive, whatever else changes", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		s := p.mustOpen(t)
		p.change(missing)
		p.Advance(600 * time.Millisecond)
		p.change(func(m *mesh) { m.client.AuthorizationPolicies = []string{"default/d", "default/e"} })
		p.Advance(300 * time.Millisecond)
		if s.cut() {
			t.Fatal("closed before a new connection would have been refused")
		}
		p.Advance(200 * time.Millisecond)
		if !s.cut() {
			t.Fatal("not closed")
		}
		if got := p.lines(t); !strings.Contains(got, `error="connection closed due to policy change" response_flags="DENY" policy="default/d"`) {
			t.Errorf("access log %q", got)
		}
	})
	t.Run("a new connection waits its own time", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		old := p.mustOpen(t)
		p.change(missing)
		p.Advance(900 * time.Millisecond)
		req := inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")
		p.ServeTCP(t.Context(), req)
		p.Advance(500 * time.Millisecond)
		if !old.cut() || req.answer != "" {
			t.Fatalf("closed: %v, the new one is answered by %q; want the old one closed and no answer", old.cut(), req.answer)
		}
		p.change(arrives(somebody.Principal()))
		if req.answer != "accepted" {
			t.Errorf("the new one is answered by %q, want it accepted", req.answer)
		}
		req.app.Reset()
		p.Settle()
	})
	t.Run("missing once more", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		p.change(missing)
		first := inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")
		p.ServeTCP(t.Context(), first)
		p.Advance(2 * time.Second) // denied, and nothing is open any more
		p.change(arrives("cluster.local/ns/default/sa/other"))
		s := p.mustOpen(t)
		p.change(func(m *mesh) { m.more.Policies = nil })
		p.Advance(500 * time.Millisecond)
		if first.answer != "RST" || s.cut() {
			t.Errorf("answer %q, closed: %v; want RST, and the open one to have its second", first.answer, s.cut())
		}
		p.Advance(time.Second)
		if !s.cut() {
			t.Error("not closed")
		}
	})
}

// ZTUN_UNKNOWN_POLICY=allow is ztunnel's way.
func TestMissingPolicyMayBeAllowed(t *testing.T) {
	t.Run("CP-96", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		p.conns.cfg.AllowMissingPolicy = true
		var log syncBuffer
		p.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		old := p.mustOpen(t)
		p.change(func(m *mesh) { m.client.AuthorizationPolicies = []string{"default/d"} })
		req := inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")
		p.ServeTCP(t.Context(), req)
		p.Settle()
		if req.answer != "accepted" {
			t.Errorf("a new connection is answered by %q, want it accepted at once", req.answer)
		}
		p.Advance(time.Minute)
		if !old.works(t, p.bench) {
			t.Error("an open connection was closed")
		}
		if got := log.String(); strings.Count(got, "policy=default/d") != 1 {
			t.Errorf("log %q, want one warning", got)
		}
		p.change(func(m *mesh) { m.more.Policies = []*workload.Policy{denies("d", "", workload.ScopePolicyWorkload)} })
		if !old.cut() {
			t.Error("an open connection stays although the policy has arrived and denies")
		}
		req.app.Reset()
		p.Settle()
	})
}

func TestDecisionsAreLoggedAndCounted(t *testing.T) {
	trial := denies("trial", "", workload.ScopePolicyGlobal)
	trial.DryRun = true
	trialAllow := only("cluster.local/ns/default/sa/other")
	trialAllow.DryRun, trialAllow.Name = true, "only-trial"
	tests := []struct {
		name     string
		policies []*workload.Policy
		answer   string
		log      []string
		counts   map[string]float64 // both times together
	}{
		{"no policy", nil, "accepted", []string{`msg="no allow policies, allow"`}, map[string]float64{"reason=no_allow_policies result=allow": 2}},
		{"DP-121 CP-95 a DENY for trial", []*workload.Policy{trial}, "accepted", []string{`msg="dry-run: deny policy match" src=10.244.9.9:1234 identity="" dst=10.244.0.5:8080 policy=default/trial`, `msg="no allow policies, allow"`}, map[string]float64{
			"reason=no_allow_policies result=allow": 2, "reason=deny_matched result=would_deny": 2,
		}},
		{"an ALLOW for trial", []*workload.Policy{trialAllow}, "accepted", []string{`msg="dry-run: no allow policies match"`, `msg="no allow policies, allow"`}, map[string]float64{
			"reason=no_allow_policies result=allow": 2, "reason=no_allow_matched result=would_deny": 2,
		}},
		{"a DENY", []*workload.Policy{denies("d", "", workload.ScopePolicyGlobal)}, "RST", []string{`dst=10.244.0.5:8080 policy=default/d`}, map[string]float64{"reason=deny_matched result=deny": 2}},
		{"an ALLOW for others", []*workload.Policy{only("cluster.local/ns/default/sa/other")}, "RST", []string{`msg="no allow policies matched"`}, map[string]float64{"reason=no_allow_matched result=deny": 2}},
		{"an ALLOW", []*workload.Policy{{Name: "a", Namespace: "default", Groups: []workload.Group{{}}}}, "accepted", []string{`dst=10.244.0.5:8080 policy=default/a`}, map[string]float64{"reason=allow_matched result=allow": 2}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			m.more.Policies = tt.policies
			b := newBench(t, m)
			for _, info := range []bool{false, true} {
				var log syncBuffer
				b.cfg.Log, b.cfg.LogPolicyAtInfo = slog.New(slog.NewTextHandler(&log, nil)), info
				req := inboundRequest("10.244.9.9:1234", "10.244.0.5:8080")
				b.ServeTCP(t.Context(), req)
				b.Settle()
				if req.answer != tt.answer {
					t.Errorf("answer %q, want %q", req.answer, tt.answer)
				}
				if req.app != nil {
					req.app.Reset()
					b.Settle()
				}
				want := tt.log
				if !info {
					want = nil
				}
				lines := strings.Split(strings.TrimSuffix(log.String(), "\n"), "\n")
				if n := strings.Count(log.String(), "\n"); n != len(want) {
					t.Errorf("log\n%s, want %d lines", log.String(), len(want))
					continue
				}
				for i, w := range want {
					if !strings.Contains(lines[i], w) || !strings.Contains(lines[i], "src=10.244.9.9:1234") {
						t.Errorf("line %q lacks %q", lines[i], w)
					}
				}
			}
			if diff := cmp.Diff(tt.counts, counted(t, b.conns.metrics.decisions)); diff != "" {
				t.Errorf("counted (-want +got):\n%s", diff)
			}
		})
	}
}

func TestClosedByPolicyIsCounted(t *testing.T) {
	m := newPolicyMetrics()
	for i := range maxCutPolicies + 5 {
		m.count(fmt.Sprint("ns/", i))
	}
	m.count("")
	m.count("ns/0")
	got := counted(t, m.closed)
	if len(got) != maxCutPolicies+1 || got["policy=ns/0"] != 2 || got["policy=other"] != 6 {
		t.Errorf("%d policies counted, ns/0 %v times, other %v times; want %d, 2 and 6", len(got), got["policy=ns/0"], got["policy=other"], maxCutPolicies+1)
	}
}

// counted are the counters of a collector, by their labels.
func counted(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	ch := make(chan prometheus.Metric, 2*maxCutPolicies)
	c.Collect(ch)
	close(ch)
	got := make(map[string]float64)
	for m := range ch {
		var d dto.Metric
		if err := m.Write(&d); err != nil {
			t.Fatal(err)
		}
		var key []string
		for _, l := range d.GetLabel() {
			key = append(key, l.GetName()+"="+l.GetValue())
		}
		got[strings.Join(key, " ")] = d.GetCounter().GetValue()
	}
	return got
}

// A workload that has left the state keeps its connections, and the policies about it.
func TestWorkloadThatIsGoneKeepsItsPolicies(t *testing.T) {
	p := newPeer(t, newMesh(), somebody)
	s := p.mustOpen(t)
	without := p.mesh.state()
	without.Workloads = without.Workloads[1:]
	p.store.Replace(without)
	p.Advance(10 * time.Second)
	if !s.works(t, p.bench) {
		t.Fatal("closed because the workload has left the state")
	}
	without = p.mesh.state()
	without.Workloads = without.Workloads[1:]
	without.Policies = []*workload.Policy{denies("d", "", workload.ScopePolicyNamespace)}
	p.store.Replace(without)
	p.Settle()
	if !s.cut() {
		t.Error("a policy of its namespace does not reach it")
	}
}

// A draining server goes on enforcing.
func TestChangeOfPolicyDuringDrain(t *testing.T) {
	t.Run("DP-139", func(t *testing.T) {
		p := newPeer(t, newMesh(), somebody)
		s := p.mustOpen(t)
		p.server.Drain()
		p.Settle()
		if !s.works(t, p.bench) {
			t.Fatal("draining ended the stream")
		}
		p.change(func(m *mesh) { m.more.Policies = []*workload.Policy{denies("d", "", workload.ScopePolicyGlobal)} })
		if !s.cut() {
			t.Error("the stream goes on")
		}
	})
}

// A bare set of connections: what closes one finishes it.
type bare struct {
	all     *Connections
	pod     *podConnections
	store   *workload.Store
	records *telemetry.Recorder
	mesh    *mesh
}

func newBare(t *testing.T, g *loop.Group) *bare {
	t.Helper()
	b := &bare{store: new(workload.Store), mesh: newMesh()}
	b.set(nil)
	var err error
	b.all, err = NewConnections(ConnectionsConfig{Store: b.store, Group: g, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if b.records, err = telemetry.NewRecorder(telemetry.Config{Now: g.Now, Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	b.pod = b.all.of(&workload.Client{UID: b.mesh.client.UID})
	return b
}

func (b *bare) set(p *workload.Policy) {
	st := b.mesh.state()
	if p != nil {
		st.Policies = []*workload.Policy{p}
	}
	b.store.Replace(st)
}

func (b *bare) open() *connection {
	var c *connection
	facts := telemetry.Facts{Direction: telemetry.Inbound, SrcIdentity: somebody, Destination: b.mesh.client, Protocol: telemetry.HBONE}
	c = b.pod.open(b.records, facts, nil)
	c.SetCloser(func(cause error) { c.Finish(cause) })
	return c
}

func TestNoChangeIsMissedThatIsTakenBackSoon(t *testing.T) {
	m := loop.NewManual(epoch)
	defer m.Close()
	b := newBare(t, m.Group())
	deny := denies("d", "", workload.ScopePolicyGlobal)
	b.pod.open(b.records, telemetry.Facts{Direction: telemetry.Outbound}, nil) // so that the pod is looked at
	b.set(deny)
	b.all.look(m.Group().Now())
	b.set(nil)
	c := b.open()
	if v := c.decide(); !v.Allowed {
		t.Fatalf("decided: %v", v)
	}
	b.set(deny) // the same as when it was looked at
	if n := b.all.look(m.Group().Now()); n != 1 {
		t.Errorf("%d connections closed, want the one that was admitted in between", n)
	}
}

// A change that does not concern the workload costs its open connections nothing, however many new ones there are.
func TestUnrelatedChangeIsNoReasonToDecideAgain(t *testing.T) {
	m := loop.NewManual(epoch)
	defer m.Close()
	b := newBare(t, m.Group())
	deny := denies("d", "cluster.local/ns/default/sa/other", workload.ScopePolicyGlobal)
	b.set(deny)
	first := b.open()
	first.decide()
	b.all.look(m.Group().Now())
	b.set(deny)
	second := b.open()
	second.decide()
	if b.pod.ahead {
		t.Error("a connection that was admitted by a newer state with the same policies has all decided about again")
	}
	b.set(nil)
	b.open().decide()
	if !b.pod.ahead {
		t.Error("a connection that was admitted by other policies has nobody decided about again")
	}
	other := *b.mesh.client
	b.mesh.client = &other // another object with the same policies
	b.all.look(m.Group().Now())
	b.set(nil)
	if n := testing.AllocsPerRun(10, func() { b.pod.look(b.store.Snapshot(), m.Group().Now()) }); n > 0 {
		t.Errorf("a look that finds nothing allocates %v times", n)
	}
}

func TestConnectionIsDecidedByWhatRunHasSeen(t *testing.T) {
	m := loop.NewManual(epoch)
	defer m.Close()
	b := newBare(t, m.Group())
	old := b.store.Snapshot()
	c := b.open()
	b.set(denies("d", "", workload.ScopePolicyGlobal))
	b.all.look(m.Group().Now())
	if b.pod.decided(old, b.mesh.client, true) {
		t.Error("a decision by an older state than Run has looked at counts")
	}
	if v := c.decide(); v.Allowed {
		t.Errorf("decided: %v", v)
	}
}

// CP-92: never allowed by the old policies and missed by the look at the new ones.
func TestPolicyAndConnectionAtTheSameTime(t *testing.T) {
	rounds := 10_000
	if testing.Short() {
		rounds = 500
	}
	t.Run("CP-92", func(t *testing.T) {
		g, err := loop.New(loop.Config{Now: time.Now})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { g.Run(ctx) })
		b := newBare(t, g)
		running.Go(func() { b.all.Run(ctx) })
		deny := denies("d", "", workload.ScopePolicyGlobal)
		const opens = 8
		admitted := 0
		for i := range rounds {
			var mu sync.Mutex
			var allowed []*connection
			var at sync.WaitGroup
			for range opens {
				at.Go(func() {
					c := b.open()
					if !c.decide().Allowed {
						c.Finish(nil)
						return
					}
					mu.Lock()
					defer mu.Unlock()
					allowed = append(allowed, c)
				})
			}
			at.Go(func() {
				if i%3 == 0 {
					b.set(deny)
					b.set(nil)
				}
				b.set(deny)
			})
			at.Wait()
			admitted += len(allowed)
			for _, c := range allowed {
				gone := make(chan struct{})
				c.SetCloser(func(error) { close(gone) }) // at once if it was told already
				if c.state.Load() == connGone {
					continue
				}
				select {
				case <-gone:
				case <-time.After(20 * time.Second):
					t.Fatalf("round %d: a connection stays that is denied", i)
				}
				c.Finish(nil)
			}
			b.set(nil)
		}
		if admitted == 0 {
			t.Error("no connection was admitted: the test shows nothing")
		}
		cancel()
		running.Wait()
	})
}
