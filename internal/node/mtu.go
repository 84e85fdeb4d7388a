package node

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/stack"
	"ztun.dev/ztun/tun"
)

// An mtuWatch is the task that keeps the MTU of a pod's device that of the interfaces whose traffic it gets (D45).
type mtuWatch struct {
	group  *loop.Group
	ref    *loop.Ref // for others
	device *tun.Kernel
	stack  *stack.Stack
	log    *slog.Logger

	// Of the loop.
	r     *loop.Ref
	mtu   int // of the device
	busy  bool
	again bool // something has changed since
}

// watchMTU returns nil if the Group has ended.
func watchMTU(g *loop.Group, device *tun.Kernel, s *stack.Stack, log *slog.Logger) *mtuWatch {
	w := &mtuWatch{group: g, device: device, stack: s, log: log}
	w.ref = g.Add(func(r *loop.Ref) loop.Task {
		w.r = r
		if err := r.Watch(device.Events(), func(loop.Events) { r.WakeLocal() }); err != nil {
			log.Warn("changes of the MTU are not followed", "error", err.Error())
			return nil
		}
		return w
	})
	if w.ref == nil {
		return nil
	}
	return w
}

// Turn implements loop.Task: it asks the kernel, which may take a while, in a goroutine.
func (w *mtuWatch) Turn(int) bool {
	if w.again = w.busy; w.busy {
		return false
	}
	w.busy = true
	r := w.r
	w.group.Go(context.Background(), func(context.Context) {
		mtu, err := w.device.SyncMTU()
		r.Post(func() { w.synced(mtu, err) })
	})
	return false
}

func (w *mtuWatch) synced(mtu int, err error) {
	w.busy = false
	if err == nil && mtu != w.mtu {
		if err = w.stack.SetMTU(mtu); err == nil {
			if w.mtu != 0 {
				w.log.Info("the MTU of the device follows that of the pod's interface", "mtu", mtu, "before", w.mtu)
			}
			w.mtu = mtu
		}
	}
	if err != nil && !errors.Is(err, os.ErrClosed) {
		w.log.Warn("the MTU of the device cannot follow that of the pod's interface", "error", err.Error())
	}
	if w.again {
		w.r.Wake()
	}
}

func (w *mtuWatch) String() string { return "the watch of an MTU" }

// close ends the task, before the device is closed.
func (w *mtuWatch) close() {
	done := make(chan struct{})
	if w.ref.Post(func() { w.ref.Remove(); close(done) }) {
		<-done
	}
}
