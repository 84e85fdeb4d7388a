package tun

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// fakeFlows knows flows of a pod that has the sockets that are given.
func fakeFlows(t *testing.T, sockets func(each func(*diagSocket)) error) *handedFlows {
	t.Helper()
	netns, err := CurrentNetns()
	must(t, err)
	t.Cleanup(func() { netns.Close() })
	h := &handedFlows{watch: &endWatch{log: slog.New(slog.DiscardHandler)}, netns: netns, fd: 0, sockets: sockets, flows: make(map[flowKey]*handedFlow)}
	h.forget = func(keys ...flowKey) error {
		for _, k := range keys {
			delete(h.flows, k)
		}
		return nil
	}
	return h
}

// flowFrom is a flow of the pod from the port.
func flowFrom(port uint16) (src, dst netip.AddrPort) {
	return netip.AddrPortFrom(netip.MustParseAddr("10.244.0.5"), port), netip.MustParseAddrPort("1.2.3.4:80")
}

func (h *handedFlows) steerToNetwork(port uint16) {
	src, dst := flowFrom(port)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.flows[keyOf(0, src, dst)] = &handedFlow{way: ToNetwork}
}

// A pod may have a hundred thousand sockets: listing them takes long, and the reader of the device must not wait for it.
func TestFlowsAreSteeredWhileSocketsAreListed(t *testing.T) {
	var alive []uint16
	during := func() {}
	h := fakeFlows(t, func(each func(*diagSocket)) error {
		during()
		for _, port := range alive {
			src, dst := flowFrom(port)
			each(&diagSocket{local: src, remote: dst})
		}
		return nil
	})
	var ended []uint16
	sweep := func() []uint16 {
		ended = nil
		h.sweep(func(e EndedFlow) { ended = append(ended, e.Src.Port()) })
		return ended
	}
	h.steerToNetwork(1)
	alive = []uint16{1}
	during = func() {
		steered := make(chan struct{})
		go func() { h.steerToNetwork(2); close(steered) }()
		select {
		case <-steered:
		case <-time.After(time.Second):
			t.Error("a flow is not steered while sockets are listed")
		}
	}
	for i, want := range []struct {
		alive, ended []uint16
	}{
		{[]uint16{1}, nil}, // 2 is steered meanwhile
		{[]uint16{1, 2}, nil},
		{[]uint16{2}, nil}, // 1 is missed once
		{[]uint16{2}, []uint16{1}},
		{nil, nil},
		{nil, []uint16{2}},
	} {
		alive = want.alive
		if got := sweep(); !cmp.Equal(got, want.ended) {
			t.Errorf("sweep %d tells of the ends of %v, want %v", i, got, want.ended)
		}
		during = func() {}
	}
	if len(h.flows) > 0 {
		t.Errorf("%d flows are not forgotten", len(h.flows))
	}
}

// Between the look that finds no socket and the forgetting, the flow's addresses and ports are used again.
func TestFlowThatIsSteeredAnewIsNotForgotten(t *testing.T) {
	h := fakeFlows(t, func(func(*diagSocket)) error { return nil })
	h.steerToNetwork(1)
	h.sweep(func(EndedFlow) {})
	h.sweep(func(EndedFlow) { h.steerToNetwork(1) })
	if len(h.flows) != 1 {
		t.Errorf("%d flows are known, want the new one", len(h.flows))
	}
}

func TestFlowsAreForgottenInParts(t *testing.T) {
	h := fakeFlows(t, func(func(*diagSocket)) error { return nil })
	const all = 5*forgetAtOnce + 1
	for port := range uint16(all) {
		h.steerToNetwork(port)
	}
	forget, most, fail := h.forget, 0, true
	h.forget = func(keys ...flowKey) error {
		if most = max(most, len(keys)); fail {
			return errors.New("no buffers")
		}
		return forget(keys...)
	}
	told := 0
	sweep := func() { h.sweep(func(EndedFlow) { told++ }) }
	sweep()
	sweep()
	sweep()
	if told != all || len(h.flows) != all {
		t.Errorf("while none can be forgotten %d ends are told and %d flows known, want %d and %d", told, len(h.flows), all, all)
	}
	fail = false
	sweep()
	if told != all || len(h.flows) != 0 || most != forgetAtOnce {
		t.Errorf("%d ends are told, %d flows known, at most %d forgotten at once; want %d, 0, %d", told, len(h.flows), most, all, forgetAtOnce)
	}
}

// After its end nothing is written to what has taken the descriptor's number.
func TestWatchOfEndsLetsGoOfItsDescriptor(t *testing.T) {
	for range 100 {
		w, err := newEndWatch(slog.New(slog.DiscardHandler))
		must(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		must(t, w.run(ctx, func(EndedFlow) {}))
		wrote := make([]byte, 8)
		if _, err := unix.Read(w.wake, wrote); err != nil {
			t.Fatalf("run has returned before it was woken: %v", err)
		}
		must(t, w.close())
	}
}

// Once all of them have ended nobody asks for the ends of the pod's other connections.
func TestConnectionsOfAnEarlierProcessAreListenedForUntilTheLast(t *testing.T) {
	netns, err := CurrentNetns()
	must(t, err)
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK) // in place of what hears of ends
	must(t, err)
	src, dst := flowFrom(1)
	o := &older{netns: netns, fd: fd, alive: map[socketAddrs]bool{{src, dst}: true}}
	told := 0
	o.sweep(func(EndedFlow) { told++ })
	if told != 2 || o.descriptor() != -1 {
		t.Errorf("%d ends told, descriptor %d; want 2, and -1", told, o.descriptor())
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("the descriptor: %v, want %v", err, unix.EBADF)
	}
	o.read(make([]byte, 1), func(EndedFlow) { t.Error("an end of nothing") })
	must(t, o.close())
}
