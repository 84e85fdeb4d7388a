package tun

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Tests of what a simpler way of steering falls into.

// byPort decides by the port of the destination.
func byPort(ways map[uint16]Way) func(src, dst netip.AddrPort) Way {
	return func(_, dst netip.AddrPort) Way { return ways[dst.Port()] }
}

// What is refused looks as if nobody had stood between.
func TestNetnsSteerRefusalsAreFaithful(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, byPort(map[uint16]Way{81: ToNetwork, 82: refuse, 83: ToApplication, 84: refuse}))
		for _, c := range []struct {
			name string
			from *Netns
			to   netip.AddrPort
			ends bool
		}{
			{"closed port outside", l.pod, netip.AddrPortFrom(remote, 81), true},
			{"refused by ztun", l.pod, netip.AddrPortFrom(remote, 82), false},
			{"closed port of the pod", l.remote, netip.AddrPortFrom(pod, 83), true},
			{"refused by ztun, inbound", l.remote, netip.AddrPortFrom(pod, 84), false},
		} {
			d := startDial(t, c.from, netip.AddrPort{}, c.to, nil)
			src := localOf(t, d.fd)
			if err := d.wait(t, 3000); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s: connect to %s: %v, want connection refused", c.name, c.to, err)
			}
			closeNow(t, d.fd)
			if !c.ends {
				continue
			}
			want := EndedFlow{Netns: l.k.Cookie(), Src: src, Dst: c.to, Err: unix.ECONNREFUSED}
			if mode != SteerBySockops && c.from == l.remote { // the pod has never had a socket of it
				want.Err = unix.ETIMEDOUT
				for range 2 {
					l.k.steerer.(endSource).sweep(l.steering.cfg.Ended)
				}
			}
			l.wantEnded(t, want)
		}
		l.wantOnlySYNs(t, 4)
		l.wantEnded(t)
	})
}

// A side that closed first keeps the pair of ports in TIME_WAIT; a client that uses its port again at once does not wait for
// that. Assigned to the listener by tc, as one might, its SYN is lost without a trace.
func TestNetnsSteerSourcePortIsUsedAgainAtOnce(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener, 83: ToApplication, 84: ToListenerInbound}))
		ours := l.accepts[familyOf(pod)]
		server := listenerOf(t, l.remote, netip.AddrPortFrom(remote, 81), 0)
		app := listenerOf(t, l.pod, netip.AddrPortFrom(pod, 83), 0)
		const times = 4
		for _, c := range []struct {
			from, to netip.AddrPort
			ns       *Netns
			listener int
		}{
			{netip.AddrPortFrom(pod, 33001), netip.AddrPortFrom(remote, 81), l.pod, server},
			{netip.AddrPortFrom(pod, 33002), netip.AddrPortFrom(remote, 82), l.pod, ours},
			{netip.AddrPortFrom(remote, 33003), netip.AddrPortFrom(pod, 83), l.remote, app},
			{netip.AddrPortFrom(remote, 33004), netip.AddrPortFrom(pod, 84), l.remote, ours},
		} {
			for n := range times {
				d := startDial(t, c.ns, c.from, c.to, nil)
				if err := d.wait(t, 900); err != nil { // less than the time to the second SYN
					t.Fatalf("connect %d from %s to %s: %v", n, c.from, c.to, err)
				}
				fd, _ := accept(t, c.listener)
				must(t, unix.Shutdown(fd, unix.SHUT_WR)) // first, and so this side will wait
				if !ready(d.fd, unix.POLLIN, 3000) {
					t.Fatalf("connection %d from %s to %s: no end", n, c.from, c.to)
				}
				must(t, unix.Shutdown(d.fd, unix.SHUT_WR))
				if !ready(fd, unix.POLLIN, 3000) {
					t.Fatalf("connection %d from %s to %s: no end of the answer", n, c.from, c.to)
				}
				closeNow(t, d.fd)
				closeNow(t, fd)
			}
		}
		l.wantOnlySYNs(t, 4*times)
	})
}

