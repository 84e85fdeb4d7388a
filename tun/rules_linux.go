package tun

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// protocol is the routing protocol number of every route and rule that ztun adds, by which they are known again.
const protocol = 133

// Tables.
const (
	tableCapture  = 1337
	tableDelivery = 1338
)

// Preferences of the rules, smallest first.
const (
	prefLocalKernel   = 0    // where the kernel puts the rule for table local, and from where ztun moves it
	prefDelivery      = 900  // replies of the application to delivered connections go back to ztun's socket
	prefOwn           = 1000 // exempt: ztun's own sockets, and what came in for them
	prefToProbe       = 1001 // exempt: to and from the address of kubelet's probes
	prefFromProbe     = 1002
	prefExemptLast    = 1010 // the exemptions' last
	prefInbound       = 1020 // captured: TCP that came from outside
	prefInboundRest   = 1021 // refused: what table 1337 has no route for, see setup.rules
	prefMarked        = 1030 // captured by mark, beside istio-cni's rules
	prefLocal         = 1100 // copy of local: what stays in the pod
	prefOutboundTCP   = 1110 // captured: TCP of the pod's programs
	prefOutboundRest  = 1111 // refused: what table 1337 has no route for
	prefOutboundDNS   = 1120 // captured: DNS of the pod's programs
	prefLocalExempted = 1900 // second copy of local: the exempt go on here
)

// isOurPref reports whether a preference is one of ztun's.
func isOurPref(pref int) bool {
	switch pref {
	case prefDelivery, prefInbound, prefInboundRest, prefMarked, prefLocal, prefOutboundTCP, prefOutboundRest, prefOutboundDNS, prefLocalExempted:
		return true
	}
	return pref >= prefOwn && pref <= prefExemptLast
}

// addOrder is the order in which rules are added: first what lets packets through, so that nothing is captured that should
// not be, not even for a moment. A goto to a rule that does not exist is passed over, which is why that comes first.
var addOrder = []int{
	prefLocalExempted, prefLocal, prefDelivery, prefOwn, prefToProbe, prefFromProbe,
	prefInbound, prefInboundRest, prefOutboundTCP, prefOutboundRest, prefOutboundDNS,
}

// rules returns the rules of one family in the order of addOrder.
//
// Where IPv6 asks for a certain interface, as it does for a destination of the link only and for a socket that is bound to
// an interface, no route of table 1337 suits, not even the unreachable one, and the next rule would count: the packet would
// pass. That is what the rules without a table refuse.
func (s *setup) rules(family int) []*netlink.Rule {
	rule := func(pref int) *netlink.Rule {
		r := netlink.NewRule()
		r.Family, r.Priority, r.Protocol = family, pref, protocol
		return r
	}
	table := func(pref, table int) *netlink.Rule {
		r := rule(pref)
		r.Table = table
		return r
	}
	refuse := func(pref int, iif string) *netlink.Rule {
		r := rule(pref)
		r.Type, r.IifName, r.IPProto = unix.RTN_UNREACHABLE, iif, unix.IPPROTO_TCP
		return r
	}
	exempt := func(pref int) *netlink.Rule {
		r := rule(pref)
		r.Goto = prefLocalExempted
		return r
	}
	mask := s.cfg.Marks.OwnMask

	delivery := table(prefDelivery, tableDelivery)
	delivery.Mark, delivery.Mask = s.cfg.Marks.Deliver, &mask
	if s.cfg.Steering == nil {
		delivery.IifName = "lo" // else a SYN for ztun's listener comes from the device, by a mark that only ztun sets
	}
	own := exempt(prefOwn)
	own.Mark, own.Mask = s.cfg.Marks.Own, &mask
	probe := probe4
	if family == unix.AF_INET6 {
		probe = probe6
	}
	toProbe, fromProbe := exempt(prefToProbe), exempt(prefFromProbe)
	toProbe.Dst, fromProbe.Src = hostNet(probe), hostNet(probe)

	list := []*netlink.Rule{
		table(prefLocalExempted, unix.RT_TABLE_LOCAL), table(prefLocal, unix.RT_TABLE_LOCAL),
		delivery, own, toProbe, fromProbe,
	}
	for _, i := range s.ifaces {
		// To whatever address: those of the pod come and go, and one that a list does not have yet would be let in.
		// So TCP that the pod would forward is captured too; Kernel.Local tells it apart.
		r := table(prefInbound, tableCapture)
		r.IifName, r.IPProto = i.Name, unix.IPPROTO_TCP
		list = append(list, r)
	}
	if !s.cfg.FailOpenRoute {
		for _, i := range s.ifaces {
			list = append(list, refuse(prefInboundRest, i.Name))
		}
	}
	tcp, dns := table(prefOutboundTCP, tableCapture), table(prefOutboundDNS, tableCapture)
	tcp.IifName, tcp.IPProto = "lo", unix.IPPROTO_TCP // lo: sent by a program of the pod
	dns.IifName, dns.IPProto, dns.Dport = "lo", unix.IPPROTO_UDP, netlink.NewRulePortRange(53, 53)
	list = append(list, tcp)
	if !s.cfg.FailOpenRoute {
		list = append(list, refuse(prefOutboundRest, "lo"))
	}
	return append(list, dns)
}

