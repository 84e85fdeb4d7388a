package tun

import (
	"errors"
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// How flows that were handed back end, and what is told of it.
func TestNetnsSteerEnds(t *testing.T) {
	t.Parallel()
	for name, noBTF := range map[string]bool{"with BTF": false, "without": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachFamily(t, func(t *testing.T, pod, remote netip.Addr) {
				l := &steeredLab{lab: newLab(t, true)}
				cfg := testConfig(l.pod)
				s, err := NewSteering(SteeringConfig{Mode: SteerBySockops, Marks: cfg.Marks, noBTF: noBTF, Ended: func(e EndedFlow) {
					l.mu.Lock()
					defer l.mu.Unlock()
					l.ended = append(l.ended, e)
				}})
				must(t, err)
				run(t, s)
				cfg.Steering = s
				l.capture(t, cfg, byPort(map[uint16]Way{81: ToNetwork, 83: ToApplication}))
				out, in := netip.AddrPortFrom(remote, 81), netip.AddrPortFrom(pod, 83)
				server, app := listenerOf(t, l.remote, out, 0), listenerOf(t, l.pod, in, 0)
				for _, flow := range []struct {
					name     string
					ns       *Netns
					to       netip.AddrPort
					listener int
				}{{"outbound", l.pod, out, server}, {"inbound", l.remote, in, app}} {
					for _, end := range []struct {
						name   string
						f      func(t *testing.T, client, server int)
						errs   [2]error // of the pod's socket: outbound, inbound
						others [2]bool  // whose FIN came first, or whose reset: for the reader
					}{
						{"client first", func(t *testing.T, client, server int) {
							closeNow(t, client)
							if !ready(server, unix.POLLIN, 3000) {
								t.Fatal("no end")
							}
							closeNow(t, server)
						}, [2]error{}, [2]bool{}},
						{"server first", func(t *testing.T, client, server int) {
							closeNow(t, server)
							if !ready(client, unix.POLLIN, 3000) {
								t.Fatal("no end")
							}
							closeNow(t, client)
						}, [2]error{}, [2]bool{}},
						{"client resets", func(t *testing.T, client, server int) { reset(t, client) }, [2]error{nil, unix.ECONNRESET}, [2]bool{}},
						{"server resets", func(t *testing.T, client, server int) { reset(t, server) }, [2]error{unix.ECONNRESET, nil}, [2]bool{}},
					} {
						d := startDial(t, flow.ns, netip.AddrPort{}, flow.to, nil)
						if err := d.wait(t, 3000); err != nil {
							t.Fatalf("%s: connect: %v", flow.name, err)
						}
						src := localOf(t, d.fd)
						c, _ := accept(t, flow.listener)
						send(t, d.fd, c, "hello")
						send(t, c, d.fd, "hello you")
						// What one end has sent counts when the other's kernel has said that it has it.
						local, remote := src, flow.to
						if flow.ns != l.pod {
							local, remote = flow.to, src
						}
						waitFor(t, "all to be acknowledged", func() bool {
							i, err := l.k.SocketOf(local, remote)
							must(t, err)
							if flow.ns == l.pod {
								return i.BytesAcked == 5+1 // and the SYN
							}
							return i.BytesAcked == 9
						})
						end.f(t, d.fd, c)
						want := EndedFlow{Netns: l.k.Cookie(), Src: src, Dst: flow.to, Established: true, Received: 5, Sent: 9}
						if flow.ns == l.pod {
							want.Err = end.errs[0]
						} else {
							want.Err = end.errs[1]
						}
						if noBTF {
							want.Err = nil
						}
						t.Log(flow.name, end.name)
						l.wantEnded(t, want)
					}
				}
			})
		})
	}
}

// Nobody answers: the application gives up, or somebody at last does for it.
func TestNetnsSteerEndsOfWhatNeverCameToBe(t *testing.T) {
	t.Parallel()
	eachFamily(t, func(t *testing.T, pod, remote netip.Addr) {
		l := newSteeredLab(t, SteerBySockops, byPort(map[uint16]Way{81: ToNetwork, 82: ToListener, 83: ToApplication}))
		must(t, l.k.SteerListeners(-1, -1)) // nobody accepts either
		must(t, l.remote.Do(func() error {  // its answers do not come back
			return setRule(unix.RTN_BLACKHOLE, familyOf(remote))
		}))
		out, listener, in := netip.AddrPortFrom(remote, 81), netip.AddrPortFrom(remote, 82), netip.AddrPortFrom(pod, 83)
		listenerOf(t, l.remote, out, 0)
		d := startDial(t, l.pod, netip.AddrPort{}, out, nil)
		src := localOf(t, d.fd)
		decided := keyOf(l.k.Cookie(), src, out)
		waitFor(t, "the decision", func() bool {
			var d flowDecision
			return l.steering.backend.(*sockops).maps.Flows.Lookup(&decided, &d) == nil
		})
		closeNow(t, d.fd)
		l.wantEnded(t, EndedFlow{Netns: l.k.Cookie(), Src: src, Dst: out})

		must(t, l.k.Steer(src, listener, ToListener)) // left alone
		must(t, l.k.Steer(src, in, ToApplication))
		b := l.steering.backend.(*sockops)
		report := func(e EndedFlow) { l.steering.cfg.Ended(e) }
		must(t, b.sweep(report))
		l.wantEnded(t) // too early
		key := keyOf(l.k.Cookie(), src, in)
		must(t, b.maps.Flows.Put(&key, &flowDecision{Way: uint32(ToApplication), At: 1}))
		key = keyOf(l.k.Cookie(), src, listener)
		must(t, b.maps.Flows.Put(&key, &flowDecision{Way: uint32(ToListener), At: 1}))
		must(t, b.sweep(report))
		l.wantEnded(t, EndedFlow{Netns: l.k.Cookie(), Src: src, Dst: in, Err: unix.ETIMEDOUT})
		var d2 flowDecision
		if err := b.maps.Flows.Lookup(&key, &d2); err == nil {
			t.Error("a decision of two minutes ago is kept")
		}
	})
}