// Late segments of connections that are over belong to no socket. They are answered by the kernel, not by the device.
func TestNetnsSteerLateSegmentsStayInTheKernel(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener, 83: ToApplication}))
		server := listenerOf(t, l.remote, netip.AddrPortFrom(remote, 81), 0)
		app := listenerOf(t, l.pod, netip.AddrPortFrom(pod, 83), 0)
		const times = 50
		for range times {
			for _, c := range []struct {
				to       netip.AddrPort
				ns       *Netns
				listener int
			}{
				{netip.AddrPortFrom(remote, 81), l.pod, server},
				{netip.AddrPortFrom(remote, 82), l.pod, l.accepts[familyOf(remote)]},
				{netip.AddrPortFrom(pod, 83), l.remote, app},
			} {
				d := startDial(t, c.ns, netip.AddrPort{}, c.to, nil)
				if err := d.wait(t, 3000); err != nil {
					t.Fatalf("connect to %s: %v", c.to, err)
				}
				fd, _ := accept(t, c.listener)
				for _, end := range []int{d.fd, fd} { // both with data that is not read, so that both reset
					_, _ = unix.Write(end, []byte("unread"))
				}
				reset(t, d.fd)
				_, _ = unix.Write(fd, []byte("late"))
				closeNow(t, fd)
			}
		}
		l.wantOnlySYNs(t, 3*times)
	})
}

// A listener that answers with SYN cookies keeps nothing of the SYN: the ACK has to find its way to it too.
func TestNetnsSteerWithSYNCookies(t *testing.T) {
	t.Parallel()
	eachBPFMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, byPort(map[uint16]Way{82: ToListener, 83: ToApplication, 84: ToListenerInbound}))
		must(t, l.pod.Do(func() error {
			p, err := openProcfs()
			if err != nil {
				return err
			}
			defer p.close()
			return p.write("net/ipv4/tcp_syncookies", "2") // always
		}))
		app := listenerOf(t, l.pod, netip.AddrPortFrom(pod, 83), 0)
		ours := l.accepts[familyOf(pod)]
		for _, c := range []struct {
			to       netip.AddrPort
			ns       *Netns
			listener int
		}{
			{netip.AddrPortFrom(remote, 82), l.pod, ours},
			{netip.AddrPortFrom(pod, 83), l.remote, app},
			{netip.AddrPortFrom(pod, 84), l.remote, ours},
		} {
			d := startDial(t, c.ns, netip.AddrPort{}, c.to, nil)
			if err := d.wait(t, 3000); err != nil {
				t.Fatalf("connect to %s: %v", c.to, err)
			}
			fd, _ := accept(t, c.listener)
			send(t, d.fd, fd, "hello")
			send(t, fd, d.fd, "hello you")
		}
		l.wantOnlySYNs(t, 3)
	})
}

// bindToInterface is what any program may do, and what no route stands against.
func bindToInterface(fd int) error {
	return unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "eth0")
}

// withDestinationOptions puts an extension header in front of TCP.
func withDestinationOptions(fd int) error {
	return unix.SetsockoptString(fd, unix.SOL_IPV6, unix.IPV6_DSTOPTS, "\x00\x00\x01\x04\x00\x00\x00\x00") // PadN
}

// dropCaptureRules takes away the rules that lead the pod's TCP to the device: whatever fails, the guard has to hold.
func dropCaptureRules(t *testing.T, ns *Netns) {
	t.Helper()
	must(t, ns.Do(func() error {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Priority == prefOutboundTCP || r.Priority == prefOutboundRest {
					if err := netlink.RuleDel(&r); err != nil {
						return err
					}
				}
			}
		}
		return nil
	}))
}

func TestNetnsSteerGuard(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		remote  netip.Addr
		prepare func(fd int) error
		rules   bool // as they should be
	}{
		{"IPv4 socket bound to the interface", remote4, bindToInterface, true},
		{"IPv6 socket bound to the interface", remote6, bindToInterface, false},
		{"IPv4 without rules", remote4, nil, false},
		{"IPv6 without rules", remote6, nil, false},
		{"IPv6 without rules, behind an extension header", remote6, withDestinationOptions, false},
	} {
		for i := range 2 * len(backends) {
			mode, open := backends[i/2].name, i%2 == 1 // the positive control: without the guard it gets through
			t.Run(fmt.Sprintf("%s/%s/open=%v", mode, c.name, open), func(t *testing.T) {
				t.Parallel()
				l := &steeredLab{lab: newLab(t, true)}
				cfg := testConfig(l.pod)
				cfg.Steering, cfg.FailOpenRoute = newSteering(t, mode, nil), open
				l.capture(t, cfg, always(ToNetwork))
				to := netip.AddrPortFrom(c.remote, 8080)
				server := listenerOf(t, l.remote, to, 0)
				if !c.rules {
					dropCaptureRules(t, l.pod)
				}
				d := startDial(t, l.pod, netip.AddrPort{}, to, c.prepare)
				if open {
					if err := d.wait(t, 3000); err != nil {
						t.Errorf("connect without the guard: %v, the test sees nothing", err)
					}
					return
				}
				if err := d.wait(t, 200); !errors.Is(err, unix.EINPROGRESS) {
					t.Errorf("connect to %s: %v, want a timeout", to, err)
				}
				if ready(server, unix.POLLIN, 0) {
					t.Error("the server has a connection")
				}
			})
		}
	}
}

