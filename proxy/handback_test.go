package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// A fakeKernel is the sockets of the pod that are handed back.
type fakeKernel struct {
	b       *bench
	sockets map[[2]netip.AddrPort]stack.Flow
	calls   []string
	fail    error
	late    bool // a connection comes to be just before it is given up

	remembered []string
	generation uint64
}

func (k *fakeKernel) Destroy(local, remote netip.AddrPort) error {
	k.calls = append(k.calls, fmt.Sprintf("destroy %v %v", local, remote))
	f, ok := k.sockets[[2]netip.AddrPort{local, remote}]
	switch {
	case k.fail != nil:
		return k.fail
	case !ok:
		return fmt.Errorf("destroy: %w", os.ErrNotExist)
	}
	delete(k.sockets, [2]netip.AddrPort{local, remote})
	k.b.Ended(f, KernelEnd{Established: true, Received: 3, Sent: 4, Err: syscall.ECONNABORTED})
	return nil
}

func (k *fakeKernel) GiveUp(f stack.Flow, local, remote netip.AddrPort) bool {
	k.calls = append(k.calls, "give up "+f.String())
	if k.late {
		k.connected(f, local)
	}
	_, connected := k.sockets[[2]netip.AddrPort{local, remote}]
	return !connected
}

func (k *fakeKernel) Generation() uint64 { return k.generation }

func (k *fakeKernel) Remember(src netip.Addr, dst netip.AddrPort, generation uint64) error {
	k.remembered = append(k.remembered, fmt.Sprintf("%v from %v of %d", dst, src, generation))
	return nil
}

func (k *fakeKernel) ForgetDestinations() { k.generation++ }

func (k *fakeKernel) Forget(f stack.Flow) { k.calls = append(k.calls, "forget "+f.String()) }

// connected has the kernel have a socket for the flow; local is the pod's end.
func (k *fakeKernel) connected(f stack.Flow, local netip.AddrPort) {
	remote := f.Src
	if local == f.Src {
		remote = f.Dst
	}
	k.sockets[[2]netip.AddrPort{local, remote}] = f
}

func newKernelBench(t *testing.T, m *mesh) (*bench, *fakeKernel) {
	k := &fakeKernel{sockets: make(map[[2]netip.AddrPort]stack.Flow)}
	k.b = newBenchWith(t, m, func(cfg *Config) { cfg.Kernel = k })
	return k.b, k
}

// ask has the proxy decide about a flow, and returns the request and whether it was answered without a set-up.
func (b *bench) ask(t *testing.T, src, dst string) (r *fakeRequest, atOnce bool) {
	t.Helper()
	r = inboundRequest(src, dst)
	r.kernel = true
	b.ServeTCP(t.Context(), r)
	atOnce = r.answer != ""
	b.Settle()
	return r, atOnce
}

const podEnd = "10.244.0.5:40000"

func TestFlowsThatTheKernelCarries(t *testing.T) {
	deny := denies("no", "", workload.ScopePolicyNamespace)
	tests := []struct {
		name     string
		src, dst string
		change   func(*mesh)
		want     string
		atOnce   bool
	}{
		{"outside the mesh", podEnd, "1.2.3.4:80", nil, "handed back", true},
		{"to a service of the mesh", podEnd, "10.96.0.10:80", nil, "accepted", false},
		{"plaintext that policy allows", "10.9.9.9:1000", "10.244.0.5:80", nil, "handed back", true},
		{"plaintext that policy denies", "10.9.9.9:1000", "10.244.0.5:80", func(m *mesh) { m.more.Policies = []*workload.Policy{deny} }, "RST", true},
		{"plaintext to a port of ours", "10.9.9.9:1000", "10.244.0.5:15006", nil, "RST", false},
		{"between others", "10.9.9.9:1000", "10.9.9.8:80", nil, "RST", true},
		{"the endpoint of a service that is not in the mesh", podEnd, "10.96.0.10:80", func(m *mesh) {
			server := *m.server
			server.Protocol = workload.ProtocolTCP
			m.server = &server
		}, "accepted", false}, // another address than the application's
		{"a pod that is not in the mesh", podEnd, "10.244.1.7:80", func(m *mesh) {
			server := *m.server
			server.Protocol = workload.ProtocolTCP
			m.server = &server
		}, "handed back", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			if tt.change != nil {
				tt.change(m)
			}
			b, _ := newKernelBench(t, m)
			r, atOnce := b.ask(t, tt.src, tt.dst)
			if r.answer != tt.want || atOnce != tt.atOnce {
				t.Errorf("answer %q, at once %v; want %q, %v", r.answer, atOnce, tt.want, tt.atOnce)
			}
			if st := b.records.Stats(); (st.Kernel == 1) != (tt.want == "handed back") {
				t.Errorf("%d connections are carried by the kernel", st.Kernel)
			}
			b.conns.Close(errors.New("test"))
			b.LetGo()
			b.Settle()
		})
	}
}

