package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"ztun.dev/ztun/internal/lab"
)

// The proxy serves until a signal and then ends with 0, with and without the name of its command.
func TestNetnsProxyEndsOnSignals(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
			t.Fatal("ZTUN_REQUIRE_NETNS=1, but this is not root")
		}
		t.Skip("needs root; ZTUN_REQUIRE_NETNS=1 makes this an error")
	}
	l, err := lab.New(t.Context(), lab.Config{Nodes: 1, PodsPerNode: 1, IPv6: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	dir, pod := t.TempDir(), l.Pod(0, 0)
	file := filepath.Join(dir, "node.yaml")
	text := fmt.Sprintf("fakeCa: true\nhandoverSocket: %s\npods: [{netns: %s, name: web, namespace: shop}]\nlocalXds: |\n"+
		"  workloads: [{name: web, namespace: shop, workloadIps: [%q, %q], services: {}}]\n", filepath.Join(dir, "ztun.sock"), pod.NetnsPath(), pod.Addr4, pod.Addr6)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"proxy", "ztunnel", "--config", file}, {"--config", file}} {
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
			t.Run(fmt.Sprint(args[0], " ", sig), func(t *testing.T) {
				p := start(t, "ztun", args...)
				if err := pod.WaitListening(t.Context(), 15008); err != nil {
					t.Fatal(err)
				}
				p.awaitLine("pods=1") // ready
				p.signal(sig)
				p.awaitEnd()
				if code := p.cmd.ProcessState.ExitCode(); code != exitOK {
					t.Errorf("exit code %d, want %d\n%s", code, exitOK, p.stderr())
				}
			})
		}
	}
}
