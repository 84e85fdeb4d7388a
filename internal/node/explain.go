package node

import (
	"encoding/json"
	"net/http"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/explain"
	"ztun.dev/ztun/internal/workload"
)

// serveExplain answers a question about a flow by the state that flows are decided with now. It is told to admin as /debug/explain.
func (n *Node) serveExplain(w http.ResponseWriter, r *http.Request) {
	m := explain.Mesh{
		State: n.store.Snapshot(), Network: n.cfg.Network, AllowUnknown: n.cfg.UnknownPolicy == config.UnknownPolicyAllow,
		ClusterDomain: n.cfg.ClusterDomain, PreferredNamespace: n.cfg.PreferredServiceNamespace, NoIPv6: !n.cfg.IPv6Enabled,
		Served: func(w *workload.Workload) bool { return n.podOf(w) != nil },
	}
	q := explain.ParseQuery(r.URL.Query())
	if from, err := m.Find(q.From); err == nil {
		m.Avoid = n.avoidedBy(from)
	}
	report, err := m.Ask(q)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(report) // a client that is gone does not read it
}

// avoidedBy lists the endpoints that a pod passes over; of one that is not served here none.
func (n *Node) avoidedBy(w *workload.Workload) []*workload.Workload {
	if line := n.podOf(w); line != nil {
		return line.proxy.Avoided()
	}
	return nil
}

// podOf is the pipeline of the pod that is a workload, or nil.
func (n *Node) podOf(w *workload.Workload) *pipeline {
	for _, p := range n.listPods() {
		if line := p.current(); line != nil && p.spec.String() == w.Namespace+"/"+w.Name {
			return line
		}
	}
	return nil
}
