package telemetry

import (
	"errors"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// A Build is what metrics say of the program.
type Build struct{ Version, Revision, IstioVersion string }

// RegisterProcess registers what is the same for every process: its build, its memory, files and CPU, and Go's runtime.
func RegisterProcess(r prometheus.Registerer, b Build) error {
	info := func(name, help string, labels prometheus.Labels) prometheus.Collector {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels})
		g.Set(1)
		return g
	}
	var errs []error
	for _, c := range []prometheus.Collector{
		info("istio_build", "Istio component build info", prometheus.Labels{"component": "ztunnel", "tag": b.IstioVersion}), // the name that dashboards look for
		info("ztun_build_info", "Build of ztun", prometheus.Labels{"version": b.Version, "revision": b.Revision}),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewGoCollector(),
	} {
		errs = append(errs, r.Register(c))
	}
	return errors.Join(errs...)
}

// MetricsHandler answers with all metrics, as OpenMetrics where that is asked for.
func MetricsHandler(g prometheus.Gatherer) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{EnableOpenMetrics: true, ErrorHandling: promhttp.ContinueOnError})
}
