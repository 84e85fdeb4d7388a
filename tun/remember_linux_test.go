package tun

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// A rememberingLab is a steered lab whose agent remembers where it has let flows go.
type rememberingLab struct {
	*steeredLab
	begun []EndedFlow // guarded as ended is
}

func newRememberingLab(t *testing.T, noBTF bool, d time.Duration) *rememberingLab {
	t.Helper()
	needPrivilege(t)
	l := &rememberingLab{steeredLab: &steeredLab{lab: newLab(t, true)}}
	note := func(list *[]EndedFlow) func(EndedFlow) {
		return func(e EndedFlow) {
			l.mu.Lock()
			defer l.mu.Unlock()
			*list = append(*list, e)
		}
	}
	s, err := NewSteering(SteeringConfig{
		Mode: SteerBySockops, Marks: testConfig(nil).Marks, Ended: note(&l.ended), Begun: note(&l.begun), Remember: d, noBTF: noBTF,
	})
	must(t, err)
	run(t, s)
	l.steering = s
	cfg := testConfig(l.pod)
	cfg.Steering = s
	l.capture(t, cfg, func(src, dst netip.AddrPort) Way {
		if dst.Port() == 9090 {
			return refuse
		}
		return ToNetwork
	})
	return l
}

// told waits until as many flows have begun and ended, and returns them.
func (l *rememberingLab) told(t *testing.T, begun, ended int) (b, e []EndedFlow) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		l.mu.Lock()
		b, e = slices.Clone(l.begun), slices.Clone(l.ended)
		l.mu.Unlock()
		if len(b) >= begun && len(e) >= ended {
			return b, e
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d flows have begun and %d ended, want %d and %d", len(b), len(e), begun, ended)
		}
	}
}

// podAddr is the pod's address of a family.
func (l *rememberingLab) podAddr(to netip.AddrPort) netip.Addr {
	if to.Addr().Is4() {
		return pod4
	}
	return pod6
}

// connect opens a connection from the pod and returns how many SYNs the agent was asked about.
func (l *rememberingLab) connect(t *testing.T, to netip.AddrPort, want error) (fd int, syns int64) {
	t.Helper()
	before := l.agent.syns.Load()
	d := startDial(t, l.pod, netip.AddrPort{}, to, nil)
	if err := d.wait(t, 3000); !errors.Is(err, want) {
		t.Fatalf("connect to %v: %v, want %v", to, err, want)
	}
	return d.fd, l.agent.syns.Load() - before
}

// What is remembered goes by without a SYN in the device, is told of from its beginning to its end with its bytes, and is as marked as any
// other; another port, another generation and another time are decided about.
func TestNetnsSteerRemembersDestinations(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		remote netip.Addr
		noBTF  bool
	}{{"IPv4", remote4, false}, {"IPv6", remote6, false}, {"without BTF", remote4, true}} {
		t.Run(tt.name, func(t *testing.T) {
			l := newRememberingLab(t, tt.noBTF, time.Minute)
			to := netip.AddrPortFrom(tt.remote, 8080)
			server := listenerOf(t, l.remote, to, 0)

			first, syns := l.connect(t, to, nil)
			accept(t, server)
			if syns != 1 {
				t.Fatalf("%d SYNs, want one: nothing is remembered yet", syns)
			}
			closeNow(t, first)
			must(t, l.k.Remember(l.podAddr(to), to, l.steering.Generation()))
			fd, syns := l.connect(t, to, nil)
			far, peer := accept(t, server)
			if syns != 0 {
				t.Errorf("%d SYNs of a flow to where it is remembered, want none", syns)
			}
			if got := markOf(t, fd); got != int(testConfig(nil).Marks.Own) {
				t.Errorf("its mark is %#x, want %#x", got, testConfig(nil).Marks.Own)
			}
			send(t, fd, far, "request")
			send(t, far, fd, "answer!!")
			closeNow(t, far)
			ready(fd, unix.POLLRDHUP, 3000)
			closeNow(t, fd)
			begun, ended := l.told(t, 1, 2)
			want := EndedFlow{Netns: l.k.Cookie(), Src: peer, Dst: to}
			if diff := cmp.Diff([]EndedFlow{want}, begun, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Errorf("beginnings mismatch (-want +got):\n%s", diff)
			}
			want.Established, want.Received, want.Sent = true, 7, 8
			if !slices.Contains(ended, want) {
				t.Errorf("ends are %+v, want %+v among them", ended, want)
			}

			refused := netip.AddrPortFrom(tt.remote, 8081)
			must(t, l.k.Remember(l.podAddr(refused), refused, l.steering.Generation()))
			_, syns = l.connect(t, refused, unix.ECONNREFUSED)
			if syns != 0 {
				t.Errorf("%d SYNs of a flow to a port that refuses, want none", syns)
			}
			_, ended = l.told(t, 2, 3)
			if e := ended[2]; e.Established || e.Dst != refused || !errors.Is(e.Err, unix.ECONNREFUSED) {
				t.Errorf("the end of one that was refused is %+v", e)
			}

			if _, syns = l.connect(t, netip.AddrPortFrom(tt.remote, 9090), unix.ECONNREFUSED); syns != 1 {
				t.Errorf("%d SYNs to another port, want one", syns)
			}
			old := l.steering.Generation()
			must(t, l.steering.Forget())
			if _, syns = l.connect(t, to, nil); syns != 1 {
				t.Errorf("%d SYNs after all was forgotten, want one", syns)
			}
			must(t, l.k.Remember(l.podAddr(to), to, old)) // decided by a state that has changed meanwhile
			if _, syns = l.connect(t, to, nil); syns != 1 {
				t.Errorf("%d SYNs to what an older state decided, want one", syns)
			}
		})
	}
}

