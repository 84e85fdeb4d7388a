//go:build linux

package hbone

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// A far is another network: a gateway, and a peer behind it that is reached through the gateway only. Both are HTTP/2 servers of
// golang.org/x/net, and know nothing of this package.
type far struct {
	t       *testing.T
	pki     *pki
	gateway *tls.Config
	peer    *tls.Config
	serve   http.HandlerFunc // what the peer does with a CONNECT

	served  sync.WaitGroup // all that is below
	mu      sync.Mutex     // guards below
	calls   map[string][]call
	open    map[string]int // connections and requests that are being served, by who does
	outers  []net.Conn     // of the gateway
	peers   []net.Conn     // of the peer
	lastEnd error          // that the peer's application read
}

// A call is a CONNECT as the server saw it.
type call struct {
	Authority string
	Header    http.Header
}

func newFar(t *testing.T) *far {
	f := &far{t: t, pki: newPKI(t), calls: make(map[string][]call), open: make(map[string]int)}
	f.gateway, f.peer = f.pki.serverTLS(gatewayID.String()), f.pki.serverTLS(server1.String())
	f.serve = f.echo
	return f
}

var gatewayID = workload.Identity{TrustDomain: "cluster.local", Namespace: "istio-gateways", ServiceAccount: "eastwest"}

func (f *far) count(who string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open[who] += n
}

// await waits until so many of who are being served.
func (f *far) await(who string, n int) {
	f.t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		got := f.open[who]
		f.mu.Unlock()
		if got == n {
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("%s: %d, want %d", who, got, n)
		}
	}
}

// listen serves one connection as who.
func (f *far) listen(who string, c net.Conn, cfg *tls.Config, h http.HandlerFunc) {
	f.served.Go(func() {
		f.count(who+" connections", 1)
		defer f.count(who+" connections", -1)
		tc := tls.Server(c, cfg)
		if err := tc.Handshake(); err != nil { //nolint:noctx // in a test
			// Closed with bytes unread, the connection would be reset, which may overtake the alert.
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
			return
		}
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			f.count(who+" requests", 1)
			defer f.count(who+" requests", -1)
			f.mu.Lock()
			f.calls[who] = append(f.calls[who], call{r.Method + " " + r.Host, r.Header.Clone()})
			f.mu.Unlock()
			h(w, r)
		})
		(&http2.Server{}).ServeConn(tc, &http2.ServeConnOpts{Handler: handler}) //nolint:staticcheck // the deprecated layer is the peer that is wanted
		_ = c.Close()
	})
}

// dial is the way to the gateway.
func (f *far) dial(context.Context, netip.AddrPort) (loop.Conn, error) {
	a, b := tcpPair(f.t)
	f.mu.Lock()
	f.outers = append(f.outers, b)
	f.mu.Unlock()
	f.listen("gateway", b, f.gateway, f.forward)
	return newSock(f.t, a), nil
}

// forward is what a gateway does: whatever the stream carries goes to the peer, and back.
func (f *far) forward(w http.ResponseWriter, r *http.Request) {
	switch r.Host {
	case "refused.example:80":
		w.Header().Set("x-ztun-reason", "no such host")
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	case "garbage.example:80":
		w.WriteHeader(http.StatusOK)
		_, _ = io.WriteString(w, "this is not TLS, as one sees")
		return
	}
	if r.Host == "mute.example:80" {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		_, _ = io.Copy(io.Discard, r.Body)
		return
	}
	toPeer, peer := tcpPair(f.t)
	f.mu.Lock()
	f.peers = append(f.peers, peer)
	f.mu.Unlock()
	f.listen("peer", peer, f.peer, f.serve)
	defer func() { _ = toPeer.Close() }()
	w.WriteHeader(http.StatusOK)
	control := http.NewResponseController(w)
	_ = control.Flush()
	f.served.Go(func() {
		_, _ = io.Copy(toPeer, r.Body)
		_ = toPeer.(*net.TCPConn).CloseWrite()
	})
	buf := make([]byte, 64<<10)
	for {
		n, err := toPeer.Read(buf)
		if err != nil && err != io.EOF {
			panic(http.ErrAbortHandler) // becomes RST_STREAM
		}
		if _, werr := w.Write(buf[:n]); err != nil || werr != nil {
			return
		}
		_ = control.Flush()
	}
}

