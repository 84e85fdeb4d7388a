package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/workload"
)

var testMembers = []member{
	{client, "node-a", []netip.Addr{netip.MustParseAddr("10.77.1.10"), netip.MustParseAddr("fd77::1:a")}, "/proc/1/fd/10"},
	{intruder, "node-a", []netip.Addr{netip.MustParseAddr("10.77.1.11"), netip.MustParseAddr("fd77::1:b")}, "/proc/1/fd/11"},
	{web, "node-b", []netip.Addr{netip.MustParseAddr("10.77.2.10"), netip.MustParseAddr("fd77::2:a")}, "/proc/1/fd/12"},
	{sink, "node-b", []netip.Addr{netip.MustParseAddr("10.77.2.11"), netip.MustParseAddr("fd77::2:b")}, "/proc/1/fd/13"},
}

func TestMeshFileIsAState(t *testing.T) {
	v4only := make([]member, len(testMembers))
	for i, m := range testMembers {
		m.Addrs = m.Addrs[:1]
		v4only[i] = m
	}
	for _, tt := range []struct {
		name    string
		members []member
		addrs   int
	}{{"dual stack", testMembers, 2}, {"IPv4 alone", v4only, 1}} {
		t.Run(tt.name, func(t *testing.T) {
			st, err := workload.ParseStatic("mesh.yaml", meshFile(tt.members))
			if err != nil {
				t.Fatal(err)
			}
			if len(st.Workloads) != 4 || len(st.Services) != 1 || len(st.Policies) != 1 {
				t.Fatalf("%d workloads, %d services, %d policies; want 4, 1, 1", len(st.Workloads), len(st.Services), len(st.Policies))
			}
			for i, w := range st.Workloads {
				m := tt.members[i]
				if w.Name != string(m.Role) || w.Node != m.Node || len(w.Addresses) != tt.addrs || w.Protocol != workload.ProtocolHBONE {
					t.Errorf("workload %d is %+v, want that of %+v", i, w, m)
				}
			}
			if n := len(st.Services[0].VIPs); n != tt.addrs || st.Services[0].Hostname != service {
				t.Errorf("service %s with %d addresses; want %s, %d", st.Services[0].Hostname, n, service, tt.addrs)
			}
			if st.Policies[0].Name != policy {
				t.Errorf("policy %s, want %s", st.Policies[0].Name, policy)
			}
		})
	}
}

func TestNodeFileIsAConfiguration(t *testing.T) {
	path := t.TempDir() + "/node-b.yaml"
	if err := os.WriteFile(path, nodeFile("node-b", "/tmp/x", testMembers), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(config.Sources{File: path})
	if err != nil {
		t.Fatal(err)
	}
	want := []config.Pod{
		{Netns: "/proc/1/fd/12", UID: "demo-web", Name: "web", Namespace: "shop", ServiceAccount: "web"},
		{Netns: "/proc/1/fd/13", UID: "demo-sink", Name: "sink", Namespace: "shop", ServiceAccount: "sink"},
	}
	if diff := cmp.Diff(want, cfg.Pods); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
	if cfg.NodeName != "node-b" || cfg.Capture != config.CaptureTUN || !cfg.FakeCA || cfg.FakeCARoot != "/tmp/x/root.pem" || cfg.LocalXDSPath != "/tmp/x/mesh.yaml" || cfg.HandoverSocket != "/tmp/x/node-b/ztun.sock" {
		t.Errorf("configuration %+v", cfg)
	}
}

func TestParseRecord(t *testing.T) {
	tests := []struct {
		name, in string
		want     record
	}{
		{
			"a denied connection",
			"2026-08-22T09:15:03.000117Z\terror\taccess\tconnection complete\tsrc.addr=10.244.9.1:33100 dst.workload=\"orders\" " +
				"direction=\"inbound\" bytes_sent=0 duration=\"0ms\" error=\"connection closed: \\\"a b\\\"\\tc=\\\\\"\n",
			record{"src.addr": "10.244.9.1:33100", "dst.workload": "orders", "direction": "inbound", "bytes_sent": "0", "duration": "0ms", "error": "connection closed: \"a b\"\tc=\\"},
		},
		{"IPv6", "t\tinfo\taccess\tm\tsrc.addr=[fd77::1:a]:1", record{"src.addr": "[fd77::1:a]:1"}},
		{"no fields", "t\tinfo\taccess\tm\t", record{}},
		{"another log", "t\tinfo\tproxy\tm\ta=b", nil},
		{"no key", "t\tinfo\taccess\tm\tab", nil},
		{"an open quote", "t\tinfo\taccess\tm\ta=\"b", nil},
		{"something else", "level=INFO msg=ready", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := parseRecord(tt.in)
			if diff := cmp.Diff(tt.want, got); diff != "" || ok != (tt.want != nil) {
				t.Errorf("parseRecord = %v, (-want +got):\n%s", ok, diff)
			}
		})
	}
	r := record{"src.addr": "[fd77::1:a]:7", "direction": "inbound"}
	if a := netip.MustParseAddr("fd77::1:a"); !r.from("inbound", a) || r.from("outbound", a) || r.from("inbound", netip.MustParseAddr("fd77::1:b")) {
		t.Errorf("from mistakes %v", r)
	}
}

