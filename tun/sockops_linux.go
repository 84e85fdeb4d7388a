package tun

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel,bpfeb -no-global-types steer bpf/steer.c -- -O2 -Wall -Werror -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu

// sockops steers by the mark of the application's socket, see bpf/steer.c.
type sockops struct {
	spec  *ebpf.CollectionSpec
	marks Marks
	maps  sockopsMaps
	progs sockopsPrograms
	enrol *ebpf.Program // nil where the kernel cannot: it takes BTF, and Linux 5.16
	link  link.Link     // of the program of sockets to the root of cgroup v2
	wake  int           // eventfd: run has something to look at

	mu    sync.Mutex // guards below
	older map[*older]bool
}

// The maps and programs that all netns share.
type (
	sockopsMaps struct {
		Flows      *ebpf.Map `ebpf:"flows"`
		Captured   *ebpf.Map `ebpf:"captured"`
		HandedBack *ebpf.Map `ebpf:"handed_back"`
		Ends       *ebpf.Map `ebpf:"ends"`
		Lost       *ebpf.Map `ebpf:"lost"`

		Destinations *ebpf.Map `ebpf:"destinations"`
		Generation   *ebpf.Map `ebpf:"generation"`
	}
	sockopsPrograms struct {
		Ingress *ebpf.Program `ebpf:"ztun_ingress"`
		Guard   *ebpf.Program `ebpf:"ztun_guard"`
	}
)

// Programs and a map of one netns: they know its cookie.
type sockopsNetnsObjects struct {
	Device    *ebpf.Program `ebpf:"ztun_device"`
	Lookup    *ebpf.Program `ebpf:"ztun_lookup"`
	Listeners *ebpf.Map     `ebpf:"listeners"`
}

// A flowKey is the struct flow of bpf/steer.c.
type flowKey struct {
	Src, Dst         [16]byte
	SrcPort, DstPort [2]byte // big endian
	_                uint32
	Netns            uint64
}

// A flowDecision is its struct decision.
type flowDecision struct {
	Way       uint32
	Interface uint32
	At        uint64 // CLOCK_MONOTONIC, in nanoseconds
}

// A destinationKey is its struct destination.
type destinationKey struct {
	Src, Dst [16]byte
	Port     [2]byte // big endian
	_        uint16
	_        uint32
	Netns    uint64
}

// A remembered is its struct remembered.
type remembered struct {
	Until      uint64 // CLOCK_MONOTONIC, in nanoseconds
	Generation uint64
}

// A flowEnd is its struct end.
type flowEnd struct {
	Flow           flowKey
	Received, Sent uint64
	What           uint32
	Errno          uint32
}

// Values of flowEnd.What.
const (
	_ = iota // it failed to come to be
	flowEnded
	flowBegun
)

func keyOf(netns uint64, src, dst netip.AddrPort) flowKey {
	k := flowKey{Src: src.Addr().As16(), Dst: dst.Addr().As16(), Netns: netns}
	binary.BigEndian.PutUint16(k.SrcPort[:], src.Port())
	binary.BigEndian.PutUint16(k.DstPort[:], dst.Port())
	return k
}

func (k *flowKey) addrs() (src, dst netip.AddrPort) {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Src).Unmap(), binary.BigEndian.Uint16(k.SrcPort[:])),
		netip.AddrPortFrom(netip.AddrFrom16(k.Dst).Unmap(), binary.BigEndian.Uint16(k.DstPort[:]))
}

// read takes a record as the kernel wrote it; false: it is none. binary.Decode takes 1.7 µs for it (measured).
func (e *flowEnd) read(b []byte) bool {
	if len(b) < int(unsafe.Sizeof(*e)) {
		return false
	}
	k := &e.Flow
	copy(k.Src[:], b)
	copy(k.Dst[:], b[16:])
	copy(k.SrcPort[:], b[32:])
	copy(k.DstPort[:], b[34:])
	ne := binary.NativeEndian
	k.Netns, e.Received, e.Sent = ne.Uint64(b[40:]), ne.Uint64(b[48:]), ne.Uint64(b[56:])
	e.What, e.Errno = ne.Uint32(b[64:]), ne.Uint32(b[68:])
	return true
}

func (e *flowEnd) ended() EndedFlow {
	f := EndedFlow{Netns: e.Flow.Netns, Established: e.What == flowEnded, Received: e.Received, Sent: e.Sent}
	f.Src, f.Dst = e.Flow.addrs()
	if e.Errno != 0 {
		f.Err = syscall.Errno(e.Errno)
	}
	return f
}

