package tun

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// modeVariable makes the child steer, by that backend.
const modeVariable = "ZTUN_TUN_TEST_MODE"

// childVariable makes the test binary an owner of a device: see runAsChild.
const childVariable = "ZTUN_TUN_TEST_CHILD"

// runAsChild opens the device in the netns of descriptor 3, says so, and dies when standard input ends, without any
// clean-up. It returns false in the test proper.
func runAsChild() bool {
	stateDir, ok := os.LookupEnv(childVariable)
	if !ok {
		return false
	}
	err := func() error {
		ns, err := NetnsFromFile(os.NewFile(3, "test netns"))
		if err != nil {
			return err
		}
		cfg := testConfig(ns)
		cfg.StateDir, cfg.Generation = stateDir, 1
		if mode := os.Getenv(modeVariable); mode != "" {
			return runSteeringChild(cfg, mode)
		}
		_, err = Open(context.Background(), cfg)
		return err
	}()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(2)
	return true
}

// startOwner starts a process that owns the device in ns, and steers if mode is not "". kill ends it, by SIGKILL, and waits.
func startOwner(t *testing.T, ns *Netns, stateDir, mode string) (pid int, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childVariable+"="+stateDir, modeVariable+"="+mode)
	cmd.ExtraFiles = []*os.File{ns.File()}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dead := false
	kill = func() {
		if dead {
			return
		}
		dead = true
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = stdin.Close()
	}
	t.Cleanup(kill)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if line = strings.TrimSpace(line); line != "ready" {
		t.Fatalf("owner says %q, %v", line, err)
	}
	return cmd.Process.Pid, kill
}