func TestLines(t *testing.T) {
	var l lines
	found := make(chan error)
	go func() {
		found <- l.wait(t.Context(), 1, func(line string) bool { return line == "third" })
	}()
	for _, s := range []string{"third\nsec", "ond\n", "thi", "rd\nrest"} {
		if n, err := l.Write([]byte(s)); n != len(s) || err != nil {
			t.Fatalf("Write(%q) = %d, %v", s, n, err)
		}
	}
	if err := <-found; err != nil {
		t.Errorf("wait: %v", err)
	}
	if got := l.last(2); got != "second\nthird\nrest" || l.len() != 3 {
		t.Errorf("last lines %q of %d", got, l.len())
	}
	boom := errors.New("boom")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(boom)
	if err := l.wait(ctx, 0, func(string) bool { return false }); err != boom {
		t.Errorf("wait for what never comes: %v, want %v", err, boom)
	}
}

// goodReport is one of which everything holds.
func goodReport() Report {
	return Report{
		RequestURL: serviceURL, RequestOK: true, IPv6: true, RequestOK6: true, Answer: "hello from web",
		ClientAddressSeen: "10.77.1.10", ClientAddressExpected: "10.77.1.10", ClientAddressSeen6: "fd77::1:a", ClientAddressExpected6: "fd77::1:a",
		SourceIdentity: "a", SourceIdentityExpected: "a", DestinationIdentity: "b", DestinationIdentityExpected: "b",
		Denied: true, DeniedClient: "c", ClearBytesWithout: 700, Without: Wire{Packets: 20, ClearBytes: 700, RequestHits: 2, ReplyHits: 2},
		With: Wire{Packets: 60, TunnelBytes: 16000}, SpeedWithout: Speed{40000, 20000}, SpeedWith: Speed{4000, 500},
		PingPongWith: PingPong{P50: 0.2, P99: 2, Streams: 8, Bulk: 3000}, PingPongWithout: PingPong{P50: 0.04, P99: 0.2, Streams: 8, Bulk: 14000},
		Capture: "tun", HTTPClient: "curl", ThroughputClient: "iperf3", CongestionControl: "reno", MTU: 1500, DurationSeconds: 8.25,
	}
}

func TestCaptureOf(t *testing.T) {
	for _, tt := range []struct{ log, want string }{
		{"", ""},
		{"msg=ready pods=2 capture=tun\n", ""},
		{"level=INFO msg=\"pod captured\" pod=shop/a capture=tun device=ztun0\nmsg=\"pod captured\" pod=shop/b capture=tun\n", "tun"},
		{"info\tnode\tpod captured\tpod=\"shop/a\" capture=\"tun\"\ninfo\tnode\tpod captured\tcapture=\"redirect\"\n", "redirect,tun"},
	} {
		if got := captureOf(tt.log); got != tt.want {
			t.Errorf("captureOf(%q) = %q, want %q", tt.log, got, tt.want)
		}
	}
}

func TestReportFails(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Report)
		want   string // part of the only failure; empty: none
	}{
		{"everything holds", func(*Report) {}, ""},
		{"without IPv6", func(r *Report) {
			r.IPv6, r.RequestOK6, r.ClientAddressSeen6 = false, false, ""
			r.Without.RequestHits, r.Without.ReplyHits = 1, 1
		}, ""},
		{"no answer", func(r *Report) { r.RequestOK = false }, "over IPv4 was not answered"},
		{"no answer over IPv6", func(r *Report) { r.RequestOK6 = false }, "over IPv6 was not answered"},
		{"the proxy's address", func(r *Report) { r.ClientAddressSeen6 = "fd77::2:1" }, "saw the client address fd77::2:1 over IPv6, want the pod's own fd77::1:a"},
		{"another backend", func(r *Report) { r.Capture = "redirect" }, `by "redirect", want "tun"`},
		{"no source identity", func(r *Report) { r.SourceIdentity = "" }, `source's identity is "", want "a"`},
		{"another destination", func(r *Report) { r.DestinationIdentity = "x" }, `destination's identity is "x", want "b"`},
		{"not denied", func(r *Report) { r.Denied = false }, "c was not denied"},
		{"readable bytes", func(r *Report) { r.ClearBytesWithZtun = 3 }, "3 bytes and 0 markers could be read"},
		{"a marker", func(r *Report) { r.With.ReplyHits = 1 }, "0 bytes and 1 markers could be read"},
		{"a blind capture", func(r *Report) { r.Without.RequestHits = 0 }, "control run"},
		{"a control run of nothing", func(r *Report) { r.ClearBytesWithout = 0 }, "control run"},
		{"nothing crossed", func(r *Report) { r.With.TunnelBytes = 0 }, "nothing to protect"},
		{"lost packets", func(r *Report) { r.With.Lost = 2 }, "lost 2 packets"},
		{"no round trips", func(r *Report) { r.PingPongWith = PingPong{} }, "round trips beside other connections were not measured"},
		{"no throughput", func(r *Report) { r.SpeedWith.Down = 0 }, "throughput was not measured"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := goodReport()
			tt.change(&r)
			r.finish()
			if r.OK != (tt.want == "") {
				t.Errorf("ok is %v, failures %q", r.OK, r.Failures)
			}
			if tt.want != "" && (len(r.Failures) != 1 || !strings.Contains(r.Failures[0], tt.want)) {
				t.Errorf("failures %q, want one with %q", r.Failures, tt.want)
			}
		})
	}
	r := goodReport()
	if r.finish(); r.ThroughputRatio != 0.1 || r.ThroughputRatioDown != 0.025 {
		t.Errorf("ratios %v and %v, want 0.1 and 0.025", r.ThroughputRatio, r.ThroughputRatioDown)
	}
}

