package tun

import (
	"errors"
	"net/netip"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// dissolve ends the connection of a socket as any program may: what comes then is another one.
func dissolve(t *testing.T, fd int) {
	t.Helper()
	var sa unix.RawSockaddr // AF_UNSPEC
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unsafe.Sizeof(sa)); errno != 0 {
		t.Fatalf("connect to AF_UNSPEC: %v", errno)
	}
}

// A socket that was handed back keeps its mark when its program dissolves the connection. The next one is decided about like any other, and
// a listener that is made of it takes nothing past the device.
func TestNetnsSteerSocketUsedAgain(t *testing.T) {
	t.Parallel()
	eachBPFMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, func(_, dst netip.AddrPort) Way {
			switch dst.Port() {
			case 8080:
				return ToNetwork
			case 82:
				return ToListener
			case 83:
				return ToApplication
			}
			return refuse
		})
		allowed, refused := netip.AddrPortFrom(remote, 8080), netip.AddrPortFrom(remote, 9090)
		server, other := listenerOf(t, l.remote, allowed, 0), listenerOf(t, l.remote, refused, 0)
		again := func(what string, fd int) {
			t.Helper()
			before := l.agent.syns.Load()
			dissolve(t, fd)
			if err := unix.Connect(fd, sockaddrOf(refused)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				t.Fatalf("%s: connect: %v", what, err)
			}
			d := dial{fd, refused}
			if err := d.wait(t, 2000); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s: connect again: %v, want it refused", what, err)
			}
			if ready(other, unix.POLLIN, 100) {
				t.Errorf("%s: the server outside has a connection that was refused", what)
			}
			if l.agent.syns.Load() == before {
				t.Errorf("%s: nobody was asked", what)
			}
		}
		out := startDial(t, l.pod, netip.AddrPort{}, allowed, nil)
		must(t, out.wait(t, 3000))
		accept(t, server)
		again("handed back, outbound", out.fd)

		at := netip.AddrPortFrom(pod, 83)
		app := listenerOf(t, l.pod, at, 0)
		in := startDial(t, l.remote, netip.AddrPort{}, at, nil)
		must(t, in.wait(t, 3000))
		fd, _ := accept(t, app)
		again("handed back, inbound", fd)

		// The socket of a connection that came by a SYN cookie has its mark from the ACK.
		must(t, l.pod.Do(func() error {
			p, err := openProcfs()
			if err != nil {
				return err
			}
			defer p.close()
			return p.write("net/ipv4/tcp_syncookies", "2") // always
		}))
		in = startDial(t, l.remote, netip.AddrPort{}, at, nil)
		must(t, in.wait(t, 3000))
		fd, _ = accept(t, app)
		again("handed back, inbound, by a SYN cookie", fd)

		if pod.Is6() { // so that no program sees the SYN at first sight
			in := startDial(t, l.remote, netip.AddrPort{}, at, nil)
			must(t, in.wait(t, 3000))
			fd, _ := accept(t, app)
			dissolve(t, fd)
			must(t, withDestinationOptions(fd))
			if err := unix.Connect(fd, sockaddrOf(refused)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				t.Fatal(err)
			}
			if ready(other, unix.POLLIN, 100) {
				t.Error("behind an extension header: the server outside has a connection that was refused")
			}
		}

		// What was decided about the next one counts, whatever became of the first.
		tap := startTap(t, l.remote)
		for _, to := range []netip.AddrPort{allowed, netip.AddrPortFrom(remote, 82)} {
			in, out := startDial(t, l.remote, netip.AddrPort{}, at, nil), startDial(t, l.pod, netip.AddrPort{}, allowed, nil)
			must(t, errors.Join(in.wait(t, 3000), out.wait(t, 3000)))
			accepted, _ := accept(t, app)
			accept(t, server)
			for what, fd := range map[string]int{"inbound": accepted, "outbound": out.fd} {
				dissolve(t, fd)
				if err := unix.Connect(fd, sockaddrOf(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
					t.Fatal(err)
				}
				if err := (dial{fd, to}).wait(t, 3000); err != nil {
					t.Fatalf("an %s socket connects to %s: %v", what, to, err)
				}
				listener, word := l.accepts[familyOf(remote)], "secret"
				if to == allowed {
					listener, word = server, "in clear"
				}
				c, _ := accept(t, listener)
				send(t, fd, c, word)
				send(t, c, fd, "and back")
			}
		}
		if got := tap.has("in clear", "secret"); len(got) != 1 || got[0] != "in clear" {
			t.Errorf("outside there was %q, want what may be in clear", got)
		}

		listening := startDial(t, l.pod, netip.AddrPort{}, allowed, nil)
		must(t, listening.wait(t, 3000))
		accept(t, server)
		dissolve(t, listening.fd)
		must(t, unix.Listen(listening.fd, 1))
		before := l.agent.syns.Load()
		d := startDial(t, l.remote, netip.AddrPort{}, netip.AddrPortFrom(pod, localOf(t, listening.fd).Port()), nil)
		if err := d.wait(t, 2000); !errors.Is(err, unix.ECONNREFUSED) || l.agent.syns.Load() == before {
			t.Errorf("to a listener made of a socket that was handed back: %v with %d SYNs asked about, want it refused", err, l.agent.syns.Load()-before)
		}
	})
}

