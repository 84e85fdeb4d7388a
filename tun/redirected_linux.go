package tun

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Redirected names the rules with which istio-cni leads a netns's traffic to listening ports: its nftables tables, or its chains
// in the nat table of iptables. "" means that there are none. They act on a packet before it could be led to a device. Rules of
// legacy iptables cannot be read; that its nat table is in use counts as a sign of them.
func Redirected(netns *Netns) (found string, err error) {
	err = netns.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		chains, err := conn.ListChains()
		if err != nil {
			return fmt.Errorf("list chains: %w", err)
		}
		for _, c := range chains {
			if c.Table.Name == "istio-ambient-nat" || c.Name == "ISTIO_OUTPUT" || c.Name == "ISTIO_PRERT" {
				found = fmt.Sprintf("nftables table %s, chain %s", c.Table.Name, c.Name)
				return nil
			}
		}
		for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
			tables, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err == nil && slices.Contains(strings.Fields(string(tables)), "nat") {
				found = "the nat table of legacy iptables"
			}
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("tun: netns %s: rules of istio-cni: %w", netns, err)
	}
	return found, nil
}

// Addresses are the global addresses of a netns, those of loopback aside.
func Addresses(netns *Netns) (list []netip.Addr, err error) {
	err = netns.Do(func() error {
		found, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, f := range found {
			a, ok := netip.AddrFromSlice(f.IP)
			if ok && f.Scope == unix.RT_SCOPE_UNIVERSE && !a.IsLoopback() {
				list = append(list, a.Unmap())
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("tun: netns %s: addresses: %w", netns, err)
	}
	return list, nil
}