// Kubelet's probes have no mark and are not captured; their answers pass the guard.
func TestNetnsSteerGuardLetsProbesBeAnswered(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, _ netip.Addr) {
		l := newSteeredLab(t, mode, always(ignore))
		probe := probe4
		if pod.Is6() {
			probe = probe6
		}
		setAddr(t, l.remote, netip.PrefixFrom(probe, probe.BitLen()).String(), true)
		to := netip.AddrPortFrom(pod, 8080)
		app := listenerOf(t, l.pod, to, 0)
		d := startDial(t, l.remote, netip.AddrPortFrom(probe, 0), to, nil)
		if err := d.wait(t, 3000); err != nil {
			t.Fatalf("probe: %v", err)
		}
		c, _ := accept(t, app)
		send(t, d.fd, c, "GET")
		send(t, c, d.fd, "200")
		l.wantOnlySYNs(t, 0)
	})
}

func TestNetnsSteerBurst(t *testing.T) {
	for _, mode := range bpfModes {
		t.Run(mode, func(t *testing.T) { steerBurst(t, mode) })
	}
}

func steerBurst(t *testing.T, mode string) {
	const burst = 5000
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	if limit.Cur < 2*burst+500 {
		if limit.Max < 2*burst+500 {
			cannotRun(t, fmt.Sprintf("needs %d descriptors, %d are allowed", 2*burst+500, limit.Max))
		}
		old := limit
		limit.Cur = limit.Max
		must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
		t.Cleanup(func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) })
	}
	var held atomic.Pointer[chan struct{}] // the agent waits for it: the device's queue has to take the whole burst
	l := newSteeredLab(t, mode, func(_, dst netip.AddrPort) Way {
		<-*held.Load()
		return map[uint16]Way{81: ToNetwork, 82: ToListener}[dst.Port()]
	})
	server := listenerOf(t, l.remote, netip.AddrPortFrom(remote4, 81), 0)
	for port, listener := range map[uint16]int{81: server, 82: l.accepts[unix.AF_INET]} {
		to := netip.AddrPortFrom(remote4, port)
		accepted := make(chan []int)
		go func() {
			var list []int
			for len(list) < burst && ready(listener, unix.POLLIN, 20_000) {
				if fd, _, err := unix.Accept(listener); err == nil {
					list = append(list, fd)
				}
			}
			accepted <- list
		}()
		dials := make([]int, burst)
		for i := range dials {
			fd, err := l.pod.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
			must(t, err)
			dials[i] = fd
		}
		connected := make(chan struct{})
		held.Store(&connected)
		for _, fd := range dials {
			if err := unix.Connect(fd, sockaddrOf(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				t.Errorf("connect to %s: %v", to, err)
			}
		}
		close(connected)
		failed := 0
		for _, fd := range dials {
			if err := (dial{fd, to}).wait(t, 20_000); err != nil {
				failed++
			}
		}
		list := <-accepted
		if failed > 0 || len(list) != burst {
			t.Errorf("%d connects to %s: %d failed, %d accepted", burst, to, failed, len(list))
		}
		for _, fd := range append(list, dials...) {
			_ = unix.Close(fd)
		}
	}
	must(t, l.pod.Do(func() error {
		link, err := netlink.LinkByName(DefaultName)
		if err == nil && link.Attrs().Statistics.TxDropped > 0 {
			t.Errorf("the device has lost %d packets", link.Attrs().Statistics.TxDropped)
		}
		return err
	}))
	if other := l.agent.other.Load(); other != 0 {
		t.Errorf("%d TCP packets other than SYNs on the device, want none", other)
	}
	if d := l.k.Drops(); d != (Drops{}) {
		t.Errorf("device: %+v", d)
	}
}