// A program reads the mark of a socket of its own whose connection the kernel carries, which takes no privilege, and gives it to others, for which
// CAP_NET_RAW will do. Neither do they leave the mesh by it nor does a listener take what was not decided about.
func TestNetnsSteerMarkIsNoSecret(t *testing.T) {
	t.Parallel()
	eachBPFMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, func(_, dst netip.AddrPort) Way {
			switch dst.Port() {
			case 8080:
				return ToNetwork
			case 83:
				return ToApplication
			}
			return refuse
		})
		allowed, refused, at := netip.AddrPortFrom(remote, 8080), netip.AddrPortFrom(remote, 9090), netip.AddrPortFrom(pod, 83)
		server, other, app := listenerOf(t, l.remote, allowed, 0), listenerOf(t, l.remote, refused, 0), listenerOf(t, l.pod, at, 0)
		out, in := startDial(t, l.pod, netip.AddrPort{}, allowed, nil), startDial(t, l.remote, netip.AddrPort{}, at, nil)
		must(t, errors.Join(out.wait(t, 3000), in.wait(t, 3000)))
		accept(t, server)
		accepted, _ := accept(t, app)
		marks := map[int]bool{testOwn: true, testOwn | applicationBit: true, testDeliver: true}
		for _, fd := range []int{out.fd, accepted} {
			m, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK)
			must(t, err)
			if uint32(m)&testSecret != 0 {
				t.Errorf("an application's socket has the mark %#x, with bits of the secret", uint32(m))
			}
			if m != 0 {
				marks[int(uint32(m))], marks[m&DefaultMarkMask] = true, true
			}
		}
		set := func(mark int) func(fd int) error {
			return func(fd int) error {
				return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(int32(uint32(mark))))
			}
		}
		port := uint16(7000)
		for mark := range marks {
			for what, prepare := range map[string]func(fd int) error{
				"": set(mark),
				"bound to the interface, ": func(fd int) error {
					return errors.Join(set(mark)(fd), unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "eth0"))
				},
			} {
				d := startDial(t, l.pod, netip.AddrPort{}, refused, prepare)
				if err := d.wait(t, 300); err == nil || ready(other, unix.POLLIN, 0) {
					t.Errorf("%sa socket with the mark %#x: %v; it must not be connected", what, uint32(mark), err)
				}
			}
			port++
			listenerOf(t, l.pod, netip.AddrPortFrom(pod, port), int(int32(uint32(mark))))
			before := l.agent.syns.Load()
			d := startDial(t, l.remote, netip.AddrPort{}, netip.AddrPortFrom(pod, port), nil)
			if err := d.wait(t, 2000); !errors.Is(err, unix.ECONNREFUSED) || l.agent.syns.Load() == before {
				t.Errorf("to a listener with the mark %#x: %v with %d SYNs asked about, want it refused", uint32(mark), err, l.agent.syns.Load()-before)
			}
		}
	})
}

