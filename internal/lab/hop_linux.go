package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// hopNumber is the last number of the router's address; the wire has number 1.
const hopNumber = 2

// addHop makes the router: one interface on the bridge of the wire.
func (l *Lab) addHop(p *procfs) error {
	hop, err := l.newHost("hop", 0, hopNumber)
	if err != nil {
		return err
	}
	l.hop = hop
	if err := hop.do("sysctls", func() error { return l.sysctls(p, true) }); err != nil {
		return err
	}
	if err := l.wire.plug(hop.Name, maxNodes, hop, "eth0"); err != nil {
		return err
	}
	return hop.do("eth0", func() error { return hop.configure("eth0") })
}

// Hop is the router on the wire; nil without [Config.HopMTU].
func (l *Lab) Hop() *Host { return l.hop }

// Detour leads the packets between two hosts through the router, both ways and in both families. What is longer than its MTU the
// router's kernel drops, and says so to the sender (RFC 1191, RFC 4443 section 3.2). Hosts that are nodes or the wire cannot be led.
func (l *Lab) Detour(a, b *Host) error {
	if l.hop == nil {
		return errors.New("lab: detour: no router; set Config.HopMTU")
	}
	proc, err := openProcfs()
	if err != nil {
		return err
	}
	defer proc.close()
	for _, way := range [][2]*Host{{a, b}, {b, a}} {
		from, to := way[0], way[1]
		err := from.do("detour to "+to.Name, func() error {
			if err := from.ignoreRedirects(proc); err != nil {
				return err
			}
			return to.eachFamily(func(addr netip.Addr, _ *net.IPNet) error {
				via := l.hop.Addr4
				if addr.Is6() {
					via = l.hop.Addr6
				}
				return routeHost(addr, &netlink.Route{Gw: via.AsSlice()})
			})
		})
		if err != nil {
			return err
		}
		err = l.hop.do("route to "+to.Name, func() error {
			return to.eachFamily(func(addr netip.Addr, _ *net.IPNet) error {
				// Without the lock IPv6 forwards by the interface's MTU (ip6_dst_mtu_maybe_forward, include/net/ip6_route.h).
				return routeHost(addr, &netlink.Route{Scope: netlink.SCOPE_LINK, MTU: l.cfg.HopMTU, MTULock: true})
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ignoreRedirects keeps a host from the short way, which a router with one interface advertises. For IPv6 that cannot be switched
// off at the router.
func (h *Host) ignoreRedirects(p *procfs) error {
	if !h.Addr6.IsValid() {
		return nil
	}
	return p.set("net/ipv6/conf/eth0/accept_redirects", "0")
}

// routeHost adds a route to one address over eth0.
func routeHost(to netip.Addr, r *netlink.Route) error {
	link, err := netlink.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("eth0: %w", err)
	}
	r.LinkIndex = link.Attrs().Index
	r.Dst = &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(to.BitLen(), to.BitLen())}
	return netlink.RouteReplace(r)
}
