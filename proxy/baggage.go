package proxy

import (
	"net/url"
	"strings"

	"ztun.dev/ztun/internal/workload"
)

// baggage describes a workload (W3C Baggage, with the keys of OpenTelemetry's resource conventions), in ztunnel's order; empty
// values are left out.
func baggage(w *workload.Workload) string {
	if w == nil {
		return ""
	}
	var b strings.Builder
	add := func(key, value string) {
		if value == "" {
			return
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(key + "=" + value)
	}
	add("k8s.cluster.name", w.ClusterID)
	add("k8s.namespace.name", w.Namespace)
	add("k8s."+w.WorkloadType.String()+".name", w.WorkloadName)
	add("service.name", w.CanonicalName)
	add("service.version", w.CanonicalRevision)
	add("cloud.region", w.Locality.Region)
	add("cloud.availability_zone", w.Locality.Zone)
	return b.String()
}

// claimed is what a peer's baggage says of its workload; nil: nothing. It is for logs and metrics only. A later value of a key wins, and
// an empty one takes it back; properties of an entry, and values that are no text or too long, are left out.
func claimed(baggage string) *workload.Workload {
	var w workload.Workload
	for entry := range strings.SplitSeq(baggage, ",") {
		entry, _, _ = strings.Cut(entry, ";")
		key, value, ok := strings.Cut(entry, "=")
		if !ok {
			continue
		}
		if value, ok = claim(strings.TrimSpace(value)); !ok {
			continue
		}
		switch strings.TrimSpace(key) {
		case "k8s.cluster.name":
			w.ClusterID = value
		case "k8s.namespace.name":
			w.Namespace = value
		case "k8s.deployment.name", "k8s.cronjob.name", "k8s.pod.name", "k8s.job.name":
			w.WorkloadName = value
		case "service.name":
			w.CanonicalName = value
		case "service.version":
			w.CanonicalRevision = value
		case "cloud.region":
			w.Locality.Region = value
		case "cloud.availability_zone":
			w.Locality.Zone = value
		}
	}
	empty := w.ClusterID+w.Namespace+w.WorkloadName+w.CanonicalName+w.CanonicalRevision+w.Locality.Region+w.Locality.Zone == ""
	if empty {
		return nil
	}
	return &w
}

// maxClaim bounds a value: it becomes the value of a label.
const maxClaim = 256

// claim decodes a value (W3C Baggage, section 3.3.1.4: percent-encoded), which is kept as long as the connection.
func claim(s string) (string, bool) {
	if len(s) > 3*maxClaim {
		return "", false
	}
	v, err := url.PathUnescape(s)
	if err != nil || len(v) > maxClaim {
		return "", false
	}
	for _, r := range v {
		if r < ' ' || r > '~' {
			return "", false
		}
	}
	return strings.Clone(v), true
}