func newSockops(cfg *SteeringConfig) (_ backend, err error) {
	if cfg.noBPF {
		return nil, unix.EPERM
	}
	// Kernels before 5.11 count programs and maps against RLIMIT_MEMLOCK; on others this does nothing.
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("memlock limit: %w", err)
	}
	b := &sockops{marks: cfg.Marks, wake: -1, older: make(map[*older]bool)}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if b.spec, err = withMarks(cfg.Marks, loadSteer); err != nil {
		return nil, err
	}
	if err := b.spec.Variables["remembers"].Set(cfg.Remember > 0); err != nil {
		return nil, err
	}
	spec := b.spec.Copy()
	if err := spec.LoadAndAssign(&b.maps, nil); err != nil {
		return nil, err
	}
	if err := spec.LoadAndAssign(&b.progs, &ebpf.CollectionOptions{MapReplacements: b.shared()}); err != nil {
		return nil, err
	}
	sockets, err := b.loadSockets(cfg)
	if err != nil {
		return nil, err
	}
	defer sockets.Close() // the link holds it
	b.enrol = loadEnrol(cfg, b.spec)
	if cfg.noCgroup {
		return nil, errNoRootCgroup
	}
	cgroup, err := openRootCgroup()
	if err != nil {
		return nil, err
	}
	defer cgroup.Close()
	attached, err := link.AttachRawLink(link.RawLinkOptions{Target: int(cgroup.Fd()), Program: sockets, Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		return nil, fmt.Errorf("attach to the root of cgroup v2: %w", err)
	}
	b.link = attached
	return b, nil
}

// withMarks loads programs of steering, and sets the marks in them.
func withMarks(m Marks, load func() (*ebpf.CollectionSpec, error)) (*ebpf.CollectionSpec, error) {
	spec, err := load()
	if err != nil {
		return nil, err
	}
	v := spec.Variables
	return spec, errors.Join(v["own_mark"].Set(m.Own), v["own_mask"].Set(m.OwnMask), v["deliver_mark"].Set(m.Deliver), v["secret"].Set(m.Secret))
}

// loadEnrol loads the program that marks the connections of a netns. It is nil where the kernel cannot iterate over sockets, for which it
// takes BTF and Linux 5.16: then addresses and ports have to do, see storage.
func loadEnrol(cfg *SteeringConfig, spec *ebpf.CollectionSpec) *ebpf.Program {
	var loaded struct {
		Enrol *ebpf.Program `ebpf:"ztun_enrol"`
	}
	err := errors.New("as if there were none")
	if !cfg.noBTF {
		err = spec.Copy().LoadAndAssign(&loaded, nil)
	}
	if err != nil {
		cfg.Log.Info("connections that are older than the capture of their pod are known by addresses and ports", "reason", err)
	}
	return loaded.Enrol
}

// loadSockets loads the program of sockets. The one that can read the error of a socket needs the kernel's BTF.
func (b *sockops) loadSockets(cfg *SteeringConfig) (*ebpf.Program, error) {
	if !cfg.noBTF {
		prog, err := b.loadProgram("ztun_sockets")
		if err == nil {
			return prog, nil
		}
		cfg.Log.Info("errors of connections in the kernel are not known", "reason", err)
	}
	return b.loadProgram("ztun_sockets_old")
}

// loadProgram loads one program with the shared maps.
func (b *sockops) loadProgram(name string) (*ebpf.Program, error) {
	spec := b.spec.Copy()
	spec.Programs = map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}
	delete(spec.Maps, "listeners") // of each netns its own
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: b.shared()})
	if err != nil {
		return nil, err
	}
	defer coll.Close()
	return coll.DetachProgram(name), nil
}

// shared returns the maps that exist already, for further programs.
func (b *sockops) shared() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		"flows": b.maps.Flows, "captured": b.maps.Captured, "handed_back": b.maps.HandedBack, "ends": b.maps.Ends, "lost": b.maps.Lost,
		"destinations": b.maps.Destinations, "generation": b.maps.Generation,
	}
}

func (b *sockops) name() string { return SteerBySockops }

func (b *sockops) close() error {
	var errs []error
	if b.link != nil {
		errs = append(errs, b.link.Close())
	}
	if b.wake >= 0 {
		errs = append(errs, unix.Close(b.wake))
	}
	for _, c := range []io.Closer{
		b.maps.Flows, b.maps.Captured, b.maps.HandedBack, b.maps.Ends, b.maps.Lost, b.maps.Destinations, b.maps.Generation,
		b.progs.Ingress, b.progs.Guard, b.enrol,
	} {
		errs = append(errs, c.Close()) // nothing for those that are nil
	}
	return errors.Join(errs...)
}

func (b *sockops) mark(s *setup) error { return s.markByBPF(b.progs.Ingress) }

// markByBPF has a program set the ingress mark.
func (s *setup) markByBPF(ingress *ebpf.Program) error {
	if err := s.attachToInterfaces(ingressFilter, ingress); err != nil {
		return fmt.Errorf("ingress mark: %w", err)
	}
	s.markedBy = MarkedByBPF
	return s.removeNFT()
}

