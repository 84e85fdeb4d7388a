package tun

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel,bpfeb -no-global-types tcsteer bpf/tcsteer.c -- -O2 -Wall -Werror -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu

// tcBackend steers by programs of tc and a storage of the application's socket, see bpf/tcsteer.c.
type tcBackend struct {
	spec    *ebpf.CollectionSpec // of bpf/steer.c
	watch   *endWatch
	flows   *ebpf.Map
	ingress *ebpf.Program
	enrol   *ebpf.Program // as in sockops
}

func newTCBackend(cfg *SteeringConfig) (_ backend, err error) {
	if cfg.noBPF {
		return nil, unix.EPERM
	}
	// See newSockops.
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("memlock limit: %w", err)
	}
	b := &tcBackend{}
	if b.watch, err = newEndWatch(cfg.Log); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.spec, err = withMarks(cfg.Marks, loadSteer); err != nil {
		return nil, err
	}
	spec, err := withMarks(cfg.Marks, loadTcsteer)
	if err != nil {
		return nil, err
	}
	var loaded struct {
		Flows   *ebpf.Map     `ebpf:"flows"`
		Ingress *ebpf.Program `ebpf:"ztun_ingress"`
	}
	if err := spec.LoadAndAssign(&loaded, nil); err != nil {
		return nil, err
	}
	b.flows, b.ingress = loaded.Flows, loaded.Ingress
	b.enrol = loadEnrol(cfg, b.spec)
	b.watch.add(&decisions{b.flows, cfg.Log})
	return b, nil
}

func (b *tcBackend) name() string { return SteerByTC }

func (b *tcBackend) close() error {
	err := b.watch.close()
	for _, c := range []io.Closer{b.flows, b.ingress, b.enrol} {
		err = errors.Join(err, c.Close()) // nothing for those that are nil
	}
	return err
}

func (b *tcBackend) mark(s *setup) error { return s.markByBPF(b.ingress) }

func (b *tcBackend) run(ctx context.Context, _, ended func(EndedFlow)) error {
	return b.watch.run(ctx, ended)
}

func (b *tcBackend) lost() uint64 { return b.watch.missed.Load() }

func (b *tcBackend) attach(s *setup) (_ netnsSteerer, err error) {
	n := &tcNetns{b: b}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	if n.handedFlows, err = watchHanded(b.watch, s, n.forget); err != nil {
		return nil, err
	}
	spec := b.spec.Copy()
	if err := spec.Variables["netns_cookie"].Set(s.cookie); err != nil {
		return nil, err
	}
	var loaded struct {
		Lookup    *ebpf.Program `ebpf:"ztun_lookup"`
		Listeners *ebpf.Map     `ebpf:"listeners"`
	}
	if err := spec.LoadAndAssign(&loaded, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{"flows": b.flows}}); err != nil {
		return nil, err
	}
	defer loaded.Lookup.Close() // the link holds it
	n.socks = loaded.Listeners
	if err := n.attachLookup(loaded.Lookup); err != nil {
		return nil, err
	}
	programs, err := n.kept.load(s, b.flows, "ztun_device", "ztun_egress", "ztun_guard")
	if err != nil {
		return nil, err
	}
	n.guard = programs["ztun_guard"]
	defer programs["ztun_device"].Close() // the filters hold them
	defer programs["ztun_egress"].Close()
	index := s.link.Attrs().Index
	if err := s.attachFilter(deviceFilter, index, programs["ztun_device"], &s.undo); err != nil {
		return nil, err
	}
	if err := s.attachFilter(egressFilter, index, programs["ztun_egress"], &s.undo); err != nil {
		return nil, err
	}
	b.watch.add(n)
	return n, nil
}

func (b *tcBackend) guard(s *setup) error {
	return s.attachToInterfaces(guardFilter, s.steerer.(*tcNetns).guard)
}

func (b *tcBackend) enrolRunning(s *setup) error {
	if b.enrol == nil {
		return s.steerer.stored().keepRunning(s.cookie)
	}
	return markRunning(b.enrol)
}

// tcNetns is tcBackend in one netns.
type tcNetns struct {
	*handedFlows // those that the kernel carries
	listenerLookup

	b     *tcBackend
	kept  storage
	guard *ebpf.Program
	older *older // nil where there is none
}

func (n *tcNetns) stored() *storage { return &n.kept }

func (n *tcNetns) watchOlder(s *setup) (err error) {
	if n.older, err = findOlder(s); n.older == nil || err != nil {
		return err
	}
	n.b.watch.add(n.older)
	return nil
}

func (n *tcNetns) steer(src, dst netip.AddrPort, w Way, out int) error {
	key := keyOf(n.cookie, src, dst)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.b.flows.Put(&key, &flowDecision{Way: uint32(w), Interface: uint32(out), At: uint64(monotonic())}); err != nil {
		return err
	}
	if w == ToNetwork || w == ToApplication {
		n.flows[key] = &handedFlow{way: w}
	} else {
		delete(n.flows, key)
	}
	return nil
}

func (n *tcNetns) unsteer(src, dst netip.AddrPort) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_ = n.forget(keyOf(n.cookie, src, dst))
}

// forget takes back decisions that may stand still.
func (n *tcNetns) forget(keys ...flowKey) error {
	for i := range keys {
		delete(n.flows, keys[i])
		_ = n.b.flows.Delete(&keys[i]) // it may be gone already
	}
	return nil
}

func (n *tcNetns) close() error {
	var errs []error
	if n.handedFlows != nil {
		n.b.watch.remove(n)
		n.mu.Lock() // run has let go of it
		errs = append(errs, n.handedFlows.close())
		n.mu.Unlock()
	}
	if n.older != nil {
		n.b.watch.remove(n.older)
		errs = append(errs, n.older.close())
	}
	return errors.Join(append(errs, n.listenerLookup.close(), n.kept.close(), n.guard.Close())...)
}

// decisions forgets those that nobody has come for. Of their flows handedFlows tells.
type decisions struct {
	flows *ebpf.Map
	log   *slog.Logger
}

func (*decisions) descriptor() int { return -1 }

func (*decisions) read([]byte, func(EndedFlow)) {}

func (d *decisions) sweep(func(EndedFlow)) {
	if err := sweepDecisions(d.flows, func(EndedFlow) {}); err != nil {
		d.log.Warn("decisions are not forgotten", "reason", err)
	}
}