func (f *far) echo(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("baggage", "k8s.deployment.name=echo")
	switch {
	case strings.HasPrefix(r.Host, "denied"):
		w.WriteHeader(http.StatusUnauthorized)
		return
	case strings.HasPrefix(r.Host, "silent"):
		<-r.Context().Done()
		return
	}
	w.WriteHeader(http.StatusOK)
	control := http.NewResponseController(w)
	_ = control.Flush()
	if strings.HasPrefix(r.Host, "abort") {
		panic(http.ErrAbortHandler)
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Body.Read(buf)
		if err != nil {
			f.mu.Lock()
			f.lastEnd = err
			f.mu.Unlock()
		}
		if _, werr := w.Write(buf[:n]); err != nil || werr != nil {
			return
		}
		_ = control.Flush()
	}
}

// pool is one whose tunnels lead to the gateway.
func (f *far) pool(change func(*PoolConfig)) *Pool {
	f.t.Helper()
	cfg := PoolConfig{Group: runGroup(f.t), TLS: clientFrom(f.pki.clientTLS(client1.String())), Dialer: dialFunc(f.dial), ExtraTunnels: -1}
	if change != nil {
		change(&cfg)
	}
	p, err := NewPool(cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		gone, stop := context.WithCancel(context.Background())
		stop()
		_ = p.Close(gone)
		f.served.Wait()
	})
	return p
}

func (f *far) targets(authority string) (gateway, target Target) {
	h := Headers{Baggage: "k8s.namespace.name=shop", Forwarded: `for="10.0.0.7:40000";host=echo.example`, Traceparent: "00-1-2-00"}
	gateway = Target{NextHop: netip.MustParseAddrPort("10.22.1.1:15009"), Authority: authority, Accept: []workload.Identity{gatewayID}, Headers: h}
	target = Target{Authority: authority, Accept: []workload.Identity{server1}, Headers: h}
	target.Headers.ForwardedNetwork, target.Headers.CrossNetwork = "net-a", true
	return gateway, target
}

func (f *far) mustOpen(p *Pool) Stream {
	f.t.Helper()
	gateway, target := f.targets("echo.example:80")
	s, err := p.OpenThrough(f.t.Context(), gateway, target)
	if err != nil {
		f.t.Fatal(err)
	}
	return s
}

// begin starts an exchange, whose end it tells.
func begin(s Stream, p []byte) (*exchange, chan struct{}) {
	done := make(chan struct{})
	x := &exchange{s: s, left: p, done: func() { close(done) }}
	s.Ref().Post(x.start)
	return x, done
}

func awaitEnd(t *testing.T, done chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("stuck")
	}
}