func (b *sockops) guard(s *setup) error { return s.attachToInterfaces(guardFilter, b.progs.Guard) }

// attachToInterfaces attaches a filter to all captured interfaces, or to none.
func (s *setup) attachToInterfaces(f filter, prog *ebpf.Program) error {
	var done undo
	for _, i := range s.ifaces {
		if err := s.attachFilter(f, i.Index, prog, &done); err != nil {
			return errors.Join(err, done.run())
		}
	}
	s.undo = append(s.undo, done...)
	return nil
}

func (b *sockops) attach(s *setup) (_ netnsSteerer, err error) {
	n := &sockopsNetns{b: b, cookie: s.cookie}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	spec := b.spec.Copy()
	if err := spec.Variables["netns_cookie"].Set(s.cookie); err != nil {
		return nil, err
	}
	var objects sockopsNetnsObjects
	if err := spec.LoadAndAssign(&objects, &ebpf.CollectionOptions{MapReplacements: b.shared()}); err != nil {
		return nil, err
	}
	defer objects.Device.Close() // the filter holds it
	defer objects.Lookup.Close() // and the link this
	n.socks = objects.Listeners
	if err := n.attachLookup(objects.Lookup); err != nil {
		return nil, err
	}
	if err := b.maps.Captured.Put(s.cookie, uint32(1)); err != nil {
		return nil, fmt.Errorf("note the netns: %w", err)
	}
	if err := s.attachFilter(deviceFilter, s.link.Attrs().Index, objects.Device, &s.undo); err != nil {
		return nil, err
	}
	if b.enrol != nil {
		return n, s.removeFilters(egressFilter) // of an earlier start by tc
	}
	programs, err := n.kept.load(s, b.maps.Flows, "ztun_older")
	if err != nil {
		return nil, err
	}
	defer programs["ztun_older"].Close() // the filter holds it
	return n, s.attachFilter(egressFilter, s.link.Attrs().Index, programs["ztun_older"], &s.undo)
}

// enrolRunning leaves the connections that the netns has to the kernel.
func (b *sockops) enrolRunning(s *setup) error {
	if b.enrol == nil {
		return s.steerer.stored().keepRunning(s.cookie)
	}
	return markRunning(b.enrol)
}

// markRunning marks the sockets of the netns of this thread.
func markRunning(enrol *ebpf.Program) error {
	iter, err := link.AttachIter(link.IterOptions{Program: enrol})
	if err != nil {
		return fmt.Errorf("connections that are older: %w", err)
	}
	defer func() { _ = iter.Close() }()
	r, err := iter.Open() // of the netns of this thread
	if err != nil {
		return fmt.Errorf("connections that are older: %w", err)
	}
	defer r.Close()
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("connections that are older: %w", err)
	}
	return nil
}

// sockopsNetns is sockops in one netns.
type sockopsNetns struct {
	listenerLookup

	b      *sockops
	cookie uint64
	kept   storage
	older  *older // nil where there is none
}

func (n *sockopsNetns) stored() *storage { return &n.kept }

func (n *sockopsNetns) watchOlder(s *setup) (err error) {
	if n.older, err = findOlder(s); n.older == nil || err != nil {
		return err
	}
	n.b.mu.Lock()
	n.b.older[n.older] = true
	n.b.mu.Unlock()
	n.b.notify()
	return nil
}

func (n *sockopsNetns) steer(src, dst netip.AddrPort, w Way, out int) error {
	key := keyOf(n.cookie, src, dst)
	d := flowDecision{Way: uint32(w), Interface: uint32(out), At: uint64(monotonic())}
	return n.b.maps.Flows.Put(unsafe.Pointer(&key), unsafe.Pointer(&d)) // as they are: 2 µs less (measured)
}

func (n *sockopsNetns) remember(src netip.Addr, dst netip.AddrPort, d time.Duration, generation uint64) error {
	key := destinationKey{Src: src.As16(), Dst: dst.Addr().As16(), Netns: n.cookie}
	binary.BigEndian.PutUint16(key.Port[:], dst.Port())
	return n.b.maps.Destinations.Put(&key, &remembered{Until: uint64(monotonic() + d), Generation: generation})
}

func (b *sockops) setGeneration(g uint64) error { return b.maps.Generation.Put(uint32(0), g) }

func (n *sockopsNetns) unsteer(src, dst netip.AddrPort) {
	key := keyOf(n.cookie, src, dst)
	_ = n.b.maps.Flows.Delete(&key) // it may be gone already
}

func (n *sockopsNetns) close() error {
	var errs []error
	if err := n.b.maps.Captured.Delete(n.cookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		errs = append(errs, err)
	}
	errs = append(errs, n.listenerLookup.close(), n.kept.close())
	if n.older != nil {
		n.b.mu.Lock()
		delete(n.b.older, n.older)
		n.b.mu.Unlock()
		errs = append(errs, n.older.close())
	}
	return errors.Join(errs...)
}