func TestNetnsSteerForgetsInTime(t *testing.T) {
	t.Parallel()
	l := newRememberingLab(t, false, time.Nanosecond)
	to := netip.AddrPortFrom(remote4, 8080)
	listenerOf(t, l.remote, to, 0)
	must(t, l.k.Remember(l.podAddr(to), to, l.steering.Generation()))
	if _, syns := l.connect(t, to, nil); syns != 1 {
		t.Errorf("%d SYNs after the time is over, want one", syns)
	}
}

// A socket that is used again is asked about, unless its new destination is remembered too; then its end has its own bytes only.
func TestNetnsSteerRememberedSocketUsedAgain(t *testing.T) {
	t.Parallel()
	l := newRememberingLab(t, false, time.Minute)
	to, refused := netip.AddrPortFrom(remote4, 8080), netip.AddrPortFrom(remote4, 9090)
	server := listenerOf(t, l.remote, to, 0)
	listenerOf(t, l.remote, refused, 0)
	must(t, l.k.Remember(l.podAddr(to), to, l.steering.Generation()))
	fd, _ := l.connect(t, to, nil)
	far, _ := accept(t, server)
	closeNow(t, far) // the socket has received a FIN
	ready(fd, unix.POLLRDHUP, 3000)
	dissolve(t, fd)
	if err := unix.Connect(fd, sockaddrOf(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		t.Fatal(err)
	}
	must(t, (&dial{fd, to}).wait(t, 3000))
	far, _ = accept(t, server)
	send(t, fd, far, "abc")
	send(t, far, fd, "defg")
	dissolve(t, fd)
	_, ended := l.told(t, 2, 2)
	if e := ended[1]; e.Received != 3 || e.Sent != 4 {
		t.Errorf("the second end has %d and %d bytes, want 3 and 4", e.Received, e.Sent)
	}
	before := l.agent.syns.Load()
	if err := unix.Connect(fd, sockaddrOf(refused)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		t.Fatal(err)
	}
	if err := (&dial{fd, refused}).wait(t, 3000); !errors.Is(err, unix.ECONNREFUSED) || l.agent.syns.Load() != before+1 {
		t.Errorf("connect to where nothing is remembered: %v with %d SYNs, want it refused with one", err, l.agent.syns.Load()-before)
	}
}

// Neither a socket that is bound to the interface, which may lead elsewhere, nor one with another address goes by what is remembered.
func TestNetnsSteerRemembersNoMoreThanWasDecided(t *testing.T) {
	t.Parallel()
	l := newRememberingLab(t, false, time.Minute)
	to := netip.AddrPortFrom(remote4, 8080)
	server := listenerOf(t, l.remote, to, 0)
	must(t, l.k.Remember(netip.MustParseAddr("10.78.0.99"), to, l.steering.Generation()))
	if _, syns := l.connect(t, to, nil); syns != 1 {
		t.Errorf("%d SYNs from another address than the one that is remembered, want one", syns)
	}
	accept(t, server)
	must(t, l.k.Remember(pod4, to, l.steering.Generation()))
	bound := startDial(t, l.pod, netip.AddrPort{}, to, func(fd int) error { return unix.BindToDevice(fd, "eth0") })
	if err := bound.wait(t, 300); !errors.Is(err, unix.EINPROGRESS) {
		t.Errorf("connect of a socket that is bound to the interface: %v, want no answer", err)
	}
	if ready(server, unix.POLLIN, 100) {
		t.Error("the server has a connection that was not decided about")
	}
	if _, syns := l.connect(t, to, nil); syns != 0 {
		t.Errorf("%d SYNs of a socket that is not bound, want none", syns)
	}
}
