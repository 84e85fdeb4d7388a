package node

import (
	"encoding/json"
	"net/http"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/explain"
)

// serveExplain answers a question about a flow by the state that flows are decided with now. It is told to admin as /debug/explain.
func (n *Node) serveExplain(w http.ResponseWriter, r *http.Request) {
	m := explain.Mesh{State: n.store.Snapshot(), Network: n.cfg.Network, AllowUnknown: n.cfg.UnknownPolicy == config.UnknownPolicyAllow}
	report, err := m.Ask(explain.ParseQuery(r.URL.Query()))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(report) // a client that is gone does not read it
}
