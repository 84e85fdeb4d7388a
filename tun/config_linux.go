package tun

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"golang.org/x/sys/unix"
)

// minMTU is that of IPv6 (RFC 8200, section 5).
const minMTU = 1280

// complete fills in defaults and checks all that can be checked without the kernel's help.
func (c *Config) complete() error {
	if c.Netns == nil {
		return errors.New("tun: config: Netns is missing")
	}
	if c.UID == "" || strings.ContainsAny(c.UID, " \n") {
		return fmt.Errorf("tun: config: UID %q is not a pod uid", c.UID)
	}
	if c.Name == "" {
		c.Name = DefaultName
	}
	if len(c.Name) >= unix.IFNAMSIZ || strings.ContainsAny(c.Name, "/ %:\n") || c.Name == "." || c.Name == ".." {
		return fmt.Errorf("tun: config: Name %q is not the name of an interface", c.Name)
	}
	if c.MTU != 0 && (c.MTU < minMTU || c.MTU > MaxPacket) {
		return fmt.Errorf("tun: config: MTU %d is not between %d and %d", c.MTU, minMTU, MaxPacket)
	}
	if err := c.Marks.Complete(); err != nil {
		return err
	}
	if err := c.sameMarks(); err != nil {
		return err
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c.notOwnNetns()
}

// notOwnNetns refuses the namespace of this process and, where that is to be seen, of the machine: capturing its own
// traffic, a proxy that dies cuts off the machine. What cannot be told apart is refused too.
//
// The calling thread is asked, not /proc/self: that is the first thread of the process, which may be just the one that is
// in a pod's netns, or was left there.
func (c *Config) notOwnNetns() error {
	var own, host unix.Stat_t
	if err := unix.Stat(threadNetns, &own); err != nil {
		return fmt.Errorf("tun: netns %s: cannot be told from this process's own: %s: %w; mount /proc", c.Netns, threadNetns, err)
	}
	if c.Netns.is(&own) {
		return fmt.Errorf("tun: netns %s: is this process's own network namespace; name that of a pod", c.Netns)
	}
	if err := unix.Stat("/proc/1/ns/net", &host); err == nil && c.Netns.is(&host) { // only a privileged process may look
		return fmt.Errorf("tun: netns %s: is the host's own network namespace; name that of a pod", c.Netns)
	}
	return nil
}
