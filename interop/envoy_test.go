package interop

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"text/template"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// envoyBinary names the environment variable with the path of Envoy.
const envoyBinary = "ZTUN_ENVOY"

// envoyBrief is where Envoy takes tunnels that it sends a GOAWAY after half a second.
var envoyBrief = netip.MustParseAddrPort("127.0.0.4:15008")

// Where else Envoy listens.
const (
	envoyApps  = "127.0.0.1:7001" // each connection becomes a CONNECT to ztun
	envoyAdmin = "127.0.0.1:9901"
)

// startEnvoy runs Envoy as a waypoint until the end of the test.
func startEnvoy(t *testing.T, m *mesh) *program {
	t.Helper()
	path := os.Getenv(envoyBinary)
	if path == "" {
		t.Fatalf("%s does not say where Envoy is: run this by `make interop`, which fetches it", envoyBinary)
	}
	text, err := os.ReadFile("testdata/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := template.New("envoy").Option("missingkey=error").Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	cert, key, root := m.peerFiles(t)
	var cfg bytes.Buffer
	if err := tmpl.Execute(&cfg, map[string]any{
		"Cert": cert, "Key": key, "Root": root, "Ztun": ztunID.String(),
		"Inbound": []map[string]string{{"Address": peerAddr.Addr().String(), "Life": ""}, {"Address": envoyBrief.Addr().String(), "Life": "0.5s"}},
	}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(file, cfg.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, path, "-c", file, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get("http://" + envoyAdmin + "/ready")
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				http.DefaultClient.CloseIdleConnections()
				return p
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("Envoy does not become ready: %v", errors.Join(err))
		}
	}
}

// TestEnvoyServer: Envoy terminates the CONNECTs that our Pool opens.
func TestEnvoyServer(t *testing.T) {
	withAges(t, testEnvoyServer)
}

func testEnvoyServer(t *testing.T, m *mesh) {
	startEnvoy(t, m)
	a := newApp(t)
	r := toPeer(m, peerAddr, a)
	// An application that ends first ends the tunnel: Envoy sends END_STREAM and RST_STREAM(NO_ERROR) and takes nothing more, or, if
	// its codec has not written all, drops the rest with RST_STREAM(INTERNAL_ERROR) (envoyproxy/envoy pull request 47378).
	r.ends = oursEndFirst
	r.instead = map[string]func(t *testing.T, r *route){
		theirsFirstName: func(t *testing.T, r *route) {
			for _, size := range []int{100, medium, large} {
				p := r.open(t)
				defer p.close()
				banner := pattern(size, 1)
				sent := make(chan error)
				go func() { sent <- sendAll(p.theirs, banner) }()
				got, err := io.ReadAll(p.ours)
				switch {
				case err == nil && bytes.Equal(got, banner):
				case errors.Is(err, loop.ErrReset) && bytes.HasPrefix(banner, got):
					t.Logf("%d of %d bytes, then a reset", len(got), size)
				default:
					t.Errorf("%d of %d bytes and %v, want all of them or a reset", len(got), size, err)
				}
				if err := <-sent; err != nil {
					t.Error(err)
				}
			}
		},
		// It closes the application's connection, without a reset.
		resetByOursName: func(t *testing.T, r *route) {
			p := r.open(t)
			defer p.close()
			greet(t, p)
			if err := p.ours.Reset(); err != nil {
				t.Fatal(err)
			}
			if n, err := ending(p.theirs); n > 0 || err != io.EOF {
				t.Errorf("theirs ends after %d bytes with %v, want the end that Envoy makes of a reset", n, err)
			}
		},
	}
	r.run(t)
	t.Run("refused", func(t *testing.T) { refused(t, m, peerAddr) })
	t.Run("goes away", func(t *testing.T) {
		brief := toPeer(m, envoyBrief, a)
		brief.ends = oursEndFirst
		goesAway(t, m, brief, func() {}) // by itself
	})
}

// TestEnvoyClient: Envoy opens CONNECTs on our Server.
func TestEnvoyClient(t *testing.T) {
	withAges(t, func(t *testing.T, m *mesh) {
		startEnvoy(t, m)
		m.baggage = "service.name=envoy"
		r := fromPeer(m, envoyApps)
		r.run(t)
		t.Run("rejected", func(t *testing.T) { rejected(t, m, r, envoyApps) })
		t.Run("drained", func(t *testing.T) { drained(t, m, r, func() (net.Conn, error) { return net.Dial("tcp", envoyApps) }) })
	})
}
