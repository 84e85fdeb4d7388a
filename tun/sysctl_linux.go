package tun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A procfs is a private mount of proc that no path leads to. Containers get /proc/sys read-only; through a mount of its
// own a process with CAP_SYS_ADMIN and CAP_NET_ADMIN may write what the mount over there refuses (measured).
type procfs struct{ root int }

func openProcfs() (*procfs, error) {
	fsfd, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("sysctls: fsopen proc: %w; needs CAP_SYS_ADMIN", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fmt.Errorf("sysctls: fsconfig proc: %w; needs CAP_SYS_ADMIN", err)
	}
	root, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("sysctls: fsmount proc: %w; needs CAP_SYS_ADMIN", err)
	}
	return &procfs{root: root}, nil
}

func (p *procfs) close() { _ = unix.Close(p.root) }

// open opens a sysctl by its path below sys. The kernel resolves sys/net in the network namespace of the calling thread,
// at the time of the open (measured), so that the callers have to be in Netns.Do.
func (p *procfs) open(name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(p.root, "sys/"+name, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("sysctl %s: open: %w", dotted(name), err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (p *procfs) read(name string) (string, error) {
	f, err := p.open(name, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var b [256]byte // the sysctls here are single numbers
	n, err := f.Read(b[:])
	if err != nil {
		return "", fmt.Errorf("sysctl %s: read: %w", dotted(name), err)
	}
	return strings.TrimSpace(string(b[:n])), nil
}

func (p *procfs) write(name, value string) error {
	f, err := p.open(name, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("sysctl %s: write %s: %w", dotted(name), value, err)
	}
	return nil
}

func (p *procfs) exists(name string) bool {
	return unix.Faccessat(p.root, "sys/"+name, unix.F_OK, 0) == nil
}

// restore writes earlier values, the last first. What is gone by now (an interface) needs no restoring.
func (p *procfs) restore(earlier []sysctl) error {
	var errs []error
	for _, s := range slices.Backward(earlier) {

		now, err := p.read(s.Name)
		if err == nil && now != s.Value {
			err = p.write(s.Name, s.Value)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// A sysctl is a name below /proc/sys, with slashes, and a value.
type sysctl struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// dotted returns the name as sysctl(8) shows it.
func dotted(name string) string { return strings.ReplaceAll(name, "/", ".") }

// sysctls returns what has to be set, in this order, and which of that belongs to the device and is gone with it.
func (s *setup) sysctls() (shared, own []sysctl) {
	const v4, v6 = "net/ipv4/conf/", "net/ipv6/conf/"
	dev := s.cfg.Name
	if s.has(unix.AF_INET) {
		shared = append(shared, sysctl{v4 + "all/rp_filter", "0"}) // all and the interface: the larger of both counts
		for _, i := range s.ifaces {
			shared = append(shared,
				sysctl{v4 + i.Name + "/rp_filter", "0"},  // the reply to a marked socket has its way back through the TUN
				sysctl{v4 + i.Name + "/forwarding", "1"}) // captured packets are forwarded into the TUN
		}
		own = append(own,
			sysctl{v4 + dev + "/rp_filter", "0"},
			sysctl{v4 + dev + "/accept_local", "1"}, // what comes out of the TUN may be from the pod's address
			sysctl{v4 + dev + "/forwarding", "1"},
			sysctl{v4 + dev + "/ignore_routes_with_linkdown", "1"}) // no reader: the unreachable route counts
	}
	// A packet that early demux has tied to a socket is dropped where it would be forwarded. Holds for IPv6 too.
	shared = append(shared,
		sysctl{"net/ipv4/tcp_early_demux", "0"},
		sysctl{"net/ipv4/tcp_fwmark_accept", "1"}, // the application's socket takes over the mark of the SYN
		sysctl{"net/ipv4/fwmark_reflect", "1"})    // and the kernel's RST that of what it answers
	if s.has(unix.AF_INET6) {
		shared = append(shared,
			sysctl{v6 + "lo/disable_ipv6", "0"}, // the routes of table 1338 go there
			sysctl{"net/ipv6/fwmark_reflect", "1"})
		own = append(own,
			sysctl{v6 + dev + "/disable_ipv6", "0"}, // conf/default may say otherwise
			sysctl{v6 + dev + "/ignore_routes_with_linkdown", "1"})
		if s.proc.exists(v6+"lo/force_forwarding") && !s.cfg.noForceForwarding { // Linux 6.17
			for _, i := range s.ifaces {
				if s.proc.exists(v6 + i.Name) { // not where the MTU is too small
					shared = append(shared, sysctl{v6 + i.Name + "/force_forwarding", "1"})
				}
			}
			own = append(own, sysctl{v6 + dev + "/force_forwarding", "1"})
		} else {
			shared = append(shared, s.forwardAllIPv6()...)
		}
	}
	return shared, own
}

// forwardAllIPv6 turns on forwarding for all interfaces, which the kernel copies to each of them. As a router the pod would
// ignore router advertisements, those to come too, and drop the default route it has from one, unless accept_ra says 2
// before.
func (s *setup) forwardAllIPv6() (list []sysctl) {
	const v6 = "net/ipv6/conf/"
	for _, i := range s.ifaces {
		if ra, err := s.proc.read(v6 + i.Name + "/accept_ra"); err == nil && ra == "1" {
			list = append(list, sysctl{v6 + i.Name + "/accept_ra", "2"})
		}
	}
	list = append(list, sysctl{v6 + "default/forwarding", "1"})
	for _, name := range s.linkNames {
		if !s.proc.exists(v6 + name) {
			continue
		}
		list = append(list, sysctl{v6 + name + "/forwarding", "1"})
	}
	// Last to be set and so first to be restored: the values of the interfaces are then restored over the copies.
	return append(list, sysctl{v6 + "all/forwarding", "1"})
}

// setSysctls sets what differs. The earlier values are kept by then, see setup.keepState.
func (s *setup) setSysctls() error {
	shared, own := s.sysctls()
	s.undo.add(func() error { return s.proc.restore(s.before) })
	for _, c := range append(own, shared...) {
		now, err := s.proc.read(c.Name)
		if err != nil {
			return err
		}
		if now == c.Value {
			continue
		}
		if err := s.proc.write(c.Name, c.Value); err != nil {
			return err
		}
	}
	return nil
}
