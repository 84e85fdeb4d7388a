package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// The test binary is a ztun where these are set: see runAsChild.
const (
	childConfig   = "ZTUN_NODE_TEST_CONFIG"    // the file
	childFailOpen = "ZTUN_NODE_TEST_FAIL_OPEN" // Options.FailOpenRoute
	childDeprive  = "ZTUN_NODE_TEST_DEPRIVE"   // what deprive takes away
	childMounts   = "ZTUN_NODE_TEST_MOUNTS"    // netns=file, a list like PATH
	childWritable = "ZTUN_NODE_TEST_WRITABLE"  // the only directory that stays writable in a container
	childFiles    = "ZTUN_NODE_TEST_FILES"     // how many descriptors it may have
)

// Exit codes of a child.
const (
	childFailed  = 1
	childInvalid = 2
)

// runAsChild runs ztun until SIGTERM. It returns false in the test proper.
func runAsChild() bool {
	file, ok := os.LookupEnv(childConfig)
	if !ok {
		return false
	}
	err := func() error {
		if err := deprive(os.Getenv(childDeprive)); err != nil {
			return fmt.Errorf("test: %w", err)
		}
		if n, err := strconv.ParseUint(os.Getenv(childFiles), 10, 64); err == nil {
			if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: n}); err != nil {
				return fmt.Errorf("test: %w", err)
			}
		}
		cfg, err := config.Load(config.Sources{File: file})
		if err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		defer stop()
		return Run(ctx, cfg, Options{Stdout: os.Stdout, Stderr: os.Stderr, FailOpenRoute: os.Getenv(childFailOpen) != ""})
	}()
	switch {
	case err == nil:
		os.Exit(0)
	case errors.Is(err, ErrInvalid):
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(childInvalid)
	}
	fmt.Fprintln(os.Stderr, "error:", err)
	os.Exit(childFailed)
	return true
}

// deprive takes something away from this process, which has a mount namespace of its own.
func deprive(of string) error {
	switch of {
	case "root":
		if err := unix.Setgroups(nil); err != nil {
			return err
		}
		if err := unix.Setgid(65534); err != nil {
			return err
		}
		return unix.Setuid(65534)
	case "capabilities":
		return dropCapabilities()
	case "tun":
		return hideTUN()
	case container:
		return enterContainer()
	case containerWithoutTUN:
		if err := hideTUN(); err != nil {
			return err
		}
		return enterContainer()
	}
	return nil
}

func hideTUN() error { return unix.Mount("tmpfs", "/dev/net", "tmpfs", 0, "size=4k") }

func bindMounts() error {
	for _, mount := range filepath.SplitList(os.Getenv(childMounts)) {
		from, to, _ := strings.Cut(mount, "=")
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", mount, err)
		}
	}
	return nil
}

// dropCapabilities makes this process one of root without capabilities, by which namespaces can be opened but not entered. It
// starts the program anew: nothing else reaches all threads.
func dropCapabilities() error {
	if err := bindMounts(); err != nil {
		return err
	}
	runtime.LockOSThread()
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("capability %d: %w", c, err)
		}
	}
	if err := os.Unsetenv(childDeprive); err != nil {
		return err
	}
	return unix.Exec("/proc/self/exe", os.Args, os.Environ())
}

// A child is one node's ztun, in a process of its own.
type child struct {
	cmd *lab.Cmd
	out *logBuffer // the access log
	log *logBuffer
}

// spawn starts the ztun of node i as a process, with variables such as "NAME=value".
func (b *bed) spawn(i int, vars ...string) *child {
	b.t.Helper()
	return b.spawnFile(i, b.file(i), vars...)
}

// spawnFile is spawn with another configuration file.
func (b *bed) spawnFile(i int, file string, vars ...string) *child {
	b.t.Helper()
	c := &child{cmd: b.Node(i).Command(b.t.Context(), os.Args[0], "-test.run=^$"), out: newLogBuffer(), log: newLogBuffer()}
	c.cmd.Env = append(append(os.Environ(), childConfig+"="+file), vars...)
	c.cmd.Stdout, c.cmd.Stderr = c.out, c.log
	if err := c.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	return c
}

// spawnReady is spawn, and waits until the process serves.
func (b *bed) spawnReady(i int, vars ...string) *child {
	b.t.Helper()
	c := b.spawn(i, vars...)
	c.log.await(b.t, "\tready\t", c.cmd.Done())
	b.mustCapture(i, c.log, c.cmd.Done())
	return c
}

// kill ends the process as kill -9 does.
func (c *child) kill(t *testing.T) {
	t.Helper()
	if err := c.cmd.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-c.cmd.Done()
}

// stop ends the process in order.
func (c *child) stop(t *testing.T) {
	t.Helper()
	if err := c.cmd.Stop(15 * time.Second); err != nil {
		t.Errorf("%v:\n%s", err, c.log)
	}
}

// failure waits for the end of a process that cannot start and returns the last line of its log and its exit code.
func (c *child) failure(t *testing.T) (line string, code int) {
	t.Helper()
	exit, ok := errors.AsType[interface {
		error
		ExitCode() int
	}](c.cmd.Wait())
	if !ok {
		t.Fatalf("it did not fail:\n%s", c.log)
	}
	lines := strings.Split(strings.TrimRight(c.log.String(), "\n"), "\n")
	for _, l := range lines[:len(lines)-1] {
		if strings.Count(l, "\t") < 3 { // not a line of the log
			t.Errorf("the error has more than one line:\n%s", c.log)
		}
	}
	return lines[len(lines)-1], exit.ExitCode()
}