func TestOpenThrough(t *testing.T) {
	f := newFar(t)
	pool := f.pool(nil)
	const size = 2 << 20
	want := pattern(size)
	var streams []Stream
	for range 3 {
		streams = append(streams, f.mustOpen(pool))
	}
	f.await("gateway connections", 1)
	f.await("gateway requests", 3)
	f.await("peer connections", 3)

	t.Run("DP-67 headers of both layers", func(t *testing.T) {
		f.mu.Lock()
		defer f.mu.Unlock()
		common := http.Header{"Baggage": {"k8s.namespace.name=shop"}, "Forwarded": {`for="10.0.0.7:40000";host=echo.example`}, "Traceparent": {"00-1-2-00"}}
		inner := maps.Clone(common)
		inner["X-Forwarded-Network"] = []string{"net-a"}
		for who, header := range map[string]http.Header{"gateway": common, "peer": inner} {
			want := call{"CONNECT echo.example:80", header}
			if diff := cmp.Diff(slices.Repeat([]call{want}, 3), f.calls[who]); diff != "" {
				t.Errorf("%s (-want +got):\n%s", who, diff)
			}
		}
	})
	t.Run("who answers is told", func(t *testing.T) {
		for _, s := range streams {
			if s.Peer() != server1 || s.Response().Baggage != "k8s.deployment.name=echo" {
				t.Errorf("peer %v, response %+v", s.Peer(), s.Response())
			}
		}
	})
	t.Run("bytes and ends", func(t *testing.T) {
		var xs []*exchange
		var ends []chan struct{}
		for _, s := range streams[:2] {
			x, done := begin(s, want)
			xs, ends = append(xs, x), append(ends, done)
		}
		for i, done := range ends {
			awaitEnd(t, done)
			if x := xs[i]; x.err != io.EOF || string(x.got) != string(want) {
				t.Errorf("%d bytes came back, then %v; want the %d that were sent, and the end", len(x.got), x.err, size)
			}
		}
	})
	t.Run("the inner tunnel ends with its stream, the outer one stays", func(t *testing.T) {
		f.await("peer connections", 1)
		f.await("gateway requests", 1)
		f.await("gateway connections", 1)
		for end := time.Now().Add(10 * time.Second); pool.Stats().Streams != 1; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("pool: %+v, want one stream", pool.Stats())
			}
		}
		again := f.mustOpen(pool)
		f.await("peer connections", 2)
		f.await("gateway connections", 1)
		again.Ref().Post(func() { _ = again.Close() })
		f.await("peer connections", 1)
	})
	t.Run("a reset goes on to the peer", func(t *testing.T) {
		f.await("peer requests", 1)
		streams[2].Ref().Post(func() { _ = streams[2].Reset() })
		f.await("peer requests", 0)
		f.await("peer connections", 0)
		f.await("gateway requests", 0)
		f.mu.Lock()
		defer f.mu.Unlock()
		if se, ok := errors.AsType[http2.StreamError](f.lastEnd); !ok || se.Code != http2.ErrCodeCancel {
			t.Errorf("the peer's application read %v, want a reset with CANCEL", f.lastEnd)
		}
	})
}

// TestOpenThroughResets: whichever part breaks, the application is told of a reset, never of an end.
func TestOpenThroughResets(t *testing.T) {
	for _, tt := range []struct {
		name, authority string
		cut             func(f *far)
	}{
		{"the peer resets the stream", "abort.example:80", func(*far) {}},
		{"the connection to the gateway is lost", "echo.example:80", func(f *far) {
			f.mu.Lock()
			defer f.mu.Unlock()
			_ = f.outers[0].Close()
		}},
		{"the gateway resets its stream", "echo.example:80", func(f *far) {
			f.mu.Lock()
			defer f.mu.Unlock()
			_ = f.peers[0].(*net.TCPConn).SetLinger(0)
			_ = f.peers[0].Close()
		}},
		{"the gateway ends its stream in the midst of the inner one", "echo.example:80", func(f *far) {
			f.mu.Lock()
			defer f.mu.Unlock()
			_ = f.peers[0].(*net.TCPConn).CloseWrite()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFar(t)
			pool := f.pool(nil)
			gateway, target := f.targets(tt.authority)
			s, err := pool.OpenThrough(t.Context(), gateway, target)
			if err != nil {
				t.Fatal(err)
			}
			x, done := begin(s, nil)
			tt.cut(f)
			awaitEnd(t, done)
			if !errors.Is(x.err, loop.ErrReset) {
				t.Errorf("the application reads %v, want a reset", x.err)
			}
			f.await("peer requests", 0)
			f.await("gateway requests", 0)
		})
	}
}