// A link that nobody holds any more is gone: the collector of garbage may close it. And whatever becomes of the programs, a flow
// that is there goes on, and a new one has no way in clear.
func TestNetnsSteerLostLinks(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, _, remote netip.Addr) {
		l := newSteeredLab(t, SteerBySockops, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener}))
		network, listener := netip.AddrPortFrom(remote, 81), netip.AddrPortFrom(remote, 82)
		server := listenerOf(t, l.remote, network, 0)
		dialBoth := func() (list [4]int) {
			t.Helper()
			for i, to := range []netip.AddrPort{network, listener} {
				d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
				if err := d.wait(t, 3000); err != nil {
					t.Fatalf("connect to %s: %v", to, err)
				}
				c, _ := accept(t, []int{server, l.accepts[familyOf(remote)]}[i])
				list[2*i], list[2*i+1] = d.fd, c
			}
			return list
		}
		for range 3 {
			runtime.GC()
		}
		before := dialBoth()
		l.wantOnlySYNs(t, 2)

		must(t, l.steering.backend.(*sockops).link.Close())
		for _, to := range []netip.AddrPort{network, listener} {
			d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
			if err := d.wait(t, 3000); err == nil { // its ACK has no mark, and is answered with RST
				if !ready(d.fd, unix.POLLIN, 3000) {
					t.Errorf("connection to %s without the program of sockets: goes on, want a reset", to)
				}
			}
		}
		if ready(server, unix.POLLIN, 50) {
			if fd, _, err := unix.Accept4(server, unix.SOCK_NONBLOCK); err == nil {
				b := make([]byte, 16)
				if n, err := unix.Read(fd, b); n > 0 {
					t.Errorf("the server has read %d bytes, %v", n, err)
				}
				_ = unix.Close(fd)
			}
		}
		must(t, l.k.steerer.(*sockopsNetns).link.Close())
		if err := startDial(t, l.pod, netip.AddrPort{}, listener, nil).wait(t, 200); err == nil { // refused, with IPv4 not even that
			t.Errorf("connect to %s without the look-up: connected", listener)
		}
		for i := 0; i < len(before); i += 2 {
			send(t, before[i], before[i+1], "still here")
			send(t, before[i+1], before[i], "here too")
		}
	})
}

// With tc a flow's way is in the filters: without one of them nothing finds another way out. What the pod sends on what was carried ends, and is not
// seen outside.
func TestNetnsSteerLostFilters(t *testing.T) {
	t.Parallel()
	for _, f := range []filter{egressFilter, deviceFilter} {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			eachFamily(t, func(t *testing.T, _, remote netip.Addr) {
				l := newSteeredLab(t, SteerByTC, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener}))
				network, listener := netip.AddrPortFrom(remote, 81), netip.AddrPortFrom(remote, 82)
				server := listenerOf(t, l.remote, network, 0)
				listenerOf(t, l.remote, listener, 0) // would take it in clear
				var open [2]dial
				for i, to := range []netip.AddrPort{network, listener} {
					open[i] = startDial(t, l.pod, netip.AddrPort{}, to, nil)
					must(t, open[i].wait(t, 3000))
					accept(t, []int{server, l.accepts[familyOf(remote)]}[i])
				}
				tap := startTap(t, l.remote)
				must(t, l.pod.Do(func() error {
					h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
					if err != nil {
						return err
					}
					defer h.Close()
					return (&setup{h: h}).deleteFilter(f, l.k.index)
				}))
				word := map[netip.AddrPort]string{network: "clear", listener: "secret"}
				for _, d := range open {
					_, err := unix.Write(d.fd, []byte(word[d.to]))
					must(t, err)
					if f == egressFilter && !ready(d.fd, unix.POLLIN, 3000) {
						t.Errorf("connection to %s goes on without %s", d.to, f.name)
					}
				}
				for _, to := range []netip.AddrPort{network, listener} {
					d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
					if err := d.wait(t, 200); err == nil {
						_, _ = unix.Write(d.fd, []byte(word[to]))
						if !ready(d.fd, unix.POLLIN, 3000) {
							t.Errorf("a new connection to %s goes on without %s", to, f.name)
						}
					}
				}
				want := []string{"clear"} // the connection that there was needs the other filter only
				if f == egressFilter {
					want = nil
				}
				if got := tap.has("clear", "secret"); !slices.Equal(got, want) {
					t.Errorf("outside there was %q, want %q", got, want)
				}
			})
		})
	}
}

