package lab

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// A procfs is a private mount of proc that no path leads to. It can be written where /proc/sys is mounted read-only, as in
// containers.
type procfs struct{ root int }

func openProcfs() (*procfs, error) {
	fsfd, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("lab: sysctls: fsopen proc: %w; needs CAP_SYS_ADMIN", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fmt.Errorf("lab: sysctls: fsconfig proc: %w; needs CAP_SYS_ADMIN", err)
	}
	root, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("lab: sysctls: fsmount proc: %w; needs CAP_SYS_ADMIN", err)
	}
	return &procfs{root: root}, nil
}

func (p *procfs) close() { _ = unix.Close(p.root) }

// set writes a sysctl in the network namespace of the calling thread, where the kernel resolves sys/net.
func (p *procfs) set(name, value string) error {
	fd, err := unix.Openat(p.root, "sys/"+name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		f := os.NewFile(uintptr(fd), name)
		_, err = f.WriteString(value)
		f.Close()
	}
	if err != nil {
		return fmt.Errorf("sysctl %s=%s: %w", strings.ReplaceAll(name, "/", "."), value, err)
	}
	return nil
}

func (p *procfs) exists(name string) bool {
	return unix.Faccessat(p.root, "sys/"+name, unix.F_OK, 0) == nil
}

type sysctl struct{ name, value string }

// localPorts leaves the ports of Istio (15000 to 15090) and those below alone: an ephemeral port never collides with one that
// ztun listens on, and 49152 are left for connections.
const localPorts = "16384 65535"

// sysctls writes all that one namespace needs. It runs before the first interface is made.
func (l *Lab) sysctls(p *procfs, forward bool) error {
	on := "0"
	if forward {
		on = "1"
	}
	all := []sysctl{
		{"net/ipv4/ip_forward", on},
		{"net/ipv4/conf/all/send_redirects", "0"},
		{"net/ipv4/conf/default/send_redirects", "0"},
		{"net/ipv4/ip_local_port_range", localPorts},
	}
	if l.cfg.TimeWaitBuckets > 0 {
		all = append(all, sysctl{"net/ipv4/tcp_max_tw_buckets", fmt.Sprint(l.cfg.TimeWaitBuckets)})
	}
	switch ipv6 := p.exists("net/ipv6"); {
	case l.cfg.IPv6 && !ipv6:
		return errors.New("IPv6: the kernel has none (booted with ipv6.disable=1?); leave Config.IPv6 unset, or boot without it")
	case l.cfg.IPv6:
		all = append(all, sysctl{"net/ipv6/conf/all/disable_ipv6", "0"}, sysctl{"net/ipv6/conf/default/disable_ipv6", "0"},
			sysctl{"net/ipv6/conf/default/accept_dad", "0"}, sysctl{"net/ipv6/conf/default/dad_transmits", "0"},
			sysctl{"net/ipv6/conf/default/accept_ra", "0"}, sysctl{"net/ipv6/conf/all/forwarding", on})
	case ipv6:
		all = append(all, sysctl{"net/ipv6/conf/all/disable_ipv6", "1"}, sysctl{"net/ipv6/conf/default/disable_ipv6", "1"})
	}
	for _, s := range all {
		if err := p.set(s.name, s.value); err != nil {
			return err
		}
	}
	return l.setCongestionControl(p)
}

// setCongestionControl takes cubic, the default of Linux, or reno where the machine does not let other namespaces have it
// (tcp_allowed_congestion_control): a namespace would inherit the machine's default, and measurements with it.
func (l *Lab) setCongestionControl(p *procfs) error {
	err := p.set("net/ipv4/tcp_congestion_control", "cubic")
	if err == nil {
		l.congestion = "cubic"
		return nil
	}
	if err2 := p.set("net/ipv4/tcp_congestion_control", "reno"); err2 != nil {
		return errors.Join(err, err2)
	}
	l.congestion = "reno"
	return nil
}