func TestOpenThroughFails(t *testing.T) {
	someone := workload.Identity{TrustDomain: "cluster.local", Namespace: "a", ServiceAccount: "someone"}
	tests := []struct {
		name      string
		authority string
		change    func(f *far, gateway, target *Target)
		phase     Phase
		inner     bool
		is        error
		status    *StatusError
	}{
		{"the gateway is somebody else", "echo.example:80", func(f *far, g, _ *Target) { g.Accept = []workload.Identity{server1} }, PhaseHandshake, false, ErrUnknownPeer, nil},
		{"the gateway refuses", "refused.example:80", nil, PhaseResponse, false, nil, &StatusError{503, "no such host"}},
		{"DP-68 the peer is somebody else", "echo.example:80", func(f *far, _, _ *Target) { f.peer = f.pki.serverTLS(someone.String()) }, PhaseHandshake, true, ErrUnknownPeer, nil},
		{"DP-68 a service without names", "echo.example:80", func(_ *far, _, t *Target) { t.Accept = nil }, PhaseHandshake, true, ErrUnknownPeer, nil},
		{"the gateway's identity is not the peer's", "echo.example:80", func(f *far, _, _ *Target) { f.peer = f.gateway }, PhaseHandshake, true, ErrUnknownPeer, nil},
		{"no TLS beyond the gateway", "garbage.example:80", nil, PhaseHandshake, true, nil, nil},
		{"silence beyond the gateway", "mute.example:80", nil, PhaseHandshake, true, context.DeadlineExceeded, nil},
		{"a peer of another root", "echo.example:80", func(f *far, _, _ *Target) { f.peer = newPKI(f.t).serverTLS(server1.String()) }, PhaseHandshake, true, nil, nil},
		{"the peer refuses our certificate", "echo.example:80", func(f *far, _, _ *Target) {
			f.peer = f.peer.Clone()
			f.peer.ClientCAs = newPKI(f.t).serverTLS(server1.String()).ClientCAs
		}, PhaseHandshake, true, nil, nil},
		{"the peer denies", "denied.example:80", nil, PhaseResponse, true, nil, &StatusError{401, ""}},
		{"the peer does not answer", "silent.example:80", nil, PhaseResponse, true, context.DeadlineExceeded, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFar(t)
			gateway, target := f.targets(tt.authority)
			if tt.change != nil {
				tt.change(f, &gateway, &target)
			}
			pool := f.pool(func(c *PoolConfig) { c.HandshakeTimeout, c.ResponseTimeout = 2*time.Second, 2*time.Second })
			s, err := pool.OpenThrough(t.Context(), gateway, target)
			if err == nil {
				s.Ref().Post(func() { _ = s.Reset() })
				t.Fatal("it was opened")
			}
			open, ok := errors.AsType[*OpenError](err)
			if !ok || open.Phase != tt.phase || open.NextHop != gateway.NextHop {
				t.Fatalf("%v, want an OpenError of the %v", err, tt.phase)
			}
			if _, inner := errors.AsType[*InnerError](err); inner != tt.inner {
				t.Errorf("%v: beyond the gateway: %v, want %v", err, inner, tt.inner)
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("%v, want %v", err, tt.is)
			}
			if status, _ := errors.AsType[*StatusError](err); (status == nil) != (tt.status == nil) || status != nil && *status != *tt.status {
				t.Errorf("%v, want %v", err, tt.status)
			}
			// Nothing is left of it but the tunnel to the gateway.
			f.await("peer connections", 0)
			f.await("gateway requests", 0)
			for end := time.Now().Add(10 * time.Second); pool.Stats().Streams != 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("pool: %+v, want no stream", pool.Stats())
				}
			}
		})
	}
}

// TestOpenThroughGivenUp: who no longer wants the stream leaves nothing behind, wherever it was.
func TestOpenThroughGivenUp(t *testing.T) {
	for _, tt := range []struct{ authority, who string }{{"mute.example:80", "gateway requests"}, {"silent.example:80", "peer requests"}} {
		t.Run("while it waits for the end of "+tt.who, func(t *testing.T) {
			f := newFar(t)
			pool := f.pool(nil)
			ctx, cancel := context.WithCancelCause(t.Context())
			enough := errors.New("enough")
			f.served.Go(func() {
				for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
					f.mu.Lock()
					there := f.open[tt.who]
					f.mu.Unlock()
					if there > 0 {
						break
					}
				}
				cancel(enough)
			})
			gateway, target := f.targets(tt.authority)
			if _, err := pool.OpenThrough(ctx, gateway, target); !errors.Is(err, enough) {
				t.Errorf("OpenThrough = %v, want why it was given up", err)
			}
			f.await("peer connections", 0)
			f.await("gateway requests", 0)
			f.await("gateway connections", 1)
		})
	}
}