func TestNetnsSocketsOfThePod(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, mode string, pod, remote netip.Addr) {
		l := newSteeredLab(t, mode, always(ToApplication))
		to := netip.AddrPortFrom(pod, 8080)
		app := listenerOf(t, l.pod, to, 0)
		d := startDial(t, l.remote, netip.AddrPort{}, to, nil)
		if err := d.wait(t, 3000); err != nil {
			t.Fatal(err)
		}
		c, peer := accept(t, app)
		send(t, d.fd, c, "hello")
		send(t, c, d.fd, "hello you")
		var got SocketInfo
		waitFor(t, "the acknowledgement", func() (ok bool) {
			var err error
			got, err = l.k.SocketOf(to, peer)
			must(t, err)
			return got.BytesAcked == 9
		})
		if got.RTT == 0 {
			t.Error("RTT 0")
		}
		got.RTT = 0
		got.Mark &^= applicationBit
		if want := (SocketInfo{State: 1, Mark: testOwn, BytesAcked: 9, BytesReceived: 5}); got != want {
			t.Errorf("SocketOf = %+v, want %+v", got, want)
		}
		found := 0
		must(t, l.k.Sockets(func(local, remote netip.AddrPort, i SocketInfo) {
			if local == to && remote == peer && i.BytesReceived == 5 {
				found++
			}
			if i.State == tcpListen {
				t.Errorf("Sockets has the listener %s", local)
			}
		}))
		if found != 1 {
			t.Errorf("Sockets has the connection %d times", found)
		}

		nobody := netip.AddrPortFrom(remote, 9)
		if i, err := l.k.SocketOf(to, nobody); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("SocketOf of no connection: %+v, %v, want not exist", i, err)
		}
		if err := l.k.DestroySocket(to, nobody); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("DestroySocket of no connection: %v, want not exist", err)
		}
		must(t, l.k.DestroySocket(to, peer))
		if _, err := unix.Read(c, make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("read of the destroyed socket: %v, want connection aborted", err)
		}
		if !ready(d.fd, unix.POLLIN, 3000) {
			t.Error("the peer hears nothing")
		} else if _, err := unix.Read(d.fd, make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("read of the peer: %v, want connection reset", err)
		}
		closeNow(t, c)
		want := EndedFlow{Netns: l.k.Cookie(), Src: peer, Dst: to, Established: true, Received: 5, Sent: 9, Err: unix.ECONNABORTED}
		if mode != SteerBySockops { // which knows no reason, and takes one byte for a FIN
			want.Received, want.Err = 4, nil
		}
		l.wantEnded(t, want)
		if err := startDial(t, l.remote, netip.AddrPort{}, to, nil).wait(t, 3000); err != nil { // the listener is there still
			t.Errorf("connect after DestroySocket: %v", err)
		}
	})
}

func FuzzDestroyed(f *testing.F) {
	b := make([]byte, unix.NLMSG_HDRLEN+sizeofInetDiagMsg)
	b[0], b[unix.NLMSG_HDRLEN] = byte(len(b)), unix.AF_INET6
	f.Add(append(b, b...))
	f.Add([]byte{16, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		for range destroyed(b) {
			n++
		}
		if n > len(b)/unix.NLMSG_HDRLEN {
			t.Errorf("%d sockets in %d bytes", n, len(b))
		}
	})
}

func FuzzCgroupMounts(f *testing.F) {
	f.Add("41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw,relatime - cgroup2 cgroup2 rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")
	f.Fuzz(func(t *testing.T, info string) {
		for _, path := range cgroupMounts(info) {
			if path == "" {
				t.Errorf("cgroupMounts(%q) has an empty path", info)
			}
		}
	})
}

func TestCgroupMounts(t *testing.T) {
	t.Parallel()
	const info = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:4 - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:5 master:2 - cgroup2 cgroup2 rw
42 31 0:38 / /mnt/a\040b rw - cgroup2 none rw
`
	if diff := cmp.Diff([]string{"/sys/fs/cgroup/unified", "/mnt/a b"}, cgroupMounts(info)); diff != "" {
		t.Errorf("cgroupMounts (-want +got):\n%s", diff)
	}
}

func FuzzDiagSocket(f *testing.F) {
	b := make([]byte, sizeofInetDiagMsg+8)
	b[0] = unix.AF_INET
	b[72], b[74] = 8, inetDiagMark
	f.Add(b)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parseDiagSocket(b)
		if err == nil && (len(b) < sizeofInetDiagMsg || d.local.Port() != uint16(b[4])<<8|uint16(b[5])) {
			t.Errorf("parseDiagSocket(%x) = %+v, %v", b, d, err)
		}
	})
}
