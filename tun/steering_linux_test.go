package tun

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

// A steeredLab is a lab whose pod is captured with a Steering.
type steeredLab struct {
	*lab
	k        *Kernel
	steering *Steering
	agent    *agent
	stop     func()      // the agent
	accepts  map[int]int // descriptors of the agent's listeners, by family

	mu    sync.Mutex // guards below
	ended []EndedFlow
}

// newSteeredLab makes one; decide may not be called before it has returned.
func newSteeredLab(t *testing.T, mode string, decide func(src, dst netip.AddrPort) Way) *steeredLab {
	t.Helper()
	l := &steeredLab{lab: newLab(t, true)}
	l.steering = newSteering(t, mode, func(e EndedFlow) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.ended = append(l.ended, e)
	})
	cfg := testConfig(l.pod)
	cfg.Steering = l.steering
	l.capture(t, cfg, decide)
	return l
}

func (l *steeredLab) capture(t *testing.T, cfg Config, decide func(src, dst netip.AddrPort) Way) {
	t.Helper()
	l.k = open(t, cfg)
	l.accepts = map[int]int{
		unix.AF_INET: listenTransparent(t, l.pod, listener4), unix.AF_INET6: listenTransparent(t, l.pod, listener6),
	}
	must(t, l.k.SteerListeners(l.accepts[unix.AF_INET], l.accepts[unix.AF_INET6]))
	l.agent, l.stop = startAgent(t, l.k, decide)
}

// newSteering makes a Steering that runs until the test ends.
func newSteering(t *testing.T, mode string, ended func(EndedFlow)) *Steering {
	t.Helper()
	return startSteering(t, SteeringConfig{Mode: mode, Ended: ended})
}

func startSteering(t *testing.T, cfg SteeringConfig) *Steering {
	t.Helper()
	needPrivilege(t)
	cfg.Marks = testConfig(nil).Marks
	s, err := NewSteering(cfg)
	must(t, err)
	run(t, s)
	return s
}

func run(t *testing.T, s *Steering) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
}

// wantOnlySYNs checks that the device had so many SYNs and no other TCP.
func (l *steeredLab) wantOnlySYNs(t *testing.T, n int64) {
	t.Helper()
	if syns, other := l.agent.syns.Load(), l.agent.other.Load(); syns != n || other != 0 {
		t.Errorf("device: %d SYNs and %d other TCP packets, want %d and 0", syns, other, n)
	}
}

// wantEnded waits for the end of flows and checks them.
func (l *steeredLab) wantEnded(t *testing.T, want ...EndedFlow) {
	t.Helper()
	waitFor(t, fmt.Sprintf("%d ends", len(want)), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.ended) >= len(want)
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if diff := cmp.Diff(want, l.ended, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Errorf("ended (-want +got):\n%s", diff)
	}
	l.ended = nil
}

// What the kernel has BTF for, is loaded: the fallbacks are for others.
func TestNetnsSteerWithAllThatTheKernelHas(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		cannotRun(t, "needs a kernel with BTF")
	}
	var log bytes.Buffer
	s, err := NewSteering(SteeringConfig{Mode: SteerBySockops, Marks: testConfig(nil).Marks, Log: slog.New(slog.NewTextHandler(&log, nil))})
	must(t, err)
	defer s.Close()
	if log.Len() > 0 {
		t.Errorf("NewSteering says:\n%s", log.String())
	}
}

// What loads and attaches may still not work: the self-test finds it, and leaves nothing.
func TestNetnsSteerSelfTest(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	for name, tt := range map[string]struct {
		mode string
		hurt func(b backend) error
		want string
	}{
		"nothing":                {SteerBySockops, func(backend) error { return nil }, ""},
		"program of sockets":     {SteerBySockops, func(b backend) error { return b.(*sockops).link.Close() }, "no packet with the flags 0x10 leaves"},
		"decisions do not stand": {SteerBySockops, func(b backend) error { return b.(*sockops).maps.Flows.Freeze() }, "steer"},
		"nothing, tc":            {SteerByTC, func(backend) error { return nil }, ""},
		"decisions by tc":        {SteerByTC, func(b backend) error { return b.(*tcBackend).flows.Freeze() }, "steer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := NewSteering(SteeringConfig{Mode: tt.mode, Marks: testConfig(nil).Marks})
			must(t, err)
			defer s.Close()
			must(t, tt.hurt(s.backend))
			err = s.tryOut()
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("self-test without %s: %v, want %q", name, err, tt.want)
			}
		})
	}
}

