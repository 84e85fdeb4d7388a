package tun

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// metricUnreachable is that of the route that counts when the TUN has no reader: larger than any other's.
	metricUnreachable = 4278198272

	// metricIPv6 is IP6_RT_PRIO_USER, which the kernel puts where no metric is given.
	metricIPv6 = 1024
)

// routes returns the routes of one family in the order in which they are added: the unreachable one before that of the
// TUN, so that there is no moment in which a death of the process lets traffic out.
func (s *setup) routes(family int) []*netlink.Route {
	all, metric := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, 0
	if family == unix.AF_INET6 {
		all, metric = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, metricIPv6
	}
	route := func(table, kind, metric, index int, scope netlink.Scope) *netlink.Route {
		if family == unix.AF_INET6 {
			scope = netlink.SCOPE_UNIVERSE // IPv6 routes have no scope
		}
		return &netlink.Route{
			Family: family, Table: table, Type: kind, Priority: metric, LinkIndex: index, Scope: scope,
			Dst: all, Protocol: protocol,
		}
	}
	var list []*netlink.Route
	if !s.cfg.FailOpenRoute {
		list = append(list, route(tableCapture, unix.RTN_UNREACHABLE, metricUnreachable, 0, netlink.SCOPE_UNIVERSE))
	}
	tun := route(tableCapture, unix.RTN_UNICAST, metric, s.link.Attrs().Index, netlink.SCOPE_LINK)
	if src := s.src[family]; src.IsValid() {
		tun.Src = src.AsSlice() // a pod may have several addresses: the one that it would have used
	}
	return append(list, tun, route(tableDelivery, unix.RTN_LOCAL, metric, s.loopback, netlink.SCOPE_HOST))
}

// setRoutes adds the routes of one family and removes what an earlier start left and is not wanted now.
func (s *setup) setRoutes(family int) error {
	have, err := s.ourTables(family)
	if err != nil {
		return err
	}
	known, wanted := make(map[string]bool), make(map[string]bool)
	for _, r := range have {
		known[s.routeKey(&r)] = true
	}
	for _, r := range s.routes(family) {
		key := s.routeKey(r)
		wanted[key] = true
		if known[key] {
			continue
		}
		// Replace, not add: the TUN route of an earlier start may differ in its source address only.
		if err := s.h.RouteReplace(r); err != nil {
			return fmt.Errorf("route %s: %w", key, err)
		}
		s.undo.add(func() error { return s.deleteRoute(r) })
	}
	now, err := s.ourTables(family)
	if err != nil {
		return err
	}
	for _, r := range now {
		if wanted[s.routeKey(&r)] {
			continue
		}
		if err := s.deleteRoute(&r); err != nil {
			return err
		}
		s.undo.add(func() error { return s.h.RouteAdd(&r) })
	}
	return nil
}

func (s *setup) deleteRoute(r *netlink.Route) error {
	if err := s.h.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete route %s: %w", s.routeKey(r), err)
	}
	return nil
}

// removeRoutes takes ztun's routes of one family away again.
func (s *setup) removeRoutes(family int) error {
	have, err := s.ourTables(family)
	if err != nil {
		return err
	}
	var errs []error
	for _, kind := range []int{unix.RTN_LOCAL, unix.RTN_UNICAST, unix.RTN_UNREACHABLE} { // reverse of routes
		for _, r := range have {
			if r.Protocol == protocol && r.Type == kind {
				errs = append(errs, s.deleteRoute(&r))
			}
		}
	}
	return errors.Join(errs...)
}

// ourTables lists the routes of both tables.
func (s *setup) ourTables(family int) (list []netlink.Route, err error) {
	for _, table := range []int{tableCapture, tableDelivery} {
		routes, err := s.h.RouteListFiltered(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("routes of table %d: %w", table, err)
		}
		list = append(list, routes...)
	}
	return list, nil
}

// foreignRoute returns an error naming a route that is not ztun's and stands in one of its tables.
func (s *setup) foreignRoute(have []netlink.Route) error {
	for _, r := range have {
		if r.Protocol != protocol {
			return fmt.Errorf("route %s: exists and is not ztun's; remove it, or use another table", s.routeKey(&r))
		}
	}
	return nil
}

// routesDown reports whether a route over the device is out of use for want of a carrier.
func (s *setup) routesDown() (bool, error) {
	for _, family := range s.families {
		routes, err := s.ourTables(family)
		if err != nil {
			return false, err
		}
		for _, r := range routes {
			if r.LinkIndex == s.link.Attrs().Index && r.Flags&unix.RTNH_F_LINKDOWN != 0 {
				return true, nil
			}
		}
	}
	return false, nil
}

// routeKey writes a route as ip-route(8) does. Two routes with the same key are the same route.
func (s *setup) routeKey(r *netlink.Route) string {
	var b strings.Builder
	if r.Family == unix.AF_INET6 {
		b.WriteString("-6 ")
	}
	switch r.Type {
	case unix.RTN_UNICAST:
	case unix.RTN_UNREACHABLE:
		b.WriteString("unreachable ")
	case unix.RTN_LOCAL:
		b.WriteString("local ")
	default:
		fmt.Fprintf(&b, "type %d ", r.Type)
	}
	if ones, _ := maskSize(r.Dst); ones == 0 {
		b.WriteString("default")
	} else {
		b.WriteString(r.Dst.String())
	}
	if r.Gw != nil {
		fmt.Fprintf(&b, " via %s", r.Gw)
	}
	if r.LinkIndex != 0 && r.Type != unix.RTN_UNREACHABLE { // IPv6 puts lo there
		fmt.Fprintf(&b, " dev %s", s.linkName(r.LinkIndex))
	}
	fmt.Fprintf(&b, " table %d", r.Table)
	if r.Src != nil {
		fmt.Fprintf(&b, " src %s", r.Src)
	}
	if r.Priority != 0 {
		fmt.Fprintf(&b, " metric %d", uint32(r.Priority))
	}
	fmt.Fprintf(&b, " protocol %d", r.Protocol)
	return b.String()
}

func maskSize(n *net.IPNet) (ones, bits int) {
	if n == nil {
		return 0, 0
	}
	return n.Mask.Size()
}

func (s *setup) linkName(index int) string {
	if link, err := s.h.LinkByIndex(index); err == nil {
		return link.Attrs().Name
	}
	return fmt.Sprintf("if%d", index)
}
