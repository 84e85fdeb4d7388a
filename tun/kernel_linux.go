package tun

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A Kernel is a TUN device of the kernel that captures the traffic of a network namespace. It is made by [Open].
type Kernel struct {
	cfg      Config // Netns is a descriptor of the Kernel's own
	index    int    // of the device
	ifaces   []Interface
	families []int
	addrs    *Addresses
	diag     diag
	state    *state
	markedBy string
	adopted  bool
	cookie   uint64
	steerer  netnsSteerer // nil without Config.Steering

	mu sync.RWMutex // guards fd; held for reading during I/O, which never blocks
	fd int          // -1 after Close

	tooLong, full atomic.Uint64
}

var _ Device = (*Kernel)(nil)

// An Interface is one whose traffic is captured.
type Interface struct {
	Name  string
	Index int
	MTU   int // bytes

	v4, v6 bool // has an address
}

func (i Interface) has(family int) bool {
	if family == unix.AF_INET {
		return i.v4
	}
	return i.v6
}

// Drops counts the packets that a device has lost, by reason.
type Drops struct {
	TooLong uint64 // longer than the buffer of the reader
	Full    uint64 // the kernel had no room for what was written
}

// Open captures the traffic of cfg.Netns and returns the device to which it is led. When it returns an error, or ctx ends
// meanwhile, everything that it has done is taken back.
//
// What a dead process left is adopted. A device that a living process holds, and rules, routes or a device of others that
// stand where ztun's have to be, are errors that name them.
func Open(ctx context.Context, cfg Config) (*Kernel, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	own, err := cfg.Netns.dup()
	if err != nil {
		return nil, err
	}
	cfg.Netns = own
	s := &setup{cfg: cfg, log: cfg.Log.With("netns", cfg.Netns.String(), "uid", cfg.UID), fd: -1}
	if err := cfg.Netns.Do(func() error { return s.run(ctx) }); err != nil {
		err = fmt.Errorf("tun: netns %s: %w", cfg.Netns, err)
		return nil, errors.Join(err, own.Close())
	}
	return &Kernel{
		cfg: cfg, index: s.link.Attrs().Index, ifaces: s.ifaces, families: s.families, addrs: s.watch, diag: s.diag,
		state: s.state, markedBy: s.markedBy, adopted: s.adopted || s.leftovers, fd: s.fd,
		cookie: s.cookie, steerer: s.steerer,
	}, nil
}

// FD implements [Device]; it is -1 after Close and after Unenrol.
func (k *Kernel) FD() int {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.fd
}

// Notify does nothing: the descriptor becomes readable.
func (k *Kernel) Notify(func()) {}

// BatchSize implements [Device].
func (k *Kernel) BatchSize() int { return 64 }

// Addrs returns the addresses that the pod has now, without those of loopback and of a link only, the ones of the interface
// with the default route first. After Close they are those of before.
func (k *Kernel) Addrs() []netip.Addr { return k.addrs.List() }

// Local reports whether TCP to a is for the pod itself: whether the kernel would deliver it now, as its routing table local
// says. What is captured is not always from or to the pod: inbound TCP is captured whatever its destination, so that a flow
// is the pod's own only if its source is local, and is for the pod only if its destination is. One with neither would be
// forwarded by the pod, and must not be given the pod's identity.
//
// It costs one system call where no address has changed. After Close the answer is that of before.
func (k *Kernel) Local(a netip.Addr) bool { return k.addrs.Local(a) }

// Events is a descriptor that becomes readable when the addresses, the routes or an interface of the netns have changed, to wait for
// and not to read from; -1 after Close. See [Kernel.SyncMTU].
func (k *Kernel) Events() int { return k.addrs.descriptor() }

// Interfaces returns the captured interfaces, the one with the default route first.
func (k *Kernel) Interfaces() []Interface { return slices.Clone(k.ifaces) }

// HasIPv4 reports whether IPv4 is captured, with or without an address of the pod.
func (k *Kernel) HasIPv4() bool { return slices.Contains(k.families, unix.AF_INET) }

// HasIPv6 reports whether IPv6 is captured: whether it is on in the netns, with or without an address.
func (k *Kernel) HasIPv6() bool { return slices.Contains(k.families, unix.AF_INET6) }

// MarkedBy returns MarkedByBPF or MarkedByNFT.
func (k *Kernel) MarkedBy() string { return k.markedBy }

// Adopted reports whether the netns was captured already, by a process that died.
func (k *Kernel) Adopted() bool { return k.adopted }

// Drops returns the packets lost so far.
func (k *Kernel) Drops() Drops { return Drops{TooLong: k.tooLong.Load(), Full: k.full.Load()} }

func (k *Kernel) isClosed() bool { return k.FD() < 0 }

// Close lets go of the descriptor, as the death of the process does: the device and all that leads to it stay, and the pod
// gets "no route to host" until a later Open or Remove. See [Kernel.Unenrol].
func (k *Kernel) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fd < 0 {
		return nil
	}
	err := errors.Join(unix.Close(k.fd), k.addrs.Close(), k.diag.close(), k.cfg.Netns.Close())
	if k.steerer != nil {
		err = errors.Join(err, k.steerer.close())
	}
	k.fd = -1
	if err != nil {
		return fmt.Errorf("tun: device %s: close: %w", k.cfg.Name, err)
	}
	return nil
}
