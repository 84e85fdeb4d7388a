package node

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
)

// observe makes what people, probes and scrapers look at: logger, records, metrics, readiness and the admin server.
func (n *Node) observe(o Options) (err error) {
	n.levels = telemetry.NewLevels(n.cfg.LogFilter)
	n.log = telemetry.NewLogger(o.Stderr, n.cfg.LogFormat, n.levels)
	n.registry = prometheus.NewRegistry()
	if err := telemetry.RegisterProcess(n.registry, telemetry.Build{Version: o.Build.Version, Revision: o.Build.Revision, IstioVersion: n.cfg.IstioVersion}); err != nil {
		return err
	}
	n.records, err = telemetry.NewRecorder(telemetry.Config{
		Now: time.Now, Access: o.Stdout, JSON: n.cfg.LogFormat == telemetry.JSON, Levels: n.levels, Log: n.log, Registerer: n.registry,
		Store: &n.store, DropLabels: n.cfg.MetricsDropLabels, Fields: n.cfg.AccessLogFields, Classify: proxy.ClassifyError, ErrorText: proxy.ErrorText,
		Opening: n.captures.learn, Ended: func(c *telemetry.Conn, _ error) { n.captures.learn(c) },
	})
	if err != nil {
		return err
	}
	if n.tunnels, err = hbone.NewMetrics(n.registry); err != nil {
		return err
	}
	n.metrics = newMetrics(n.registry, n)
	log := n.log.With(telemetry.TargetKey, "admin")
	n.readiness = admin.NewReadiness(time.Now, n.log.With(telemetry.TargetKey, "readiness"))
	n.ready = n.readiness.Add("workload proxy manager", n.pendingPods)
	o.Ports.Admin, o.Ports.Stats = port(o.Ports.Admin, n.cfg.AdminPort), port(o.Ports.Stats, n.cfg.StatsPort)
	o.Build.Go, o.Build.IstioVersion = runtime.Version(), n.cfg.IstioVersion
	n.admin, err = admin.New(admin.Config{
		Ports: o.Ports, Dumper: n, Records: n.records, Levels: n.levels, Metrics: telemetry.MetricsHandler(n.registry), Readiness: n.readiness, Capture: n.serveCapture, Explain: n.serveExplain,
		Shutdown: func() { n.quit(errors.New("asked to by the admin port")) }, Now: time.Now, After: time.After, Build: o.Build, Log: log,
	})
	return err
}

// port is what the caller of Run wants, else what is configured.
func port(want int, configured uint16) int {
	if want != 0 {
		return want
	}
	return int(configured)
}

// pendingPods says why the node is not ready: which pods are not served, and why not.
func (n *Node) pendingPods() (reasons []string) {
	for _, p := range n.listPods() {
		if _, pending := p.state(); pending != "" {
			reasons = append(reasons, fmt.Sprintf("%s: %s", p.spec.String(), pending))
		}
	}
	return reasons
}

// listPods is a copy of the list, which grows during the start.
func (n *Node) listPods() []*pod {
	n.podsMu.Lock()
	defer n.podsMu.Unlock()
	return append([]*pod(nil), n.pods...)
}

var _ admin.Dumper = (*Node)(nil)

// State implements admin.Dumper.
func (n *Node) State() *workload.Snapshot { return n.store.Snapshot() }

// Static implements admin.Dumper: so far all of the state comes from a file.
func (n *Node) Static() *workload.Snapshot { return n.store.Snapshot() }

// Certificates implements admin.Dumper.
func (n *Node) Certificates() []admin.Certificate {
	list := []admin.Certificate{}
	for _, s := range n.identities.Statuses() {
		c := admin.Certificate{Identity: s.Identity, State: "Initializing"}
		switch {
		case s.Certificate != nil && time.Now().Before(s.Certificate.TLS.Leaf.NotAfter):
			c.State, c.Roots = "Available", s.Certificate.RootList
			c.Chain = chain(s.Certificate.TLS.Certificate)
		case s.Err != nil:
			c.State = "Unavailable: " + s.Err.Error()
		}
		list = append(list, c)
	}
	return list
}

func chain(der [][]byte) (list []*x509.Certificate) {
	for _, d := range der {
		if c, err := x509.ParseCertificate(d); err == nil { // they were parsed before
			list = append(list, c)
		}
	}
	return list
}

// Pods implements admin.Dumper.
func (n *Node) Pods() []admin.Pod {
	list := []admin.Pod{}
	for _, p := range n.listPods() {
		c := p.spec.client
		out := admin.Pod{UID: p.spec.uid, Name: c.Name, Namespace: c.Namespace, ServiceAccount: c.ServiceAccount}
		line, pending := p.state()
		out.Pending = pending
		if line != nil {
			out.Capture, out.CaptureReason = line.choice.capture.String(), line.choice.reason
			out.Offload = line.offload
			out.Connections = line.proxy.Connections()
		}
		list = append(list, out)
	}
	return list
}

