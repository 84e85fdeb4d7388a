package demo

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/node"
)

// The test binary plays ztun, and others that only look like it, by the name that it is started under.
const (
	realZtun   = "ztun"
	idleZtun   = "ztun-idle"   // says that it is ready and does nothing
	dyingZtun  = "ztun-dying"  // says why, and ends
	silentZtun = "ztun-silent" // never says that it is ready
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "demo-server":
			syscall.Exit(ServerMain(os.Args[2:]))
		case "demo-client":
			// Not os.Exit: under the race detector that takes a second longer.
			syscall.Exit(ClientMain(os.Args[2:]))
		case "proxy":
			os.Exit(proxyMain(os.Args[2:]))
		}
	}
	goleak.VerifyTestMain(m)
}

func proxyMain(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	switch filepath.Base(os.Args[0]) {
	case idleZtun:
		fmt.Fprintln(os.Stderr, "now\tinfo\tnode\tready\tpods=2")
		<-ctx.Done()
		return 0
	case silentZtun:
		<-ctx.Done()
		return 0
	case dyingZtun:
		fmt.Fprintln(os.Stderr, "one line\nport 15008 is taken")
		return 1
	}
	if len(args) != 2 || args[0] != "--config" {
		fmt.Fprintln(os.Stderr, "arguments:", args)
		return 2
	}
	cfg, err := config.Load(config.Sources{File: args[1]})
	if err == nil {
		err = node.Run(ctx, cfg, node.Options{Stdout: os.Stdout, Stderr: os.Stderr})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// program is the path of the test binary under another name.
func program(t *testing.T, name string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.Symlink(self, path); err != nil {
		t.Fatal(err)
	}
	return path
}
