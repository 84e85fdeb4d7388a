package tun

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Where sockets cannot be iterated over, connections that are older than the capture are known by addresses and ports. These go on, through a
// death of the process too; what else is in its middle is reset, and after a death no connection is taken for an older one.
func TestNetnsSteerOlderConnectionsWithoutIterator(t *testing.T) {
	t.Parallel()
	eachBPFMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := &steeredLab{lab: newLab(t, true)}
		outAt, inAt, mesh := netip.AddrPortFrom(remote, 81), netip.AddrPortFrom(pod, 83), netip.AddrPortFrom(remote, 82)
		server, app := listenerOf(t, l.remote, outAt, 0), listenerOf(t, l.pod, inAt, 0)
		// An older connection: the pod's end, the other.
		dialOut := func(from netip.AddrPort) [2]int {
			t.Helper()
			d := startDial(t, l.pod, from, outAt, nil)
			must(t, d.wait(t, 3000))
			c, _ := accept(t, server)
			return [2]int{d.fd, c}
		}
		dialIn := func() [2]int {
			t.Helper()
			d := startDial(t, l.remote, netip.AddrPort{}, inAt, nil)
			must(t, d.wait(t, 3000))
			c, _ := accept(t, app)
			return [2]int{c, d.fd}
		}
		goesOn := func(when string, list ...[2]int) {
			t.Helper()
			for _, c := range list {
				send(t, c[0], c[1], when)
				send(t, c[1], c[0], when+" too")
			}
		}
		isReset := func(what string, c [2]int) {
			t.Helper()
			_, err := unix.Write(c[0], []byte("secret of the unknown"))
			must(t, err)
			if !ready(c[0], unix.POLLIN, 3000) {
				t.Fatalf("%s: neither goes on nor ends", what)
			}
			if _, err := unix.Read(c[0], make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("%s: read: %v, want a reset", what, err)
			}
		}
		any, port := netip.AddrPortFrom(pod, 0), netip.AddrPortFrom(pod, 20000)
		out, in, idle, unknown, lost, again := dialOut(any), dialIn(), dialOut(any), dialOut(any), dialOut(any), dialOut(any)
		gone := dialOut(port)
		forget := func(c [2]int) {
			t.Helper()
			key := keyOf(l.k.Cookie(), localOf(t, c[0]), outAt)
			must(t, l.k.stored().older.Delete(&key))
		}
		var mu sync.Mutex // guards ends
		var ends []EndedFlow
		capture := func(generation uint64) {
			t.Helper()
			cfg := testConfig(l.pod)
			cfg.Generation = generation
			cfg.Steering = startSteering(t, SteeringConfig{Mode: mode, noBTF: true, Ended: func(e EndedFlow) {
				mu.Lock()
				defer mu.Unlock()
				ends = append(ends, e)
			}})
			l.capture(t, cfg, func(src, dst netip.AddrPort) Way {
				if src == port || dst == mesh {
					return ToListener
				}
				return refuse
			})
		}
		handedBack := func() (n int) {
			t.Helper()
			list, err := l.k.HandedBack()
			must(t, err)
			for _, c := range [][2]int{out, in, idle} {
				local, peer := localOf(t, c[0]), localOf(t, c[1])
				if slices.ContainsFunc(list, func(h HandedBack) bool {
					return h.Src == local && h.Dst == peer && !h.Inbound || h.Src == peer && h.Dst == local && h.Inbound
				}) {
					n++
				}
			}
			return n
		}

		capture(7)
		tap := startTap(t, l.remote)
		goesOn("older", out, in)
		for _, c := range [][2]int{out, in} {
			if m := markOf(t, c[0]); m != 0 {
				t.Fatalf("mark %#x: the kernel has iterated over sockets", m)
			}
		}
		l.wantOnlySYNs(t, 0)
		if n := handedBack(); n != 3 {
			t.Errorf("HandedBack lists %d of 3 older connections", n)
		}
		forget(unknown)
		isReset("a connection that nobody knows", unknown)

		// Its ports are no pass for another connection.
		dissolve(t, again[0])
		if err := unix.Connect(again[0], sockaddrOf(outAt)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
			t.Fatal(err)
		}
		if err := (dial{again[0], outAt}).wait(t, 3000); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("the socket of an older connection connects again: %v, want ztun's refusal", err)
		}
		reset(t, gone[1])
		if !ready(gone[0], unix.POLLIN, 3000) {
			t.Fatal("an older connection does not hear of its reset")
		}
		closeNow(t, gone[0])
		same := startDial(t, l.pod, port, outAt, nil)
		must(t, same.wait(t, 3000))
		c, _ := accept(t, l.accepts[familyOf(remote)])
		send(t, same.fd, c, "secret")

		d := startDial(t, l.pod, netip.AddrPort{}, mesh, nil)
		must(t, d.wait(t, 3000))
		carried, _ := accept(t, l.accepts[familyOf(remote)])
		send(t, d.fd, carried, "secret")

		forget(lost)
		l.stop()
		must(t, l.k.Close())
		must(t, unix.SetsockoptLinger(carried, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		for _, fd := range []int{carried, l.accepts[unix.AF_INET], l.accepts[unix.AF_INET6]} {
			closeNow(t, fd)
		}
		capture(8)
		goesOn("after a death", out, in, idle)
		isReset("a connection that nobody knew before the death", lost)
		if n := handedBack(); n != 3 {
			t.Errorf("after a death HandedBack lists %d of 3 older connections", n)
		}
		if _, err := unix.Write(d.fd, []byte("secret")); err == nil {
			t.Error("what ztun carried goes on after its death")
		}
		if got := tap.has("secret"); len(got) > 0 {
			t.Error("what was not to be in clear was seen outside")
		}
		src, sent := localOf(t, out[0]), uint64(len("older"+"after a death"))
		closeNow(t, out[0])
		closeNow(t, out[1])
		waitFor(t, "the end of an older connection", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.ContainsFunc(ends, func(e EndedFlow) bool {
				return e.Src == src && e.Dst == outAt && e.Established && e.Received == sent && e.Sent == sent+uint64(len(" too"+" too"))
			})
		})
	})
}