const (
	// halfOpenFor is how long a decision stands: longer than the kernel repeats a SYN (127 s with tcp_syn_retries 6).
	halfOpenFor = 130 * time.Second

	// sweepEvery is how often older ones are looked for.
	sweepEvery = 10 * time.Second
)

// run reads the ends from the kernel, and tells of flows that never came to be without anybody having said so.
func (b *sockops) run(ctx context.Context, begun, ended func(EndedFlow)) error {
	r, err := ringbuf.NewReader(b.maps.Ends)
	if err != nil {
		return fmt.Errorf("ends of flows: %w", err)
	}
	defer func() { _ = r.Close() }()
	r.SetDeadline(time.Unix(1, 0)) // it does not wait: the poll below does
	defer atEnd(ctx, b.notify)()   // it has the descriptor
	var record ringbuf.Record
	var end flowEnd
	buf := make([]byte, 64<<10) // of one message of the kernel's at least
	next := monotonic() + sweepEvery
	for {
		b.mu.Lock()
		list := slices.Collect(maps.Keys(b.older))
		b.mu.Unlock()
		fds := []unix.PollFd{{Fd: int32(b.maps.Ends.FD()), Events: unix.POLLIN}, {Fd: int32(b.wake), Events: unix.POLLIN}}
		for _, o := range list {
			fds = append(fds, unix.PollFd{Fd: int32(o.descriptor()), Events: unix.POLLIN}) // -1 is passed over
		}
		_, err := unix.Poll(fds, int(sweepEvery.Milliseconds()))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("ends of flows: poll: %w", err)
		}
		if fds[1].Revents != 0 {
			_, _ = unix.Read(b.wake, buf[:8])
		}
		due := monotonic() >= next // whatever else happens
		for i, o := range list {
			if fds[i+2].Revents != 0 {
				o.read(buf, ended)
			}
			if due {
				o.sweep(ended)
			}
		}
		for {
			if err := r.ReadInto(&record); errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				return fmt.Errorf("ends of flows: %w", err)
			}
			if !end.read(record.RawSample) {
				return fmt.Errorf("ends of flows: record of %d bytes", len(record.RawSample))
			}
			if end.What == flowBegun {
				begun(end.ended())
			} else {
				ended(end.ended())
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		if due {
			next = monotonic() + sweepEvery
			if err := b.sweep(ended); err != nil {
				return err
			}
		}
		// While we are behind, the kernel wakes nobody.
		if _, err := unix.Poll(fds[1:2], gatherMS); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("ends of flows: poll: %w", err)
		}
	}
}

// gatherMS is how long ends are left to gather, in milliseconds: at 5 000 a second each wake-up for one costs as much as the rest of its
// end (a fifth of the process's CPU in all, measured).
const gatherMS = 5

// The kernel's monotonic clock is the one that Go's times carry, from another beginning: so it is read without a system call,
// which five looks for each SYN made 3 % of the process's CPU (measured).
var (
	clockStart = time.Now() //nolint:forbidigo // what the programs in the kernel have noted is compared with it
	clockBase  = func() time.Duration {
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)         // always succeeds
		return time.Duration(now.Nano()) - time.Since(clockStart) //nolint:forbidigo // see above
	}()
)

// monotonic is the time of the kernel's monotonic clock.
func monotonic() time.Duration { return clockBase + time.Since(clockStart) } //nolint:forbidigo // see above

// notify has run look anew at what there is to wait for.
func (b *sockops) notify() { _, _ = unix.Write(b.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// sweep forgets decisions that nobody has come for.
func (b *sockops) sweep(ended func(EndedFlow)) error { return sweepDecisions(b.maps.Flows, ended) }

func sweepDecisions(flows *ebpf.Map, ended func(EndedFlow)) error {
	now := monotonic()
	var key flowKey
	var d flowDecision
	var old []flowKey
	all := flows.Iterate()
	for all.Next(&key, &d) {
		if time.Duration(d.At)+halfOpenFor < now {
			old = append(old, key)
		}
	}
	if err := all.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) { // changed too much meanwhile: next time
		return fmt.Errorf("decisions: %w", err)
	}
	for i := range old {
		if err := flows.LookupAndDelete(&old[i], &d); err != nil {
			continue // it has come meanwhile
		}
		if w := Way(d.Way); w == ToNetwork || w == ToApplication {
			src, dst := old[i].addrs()
			ended(EndedFlow{Netns: old[i].Netns, Src: src, Dst: dst, Err: unix.ETIMEDOUT})
		}
	}
	return nil
}

func (b *sockops) lost() uint64 {
	var n uint64
	_ = b.maps.Lost.Lookup(uint32(0), &n) // an array has all its elements
	return n
}
