package tun

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// rootCgroupInode is that of the root of the hierarchy (kernfs numbers its nodes, from 1). In a cgroup namespace the root of
// the mount is another one, and most pods are not below it.
const rootCgroupInode = 1

// openRootCgroup opens the root of cgroup v2, wherever it is mounted: beside version 1 it is not where it is usually. Where
// it is not mounted, a mount of our own has to do, to which no path leads.
func openRootCgroup() (*os.File, error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("cgroup v2: %w", err)
	}
	for _, path := range cgroupMounts(string(info)) {
		fd, err := unix.Open(path, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		if isRootCgroup(fd) {
			return os.NewFile(uintptr(fd), path), nil
		}
		_ = unix.Close(fd)
	}
	fd, err := mountCgroup()
	if err != nil {
		return nil, fmt.Errorf("cgroup v2: not mounted here, nor can it be: %w", err)
	}
	if !isRootCgroup(fd) {
		_ = unix.Close(fd)
		return nil, errNoRootCgroup
	}
	return os.NewFile(uintptr(fd), "cgroup2"), nil
}

var errNoRootCgroup = errors.New("cgroup v2: only a part of it is to be seen here, others' sockets are not in it; use the host's cgroup namespace")

func isRootCgroup(fd int) bool {
	var stat unix.Stat_t
	return unix.Fstat(fd, &stat) == nil && stat.Ino == rootCgroupInode
}

// cgroupMounts lists where cgroup v2 is mounted, from the text of mountinfo (proc_pid_mountinfo(5)).
func cgroupMounts(info string) (paths []string) {
	for line := range strings.Lines(info) {
		mount, kind, ok := strings.Cut(line, " - ")
		f := strings.Fields(mount)
		if ok && strings.HasPrefix(kind, "cgroup2 ") && len(f) >= 5 {
			paths = append(paths, unescapeMount.Replace(f[4]))
		}
	}
	return paths
}

// unescapeMount is for what the kernel writes as octal numbers.
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func mountCgroup() (fd int, err error) {
	fs, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("fsconfig: %w", err)
	}
	if fd, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC); err != nil {
		return -1, fmt.Errorf("fsmount: %w", err)
	}
	return fd, nil
}
