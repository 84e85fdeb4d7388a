package tun

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inspect finds out what is there, changes nothing, and refuses what is in the way.
func (s *setup) inspect() (err error) {
	if s.link, err = findDevice(s.h, s.cfg.Name); err != nil {
		return err
	}
	if err := s.findInterfaces(); err != nil {
		return err
	}
	if err := s.findAddresses(); err != nil {
		return err
	}
	if s.leftovers, err = s.findLeftovers(); err != nil {
		return err
	}
	for _, i := range s.ifaces {
		has, err := s.hasClsact(i.Index)
		if err != nil {
			return err
		}
		ours, err := s.ourFilters(i.Index)
		if err != nil {
			return err
		}
		if has && len(ours) == 0 { // with a filter of an earlier start, it was that which made the qdisc
			s.clsactBefore = append(s.clsactBefore, i.Name)
		}
	}
	return nil
}

// findInterfaces chooses the interfaces to capture.
func (s *setup) findInterfaces() error {
	links, err := s.h.LinkList()
	if err != nil {
		return fmt.Errorf("links: %w", err)
	}
	for _, link := range links {
		a := link.Attrs()
		if a.RawFlags&unix.IFF_LOOPBACK != 0 {
			s.loopback = a.Index
		}
		if s.link != nil && a.Index == s.link.Attrs().Index {
			continue
		}
		s.linkNames = append(s.linkNames, a.Name)
		if s.cfg.Interface != "" && a.Name != s.cfg.Interface || a.RawFlags&(unix.IFF_LOOPBACK|unix.IFF_UP) != unix.IFF_UP {
			continue
		}
		s.ifaces = append(s.ifaces, Interface{Name: a.Name, Index: a.Index, MTU: a.MTU})
		s.mtu = max(s.mtu, a.MTU)
	}
	switch {
	case len(s.ifaces) > 0:
		return nil
	case s.cfg.Interface != "" && !slices.Contains(s.linkNames, s.cfg.Interface):
		return fmt.Errorf("interface %s: does not exist; there are %s", s.cfg.Interface, strings.Join(s.linkNames, ", "))
	case s.cfg.Interface != "":
		return fmt.Errorf("interface %s: is loopback, or not up", s.cfg.Interface)
	}
	return errors.New("no interface to capture is up; is the pod's network ready?")
}

// findAddresses finds the families to capture and the pod's addresses of these.
//
// A family is captured whether or not the pod has an address of it yet: one that comes later, by SLAAC or after duplicate
// detection, would not be captured at all. Only where IPv6 is off there is nothing to come.
func (s *setup) findAddresses() error {
	s.families = []int{unix.AF_INET}
	if !s.cfg.NoIPv6 && s.ipv6On() {
		s.families = append(s.families, unix.AF_INET6)
	}
	s.mtu = deviceMTU(&s.cfg, s.mtu, s.has(unix.AF_INET6))
	s.src = make(map[int]netip.Addr)
	captured := false
	for _, family := range s.families {
		if err := s.findDefaultRoute(family); err != nil {
			return err
		}
		list, err := s.h.AddrList(nil, family)
		if err != nil {
			return fmt.Errorf("addresses: %w", err)
		}
		for _, entry := range list {
			at := slices.IndexFunc(s.ifaces, func(i Interface) bool { return i.Index == entry.LinkIndex })
			switch {
			case at < 0:
				continue
			case family == unix.AF_INET:
				s.ifaces[at].v4 = true
			default:
				s.ifaces[at].v6 = true
			}
			a, ok := podAddr(&entry)
			captured = captured || ok
			usable := entry.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DEPRECATED|unix.IFA_F_DADFAILED) == 0
			if ok && usable && !s.src[family].IsValid() {
				s.src[family] = a
			}
		}
	}
	if !captured {
		return errors.New("no interface to capture has an address; is the pod's network ready?")
	}
	var err error
	s.addrs, err = podAddrs(s.h, s.families, s.ifaces)
	return err
}

// ipv6On reports whether the pod may have IPv6, now or later: that the kernel has it and that it is not disabled on all
// captured interfaces and on those to come.
func (s *setup) ipv6On() bool {
	on := func(name string) bool {
		off, err := s.proc.read("net/ipv6/conf/" + name + "/disable_ipv6")
		return err == nil && off == "0"
	}
	return on("default") || slices.ContainsFunc(s.ifaces, func(i Interface) bool { return on(i.Name) })
}

// findDefaultRoute puts the captured interface that has the default route first.
func (s *setup) findDefaultRoute(family int) error {
	routes, err := s.h.RouteList(nil, family)
	if err != nil {
		return fmt.Errorf("routes: %w", err)
	}
	for _, r := range routes {
		if ones, _ := maskSize(r.Dst); ones != 0 || r.Type != unix.RTN_UNICAST {
			continue
		}
		at := slices.IndexFunc(s.ifaces, func(i Interface) bool { return i.Index == r.LinkIndex })
		if at < 0 {
			continue
		}
		if !s.ordered { // by IPv4's default route where there is one
			s.ifaces[0], s.ifaces[at] = s.ifaces[at], s.ifaces[0]
			s.ordered = true
		}
	}
	return nil
}

// findLeftovers reports whether an earlier start has left something, and refuses what is of others.
func (s *setup) findLeftovers() (found bool, err error) {
	found = s.link != nil
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := s.h.RuleList(family)
		if err != nil {
			return false, fmt.Errorf("rules: %w", err)
		}
		if err := foreignRule(rules); err != nil {
			return false, err
		}
		routes, err := s.ourTables(family)
		if err != nil {
			return false, err
		}
		if err := s.foreignRoute(routes); err != nil {
			return false, err
		}
		// What is in our tables is ours by now.
		found = found || len(routes) > 0 || slices.ContainsFunc(rules, func(r netlink.Rule) bool { return r.Protocol == protocol })
	}
	return found, nil
}
