package interop

import (
	"bufio"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// A program is a peer in another process.
type program struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines *bufio.Scanner // of its stdout
}

// start runs a program until the end of the test.
func start(t *testing.T, name string, args ...string) *program {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%v: run this by `make interop`, which says what is missing", err)
	}
	p := &program{cmd: exec.Command(path, args...)}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd.Stderr = os.Stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.lines = bufio.NewScanner(stdout)
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
	return p
}

// await waits for a line.
func (p *program) await(t *testing.T, want string) {
	t.Helper()
	for p.lines.Scan() {
		if strings.Contains(p.lines.Text(), want) {
			return
		}
	}
	t.Fatalf("%s ended without saying %q", p.cmd.Path, want)
}

func startNode(t *testing.T, m *mesh, args ...string) *program {
	t.Helper()
	cert, key, root := m.peerFiles(t)
	p := start(t, "node", append([]string{"testdata/peer.mjs", cert, key, root}, args...)...)
	p.await(t, "ready")
	return p
}

// TestNodeServer: our Pool opens streams on Node's http2 server.
func TestNodeServer(t *testing.T) {
	withAges(t, func(t *testing.T, m *mesh) {
		node := startNode(t, m, "server", peerAddr.Addr().String(), "15008")
		a := newApp(t)
		r := toPeer(m, peerAddr, a)
		r.run(t)
		t.Run("refused", func(t *testing.T) { refused(t, m, peerAddr) })
		t.Run("goes away", func(t *testing.T) {
			goesAway(t, m, r, func() {
				if _, err := io.WriteString(node.stdin, "drain\n"); err != nil {
					t.Fatal(err)
				}
			})
		})
	})
}

// TestNodeClient: Node's http2 client opens streams on our Server.
func TestNodeClient(t *testing.T) {
	withAges(t, func(t *testing.T, m *mesh) {
		m.baggage = "service.name=node"
		const apps = "127.0.0.1:7001"
		startNode(t, m, "client", "127.0.0.1", "7001", "https://"+ztunAddr.String(), authority)
		r := fromPeer(m, apps)
		r.run(t)
		t.Run("rejected", func(t *testing.T) { rejected(t, m, r, apps) })
		t.Run("drained", func(t *testing.T) { drained(t, m, r, func() (net.Conn, error) { return net.Dial("tcp", apps) }) })
	})
}
