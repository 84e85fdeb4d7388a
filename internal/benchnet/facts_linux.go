package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// idleBelow is the share of CPU time that a quiet machine uses for itself.
const idleBelow = 0.05

func machineFacts(ctx context.Context, binary string) (facts, error) {
	f := facts{Time: time.Now().UTC().Truncate(time.Second), CPUs: runtime.NumCPU(), CPUModel: "unknown", Warnings: []string{}}
	out, err := exec.CommandContext(ctx, binary, "version").Output()
	if f.Ztun = strings.TrimSpace(string(out)); err != nil {
		f.Ztun = "unknown"
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return f, os.NewSyscallError("uname", err)
	}
	f.Kernel = unix.ByteSliceToString(u.Release[:])
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "model name" {
				f.CPUModel = strings.TrimSpace(value)
				break
			}
		}
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		f.Load = strings.Join(strings.Fields(string(text))[:3], " ")
	}
	if f.Busy, err = busyShare(ctx, 500*time.Millisecond); err != nil {
		return f, err
	}
	if f.Busy > idleBelow {
		f.Warnings = append(f.Warnings, fmt.Sprintf("the machine is not idle: %.0f %% of its CPU time is others'; figures are good for checking that this works, for nothing else", 100*f.Busy))
	}
	return f, nil
}

// busyShare is the share of all CPUs' time that was not idle, hypervisors' included.
func busyShare(ctx context.Context, during time.Duration) (float64, error) {
	busy1, all1, err := cpuTicks()
	if err != nil {
		return 0, err
	}
	if err := pause(ctx, during); err != nil {
		return 0, err
	}
	busy2, all2, err := cpuTicks()
	if err != nil || all2 == all1 {
		return 0, err
	}
	return float64(busy2-busy1) / float64(all2-all1), nil
}

// cpuTicks reads the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
func cpuTicks() (busy, all uint64, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, fmt.Errorf("benchnet: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(line)[1:9] {
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("benchnet: /proc/stat: %w", err)
		}
		all += n
		if i != 3 && i != 4 {
			busy += n
		}
	}
	return busy, all, nil
}

func newReport(ctx context.Context, o options) (*report, error) {
	f, err := machineFacts(ctx, o.ztun)
	if err != nil {
		return nil, err
	}
	r := &report{Facts: f, Rounds: o.rounds, Seconds: o.duration.Seconds(), Failures: []string{}}
	if o.only != nil {
		r.Only = o.only.String()
	}
	return r, nil
}
