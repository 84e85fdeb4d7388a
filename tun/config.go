package tun

import (
	"fmt"
	"log/slog"
)

// DefaultName is the name of the device.
const DefaultName = "ztun0"

// DefaultMarkMask is the part of a socket or packet mark that ztun's rules look at. It is the
// mask that istio-cni and ztunnel use. Of ztun's own connections BPF looks at the whole mark: who sets other bits of it on their way has them dropped.
const DefaultMarkMask = 0xfff

// ApplicationMark is the bit of marks that tells the sockets of applications whose connections the kernel carries from ztun's own, where
// there is BPF. No rule looks at it.
const ApplicationMark = 1 << 31

// Marks are the packet marks that tell ztun's own sockets from the application's. Own and Deliver have to be non-zero, different and
// inside OwnMask. Who may set a mark (CAP_NET_RAW in the netns) and knows these can leave the mesh, so that in a
// namespace of its own ztun draws them at random. A program can read the mark of a socket of its own whose connection the kernel
// carries, but not the Secret, without which BPF lets no connection begin.
type Marks struct {
	Own     uint32 // ztun's sockets: their packets and the replies to them are not captured
	OwnMask uint32 // the bits that count, of Own and Deliver; 0 means DefaultMarkMask
	Deliver uint32 // sockets that deliver to the application from the client's address: its replies are led back to them
	Secret  uint32 // further bits, outside of OwnMask and ApplicationMark, that no application's socket has; may be 0
}

// Complete fills in the default mask and checks the marks.
func (m *Marks) Complete() error {
	if m.OwnMask == 0 {
		m.OwnMask = DefaultMarkMask
	}
	if m.Own == 0 || m.Deliver == 0 || m.Own == m.Deliver || (m.Own|m.Deliver)&^m.OwnMask != 0 {
		return fmt.Errorf("tun: config: Marks %#x and %#x are not two different non-zero values inside %#x", m.Own, m.Deliver, m.OwnMask)
	}
	if m.Secret&(m.OwnMask|ApplicationMark) != 0 {
		return fmt.Errorf("tun: config: the Secret %#x of Marks has bits of %#x", m.Secret, m.OwnMask|ApplicationMark)
	}
	return nil
}

// OwnSocket is the whole mark of ztun's own sockets that connect to the outside. Those that listen, and those that connect to a socket in the netns,
// are without the secret: programs there would see it.
func (m Marks) OwnSocket() uint32 { return m.Own | m.Secret }

// Config says what to capture, and where.
type Config struct {
	// Netns is the network namespace. It is borrowed: the caller may close it when Open has returned. It must not be the
	// namespace of this process.
	Netns *Netns

	// UID is the pod's uid, or "host". With Generation, which tells one start of ztun from another, it is written to the
	// alias of the device, "ztun <uid> <generation>", by which the device is recognised as ztun's.
	UID        string
	Generation uint64

	// Name is the name of the device; "" means DefaultName.
	Name string

	// Interface is the interface whose traffic is captured; "" means every interface that is up, except loopback.
	Interface string

	// MTU of the device in bytes; 0 means the largest of the captured interfaces, so that a packet of full size fits.
	MTU int

	Marks Marks

	// Steering leads flows past user space that were decided about, see [Kernel.Steer]: then no TCP but DNS may end in the netstack.
	// nil means that everything is carried. It has to outlive the Kernel.
	Steering *Steering

	// FailOpenRoute leaves out the unreachable route behind the TUN route, and the guard of a Steering, so that traffic leaves in clear when the
	// process is dead. It is there for tests that have to see their detector work.
	FailOpenRoute bool

	// StateDir is the directory in which the values that sysctls had before are kept, one file for each netns; "" means
	// that they are not kept: then neither Remove nor a Kernel that adopted its device can restore them.
	StateDir string

	// Log receives what an operator may have to know; nil means nothing is logged.
	Log *slog.Logger

	// NoIPv6 leaves IPv6 alone, which then is neither captured nor refused, even where the netns has an address.
	NoIPv6 bool

	tunPath string // "" means /dev/net/tun
	noBPF   bool   // as if the kernel had refused the program

	noForceForwarding bool // as if the kernel were older than 6.17
}
