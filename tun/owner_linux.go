package tun

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// InUse returns nil if no living process is seen to hold the device called name ("" means [DefaultName]) in the netns, else
// the error of [Open], which names it. It reads the descriptors of all processes.
func InUse(netns *Netns, name string) error {
	if name == "" {
		name = DefaultName
	}
	pid, command := findOwner(netns, name)
	if pid == 0 {
		return nil
	}
	return fmt.Errorf("tun: netns %s: %w", netns, ownedBy(name, pid, command))
}

func ownedBy(name string, pid int, command string) error {
	return fmt.Errorf("device %s: in use by pid %d (%s); stop it first", name, pid, command)
}

// busy returns the error for a device that has an owner.
func (s *setup) busy() error {
	pid, command := findOwner(s.cfg.Netns, s.cfg.Name)
	if pid == 0 {
		return fmt.Errorf("device %s: in use by a process that is not visible here; stop it first", s.cfg.Name)
	}
	return ownedBy(s.cfg.Name, pid, command)
}

// findOwner looks in /proc for the process that holds the device open. A process has a descriptor for each pod, all of
// the same device name, so that the namespace behind each has to be looked at too. pid is 0 when none is found.
func findOwner(netns *Netns, name string) (pid int, command string) {
	infos, _ := filepath.Glob("/proc/[0-9]*/fdinfo/[0-9]*")
	want := []byte("iff:\t" + name + "\n") // tun_chr_show_fdinfo of drivers/net/tun.c
	for _, info := range infos {
		b, err := os.ReadFile(info)
		if err != nil || !bytes.Contains(b, want) {
			continue
		}
		dir := filepath.Dir(filepath.Dir(info))
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		fd, err := strconv.Atoi(filepath.Base(info))
		if err != nil || !holds(pid, fd, netns) {
			continue
		}
		comm, _ := os.ReadFile(dir + "/comm")
		return pid, string(bytes.TrimSpace(comm))
	}
	return 0, ""
}

// holds reports whether the TUN descriptor fd of a process is of a device in netns. Where the kernel does not let us look,
// the name has to do.
func holds(pid, fd int, netns *Netns) bool {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(pidfd)
	tun, err := unix.PidfdGetfd(pidfd, fd, 0)
	if err != nil {
		return true
	}
	defer unix.Close(tun)
	dev, ino, err := devNetns(tun)
	return err != nil || dev == netns.dev && ino == netns.ino
}
