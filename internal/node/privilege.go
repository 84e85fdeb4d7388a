package node

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// neededCapabilities are what serving pods takes: entering their namespaces, changing what is in there, and raw sockets.
var neededCapabilities = []struct {
	number int
	name   string
}{
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"},
	{unix.CAP_NET_RAW, "CAP_NET_RAW"},
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"},
}

// checkPrivilege reports what this process is not allowed to do and has to, before anything was begun.
func checkPrivilege() error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // of this thread; all of them have the same
	var caps [2]unix.CapUserData
	if err := unix.Capget(&head, &caps[0]); err != nil {
		return fmt.Errorf("capabilities of this process: %w", err)
	}
	return privilege(os.Geteuid(), uint64(caps[1].Effective)<<32|uint64(caps[0].Effective))
}

// privilege is checkPrivilege for a user and a set of capabilities.
func privilege(euid int, effective uint64) error {
	var names, missing []string
	for _, c := range neededCapabilities {
		names = append(names, c.name)
		if effective&(1<<c.number) == 0 {
			missing = append(missing, c.name)
		}
	}
	switch {
	case len(missing) == 0:
		return nil
	case euid != 0:
		return errors.New("the network namespaces of pods need root; run it with sudo, or with the capabilities " + strings.Join(names, ", "))
	}
	return fmt.Errorf("the network namespaces of pods need capabilities that are missing: %s; a container gets them by securityContext.capabilities.add or --cap-add", strings.Join(missing, ", "))
}
