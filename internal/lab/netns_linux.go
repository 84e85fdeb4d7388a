package lab

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// threadNetns is the network namespace of the calling thread. That of /proc/self would be the main thread's.
const threadNetns = "/proc/thread-self/ns/net"

// newNetns makes a network namespace that lives as long as the file returned, and what is opened inside.
func newNetns() (*os.File, error) {
	var ns *os.File
	err := away(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			if errors.Is(err, unix.EPERM) {
				return fmt.Errorf("unshare: %w; run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN", err)
			}
			return fmt.Errorf("unshare: %w", err)
		}
		var err error
		ns, err = os.OpenFile(threadNetns, os.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("lab: new network namespace: %w", err)
	}
	return ns, nil
}

// away locks the goroutine to its thread, calls f, which may move the thread to another network namespace, and brings the
// thread home.
func away(f func() error) (err error) {
	runtime.LockOSThread()
	home, err := unix.Open(threadNetns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open %s: %w", threadNetns, err)
	}
	defer func() {
		defer unix.Close(home)
		if back := unix.Setns(home, unix.CLONE_NEWNET); back != nil {
			// Still locked: the runtime ends the thread when the goroutine ends.
			err = errors.Join(err, fmt.Errorf("setns back: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}

// onOwnThread calls f on a goroutine with a thread that ends with it. It does not wait for f.
func onOwnThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		// The main thread never ends: the runtime would park it for good, together with the namespaces it has moved to. It is
		// held here until another goroutine has another thread.
		locked := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(locked)
			f()
		}()
		<-locked
		runtime.UnlockOSThread()
	}()
}
