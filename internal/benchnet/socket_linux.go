package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The tools' system calls are raw ones, which Go's scheduler is not told of (see ownThreads). With those that it is told of, eight streams on
// one thread through ztun were a tenth slower than with iperf3 and direct ones were not: whoever sleeps often pays for the scheduler each time.

// sockaddr is an IPv4 address and port as system calls take it.
func sockaddr(text string) (*unix.RawSockaddrInet4, error) {
	a, err := netip.ParseAddrPort(text)
	if err != nil || !a.Addr().Is4() {
		return nil, fmt.Errorf("%q is not an IPv4 address and port", text)
	}
	to := &unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: a.Addr().As4()}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&to.Port))[:], a.Port())
	return to, nil
}

// listen makes a socket that listens on all addresses. Connections inherit TCP_NODELAY from it.
func listen(port, flags int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|flags, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	for _, o := range []struct{ level, name int }{{unix.SOL_SOCKET, unix.SO_REUSEADDR}, {unix.IPPROTO_TCP, unix.TCP_NODELAY}} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, 1); err != nil {
			return 0, os.NewSyscallError("setsockopt", err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port}); err != nil {
		return 0, os.NewSyscallError(fmt.Sprintf("bind to port %d", port), err)
	}
	return fd, os.NewSyscallError("listen", unix.Listen(fd, 4096))
}

// accept is accept4 without the peer's address, for which unix.Accept4 allocates.
func accept(fd, flags int) (int, error) {
	for {
		c, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), 0, 0, uintptr(flags|unix.SOCK_CLOEXEC), 0, 0)
		switch errno {
		case 0:
			return int(c), nil
		case unix.EINTR, unix.ECONNABORTED:
		default:
			return -1, errno
		}
	}
}

// clientPorts are 32768 to 65535, as unix.IP_LOCAL_PORT_RANGE has them. The first is the default of Linux; ztun delivers inbound
// plaintext from the client's address and ports below, and a client that uses the same one is not answered.
const clientPorts = 65535<<16 | 32768

// connect makes a blocking connection.
func connect(to *unix.RawSockaddrInet4) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_LOCAL_PORT_RANGE, clientPorts); err != nil && err != unix.ENOPROTOOPT { // Linux 6.3
		unix.Close(fd)
		return -1, os.NewSyscallError("setsockopt IP_LOCAL_PORT_RANGE", err)
	}
	for {
		_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(to)), unix.SizeofSockaddrInet4)
		switch errno {
		case 0, unix.EISCONN:
			return fd, nil
		case unix.EINTR, unix.EALREADY:
			// The attempt goes on; asking again waits for it.
		default:
			unix.Close(fd)
			return -1, os.NewSyscallError("connect", errno)
		}
	}
}

// epollWait is one epoll_wait(2), with a limit in milliseconds; -1: none. An interruption is no event.
func epollWait(fd int, events []unix.EpollEvent, ms int) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), uintptr(ms), 0, 0)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EINTR:
		return 0, nil
	}
	return 0, os.NewSyscallError("epoll_wait", errno)
}

// read is one read(2). Its error at the end of the stream is nil.
func read(fd int, b []byte) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return -1, errno
		}
	}
}

// readFull fills b.
func readFull(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := read(fd, b)
		switch {
		case err != nil:
			return os.NewSyscallError("read", err)
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		b = b[n:]
	}
	return nil
}

// write is one write(2).
func write(fd int, b []byte) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return -1, errno
		}
	}
}

// writeFull writes all of b.
func writeFull(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := write(fd, b)
		if err != nil {
			return os.NewSyscallError("write", err)
		}
		b = b[n:]
	}
	return nil
}

// descriptors is how many this process may have open.
func descriptors() (int, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, os.NewSyscallError("getrlimit", err)
	}
	return int(min(l.Max, 1<<20)), nil
}
