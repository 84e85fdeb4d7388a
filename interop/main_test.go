package interop

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
)

// inside marks the process that runs in the network namespace of the tests.
const inside = "ZTUN_INTEROP_INSIDE"

// TestMain runs the tests, and with them the peers, in a network namespace of its own: ports are free, and nothing leaves.
func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "interop: loopback:", err)
			os.Exit(1)
		}
		goleak.VerifyTestMain(m)
		return
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			fmt.Fprintln(os.Stderr, "interop: a network namespace for the tests (needs root):", err)
		}
		os.Exit(1)
	}
}
