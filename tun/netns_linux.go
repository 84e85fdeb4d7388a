package tun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// threadNetns is the network namespace of the calling thread.
const threadNetns = "/proc/thread-self/ns/net"

// A Netns is an open descriptor of a network namespace, which keeps the namespace alive. It is safe for concurrent use.
type Netns struct {
	f        *os.File
	dev, ino uint64
}

// OpenNetns opens the namespace at path, for example /run/netns/name or /proc/<pid>/ns/net.
func OpenNetns(path string) (*Netns, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("tun: netns %s: %w; is the pod gone, or its directory not mounted here?", path, unix.ENOENT)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("tun: netns %s: %w; run as root, or with CAP_SYS_ADMIN", path, unix.EACCES)
	case err != nil:
		return nil, fmt.Errorf("tun: netns: %w", err)
	}
	n, err := NetnsFromFile(f)
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return n, nil
}

// NetnsFromFile makes a Netns of an open descriptor, for example one that came over a socket. The Netns owns f from then
// on, unless an error is returned.
func NetnsFromFile(f *os.File) (*Netns, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		return nil, fmt.Errorf("tun: netns %s: fstat: %w", f.Name(), err)
	}
	kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		return nil, fmt.Errorf("tun: netns %s: not a network namespace; name a file such as /run/netns/<name> or /proc/<pid>/ns/net", f.Name())
	}
	return &Netns{f: f, dev: stat.Dev, ino: stat.Ino}, nil
}

// CurrentNetns opens the namespace of the calling thread: that of the process, unless the caller is locked to a thread
// that has moved.
func CurrentNetns() (*Netns, error) { return OpenNetns(threadNetns) }

// dup returns a second descriptor of the same namespace.
func (n *Netns) dup() (*Netns, error) {
	var fd int
	err := n.use(func(own int) (err error) {
		fd, err = unix.FcntlInt(uintptr(own), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("tun: netns %s: dup: %w", n, err)
	}
	return &Netns{f: os.NewFile(uintptr(fd), n.f.Name()), dev: n.dev, ino: n.ino}, nil
}

// ID returns the device and inode numbers by which the kernel tells namespaces apart. An inode is used again once its
// namespace is gone.
func (n *Netns) ID() (dev, ino uint64) { return n.dev, n.ino }

func (n *Netns) is(stat *unix.Stat_t) bool { return stat.Dev == n.dev && stat.Ino == n.ino }

// File returns the descriptor, which stays the Netns's own.
func (n *Netns) File() *os.File { return n.f }

// String returns the path that the namespace was opened by, with the inode.
func (n *Netns) String() string { return fmt.Sprintf("%s (net:[%d])", n.f.Name(), n.ino) }

// Close closes the descriptor. Who wants to go there later is told os.ErrClosed.
func (n *Netns) Close() error { return n.f.Close() }

// use calls f with the descriptor, which stays open, and that of this namespace, until f returns.
func (n *Netns) use(f func(fd int) error) error {
	raw, err := n.f.SyscallConn()
	if err != nil {
		return os.ErrClosed
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return os.ErrClosed // package os says so in an error of its own
	}
	return failed
}

// Do calls f on a thread that is in the namespace, and brings the thread back. f must not leave the thread, and what it
// starts elsewhere (goroutines) is not in the namespace. A thread that cannot be brought back is not used again: it ends
// with the calling goroutine.
func (n *Netns) Do(f func() error) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer func() {
		if r := recover(); r != nil { // the thread must not go on in the wrong namespace
			_ = leave()
			panic(r)
		}
	}()
	err = f()
	return errors.Join(err, leave())
}

// Socket creates a socket in the namespace. Only its creation has to happen there: the namespace of a socket is fixed from
// then on, and options, bind, connect and the wait are done outside, without a locked thread. The descriptor is
// close-on-exec; other flags, such as unix.SOCK_NONBLOCK, are added to typ.
func (n *Netns) Socket(domain, typ, proto int) (fd int, err error) {
	leave, err := n.enter()
	if err != nil {
		return -1, err
	}
	fd, err = unix.Socket(domain, typ|unix.SOCK_CLOEXEC, proto)
	if left := leave(); left != nil {
		if err == nil {
			_ = unix.Close(fd)
		}
		return -1, left
	}
	if err != nil {
		return -1, fmt.Errorf("tun: netns %s: socket: %w", n, err)
	}
	return fd, nil
}

// enter locks the goroutine to its thread and moves that into the namespace. leave moves it back and unlocks it.
//
// The way back is opened each time instead of once for the process: it is right for threads that were elsewhere before,
// and costs little beside what is done inside.
func (n *Netns) enter() (leave func() error, err error) {
	runtime.LockOSThread()
	home, err := unix.Open(threadNetns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("tun: netns %s: open %s: %w", n, threadNetns, err)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(home, &stat); err == nil && n.is(&stat) {
		// Already there. Not only quicker: setns asks for CAP_SYS_ADMIN even to where one is.
		_ = unix.Close(home)
		return func() error { runtime.UnlockOSThread(); return nil }, nil
	}
	if err := n.use(func(fd int) error { return unix.Setns(fd, unix.CLONE_NEWNET) }); err != nil {
		_ = unix.Close(home)
		runtime.UnlockOSThread()
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("tun: netns %s: setns: %w; run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN", n, err)
		}
		return nil, fmt.Errorf("tun: netns %s: setns: %w", n, err)
	}
	return func() error {
		defer unix.Close(home)
		if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
			// Still locked: the runtime ends the thread when the goroutine ends.
			return fmt.Errorf("tun: netns %s: setns back: %w", n, err)
		}
		runtime.UnlockOSThread()
		return nil
	}, nil
}
