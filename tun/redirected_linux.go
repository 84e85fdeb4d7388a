package tun

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// Redirected names the rules with which istio-cni leads a netns's traffic to listening ports: its nftables tables, or its chains
// in the nat table of iptables. "" means that there are none. They act on a packet before it could be led to a device. Rules of
// legacy iptables cannot be read; that its nat table is in use counts as a sign of them.
func Redirected(netns *Netns) (found string, err error) {
	failed := func(what string, err error) error {
		return fmt.Errorf("tun: netns %s: rules of istio-cni: %s: %w", netns, what, err)
	}
	err = netns.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return failed("nftables", err)
		}
		chains, err := conn.ListChains()
		if err != nil {
			return failed("list chains", err)
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
	return found, err
}
