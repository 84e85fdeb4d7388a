package node

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// What deprive makes of a child: a container such as ztunnel's chart asks for.
const (
	container           = "container"
	containerWithoutTUN = "container without /dev/net/tun" // as the chart is, which mounts no device
)

// Of the chart's container: user 0, group 1337, these capabilities and no new ones.
const chartGroup = 1337

var chartCapabilities = []uintptr{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW, unix.CAP_SYS_ADMIN}

// enterContainer takes away what a container with a read-only root does not have, and starts the program anew.
func enterContainer() error {
	if err := bindMounts(); err != nil {
		return err
	}
	writable := os.Getenv(childWritable)
	if err := unix.Mount(writable, writable, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", writable, err)
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("read-only root: %w", err)
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, writable, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("writable %s: %w", writable, err)
	}
	if err := errors.Join(unix.Setgroups(nil), unix.Setgid(chartGroup)); err != nil {
		return err
	}
	runtime.LockOSThread()
	var keep uint32
	for _, c := range chartCapabilities {
		keep |= 1 << c
	}
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if c < 32 && keep&(1<<c) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("capability %d: %w", c, err)
		}
	}
	// The second of the two structures is that of capabilities from 32 on.
	caps := [2]unix.CapUserData{{Effective: keep, Permitted: keep, Inheritable: keep}}
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	if err := os.Unsetenv(childDeprive); err != nil {
		return err
	}
	return unix.Exec("/proc/self/exe", os.Args, os.Environ())
}

// contain prepares the ztun of node i for a container: its configuration, which leaves the choice of the backend to ztun, and
// the variables for spawnFile.
func (b *bed) contain(i int, kind string) (file string, vars []string) {
	b.t.Helper()
	oldnew := []string{"capture: " + b.capture.String(), "capture: auto"}
	var mounts []string
	for j, name := range podNames[i] {
		path := b.path("netns-" + name)
		b.write("netns-"+name, "")
		netns := b.Pod(i, j).NetnsPath()
		mounts = append(mounts, netns+"="+path)
		oldnew = append(oldnew, netns, path)
	}
	state := b.path([]string{"node-a", "node-b"}[i])
	if err := os.MkdirAll(state, 0o755); err != nil {
		b.t.Fatal(err)
	}
	file = b.rewrite(i, fmt.Sprintf("contained-%d.yaml", i), oldnew...)
	return file, []string{childDeprive + "=" + kind, childMounts + "=" + strings.Join(mounts, ":"), childWritable + "=" + state}
}

// mustBeContained reads what a process may do, lest the test be one of an ordinary process.
func (b *bed) mustBeContained(c *child) {
	b.t.Helper()
	t, pid := b.t, c.cmd.Pid()
	read := func(name string) string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	status := read("status")
	const caps = "0000000000203000"
	for _, want := range []string{"Uid:\t0\t0\t0\t0\n", "Gid:\t1337\t1337\t1337\t1337\n", "CapEff:\t" + caps, "CapPrm:\t" + caps, "CapBnd:\t" + caps, "CapInh:\t" + caps, "NoNewPrivs:\t1"} {
		if !strings.Contains(status, want) {
			t.Errorf("the process is no container's: no %q in\n%s", want, status)
		}
	}
	for line := range strings.Lines(read("mountinfo")) {
		f := strings.Fields(line)
		if !strings.HasPrefix(f[5], "ro") && !strings.HasPrefix(f[4], b.path("node-")) {
			t.Errorf("writable: %s", line)
		}
	}
}

// In a container as ztunnel's chart makes it, with and without the device, what can be captured is captured.
func TestNetnsContainer(t *testing.T) {
	for _, tt := range []struct {
		kind    string
		capture config.Capture
	}{
		{container, config.CaptureTUN},
		{container, config.CaptureRedirect},
		{containerWithoutTUN, config.CaptureRedirect},
	} {
		t.Run(tt.capture.String()+" in a "+tt.kind, func(t *testing.T) {
			b := newBedOn(t, variant{capture: tt.capture}, lab.Config{})
			nodes := make([]*child, 2)
			for i := range nodes {
				file, vars := b.contain(i, tt.kind)
				nodes[i] = b.spawnFile(i, file, vars...)
			}
			for i, n := range nodes {
				n.log.await(t, "\tready\t", n.cmd.Done())
				b.mustCapture(i, n.log, n.cmd.Done())
				b.mustBeContained(n)
			}
			for _, w := range b.ways(8080) {
				if err := b.shuttle(t, w, 1<<20, 10*time.Second); err != nil {
					t.Errorf("%s, %s: %v", w.name, w.addr, err)
				}
			}
			if err := b.refusal(b.pods[otherA], "10.96.0.10:80"); !errors.Is(err, b.seen(unix.ECONNREFUSED)) {
				t.Errorf("denied by policy: %v", err)
			}
			out, err := b.pods[clientA].Command(t.Context(), "dig", webName, "A", "+short", "+time=3", "+tries=1").Output()
			if err != nil || strings.TrimSpace(string(out)) != "10.96.0.10" {
				t.Errorf("a name: %q, %v", out, err)
			}
			for _, n := range nodes {
				n.stop(t)
			}
		})
	}
}

// Without the device and without istio-cni there is no way, and ztun says what is missing.
func TestNetnsContainerWithoutEither(t *testing.T) {
	b := newBed(t)
	unchanged(t, b.pods[:2], func() {
		file, vars := b.contain(0, containerWithoutTUN)
		line, code := b.spawnFile(0, file, vars...).failure(t)
		for _, w := range []string{"pod shop/client", "/dev/net/tun"} {
			if code != childFailed || !strings.Contains(line, w) {
				t.Errorf("%q, exit code %d, want %q in it and code %d", line, code, w, childFailed)
			}
		}
		t.Log(line)
	})
}
