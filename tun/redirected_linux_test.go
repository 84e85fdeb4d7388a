package tun

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
)

func TestNetnsRedirected(t *testing.T) {
	t.Parallel()
	needPrivilege(t)
	for name, tt := range map[string]struct {
		family       nftables.TableFamily
		table, chain string
		want         string
	}{
		"nothing":             {},
		"another's":           {nftables.TableFamilyIPv4, "nat", "KUBE-SERVICES", ""},
		"ztun's own":          {nftables.TableFamilyINet, nftTable, "pre", ""},
		"nftables":            {nftables.TableFamilyINet, "istio-ambient-nat", "output", "nftables table istio-ambient-nat, chain output"},
		"iptables, out":       {nftables.TableFamilyIPv4, "nat", "ISTIO_OUTPUT", "nftables table nat, chain ISTIO_OUTPUT"},
		"iptables, in":        {nftables.TableFamilyIPv4, "nat", "ISTIO_PRERT", "nftables table nat, chain ISTIO_PRERT"},
		"iptables, IPv6 only": {nftables.TableFamilyIPv6, "nat", "ISTIO_PRERT", "nftables table nat, chain ISTIO_PRERT"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns, other := newNetns(t), newNetns(t)
			if tt.table != "" {
				must(t, ns.Do(func() error {
					conn, err := nftables.New()
					if err != nil {
						return err
					}
					conn.AddChain(&nftables.Chain{Name: tt.chain, Table: conn.AddTable(&nftables.Table{Family: tt.family, Name: tt.table})})
					return conn.Flush()
				}))
			}
			if got, err := Redirected(ns); got != tt.want || err != nil {
				t.Errorf("Redirected = %q, %v, want %q", got, err, tt.want)
			}
			if got, err := Redirected(other); got != "" || err != nil {
				t.Errorf("Redirected of another netns = %q, %v, want none", got, err)
			}
		})
	}
}

func TestNetnsAddresses(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	setAddr(t, l.pod, "169.254.9.9/16", true)
	must(t, l.pod.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		a := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 99, 0, 1).To4(), Mask: net.CIDRMask(32, 32)}}
		return netlink.AddrAdd(lo, a) // an address of the pod, on whichever interface
	}))
	got, err := Addresses(l.pod)
	must(t, err)
	slices.SortFunc(got, netip.Addr.Compare)
	if diff := cmp.Diff([]string{"10.77.0.10", "10.99.0.1", "169.254.9.9", "fd77::10"}, addrStrings(got)); diff != "" {
		t.Errorf("Addresses (-want +got):\n%s", diff)
	}
	if got, err := Addresses(newNetns(t)); len(got) > 0 || err != nil {
		t.Errorf("Addresses of an empty netns = %v, %v, want none", got, err)
	}
}
