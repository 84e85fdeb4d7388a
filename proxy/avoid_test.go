package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/workload"
)

// An avoidBed is a service with endpoints e0, e1 and so on, of which some can be made to fail.
type avoidBed struct {
	*bench
	endpoints []*workload.Workload
}

func newAvoidBed(t *testing.T, n int) *avoidBed {
	t.Helper()
	m := newMesh()
	m.server.Services = nil
	b := &avoidBed{}
	for i := range n {
		w := pod0(fmt.Sprint("e", i), fmt.Sprintf("10.244.3.%d", i))
		w.Services[webKey] = nil
		b.endpoints = append(b.endpoints, w)
	}
	m.more.Workloads = b.endpoints
	b.bench = newBenchWith(t, m, func(c *Config) {
		c.AvoidFailed = true
		at := uint64(0)
		c.Rand = func() uint64 { at++; return mix(at) }
	})
	b.tunnel.fail = make(map[netip.AddrPort]error)
	return b
}

func (b *avoidBed) hop(i int) netip.AddrPort {
	return netip.AddrPortFrom(b.endpoints[i].Addresses[0], hbone.Port)
}

// dials makes many flows to the service and says which endpoints were dialled, as "e0 e2"; all flows must be served unless every endpoint
// fails.
func (b *avoidBed) dials(t *testing.T) string {
	t.Helper()
	b.tunnel.targets = nil
	for range 100 {
		req := request("10.96.0.10:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		if req.answer == "accepted" {
			req.app.Reset()
			b.Settle()
		} else if len(b.tunnel.fail) < len(b.endpoints) {
			t.Fatalf("a flow is answered by %q", req.answer)
		}
	}
	var list []string
	for i, w := range b.endpoints {
		for _, x := range b.tunnel.targets {
			if x.NextHop == b.hop(i) {
				list = append(list, w.Name)
				break
			}
		}
	}
	return strings.Join(list, " ")
}

func TestEndpointsThatFailAreAvoided(t *testing.T) {
	refused := &hbone.OpenError{Err: syscall.ECONNREFUSED}
	t.Run("CP-86 for longer each time", func(t *testing.T) {
		b := newAvoidBed(t, 3)
		b.tunnel.fail[b.hop(0)] = refused
		if got := b.dials(t); got != "e0 e1 e2" { // it is met once
			t.Fatalf("at first %q are dialled", got)
		}
		for _, d := range []time.Duration{5, 10, 20, 40, 60, 60} {
			for _, x := range []struct {
				after time.Duration
				want  string
			}{{d*time.Second - time.Millisecond, "e1 e2"}, {time.Millisecond, "e0 e1 e2"}} {
				b.Advance(x.after)
				if got := b.dials(t); got != x.want {
					t.Errorf("avoided for %ds, %v later: %q are dialled, want %q", d, x.after, got, x.want)
				}
			}
		}
	})
	t.Run("a success ends it", func(t *testing.T) {
		b := newAvoidBed(t, 3)
		b.tunnel.fail[b.hop(0)] = refused
		b.dials(t)
		b.Advance(5 * time.Second)
		delete(b.tunnel.fail, b.hop(0))
		b.dials(t)
		if b.failures.list.Load() != nil {
			t.Error("the failure is remembered")
		}
	})
	t.Run("never more than half", func(t *testing.T) {
		b := newAvoidBed(t, 3)
		b.tunnel.fail[b.hop(0)], b.tunnel.fail[b.hop(1)] = refused, refused
		b.dials(t)
		if got := b.dials(t); got != "e0 e1 e2" {
			t.Errorf("two of three fail: %q are dialled, want all", got)
		}
		b = newAvoidBed(t, 1)
		b.tunnel.fail[b.hop(0)] = refused
		b.dials(t)
		if got := b.dials(t); got != "e0" {
			t.Errorf("the only one fails: %q are dialled, want it", got)
		}
	})
	t.Run("CP-86 strict preferences stay with their group", func(t *testing.T) {
		b := newAvoidBed(t, 3)
		b.mesh.web.LoadBalancer = workload.LoadBalancer{Mode: workload.LBStrict, Preferences: []workload.Scope{workload.ScopeNode}}
		b.endpoints[2].Node = "n2"
		b.store.Replace(b.mesh.state())
		b.tunnel.fail[b.hop(0)] = refused
		b.dials(t)
		if got := b.dials(t); got != "e1" {
			t.Errorf("%q are dialled, want the other of the node", got)
		}
	})
	t.Run("not for what it is not to blame for", func(t *testing.T) {
		for _, err := range []error{
			&hbone.OpenError{Phase: hbone.PhaseHandshake, Err: &hbone.CertificateError{Err: errors.New("no CA")}},
			&hbone.OpenError{Phase: hbone.PhaseResponse, Err: &hbone.InnerError{Err: io.EOF}}, &hbone.OpenError{Err: syscall.EMFILE},
		} {
			b := newAvoidBed(t, 3)
			b.tunnel.fail[b.hop(0)] = err
			b.dials(t)
			if b.failures.list.Load() != nil {
				t.Errorf("it is avoided for %v", err)
			}
		}
	})
	t.Run("not without being asked to", func(t *testing.T) {
		b := newAvoidBed(t, 3)
		b.cfg.AvoidFailed = false
		b.tunnel.fail[b.hop(0)] = refused
		b.dials(t)
		if got := b.dials(t); got != "e0 e1 e2" {
			t.Errorf("%q are dialled, want all", got)
		}
	})
}

