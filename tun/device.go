package tun

import "errors"

// ErrAgain is returned by [Device.Read] when no packet waits.
var ErrAgain = errors.New("tun: no packet waits")

// Headroom is the number of bytes directly before each packet that hold its [VnetHdr]: the size of the kernel's struct
// virtio_net_hdr (include/uapi/linux/virtio_net.h).
const Headroom = 10

// MaxPacket is the length of the longest packet that a Device returns, segmentation-offload superpackets included: the
// largest IPv4 total length (RFC 791, section 3.1). IPv6 superpackets stay below it, because the kernel limits both alike.
const MaxPacket = 65535

// A Device moves whole IP packets, segmentation-offload superpackets included, each with its 10-byte struct
// virtio_net_hdr directly before it, so that one link endpoint serves kernel, memory and capture file alike.
//
// Packet i of a batch occupies bufs[i][offset : offset+sizes[i]] and its header bufs[i][offset-Headroom : offset]; the
// bytes before that are the caller's. Buffers belong to the caller and are not kept. offset must be at least [Headroom].
//
// Read and Write may be called at the same time, each by one goroutine; the other methods by any.
type Device interface {
	// Read reads up to min(len(bufs), len(sizes)) packets and returns their number. It never blocks: when no packet
	// waits, it returns ErrAgain. A packet longer than its buffer, see [MaxPacket], is dropped and counted, not an error.
	// After Close it returns os.ErrClosed.
	Read(bufs [][]byte, sizes []int, offset int) (n int, err error)

	// Write writes the packets bufs[i][offset:] with their headers and returns how many were dealt with. A packet that
	// finds the queue behind the device full is dropped and counted, as on any link. At a packet that the device refuses,
	// Write stops and returns its index and the reason. After Close it returns os.ErrClosed.
	Write(bufs [][]byte, offset int) (n int, err error)

	// FD returns the descriptor that is readable when a packet waits, or -1 for a device in memory. It stays the
	// device's own and is valid until Close, and with a [Kernel] until Unenrol, which closes too: who polls it has to have
	// stopped before either. Packets may be read and written on it directly, one for each readv or
	// writev, the VnetHdr first.
	FD() int

	// Notify sets the function that a device in memory calls when a packet has come, without a lock held. wake must not
	// block. If packets wait already, it is called before Notify returns. A device with a descriptor ignores it.
	Notify(wake func())

	// MTU returns the largest packet, in bytes, that fits the link unsegmented.
	MTU() (int, error)

	// BatchSize returns the number of buffers with which Read and Write work best.
	BatchSize() int

	// Close lets go of the device. It is idempotent.
	Close() error
}