// A SYN that comes out of the device without a decision goes nowhere, whatever the rules would do with it.
func TestNetnsSteerSYNWithoutDecisionIsDropped(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := &steeredLab{lab: newLab(t, true)}
		cfg := testConfig(l.pod)
		cfg.Steering, cfg.FailOpenRoute = newSteering(t, mode, nil), true // no guard that would do the same
		ways := ToNetwork
		l.capture(t, cfg, func(src, dst netip.AddrPort) Way { return ways })
		must(t, l.k.SteerListeners(-1, -1))
		l.stop()
		network, app := netip.AddrPortFrom(remote, 81), netip.AddrPortFrom(pod, 82)
		server, own := listenerOf(t, l.remote, network, 0), listenerOf(t, l.pod, app, 0)
		out, in := startDial(t, l.pod, netip.AddrPort{}, network, nil), startDial(t, l.remote, netip.AddrPort{}, app, nil)
		packets := 0
		waitFor(t, "both SYNs", func() bool {
			bufs, sizes := [][]byte{make([]byte, Headroom+MaxPacket)}, make([]int, 1)
			if _, err := l.k.Read(bufs, sizes, Headroom); err != nil {
				return false
			}
			if src, dst, flags, ok := tcpHeader(bufs[0][Headroom : Headroom+sizes[0]]); ok && flags&0x12 == 2 {
				packets++
				must(t, l.k.Steer(src, dst, ToNetwork))
				l.k.Unsteer(src, dst)
				_, err := l.k.Write([][]byte{bufs[0][:Headroom+sizes[0]]}, Headroom)
				must(t, err)
			}
			return packets == 2
		})
		for _, fd := range []int{out.fd, in.fd, server, own} {
			if ready(fd, unix.POLLIN|unix.POLLOUT, 50) {
				t.Error("something has happened on a socket, want nothing")
			}
		}
	})
}

// The application's own bits of the mark stay, and a socket for both families is steered as one of its own.
func TestNetnsSteerKeepsForeignBitsOfTheMark(t *testing.T) {
	t.Parallel()
	l := newSteeredLab(t, SteerBySockops, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener}))
	server := listenerOf(t, l.remote, netip.AddrPortFrom(remote4, 81), 0)
	for port, c := range map[uint16]struct{ listener, ours int }{81: {server, testOwn}, 82: {l.accepts[unix.AF_INET], testDeliver}} {
		fd, err := l.pod.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		must(t, err)
		defer unix.Close(fd)
		must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, 0x7000_0007))
		if err := unix.Connect(fd, &unix.SockaddrInet6{Port: int(port), Addr: remote4.As16()}); !errors.Is(err, unix.EINPROGRESS) {
			t.Fatalf("connect: %v", err)
		}
		if err := (dial{fd: fd}).wait(t, 3000); err != nil {
			t.Fatalf("connect to port %d: %v", port, err)
		}
		other, _ := accept(t, c.listener)
		send(t, fd, other, "hello")
		if got, want := markOf(t, fd), 0x7000_0000|c.ours; got != want {
			t.Errorf("mark %#x, want %#x", got, want)
		}
	}
	l.wantOnlySYNs(t, 2)
}

// otherProgramOfSockets attaches a program as another component of the node may have: it gives sockets of ns that connect a mark.
func otherProgramOfSockets(t *testing.T, ns *Netns, mark int32) {
	t.Helper()
	fd, err := ns.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(t, err)
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, soNetnsCookie)
	must(t, err)
	const activeEstablished = 4 // BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, include/uapi/linux/bpf.h
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SockOps, Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R0, asm.R6, 0, asm.Word),
		asm.JNE.Imm(asm.R0, activeEstablished, "out"),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.FnGetNetnsCookie.Call(),
		asm.LoadImm(asm.R1, int64(cookie), asm.DWord),
		asm.JNE.Reg(asm.R0, asm.R1, "out"),
		asm.StoreImm(asm.RFP, -4, int64(mark), asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, unix.SOL_SOCKET),
		asm.Mov.Imm(asm.R3, unix.SO_MARK),
		asm.Mov.Reg(asm.R4, asm.RFP),
		asm.Add.Imm(asm.R4, -4),
		asm.Mov.Imm(asm.R5, 4),
		asm.FnSetsockopt.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
		asm.Return(),
	}})
	must(t, err)
	defer prog.Close()
	cgroup, err := openRootCgroup()
	must(t, err)
	defer cgroup.Close()
	attached, err := link.AttachRawLink(link.RawLinkOptions{Target: int(cgroup.Fd()), Program: prog, Attach: ebpf.AttachCGroupSockOps})
	must(t, err)
	t.Cleanup(func() { _ = attached.Close() })
}