func TestNetnsSteerWithoutBPF(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	for _, mode := range []string{"auto", SteerBySockops} {
		_, err := NewSteering(SteeringConfig{Mode: mode, Marks: testConfig(nil).Marks, noBPF: true})
		if err == nil || !strings.Contains(err.Error(), "steering by sockops: operation not permitted") || strings.Contains(err.Error(), SteerByNFT) {
			t.Errorf("NewSteering of mode %s: %v, want the reason, and nothing of nft", mode, err)
		}
	}
	s, err := NewSteering(SteeringConfig{Mode: SteerByNFT, Marks: testConfig(nil).Marks, noBPF: true})
	must(t, err)
	if got := s.Backend(); got != SteerByNFT {
		t.Errorf("by name without BPF: %s, want nft", got)
	}
	must(t, s.Close())
}

// Without the root of cgroup v2 there is no program of sockets: tc does without.
func TestNetnsSteerWithoutCgroup(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	s, err := NewSteering(SteeringConfig{Mode: "auto", Marks: testConfig(nil).Marks, noCgroup: true})
	must(t, err)
	if got := s.Backend(); got != SteerByTC {
		t.Errorf("auto without the root of cgroup v2: %s, want tc", got)
	}
	must(t, s.Close())
	if _, err := NewSteering(SteeringConfig{Mode: SteerBySockops, Marks: testConfig(nil).Marks, noCgroup: true}); err == nil || !strings.Contains(err.Error(), "steering by sockops: cgroup v2") {
		t.Errorf("by name without the root of cgroup v2: %v, want the reason", err)
	}
}

func always(w Way) func(src, dst netip.AddrPort) Way {
	return func(src, dst netip.AddrPort) Way { return w }
}

// eachFamily runs f for the pod's and the remote's address of IPv4 and of IPv6.
func eachFamily(t *testing.T, f func(t *testing.T, pod, remote netip.Addr)) {
	for name, a := range map[string][2]netip.Addr{"IPv4": {pod4, remote4}, "IPv6": {pod6, remote6}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, a[0], a[1])
		})
	}
}

func localOf(t *testing.T, fd int) netip.AddrPort {
	t.Helper()
	sa, err := unix.Getsockname(fd)
	must(t, err)
	return addrPortOf(sa)
}

func TestNetnsSteerToNetwork(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, _, remote netip.Addr) {
		l := newSteeredLab(t, mode, always(ToNetwork))
		to := netip.AddrPortFrom(remote, 8080)
		server := listenerOf(t, l.remote, to, 0)
		d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
		if err := d.wait(t, 3000); err != nil {
			t.Fatalf("connect to %s: %v", to, err)
		}
		c, peer := accept(t, server)
		if peer != localOf(t, d.fd) {
			t.Errorf("server sees %s, want the application's %s", peer, localOf(t, d.fd))
		}
		send(t, d.fd, c, "hello")
		send(t, c, d.fd, "hello you")
		if m := markOf(t, d.fd); m != testOwn && mode == SteerBySockops {
			t.Errorf("mark of the application's socket %#x, want %#x", m, testOwn)
		}
		must(t, unix.Shutdown(d.fd, unix.SHUT_WR))
		must(t, unix.Shutdown(c, unix.SHUT_WR))
		closeNow(t, d.fd)
		closeNow(t, c)
		l.wantEnded(t, EndedFlow{Netns: l.k.Cookie(), Src: peer, Dst: to, Established: true, Received: 5, Sent: 9})
		l.wantOnlySYNs(t, 1)
	})
}