func TestEndOfAConnectionInTheKernel(t *testing.T) {
	tests := []struct {
		name string
		end  KernelEnd
		want string // of the line
	}{
		{"ordinary", KernelEnd{true, 11, 22, nil}, `bytes_sent=11 bytes_recv=22 duration="0ms" carried="kernel" response_flags="-"`},
		{"reset by a side", KernelEnd{true, 11, 22, syscall.ECONNRESET}, `bytes_sent=11 bytes_recv=22 duration="0ms" carried="kernel" response_flags="-"`},
		{"lost", KernelEnd{true, 11, 22, syscall.ETIMEDOUT}, `error="in the kernel: Connection timed out (os error 110)" carried="kernel" response_flags="STREAM_RESET"`},
		{"refused", KernelEnd{false, 0, 0, syscall.ECONNREFUSED}, `error="io error: Connection refused (os error 111)" carried="kernel" response_flags="CONNECT"`},
		{"given up by the application", KernelEnd{}, `error="` + stack.ErrGone.Error() + `" carried="kernel" response_flags="-"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b, k := newKernelBench(t, newMesh())
			r, _ := b.ask(t, podEnd, "1.2.3.4:80")
			b.Ended(r.flow, tt.end)
			b.Ended(r.flow, tt.end) // of nobody
			if got := b.lines(t); strings.Count(got, "\n") != 1 || !strings.Contains(got, tt.want) {
				t.Errorf("access log %q, want one line with %q", got, tt.want)
			}
			if diff := cmp.Diff([]string{"forget " + r.flow.String()}, k.calls); diff != "" {
				t.Errorf("calls mismatch (-want +got):\n%s", diff)
			}
			if st := b.records.Stats(); st.Open != 0 || st.Kernel != 0 {
				t.Errorf("%d open, %d in the kernel, want none", st.Open, st.Kernel)
			}
		})
	}
}

// An application may use a port again before we have heard of the end of the connection before.
func TestEndsOfOneFlowAreInOrder(t *testing.T) {
	b, k := newKernelBench(t, newMesh())
	r, _ := b.ask(t, podEnd, "1.2.3.4:80")
	b.ask(t, podEnd, "1.2.3.4:80")
	b.Ended(r.flow, KernelEnd{Established: true, Received: 1})
	if len(k.calls) > 0 {
		t.Errorf("the flow, which goes on, is forgotten: %v", k.calls)
	}
	b.Ended(r.flow, KernelEnd{Established: true, Received: 2})
	got := b.lines(t)
	if first, second := strings.Index(got, "bytes_sent=1 "), strings.Index(got, "bytes_sent=2 "); first < 0 || second < first {
		t.Errorf("access log %q, want the lines of 1 and then 2 bytes", got)
	}
}

func TestKernelThatDoesNotTakeAFlow(t *testing.T) {
	b, _ := newKernelBench(t, newMesh())
	r := request("1.2.3.4:80")
	r.kernel, r.refuse = true, errors.New("no room")
	b.ServeTCP(t.Context(), r)
	b.Settle()
	if r.answer != "nothing" {
		t.Errorf("answer %q, want the attempt dropped: it may work with its next SYN", r.answer)
	}
	if got := b.lines(t); !strings.Contains(got, `error="no room"`) || strings.Contains(got, "carried") {
		t.Errorf("access log %q, want the error of a connection that was not carried", got)
	}
}

func TestChangeOfPolicyCutsConnectionsInTheKernel(t *testing.T) {
	deny := denies("no", "", workload.ScopePolicyNamespace)
	cut := `destroy 10.244.0.5:80 10.9.9.9:1000`
	setup := func(t *testing.T) (*bench, *fakeKernel, *fakeRequest) {
		b, k := newKernelBench(t, newMesh())
		r, _ := b.ask(t, "10.9.9.9:1000", "10.244.0.5:80")
		b.ask(t, podEnd, "1.2.3.4:80") // which no policy concerns
		return b, k, r
	}
	count := func(k *fakeKernel) int {
		return len(slices.DeleteFunc(slices.Clone(k.calls), func(s string) bool { return s != cut }))
	}
	check := func(t *testing.T, b *bench) {
		t.Helper()
		if st := b.records.Stats(); st.Open != 1 {
			t.Errorf("%d connections are open, want the outbound one", st.Open)
		}
		want := `error="connection closed due to policy change" carried="kernel" response_flags="DENY"`
		if got := b.lines(t); !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
			t.Errorf("access log %q, want one line with %q", got, want)
		}
	}
	t.Run("established", func(t *testing.T) {
		b, k, r := setup(t)
		k.connected(r.flow, r.flow.Dst)
		b.change(func(m *mesh) { m.more.Policies = []*workload.Policy{deny} })
		if n := count(k); n != 1 {
			t.Errorf("destroyed %d times, want once: %v", n, k.calls)
		}
		check(t, b)
	})
	t.Run("before it is", func(t *testing.T) {
		b, k, r := setup(t)
		b.change(func(m *mesh) { m.more.Policies = []*workload.Policy{deny} })
		if st := b.records.Stats(); st.Open != 2 {
			t.Errorf("%d connections are open, want both: its socket comes yet", st.Open)
		}
		k.connected(r.flow, r.flow.Dst)
		b.Advance(firstCut)
		check(t, b)
	})
	t.Run("that never is", func(t *testing.T) {
		b, k, _ := setup(t)
		b.change(func(m *mesh) { m.more.Policies = []*workload.Policy{deny} })
		b.Advance(2 * lastCut)
		check(t, b)
		n := count(k)
		b.Advance(time.Minute)
		if again := count(k); again != n {
			t.Errorf("still looked for after its end")
		}
	})
	t.Run("that is by a SYN cookie, long after", func(t *testing.T) {
		b, k, r := setup(t)
		b.change(func(m *mesh) { m.more.Policies = []*workload.Policy{deny} })
		b.Advance(2 * lastCut)
		check(t, b)
		if !slices.Contains(k.calls, "give up "+r.flow.String()) || !b.MayComeLate() {
			t.Errorf("nobody looks for it; calls: %v", k.calls)
		}
		k.connected(r.flow, r.flow.Dst)
		found := []CarriedFlow{{Flow: r.flow, Inbound: true}}
		b.AdoptUnknown(found)
		b.AdoptUnknown(found)
		b.Settle()
		if len(k.sockets) != 0 {
			t.Error("it stays open")
		}
		b.Advance(lateFor)
		if b.MayComeLate() {
			t.Error("still looked for when the cookie is no good any more")
		}
	})
	t.Run("that is at the last moment", func(t *testing.T) {
		b, k, r := setup(t)
		k.late = true
		b.change(func(m *mesh) { m.more.Policies = []*workload.Policy{deny} })
		b.Advance(2 * lastCut)
		if st := b.records.Stats(); st.Open != 1 || len(k.sockets) != 0 {
			t.Errorf("%d connections are open, %d sockets; want the outbound one, and none: %v", st.Open, len(k.sockets), k.calls)
		}
		if b.MayComeLate() {
			t.Errorf("%v is looked for although it was cut", r.flow)
		}
	})
}

func TestLookAtTheKernelsSockets(t *testing.T) {
	b, _ := newKernelBench(t, newMesh())
	out, _ := b.ask(t, podEnd, "1.2.3.4:80")
	in, _ := b.ask(t, "10.9.9.9:1000", "10.244.0.5:80")
	sockets := []KernelSocket{
		{Local: out.flow.Src, Remote: out.flow.Dst, Established: true, Received: 20, Sent: 11},
		{Local: in.flow.Dst, Remote: in.flow.Src, Established: true, Received: 30, Sent: 40},
		{Local: out.flow.Src, Remote: netip.MustParseAddrPort("5.6.7.8:9"), Received: 1, Sent: 1}, // nobody's
	}
	list := func(f func(KernelSocket)) error {
		for _, s := range sockets {
			f(s)
		}
		return nil
	}
	look := func() {
		if err := b.Look(list); err != nil {
			t.Fatal(err)
		}
	}
	look()
	moved := make(map[string][2]uint64)
	for _, c := range openConns(b) {
		moved[c.Direction.String()] = [2]uint64{c.Received.Load(), c.Sent.Load()}
		if s := c.Status(b.Group().Now()).State; s != telemetry.Open {
			t.Errorf("%v: state %v, want open", c.Direction, s)
		}
	}
	if diff := cmp.Diff(map[string][2]uint64{"outbound": {10, 20}, "inbound": {30, 40}}, moved); diff != "" {
		t.Errorf("received and sent mismatch (-want +got):\n%s", diff)
	}
	sockets = sockets[1:]
	look()
	if n := len(openConns(b)); n != 2 {
		t.Errorf("after one look without its socket %d are open, want 2", n)
	}
	look()
	if list := openConns(b); len(list) != 1 || list[0].Direction.String() != "inbound" {
		t.Errorf("after two looks %d are open, want the inbound one", len(list))
	}
	if got, want := b.lines(t), `bytes_sent=10 bytes_recv=20`; !strings.Contains(got, want) {
		t.Errorf("access log %q, want %q", got, want)
	}
	failed := errors.New("no dump")
	if err := b.Look(func(func(KernelSocket)) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("Look = %v, want %v", err, failed)
	}
	if len(openConns(b)) != 1 {
		t.Error("a look that failed ended a connection")
	}
}

// Nobody has seen the socket of a connection, and two looks do not find it: its client may have a SYN cookie.
func TestConnectionWithoutASocketMayComeLate(t *testing.T) {
	for _, seen := range []bool{false, true} {
		b, _ := newKernelBench(t, newMesh())
		r, _ := b.ask(t, "10.9.9.9:1000", "10.244.0.5:80")
		sockets := []KernelSocket{{Local: r.flow.Dst, Remote: r.flow.Src, Established: true}}
		for i := range 1 + goneAfter {
			if err := b.Look(func(f func(KernelSocket)) error {
				if i == 0 && seen {
					f(sockets[0])
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		if st := b.records.Stats(); st.Open != 0 || b.MayComeLate() == seen {
			t.Errorf("with a socket that was seen: %v: %d open, looked for: %v", seen, st.Open, b.MayComeLate())
		}
	}
}

func TestConnectionsInTheKernelOutliveTheProcess(t *testing.T) {
	b, k := newKernelBench(t, newMesh())
	r, _ := b.ask(t, podEnd, "1.2.3.4:80")
	k.connected(r.flow, r.flow.Src)
	b.conns.Close(DrainError())
	b.Settle()
	if len(openConns(b)) != 1 {
		t.Fatal("the drain has closed it")
	}
	b.LetGo()
	if got, want := b.lines(t), `carried="kernel" response_flags="-"`; !strings.Contains(got, want) || strings.Contains(got, "error") {
		t.Errorf("access log %q, want an ordinary end with %q", got, want)
	}
	if slices.ContainsFunc(k.calls, func(s string) bool { return strings.HasPrefix(s, "destroy") }) {
		t.Errorf("the kernel was told %v", k.calls)
	}
}

func TestConnectionsOfAnEarlierProcess(t *testing.T) {
	m := newMesh()
	b, k := newKernelBench(t, m)
	flows := []CarriedFlow{
		{Flow: request("1.2.3.4:80").flow, Received: 1, Sent: 2},
		{Flow: inboundRequest("10.9.9.9:1000", "10.244.0.5:80").flow, Inbound: true, Received: 3, Sent: 4},
		{Flow: inboundRequest("10.9.9.9:1001", "10.244.0.5:9090").flow, Inbound: true},
	}
	k.connected(flows[2].Flow, flows[2].Flow.Dst)
	b.change(func(m *mesh) {
		m.more.Policies = []*workload.Policy{{
			Name: "no-9090", Namespace: "default", Scope: workload.ScopePolicyNamespace, Action: workload.Deny,
			Groups: []workload.Group{{{{DestinationPorts: []uint16{9090}}}}},
		}}
	})
	if n := b.Adopt(flows, true); n != len(flows) {
		t.Errorf("%d adopted, want %d", n, len(flows))
	}
	b.Settle()
	if got, want := b.lines(t), `error="connection closed due to policy change" carried="kernel" response_flags="DENY" policy="default/no-9090"`; strings.Count(got, "\n") != 1 || !strings.Contains(got, want) {
		t.Errorf("access log %q, want one line with %q", got, want)
	}
	moved := make(map[string][2]uint64)
	for _, c := range openConns(b) {
		moved[c.Direction.String()] = [2]uint64{c.Received.Load(), c.Sent.Load()}
		if s := c.Status(b.Group().Now()).State; s != telemetry.Open {
			t.Errorf("%v: state %v, want open", c.Direction, s)
		}
	}
	if diff := cmp.Diff(map[string][2]uint64{"outbound": {1, 2}, "inbound": {3, 4}}, moved); diff != "" {
		t.Errorf("received and sent mismatch (-want +got):\n%s", diff)
	}
	b.LetGo()
}

// A connection that was there before keeps its path until any policy changes, also one that has nothing to do with it.
func TestAdoptedConnectionsAreDecidedAboutAtTheNextChange(t *testing.T) {
	b, k := newKernelBench(t, newMesh())
	f := inboundRequest("10.9.9.9:1001", "10.244.0.5:9090").flow
	k.connected(f, f.Dst)
	policies := func(ports ...uint16) (list []*workload.Policy) {
		for _, p := range ports {
			list = append(list, &workload.Policy{
				Name: fmt.Sprint("no-", p), Namespace: "default", Scope: workload.ScopePolicyNamespace, Action: workload.Deny,
				Groups: []workload.Group{{{{DestinationPorts: []uint16{p}}}}},
			})
		}
		return list
	}
	all := policies(9090, 1)
	b.change(func(m *mesh) { m.more.Policies = all[:1] })
	b.Adopt([]CarriedFlow{{Flow: f, Inbound: true}}, false)
	b.Settle()
	if n := len(openConns(b)); n != 1 {
		t.Fatalf("%d connections are open, want the one that was adopted", n)
	}
	b.change(func(m *mesh) { m.more.Policies = all })
	if n := len(openConns(b)); n != 0 {
		t.Errorf("%d connections are open after a change, want none", n)
	}
	b.LetGo()
}

// SYNs whose connections never come to be, because their addresses are forged, have a bounded number of records; the oldest go first, and none
// of those that have a socket.
func TestUnansweredConnectionsInTheKernelAreBounded(t *testing.T) {
	const limit = 3
	k := &fakeKernel{sockets: make(map[[2]netip.AddrPort]stack.Flow)}
	k.b = newBenchWith(t, newMesh(), func(cfg *Config) { cfg.Kernel, cfg.MaxUnanswered = k, limit })
	b := k.b
	var flows []stack.Flow
	for i := range 8 {
		r, _ := b.ask(t, fmt.Sprintf("10.9.9.%d:1000", i), "10.244.0.5:80")
		if flows = append(flows, r.flow); i == 0 {
			k.connected(r.flow, r.flow.Dst)
		}
	}
	var given []string
	for _, f := range flows[:5] {
		given = append(given, "give up "+f.String())
	}
	if diff := cmp.Diff(given, k.calls); diff != "" {
		t.Errorf("calls mismatch (-want +got):\n%s", diff)
	}
	open := make(map[netip.AddrPort]bool)
	for _, c := range openConns(b) {
		open[c.Src] = true
	}
	for i, f := range flows {
		if want := i == 0 || i >= 5; open[f.Src] != want {
			t.Errorf("the connection from %v is open: %v, want %v", f.Src, open[f.Src], want)
		}
	}
	if n := b.Evicted(); n != 4 || !b.MayComeLate() {
		t.Errorf("%d were given up, want 4, which are looked for", n)
	}
	if got, want := b.lines(t), `error="`+errUnanswered.Error()+`"`; strings.Count(got, want) != 4 {
		t.Errorf("access log %q, want four lines with %q", got, want)
	}
	b.LetGo()
}

// Where a flow was handed back to is remembered, by the state from before it was decided about. What was refused, or goes elsewhere, is not;
// and while we drain nothing is.
func TestDestinationsThatAreRemembered(t *testing.T) {
	b, k := newKernelBench(t, newMesh())
	k.generation = 7
	b.ask(t, podEnd, "1.2.3.4:80")
	b.ask(t, podEnd, "10.96.0.10:80")              // through the mesh
	b.ask(t, "10.9.9.9:1000", "10.244.0.5:80")     // inbound
	r, _ := b.ask(t, "10.9.9.9:1000", "1.1.1.1:1") // of others
	if diff := cmp.Diff([]string{"1.2.3.4:80 from 10.244.0.5 of 7"}, k.remembered); diff != "" {
		t.Errorf("remembered mismatch (-want +got):\n%s", diff)
	}
	if r.answer != "RST" {
		t.Errorf("a flow of others is answered by %q", r.answer)
	}
	b.Drain()
	if k.generation != 8 {
		t.Errorf("generation %d after a drain has begun, want another one", k.generation)
	}
	if b.ask(t, podEnd, "1.2.3.5:80"); len(k.remembered) != 1 {
		t.Errorf("remembered %v while draining", k.remembered)
	}
	b.conns.Close(errors.New("test"))
	b.LetGo()
	b.Settle()
}

func TestNotRememberedWhenNotHandedBack(t *testing.T) {
	b, k := newKernelBench(t, newMesh())
	r := inboundRequest(podEnd, "1.2.3.4:80")
	r.kernel, r.refuse = true, errors.New("map is full")
	b.ServeTCP(t.Context(), r)
	b.Settle()
	if len(k.remembered) != 0 || r.answer != "nothing" {
		t.Errorf("remembered %v, answer %q; want nothing, nothing", k.remembered, r.answer)
	}
}

// A connection that came to be although it was given up has a record again once two looks have seen it, and policy decides about it.
func TestConnectionsWithoutARecordAreFound(t *testing.T) {
	b, k := newKernelBench(t, newMesh())
	b.change(func(m *mesh) {
		m.more.Policies = []*workload.Policy{{
			Name: "no-9090", Namespace: "default", Scope: workload.ScopePolicyNamespace, Action: workload.Deny,
			Groups: []workload.Group{{{{DestinationPorts: []uint16{9090}}}}},
		}}
	})
	known, _ := b.ask(t, "10.9.9.9:1000", "10.244.0.5:80")
	allowed, denied := inboundRequest("10.9.9.9:1001", "10.244.0.5:80").flow, inboundRequest("10.9.9.9:1002", "10.244.0.5:9090").flow
	k.connected(denied, denied.Dst)
	list := []CarriedFlow{{Flow: known.flow, Inbound: true}, {Flow: allowed, Inbound: true, Received: 3, Sent: 4}, {Flow: denied, Inbound: true}}
	if n := b.AdoptUnknown(list); n != 0 || len(openConns(b)) != 1 {
		t.Errorf("%d found at the first look, %d open; want none yet", n, len(openConns(b)))
	}
	if n := b.AdoptUnknown(list); n != 2 {
		t.Errorf("%d found at the second look, want 2", n)
	}
	b.Settle()
	if n := len(openConns(b)); n != 2 {
		t.Errorf("%d connections are open, want the known one and the one that is allowed", n)
	}
	b.LetGo()
	b.Begun(request("1.2.3.4:80").flow) // on its way here when the pod was let go of
	if n := len(openConns(b)); n != 0 {
		t.Errorf("%d connections are open after the end, want none", n)
	}
}

// A connection that began without us has a record like any other.
func TestConnectionThatNobodyHasSeen(t *testing.T) {
	b, _ := newKernelBench(t, newMesh())
	f := stack.Flow{Proto: stack.TCP, Src: netip.MustParseAddrPort(podEnd), Dst: netip.MustParseAddrPort("1.2.3.4:80")}
	b.Begun(f)
	if st := b.records.Stats(); st.Open != 1 || st.Kernel != 1 {
		t.Fatalf("%d open, %d in the kernel, want one", st.Open, st.Kernel)
	}
	b.Ended(f, KernelEnd{Established: true, Received: 5, Sent: 6})
	seen := b.lines(t)
	r, _ := b.ask(t, podEnd, "1.2.3.4:80")
	b.Ended(r.flow, KernelEnd{Established: true, Received: 5, Sent: 6})
	if both := b.lines(t); both != seen+seen {
		t.Errorf("its line is\n%s, those of it and of one that was decided about are\n%s", seen, both)
	}
}
