package tun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// Ports of the crash test, by what the agent does with them.
const (
	portNetwork     = 81
	portListener    = 82
	portApplication = 83
)

var crashWays = map[uint16]Way{portNetwork: ToNetwork, portListener: ToListener, portApplication: ToApplication}

// runSteeringChild is the agent of the crash test, in a process of its own: it steers by crashWays and echoes nothing.
func runSteeringChild(cfg Config, mode string) error {
	s, err := NewSteering(SteeringConfig{Mode: mode, Marks: cfg.Marks})
	if err != nil {
		return err
	}
	cfg.Steering = s
	k, err := Open(context.Background(), cfg)
	if err != nil {
		return err
	}
	fds := [2]int{}
	for i, at := range []netip.AddrPort{listener4, listener6} {
		if fds[i], err = transparentListener(cfg.Netns, at); err != nil {
			return err
		}
		go func() { // keeps what it accepts
			for ready(fds[i], unix.POLLIN, -1) {
				_, _, _ = unix.Accept(fds[i])
			}
		}()
	}
	if err := k.SteerListeners(fds[0], fds[1]); err != nil {
		return err
	}
	go (&agent{k: k, decide: byPort(crashWays)}).run(-1)
	return nil
}

// A tap sees what comes to an interface of a netns.
type tap struct {
	fd int
}

func startTap(t *testing.T, ns *Netns) *tap {
	t.Helper()
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network order
	fd, err := ns.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK, all)
	must(t, err)
	closeAtEnd(t, fd)
	must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20))
	return &tap{fd}
}

// has reports which of the words have been in packets since the last call.
func (p *tap) has(words ...string) (found []string) {
	b := make([]byte, MaxPacket)
	for {
		n, err := unix.Read(p.fd, b)
		if err != nil {
			return found
		}
		for _, w := range words {
			if bytes.Contains(b[:n], []byte(w)) && !slices.Contains(found, w) {
				found = append(found, w)
			}
		}
	}
}

