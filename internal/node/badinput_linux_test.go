package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// refused starts the ztun of a configuration that must not start, and returns why.
func (b *bed) refused(file string) error {
	b.t.Helper()
	cfg, err := config.Load(config.Sources{File: file})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.t.Context(), 5*time.Second)
	defer cancel()
	if err = Run(ctx, cfg, Options{Stdout: io.Discard, Stderr: io.Discard, Ports: anyPorts}); err == nil {
		b.t.Fatalf("%s: it has started", file)
	}
	return err
}

// mustSay compares an error with what it has to name.
func mustSay(t *testing.T, name string, err error, invalid bool, parts ...string) {
	t.Helper()
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("%s: more than one line: %v", name, err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%s: %v, want %q in it", name, err, p)
		}
	}
	if errors.Is(err, ErrInvalid) != invalid {
		t.Errorf("%s: %v, is ErrInvalid: %t, want %t", name, err, !invalid, invalid)
	}
}

func TestNetnsBadConfiguration(t *testing.T) {
	b := newBed(t)
	mesh, err := os.ReadFile(b.path("mesh.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	typo := strings.Replace(string(mesh), "serviceAccount: web", "serviceAcount: web", 1)
	line := strings.Count(typo[:strings.Index(typo, "serviceAcount")], "\n") + 1
	b.write("typo.yaml", typo)
	b.write("broken.yaml", "workloads: [\n")
	expired, err := ca.New(func() time.Time { return time.Now().AddDate(-40, 0, 0) })
	if err != nil {
		t.Fatal(err)
	}
	secret, err := expired.PEM()
	if err != nil {
		t.Fatal(err)
	}
	b.write("expired.pem", string(secret))
	b.write("noise.pem", "noise")
	pod, other := b.pods[clientA].NetnsPath(), b.pods[otherA].NetnsPath()

	for _, tt := range []struct {
		name   string
		oldnew []string
		want   []string
	}{
		{"a typo in the state", []string{"mesh.yaml", "typo.yaml"}, []string{fmt.Sprintf("typo.yaml:%d: ", line), "serviceAcount", "did you mean serviceAccount?"}},
		{"a state that is no YAML", []string{"mesh.yaml", "broken.yaml"}, []string{"broken.yaml"}},
		{"no state", []string{"mesh.yaml", "nothing.yaml"}, []string{"state file", "nothing.yaml", "no such file", "LOCAL_XDS_PATH"}},
		{"a netns that does not exist", []string{pod, "/run/netns/ztun-test-nothing"}, []string{"pod shop/client", "/run/netns/ztun-test-nothing", "is the pod gone"}},
		{"a netns that is a file", []string{pod, b.path("mesh.yaml")}, []string{"pod shop/client", "not a network namespace", "/proc/<pid>/ns/net"}},
		{"a netns that is of another kind", []string{pod, "/proc/self/ns/uts"}, []string{"pod shop/client", "not a network namespace"}},
		{"one netns for two pods", []string{other, strings.Replace(pod, "/fd/", fmt.Sprintf("/task/%d/fd/", os.Getpid()), 1)}, []string{"pod shop/other", "is that of pod shop/client as well"}},
		{"no root of the CA", []string{"root.pem", "nothing.pem"}, []string{"nothing.pem", "no such file", "ZTUN_FAKE_CA_ROOT"}},
		{"a root of the CA that is none", []string{"root.pem", "noise.pem"}, []string{"noise.pem", "ZTUN_FAKE_CA_ROOT"}},
		{"a root of the CA that has expired", []string{"root.pem", "expired.pem"}, []string{"expired.pem", "expired at", "ZTUN_FAKE_CA_ROOT"}},
		{"no CA", []string{"fakeCa: true", "fakeCa: false", "fakeCaRoot: " + b.path("root.pem"), ""}, []string{"no certificate authority", "FAKE_CA=true"}},
	} {
		unchanged(t, b.pods[:2], func() {
			err := b.refused(b.rewrite(0, "bad.yaml", tt.oldnew...))
			mustSay(t, tt.name, err, true, tt.want...)
		})
		if _, err := os.Stat(b.path("node-a")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: a directory is left: %v", tt.name, err)
		}
	}
}

func TestNetnsStateDirectoryCannotBeMade(t *testing.T) {
	b := newBed(t)
	unchanged(t, b.pods[:2], func() {
		err := b.refused(b.rewrite(0, "bad.yaml", filepath.Join("node-a", "ztun.sock"), "mesh.yaml/ztun.sock"))
		mustSay(t, "state directory", err, false, "state directory", "mesh.yaml", "ZTUN_HANDOVER_SOCKET")
	})
}

// A pod whose port is taken cannot be served: if it is the only one, or so it is with all, the start fails; else the others are served, and it is as soon
// as the port is free.
func TestNetnsPortTaken(t *testing.T) { t.Run("DP-136", checkPortTaken) }

func checkPortTaken(t *testing.T) {
	b := newBed(t)
	take := func(i int) net.Listener {
		l, err := b.pods[i].Listen("tcp", "[::]:15008")
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	unchanged(t, b.pods[:2], func() {
		defer take(0).Close()
		defer take(1).Close()
		mustSay(t, "all pods", b.refused(b.file(0)), false, "pod shop/client", "15008", "address already in use", "ss -ltnp")
	})
	l := take(1)
	p := b.launch(0)
	p.log.await(t, "pod not captured", p.done, "shop/other", "15008", "address already in use", "ss -ltnp")
	if why := strings.Join(p.node.pendingPods(), "; "); !strings.Contains(why, "shop/other") || strings.Contains(why, "shop/client") {
		t.Errorf("pending is %q, want shop/other alone", why)
	}
	b.serve(b.pods[plainB], 8080, who)
	if _, err := b.ask(b.pods[clientA], each(b.pods[plainB], 8080)[0]); err != nil {
		t.Errorf("the other pod: %v", err)
	}
	l.Close()
	p.log.await(t, "the pod is not pending any more", p.done, "shop/other")
}

func TestNetnsWithoutPrivilege(t *testing.T) {
	b := newBed(t)
	// What the process reads is not the reason.
	for dir := b.dir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"node-a.yaml", "mesh.yaml", "root.pem"} {
		if err := os.Chmod(b.path(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// Descriptors of another process are not to be had without privilege, but a mounted namespace is.
	var mounts []string
	var oldnew []string
	for i, name := range []string{"client", "other"} {
		b.write("netns-"+name, "")
		mounts = append(mounts, b.pods[i].NetnsPath()+"="+b.path("netns-"+name))
		oldnew = append(oldnew, b.pods[i].NetnsPath(), b.path("netns-"+name))
	}
	mounted := b.rewrite(0, "mounted.yaml", oldnew...)
	for _, tt := range []struct {
		deprive string
		file    string
		want    []string
	}{
		{"root", b.file(0), []string{"need root; run it with sudo", "CAP_SYS_ADMIN"}},
		{"capabilities", mounted, []string{"capabilities that are missing: CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_ADMIN"}},
		{"tun", b.file(0), []string{"pod shop/client", "/dev/net/tun", "load the tun module"}},
	} {
		unchanged(t, b.pods[:2], func() {
			line, code := b.spawnFile(0, tt.file, childDeprive+"="+tt.deprive, childMounts+"="+strings.Join(mounts, ":")).failure(t)
			for _, w := range tt.want {
				if !strings.Contains(line, w) || code != childFailed {
					t.Errorf("without %s: %q, exit code %d, want %q in it and code %d", tt.deprive, line, code, w, childFailed)
				}
			}
		})
	}
}

// A pod without IPv6 is served by IPv4 alone.
func TestNetnsWithoutIPv6(t *testing.T) {
	b := newBed(t)
	for _, h := range []int{clientA, webB} {
		err := b.pods[h].Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0) })
		if err != nil {
			t.Fatal(err)
		}
	}
	b.serve(b.pods[webB], 8080, who)
	unchanged(t, []*lab.Host{b.pods[clientA], b.pods[webB]}, func() {
		a := b.start(0)
		b.start(1)
		a.log.await(t, "IPv6 is not captured", a.done, `pod="shop/client"`)
		for _, to := range []string{"10.96.0.10:80", addrPort(b.pods[webB].Addr4, 8080)} {
			if _, err := b.ask(b.pods[clientA], to); err != nil {
				t.Errorf("%s: %v", to, err)
			}
		}
		for _, to := range []string{"[fd96::10]:80", addrPort(b.pods[webB].Addr6, 8080)} {
			if _, err := b.dial(b.pods[clientA], to); !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				t.Errorf("%s: %v, want what a pod without IPv6 gets", to, err)
			}
		}
		b.stop(0)
		b.stop(1)
	})
}
