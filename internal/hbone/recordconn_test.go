//go:build linux

package hbone

import (
	"bytes"
	"context"
	"crypto/fips140"
	"crypto/tls"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
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