// The process that has decided about them dies. What was handed back goes on untouched, in both directions and through the
// restart; what was carried ends; new connections fail at once; and nothing of what was carried is seen outside.
func TestNetnsSteerKilled(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := &steeredLab{lab: newLab(t, true)}
		cfg := testConfig(l.pod)
		cfg.StateDir = t.TempDir()
		_, kill := startOwner(t, l.pod, cfg.StateDir, mode)
		tap := startTap(t, l.remote)

		network, listener, app := netip.AddrPortFrom(remote, portNetwork), netip.AddrPortFrom(remote, portListener), netip.AddrPortFrom(pod, portApplication)
		server, pods := listenerOf(t, l.remote, network, 0), listenerOf(t, l.pod, app, 0)
		outside := listenerOf(t, l.remote, listener, 0) // would take what was meant for it in clear
		dialOK := func(ns *Netns, to netip.AddrPort) int {
			t.Helper()
			d := startDial(t, ns, netip.AddrPort{}, to, nil)
			if err := d.wait(t, 3000); err != nil {
				t.Fatalf("connect to %s: %v", to, err)
			}
			return d.fd
		}
		out := dialOK(l.pod, network)
		outPeer, _ := accept(t, server)
		in := dialOK(l.remote, app)
		inPeer, _ := accept(t, pods)
		mesh := dialOK(l.pod, listener)
		_, err := unix.Write(mesh, []byte("secret 1"))
		must(t, err)
		alive := func(when string) {
			t.Helper()
			pairs := [][2]int{{in, inPeer}, {inPeer, in}, {out, outPeer}, {outPeer, out}}
			if mode != SteerBySockops && (when == "killed" || when == "closed") {
				pairs = pairs[:2] // the others stand still until the next start: their first route is that of the device
			}
			for _, pair := range pairs {
				send(t, pair[0], pair[1], "clear "+when)
			}
		}
		alive("before")
		// What their programs make of them when nobody is there to be asked.
		handed := map[string]int{"outbound": dialOK(l.pod, network)}
		accept(t, server)
		dialOK(l.remote, app)
		handed["inbound"], _ = accept(t, pods)

		kill()
		alive("killed")
		if !ready(mesh, unix.POLLIN, 3000) {
			t.Error("a carried connection goes on without the process")
		}
		_, _ = unix.Write(mesh, []byte("secret 2"))
		waitFor(t, "no route to host", func() bool {
			err := startDial(t, l.pod, netip.AddrPort{}, listener, nil).wait(t, 50)
			if err == nil {
				t.Fatal("connected without the process")
			}
			return errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH)
		})
		for _, c := range []struct {
			ns *Netns
			to netip.AddrPort
		}{{l.pod, network}, {l.pod, listener}, {l.remote, app}} {
			if err := startDial(t, c.ns, netip.AddrPort{}, c.to, nil).wait(t, 200); err == nil {
				t.Errorf("connect to %s without the process: connected", c.to)
			}
		}
		alive("closed")
		if mode != SteerByNFT {
			for what, fd := range handed {
				dissolve(t, fd)
				_ = unix.Connect(fd, sockaddrOf(listener))
				if ready(outside, unix.POLLIN, 200) {
					t.Errorf("a socket that was handed back, %s, is connected in clear without the process", what)
				}
			}
		}

		cfg.Generation++
		var ends []EndedFlow
		var mu sync.Mutex // guards ends
		cfg.Steering = newSteering(t, mode, func(e EndedFlow) {
			mu.Lock()
			defer mu.Unlock()
			ends = append(ends, e)
		})
		l.capture(t, cfg, byPort(crashWays))
		alive("restarted")
		_, _ = unix.Write(mesh, []byte("secret 3"))
		if mode != SteerByNFT { // nothing says who opened it: both ways
			carried := uint64(len("clear before" + "clear restarted"))
			if mode == SteerBySockops {
				carried += uint64(len("clear killed" + "clear closed"))
			}
			src, dst := localOf(t, out), network
			closeNow(t, out)
			closeNow(t, outPeer)
			waitFor(t, "the end of a flow of before", func() bool {
				mu.Lock()
				defer mu.Unlock()
				for _, e := range ends {
					if e.Src == src && e.Dst == dst && e.Established && e.Received == carried && e.Sent == carried && e.Netns == l.k.Cookie() {
						return slices.ContainsFunc(ends, func(e EndedFlow) bool { return e.Src == dst && e.Dst == src })
					}
				}
				return false
			})
		}
		out2 := dialOK(l.pod, network)
		outPeer2, _ := accept(t, server)
		send(t, out2, outPeer2, "clear again")
		if other := l.agent.other.Load(); other != 0 {
			t.Errorf("%d TCP packets other than SYNs on the device after the restart, want none", other)
		}
		want := []string{"clear before", "clear restarted", "clear again", "clear killed", "clear closed"} // the positive control
		if got := tap.has(append(want, "secret")...); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("outside there was %q, want %q", got, want)
		}
		must(t, l.k.cfg.Netns.Do(func() error {
			// Nothing has made a carried socket one that may go out.
			if m := markOf(t, mesh); m != testDeliver && mode == SteerBySockops {
				return fmt.Errorf("mark of the carried connection %#x, want %#x", m, testDeliver)
			}
			return nil
		}))
	})
}

