package hbone

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A hole is a connection whose peer has vanished, once that is so: what is written is taken, and nothing comes.
type hole struct {
	loop.Conn
	gone *bool
}

func (h *hole) TryRead(p []byte) (int, error) {
	if *h.gone {
		return 0, loop.ErrAgain
	}
	return h.Conn.TryRead(p)
}

func (h *hole) TryWrite(p []byte) (int, error) {
	if *h.gone {
		return len(p), nil
	}
	return h.Conn.TryWrite(p)
}

// TestPeerHasVanished: the address of a pod that has died is another's, or nobody's for a while; its tunnel is in the pool.
func TestPeerHasVanished(t *testing.T) {
	start := func(t *testing.T, handler handlerFunc) (ms *mesh, gone *bool) {
		gone = new(bool)
		ms = newMesh(t, meshConfig{handler: handler})
		ms.wrap = func(c loop.Conn) loop.Conn {
			if len(ms.conns) == 0 { // of the first tunnel, both ends
				return &hole{c, gone}
			}
			return c
		}
		s := ms.mustOpen()
		x := startExchange(s, []byte("x"))
		if ms.m.Settle(); len(x.got) != 1 {
			t.Fatal("the first stream does not work")
		}
		ms.m.Advance(5 * time.Second)
		return ms, gone
	}
	works := func(ms *mesh) {
		ms.t.Helper()
		x := startExchange(ms.mustOpen(), []byte("question"))
		if ms.m.Settle(); string(x.got) != "question" {
			ms.t.Errorf("the stream brings back %q", x.got)
		}
	}
	t.Run("FP-07 the address is another pod's", func(t *testing.T) {
		ms, gone := start(t, nil)
		*gone = true
		ms.target.PeerUID = "the other pod"
		began := ms.m.Group().Now()
		works(ms)
		if took := ms.m.Group().Now().Sub(began); took != 0 || len(ms.conns) != 2 {
			t.Errorf("it took %v and %d tunnels, want no time and a second one", took, len(ms.conns))
		}
	})
	t.Run("FP-07 the state says that the pod has gone", func(t *testing.T) {
		ms, gone := start(t, nil)
		*gone = true
		ms.pool.Retain(func(Target) bool { return false })
		works(ms)
		if len(ms.conns) != 2 {
			t.Errorf("%d tunnels, want a second one", len(ms.conns))
		}
	})
	t.Run("FP-07 nobody says so", func(t *testing.T) {
		ms, gone := start(t, nil)
		*gone = true
		began := ms.m.Group().Now()
		works(ms)
		if took := ms.m.Group().Now().Sub(began); took > probeTime+time.Second || len(ms.conns) != 2 {
			t.Errorf("the first request took %v and %d tunnels, want %v and a second one", took, len(ms.conns), probeTime)
		}
		began = ms.m.Group().Now()
		works(ms)
		if took := ms.m.Group().Now().Sub(began); took != 0 || len(ms.conns) != 2 {
			t.Errorf("the next took %v and %d tunnels, want no time and no further one", took, len(ms.conns))
		}
		ms.m.Advance(40 * time.Second) // the keepalive's
		if st := ms.pool.Stats(); st.Tunnels != 1 || st.Streams != 0 {
			t.Errorf("in the end the pool has %+v, want one tunnel", st)
		}
	})
	t.Run("FP-07 it is there, and slow to answer", func(t *testing.T) {
		requests := 0
		var ms *mesh
		ms, _ = start(t, func(ctx context.Context, r *Request) {
			if requests++; requests > 1 {
				ctx, cancel := ms.m.Group().WithTimeout(ctx, 15*time.Second)
				defer cancel()
				_ = loop.Await(ctx, func(func()) {})
			}
			echoHandler(ctx, r)
		})
		works(ms)
		if requests != 2 || len(ms.conns) != 1 {
			t.Errorf("%d requests over %d tunnels, want 2 over one: a request must not be sent twice", requests, len(ms.conns))
		}
	})
	t.Run("FP-07 nobody else is there either", func(t *testing.T) {
		ms, gone := start(t, nil)
		*gone = true
		ms.wrap = func(c loop.Conn) loop.Conn { return &hole{c, gone} }
		if _, err := ms.open(); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Open = %v, want the limit of the handshake", err)
		}
	})
}

// TestSilentPeer: who accepts a connection and says nothing has it for 10 s, and nothing is left.
func TestSilentPeer(t *testing.T) {
	for _, tt := range []struct {
		name  string
		phase Phase
		dial  func(t *testing.T, ms *mesh) loop.Conn
	}{
		{"FP-02 no TLS", PhaseHandshake, func(*testing.T, *mesh) loop.Conn { a, _ := loop.Pipe(); return a }},
		{"FP-02 no HTTP/2", PhaseHTTP2, func(t *testing.T, ms *mesh) loop.Conn {
			a, b := loop.Pipe()
			ms.m.Group().Go(context.Background(), func(ctx context.Context) {
				cfg, _ := ms.server.cfg.TLS(ctx)
				l, err := handshake(ctx, ms.m.Group(), b, nil, cfg, true)
				if err != nil {
					t.Errorf("handshake: %v", err)
					return
				}
				_ = l // says nothing, ever
			})
			return a
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var ms *mesh
			ms = newMesh(t, meshConfig{pool: PoolConfig{Dialer: dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
				return tt.dial(t, ms), nil
			})}})
			before := ms.m.Group().Stats()
			began := ms.m.Group().Now()
			_, err := ms.open()
			var oe *OpenError
			if !errors.As(err, &oe) || oe.Phase != tt.phase || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Open = %v, want the limit of the %v", err, tt.phase)
			}
			if took := ms.m.Group().Now().Sub(began); took != 10*time.Second {
				t.Errorf("it took %v, want 10 s for TLS and HTTP/2 together", took)
			}
			ms.m.Advance(maxBackoff + lingerTime)
			if got := ms.m.Group().Stats(); got != before || ms.pool.Stats() != (PoolStats{}) {
				t.Errorf("left: %+v, pool %+v; want %+v and nothing", got, ms.pool.Stats(), before)
			}
		})
	}
}
