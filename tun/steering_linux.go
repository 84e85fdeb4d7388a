package tun

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A Steering leads flows whose SYN was decided about in user space past it: to the network, to the application, or to a
// listener of ztun's. There is one for the process: every netns that is captured with it (Config.Steering) shares its programs
// and maps.
//
// What was handed back does not need the process any more: such flows go on when it has died. New ones fail then, as without
// a Steering.
type Steering struct {
	cfg      SteeringConfig
	backend  backend
	memory   atomic.Uint64 // generation of the state
	setting  sync.Mutex    // of the generation, in its order
	selfTest uint64        // cookie of the netns of the self-test, whose flows are nobody's
}

// A backend is one of the ways to steer. Its methods that get a setup are steps of Open.
type backend interface {
	name() string
	mark(s *setup) error                   // has the kernel mark what it keeps
	attach(s *setup) (netnsSteerer, error) // from then on SYNs can be steered; nothing else changes
	enrolRunning(s *setup) error           // leaves the connections that there are to the kernel
	guard(s *setup) error                  // lets out no TCP that was not decided about
	run(ctx context.Context, begun, ended func(EndedFlow)) error
	lost() uint64
	close() error
}

// A rememberer is a backend that can lead connections past the device before their SYN.
type rememberer interface {
	setGeneration(g uint64) error // what was remembered of another one is nothing from now on
}

// A netnsSteerer is what a backend does in one netns.
type netnsSteerer interface {
	listeners(v4, v6 int) error
	steer(src, dst netip.AddrPort, w Way, out int) error // out: the interface that ToNetwork leads to, 0 when it is not known
	unsteer(src, dst netip.AddrPort)
	stored() *storage          // connections that no mark tells; may be empty
	watchOlder(s *setup) error // the last step of Open: connections that the kernel carries already are told of too
	close() error
}

// A netnsRememberer is a rememberer in one netns.
type netnsRememberer interface {
	remember(src netip.Addr, dst netip.AddrPort, d time.Duration, generation uint64) error
}

// backends in the order in which auto tries them, but for those that are taken by name only.
var backends = []struct {
	name   string
	make   func(*SteeringConfig) (backend, error)
	byName bool
}{
	{SteerBySockops, newSockops, false},
	{SteerByTC, newTCBackend, false},
	// A program that dissolves an inbound connection, connect(AF_UNSPEC), keeps a socket with ztun's mark, and its next connection leaves in
	// clear: without BPF nothing takes the mark away.
	{SteerByNFT, newNFTBackend, true},
}

// NewSteering loads what is shared by all netns, and changes none. It tries out that it works, in a netns of its own.
func NewSteering(cfg SteeringConfig) (*Steering, error) {
	if err := cfg.Marks.Complete(); err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Ended == nil {
		cfg.Ended = func(EndedFlow) {}
	}
	if cfg.Begun == nil {
		cfg.Begun = func(EndedFlow) {}
	}
	var errs []error
	for _, b := range backends {
		if cfg.Mode != b.name && (cfg.Mode != "auto" || b.byName) {
			continue
		}
		s, err := cfg.try(b.make)
		if err == nil {
			if len(errs) > 0 {
				cfg.Log.Warn("connections are steered by the second choice", "backend", b.name, "reason", errors.Join(errs...))
			}
			return s, nil
		}
		errs = append(errs, fmt.Errorf("tun: steering by %s: %w", b.name, err))
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("tun: steering: mode %q is not known", cfg.Mode)
	}
	return nil, errors.Join(errs...)
}

// try makes a Steering of one backend, if that works.
func (c *SteeringConfig) try(make func(*SteeringConfig) (backend, error)) (*Steering, error) {
	made, err := make(c)
	if err != nil {
		return nil, err
	}
	s := &Steering{cfg: *c, backend: made}
	if err := s.tryOut(); err != nil {
		return nil, errors.Join(err, made.close())
	}
	return s, nil
}

// Backend returns which of SteerBySockops, SteerByTC and SteerByNFT it is.
func (s *Steering) Backend() string { return s.backend.name() }

// Remembers reports whether Kernel.Remember has an effect: SteeringConfig.Remember is set, and the backend can.
func (s *Steering) Remembers() bool {
	_, can := s.backend.(rememberer)
	return can && s.cfg.Remember > 0
}

// Generation is what Kernel.Remember has to be given: of before the state was read that the decision rests on.
func (s *Steering) Generation() uint64 { return s.memory.Load() }

// Forget has all destinations be decided about anew, in all netns. It is called after each change of what decisions rest on.
func (s *Steering) Forget() error {
	if !s.Remembers() {
		return nil
	}
	s.setting.Lock()
	defer s.setting.Unlock()
	if err := s.backend.(rememberer).setGeneration(s.memory.Add(1)); err != nil {
		return fmt.Errorf("tun: forget destinations: %w", err)
	}
	return nil
}

// Run tells SteeringConfig.Begun and SteeringConfig.Ended of the ends of flows until ctx ends.
func (s *Steering) Run(ctx context.Context) error {
	of := func(tell func(EndedFlow)) func(EndedFlow) {
		return func(e EndedFlow) {
			if e.Netns != s.selfTest {
				tell(e)
			}
		}
	}
	if err := s.backend.run(ctx, of(s.cfg.Begun), of(s.cfg.Ended)); err != nil {
		return fmt.Errorf("tun: steering by %s: %w", s.Backend(), err)
	}
	return nil
}

// Lost returns how many ends could not be told of, for want of room. What has ended unseen is no longer among
// [Kernel.Sockets].
func (s *Steering) Lost() uint64 { return s.backend.lost() }

