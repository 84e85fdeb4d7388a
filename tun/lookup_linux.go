package tun

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// A listenerLookup hands SYNs of one netns to ztun's listeners, see ztun_lookup of bpf/steer.c.
type listenerLookup struct {
	link  link.Link
	socks *ebpf.Map
}

// attachLookup is called in the netns.
func (l *listenerLookup) attachLookup(prog *ebpf.Program) error {
	netns, err := unix.Open(threadNetns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", threadNetns, err)
	}
	defer unix.Close(netns)
	attached, err := link.AttachNetNs(netns, prog)
	if err != nil {
		return fmt.Errorf("attach the look-up of listeners: %w", err)
	}
	l.link = attached
	return nil
}

func (l *listenerLookup) listeners(v4, v6 int) error {
	for i, fd := range []int{v4, v6} {
		var err error
		if fd >= 0 {
			err = l.socks.Put(uint32(i), uint64(fd))
		} else if err = l.socks.Delete(uint32(i)); errors.Is(err, ebpf.ErrKeyNotExist) || errors.Is(err, unix.EINVAL) {
			err = nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (l *listenerLookup) close() error {
	var err error
	if l.link != nil {
		err = l.link.Close()
	}
	return errors.Join(err, l.socks.Close()) // nothing for one that is nil
}