func TestFailuresAreBounded(t *testing.T) {
	var f failures
	for range 10 * maxFailures {
		f.failed(new(workload.Workload), epoch)
	}
	if n := len(f.avoided(epoch)); n != maxFailures {
		t.Errorf("%d endpoints are avoided, want %d", n, maxFailures)
	}
	late := epoch.Add(avoidFirst + avoidMost + time.Second)
	f.failed(new(workload.Workload), late)
	if n := len(*f.list.Load()); n != 1 {
		t.Errorf("%d failures are remembered, want the new one", n)
	}
}

// A trace tells who is passed over, and only where somebody is.
func TestTraceTellsWhoIsAvoided(t *testing.T) {
	m := newMesh()
	second := pod0("second", "10.244.1.8")
	second.Services[webKey] = nil
	m.more.Workloads = append(m.more.Workloads, second)
	for _, tt := range []struct {
		avoid []*workload.Workload
		want  string
	}{
		{nil, "second: candidate, server: candidate"},
		{[]*workload.Workload{m.server}, "second: candidate, server: failed a moment ago, and is passed over for a while"},
		{[]*workload.Workload{m.server, second}, "second: candidate, server: candidate"},
	} {
		var trace Trace
		Classify(m.snapshot(), &Query{Source: m.client, Target: netip.MustParseAddrPort("10.96.0.10:80"), Avoid: tt.avoid, Trace: &trace})
		var list []string
		for _, e := range trace.Endpoints {
			list = append(list, fmt.Sprintf("%s: %v", e.Workload.Name, e.Why))
		}
		if got := strings.Join(list, ", "); got != tt.want {
			t.Errorf("%d are avoided: %s, want %s", len(tt.avoid), got, tt.want)
		}
	}
}

// What is left is chosen among by capacity, with a table and without.
func TestAvoidingKeepsTheWeights(t *testing.T) {
	endpoints := []*workload.Workload{pod0("a", "10.0.0.1"), pod0("b", "10.0.0.2"), pod0("c", "10.0.0.3")}
	for i, w := range endpoints {
		w.Capacity = []uint32{4, 1, 3}[i]
		w.Services[webKey] = nil
	}
	v := &workload.Service{Namespace: "default", Hostname: webKey.Hostname, Ports: workload.PortMap{80: 8080}}
	s := workload.NewSnapshot(workload.State{Workloads: endpoints, Services: []*workload.Service{v}})
	for name, tables := range map[string]*Tables{"with a table": new(Tables), "without": nil} {
		n := make(map[string]int)
		for i := range uint64(4000) {
			e, _ := pick(s, &Query{Source: endpoints[0], Rand: mix(i), Tables: tables, Avoid: endpoints[:1]}, v, 80, false)
			n[e.workload.Name]++
		}
		if n["a"] != 0 || n["c"] < 2850 || n["c"] > 3150 {
			t.Errorf("%s: %v flows, want none to a and three quarters to c", name, n)
		}
	}
}

// Two set-ups that reach an endpoint at the same time forget its failure once.
func TestFailuresAreForgottenByMany(t *testing.T) {
	var f failures
	w := new(workload.Workload)
	for range 2000 {
		f.failed(w, time.Now())
		start := make(chan struct{})
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				<-start
				f.worked(w)
			})
		}
		close(start)
		all.Wait()
		if list := f.avoided(time.Now()); list != nil {
			t.Fatalf("avoided %v", list)
		}
	}
}