// Two programs write marks. What the first has written stays beside ztun's bits; when the other one comes last and takes these away, the flow ends,
// and nothing of it is seen outside.
func TestNetnsSteerBesideAnotherProgramOfSockets(t *testing.T) {
	t.Parallel()
	const foreign = 0x7000_0000
	for _, last := range []bool{false, true} {
		t.Run(fmt.Sprintf("last=%v", last), func(t *testing.T) {
			t.Parallel()
			l := &steeredLab{lab: newLab(t, true)}
			if !last {
				otherProgramOfSockets(t, l.pod, foreign)
			}
			cfg := testConfig(l.pod)
			cfg.Steering = newSteering(t, SteerBySockops, nil)
			if last {
				otherProgramOfSockets(t, l.pod, foreign)
			}
			l.capture(t, cfg, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener}))
			tap := startTap(t, l.remote)
			server := listenerOf(t, l.remote, netip.AddrPortFrom(remote4, 81), 0)
			for port, c := range map[uint16]struct{ listener, ours int }{81: {server, testOwn}, 82: {l.accepts[unix.AF_INET], testDeliver}} {
				d := startDial(t, l.pod, netip.AddrPort{}, netip.AddrPortFrom(remote4, port), nil)
				if err := d.wait(t, 3000); last && errors.Is(err, unix.ECONNRESET) {
					continue // it came at once
				} else if err != nil {
					t.Fatalf("connect to port %d: %v", port, err)
				}
				if !last {
					other, _ := accept(t, c.listener)
					send(t, d.fd, other, "hello")
					if got, want := markOf(t, d.fd), foreign|c.ours; got != want {
						t.Errorf("mark %#x, want %#x", got, want)
					}
					continue
				}
				_, _ = unix.Write(d.fd, []byte("secret")) // the reset may be faster
				if !ready(d.fd, unix.POLLIN, 3000) {
					t.Errorf("port %d: a flow without ztun's mark goes on", port)
				}
			}
			if got := tap.has("secret"); len(got) > 0 {
				t.Error("a flow without ztun's mark was seen outside")
			}
		})
	}
}