// setRules adds the rules and moves the rule for table local behind them, for one family.
func (s *setup) setRules(family int) error {
	have, err := s.h.RuleList(family)
	if err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	want := s.rules(family)
	wanted := make(map[string]bool, len(want))
	for _, r := range want {
		wanted[ruleKey(r)] = true
	}
	known := make(map[string]bool, len(have))
	for _, r := range have {
		known[ruleKey(&r)] = true
	}
	for _, r := range want {
		if known[ruleKey(r)] {
			continue
		}
		if err := s.h.RuleAdd(r); err != nil {
			return fmt.Errorf("rule %s: %w", ruleKey(r), err)
		}
		s.undo.add(func() error { return s.deleteRule(r) })
	}
	for _, r := range have { // of an earlier start with other marks, addresses or interfaces
		if r.Protocol != protocol || wanted[ruleKey(&r)] {
			continue
		}
		if err := s.deleteRule(&r); err != nil {
			return err
		}
		if isRefusal(&r) {
			r.Type = unix.RTN_UNREACHABLE
		}
		s.undo.add(func() error { return s.h.RuleAdd(&r) })
	}
	for _, r := range have { // all: a second one, somebody's repair, would let everything in
		if !isKernelLocal(&r) {
			continue
		}
		if err := s.deleteRule(&r); err != nil {
			return err
		}
		s.undo.add(func() error { return s.h.RuleAdd(&r) })
	}
	return nil
}

func (s *setup) deleteRule(r *netlink.Rule) error {
	if err := s.h.RuleDel(r); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete rule %s: %w", ruleKey(r), err)
	}
	return nil
}

// removeRules takes ztun's rules away again, and before that puts the rule for table local back, for one family.
func (s *setup) removeRules(family int) error {
	have, err := s.h.RuleList(family)
	if err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	var ours []netlink.Rule
	foreignLocal := false
	for _, r := range have {
		switch {
		case r.Protocol == protocol:
			ours = append(ours, r)
		case isLocal(&r):
			foreignLocal = true
		}
	}
	if len(ours) == 0 {
		return nil
	}
	if !foreignLocal {
		if err := s.h.RuleAdd(kernelLocal(family)); err != nil {
			// The copies stay: without any rule for table local nothing reaches the pod, loopback included.
			return fmt.Errorf("restore rule %s: %w", ruleKey(kernelLocal(family)), err)
		}
	}
	// Reverse of the order in which they were added. What that does not name (-1) was captured too: it comes first.
	slices.SortStableFunc(ours, func(a, b netlink.Rule) int {
		return removeRank(a.Priority) - removeRank(b.Priority)
	})
	var errs []error
	for _, r := range ours {
		errs = append(errs, s.deleteRule(&r))
	}
	return errors.Join(errs...)
}

