package interop

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"istio.io/istio/pkg/hbone"
	istiolog "istio.io/istio/pkg/log"

	ztun "ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/workload"
)

func quietIstio() {
	if s := istiolog.FindScope("hbone"); s != nil {
		s.SetOutputLevel(istiolog.NoneLevel)
	}
}

// Istio's relay takes every end for a clean one, as ztunnel's does: what we reset ends for its user, …
func istioEndsOurs(t *testing.T, r *route) {
	p := r.open(t)
	defer p.close()
	greet(t, p)
	if err := p.ours.Reset(); err != nil {
		t.Fatal(err)
	}
	if n, err := ending(p.theirs); n > 0 || err != io.EOF {
		t.Errorf("theirs ends after %d bytes with %v, want the end that istio makes of a reset", n, err)
	}
}

// … and for a reset of its user's it sends an END_STREAM.
func istioEndsTheirs(t *testing.T, r *route) {
	p := r.open(t)
	defer p.close()
	greet(t, p)
	p.reset(t)
	if n, err := ending(p.ours); n > 0 || err != io.EOF {
		t.Errorf("ours ends after %d bytes with %v, want the end that istio makes of a reset", n, err)
	}
}

// istioServer serves istio's pkg/hbone until the end of the test.
func istioServer(t *testing.T, m *mesh) *http.Server {
	t.Helper()
	cfg, err := m.ids.Server(peerID)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	srv := hbone.NewServer()
	srv.TLSConfig = cfg
	srv.Protocols.SetHTTP2(true)
	ln, err := net.Listen("tcp", peerAddr.String())
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error)
	go func() { served <- srv.ServeTLS(ln, "", "") }()
	t.Cleanup(func() {
		_ = srv.Close()
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return srv
}

// TestIstioServer: our Pool opens streams on istio's pkg/hbone server.
func TestIstioServer(t *testing.T) {
	quietIstio()
	withAges(t, func(t *testing.T, m *mesh) {
		istioServer(t, m)
		r := toPeer(m, peerAddr, newApp(t))
		// net/http sends END_STREAM when the handler returns, not before, and drops what the client sends from then on.
		r.ends = oursEndFirst
		r.instead = map[string]func(t *testing.T, r *route){
			theirsFirstName: func(t *testing.T, r *route) {
				p := r.open(t)
				defer p.close()
				banner := pattern(medium, 1)
				together(t, map[string]func() error{
					"theirs sends":  func() error { return sendAll(p.theirs, banner) },
					"ours receives": func() error { return receiveAll(p.ours, banner) },
				})
			},
			resetByOursName:   istioEndsOurs,
			resetByTheirsName: istioEndsTheirs,
		}
		r.run(t)
	})
}

// TestIstioServerGoesAway: a stream goes on to its end after the GOAWAY, and new ones fail because nobody listens.
func TestIstioServerGoesAway(t *testing.T) {
	quietIstio()
	m := newMesh(t, 0)
	srv := istioServer(t, m)
	a := newApp(t)
	r := toPeer(m, peerAddr, a)
	r.ends = oursEndFirst
	p := r.open(t)
	defer p.close()
	greet(t, p)
	done := make(chan error)
	go func() { done <- srv.Shutdown(context.Background()) }()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		s, err := m.open(peerAddr, a.authority())
		if open, ok := errors.AsType[*ztun.OpenError](err); ok && open.Phase == ztun.PhaseConnect {
			break
		}
		if err != nil {
			t.Fatalf("a stream after the GOAWAY: %v, want a failed connect", err)
		}
		(pair{view(t, s), a.accept(t)}).close() // before the GOAWAY
		if time.Now().After(deadline) {
			t.Fatal("the tunnel goes on to be used")
		}
	}
	r.carry(t, p, pattern(medium, 1), pattern(medium, 2))
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A pipeEnd is what istio's client gives its user: a net.Pipe, which has no half-close.
type pipeEnd struct{ net.Conn }

func (pipeEnd) CloseWrite() error { return errors.ErrUnsupported }

// fromIstio is the route on which istio's client opens a stream.
func fromIstio(t *testing.T, m *mesh) (*route, func() (net.Conn, error)) {
	t.Helper()
	quietIstio()
	cfg, err := m.ids.Client(peerID)(t.Context(), []workload.Identity{ztunID})
	if err != nil {
		t.Fatal(err)
	}
	d := hbone.NewDialer(hbone.Config{ProxyAddress: ztunAddr.String(), TLS: cfg})
	dial := func() (net.Conn, error) {
		c, err := d.Dial("tcp", authority)
		if err == nil {
			err = c.SetDeadline(time.Now().Add(patience))
		}
		return c, err
	}
	return &route{ends: theirsClose, open: func(t *testing.T) pair {
		t.Helper()
		c, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		return pair{view(t, m.accepted(t)), pipeEnd{c}}
	}}, dial
}

// TestIstioClient: istio's pkg/hbone client opens streams on our Server.
func TestIstioClient(t *testing.T) {
	withAges(t, func(t *testing.T, m *mesh) {
		r, dial := fromIstio(t, m)
		r.instead = map[string]func(t *testing.T, r *route){
			oursFirstName: func(t *testing.T, r *route) {
				p := r.open(t)
				defer p.close()
				text := pattern(medium, 1)
				together(t, map[string]func() error{
					"ours sends":      func() error { return sendAll(p.ours, text) },
					"theirs receives": func() error { return receiveAll(p.theirs, text) },
				})
			},
			theirsFirstName: func(t *testing.T, r *route) {
				p := r.open(t)
				defer p.close()
				text := pattern(medium, 1)
				together(t, map[string]func() error{
					"theirs sends":  func() error { return errors.Join(send(p.theirs, text), p.theirs.Close()) },
					"ours receives": func() error { return receiveAll(p.ours, text) },
				})
			},
			resetByOursName:   istioEndsOurs,
			resetByTheirsName: nil, // a pipe has none
		}
		r.run(t)
		t.Run("rejected", func(t *testing.T) {
			m.status.Store(http.StatusUnauthorized)
			defer m.status.Store(0)
			if c, err := dial(); err == nil || !strings.Contains(err.Error(), "401") {
				t.Errorf("a request that we reject: %v, %v, want the status", c, err)
			}
		})
		t.Run("drained", func(t *testing.T) { drained(t, m, r, dial) })
	})
}
