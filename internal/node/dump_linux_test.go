package node

import (
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/lab"
)

// dump writes down the network of a host: rules, routes of all tables, addresses, links, qdiscs and filters as the kernel sends
// them, and the sysctls. Only what counts or ages by itself is left out.
func dump(t *testing.T, h *lab.Host) []string {
	t.Helper()
	eventually(t, 5*time.Second, "the end of duplicate address detection", func() bool { return !tentative(t, h) })
	var lines []string
	err := h.Do(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		dumps := []kernelList{
			{"rule4", unix.RTM_GETRULE, unix.RTM_NEWRULE, unix.SizeofRtMsg, nl.NewIfInfomsg(unix.AF_INET), nil},
			{"rule6", unix.RTM_GETRULE, unix.RTM_NEWRULE, unix.SizeofRtMsg, nl.NewIfInfomsg(unix.AF_INET6), nil},
			{"route4", unix.RTM_GETROUTE, unix.RTM_NEWROUTE, unix.SizeofRtMsg, nl.NewIfInfomsg(unix.AF_INET), []uint16{unix.RTA_CACHEINFO}},
			{"route6", unix.RTM_GETROUTE, unix.RTM_NEWROUTE, unix.SizeofRtMsg, nl.NewIfInfomsg(unix.AF_INET6), []uint16{unix.RTA_CACHEINFO}},
			{"addr", unix.RTM_GETADDR, unix.RTM_NEWADDR, unix.SizeofIfAddrmsg, nl.NewIfInfomsg(unix.AF_UNSPEC), []uint16{unix.IFA_CACHEINFO}},
			{"link", unix.RTM_GETLINK, unix.RTM_NEWLINK, unix.SizeofIfInfomsg, nl.NewIfInfomsg(unix.AF_UNSPEC), []uint16{unix.IFLA_STATS, unix.IFLA_STATS64, unix.IFLA_AF_SPEC}},
			{"qdisc", unix.RTM_GETQDISC, unix.RTM_NEWQDISC, nl.SizeofTcMsg, &nl.TcMsg{}, []uint16{nl.TCA_STATS, nl.TCA_STATS2}},
		}
		for _, l := range links {
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				dumps = append(dumps, kernelList{
					"filter", unix.RTM_GETTFILTER, unix.RTM_NEWTFILTER, nl.SizeofTcMsg,
					&nl.TcMsg{Ifindex: int32(l.Attrs().Index), Parent: parent},
					[]uint16{nl.TCA_STATS, nl.TCA_STATS2},
				})
			}
		}
		for _, d := range dumps {
			list, err := d.lines()
			if err != nil {
				return fmt.Errorf("dump of %s: %w", d.name, err)
			}
			lines = append(lines, list...)
		}
		list, err := sysctls()
		lines = append(lines, list...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// A kernelList is a table that the kernel lists.
type kernelList struct {
	name            string
	request, answer uint16
	header          int // bytes
	query           nl.NetlinkRequestData
	skip            []uint16 // attributes
}

func (d *kernelList) lines() ([]string, error) {
	req := nl.NewNetlinkRequest(int(d.request), unix.NLM_F_DUMP)
	req.AddData(d.query)
	msgs, err := req.Execute(unix.NETLINK_ROUTE, d.answer)
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, m := range msgs {
		attrs, err := nl.ParseRouteAttr(m[d.header:])
		if err != nil {
			return nil, err
		}
		line := fmt.Sprintf("%s %x", d.name, m[:d.header])
		for _, a := range attrs {
			if !slices.Contains(d.skip, a.Attr.Type) {
				line += fmt.Sprintf(" %d=%s", a.Attr.Type, hex.EncodeToString(a.Value))
			}
		}
		lines = append(lines, line)
	}
	return lines, nil
}

// sysctls lists those of the namespace of the thread.
func sysctls() (lines []string, err error) {
	for _, dir := range []string{"/proc/sys/net/ipv4", "/proc/sys/net/ipv6"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			if value, err := os.ReadFile(path); err == nil { // some are only to be written
				lines = append(lines, path+" = "+strings.TrimSpace(string(value)))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return lines, nil
}

func tentative(t *testing.T, h *lab.Host) (any bool) {
	t.Helper()
	err := h.Do(func() error {
		addrs, err := netlink.AddrList(nil, unix.AF_INET6)
		for _, a := range addrs {
			any = any || a.Flags&unix.IFA_F_TENTATIVE != 0
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return any
}

// unchanged calls f and compares the networks of the hosts before and after.
func unchanged(t *testing.T, hosts []*lab.Host, f func()) {
	t.Helper()
	var before [][]string
	for _, h := range hosts {
		before = append(before, dump(t, h))
	}
	f()
	for i, h := range hosts {
		if diff := cmp.Diff(before[i], dump(t, h)); diff != "" {
			t.Errorf("the network of %s has changed (-before +after):\n%s", h.Name, diff)
		}
	}
}