// Close lets go of what is shared. SYNs are not steered any more in any netns; what was handed back goes on. The Kernels that
// use it are to be closed before. Run has to have returned.
func (s *Steering) Close() error {
	if err := s.backend.close(); err != nil {
		return fmt.Errorf("tun: steering by %s: close: %w", s.Backend(), err)
	}
	return nil
}

// steer is the step of Open that lets SYNs be steered.
func (s *setup) steer() (err error) {
	if s.cfg.Steering == nil {
		return nil
	}
	if s.cookie == 0 {
		return errors.New("steering: the kernel gives the netns no cookie; needs Linux 5.14")
	}
	if s.steerer, err = s.cfg.Steering.backend.attach(s); err != nil {
		return fmt.Errorf("steering by %s: %w", s.cfg.Steering.Backend(), err)
	}
	s.undo.add(s.steerer.close)
	return nil
}

// enrolRunning is the step of Open that keeps the connections that are older than the capture. It is done before the rules, so
// that none is captured, and after them, for those that came to be meanwhile: from then on there are none before the device
// is read.
//
// What an earlier start has left is not touched: there a connection without a mark, or with that of deliveries, was carried,
// perhaps encrypted, and its bytes must not go on in clear.
func (s *setup) enrolRunning() error {
	if s.cfg.Steering == nil || s.leftovers {
		return nil
	}
	return s.cfg.Steering.backend.enrolRunning(s)
}

// setGuard is the step of Open after which nothing leaves that was not decided about.
func (s *setup) setGuard() error {
	switch {
	case s.cfg.Steering == nil:
		return nil // see setMark
	case s.cfg.FailOpenRoute:
		return s.removeFilters(guardFilter) // of an earlier start
	}
	if err := s.cfg.Steering.backend.guard(s); err != nil {
		return fmt.Errorf("egress guard: %w", err)
	}
	return nil
}

// watchOlder is the last step of steering.
func (s *setup) watchOlder() error {
	if s.steerer == nil {
		return nil
	}
	return s.steerer.watchOlder(s)
}

// soNetnsCookie is SO_NETNS_COOKIE of include/uapi/asm-generic/socket.h, Linux 5.14.
const soNetnsCookie = 71

// findCookie asks for the number by which BPF knows the netns. It is never used again while the machine is up.
func (s *setup) findCookie() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("netns cookie: socket: %w", err)
	}
	defer unix.Close(fd)
	s.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, soNetnsCookie)
	if err != nil && !errors.Is(err, unix.ENOPROTOOPT) {
		return fmt.Errorf("netns cookie: %w", err)
	}
	return nil
}

// Steers reports whether SYNs are to be steered: whether Config.Steering was given.
func (k *Kernel) Steers() bool { return k.steerer != nil }

// Cookie is the number by which the kernel knows the netns, see EndedFlow; 0 before Linux 5.14.
func (k *Kernel) Cookie() uint64 { return k.cookie }

var errNotSteered = errors.New("tun: netns is captured without steering")

// SteerListeners sets the listening sockets of the netns that ToListener and ToListenerInbound lead to; -1 stands for none of
// that family. They have to be transparent (IP_TRANSPARENT), without a mark, and bound to addresses that are nobody's, so that
// nobody else reaches them. They stay the caller's.
func (k *Kernel) SteerListeners(v4, v6 int) error {
	if k.steerer == nil {
		return errNotSteered
	}
	if err := k.steerer.listeners(v4, v6); err != nil {
		return fmt.Errorf("tun: netns %s: steering listeners: %w", k.cfg.Netns, err)
	}
	return nil
}

// Steer says where the SYN from src to dst goes on to when it is written back to the device, next. It holds for the SYN's
// repetitions too, until the flow has come to be; then it is forgotten, or else after two minutes. An error means that the SYN
// must not be written: it would be dropped.
func (k *Kernel) Steer(src, dst netip.AddrPort, w Way) error {
	if k.steerer == nil {
		return errNotSteered
	}
	out := 0
	if w == ToNetwork {
		out = k.addrs.wayOut(dst.Addr())
	}
	if err := k.steerer.steer(src, dst, w, out); err != nil {
		return fmt.Errorf("tun: netns %s: steer %s to %s %s: %w", k.cfg.Netns, src, dst, w, err)
	}
	return nil
}

// Remember has further connections of the netns from src to dst, of sockets that are bound to no interface, go to the network without being seen, as if each had been decided about and
// steered: for SteeringConfig.Remember, and until Steering.Forget. generation is that of [Steering.Generation]. It does nothing where
// nothing is remembered.
func (k *Kernel) Remember(src netip.Addr, dst netip.AddrPort, generation uint64) error {
	n, can := k.steerer.(netnsRememberer)
	if !can || k.cfg.Steering.cfg.Remember <= 0 {
		return nil
	}
	if err := n.remember(src, dst, k.cfg.Steering.cfg.Remember, generation); err != nil {
		return fmt.Errorf("tun: netns %s: remember %s: %w", k.cfg.Netns, dst, err)
	}
	return nil
}

// Unsteer takes back what Steer said, for a SYN that was not written after all or is given up.
func (k *Kernel) Unsteer(src, dst netip.AddrPort) {
	if k.steerer != nil {
		k.steerer.unsteer(src, dst)
	}
}

// sameMarks refuses a Config whose marks are not those of its Steering.
func (c *Config) sameMarks() error {
	if c.Steering != nil && c.Steering.cfg.Marks != c.Marks {
		return fmt.Errorf("tun: config: Marks %v are not those of the Steering, %v", c.Marks, c.Steering.cfg.Marks)
	}
	return nil
}