// Connections that are older than the capture go on in the kernel.
func TestNetnsSteerEnrolsRunningConnections(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := &steeredLab{lab: newLab(t, true)}
		outAt, inAt := netip.AddrPortFrom(remote, 81), netip.AddrPortFrom(pod, 83)
		server, app := listenerOf(t, l.remote, outAt, 0), listenerOf(t, l.pod, inAt, 0)
		out, in := startDial(t, l.pod, netip.AddrPort{}, outAt, nil), startDial(t, l.remote, netip.AddrPort{}, inAt, nil)
		must(t, errors.Join(out.wait(t, 3000), in.wait(t, 3000)))
		outPeer, _ := accept(t, server)
		inPeer, _ := accept(t, app)
		// Half closed, and waiting to be: the application is done, its peer is not.
		half := startDial(t, l.pod, netip.AddrPort{}, outAt, nil)
		must(t, half.wait(t, 3000))
		halfPeer, _ := accept(t, server)
		must(t, unix.Shutdown(half.fd, unix.SHUT_WR))

		cfg := testConfig(l.pod)
		cfg.Steering = newSteering(t, mode, nil)
		l.capture(t, cfg, always(refuse))
		for _, pair := range [][2]int{{out.fd, outPeer}, {outPeer, out.fd}, {in.fd, inPeer}, {inPeer, in.fd}, {halfPeer, half.fd}} {
			send(t, pair[0], pair[1], "still here")
		}
		for _, fd := range []int{out.fd, inPeer, half.fd} {
			if m := markOf(t, fd); m != testOwn && mode != SteerByNFT {
				t.Errorf("mark of an older connection %#x, want %#x", m, testOwn)
			}
		}
		l.wantOnlySYNs(t, 0)
		if err := startDial(t, l.pod, netip.AddrPort{}, outAt, nil).wait(t, 3000); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a new connection: %v, want ztun's refusal", err)
		}
	})
}

// What is being opened when the capture begins is not enrolled: its next SYN is decided about.
func TestNetnsSteerDoesNotEnrolWhatIsBeingOpened(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, _, remote netip.Addr) {
		l := &steeredLab{lab: newLab(t, true)}
		must(t, l.remote.Do(func() error { return setRule(unix.RTN_BLACKHOLE, familyOf(remote)) })) // answers do not come back
		to := netip.AddrPortFrom(remote, 81)
		listenerOf(t, l.remote, to, 0)
		d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
		cfg := testConfig(l.pod)
		cfg.Steering = newSteering(t, mode, nil)
		l.capture(t, cfg, always(refuse))
		if m := markOf(t, d.fd); m != 0 {
			t.Errorf("mark of a socket that is being opened %#x, want none", m)
		}
		if err := d.wait(t, 3000); !errors.Is(err, unix.ECONNREFUSED) { // its second SYN, after 1 s
			t.Errorf("connect: %v, want ztun's refusal", err)
		}
	})
}

// A later start may steer in another way. New connections go that way, and an end of it leaves nothing of either.
func TestNetnsSteerAnotherWayAfterARestart(t *testing.T) {
	t.Parallel()
	for _, first := range backends {
		for _, second := range backends {
			if first.name == second.name {
				continue
			}
			t.Run(first.name+" then "+second.name, func(t *testing.T) {
				t.Parallel()
				l := &steeredLab{lab: newLab(t, true)}
				before := dump(t, l.pod)
				cfg := testConfig(l.pod)
				cfg.StateDir = t.TempDir()
				cfg.Steering = newSteering(t, first.name, nil)
				l.capture(t, cfg, byPort(crashWays))
				l.stop()
				must(t, l.k.Close())
				for _, fd := range l.accepts {
					closeNow(t, fd)
				}
				cfg.Generation++
				cfg.Steering = newSteering(t, second.name, nil)
				l.capture(t, cfg, byPort(crashWays))
				for _, a := range [][2]netip.Addr{{pod4, remote4}, {pod6, remote6}} {
					network, app := netip.AddrPortFrom(a[1], portNetwork), netip.AddrPortFrom(a[0], portApplication)
					for _, c := range []struct {
						ns       *Netns
						to       netip.AddrPort
						listener int
					}{
						{l.pod, network, listenerOf(t, l.remote, network, 0)},
						{l.pod, netip.AddrPortFrom(a[1], portListener), l.accepts[familyOf(a[1])]},
						{l.remote, app, listenerOf(t, l.pod, app, 0)},
					} {
						d := startDial(t, c.ns, netip.AddrPort{}, c.to, nil)
						if err := d.wait(t, 3000); err != nil {
							t.Fatalf("connect to %s: %v", c.to, err)
						}
						fd, _ := accept(t, c.listener)
						send(t, d.fd, fd, "hello")
						send(t, fd, d.fd, "hello you")
					}
				}
				l.wantOnlySYNs(t, 6)
				l.stop()
				must(t, l.k.Unenrol(t.Context()))
				if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
					t.Errorf("after Unenrol (-before +after):\n%s", diff)
				}
				if nft := nftTables(t, l.pod); len(nft) > 0 {
					t.Errorf("Unenrol leaves nft tables %v", nft)
				}
			})
		}
	}
}

