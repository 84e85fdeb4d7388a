//go:build linux

package hbone

import (
	"bytes"
	"context"
	"crypto/fips140"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"
)

// overTLS echoes through a tunnel whose ends speak at most a version, and returns what its client's records are.
func overTLS(t *testing.T, version uint16) recordLayer {
	t.Helper()
	tm := newThreadMesh(t, handlerFunc(echoHandler))
	p := newPKI(t)
	client, server := p.clientTLS(client1.String()), p.serverTLS(server1.String())
	client.MinVersion, server.MinVersion = version, version
	client.MaxVersion, server.MaxVersion = version, version
	tm.pool.cfg.TLS, tm.server.cfg.TLS = clientFrom(client), serverFrom(server)
	s := tm.open(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	conn := s.Ref().Blocking(ctx, s)
	defer conn.Close()
	text := pattern(5 << 20)
	go func() {
		_, _ = conn.Write(text)
		_ = conn.CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, text) {
		t.Errorf("%d bytes come back, %v", len(got), err)
	}
	st, _ := s.(*stream)
	return st.t.link.records
}

// Where the own records cannot be, or must not, crypto/tls makes them.
func TestTunnelOverCryptoTLS(t *testing.T) {
	if l := overTLS(t, tls.VersionTLS12); !isA[*tlsLayer](l) {
		t.Errorf("TLS 1.2 has %T", l)
	}
	switch l := overTLS(t, tls.VersionTLS13); {
	case fips140.Enabled() && !isA[*tlsLayer](l):
		t.Errorf("FIPS 140 mode has %T", l)
	case !fips140.Enabled() && !isA[*gcmLayer](l):
		t.Errorf("TLS 1.3 has %T", l)
	}
}

// An earlyConn is the peer's side of a handshake: what it sends last has records of the application directly behind it.
type earlyConn struct {
	net.Conn
	keys   *secrets
	server bool
	behind func(g *gcmLayer) []byte
	cut    int // pieces of up to so many bytes; 0: whole
	g      *gcmLayer
}

func (c *earlyConn) Write(p []byte) (int, error) {
	all := p
	if c.keys.server != nil && c.g == nil {
		in, out := c.keys.server, c.keys.client
		if c.server {
			in, out = out, in
		}
		var err error
		if c.g, err = newGCMLayer(suites[tls.TLS_AES_128_GCM_SHA256], in, out, c.server); err != nil {
			return 0, err
		}
		all = append(bytes.Clone(p), c.behind(c.g)...)
	}
	for len(all) > 0 {
		n := len(all)
		if c.cut > 0 {
			n = min(n, 1+rand.IntN(c.cut))
		}
		if _, err := c.Conn.Write(all[:n]); err != nil {
			return 0, err
		}
		all = all[n:]
	}
	return len(p), nil
}

// Nothing is lost or doubled where crypto/tls ends and the records begin, whatever arrives with the end of the handshake.
func TestRecordsBehindTheHandshake(t *testing.T) {
	if fips140.Enabled() {
		t.Skip("FIPS 140 mode: crypto/tls goes on")
	}
	g := runGroup(t)
	p := newPKI(t)
	scratch := make([]byte, bufferSize)
	for _, server := range []bool{false, true} { // who is tried
		for _, cut := range []int{0, 1, 700, 5000} {
			for _, size := range []int{10, 3000, 40_000} {
				t.Run(fmt.Sprintf("server=%t/cut=%d/size=%d", server, cut, size), func(t *testing.T) {
					a, b := tcpPair(t)
					defer a.Close()
					_ = a.SetDeadline(time.Now().Add(10 * time.Second))
					mine, theirs := p.clientTLS(client1.String()), p.serverTLS(server1.String())
					if server {
						mine, theirs = theirs, mine
					}
					text := pattern(size)
					e := &earlyConn{Conn: a, keys: new(secrets), server: !server, cut: cut, behind: func(g *gcmLayer) (all []byte) {
						if g.server {
							all = g.record(all, contentHandshake, append([]byte{messageTicket, 0, 1, 0}, make([]byte, 256)...))
						}
						all = append(all, mustSeal(t, g, text)...)
						all = g.record(all, contentHandshake, []byte{messageKeyUpdate, 0, 0, 1, 1})
						_ = g.out.next()
						return g.closing(append(all, mustSeal(t, g, []byte("the end"))...))
					}}
					theirs.KeyLogWriter, theirs.SessionTicketsDisabled = e.keys, true
					peer := tls.Client(e, theirs)
					if !server {
						peer = tls.Server(e, theirs)
					}
					shaken := make(chan error, 1)
					go func() { shaken <- peer.HandshakeContext(t.Context()) }()
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					defer cancel()
					sock := newSock(t, b)
					l, err := handshake(ctx, g, sock, nil, mine, server)
					if err != nil {
						t.Fatal(err)
					}
					if err := <-shaken; err != nil {
						t.Fatal(err)
					}
					l.buffers = new(buffers)
					var got []byte
					for again := false; err == nil; {
						if again {
							pfd := []unix.PollFd{{Fd: int32(sock.fd), Events: unix.POLLIN}}
							if n, _ := unix.Poll(pfd, 10_000); n == 0 {
								t.Fatal("nothing more arrives")
							}
							sock.readable = true
						}
						var plain []byte
						plain, again, err = l.read(l.buffers.get(), scratch, 64<<10)
						got = append(got, plain...)
						l.buffers.put(plain)
					}
					if err != io.EOF || string(got) != string(text)+"the end" {
						t.Errorf("%d bytes, %v", len(got), err)
					}
					l.finish([]byte("answer"), scratch)
					sent, err := io.ReadAll(a)
					if err != nil {
						t.Fatal(err)
					}
					if answer, _, err := e.g.open(nil, sent); err != io.EOF || string(answer) != "answer" || e.g.in.seq != 2 {
						t.Errorf("back come %q with %d records of the second key, %v", answer, e.g.in.seq, err)
					}
				})
			}
		}
	}
}

// A peer that asks an idle tunnel for another key has its answer, and one that sends what cannot be opened an alert, with either layer.
func TestTunnelOwesTheRecordLayerAnAnswer(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		t.Run(tls.VersionName(version), func(t *testing.T) {
			tm := newThreadMesh(t, handlerFunc(echoHandler))
			p := newPKI(t)
			server := p.serverTLS(server1.String())
			server.MinVersion, server.MaxVersion = version, version
			tm.server.cfg.TLS = serverFrom(server)
			a, b := tcpPair(t)
			defer a.Close()
			_ = a.SetDeadline(time.Now().Add(10 * time.Second))
			tm.server.Serve(newSock(t, b))
			client := p.clientTLS(client1.String())
			client.MinVersion = version
			if version == tls.VersionTLS13 && !fips140.Enabled() {
				c := &layerConn{t: t, conn: a, g: ownLayer(t, a, client, false)}
				c.write([]byte(http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00")) // and SETTINGS
				c.readAll(1)
				before := c.g.in.secret
				if _, err := a.Write(c.g.record(nil, contentHandshake, []byte{messageKeyUpdate, 0, 0, 1, 1})); err != nil {
					t.Fatal(err)
				}
				if err := c.g.out.next(); err != nil {
					t.Fatal(err)
				}
				for bytes.Equal(before, c.g.in.secret) {
					if _, err := c.readOnce(); err != nil {
						t.Fatal(err)
					}
				}
				_, _ = a.Write([]byte{contentApplication, 3, 3, 0, 20, 19: 0, 24: 0})
				var err error
				for err == nil {
					_, err = c.readOnce()
				}
				var alert tls.AlertError
				if !errors.As(err, &alert) || alert != alertBadRecordMAC {
					t.Errorf("the peer hears %v, want an alert", err)
				}
				return
			}
			tc := tls.Client(a, client)
			if err := tc.HandshakeContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := a.Write(append([]byte{contentApplication, 3, 3, 0, 40}, make([]byte, 40)...)); err != nil {
				t.Fatal(err)
			}
			_, err := io.ReadAll(tc)
			if err == nil || !strings.Contains(err.Error(), "bad record MAC") {
				t.Errorf("the peer hears %v, want an alert", err)
			}
		})
	}
}

func isA[T any](x any) bool {
	_, ok := x.(T)
	return ok
}

// In FIPS 140 mode all of TLS stays inside Go's module.
func TestTunnelInFIPSMode(t *testing.T) {
	if fips140.Enabled() {
		t.Skip("this is the child")
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestTunnelOverCryptoTLS$", "-test.v") //nolint:gosec // itself
	cmd.Env = append(os.Environ(), "GODEBUG=fips140=on")
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestTunnelOverCryptoTLS")) {
		t.Errorf("%v:\n%s", err, out)
	}
}
