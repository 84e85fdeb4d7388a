package telemetry

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"ztun.dev/ztun/internal/workload"
)

// forgetAfter is how long the series of workloads that are gone stay: the longest usual interval of scrapes is a minute.
const forgetAfter = 5 * time.Minute

// forgetUnrecordedAfter is how long a series stays that is about a peer without a record, so that nobody tells when it is gone. It is longer
// because the peer may come back, and what is counted then begins at zero again. Where there is no room for others it is forgetAfter.
const forgetUnrecordedAfter = time.Hour

// A labelSet are the values of labelNames. That of the flags is set where the metric is written.
type labelSet [labelCount]string

// A series counts the connections of one set of labels. All fields are guarded by the Recorder's lock.
type series struct {
	labels labelSet
	open   int       // connections now
	idle   time.Time // since when none is open
	sides  sides     // of the last connection

	opened, received, sent uint64
	closed                 [flagCount]uint64
}

// sides are whom a series is about: it ends when one of them is gone.
type sides struct {
	uids       [2]string // source and destination; "": nobody, or without a record
	unrecorded bool      // a side is named by what it has proved or claimed only
}

// add names a side by its record, if it has one, or by its identity.
func (s *sides) add(i int, w *workload.Workload, id workload.Identity) {
	switch {
	case w != nil && w.UID != "":
		s.uids[i] = w.UID
	case w != nil || !id.IsZero():
		s.unrecorded = true
	}
}

// ended reports whether what has been idle for a time is no longer told of.
func (s *sides) ended(idle time.Duration, state *workload.Snapshot, full bool) bool {
	if idle < forgetAfter || state == nil {
		return false
	}
	gone := func(uid string) bool { return uid != "" && state.Workload(uid) == nil }
	return slices.ContainsFunc(s.uids[:], gone) || s.unrecorded && (full || idle >= forgetUnrecordedAfter)
}

// metrics are the collectors of a Recorder, which is a prometheus.Collector itself: bytes of open connections are read when somebody asks.
type metrics struct {
	limit  int       // of series
	swept  time.Time // when forget was called
	series map[labelSet]*series
	early  [2]map[Reason]uint64   // by direction
	dns    map[dnsLabels]*lookups // by source and hostname
	ends   [2]map[Reason]uint64   // all failures, by direction
	keep   []int                  // places of the labels that are exported
	dnsIn  []int                  // of them, those that dns has

	opened, closed, failed, received, sent        *prometheus.Desc
	sockets, flows, earlyDeny, failures, logDrops *prometheus.Desc
	onDemandDNS                                   *prometheus.Desc
}

func newMetrics(limit int, dropped []string) *metrics {
	m := &metrics{limit: limit, series: make(map[labelSet]*series), dns: make(map[dnsLabels]*lookups)}
	for d := range m.early {
		m.early[d], m.ends[d] = make(map[Reason]uint64), make(map[Reason]uint64)
	}
	var names []string
	for i, n := range labelNames {
		if !slices.Contains(dropped, n) {
			m.keep, names = append(m.keep, i), append(names, n)
		}
	}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	m.opened = desc("istio_tcp_connections_opened_total", "The total number of TCP connections opened", names...)
	m.closed = desc("istio_tcp_connections_closed_total", "The total number of TCP connections closed", names...)
	m.failed = desc("istio_tcp_connections_failed_total", "The total number of TCP connections that were not established", names...)
	m.received = desc("istio_tcp_received_bytes_total", "The size of total bytes received during request in case of a TCP connection", names...)
	m.sent = desc("istio_tcp_sent_bytes_total", "The size of total bytes sent during response in case of a TCP connection", names...)
	var dnsNames []string
	for _, i := range m.keep {
		if i >= labelSource && i < labelService {
			m.dnsIn, dnsNames = append(m.dnsIn, i), append(dnsNames, labelNames[i])
		}
	}
	m.onDemandDNS = desc("istio_on_demand_dns_total", "The total number of connections for which an endpoint's hostname was resolved (unstable)", append(dnsNames, "hostname")...)
	m.sockets = desc("istio_tcp_sockets_open", "The current number of open accepted TCP connections and streams", "reporter")
	m.flows = desc("ztun_flows_open", "The current number of open connections", "direction")
	m.earlyDeny = desc("ztun_early_deny_total", "The total number of flows that failed before anything was decided about them", "direction", "reason")
	m.failures = desc("ztun_connection_failures_total", "The total number of connections and flows that failed, by cause", "direction", "reason")
	m.logDrops = desc("ztun_log_dropped_total", "The total number of log lines that were dropped because the writer was behind", "kind")
	return m
}