// An application may open connections by MPTCP, or with data in the SYN: it is led on as it is.
func TestNetnsSteerMPTCPAndFastOpen(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener, 83: ToApplication, 84: ToListenerInbound}))
		for _, ns := range []*Netns{l.pod, l.remote} {
			must(t, ns.Do(func() error {
				p, err := openProcfs()
				if err != nil {
					return err
				}
				defer p.close()
				return errors.Join(p.write("net/ipv4/tcp_fastopen", "519"), // client and server, both without a cookie
					p.write("net/mptcp/enabled", "1"))
			}))
		}
		// Listeners that take both, or a way of ztun's, which takes neither.
		listener := func(ns *Netns, at netip.AddrPort) int {
			t.Helper()
			fd, err := ns.Socket(familyOf(at.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, unix.IPPROTO_MPTCP)
			must(t, err)
			closeAtEnd(t, fd)
			must(t, errors.Join(unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_FASTOPEN, 16), unix.Bind(fd, sockaddrOf(at)), unix.Listen(fd, 16)))
			return fd
		}
		ours := l.accepts[familyOf(remote)]
		flows := []struct {
			ns       *Netns
			to       netip.AddrPort
			listener int
		}{
			{l.pod, netip.AddrPortFrom(remote, 81), listener(l.remote, netip.AddrPortFrom(remote, 81))},
			{l.pod, netip.AddrPortFrom(remote, 82), ours},
			{l.remote, netip.AddrPortFrom(pod, 83), listener(l.pod, netip.AddrPortFrom(pod, 83))},
			{l.remote, netip.AddrPortFrom(pod, 84), ours},
		}
		for _, f := range flows {
			fd, err := f.ns.Socket(familyOf(f.to.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, unix.IPPROTO_MPTCP)
			must(t, err)
			closeAtEnd(t, fd)
			if err := unix.Connect(fd, sockaddrOf(f.to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				t.Fatal(err)
			}
			if err := (dial{fd, f.to}).wait(t, 3000); err != nil {
				t.Fatalf("MPTCP: connect to %s: %v", f.to, err)
			}
			c, _ := accept(t, f.listener)
			send(t, fd, c, "hello")
			send(t, c, fd, "hello you")
		}
		l.wantOnlySYNs(t, int64(len(flows)))
		for _, f := range flows {
			fd, err := f.ns.Socket(familyOf(f.to.Addr()), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
			must(t, err)
			closeAtEnd(t, fd)
			if err := unix.Sendto(fd, []byte("early"), unix.MSG_FASTOPEN, sockaddrOf(f.to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				t.Fatalf("Fast Open: send to %s: %v", f.to, err)
			}
			c, _ := accept(t, f.listener)
			if !ready(c, unix.POLLIN, 3000) {
				t.Fatalf("Fast Open to %s: nothing arrives", f.to)
			}
			b := make([]byte, 16)
			if n, err := unix.Read(c, b); err != nil || string(b[:max(n, 0)]) != "early" {
				t.Errorf("Fast Open to %s: read %q, %v", f.to, b[:max(n, 0)], err)
			}
			send(t, c, fd, "hello you")
			send(t, fd, c, "hello")
		}
		l.wantOnlySYNs(t, 2*int64(len(flows)))
	})
}

// ttlOfSYN returns the hop limit of the SYN that began a connection to a listener with TCP_SAVE_SYN.
func ttlOfSYN(t *testing.T, fd int) int {
	t.Helper()
	var syn [128]byte
	size := uint32(len(syn))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_TCP, unix.TCP_SAVED_SYN,
		uintptr(unsafe.Pointer(&syn)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 || size < 40 {
		t.Fatalf("saved SYN: %d bytes, %v", size, errno)
	}
	if syn[0]>>4 == 4 {
		return int(syn[8])
	}
	return int(syn[7])
}

// The SYN that has been through the device counts no hop more than the segments behind it, by either way out.
func TestNetnsSteerCountsNoHop(t *testing.T) {
	t.Parallel()
	for _, rule := range []bool{false, true} { // with a rule of others the main table does not tell the interface
		t.Run(fmt.Sprintf("rule=%v", rule), func(t *testing.T) {
			t.Parallel()
			eachBPFMode(t, func(t *testing.T, mode string, _, remote netip.Addr) {
				l := &steeredLab{lab: newLab(t, true)}
				if rule {
					must(t, l.pod.Do(func() error {
						r := netlink.NewRule()
						r.Family, r.Priority, r.Table, r.Mark = familyOf(remote), 2000, 100, 9
						return netlink.RuleAdd(r)
					}))
				}
				cfg := testConfig(l.pod)
				cfg.Steering = newSteering(t, mode, nil)
				l.capture(t, cfg, always(ToNetwork))
				if out := l.k.addrs.wayOut(remote); (out == 0) != rule {
					t.Errorf("way out to %s: interface %d", remote, out)
				}
				to := netip.AddrPortFrom(remote, 8080)
				server := listenerOf(t, l.remote, to, 0)
				must(t, unix.SetsockoptInt(server, unix.SOL_TCP, unix.TCP_SAVE_SYN, 1))
				d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
				if err := d.wait(t, 3000); err != nil {
					t.Fatalf("connect to %s: %v", to, err)
				}
				c, _ := accept(t, server)
				send(t, d.fd, c, "hello")
				if ttl := ttlOfSYN(t, c); ttl != 64 {
					t.Errorf("SYN arrives with %d hops left, want 64", ttl)
				}
				l.wantOnlySYNs(t, 1)
			})
		})
	}
}

// A second rule for table local in front, left by somebody's repair, would let everything in past the device.
func TestNetnsSteerSecondLocalRule(t *testing.T) {
	t.Parallel()
	l := &steeredLab{lab: newLab(t, true)}
	must(t, l.pod.Do(func() error {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			r := kernelLocal(family)
			r.Protocol = unix.RTPROT_BOOT
			if err := netlink.RuleAdd(r); err != nil {
				return err
			}
		}
		return nil
	}))
	cfg := testConfig(l.pod)
	cfg.Steering = newSteering(t, SteerBySockops, nil)
	l.capture(t, cfg, always(refuse))
	for _, pod := range []netip.Addr{pod4, pod6} {
		to := netip.AddrPortFrom(pod, 8080)
		listenerOf(t, l.pod, to, 0)
		if err := startDial(t, l.remote, netip.AddrPort{}, to, nil).wait(t, 3000); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("connect to %s: %v, want ztun's refusal", to, err)
		}
	}
	l.wantOnlySYNs(t, 2)
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		if rules := strings.Join(rulesOf(t, l.pod, family), "\n"); strings.Contains(rules, "pref 0 ") {
			t.Errorf("rules:\n%s\nwant none at preference 0", rules)
		}
	}
}

// A rule that goes to one which is not there is passed over: what should be exempt is captured. So no rule is added before the
// one that it goes to, nor removed after it.
func TestNetnsSteerNoRuleGoesNowhere(t *testing.T) {
	t.Parallel()
	l := newSteeredLab(t, SteerBySockops, always(ToNetwork))
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		s := &setup{cfg: l.k.cfg, ifaces: l.k.ifaces}
		there := map[int]bool{}
		for _, r := range s.rules(family) {
			if r.Goto > 0 && !there[r.Goto] {
				t.Errorf("rule %s is added before its target", ruleKey(r))
			}
			if r.Goto > 0 && removeRank(r.Priority) >= removeRank(r.Goto) {
				t.Errorf("rule %s is removed after its target", ruleKey(r))
			}
			there[r.Priority] = true
		}
	}
	to := netip.AddrPortFrom(remote4, 8080)
	server := listenerOf(t, l.remote, to, 0)
	d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
	if err := d.wait(t, 3000); err != nil {
		t.Fatal(err)
	}
	c, _ := accept(t, server)
	send(t, d.fd, c, "hello")
	must(t, l.pod.Do(func() error { // the positive control
		rules, err := netlink.RuleList(unix.AF_INET)
		for _, r := range rules {
			if r.Priority == prefLocalExempted {
				err = errors.Join(err, netlink.RuleDel(&r))
			}
		}
		return err
	}))
	_, err := unix.Write(d.fd, []byte("hello"))
	must(t, err)
	waitFor(t, "a captured segment", func() bool { return l.agent.other.Load() > 0 })
}