// Settings implements admin.Dumper.
func (n *Node) Settings() (list []admin.Setting) {
	for _, e := range n.cfg.Entries() {
		list = append(list, admin.Setting{Key: e.Key, Variable: e.Variable, Value: e.Value, Origin: e.Origin.String()})
	}
	return list
}

// metrics are those of the node itself.
type metrics struct {
	lost    prometheus.Counter
	reloads *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer, n *Node) *metrics {
	m := &metrics{lost: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "ztun_pods_lost_total", Help: "Pods whose capture failed while they were served.",
	})}
	m.reloads = newReloads()
	r.MustRegister(m.lost, m.reloads, &collector{
		n:       n,
		pods:    prometheus.NewDesc("ztun_pods", "Pods by state and capture backend.", []string{"state", "capture"}, nil),
		refused: prometheus.NewDesc("ztun_flows_refused_total", "Flows that a limit refused, by reason.", []string{"reason"}, nil),
		pending: prometheus.NewDesc("ztun_flows_in_flight", "Flows that have no answer yet.", nil, nil),
		offload: prometheus.NewDesc("ztun_pods_offload", "Pods that are served, by how their flows are given back to the kernel.", []string{"backend"}, nil),
		back:    prometheus.NewDesc("ztun_flows_handed_back_total", "Flows that were given back to the kernel.", nil, nil),
		unseen:  prometheus.NewDesc("ztun_flows_remembered_total", "Flows that the kernel carries because their destination was remembered (ZTUN_CONNECT_CACHE).", nil, nil),
		carried: prometheus.NewDesc("ztun_flows_in_kernel", "Open connections that the kernel carries.", nil, nil),
		pool:    prometheus.NewDesc("ztun_tunnels", "HBONE tunnels, by direction.", []string{"direction"}, nil),
		held:    prometheus.NewDesc("ztun_buffered_bytes", "Bytes of connections that wait in this process.", nil, nil),
		full:    prometheus.NewDesc("ztun_buffer_limit_reached_total", "How often so many bytes waited that no more were taken ahead.", nil, nil),
	})
	return m
}

// A collector reads what the pods count.
type collector struct {
	n                                                                        *Node
	pods, refused, pending, offload, back, unseen, carried, pool, held, full *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.pods, c.refused, c.pending, c.offload, c.back, c.unseen, c.carried, c.pool, c.held, c.full} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	type key struct{ state, capture string }
	pods, offload := make(map[key]int), make(map[string]int)
	var sum refusals
	var in, out int
	var questions, strays, back uint64
	for _, p := range c.n.listPods() {
		line, pending := p.state()
		switch {
		case line != nil:
			pods[key{"serving", line.choice.capture.String()}]++
			offload[line.offload]++
			back += line.backend.handedBack()
			r := line.backend.refusals()
			sum.evicted += r.evicted
			sum.limited += r.limited
			questions += line.proxy.QuestionsRefused()
			strays += line.proxy.Strays()
			sum.evicted += line.proxy.Evicted()
			in += line.server.Tunnels()
			out += line.pool.Stats().Tunnels
		case pending != "":
			pods[key{"pending", ""}]++
		}
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	for k, v := range pods {
		gauge(c.pods, v, k.state, k.capture)
	}
	for k, v := range offload {
		gauge(c.offload, v, k)
	}
	ch <- prometheus.MustNewConstMetric(c.back, prometheus.CounterValue, float64(back))
	ch <- prometheus.MustNewConstMetric(c.unseen, prometheus.CounterValue, float64(c.n.carriers.unseen.Load()))
	gauge(c.carried, c.n.records.Stats().Kernel)
	gauge(c.pending, c.n.limits.InFlight())
	gauge(c.held, int(c.n.budget.Held()))
	ch <- prometheus.MustNewConstMetric(c.full, prometheus.CounterValue, float64(c.n.budget.TimesFull()))
	gauge(c.pool, in, "inbound")
	gauge(c.pool, out, "outbound")
	for reason, v := range map[string]uint64{"pod_limit": sum.evicted, "process_limit": sum.limited, "dns_limit": questions, "descriptor_limit": c.n.descriptors.Refused(), "not_of_the_pod": strays} {
		ch <- prometheus.MustNewConstMetric(c.refused, prometheus.CounterValue, float64(v), reason)
	}
}

// serveAdmin runs the admin server; its end before ctx ends is the node's.
func (n *Node) serveAdmin(ctx context.Context) error {
	if err := n.admin.Run(ctx); err != nil {
		n.quit(err)
		return err
	}
	return nil
}
