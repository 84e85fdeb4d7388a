package admin

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

var update = flag.Bool("update", false, "write the expected dump anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2026, 8, 22, 9, 15, 2, 0, time.UTC)

// A fake is everybody whom the Server reads.
type fake struct {
	state, static *workload.Snapshot
	certs         []Certificate
	pods          []Pod
	settings      []Setting
}

func (f *fake) State() *workload.Snapshot   { return f.state }
func (f *fake) Static() *workload.Snapshot  { return f.static }
func (f *fake) Certificates() []Certificate { return f.certs }
func (f *fake) Pods() []Pod                 { return f.pods }
func (f *fake) Settings() []Setting         { return f.settings }

// A lab is a Server that runs, on timers that are fired by hand.
type lab struct {
	*Server
	t         *testing.T
	client    *http.Client
	records   *telemetry.Recorder
	readiness *Readiness
	levels    *telemetry.Levels
	log       *syncBuffer
	shutdowns int
	end       func() error // ends it and waits

	mu     sync.Mutex // guards below
	timers map[time.Duration]chan time.Time
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}
func (b *syncBuffer) String() string { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

func (l *lab) after(d time.Duration) <-chan time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timers[d] == nil {
		l.timers[d] = make(chan time.Time)
	}
	return l.timers[d]
}

// fire lets a timer that somebody waits for expire.
func (l *lab) fire(d time.Duration) {
	l.t.Helper()
	l.after(d)
	l.mu.Lock()
	ch := l.timers[d]
	l.mu.Unlock()
	select {
	case ch <- start:
	case <-time.After(10 * time.Second):
		l.t.Fatalf("nobody waits for %s", d)
	}
}

func newLab(t *testing.T, d Dumper) *lab {
	t.Helper()
	l := &lab{t: t, client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, log: new(syncBuffer), timers: make(map[time.Duration]chan time.Time)}
	now := func() time.Time { return start }
	var filter telemetry.Filter
	if err := filter.Set("info,access=warn"); err != nil {
		t.Fatal(err)
	}
	l.levels = telemetry.NewLevels(filter)
	log := telemetry.NewLogger(l.log, telemetry.Plain, l.levels)
	reg := prometheus.NewRegistry()
	var err error
	if l.records, err = telemetry.NewRecorder(telemetry.Config{Now: now, Log: log, Registerer: reg}); err != nil {
		t.Fatal(err)
	}
	l.readiness = NewReadiness(now, log)
	l.Server, err = New(Config{
		Ports: Ports{AnyPort, AnyPort, AnyPort}, Dumper: d, Records: l.records, Levels: l.levels, Metrics: telemetry.MetricsHandler(reg), Readiness: l.readiness,
		Shutdown: func() { l.shutdowns++ }, Now: now, After: l.after, Log: log,
		Build: Build{Version: "v1.2.3", Revision: "abc123", IstioVersion: "1.30.0", Go: "go1.26.3"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	l.end = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	t.Cleanup(func() {
		if err := l.end(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// An answer is what a client sees.
type answer struct {
	Status      int
	ContentType string
	Body        string
}

func (l *lab) do(method, site, path string, header ...string) answer {
	l.t.Helper()
	return l.doAt(l.Addrs(site)[0], method, path, header...)
}

func (l *lab) doAt(at net.Addr, method, path string, header ...string) answer {
	l.t.Helper()
	_, port, err := net.SplitHostPort(at.String())
	if err != nil {
		l.t.Fatal(err)
	}
	host := "127.0.0.1"
	if a := netip.MustParseAddrPort(at.String()); !a.Addr().IsUnspecified() {
		host = a.Addr().String()
	}
	req, err := http.NewRequestWithContext(l.t.Context(), method, "http://"+net.JoinHostPort(host, port)+path, nil)
	if err != nil {
		l.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := l.client.Do(req)
	if err != nil {
		l.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		l.t.Fatal(err)
	}
	return answer{res.StatusCode, res.Header.Get("Content-Type"), string(body)}
}

func TestAnswers(t *testing.T) {
	l := newLab(t, &fake{})
	const text = "text/plain; charset=utf-8"
	for _, tt := range []struct {
		site, method, path string
		status             int
		body               string // a pattern
	}{
		{"admin", "GET", "/", 200, `<a href="config_dump">/config_dump</a>`},
		{"admin", "GET", "/stats", 404, `^$`},
		{"admin", "GET", "/config_dump/", 404, `^$`},
		{"admin", "POST", "/config_dump", 200, `"workloads": \[\],`},
		{"admin", "GET", "/debug/conns", 200, `^\[\]\n$`},
		{"admin", "GET", "/debug/certs", 200, `^\[\]\n$`},
		{"admin", "GET", "/debug/config", 200, `^\[\]\n$`},
		{"admin", "GET", "/debug/pods", 200, `^null\n$`},
		{"admin", "GET", "/logging", 405, `usage: POST /logging`},
		{"admin", "GET", "/debug/pprof/heap/profiling", 200, `^heap profiling active: true\n$`},
		{"admin", "GET", "/debug/pprof/heap/profiling?activate=false", 200, `^heap profiling active: true\n$`},
		{"admin", "GET", "/debug/pprof/heap/profiling?activate=maybe", 400, `want true or false`},
		{"admin", "GET", "/debug/pprof/profile?seconds=0", 400, `from 1 to 300`},
		{"admin", "GET", "/debug/pprof/profile?seconds=301", 400, `from 1 to 300`},
		{"admin", "GET", "/debug/pprof/profile?frequency=1001", 400, `from 1 to 1000`},
		{"admin", "GET", "/debug/pprof/goroutine?debug=1", 200, `^goroutine profile:`},
		{"metrics", "GET", "/metrics", 200, `ztun_flows_open`},
		{"metrics", "POST", "/stats/prometheus", 200, `ztun_flows_open`},
		{"metrics", "GET", "/", 404, `^$`},
		{"metrics", "GET", "/config_dump", 404, `^$`},
		{"readiness", "GET", "/healthz/ready", 200, `^ready\n$`},
		{"readiness", "POST", "/healthz/ready", 405, `^$`},
		{"readiness", "GET", "/healthz", 404, `^$`},
		{"readiness", "GET", "/quitquitquit", 404, `^$`},
	} {
		got := l.do(tt.method, tt.site, tt.path)
		if got.Status != tt.status || !regexp.MustCompile(tt.body).MatchString(got.Body) {
			t.Errorf("%s %s %s: %d %q, want %d %s", tt.site, tt.method, tt.path, got.Status, got.Body, tt.status, tt.body)
		}
		if tt.site == "readiness" && got.Status == 200 && got.ContentType != text {
			t.Errorf("%s: content type %q", tt.path, got.ContentType)
		}
	}
	t.Run("DP-138", func(t *testing.T) {
		if got := l.do("GET", "admin", "/quitquitquit"); got.Status != 405 || l.shutdowns != 0 {
			t.Errorf("GET: status %d, asked %d times", got.Status, l.shutdowns)
		}
		if got := l.do("POST", "admin", "/quitquitquit"); got.Status != 200 || got.Body != "shutdown now\n" || l.shutdowns != 1 {
			t.Errorf("POST: status %d, %q, asked %d times", got.Status, got.Body, l.shutdowns)
		}
	})
}

func TestAdminIsOnLoopbackOnly(t *testing.T) {
	l := newLab(t, &fake{})
	for _, a := range l.Addrs("admin") {
		if !netip.MustParseAddrPort(a.String()).Addr().IsLoopback() {
			t.Errorf("admin listens on %s", a)
		}
		if got := l.doAt(a, "GET", "/"); got.Status != 200 {
			t.Errorf("%s: status %d", a, got.Status)
		}
	}
	if len(l.Addrs("admin")) == 0 || len(l.Addrs("metrics")) != 1 || l.Addrs("nobody") != nil {
		t.Errorf("addresses: %v, %v", l.Addrs("admin"), l.Addrs("metrics"))
	}
}

// NA-7.2: istioctl's requests, and those that people type.
func TestLogging(t *testing.T) {
	l := newLab(t, &fake{})
	for _, tt := range []struct {
		query  string
		status int
		want   string // the filter
	}{
		{"", 200, "info,access=warn"},
		{"?level=debug", 200, "debug,access=warn"},
		{"?level=access=debug,warn", 200, "warn,access=debug"},
		{"?level=dns:trace", 200, "warn,access=debug,dns=trace"},
		{"?level=nonsense", 400, ""},
		{"?level=info,", 400, ""},
		{"?level=", 200, "warn,access=debug,dns=trace"},
		{"?level=info&reset", 200, "info,access=warn"},
		{"?level=off", 200, "off,access=warn"},
		{"?reset", 200, "info,access=warn"},
		{"?level=debug&for=soon", 400, ""},
		{"?level=debug&for=-1m", 400, ""},
	} {
		got := l.do("POST", "admin", "/logging"+tt.query)
		if got.Status != tt.status {
			t.Errorf("%s: status %d, want %d", tt.query, got.Status, tt.status)
		}
		if want := "current log level is " + tt.want + "\n"; tt.status == 200 && got.Body != want {
			t.Errorf("%s: %q, want %q", tt.query, got.Body, want)
		}
		if tt.status == 400 && !strings.HasPrefix(got.Body, "Invalid ") || tt.status == 400 && !strings.Contains(got.Body, "usage:") {
			t.Errorf("%s: %q, want what is invalid, and the usage", tt.query, got.Body)
		}
	}
	if l.levels.String() != "info,access=warn" {
		t.Errorf("levels %s after errors", l.levels)
	}
}

func TestLogLevelForAWhile(t *testing.T) {
	l := newLab(t, &fake{})
	if got := l.do("POST", "admin", "/logging?level=debug&for=10m"); got.Body != "current log level is debug,access=warn\n" {
		t.Errorf("body %q", got.Body)
	}
	l.fire(10 * time.Minute)
	await(t, "the level is put back", func() bool { return l.levels.String() == "info,access=warn" })
	l.do("POST", "admin", "/logging?level=trace&for=1h") // the end does not wait for it
}

func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for range 1000 {
		if cond() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("not within 5 s: %s", what)
}

func TestReadiness(t *testing.T) {
	l := newLab(t, &fake{})
	pending := []string{"1 of 41 pods pending: shop/job-4411 (netns handle is the host namespace:\nrefused)"}
	var mu sync.Mutex
	state := l.readiness.Add("state manager", nil)
	pods := l.readiness.Add("workload proxy manager", func() []string { mu.Lock(); defer mu.Unlock(); return pending })
	expect := func(status int, body string) {
		t.Helper()
		got := l.do("GET", "readiness", "/healthz/ready")
		if diff := cmp.Diff(answer{status, "text/plain; charset=utf-8", body}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if l.readiness.Ready() != (status == 200) {
			t.Errorf("Ready() = %v", l.readiness.Ready())
		}
	}
	const why = "workload proxy manager: 1 of 41 pods pending: shop/job-4411 (netns handle is the host namespace: refused)\n"
	expect(500, "not ready, pending: state manager, workload proxy manager\n"+why)
	state.Done()
	expect(500, "not ready, pending: workload proxy manager\n"+why)
	l.fire(pendingPeriod)
	await(t, "the reason is logged", func() bool { return strings.Contains(l.log.String(), "pods pending: shop/job-4411") })
	pods.Done() // pods that are still pending do not hold the node back for ever
	pods.Done()
	expect(200, "ready\n"+why)
	mu.Lock()
	pending = nil
	mu.Unlock()
	expect(200, "ready\n")
	state.Undo()
	expect(500, "not ready, pending: state manager\n")
	if got := l.log.String(); strings.Count(got, "marking server ready") != 1 || strings.Count(got, "no longer ready") != 1 {
		t.Errorf("log:\n%s", got)
	}
}

func TestMetrics(t *testing.T) {
	l := newLab(t, &fake{})
	f := telemetry.Facts{Source: &workload.Workload{Name: "web-0", WorkloadName: "web", Namespace: "shop"}}
	l.records.Open(f, nil).Finish(nil)
	got := l.do("GET", "metrics", "/metrics")
	if !strings.HasPrefix(got.ContentType, "text/plain") {
		t.Errorf("content type %q", got.ContentType)
	}
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(strings.NewReader(got.Body))
	if err != nil {
		t.Fatal(err)
	}
	if n := families["istio_tcp_connections_opened_total"].GetMetric()[0].GetCounter().GetValue(); n != 1 {
		t.Errorf("opened %v, want 1", n)
	}
	open := l.do("GET", "metrics", "/stats/prometheus", "Accept", "application/openmetrics-text;version=1.0.0")
	if !strings.HasPrefix(open.ContentType, "application/openmetrics-text") || !strings.HasSuffix(open.Body, "# EOF\n") {
		t.Errorf("OpenMetrics: %q, ends %q", open.ContentType, open.Body[max(0, len(open.Body)-20):])
	}
	zipped := l.do("GET", "metrics", "/metrics", "Accept-Encoding", "gzip")
	z, err := gzip.NewReader(strings.NewReader(zipped.Body))
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(z); err != nil || !strings.Contains(string(text), "istio_tcp_connections_opened_total{") {
		t.Errorf("compressed: %v", err)
	}
}

func TestCPUProfile(t *testing.T) {
	l := newLab(t, &fake{})
	got := l.do("GET", "admin", "/debug/pprof/profile?seconds=1&frequency=100")
	if got.Status != 200 || !strings.HasPrefix(got.Body, "\x1f\x8b") {
		t.Errorf("status %d, %d bytes, want a compressed profile", got.Status, len(got.Body))
	}
}

// A client may close its half after the request, and one that never ends its header is cut off.
func TestConnections(t *testing.T) {
	l := newLab(t, &fake{})
	at := l.Addrs("admin")[0].String()
	half, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	fmt.Fprint(half, "GET /debug/conns HTTP/1.1\r\nHost: x\r\n\r\n")
	if err := half.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(half), nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != "[]\n" {
		t.Errorf("half-closed: %q, %v", body, err)
	}
	slow, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	fmt.Fprint(slow, "GET / HTTP/1.1\r\nHost: x\r\n")
	before := time.Now()
	slow.SetReadDeadline(before.Add(10 * time.Second))
	if _, err := io.ReadAll(slow); err != nil {
		t.Errorf("a header without end: %v", err)
	}
	if d := time.Since(before); d < headerTimeout-500*time.Millisecond {
		t.Errorf("cut off after %s, want %s", d, headerTimeout)
	}
	big, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer big.Close()
	fmt.Fprintf(big, "GET / HTTP/1.1\r\nHost: x\r\nA: %s\r\n\r\n", strings.Repeat("a", 4*headerBytes))
	if res, err := http.ReadResponse(bufio.NewReader(big), nil); err != nil || res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("a large header: %v, %v", res, err)
	}
}

// The end refuses new connections at once and lets a request finish.
func TestEnd(t *testing.T) {
	l := newLab(t, &fake{})
	probe := l.Addrs("readiness")[0].String()
	busy := make(chan answer, 1)
	go func() { busy <- l.do("GET", "admin", "/debug/pprof/trace?seconds=1") }()
	await(t, "the request has begun", func() bool {
		return strings.Contains(l.do("GET", "admin", "/debug/pprof/goroutine?debug=2").Body, "pprof.Trace")
	})
	ended := make(chan error, 1)
	go func() { ended <- l.end() }()
	await(t, "connections are refused", func() bool {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", probe)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	if got := <-busy; got.Status != 200 {
		t.Errorf("the request that ran: status %d", got.Status)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A request that does not end is cut off.
func TestEndDoesNotWaitForEver(t *testing.T) {
	l := newLab(t, &fake{})
	began := make(chan struct{})
	go func() {
		close(began)
		req, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), "GET", "http://"+l.Addrs("admin")[0].String()+"/debug/pprof/profile?seconds=60", nil)
		if err != nil {
			return
		}
		if res, err := l.client.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	<-began
	await(t, "the request has begun", func() bool {
		return strings.Contains(l.do("GET", "admin", "/debug/pprof/goroutine?debug=2").Body, "pprof.Profile")
	})
	ended := make(chan error, 1)
	go func() { ended <- l.end() }()
	l.fire(endTimeout)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestPortsThatAreTaken(t *testing.T) {
	for _, tt := range []struct {
		name string
		addr string
		set  func(p *Ports, port int)
		want string
	}{
		{"admin", "127.0.0.1:0", func(p *Ports, port int) { p.Admin = port }, ", or set proxyAdminPort (--proxy-admin-port) to another"},
		{"metrics", ":0", func(p *Ports, port int) { p.Stats = port }, ", or set statsPort (--stats-port) to another"},
		{"readiness", ":0", func(p *Ports, port int) { p.Ready = port }, "; this port is fixed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", tt.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer taken.Close()
			l := newLab(t, &fake{})
			cfg := l.cfg
			tt.set(&cfg.Ports, taken.Addr().(*net.TCPAddr).Port)
			s, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			err = s.Run(t.Context())
			want := "bind: address already in use; stop the process that holds the port (ss -ltnp names it)" + tt.want
			if err == nil || !strings.HasPrefix(err.Error(), "admin: "+tt.name+": listen tcp ") || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("error = %v, want %q at its end", err, want)
			}
			if got := s.Addrs("admin"); got != nil {
				t.Errorf("still listens on %v", got)
			}
		})
	}
}

func TestConfigIsChecked(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("New without anything succeeds")
	}
}

const mesh = `
workloads:
- uid: Kubernetes//Pod/shop/cart-0
  name: cart-0
  namespace: shop
  serviceAccount: cart
  network: net1
  node: node-a
  protocol: HBONE
  nativeTunnel: true
  workloadIps: ["10.244.1.7"]
  waypoint: {destination: net1/10.96.7.7, hboneMtlsPort: 15008}
  networkGateway: {destination: istio-gateways/eastwest.example.com, hboneMtlsPort: 15008}
  workloadName: cart
  workloadType: deployment
  canonicalName: cart
  canonicalRevision: v2
  applicationTunnel: {protocol: PROXY, port: 15088}
  authorizationPolicies: [shop/allow-cart]
  locality: {region: r1, zone: z1, subzone: ""}
  services: {shop/cart.shop.svc.cluster.local: {80: 8080}}
- {uid: Kubernetes//Pod/shop/web-0, name: web-0, namespace: shop, serviceAccount: web, workloadIps: ["10.244.2.9"], services: {}}
services:
- name: cart
  namespace: shop
  hostname: cart.shop.svc.cluster.local
  vips: ["net1/10.96.0.20"]
  cidrVips: [{network: net1, cidr: 10.50.0.0/24}]
  ports: {80: 8080}
  loadBalancer: {routingPreferences: [Network, Region], mode: Failover, healthPolicy: OnlyHealthy}
  ipFamilies: Dual
  canonical: true
policies:
- name: allow-cart
  namespace: shop
  scope: WorkloadSelector
  action: Allow
  dryRun: false
  rules:
  - - - principals: [!Exact cluster.local/ns/shop/sa/web, !Presence ""]
        namespaces: [!Prefix a, !Suffix b]
        serviceAccounts: [{namespace: shop, serviceAccount: web}]
        notSourceIps: [10.0.0.0/8]
        destinationPorts: [8080]
`

func TestConfigDump(t *testing.T) {
	st, err := workload.ParseStatic("mesh", []byte(mesh))
	if err != nil {
		t.Fatal(err)
	}
	state := workload.NewSnapshot(st)
	cart, web := state.Workload("Kubernetes//Pod/shop/cart-0"), state.Workload("Kubernetes//Pod/shop/web-0")
	cert := newCertificate(t)
	dumper := &fake{
		state: state,
		certs: []Certificate{
			{Identity: web.Identity(), State: "Unavailable: no CA"},
			{Identity: cart.Identity(), State: "Available", Chain: []*x509.Certificate{cert}, Roots: []*x509.Certificate{cert}},
		},
		pods: []Pod{
			{UID: "5d8c-uid", Name: "cart-0", Namespace: "shop", ServiceAccount: "cart", Capture: "tun", CaptureReason: "auto: /dev/net/tun is there"},
			{UID: "9999-uid", Name: "job", Namespace: "shop", ServiceAccount: "job", Pending: "its netns is gone"},
		},
		settings: []Setting{
			{"proxyMode", "PROXY_MODE", "shared", "default"},
			{"enableProxy", "ENABLE_PROXY", "true", "default"},
			{"dnsCapture", "ISTIO_META_DNS_CAPTURE", "TRUE", "environment ISTIO_META_DNS_CAPTURE"},
			{"connectionTerminationDeadline", "CONNECTION_TERMINATION_DEADLINE", "25.5s", "default"},
			{"authToken", "AUTH_TOKEN", "***", "environment AUTH_TOKEN"},
		},
	}
	l := newLab(t, dumper)
	in := l.records.Open(telemetry.Facts{
		Direction: telemetry.Inbound, Protocol: telemetry.HBONE, Src: netip.MustParseAddrPort("10.244.2.9:40112"), Dst: netip.MustParseAddrPort("10.244.1.7:15008"),
		HBONEAddr: "10.244.1.7:8080", Service: "cart.shop.svc.cluster.local", Destination: cart, Source: web, SrcIdentity: web.Identity(),
		AppDst: netip.MustParseAddrPort("10.244.1.7:8080"), ForwardedHost: "cart.shop.svc.cluster.local",
	}, nil)
	defer in.Finish(nil)
	plain := l.records.Open(telemetry.Facts{
		Direction: telemetry.Inbound, Src: netip.MustParseAddrPort("10.244.9.9:40112"), Dst: netip.MustParseAddrPort("10.244.1.7:9090"), AppDst: netip.MustParseAddrPort("10.244.1.7:9090"),
		Service: "cart.shop.svc.cluster.local", Destination: cart,
	}, nil)
	defer plain.Finish(nil)
	in.Received.Add(7)
	out := l.records.Open(telemetry.Facts{
		Src: netip.MustParseAddrPort("10.244.1.7:51000"), OriginalDst: netip.MustParseAddrPort("10.96.0.33:443"), Dst: netip.MustParseAddrPort("10.244.3.2:443"), Source: cart,
	}, nil)
	defer out.Finish(nil)
	dumper.pods[0].Connections = []*telemetry.Conn{plain, in, out}
	in.Established(start.Add(-90 * time.Second))
	in.Active(start.Add(-time.Minute), 512)
	in.Ended(true, false)
	in.SetPolicy("shop/allow")
	in.SetTunnel(netip.MustParseAddrPort("10.244.1.7:15008"))
	in.Took(telemetry.StepPolicy, 20*time.Microsecond)
	in.Took(telemetry.StepConnect, 250*time.Microsecond)
	plain.Established(start)
	plain.Close(errors.New("asked to"))
	plain.CarriedByKernel(true)

	got := l.do("GET", "admin", "/config_dump")
	if got.ContentType != "application/json" {
		t.Errorf("content type %q", got.ContentType)
	}
	// What the certificate is differs from run to run.
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
	body := strings.ReplaceAll(got.Body, base64.StdEncoding.EncodeToString(text), "<pem>")
	golden(t, "testdata/config_dump.json", body)
	if strings.Contains(got.Body, "PRIVATE") {
		t.Error("a key is in the dump")
	}
	for _, path := range []string{"/debug/conns", "/debug/pods", "/debug/certs", "/debug/config"} {
		if a := l.do("GET", "admin", path); !json.Valid([]byte(a.Body)) || len(a.Body) < 10 {
			t.Errorf("%s: %q", path, a.Body)
		}
	}
	golden(t, "testdata/conns.json", l.do("GET", "admin", "/debug/conns").Body)
}

func newCertificate(t *testing.T) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, _ := new(big.Int).SetString("212692774886610945930036647276614034927450199839", 10)
	template := &x509.Certificate{SerialNumber: serial, NotBefore: start, NotAfter: start.Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}