// A packet socket sees the marks of what leaves by an interface, for which CAP_NET_RAW will do: none has the secret.
func TestNetnsSteerSecretIsNotOnTheWire(t *testing.T) {
	t.Parallel()
	eachBPFMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, byPort(map[uint16]Way{8080: ToNetwork, 83: ToApplication}))
		out, in := netip.AddrPortFrom(remote, 8080), netip.AddrPortFrom(pod, 83)
		server, app := listenerOf(t, l.remote, out, 0), listenerOf(t, l.pod, in, 0)
		marked := func(mark uint32) *tap {
			p := startTap(t, l.pod)
			filter := []unix.SockFilter{
				{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0xfffff000 + 20}, // SKF_AD_OFF + SKF_AD_MARK
				{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mark},
				{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1},
				{Code: unix.BPF_RET | unix.BPF_K, K: MaxPacket},
				{Code: unix.BPF_RET | unix.BPF_K},
			}
			must(t, unix.SetsockoptSockFprog(p.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}))
			return p
		}
		own, secret := marked(testOwn), marked(testSecret)
		pair := func(listener int, d dial, words string) {
			t.Helper()
			must(t, d.wait(t, 3000))
			fd, _ := accept(t, listener)
			send(t, d.fd, fd, words)
			send(t, fd, d.fd, words)
		}
		pair(server, startDial(t, l.pod, netip.AddrPort{}, out, func(fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, testOwnSocket)
		}), "by ztun")
		pair(server, startDial(t, l.pod, netip.AddrPort{}, out, nil), "handed back")
		pair(app, startDial(t, l.remote, netip.AddrPort{}, in, nil), "inbound")
		if found := own.has("by ztun", "handed back", "inbound"); len(found) != 3 { // the positive control
			t.Errorf("with the own mark there was %q, want all three", found)
		}
		if ready(secret.fd, unix.POLLIN, 0) {
			t.Error("a packet with the secret can be seen")
		}
	})
}

// Of the connections that are older than the capture those of the pod with itself are nobody's business, and who opened the others is told by
// the SYN, whatever ports they have.
func TestNetnsHandedBack(t *testing.T) {
	t.Parallel()
	l := &steeredLab{lab: newLab(t, true)}
	own := netip.MustParseAddrPort("127.0.0.1:5432")
	db := listenerOf(t, l.pod, own, 0)
	d := startDial(t, l.pod, netip.AddrPort{}, own, nil)
	must(t, d.wait(t, 3000))
	accept(t, db)
	outAt, low := netip.AddrPortFrom(remote4, 81), netip.AddrPortFrom(pod4, 20000)
	server := listenerOf(t, l.remote, outAt, 0)
	o := startDial(t, l.pod, low, outAt, nil)
	must(t, o.wait(t, 3000))
	accept(t, server)
	inAt := netip.AddrPortFrom(pod4, 82)
	app := listenerOf(t, l.pod, inAt, 0)
	in := startDial(t, l.remote, netip.AddrPort{}, inAt, nil)
	must(t, in.wait(t, 3000))
	accept(t, app)
	cfg := testConfig(l.pod)
	cfg.Steering = newSteering(t, SteerBySockops, nil)
	l.capture(t, cfg, always(refuse))
	list, err := l.k.HandedBack()
	must(t, err)
	type found struct {
		Src, Dst string
		Inbound  bool
	}
	got := make(map[found]int)
	for _, h := range list {
		got[found{h.Src.String(), h.Dst.String(), h.Inbound}]++
	}
	want := map[found]int{
		{low.String(), outAt.String(), false}:             1,
		{localOf(t, in.fd).String(), inAt.String(), true}: 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("connections mismatch (-want +got):\n%s", diff)
	}
}
