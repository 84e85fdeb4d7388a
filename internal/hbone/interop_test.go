//go:build linux

package hbone

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"ztun.dev/ztun/internal/loop"
)

// TestInteropClient: the HTTP/2 client of golang.org/x/net opens streams on our Server.
func TestInteropClient(t *testing.T) {
	tm := newThreadMesh(t, handlerFunc(func(ctx context.Context, r *Request) {
		switch r.Authority {
		case "denied:1":
			r.Reject(401, "policy")
		case "reset:1":
			_ = r.Accept(Headers{}, func(s Stream) { _ = s.Reset() })
		default:
			echoHandler(ctx, r)
		}
	}))
	p := newPKI(t)
	tm.server.cfg.TLS = serverFrom(p.serverTLS(server1.String()))
	a, b := tcpPair(t)
	tm.server.Serve(newSock(t, b))
	tc := tls.Client(a, p.clientTLS(client1.String()))
	tr := &http2.Transport{DisableCompression: true} //nolint:staticcheck // the deprecated layer is the peer that is wanted
	cc, err := tr.NewClientConn(tc)                  //nolint:staticcheck // the deprecated layer is the peer that is wanted
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cc.Close() }()

	connect := func(authority string, body io.ReadCloser) (*http.Response, error) {
		req := &http.Request{
			Method: http.MethodConnect, URL: &url.URL{Scheme: "https", Host: authority}, Host: authority,
			Header: http.Header{"User-Agent": {""}, "Baggage": {"a=b"}}, Body: body, ContentLength: -1,
		}
		return cc.RoundTrip(req)
	}
	const size = 5 << 20
	pr, pw := io.Pipe()
	go func() {
		_, _ = pw.Write(pattern(size))
		_ = pw.Close()
	}()
	resp, err := connect("10.0.0.1:80", pr)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	if err != nil || string(got) != string(pattern(size)) {
		t.Errorf("%d bytes came back, %v; want %d", len(got), err, size)
	}
	if resp.StatusCode != 200 || resp.Header.Get("baggage") != "k8s.namespace.name=shop" {
		t.Errorf("response %d %v", resp.StatusCode, resp.Header)
	}
	_ = resp.Body.Close()

	resp, err = connect("denied:1", http.NoBody)
	if err != nil || resp.StatusCode != 401 || resp.Header.Get("x-ztun-reason") != "policy" {
		t.Errorf("denied: %v, %v", resp, err)
	}
	pr, pw = io.Pipe()
	defer func() { _ = pw.Close() }()
	resp, err = connect("reset:1", pr)
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	var se http2.StreamError
	if !errors.As(err, &se) || se.Code != http2.ErrCodeCancel {
		t.Errorf("reset: %v, want CANCEL", err)
	}
}

// TestInteropServer: our Pool opens streams on the HTTP/2 server of golang.org/x/net.
func TestInteropServer(t *testing.T) {
	tm := newThreadMesh(t, handlerFunc(echoHandler))
	p := newPKI(t)
	served := make(chan struct{}, 1)
	serve := func(c net.Conn) {
		defer func() { served <- struct{}{} }()
		tc := tls.Server(c, p.serverTLS(server1.String()))
		if err := tc.Handshake(); err != nil { //nolint:noctx // in a test
			t.Error(err)
			return
		}
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodConnect || strings.HasPrefix(r.Host, "denied") {
				w.Header().Set("x-ztun-reason", "policy")
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			if strings.HasPrefix(r.Host, "abort") {
				panic(http.ErrAbortHandler)
			}
			buf := make([]byte, 32<<10)
			for {
				n, err := r.Body.Read(buf)
				if _, werr := w.Write(buf[:n]); err != nil || werr != nil {
					return
				}
				_ = http.NewResponseController(w).Flush()
			}
		})
		(&http2.Server{}).ServeConn(tc, &http2.ServeConnOpts{Handler: handler}) //nolint:staticcheck // the deprecated layer is the peer that is wanted
	}
	pool, err := NewPool(PoolConfig{Group: tm.group, TLS: clientFrom(p.clientTLS(client1.String())), Dialer: dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
		a, b := tcpPair(t)
		go serve(b)
		return newSock(t, a), nil
	})})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()

	const size = 3 << 20
	s, err := pool.Open(ctx, tm.target)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{}, 1)
	x := &exchange{s: s, left: pattern(size), done: func() { done <- struct{}{} }}
	s.Ref().Post(x.start)
	select {
	case <-done:
	case <-ctx.Done():
		t.Fatal("stuck")
	}
	if x.err != io.EOF || string(x.got) != string(pattern(size)) {
		t.Errorf("%d bytes came back, then %v; want %d and the end", len(x.got), x.err, size)
	}

	target := tm.target
	target.Authority = "denied:1"
	var status *StatusError
	if _, err := pool.Open(ctx, target); !errors.As(err, &status) || *status != (StatusError{401, "policy"}) {
		t.Errorf("denied: %v", err)
	}
	target.Authority = "abort:1"
	s, err = pool.Open(ctx, target)
	if err != nil {
		t.Fatal(err)
	}
	x = &exchange{s: s, done: func() { done <- struct{}{} }}
	s.Ref().Post(x.start)
	<-done
	if !errors.Is(x.err, loop.ErrReset) {
		t.Errorf("abort: %v, want ErrReset", x.err)
	}
	if err := pool.Close(ctx); err != nil {
		t.Error(err)
	}
	select {
	case <-served:
	case <-ctx.Done():
		t.Error("the connection is still served")
	}
}

// A tunnel that drains ends with its last set-up, also if the stream of that has ended before and the peer waits for us.
func TestDrainedTunnelEndsWithItsLastSetUp(t *testing.T) {
	called, release := make(chan struct{}), make(chan struct{})
	tm := newThreadMesh(t, handlerFunc(func(ctx context.Context, r *Request) {
		_ = loop.Await(context.WithoutCancel(ctx), func(wake func()) {
			close(called)
			go func() { <-release; wake() }()
		})
		_ = r.Accept(Headers{}, func(s Stream) { _ = s.Reset() })
	}))
	p := newPKI(t)
	tm.server.cfg.TLS = serverFrom(p.serverTLS(server1.String()))
	a, b := tcpPair(t)
	defer a.Close()
	_ = a.SetDeadline(time.Now().Add(5 * time.Second)) // before the keepalive looks
	tm.server.Serve(newSock(t, b))
	tc := tls.Client(a, p.clientTLS(client1.String()))
	if _, err := io.WriteString(tc, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	fr := http2.NewFramer(tc, tc)
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range []hpack.HeaderField{{Name: ":method", Value: "CONNECT"}, {Name: ":authority", Value: "10.0.0.1:80"}} {
		if err := enc.WriteField(f); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(fr.WriteSettings(), fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true})); err != nil {
		t.Fatal(err)
	}
	<-called
	tm.server.Drain()
	goAways := 0
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Errorf("the tunnel ends with %v", err)
			}
			break
		}
		switch f := f.(type) {
		case *http2.PingFrame:
			err = fr.WritePing(true, f.Data)
		case *http2.GoAwayFrame:
			if goAways++; goAways == 2 { // the final one
				close(release)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if goAways < 2 {
		t.Errorf("it ended after %d GOAWAY", goAways)
	}
}