func TestText(t *testing.T) {
	r := goodReport()
	r.With.ReplyHits, r.SpeedWith.Down = 1, 0
	r.finish()
	var b bytes.Buffer
	p := printer{w: &b}
	p.wire(&r)
	p.throughput(&r)
	p.pingPong(&r)
	p.closing(&r)
	want := `
bytes that could be read on the wire between the nodes
  (TCP payload outside port 15008, and packets with a random marker sent both ways, over IPv4 and IPv6)
                             readable    markers  encrypted on port 15008
  ok     without ztun           700 B          4                      0 B
  FAILED with ztun                0 B          1                  16000 B

throughput of one connection from client to sink
  (iperf3, TCP reno, MTU 1500; both nodes share the processors of this machine)
                                   up           down
         without ztun    40.00 Gbit/s   20.00 Gbit/s
         with ztun        4.00 Gbit/s              -

a round trip of 64 bytes beside 8 connections of the same pod at full speed
  (one busy connection must not delay a quiet one)
                               median    99 % within     the others meanwhile
         without ztun         0.04 ms        0.20 ms             14.00 Gbit/s
         with ztun            0.20 ms        2.00 ms              3.00 Gbit/s

Not everything holds, after 8.2 s:
  - 0 bytes and 1 markers could be read on the wire with ztun
  - throughput was not measured
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
}

// The programs of the pods, with each other on this machine's loopback.
func TestServerAndClient(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	httpAddr, sinkAddr := freeAddr(t), freeAddr(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := serve(ctx, "web", "marker", httpAddr, sinkAddr); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	defer wg.Wait()
	defer cancel()
	awaitListener(t, httpAddr)
	awaitListener(t, sinkAddr)

	var body strings.Builder
	if err := get(ctx, "tcp4", "http://"+httpAddr+"/?x", &body); err != nil {
		t.Fatal(err)
	}
	got, err := readGreeting(body.String())
	if want := (greeting{"hello from web", "127.0.0.1", "marker"}); err != nil || got != want {
		t.Errorf("greeting %+v, %v; want %+v", got, err, want)
	}
	for _, down := range []bool{false, true} {
		bits, err := load("tcp4", sinkAddr, down, 20*time.Millisecond)
		if err != nil || bits <= 0 {
			t.Errorf("load down=%v: %v bits/s, %v", down, bits, err)
		}
	}
	if bits, err := loads("tcp4", sinkAddr, false, 3, 20*time.Millisecond); err != nil || bits <= 0 {
		t.Errorf("loads: %v bits/s, %v", bits, err)
	}
	if p50, p99, err := pingPong("tcp4", sinkAddr, 20*time.Millisecond); err != nil || p50 <= 0 || p99 < p50 {
		t.Errorf("round trips: %v, %v, %v", p50, p99, err)
	}
	if err := get(ctx, "tcp6", "http://"+httpAddr+"/", &body); err == nil {
		t.Error("an IPv4 address was reached over IPv6")
	}
	if _, err := readGreeting("<html>"); err == nil {
		t.Error("any answer is a greeting")
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func awaitListener(t *testing.T, addr string) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for {
		c, err := net.Dial("tcp4", addr)
		if err == nil {
			c.Close()
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestMainsRefuseWrongArguments(t *testing.T) {
	for name, code := range map[string]int{
		"server, unknown flag": ServerMain([]string{"-nonsense"}),
		"client, unknown flag": ClientMain([]string{"-nonsense"}),
		"client, no verb":      ClientMain(nil),
	} {
		if code != 2 {
			t.Errorf("%s: exit code %d, want 2", name, code)
		}
	}
	if code := ServerMain([]string{"-listen", "127.0.0.1:99999"}); code != 1 {
		t.Errorf("server on no port: exit code %d, want 1", code)
	}
	if code := ClientMain([]string{"-max-time", "1s", "get", fmt.Sprint("http://", freeAddr(t), "/")}); code != 1 {
		t.Errorf("client of nobody: exit code %d, want 1", code)
	}
}
