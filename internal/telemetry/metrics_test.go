package telemetry

import (
	"errors"
	"fmt"
	"maps"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"ztun.dev/ztun/internal/workload"
)

// scrape reads what a client gets, as Prometheus' own parser understands it.
func scrape(t *testing.T, g prometheus.Gatherer) map[string]*dto.MetricFamily {
	t.Helper()
	rec := httptest.NewRecorder()
	MetricsHandler(g).ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(rec.Body)
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// values are the samples of a metric, by their labels other than the common ones of the test.
func values(f *dto.MetricFamily, labels ...string) map[string]float64 {
	got := make(map[string]float64)
	for _, m := range f.GetMetric() {
		var key []string
		for _, l := range m.GetLabel() {
			if slices.Contains(labels, l.GetName()) {
				key = append(key, l.GetName()+"="+l.GetValue())
			}
		}
		v := m.GetCounter().GetValue()
		if m.GetGauge() != nil {
			v = m.GetGauge().GetValue()
		}
		got[strings.Join(key, " ")] += v
	}
	return got
}

// described fills what metrics name of a workload.
func described(w *workload.Workload) {
	w.UID = "Kubernetes//Pod/" + w.Namespace + "/" + w.Name
	w.WorkloadName, w.CanonicalName, w.CanonicalRevision = w.ServiceAccount, w.ServiceAccount+"-svc", "v2"
	w.Locality = workload.Locality{Region: "r1", Zone: "z1"}
}

type denied struct{}

func (denied) Error() string             { return "denied" }
func (denied) Telemetry() (Flag, Reason) { return FlagDeny, ReasonPolicy }

func TestTrafficMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	l := newLab(t, Config{Registerer: reg})
	f := outbound()
	described(f.Source)
	described(f.Destination)
	f.Destination.Services = map[workload.ServiceKey]workload.PortMap{{Namespace: "shop", Hostname: f.Service}: nil}
	c := l.Open(f, nil)
	c.Received.Add(11)
	c.Sent.Add(22)

	families := scrape(t, reg)
	labels := make(map[string]string)
	for _, p := range families["istio_tcp_received_bytes_total"].GetMetric()[0].GetLabel() {
		labels[p.GetName()] = p.GetValue()
	}
	want := map[string]string{
		"reporter":        "source",
		"source_workload": "cart", "source_canonical_service": "cart-svc", "source_canonical_revision": "v2", "source_workload_namespace": "shop",
		"source_principal": "spiffe://cluster.local/ns/shop/sa/cart", "source_app": "cart-svc", "source_version": "v2", "source_cluster": "Kubernetes",
		"destination_service": "orders.shop.svc.cluster.local", "destination_service_namespace": "shop", "destination_service_name": "orders",
		"destination_workload": "orders", "destination_canonical_service": "orders-svc", "destination_canonical_revision": "v2", "destination_workload_namespace": "shop",
		"destination_principal": "spiffe://cluster.local/ns/shop/sa/orders", "destination_app": "orders-svc", "destination_version": "v2", "destination_cluster": "Kubernetes",
		"request_protocol": "tcp", "response_flags": "-", "connection_security_policy": "mutual_tls",
		"source_region": "r1", "source_zone": "z1", "destination_region": "r1", "destination_zone": "z1",
	}
	if diff := cmp.Diff(want, labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	// Bytes count while the connection is open, and once.
	for _, name := range []string{"istio_tcp_received_bytes_total", "istio_tcp_sent_bytes_total", "istio_tcp_connections_opened_total"} {
		t.Logf("%s: %v", name, values(families[name]))
	}
	c.Received.Add(100)
	families = scrape(t, reg)
	if got := values(families["istio_tcp_received_bytes_total"])[""]; got != 111 {
		t.Errorf("received %v, want 111", got)
	}
	if got := families["istio_tcp_connections_closed_total"]; got != nil {
		t.Errorf("closed before anything was: %v", got)
	}
	if diff := cmp.Diff(map[string]float64{"reporter=source": 1, "reporter=destination": 0}, values(families["istio_tcp_sockets_open"], "reporter")); diff != "" {
		t.Errorf("sockets (-want +got):\n%s", diff)
	}
	c.Sent.Add(3)
	c.Finish(nil)

	// The ends that there are.
	l.Open(f, nil).Finish(fmt.Errorf("wrapped: %w", denied{}))
	l.Open(f, nil).Finish(errors.New("no route"))
	plain := Facts{Direction: Inbound, Destination: f.Destination, Src: f.Src, Dst: f.Dst}
	l.Open(plain, nil).Finish(nil)
	l.Fail(plain, denied{})
	families = scrape(t, reg)
	got := make(map[string]map[string]float64)
	for name, keys := range map[string][]string{
		"istio_tcp_connections_opened_total": {"reporter", "connection_security_policy"},
		"istio_tcp_connections_closed_total": {"reporter", "response_flags"},
		"istio_tcp_connections_failed_total": {"reporter", "response_flags"},
		"istio_tcp_received_bytes_total":     {"reporter", "response_flags"},
		"istio_tcp_sent_bytes_total":         {"reporter", "source_workload", "source_principal", "destination_principal"},
		"ztun_early_deny_total":              {"direction", "reason"},
		"ztun_connection_failures_total":     {"direction", "reason"},
		"ztun_flows_open":                    {"direction"},
		"ztun_log_dropped_total":             {"kind"},
	} {
		got[name] = values(families[name], keys...)
	}
	wantAll := map[string]map[string]float64{
		"istio_tcp_connections_opened_total": {"connection_security_policy=mutual_tls reporter=source": 3, "connection_security_policy=unknown reporter=destination": 1},
		"istio_tcp_connections_closed_total": {"reporter=source response_flags=-": 1, "reporter=source response_flags=DENY": 1, "reporter=source response_flags=CONNECT": 1, "reporter=destination response_flags=-": 1},
		"istio_tcp_connections_failed_total": {"reporter=source response_flags=DENY": 1, "reporter=source response_flags=CONNECT": 1},
		"istio_tcp_received_bytes_total":     {"reporter=source response_flags=-": 111, "reporter=destination response_flags=-": 0},
		"istio_tcp_sent_bytes_total": {
			"destination_principal=spiffe://cluster.local/ns/shop/sa/orders reporter=source source_principal=spiffe://cluster.local/ns/shop/sa/cart source_workload=cart": 25,
			"destination_principal=spiffe://cluster.local/ns/shop/sa/orders reporter=destination source_principal=unknown source_workload=unknown":                        0,
		},
		"ztun_early_deny_total":          {"direction=inbound reason=policy": 1},
		"ztun_connection_failures_total": {"direction=inbound reason=policy": 1, "direction=outbound reason=policy": 1, "direction=outbound reason=other": 1},
		"ztun_flows_open":                {"direction=inbound": 0, "direction=outbound": 0},
		"ztun_log_dropped_total":         {"kind=access": 0, "kind=deny": 0},
	}
	if diff := cmp.Diff(wantAll, got); diff != "" {
		t.Errorf("samples (-want +got):\n%s", diff)
	}
}

func TestLabelsCanBeDropped(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	l := newLab(t, Config{Registerer: reg, DropLabels: []string{"source_principal", "destination_zone"}})
	a, b := outbound(), outbound()
	b.SrcIdentity.ServiceAccount = "other" // would be another series
	l.Open(a, nil)
	l.Open(b, nil)
	opened := scrape(t, reg)["istio_tcp_connections_opened_total"].GetMetric()
	if len(opened) != 1 || len(opened[0].GetLabel()) != labelCount-2 || opened[0].GetCounter().GetValue() != 2 {
		t.Errorf("opened = %v, want one series without two labels", opened)
	}
	if n := len(DroppableLabels()); n != labelCount-4 {
		t.Errorf("%d labels can be dropped, want %d", n, labelCount-4)
	}
}

// Whatever comes, the number of series is limited, and those of workloads that are gone end.
func TestSeriesAreBounded(t *testing.T) {
	const maxSeries = 100
	reg := prometheus.NewRegistry()
	var store workload.Store
	live := &workload.Workload{UID: "live", Name: "live", WorkloadName: "live", Namespace: "shop"}
	store.Replace(workload.State{Workloads: []*workload.Workload{live}})
	l := newLab(t, Config{Registerer: reg, Store: &store, MaxSeries: maxSeries})
	var last *Conn
	for i := range maxSeries + 10 {
		name := fmt.Sprint("w", i)
		last = l.Open(Facts{Source: &workload.Workload{UID: name, WorkloadName: name}}, nil)
		if i > 0 {
			last.Finish(nil)
		}
	}
	l.Open(Facts{Source: live}, nil).Finish(nil)
	if n := len(l.metrics.series); n != maxSeries+1 {
		t.Errorf("%d series, want %d and one for all others", n, maxSeries)
	}
	if got := values(scrape(t, reg)["istio_tcp_connections_opened_total"], "source_workload")["source_workload=other"]; got != 11 {
		t.Errorf("%v others, want 11", got)
	}
	l.move(forgetAfter)
	scrape(t, reg)
	l.Open(Facts{Source: live}, nil).Finish(nil)
	l.move(24 * time.Hour)
	got := slices.Sorted(maps.Keys(values(scrape(t, reg)["istio_tcp_connections_opened_total"], "source_workload")))
	if want := []string{"source_workload=live", "source_workload=other", "source_workload=w0"}; !cmp.Equal(want, got) {
		t.Errorf("series %v, want %v: the one that is open and the one that exists", got, want)
	}
}

// Of a peer without a record, of which is known what it has proved or says of itself, nobody tells when it is gone: its series end after an
// hour, or when there is no room for others.
func TestSeriesOfTheUnrecordedEnd(t *testing.T) {
	const maxSeries = 20
	reg := prometheus.NewRegistry()
	var store workload.Store
	here := &workload.Workload{UID: "here", Name: "here", WorkloadName: "here", Namespace: "shop"}
	store.Replace(workload.State{Workloads: []*workload.Workload{here}})
	l := newLab(t, Config{Registerer: reg, Store: &store, MaxSeries: maxSeries})
	claim := func(name string) *workload.Workload { return &workload.Workload{WorkloadName: name} }
	id := workload.Identity{TrustDomain: "far.local", Namespace: "shop", ServiceAccount: "proved"}
	l.Open(Facts{Direction: Inbound, Protocol: HBONE, Destination: here, Claimed: claim("claimed")}, nil).Finish(nil)
	l.Open(Facts{Direction: Inbound, Protocol: HBONE, Destination: here, SrcIdentity: id}, nil).Finish(nil)
	l.Open(Facts{Protocol: DoubleHBONE, Source: here, Destination: claim("beyond"), DstIdentity: id}, nil).Finish(nil)
	l.Open(Facts{Direction: Inbound, Destination: here}, nil).Finish(nil) // in plaintext from anybody
	stays := l.Open(Facts{Direction: Inbound, Protocol: HBONE, Destination: here, Claimed: claim("stays")}, nil)
	series := func() []string {
		return slices.Sorted(maps.Keys(values(scrape(t, reg)["istio_tcp_connections_opened_total"], "source_workload", "source_principal", "destination_workload")))
	}
	const plain = "destination_workload=here source_principal=unknown source_workload="
	all := []string{
		"destination_workload=beyond source_principal=unknown source_workload=here", "destination_workload=here source_principal=spiffe://far.local/ns/shop/sa/proved source_workload=unknown",
		plain + "claimed", plain + "stays", plain + "unknown",
	}
	l.move(forgetUnrecordedAfter - time.Second)
	if diff := cmp.Diff(all, series()); diff != "" {
		t.Errorf("within an hour (-want +got):\n%s", diff)
	}
	l.move(time.Second)
	if diff := cmp.Diff([]string{plain + "stays", plain + "unknown"}, series()); diff != "" {
		t.Errorf("after it (-want +got):\n%s", diff)
	}
	stays.Finish(nil)

	for i := range maxSeries + 5 {
		l.Open(Facts{Direction: Inbound, Protocol: HBONE, Destination: here, Claimed: claim(fmt.Sprint("c", i))}, nil).Finish(nil)
	}
	l.move(forgetAfter)
	l.Open(Facts{Direction: Outbound, Source: here}, nil).Finish(nil)
	want := []string{
		plain + "unknown", "destination_workload=other source_principal=other source_workload=other", "destination_workload=unknown source_principal=unknown source_workload=here",
	}
	if diff := cmp.Diff(want, series()); diff != "" {
		t.Errorf("once there was no room (-want +got):\n%s", diff)
	}
}

// The counts of hostnames end with the workload that asked, or with the endpoint.
func TestCountsOfHostnamesEnd(t *testing.T) {
	reg := prometheus.NewRegistry()
	var store workload.Store
	named := func(name string) *workload.Workload {
		return &workload.Workload{UID: name, WorkloadName: name, Hostname: name + ".example.com"}
	}
	state := workload.State{Workloads: []*workload.Workload{named("cart"), named("job"), named("db"), named("old")}}
	store.Replace(state)
	l := newLab(t, Config{Registerer: reg, Store: &store, MaxSeries: 3})
	l.OnDemandDNS(named("cart"), named("db"))
	l.OnDemandDNS(named("cart"), named("old"))
	l.OnDemandDNS(named("job"), named("db"))
	l.OnDemandDNS(named("job"), named("old"))
	series := func() []string {
		return slices.Sorted(maps.Keys(values(scrape(t, reg)["istio_on_demand_dns_total"], "source_workload", "hostname")))
	}
	state.Workloads = []*workload.Workload{named("cart"), named("db")}
	store.Replace(state)
	l.move(forgetAfter - time.Second)
	if n := len(series()); n != 4 {
		t.Errorf("%d series at first, want 3 and one for all others", n)
	}
	l.move(time.Second)
	if diff := cmp.Diff([]string{"hostname=db.example.com source_workload=cart", "hostname=other source_workload=other"}, series()); diff != "" {
		t.Errorf("series (-want +got):\n%s", diff)
	}
}

func TestProcessMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if err := RegisterProcess(reg, Build{Version: "v1", Revision: "abc", IstioVersion: "1.30.0"}); err != nil {
		t.Fatal(err)
	}
	families := scrape(t, reg)
	for name, want := range map[string]string{"istio_build": "component=ztunnel tag=1.30.0", "ztun_build_info": "revision=abc version=v1"} {
		if diff := cmp.Diff(map[string]float64{want: 1}, values(families[name], "component", "tag", "version", "revision")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for _, name := range []string{"process_open_fds", "process_max_fds", "go_goroutines"} {
		if families[name] == nil {
			t.Errorf("no %s", name)
		}
	}
	if err := RegisterProcess(reg, Build{}); err == nil {
		t.Error("registered twice")
	}
}

func TestReasonsAndFlagsAreClosedSets(t *testing.T) {
	if got := Reason("10.0.0.1").known(); got != ReasonOther {
		t.Errorf("a reason of its own is %s, want other", got)
	}
	if got := Flag(200).String(); got != "CONNECT" {
		t.Errorf("a flag of its own is %s, want CONNECT", got)
	}
	l := newLab(t, Config{Registerer: prometheus.NewRegistry(), Classify: func(error) (Flag, Reason) { return 200, "x" }})
	l.Open(outbound(), nil).Finish(errors.New("x"))
	if n := l.Stats().Closed; n != 1 {
		t.Errorf("%d closed, want 1", n)
	}
}

func BenchmarkOpenFinish(b *testing.B) {
	l, err := NewRecorder(Config{Now: func() time.Time { return start }, Log: discard, Registerer: prometheus.NewRegistry()})
	if err != nil {
		b.Fatal(err)
	}
	f := outbound()
	b.ReportAllocs()
	for b.Loop() {
		l.Open(f, nil).Finish(nil)
	}
}

// What a peer says of its workload stands in for a record, where there is none.
func TestClaimedSource(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	l := newLab(t, Config{Registerer: reg})
	f := outbound()
	f.Direction = Inbound
	f.Claimed = &workload.Workload{ClusterID: "far", Namespace: "there", WorkloadName: "caller-v2", CanonicalName: "caller", CanonicalRevision: "v2", Locality: workload.Locality{Region: "r9"}}
	l.Open(f, nil).Finish(nil) // the record counts
	f.Source = nil
	l.Open(f, nil).Finish(nil)
	got := values(scrape(t, reg)["istio_tcp_connections_opened_total"], "source_workload", "source_canonical_service", "source_app", "source_version", "source_workload_namespace", "source_cluster", "source_principal", "source_region")
	want := map[string]float64{
		"source_app=unknown source_canonical_service=unknown source_cluster=Kubernetes source_principal=spiffe://cluster.local/ns/shop/sa/cart source_region=unknown source_version=unknown source_workload=unknown source_workload_namespace=shop": 1,
		"source_app=caller-v2 source_canonical_service=caller source_cluster=far source_principal=spiffe://cluster.local/ns/shop/sa/cart source_region=r9 source_version=v2 source_workload=caller-v2 source_workload_namespace=there":              1,
	}
	if len(got) != 2 {
		t.Fatalf("sets of labels: %v", got)
	}
	for k, n := range want {
		if diff := cmp.Diff(n, got[k]); diff != "" {
			t.Errorf("%s: (-want +got)\n%s; all: %v", k, diff, got)
		}
	}
	if line := l.written(t); !strings.Contains(line, `src.workload="caller" src.namespace="there"`) {
		t.Errorf("line %q", line)
	}
}

// Beyond a gateway the destination is what the peer says of itself, and who it is only what it proved.
func TestDestinationBeyondAGateway(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	l := newLab(t, Config{Registerer: reg})
	f := outbound()
	f.Protocol, f.HBONEAddr = DoubleHBONE, "echo.shop.svc.cluster.local:80"
	f.DstIdentity = workload.Identity{TrustDomain: "far.local", Namespace: "shop", ServiceAccount: "echo"}
	f.Destination = &workload.Workload{Name: "echo", WorkloadName: "echo", Namespace: "shop", ClusterID: "far"}
	l.Open(f, nil).Finish(nil)
	got := values(scrape(t, reg)["istio_tcp_connections_opened_total"], "destination_workload", "destination_principal", "destination_cluster", "connection_security_policy")
	want := map[string]float64{
		"connection_security_policy=mutual_tls destination_cluster=far destination_principal=spiffe://far.local/ns/shop/sa/echo destination_workload=echo": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if got := f.Protocol.String(); got != "DOUBLEHBONE" {
		t.Errorf("protocol %q", got)
	}
}

func BenchmarkLine(b *testing.B) {
	r, err := NewRecorder(Config{Now: func() time.Time { return start }, Log: discard})
	if err != nil {
		b.Fatal(err)
	}
	c := r.Open(outbound(), nil)
	var w lineWriter
	b.ReportAllocs()
	for b.Loop() {
		w.line(r, c, "info", "connection complete", nil, true)
	}
}