// Describe implements prometheus.Collector.
func (r *Recorder) Describe(ch chan<- *prometheus.Desc) {
	m := r.metrics
	for _, d := range []*prometheus.Desc{m.opened, m.closed, m.failed, m.received, m.sent, m.sockets, m.flows, m.earlyDeny, m.failures, m.logDrops, m.onDemandDNS} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (r *Recorder) Collect(ch chan<- prometheus.Metric) {
	m := r.metrics
	var list []prometheus.Metric // sent without the lock
	add := func(d *prometheus.Desc, t prometheus.ValueType, v uint64, labels ...string) {
		list = append(list, prometheus.MustNewConstMetric(d, t, float64(v), labels...))
	}
	now, state := r.cfg.Now(), r.state()
	r.mu.Lock()
	var open [2]uint64
	for c := range r.open {
		c.count()
		open[c.Direction]++
	}
	m.forget(now, state)
	for _, s := range m.series {
		values := m.values(s, FlagNone)
		add(m.opened, prometheus.CounterValue, s.opened, values...)
		add(m.received, prometheus.CounterValue, s.received, values...)
		add(m.sent, prometheus.CounterValue, s.sent, values...)
		for f := range flagCount {
			if s.closed[f] == 0 {
				continue
			}
			values := m.values(s, f)
			add(m.closed, prometheus.CounterValue, s.closed[f], values...)
			if f.failed() {
				add(m.failed, prometheus.CounterValue, s.closed[f], values...)
			}
		}
	}
	for l, n := range m.dns {
		values := make([]string, 0, len(m.dnsIn)+1)
		for _, i := range m.dnsIn {
			values = append(values, l.source[i-labelSource])
		}
		add(m.onDemandDNS, prometheus.CounterValue, n.count, append(values, l.hostname)...)
	}
	for d, name := range []string{Outbound: "outbound", Inbound: "inbound"} {
		add(m.sockets, prometheus.GaugeValue, open[d], reporter(Direction(d)))
		add(m.flows, prometheus.GaugeValue, open[d], name)
		for reason, n := range m.early[d] {
			add(m.earlyDeny, prometheus.CounterValue, n, name, string(reason))
		}
		for reason, n := range m.ends[d] {
			add(m.failures, prometheus.CounterValue, n, name, string(reason))
		}
	}
	r.mu.Unlock()
	add(m.logDrops, prometheus.CounterValue, r.log.dropped.Load(), "access")
	add(m.logDrops, prometheus.CounterValue, r.log.droppedImportant.Load(), "deny")
	for _, x := range list {
		ch <- x
	}
}

func (m *metrics) values(s *series, f Flag) []string {
	values := make([]string, len(m.keep))
	for i, k := range m.keep {
		values[i] = s.labels[k]
		if k == labelFlags {
			values[i] = f.String()
		}
	}
	return values
}

// of is the series of a connection that opens; it counts it.
func (m *metrics) of(labels *labelSet, about sides, now time.Time, state *workload.Snapshot) *series {
	s := m.series[*labels]
	if s == nil {
		if len(m.series) >= m.limit {
			m.makeRoom(now, state)
		}
		if len(m.series) >= m.limit {
			labels, about = labels.others(), sides{}
			s = m.series[*labels]
		}
		if s == nil {
			s = &series{labels: *labels}
			m.series[*labels] = s
		}
	}
	s.open++
	s.opened++
	s.sides = about
	return s
}

// makeRoom is called when there are as many sets of labels as there may be. It looks for ended ones once a minute.
func (m *metrics) makeRoom(now time.Time, state *workload.Snapshot) {
	if now.Sub(m.swept) >= time.Minute {
		m.forget(now, state)
	}
}

// forget drops the series that have ended.
func (m *metrics) forget(now time.Time, state *workload.Snapshot) {
	m.swept = now
	full := len(m.series) >= m.limit
	for labels, s := range m.series {
		if s.open == 0 && s.sides.ended(now.Sub(s.idle), state, full) {
			delete(m.series, labels)
		}
	}
	full = len(m.dns) >= m.limit
	for labels, n := range m.dns {
		if n.sides.ended(now.Sub(n.last), state, full) {
			delete(m.dns, labels)
		}
	}
}

// others is the set that stands for all sets above the limit, of which there are few.
func (l *labelSet) others() *labelSet {
	o := new(labelSet)
	for i := range o {
		o[i] = "other"
	}
	for _, i := range []int{labelReporter, labelProtocol, labelFlags, labelSecurity} {
		o[i] = l[i]
	}
	return o
}

// count adds to the series what has flowed since the last time. A counter never goes back, also if the kernel says less at the end of a
// connection than before.
func (c *Conn) count() {
	received, sent := max(c.Received.Load(), c.counted[0]), max(c.Sent.Load(), c.counted[1])
	c.series.received += received - c.counted[0]
	c.series.sent += sent - c.counted[1]
	c.counted = [2]uint64{received, sent}
}

func reporter(d Direction) string {
	if d == Inbound {
		return "destination"
	}
	return "source"
}

const unknown = "unknown"

// labels are the labels of a connection. What is dropped is the same for all.
func (f *Facts) labels(keep []int) (l labelSet, about sides) {
	l[labelReporter] = reporter(f.Direction)
	l[labelProtocol], l[labelFlags], l[labelSecurity] = "tcp", FlagNone.String(), unknown
	if f.Protocol != TCP {
		l[labelSecurity] = "mutual_tls"
	}
	destination := f.DstIdentity
	if f.Destination != nil && f.Protocol != DoubleHBONE { // beyond a gateway only what was proven is known
		destination = f.Destination.Identity()
	}
	source := f.SrcIdentity
	if f.Protocol == TCP {
		source = workload.Identity{}
	}
	l.side(labelSource, labelLocality, f.source(), source)
	if f.Source == nil && f.Claimed != nil {
		l[labelSource+5] = f.Claimed.WorkloadName // ztunnel's, of baggage
	}
	l.side(labelDestination, labelLocality+2, f.Destination, destination)
	host, namespace, name := f.service()
	l[labelService], l[labelService+1], l[labelService+2] = host, namespace, name
	for i, v := range l {
		if !slices.Contains(keep, i) {
			l[i] = ""
		} else if v == "" {
			l[i] = unknown
		}
	}
	about.add(0, f.source(), source)
	about.add(1, f.Destination, destination)
	return l, about
}

// source is the workload that opened the connection, as far as it is known.
func (f *Facts) source() *workload.Workload {
	if f.Source == nil {
		return f.Claimed
	}
	return f.Source
}

// side fills the eight labels of a side and the two of its locality.
func (l *labelSet) side(at, locality int, w *workload.Workload, id workload.Identity) {
	l[at+4] = id.String()
	if w == nil {
		return
	}
	l[at], l[at+1], l[at+2], l[at+3] = w.WorkloadName, w.CanonicalName, w.CanonicalRevision, w.Namespace
	l[at+5], l[at+6], l[at+7] = w.CanonicalName, w.CanonicalRevision, w.ClusterID
	l[locality], l[locality+1] = w.Locality.Region, w.Locality.Zone
}

// service is hostname, namespace and name of the destination service. Who does not know the latter leaves them out; then
// they are those of the workload's service with that hostname.
func (f *Facts) service() (host, namespace, name string) {
	host, namespace, name = f.Service, f.ServiceNamespace, f.ServiceName
	if host == "" || namespace != "" && name != "" {
		return host, namespace, name
	}
	if namespace == "" && f.Destination != nil {
		var keys []workload.ServiceKey
		for k := range f.Destination.Services {
			if k.Hostname == host {
				keys = append(keys, k)
			}
		}
		if len(keys) > 0 {
			namespace = slices.MinFunc(keys, func(a, b workload.ServiceKey) int { return cmp.Compare(a.Namespace, b.Namespace) }).Namespace
		}
	}
	if name == "" {
		if first, rest, ok := strings.Cut(host, "."); ok && namespace != "" && strings.HasPrefix(rest, namespace+".svc.") {
			name = first
		}
	}
	return host, namespace, name
}

// dnsLabels are the labels of istio_on_demand_dns_total: the eight of the source, and the hostname.
type dnsLabels struct {
	source   [labelService - labelSource]string
	hostname string
}

// lookups count connections for which a hostname had to be resolved.
type lookups struct {
	count uint64
	last  time.Time
	sides sides // of the last
}

// OnDemandDNS counts a connection for which the hostname of an endpoint has to be resolved, whether it is known already or not.
func (r *Recorder) OnDemandDNS(source, endpoint *workload.Workload) {
	var all labelSet
	all.side(labelSource, labelLocality, source, source.Identity())
	l, about := dnsLabels{hostname: endpoint.Hostname}, sides{uids: [2]string{source.UID, endpoint.UID}}
	for _, i := range r.metrics.dnsIn {
		l.source[i-labelSource] = cmp.Or(all[i], unknown)
	}
	now, state := r.cfg.Now(), r.state()
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.metrics
	n := m.dns[l]
	if n == nil {
		if len(m.dns) >= m.limit {
			m.makeRoom(now, state)
		}
		if len(m.dns) >= m.limit {
			l, about = dnsLabels{hostname: "other"}, sides{}
			for _, i := range m.dnsIn {
				l.source[i-labelSource] = "other"
			}
			n = m.dns[l]
		}
		if n == nil {
			n = new(lookups)
			m.dns[l] = n
		}
	}
	n.count++
	n.last, n.sides = now, about
}