// Two pods may have the same addresses. They share the Steering, and nothing else.
func TestNetnsSteerTwoPodsOfTheSameAddress(t *testing.T) {
	t.Parallel()
	for _, mode := range bpfModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			steerTwoPodsOfTheSameAddress(t, mode)
		})
	}
}

func steerTwoPodsOfTheSameAddress(t *testing.T, mode string) {
	var mu sync.Mutex
	ends := map[uint64][]EndedFlow{}
	s := newSteering(t, mode, func(e EndedFlow) {
		mu.Lock()
		defer mu.Unlock()
		ends[e.Netns] = append(ends[e.Netns], e)
	})
	ways := []Way{ToNetwork, ToListener}
	var labs [2]*steeredLab
	for i, w := range ways {
		labs[i] = &steeredLab{lab: newLab(t, true)}
		cfg := testConfig(labs[i].pod)
		cfg.Steering = s
		labs[i].capture(t, cfg, always(w))
	}
	if labs[0].k.Cookie() == labs[1].k.Cookie() || labs[0].k.Cookie() == 0 {
		t.Fatalf("cookies %d and %d", labs[0].k.Cookie(), labs[1].k.Cookie())
	}
	for _, a := range [][2]netip.Addr{{pod4, remote4}, {pod6, remote6}} {
		from, to := netip.AddrPortFrom(a[0], 33001), netip.AddrPortFrom(a[1], 8080)
		servers := [2]int{listenerOf(t, labs[0].remote, to, 0), labs[1].accepts[familyOf(a[1])]}
		var fds [2][2]int
		for i, l := range labs { // the same ports, at the same time
			d := startDial(t, l.pod, from, to, nil)
			if err := d.wait(t, 3000); err != nil {
				t.Fatalf("pod %d: connect to %s: %v", i, to, err)
			}
			c, _ := accept(t, servers[i])
			fds[i] = [2]int{d.fd, c}
		}
		for i := range labs {
			send(t, fds[i][0], fds[i][1], fmt.Sprintf("pod %d", i))
			if m, want := markOf(t, fds[i][0]), []int{testOwn, testDeliver}[i]; m != want && mode == SteerBySockops {
				t.Errorf("pod %d: mark %#x, want %#x", i, m, want)
			}
		}
		closeNow(t, fds[0][0])
		closeNow(t, fds[0][1])
		waitFor(t, "the end of the flow", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(ends[labs[0].k.Cookie()]) > 0
		})
		mu.Lock()
		if got := ends[labs[0].k.Cookie()]; len(ends) != 1 || len(got) != 1 || got[0].Src != from || got[0].Dst != to || got[0].Received != 5 {
			t.Errorf("ends %+v, want one of the first pod", ends)
		}
		clear(ends)
		mu.Unlock()
	}
	labs[0].stop()
	must(t, labs[0].k.Unenrol(t.Context())) // the other goes on
	d := startDial(t, labs[1].pod, netip.AddrPort{}, netip.AddrPortFrom(remote4, 8080), nil)
	if err := d.wait(t, 3000); err != nil {
		t.Errorf("connect of the second pod after the first is gone: %v", err)
	}
}

// Marks of the Config have to be those of its Steering.
func TestNetnsSteerMarksHaveToAgree(t *testing.T) {
	t.Parallel()
	cfg := testConfig(newNetns(t))
	cfg.Steering = newSteering(t, SteerBySockops, nil)
	cfg.Marks.Own++
	if _, err := Open(t.Context(), cfg); err == nil {
		t.Error("Open with other marks than its Steering: no error")
	}
	for mode, want := range map[string]string{"magic": `mode "magic" is not known`, "": `mode "" is not known`} {
		if _, err := NewSteering(SteeringConfig{Mode: mode, Marks: cfg.Marks}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("NewSteering of mode %q: %v, want %q", mode, err, want)
		}
	}
}
