package stack

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"ztun.dev/ztun/tun"
)

// A txVec is the argument of one writev: the vnet header and the buffers of a packet.
type txVec struct {
	vnet [headroom]byte
	iov  [64]unix.Iovec // a superpacket of data that was written in 64 KiB pieces has 2 or 3 buffers; more are copied flat
	n    int
}

// fill reports whether the packet fits.
func (v *txVec) fill(h tun.VnetHdr, pkt *stack.PacketBuffer) bool {
	h.Encode(v.vnet[:])
	v.add(v.vnet[:])
	list, skip := pkt.AsViewList()
	for view := list.Front(); view != nil; view = view.Next() {
		s := view.AsSlice()
		if skip >= len(s) {
			skip -= len(s)
			continue
		}
		if v.n == len(v.iov) {
			return false
		}
		v.add(s[skip:])
		skip = 0
	}
	return true
}

func (v *txVec) add(b []byte) {
	v.iov[v.n].Base = &b[0]
	v.iov[v.n].SetLen(len(b))
	v.n++
}

// write is not unix.Writev, which allocates.
func (v *txVec) write(fd int) error {
	return errnoOf(unix.Syscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&v.iov[0])), uintptr(v.n)))
}

// release forgets the buffers.
func (v *txVec) release() {
	clear(v.iov[:v.n])
	v.n = 0
}

// An rxVec is the argument of one readv into two buffers.
type rxVec struct{ iov [2]unix.Iovec }

func (v *rxVec) read(fd int, a, b []byte) (int, error) {
	v.iov[0].Base, v.iov[1].Base = &a[0], &b[0]
	v.iov[0].SetLen(len(a))
	v.iov[1].SetLen(len(b))
	n, _, errno := unix.Syscall(unix.SYS_READV, uintptr(fd), uintptr(unsafe.Pointer(&v.iov[0])), 2)
	runtime.KeepAlive(v)
	clear(v.iov[:])
	return readResult(n, errno)
}

func readFD(fd int, b []byte) (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return readResult(n, errno)
}

func readResult(n uintptr, errno unix.Errno) (int, error) {
	switch errno {
	case 0:
		return int(n), nil
	case unix.EAGAIN:
		return 0, tun.ErrAgain
	}
	return 0, errno
}

func writeFD(fd int, b []byte) error {
	return errnoOf(unix.Syscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b))))
}

func errnoOf(_, _ uintptr, errno unix.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}
