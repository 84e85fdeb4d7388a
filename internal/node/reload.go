package node

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
)

// heedReloads reads the mesh state again whenever it is asked to, until ctx ends.
func (n *Node) heedReloads(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.reload:
			n.readState()
		}
	}
}

// readState takes the state that the file has now, for new flows and for open connections. One that is not valid changes nothing.
func (n *Node) readState() {
	st, err := loadState(n.cfg)
	if err != nil {
		n.metrics.reloads.WithLabelValues("refused").Inc()
		n.log.Error("the state stays as it was: what was read again is not valid", "error", err.Error())
		return
	}
	n.store.Replace(st)
	n.metrics.reloads.WithLabelValues("taken").Inc()
	n.log.Info("the state was read again", "workloads", len(st.Workloads), "services", len(st.Services), "policies", len(st.Policies))
	for i := range n.specs {
		n.warnUnknown(&n.specs[i])
	}
}

// warnUnknown says of a pod that the state does not have it, and of which node it has one of that name.
func (n *Node) warnUnknown(s *podSpec) {
	snapshot := n.store.Snapshot()
	if snapshot.Local(&s.client) != nil {
		return
	}
	args := []any{"pod", s.String(), "serviceAccount", s.client.ServiceAccount, "nodeName", s.client.Node}
	for _, w := range snapshot.State().Workloads {
		if w.Namespace == s.client.Namespace && w.Name == s.client.Name {
			args = append(args, "theStateHasIt", "on node "+w.Node+" with service account "+w.ServiceAccount)
			break
		}
	}
	n.log.Warn("the state has no workload of a pod: its connections are refused until it has", args...)
}

func newReloads() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "ztun_state_reloads_total", Help: "How often the mesh state was to be read again, by whether it was taken.",
	}, []string{"result"})
}
