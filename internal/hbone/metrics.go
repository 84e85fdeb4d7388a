package hbone

import (
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/http2"
)

// Metrics count what peers do wrong. A nil *Metrics counts nothing.
type Metrics struct {
	faults *prometheus.CounterVec
}

// NewMetrics registers the Metrics that all Pools and Servers of a process share.
func NewMetrics(r prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{faults: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "ztun_http2_errors_total",
		Help: "Faults of peers on tunnels: what was ended because of it, a connection or a stream, and the HTTP/2 error code that the peer was told.",
	}, []string{"direction", "scope", "code"})}
	return m, r.Register(m.faults)
}

// fault counts one. server is the side that saw it.
func (m *Metrics) fault(server bool, scope string, code http2.ErrCode) {
	if m == nil {
		return
	}
	direction := "outbound"
	if server {
		direction = "inbound"
	}
	m.faults.WithLabelValues(direction, scope, code.String()).Inc()
}
