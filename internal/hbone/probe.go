package hbone

import (
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/net/http2"
)

// The peer of a tunnel that has been silent may be gone, its address perhaps somebody else's, and a CONNECT would wait until the
// keepalive has found out. So it goes with a PING, and if nothing at all is heard for a while, requests without an answer are sent
// again on a fresh tunnel. What is open goes on: it is the keepalive that decides about the tunnel.
const (
	probeAfter = time.Second     // of silence
	probeTime  = 2 * time.Second // in which the kernel sends again what is not acknowledged, at 0.2, 0.6 and 1.4 s
)

var (
	// errStale is why a request is given up on a tunnel whose peer gives no sign of life.
	errStale = errors.New("hbone: the peer gives no sign of life")

	// errLost is wrapped by the failure of a request on a tunnel that had worked before.
	errLost = errors.New("hbone: the tunnel was lost")
)

// probe is called with each CONNECT, and looks after the requests until none waits for its answer.
func (t *tunnel) probe() {
	if t.probing {
		return
	}
	t.probing = true
	wait, now := probeAfter, t.ref.Now()
	asked := t.eng.Settled() && t.eng.Probe(now, probeAfter) // a handshake has a limit of its own
	if asked {
		wait = probeTime
	}
	t.kick()
	t.ref.After(wait, func() {
		t.probing = false
		switch {
		case t.dead() || t.requests == 0:
		case asked && t.eng.Silent(now):
			t.suspect()
		default:
			t.probe()
		}
	})
}

// suspect takes a tunnel out of use, and gives up the requests on it, in an order that replays.
func (t *tunnel) suspect() {
	t.owner.noNewStreams(t)
	for _, id := range slices.Sorted(maps.Keys(t.streams)) {
		if s := t.streams[id]; s != nil && s.opening != nil {
			s.reset, s.released = true, true
			delete(t.streams, id)
			t.eng.Reset(id, http2.ErrCodeCancel)
			t.opened(s.endOpening(), nil, errStale)
		}
	}
	t.kick()
}
