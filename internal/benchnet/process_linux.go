package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/lab"
)

// environment is that of all programs: settings of the user's own ztun must not leak in.
var environment = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}

// toolEnvironment is that of a tool. The relays are ordinary Go programs; for the others see ownThreads.
func toolEnvironment(tool string) []string {
	if strings.HasSuffix(tool, "relay") {
		return environment
	}
	return append(slices.Clip(environment), "GODEBUG=asyncpreemptoff=1")
}

// startTool starts a tool of this binary that serves until ctx ends or the lab is closed.
func startTool(ctx context.Context, h *lab.Host, args ...string) (*lab.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	c := h.Command(ctx, self, args...)
	c.Env, c.Stderr = toolEnvironment(args[0]), os.Stderr
	return c, c.Start()
}

// slack is how much longer than its measurement a tool may take before it is given up.
const slack = 15 * time.Second

// runTool runs a tool of this binary, which writes its result as JSON.
func runTool(ctx context.Context, h *lab.Host, duration time.Duration, result any, args ...string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, duration+slack, errors.New("no result in time"))
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	c := h.Command(ctx, self, args...)
	c.Env = toolEnvironment(args[0])
	out, err := c.Output()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = errors.New(strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return fmt.Errorf("benchnet: %s: %w", h.Name, err)
	}
	if err := json.Unmarshal(out, result); err != nil {
		return fmt.Errorf("benchnet: %s: %s: its result: %w", h.Name, args[0], err)
	}
	return nil
}

// A background is a tool that says one word once it is under way.
type background struct {
	cmd   *lab.Cmd
	stdin *os.File // the tool's ends when this is closed
	stop  context.CancelFunc
}

// startBackground returns when the tool has said its word.
func startBackground(ctx context.Context, h *lab.Host, limit time.Duration, word string, args ...string) (_ *background, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	in, stdin, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	defer in.Close()
	stdout, out, err := os.Pipe()
	if err != nil {
		stdin.Close()
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	defer stdout.Close()
	ctx, cancel := context.WithCancel(ctx)
	b := &background{cmd: h.Command(ctx, self, args...), stdin: stdin, stop: cancel}
	var complaint bytes.Buffer
	b.cmd.Env, b.cmd.Stdin, b.cmd.Stdout, b.cmd.Stderr = toolEnvironment(args[0]), in, out, &complaint
	err = b.cmd.Start()
	out.Close()
	if err != nil {
		b.end()
		return nil, err
	}
	_ = stdout.SetReadDeadline(time.Now().Add(limit))
	if said, err := bufio.NewReader(stdout).ReadString('\n'); said != word {
		b.end()
		if text := strings.TrimSpace(complaint.String()); text != "" {
			err = errors.New(text)
		}
		return nil, fmt.Errorf("benchnet: %s: %s: not under way: %w", h.Name, args[0], err)
	}
	return b, nil
}

// end kills the tool, whose result is not asked for.
func (b *background) end() {
	b.stop()
	b.stdin.Close()
	if b.cmd.Done() != nil {
		_ = b.cmd.Wait()
	}
}

// finish lets the tool come to its end.
func (b *background) finish(grace time.Duration) {
	b.stdin.Close()
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-b.cmd.Done():
	case <-t.C:
	}
	b.end()
}

// cpuTime is what a process has used so far, in seconds: its CPU clock, clock_getcpuclockid(3).
func cpuTime(pid int) (float64, error) {
	const schedClock = 2 // CPUCLOCK_SCHED, include/linux/posix-timers.h
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		return 0, fmt.Errorf("benchnet: CPU clock of process %d: %w", pid, err)
	}
	return float64(ts.Nano()) / 1e9, nil
}

// rss is a process's resident memory in bytes.
func rss(pid int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("benchnet: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("benchnet: memory of process %d: %w", pid, err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("benchnet: memory of process %d: not in its status", pid)
}

// settledRSS waits, for two seconds at most, until memory does not change by 64 KiB in half a second.
func settledRSS(ctx context.Context, pid int) (uint64, error) {
	const (
		step   = 100 * time.Millisecond
		steady = 5
		most   = 20
		noise  = 64 << 10
	)
	var reference uint64
	same := 0
	for range most {
		now, err := rss(pid)
		if err != nil {
			return 0, err
		}
		if max(now, reference)-min(now, reference) > noise {
			reference, same = now, 0
		} else if same++; same == steady {
			break
		}
		if err := pause(ctx, step); err != nil {
			return 0, err
		}
	}
	return rss(pid)
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
