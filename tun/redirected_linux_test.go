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
	a, err := WatchAddresses(l.pod)
	must(t, err)
	defer func() { must(t, a.Close()) }()
	got := a.List()
	slices.SortFunc(got, netip.Addr.Compare)
	if diff := cmp.Diff([]string{"10.77.0.10", "10.99.0.1", "fd77::10"}, addrStrings(got)); diff != "" {
		t.Errorf("List (-want +got):\n%s", diff)
	}
	setAddr(t, l.pod, "10.78.0.10/24", true) // one that comes later
	for addr, want := range map[string]bool{"10.77.0.10": true, "10.99.0.1": true, "169.254.9.9": true, "fd77::10": true, "10.78.0.10": true, "10.77.0.2": false} {
		if got := a.Local(netip.MustParseAddr(addr)); got != want {
			t.Errorf("Local(%s) = %v, want %v", addr, got, want)
		}
	}
	empty, err := WatchAddresses(newNetns(t))
	must(t, err)
	if got := empty.List(); len(got) > 0 {
		t.Errorf("List of an empty netns = %v, want none", got)
	}
	for range 2 {
		must(t, empty.Close())
	}
}