// A client's SYN may have the addresses and ports of a connection that the pod still has. It is a new one, and is decided about
// as such.
func TestNetnsSteerSYNOfAnOpenConnectionIsDecidedAbout(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		first := true
		l := newSteeredLab(t, mode, func(_, _ netip.AddrPort) Way {
			defer func() { first = false }()
			if first {
				return ToApplication
			}
			return ignore
		})
		to, from := netip.AddrPortFrom(pod, 8080), netip.AddrPortFrom(remote, 33001)
		app := listenerOf(t, l.pod, to, 0)
		d := startDial(t, l.remote, from, to, nil)
		if err := d.wait(t, 3000); err != nil {
			t.Fatal(err)
		}
		c, _ := accept(t, app)
		// The client forgets the connection without a word: its RST is lost.
		must(t, l.remote.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			if err := netlink.LinkSetDown(link); err != nil {
				return err
			}
			reset(t, d.fd)
			addr := &netlink.Addr{IPNet: hostNet(remote), Flags: unix.IFA_F_NODAD}
			if remote.Is6() { // gone with the interface
				_ = netlink.AddrReplace(link, addr)
			}
			return netlink.LinkSetUp(link)
		}))
		must(t, l.remote.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: hostNet(pod), Scope: netlink.SCOPE_LINK})
		}))
		startDial(t, l.remote, from, to, nil)
		waitFor(t, "the second SYN", func() bool { return l.agent.syns.Load() >= 2 })
		// It would have answered, and have been reset for that. By nftables it is so: the rule for ztun's listener finds any socket with the own mark.
		if mode != SteerByNFT && ready(c, unix.POLLIN, 0) {
			t.Error("the second SYN has come to the connection that there is")
		}
	})
}

func TestNetnsSteerUnenrolLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			unenrolLeavesNothing(t, b.name)
		})
	}
}

func unenrolLeavesNothing(t *testing.T, mode string) {
	l := &steeredLab{lab: newLab(t, true)}
	before := dump(t, l.pod)
	cfg := testConfig(l.pod)
	cfg.StateDir = t.TempDir()
	s, err := NewSteering(SteeringConfig{Mode: mode, Marks: cfg.Marks})
	must(t, err)
	cfg.Steering = s
	attached := func() (n int) {
		cgroup, err := openRootCgroup()
		must(t, err)
		defer cgroup.Close()
		of, err := s.backend.(*sockops).link.Info()
		must(t, err)
		result, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: ebpf.AttachCGroupSockOps})
		must(t, err)
		for _, p := range result.Programs {
			if p.ID == of.Program {
				n++
			}
		}
		return n
	}
	if mode == SteerBySockops {
		if n := attached(); n != 1 {
			t.Errorf("attached to the root of cgroup v2 %d times, want once", n)
		}
	}
	l.capture(t, cfg, always(ToListener))
	d := startDial(t, l.pod, netip.AddrPort{}, netip.AddrPortFrom(remote4, 8080), nil)
	if err := d.wait(t, 3000); err != nil {
		t.Fatal(err)
	}
	l.stop()
	must(t, l.k.Unenrol(t.Context()))
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(dump(t, l.pod), "\n")); diff != "" {
		t.Errorf("after Unenrol (-before +after):\n%s", diff)
	}
	must(t, l.pod.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		link, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		ours, err := (&setup{h: h}).ourFilters(link.Attrs().Index)
		if len(ours) > 0 {
			t.Errorf("Unenrol leaves %d filters on eth0", len(ours))
		}
		return err
	}))
	if nft := nftTables(t, l.pod); len(nft) > 0 {
		t.Errorf("Unenrol leaves nft tables %v", nft)
	}
	// The connection that ztun carried must not go on in clear.
	if _, err := unix.Write(d.fd, []byte("secret")); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("write to a connection that ztun carried: %v, want an end of it", err)
	}
	must(t, s.Close())
}
