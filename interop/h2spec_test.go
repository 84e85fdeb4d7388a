package interop

import (
	"crypto/tls"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/summerwind/h2spec/client"
	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	"github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"

	"ztun.dev/ztun/internal/hbone"
)

// Reasons for leaving out a case of h2spec, which sends GET and POST only, and no CONNECT.
const (
	noBody   = "needs an answer with a body; ours to a GET is 400, which ends the stream"
	over     = "its request was answered with 400 and a reset, after which frames for the stream are ignored (RFC 9113, section 5.1)"
	priority = "RFC 9113, section 5.3.2, has deprecated dependencies: PRIORITY is read and ignored"
	milder   = "RFC 7540 ended the connection; we reset the stream, because a late frame is no reason to end the others"
)

// excluded has the cases that do not apply, and which case of TestRFC9113 in internal/hbone has the same on a CONNECT.
var excluded = map[string]struct{ reason, instead string }{
	"generic/2/2":     {noBody, "5.1 half-closed: WINDOW_UPDATE"},
	"generic/2/3":     {noBody, "5.1 half-closed: PRIORITY"},
	"http2/5.1.2/1":   {noBody, "5.1.2 too many streams"},
	"http2/5.3.1/1":   {priority, "5.1 idle: PRIORITY"},
	"http2/5.3.1/2":   {priority, "5.1 idle: PRIORITY"},
	"http2/6.5.3/1":   {noBody, "6.5.3 values are taken in order"},
	"http2/6.9/2":     {over, "6.9 increment 0 on a stream"},
	"http2/6.9.1/1":   {noBody, "6.9.1 a window of one byte"},
	"http2/6.9.1/3":   {noBody, "6.9.1 stream window overflows"},
	"http2/6.9.2/1":   {noBody, "6.9.2 SETTINGS open the windows of streams"},
	"http2/6.9.2/2":   {noBody, "6.9.2 SETTINGS make a window negative"},
	"http2/8.1/1":     {over, "8.1 trailers without end"},
	"http2/8.1.2.1/3": {over, "8.1 trailers with a pseudo-header field"},
	"http2/8.1.2.6/1": {over, ""}, // a CONNECT has no content
	"http2/8.1.2.6/2": {over, ""},
	"client/5.1/8":    {milder, "5.1 closed: DATA, as client"},
	"client/5.1/9":    {milder, "5.1 closed: HEADERS, as client"},
}

var h2specAddr = netip.MustParseAddrPort("127.0.0.5:15008")

// smallFrames are the protocol's defaults, which some cases take for granted.
var smallFrames = hbone.Settings{FrameSize: 16384}

// TestH2specServer runs h2spec's cases, the strict ones too, against our Server.
func TestH2specServer(t *testing.T) {
	m := newMesh(t, 0)
	m.serve(t, h2specAddr, hbone.ServerConfig{Settings: smallFrames})
	cert, key, _ := m.peerFiles(t)
	cfg := &config.Config{
		Host: h2specAddr.Addr().String(), Port: int(h2specAddr.Port()), Path: "/", Timeout: 2 * time.Second, MaxHeaderLen: 4000, Strict: true,
		TLS: true, Insecure: true, CertFile: cert, CertKeyFile: key,
	}
	for _, g := range []*spec.TestGroup{generic.Spec(), http2.Spec(), hpack.Spec()} {
		h2specServer(t, cfg, g)
	}
}

func h2specServer(t *testing.T, cfg *config.Config, g *spec.TestGroup) {
	for i, tc := range append(g.Tests, g.StrictTests...) {
		id := fmt.Sprintf("%s/%d", g.ID(), i+1)
		if _, ok := excluded[id]; ok {
			continue
		}
		t.Run(id+" "+tc.Desc, func(t *testing.T) {
			conn, err := spec.Dial(cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := tc.Run(cfg, conn); err != nil {
				t.Errorf("%s: %v", tc.Requirement, err)
			}
		})
	}
	for _, sub := range g.Groups {
		h2specServer(t, cfg, sub)
	}
}

// TestH2specClient runs h2spec's cases for clients against a tunnel of our Pool.
func TestH2specClient(t *testing.T) {
	m := newMesh(t, 0)
	tlsConfig, err := m.ids.Server(peerID)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	h2specClient(t, m, tlsConfig, &config.Config{Timeout: 2 * time.Second, MaxHeaderLen: 4000}, client.Spec())
}

func h2specClient(t *testing.T, m *mesh, tlsConfig *tls.Config, cfg *config.Config, g *spec.ClientTestGroup) {
	for _, tc := range g.Tests {
		id := fmt.Sprintf("%s/%d", g.ID(), tc.Seq)
		if _, ok := excluded[id]; ok {
			continue
		}
		t.Run(id+" "+tc.Desc, func(t *testing.T) {
			m.newPool(t, hbone.PoolConfig{Settings: smallFrames})
			ln, err := tls.Listen("tcp", peerAddr.String(), tlsConfig)
			if err != nil {
				t.Fatal(err)
			}
			opened := make(chan hbone.Stream, 1)
			go func() {
				s, err := m.open(peerAddr, authority)
				if err != nil {
					s = nil // as many cases want it
				}
				opened <- s
			}()
			defer func() {
				ln.Close() // with it goes what a second try has brought
				if s := <-opened; s != nil {
					s.Ref().Post(func() { _ = s.Close() })
				}
			}()
			c, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			conn, err := spec.Accept(cfg, c)
			if err != nil {
				t.Fatal(err)
			}
			if err := tc.Run(cfg, conn); err != nil {
				t.Errorf("%s: %v", tc.Requirement, err)
			}
		})
	}
	for _, sub := range g.Groups {
		h2specClient(t, m, tlsConfig, cfg, sub)
	}
}