func TestNetnsSteerToListener(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, _, remote netip.Addr) {
		l := newSteeredLab(t, mode, always(ToListener))
		to := netip.AddrPortFrom(remote, 8080)
		d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
		c, peer := accept(t, l.accepts[familyOf(remote)])
		if err := d.wait(t, 3000); err != nil {
			t.Fatalf("connect to %s: %v", to, err)
		}
		if peer != localOf(t, d.fd) || localOf(t, c) != to {
			t.Errorf("accepted %s from %s, want %s from %s", localOf(t, c), peer, to, localOf(t, d.fd))
		}
		if m := markOf(t, c); m != testDeliver { // of the SYN
			t.Errorf("mark of ztun's socket %#x, want %#x", m, testDeliver)
		}
		send(t, d.fd, c, "hello")
		send(t, c, d.fd, "hello you")
		if m := markOf(t, d.fd); m != testDeliver && mode == SteerBySockops {
			t.Errorf("mark of the application's socket %#x, want %#x", m, testDeliver)
		}
		must(t, unix.Shutdown(d.fd, unix.SHUT_WR))
		must(t, unix.Shutdown(c, unix.SHUT_WR))
		closeNow(t, d.fd)
		closeNow(t, c)
		l.wantOnlySYNs(t, 1)
		l.wantEnded(t)
	})
}

func TestNetnsSteerToApplication(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, _ netip.Addr) {
		l := newSteeredLab(t, mode, always(ToApplication))
		to := netip.AddrPortFrom(pod, 8080)
		app := listenerOf(t, l.pod, to, 0)
		d := startDial(t, l.remote, netip.AddrPort{}, to, nil)
		if err := d.wait(t, 3000); err != nil {
			t.Fatalf("connect to %s: %v", to, err)
		}
		c, peer := accept(t, app)
		if peer != localOf(t, d.fd) {
			t.Errorf("application sees %s, want %s", peer, localOf(t, d.fd))
		}
		send(t, d.fd, c, "hello")
		send(t, c, d.fd, "hello you")
		if m := markOf(t, c); m != testOwn {
			t.Errorf("mark of the application's socket %#x, want %#x", m, testOwn)
		}
		must(t, unix.Shutdown(d.fd, unix.SHUT_WR))
		must(t, unix.Shutdown(c, unix.SHUT_WR))
		closeNow(t, d.fd)
		closeNow(t, c)
		l.wantEnded(t, EndedFlow{Netns: l.k.Cookie(), Src: peer, Dst: to, Established: true, Received: 5, Sent: 9})
		l.wantOnlySYNs(t, 1)
	})
}

func TestNetnsSteerToListenerInbound(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, _ netip.Addr) {
		l := newSteeredLab(t, mode, always(ToListenerInbound))
		to := netip.AddrPortFrom(pod, 8080)
		listenerOf(t, l.pod, to, 0) // the application's, which gets nothing
		d := startDial(t, l.remote, netip.AddrPort{}, to, nil)
		c, peer := accept(t, l.accepts[familyOf(pod)])
		if err := d.wait(t, 3000); err != nil {
			t.Fatalf("connect to %s: %v", to, err)
		}
		if peer != localOf(t, d.fd) || localOf(t, c) != to {
			t.Errorf("accepted %s from %s, want %s from %s", localOf(t, c), peer, to, localOf(t, d.fd))
		}
		if m := markOf(t, c); m != testOwn { // of the SYN
			t.Errorf("mark of ztun's socket %#x, want %#x", m, testOwn)
		}
		send(t, d.fd, c, "hello")
		send(t, c, d.fd, "hello you")
		l.wantOnlySYNs(t, 1)
		l.wantEnded(t)
	})
}

// bpfModes are those that auto may take.
var bpfModes = []string{SteerBySockops, SteerByTC}

// eachBPFMode runs f for each of them and each family.
func eachBPFMode(t *testing.T, f func(t *testing.T, mode string, pod, remote netip.Addr)) {
	for _, mode := range bpfModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			eachFamily(t, func(t *testing.T, pod, remote netip.Addr) { f(t, mode, pod, remote) })
		})
	}
}

// eachMode runs f for each backend and family.
func eachMode(t *testing.T, f func(t *testing.T, mode string, pod, remote netip.Addr)) {
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			eachFamily(t, func(t *testing.T, pod, remote netip.Addr) { f(t, b.name, pod, remote) })
		})
	}
}