func removeRank(pref int) int {
	i := slices.Index(addOrder, pref)
	if i < 0 {
		return -len(addOrder)
	}
	return -i
}

// foreignRule returns an error naming a rule that is not ztun's and has one of its preferences.
func foreignRule(have []netlink.Rule) error {
	for _, r := range have {
		if isOurPref(r.Priority) && r.Protocol != protocol {
			return fmt.Errorf("rule %s: exists and is not ztun's; remove it, or give it another preference", ruleKey(&r))
		}
	}
	return nil
}

// kernelLocal is the rule for table local as the kernel makes it in a new netns.
func kernelLocal(family int) *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.Priority, r.Table, r.Protocol = family, prefLocalKernel, unix.RT_TABLE_LOCAL, unix.RTPROT_KERNEL
	return r
}

// isLocal reports whether r sends all packets to table local: one with a selector leaves some out.
func isLocal(r *netlink.Rule) bool {
	plain := kernelLocal(r.Family)
	plain.Priority, plain.Protocol = r.Priority, r.Protocol
	return ruleKey(r) == ruleKey(plain)
}

// isRefusal reports whether r is a rule of ztun's without a table. A list of rules does not have the type.
func isRefusal(r *netlink.Rule) bool {
	return r.Protocol == protocol && r.Table == unix.RT_TABLE_UNSPEC && r.Goto <= 0
}

// isKernelLocal reports whether r does so before any other rule.
func isKernelLocal(r *netlink.Rule) bool { return r.Priority == prefLocalKernel && isLocal(r) }

// ruleKey writes a rule as ip-rule(8) does. Two rules with the same key are the same rule.
func ruleKey(r *netlink.Rule) string {
	var b strings.Builder
	if r.Family == unix.AF_INET6 {
		b.WriteString("-6 ")
	}
	fmt.Fprintf(&b, "pref %d", r.Priority)
	if r.Invert {
		b.WriteString(" not")
	}
	if r.Src != nil {
		fmt.Fprintf(&b, " from %s", r.Src)
	}
	if r.Dst != nil {
		fmt.Fprintf(&b, " to %s", r.Dst)
	}
	if r.Mark != 0 || r.Mask != nil {
		mask := ^uint32(0)
		if r.Mask != nil {
			mask = *r.Mask
		}
		fmt.Fprintf(&b, " fwmark %#x/%#x", r.Mark, mask)
	}
	if r.Tos != 0 {
		fmt.Fprintf(&b, " tos %#x", r.Tos)
	}
	if r.IifName != "" {
		fmt.Fprintf(&b, " iif %s", r.IifName)
	}
	if r.OifName != "" {
		fmt.Fprintf(&b, " oif %s", r.OifName)
	}
	if r.UIDRange != nil {
		fmt.Fprintf(&b, " uidrange %d-%d", r.UIDRange.Start, r.UIDRange.End)
	}
	if r.IPProto != 0 {
		fmt.Fprintf(&b, " ipproto %d", r.IPProto)
	}
	if r.Sport != nil {
		fmt.Fprintf(&b, " sport %d-%d", r.Sport.Start, r.Sport.End)
	}
	if r.Dport != nil {
		fmt.Fprintf(&b, " dport %d-%d", r.Dport.Start, r.Dport.End)
	}
	switch {
	case r.Goto > 0:
		fmt.Fprintf(&b, " goto %d", r.Goto)
	case isRefusal(r):
		b.WriteString(" unreachable")
	default:
		fmt.Fprintf(&b, " lookup %d", r.Table)
	}
	if r.SuppressPrefixlen >= 0 {
		fmt.Fprintf(&b, " suppress_prefixlength %d", r.SuppressPrefixlen)
	}
	if r.SuppressIfgroup >= 0 {
		fmt.Fprintf(&b, " suppress_ifgroup %d", r.SuppressIfgroup)
	}
	fmt.Fprintf(&b, " protocol %d", r.Protocol)
	return b.String()
}

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
