package interop

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"text/template"
	"time"
)

// envoyBinary names the environment variable with the path of Envoy.
const envoyBinary = "ZTUN_ENVOY"

// Where Envoy listens beside its port for tunnels.
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
	if err := tmpl.Execute(&cfg, map[string]string{"Cert": cert, "Key": key, "Root": root, "Ztun": ztunID.String()}); err != nil {
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
	m := newMesh(t)
	startEnvoy(t, m)
	toPeer(m, newApp(t)).run(t)
}

// TestEnvoyClient: Envoy opens CONNECTs on our Server.
func TestEnvoyClient(t *testing.T) {
	m := newMesh(t)
	startEnvoy(t, m)
	fromPeer(m, envoyApps).run(t)
}
