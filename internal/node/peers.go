package node

import (
	"context"
	"slices"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/workload"
)

// watchPeers takes tunnels out of use whose workload has gone, or has changed, as soon as the state says so.
func (n *Node) watchPeers(ctx context.Context) error {
	changed := make(chan struct{}, 1)
	defer n.store.Subscribe(func() {
		select {
		case changed <- struct{}{}:
		default: // it is known already
		}
	})()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		state := n.store.Snapshot()
		for _, p := range n.listPods() {
			if l := p.current(); l != nil {
				l.pool.Retain(func(t hbone.Target) bool { return isThere(state, &t) })
			}
		}
	}
}

// isThere reports whether a workload still has the address and the identity that a tunnel to it was made for. What address a hostname
// has, the state does not say.
func isThere(state *workload.Snapshot, t *hbone.Target) bool {
	if t.PeerUID == "" {
		return true
	}
	w := state.Workload(t.PeerUID)
	if w == nil || !slices.Contains(t.Accept, w.Identity()) {
		return false
	}
	return slices.Contains(w.Addresses, t.NextHop.Addr()) || len(w.Addresses) == 0 && w.Hostname != ""
}
