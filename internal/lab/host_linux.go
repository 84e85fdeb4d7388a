package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A Host is a network namespace of a lab: that of a node, of a pod or of the wire. It is safe for concurrent use.
type Host struct {
	Name  string     // node-a, node-a/pod-0, wire
	Addr4 netip.Addr // of eth0 in a pod, of br0 elsewhere
	Addr6 netip.Addr // not valid without IPv6

	lab *Lab
	ns  *os.File
}

// File is the namespace's descriptor. It belongs to the lab.
func (h *Host) File() *os.File { return h.ns }

// NetnsPath is a path of the namespace that other processes of the same user can open while this one lives.
func (h *Host) NetnsPath() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), h.ns.Fd()) }

// Do calls f on a thread that is in the namespace. f must not start goroutines that count on it.
func (h *Host) Do(f func() error) error { return h.do("", f) }

// do adds what was attempted to errors; without it, those of f are returned as they are.
func (h *Host) do(what string, f func() error) error {
	var ferr error
	err := away(func() error {
		if err := unix.Setns(int(h.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("setns: %w", err)
		}
		ferr = f()
		return nil
	})
	switch {
	case err != nil:
		return errors.Join(fmt.Errorf("lab: %s: %w", h.Name, err), ferr)
	case ferr != nil && what != "":
		return fmt.Errorf("lab: %s: %s: %w", h.Name, what, ferr)
	}
	return ferr
}

// Listen is net.Listen inside the namespace. addr is numeric.
func (h *Host) Listen(network, addr string) (net.Listener, error) {
	var ln net.Listener
	err := h.Do(func() (err error) {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false) // on by default for listeners, and no part of what is tried here
		ln, err = lc.Listen(context.Background(), network, addr)
		return err
	})
	return ln, err
}

// ListenPacket is net.ListenPacket inside the namespace. addr is numeric.
func (h *Host) ListenPacket(network, addr string) (net.PacketConn, error) {
	var pc net.PacketConn
	err := h.Do(func() (err error) {
		pc, err = net.ListenPacket(network, addr)
		return err
	})
	return pc, err
}

// Dial is net.Dial inside the namespace. addr is numeric.
func (h *Host) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var c net.Conn
	err := h.Do(func() (err error) {
		var d net.Dialer
		c, err = d.DialContext(ctx, network, addr)
		return err
	})
	return c, err
}

// WaitListening waits until a TCP socket of the namespace listens on port, without connecting to it.
func (h *Host) WaitListening(ctx context.Context, port uint16) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		var found bool
		err := h.do("listening sockets", func() error {
			for _, path := range []string{"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"} {
				ok, err := listens(path, port)
				if err != nil && !errors.Is(err, os.ErrNotExist) { // no tcp6 without IPv6
					return err
				}
				found = found || ok
			}
			return nil
		})
		if found || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("lab: %s: nothing listens on port %d: %w", h.Name, port, context.Cause(ctx))
		}
	}
}

// Counter is a counter of the namespace's TCP by its name in /proc/net/netstat, such as TCPSynRetrans.
func (h *Host) Counter(name string) (n uint64, err error) {
	err = h.do("counter "+name, func() error {
		table, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		n, err = counter(string(table), name)
		return err
	})
	return n, err
}

// counter reads a table in the form of /proc/net/netstat: pairs of lines, names and values, with the same first word.
func counter(table, name string) (uint64, error) {
	lines := strings.Split(table, "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
		if at := slices.Index(names, name); at > 0 && at < len(values) {
			return strconv.ParseUint(values[at], 10, 64)
		}
	}
	return 0, fmt.Errorf("no counter %s in netstat", name)
}

// listens reads a table in the form of /proc/net/tcp: number, local address:port, remote, state (0A is LISTEN).
func listens(path string, port uint16) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || fields[3] != "0A" {
			continue
		}
		_, hex, _ := strings.Cut(fields[1], ":")
		if p, err := strconv.ParseUint(hex, 16, 16); err == nil && uint16(p) == port {
			return true, nil
		}
	}
	return false, lines.Err()
}
