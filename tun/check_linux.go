package tun

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Addresses for documentation, outside every pod: RFC 5737 and RFC 3849.
var (
	outside4 = netip.MustParseAddr("198.51.100.1")
	outside6 = netip.MustParseAddr("2001:db8::1")
)

// A lookup asks the kernel where it would send a packet, without one.
type lookup struct {
	src, dst netip.Addr // src may be the zero Addr
	proto    uint8
	dport    uint16
	mark     uint32
	iif      int // interface that it came in on; 0 means sent by a program of the pod
}

// A path is the answer.
type path struct {
	kind  uint8 // RTN_UNICAST and so on
	oif   int
	table int
	err   error // the kernel would not send it
}

// A check is one thing that has to be so when the set-up is complete.
type check struct {
	name string
	ask  lookup
	want func(path) bool
}

// checks lists what selfCheck asks for one family.
func (s *setup) checks(family int) []check {
	const tcp, udp = unix.IPPROTO_TCP, unix.IPPROTO_UDP
	outside, probe, name := outside4, probe4, "IPv4"
	if family == unix.AF_INET6 {
		outside, probe, name = outside6, probe6, "IPv6"
	}
	index := s.link.Attrs().Index
	captured := func(p path) bool { return p.err == nil && p.oif == index && p.table == tableCapture }
	direct := func(p path) bool { return p.err != nil || p.oif != index } // the pod may have no way out
	local := func(p path) bool { return p.err == nil && p.kind == unix.RTN_LOCAL }
	list := []check{
		{name + " TCP of the pod is captured", lookup{dst: outside, proto: tcp, dport: 80}, captured},
		{name + " TCP of ztun's own sockets is not captured", lookup{dst: outside, proto: tcp, dport: 80, mark: s.cfg.Marks.Own}, direct},
		{name + " replies to delivered connections stay local", lookup{dst: outside, proto: tcp, dport: 80, mark: s.cfg.Marks.Deliver}, local},
		{name + " TCP to the probe address is not captured", lookup{dst: probe, proto: tcp, dport: 80}, direct},
		{name + " UDP other than DNS is not captured", lookup{dst: outside, proto: udp, dport: 54}, direct},
		{name + " DNS over UDP is captured", lookup{dst: outside, proto: udp, dport: 53}, captured},
	}
	for _, i := range s.ifaces {
		if !i.has(family) { // the kernel would take nothing in there
			continue
		}
		for _, a := range s.addrs {
			if familyOf(a) != family {
				continue
			}
			to := fmt.Sprintf(" to %s on %s ", a, i.Name)
			list = append(list,
				check{"inbound TCP" + to + "is captured", lookup{src: outside, dst: a, proto: tcp, dport: 80, iif: i.Index}, captured},
				check{"inbound TCP" + to + "for ztun's own sockets is local", lookup{src: outside, dst: a, proto: tcp, dport: 80, iif: i.Index, mark: s.cfg.Marks.Own}, local},
				check{"inbound UDP" + to + "is local", lookup{src: outside, dst: a, proto: udp, dport: 80, iif: i.Index}, local})
		}
	}
	return list
}

// selfCheck asks the kernel for the way of each kind of packet. It finds what no rule of ztun's can tell: rules of others
// in front of them, and kernels that do not know a selector.
func (s *setup) selfCheck(ctx context.Context) error {
	if s.adopted {
		if err := s.awaitCarrier(ctx); err != nil {
			return err
		}
	}
	for _, family := range s.families {
		for _, c := range s.checks(family) {
			p, err := c.ask.do()
			if err != nil {
				return fmt.Errorf("self-check: %s: %w", c.name, err)
			}
			if !c.want(p) {
				return fmt.Errorf("self-check: %s: not so, the kernel says %s; look for rules of others with `ip rule`", c.name, s.pathString(p))
			}
		}
	}
	return nil
}

func (s *setup) pathString(p path) string {
	switch {
	case p.err != nil:
		return p.err.Error()
	case p.kind == unix.RTN_LOCAL:
		return fmt.Sprintf("local, table %d", p.table)
	}
	return fmt.Sprintf("dev %s, table %d", s.linkName(p.oif), p.table)
}

// do sends the RTM_GETROUTE request, which netlink's own RouteGet cannot say: it knows no protocol and no port.
func (l lookup) do() (path, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_REQUEST)
	family, bits := familyOf(l.dst), uint8(l.dst.BitLen())
	msg := &nl.RtMsg{RtMsg: unix.RtMsg{Family: uint8(family), Dst_len: bits, Flags: unix.RTM_F_LOOKUP_TABLE}}
	if l.src.IsValid() {
		msg.Src_len = bits
	}
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.RTA_DST, l.dst.AsSlice()))
	if l.src.IsValid() {
		req.AddData(nl.NewRtAttr(unix.RTA_SRC, l.src.AsSlice()))
	}
	req.AddData(nl.NewRtAttr(unix.RTA_IP_PROTO, []byte{l.proto}))
	req.AddData(nl.NewRtAttr(unix.RTA_DPORT, binary.BigEndian.AppendUint16(nil, l.dport)))
	if l.mark != 0 {
		req.AddData(nl.NewRtAttr(unix.RTA_MARK, nl.Uint32Attr(l.mark)))
	}
	if l.iif != 0 {
		req.AddData(nl.NewRtAttr(unix.RTA_IIF, nl.Uint32Attr(uint32(l.iif))))
	}
	answers, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	if err != nil {
		return path{err: err}, nil
	}
	if len(answers) == 0 || len(answers[0]) < unix.SizeofRtMsg {
		return path{}, fmt.Errorf("route look-up: answer without a route")
	}
	route := nl.DeserializeRtMsg(answers[0])
	attrs, err := nl.ParseRouteAttr(answers[0][unix.SizeofRtMsg:])
	if err != nil {
		return path{}, fmt.Errorf("route look-up: %w", err)
	}
	p := path{kind: route.Type, table: int(route.Table)}
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.RTA_OIF:
			p.oif = int(nl.NativeEndian().Uint32(a.Value))
		case unix.RTA_TABLE:
			p.table = int(nl.NativeEndian().Uint32(a.Value))
		}
	}
	return p, nil
}
