package interop

import (
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"istio.io/istio/pkg/hbone"
	istiolog "istio.io/istio/pkg/log"

	"ztun.dev/ztun/internal/workload"
)

func quietIstio() {
	if s := istiolog.FindScope("hbone"); s != nil {
		s.SetOutputLevel(istiolog.NoneLevel)
	}
}

// TestIstioServer: our Pool opens streams on istio's pkg/hbone server.
func TestIstioServer(t *testing.T) {
	quietIstio()
	m := newMesh(t)
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
	a := newApp(t)
	r := toPeer(m, a)
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
		// Its relay takes every end for a clean one, as ztunnel's does: nothing that we send can make it reset, and the END_STREAM
		// that it sends for a reset is what it says.
		resetByOursName: func(t *testing.T, r *route) {
			p := r.open(t)
			defer p.close()
			greet(t, p)
			if err := p.ours.Reset(); err != nil {
				t.Fatal(err)
			}
			if n, err := ending(p.theirs); n > 0 || err != io.EOF {
				t.Errorf("theirs ends after %d bytes with %v, want the end that istio makes of a reset", n, err)
			}
		},
		resetByTheirsName: func(t *testing.T, r *route) {
			p := r.open(t)
			defer p.close()
			greet(t, p)
			p.reset(t)
			if n, err := ending(p.ours); n > 0 || err != io.EOF {
				t.Errorf("ours ends after %d bytes with %v, want the end that istio makes of a reset", n, err)
			}
		},
	}
	r.run(t)
}

// A pipeEnd is what istio's client gives its user: a net.Pipe, which has no half-close.
type pipeEnd struct{ net.Conn }

func (pipeEnd) CloseWrite() error { return errors.ErrUnsupported }

// TestIstioClient: istio's pkg/hbone client opens streams on our Server.
func TestIstioClient(t *testing.T) {
	quietIstio()
	m := newMesh(t)
	cfg, err := m.ids.Client(peerID)(t.Context(), []workload.Identity{ztunID})
	if err != nil {
		t.Fatal(err)
	}
	d := hbone.NewDialer(hbone.Config{ProxyAddress: ztunAddr.String(), TLS: cfg})
	r := &route{ends: theirsClose, open: func(t *testing.T) pair {
		t.Helper()
		c, err := d.Dial("tcp", "10.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		s, _ := m.accepted(t)
		return pair{view(t, s), pipeEnd{c}}
	}}
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
		// A reset reads as an end from its pipe.
		resetByOursName: func(t *testing.T, r *route) {
			p := r.open(t)
			defer p.close()
			greet(t, p)
			if err := p.ours.Reset(); err != nil {
				t.Fatal(err)
			}
			if n, err := ending(p.theirs); n > 0 || err != io.EOF {
				t.Errorf("theirs ends after %d bytes with %v, want the end that istio makes of a reset", n, err)
			}
		},
		resetByTheirsName: nil, // a pipe has none
	}
	r.run(t)
}
