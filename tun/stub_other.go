//go:build !linux

package tun

import (
	"context"
	"errors"
	"net/netip"
	"os"
)

var errLinux = errors.New("tun: a kernel device needs Linux; use Pipe or a replay")

// A Netns is a network namespace, which only Linux has.
type Netns struct{}

// OpenNetns returns an error.
func OpenNetns(string) (*Netns, error) { return nil, errLinux }

// NetnsFromFile returns an error.
func NetnsFromFile(*os.File) (*Netns, error) { return nil, errLinux }

// CurrentNetns returns an error.
func CurrentNetns() (*Netns, error) { return nil, errLinux }

// ID returns zeros.
func (n *Netns) ID() (dev, ino uint64) { return 0, 0 }

// File returns nil.
func (n *Netns) File() *os.File { return nil }

// String returns "none".
func (n *Netns) String() string { return "none" }

// Close does nothing.
func (n *Netns) Close() error { return nil }

// Do returns an error.
func (n *Netns) Do(func() error) error { return errLinux }

// Socket returns an error.
func (n *Netns) Socket(domain, typ, proto int) (fd int, err error) { return -1, errLinux }

// A Kernel is a device of a Linux kernel.
type Kernel struct{ *PipeEnd }

// An Interface is one whose traffic is captured.
type Interface struct {
	Name  string
	Index int
	MTU   int // bytes
}

// Drops counts the packets that a device has lost, by reason.
type Drops struct{ TooLong, Full uint64 }

// InUse returns nil.
func InUse(*Netns, string) error { return nil }

// Open returns an error.
func Open(context.Context, Config) (*Kernel, error) { return nil, errLinux }

// Remove returns an error.
func Remove(context.Context, Config) error { return errLinux }

// Addrs returns nil.
func (k *Kernel) Addrs() []netip.Addr { return nil }

// Interfaces returns nil.
func (k *Kernel) Interfaces() []Interface { return nil }

// Local returns false.
func (k *Kernel) Local(netip.Addr) bool { return false }

// Events returns -1.
func (k *Kernel) Events() int { return -1 }

// SyncMTU returns an error.
func (k *Kernel) SyncMTU() (mtu int, err error) { return 0, errLinux }

// HasIPv4 returns false.
func (k *Kernel) HasIPv4() bool { return false }

// HasIPv6 returns false.
func (k *Kernel) HasIPv6() bool { return false }

// MarkedBy returns "".
func (k *Kernel) MarkedBy() string { return "" }

// Adopted returns false.
func (k *Kernel) Adopted() bool { return false }

// Drops returns zeros.
func (k *Kernel) Drops() Drops { return Drops{} }

// Unenrol returns an error.
func (k *Kernel) Unenrol(context.Context) error { return errLinux }

// A Leftover is a netns of which something is kept.
type Leftover struct {
	Dev, Ino  uint64
	UID, Path string
}

// Leftovers returns an error.
func Leftovers(string) ([]Leftover, error) { return nil, errLinux }

// Redirected returns an error.
func Redirected(*Netns) (string, error) { return "", errLinux }

// Addresses are those of a netns.
type Addresses struct{}

// WatchAddresses returns an error.
func WatchAddresses(*Netns) (*Addresses, error) { return nil, errLinux }

// List returns nil.
func (*Addresses) List() []netip.Addr { return nil }

// Local returns false.
func (*Addresses) Local(netip.Addr) bool { return false }

// Close returns nil.
func (*Addresses) Close() error { return nil }

// A Steering leads flows past user space, which only Linux can.
type Steering struct{}

// NewSteering returns an error.
func NewSteering(SteeringConfig) (*Steering, error) { return nil, errLinux }

// Backend returns "".
func (*Steering) Backend() string { return "" }

// Run returns an error.
func (*Steering) Run(context.Context) error { return errLinux }

// Lost returns 0.
func (*Steering) Lost() uint64 { return 0 }

// Close returns nil.
func (*Steering) Close() error { return nil }

// Steers returns false.
func (k *Kernel) Steers() bool { return false }

// Cookie returns 0.
func (k *Kernel) Cookie() uint64 { return 0 }

// SteerListeners returns an error.
func (k *Kernel) SteerListeners(v4, v6 int) error { return errLinux }

// Steer returns an error.
func (k *Kernel) Steer(src, dst netip.AddrPort, w Way) error { return errLinux }

// Unsteer does nothing.
func (k *Kernel) Unsteer(src, dst netip.AddrPort) {}

// SocketOf returns an error.
func (k *Kernel) SocketOf(local, remote netip.AddrPort) (SocketInfo, error) {
	return SocketInfo{}, errLinux
}

// Sockets returns an error.
func (k *Kernel) Sockets(func(local, remote netip.AddrPort, i SocketInfo)) error { return errLinux }

// DestroySocket returns an error.
func (k *Kernel) DestroySocket(local, remote netip.AddrPort) error { return errLinux }
