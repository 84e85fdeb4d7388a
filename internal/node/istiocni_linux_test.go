package node

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/lab"
)

// Numbers of istio-cni's rules.
const (
	proxyMark      = 0x539
	deliverMark    = 0x111 // of connections that the proxy makes to the application
	markMask       = 0xfff
	deliverTable   = 100
	deliverPref    = 32764
	outboundPort   = 15001
	inboundPort    = 15006
	hbonePort      = 15008
	questionPort   = 15053
	conntrackZone  = 1
	probeAddress4  = "169.254.7.127"
	probeAddress6  = "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"
	rawPriority    = -300
	manglePriority = -150
	natPriority    = -100
)

// istioCNI gives pods the rules and routes that istio-cni gives to those of an ambient mesh, in the form of its nftables backend.
func istioCNI(t *testing.T, pods ...*lab.Host) {
	t.Helper()
	for _, pod := range pods {
		err := pod.Do(func() error {
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				if err := routeToLoopback(family); err != nil {
					return err
				}
			}
			return redirection()
		})
		if err != nil {
			t.Fatalf("istio-cni's rules in %s: %v", pod.Name, err)
		}
	}
}

// routeToLoopback leads what has the mark of deliveries to the sockets of the proxy, whatever its destination is.
func routeToLoopback(family int) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if family == unix.AF_INET6 {
		all = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	if err := netlink.RouteAdd(&netlink.Route{Family: family, LinkIndex: lo.Attrs().Index, Table: deliverTable, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST, Dst: all}); err != nil {
		return fmt.Errorf("route: %w", err)
	}
	mask := uint32(markMask)
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Mark, rule.Mask, rule.Table = family, deliverPref, deliverMark, &mask, deliverTable
	if err := netlink.RuleAdd(rule); err != nil {
		return fmt.Errorf("rule: %w", err)
	}
	return nil
}

// A family of addresses, as rules see it.
type ruleFamily struct {
	number             byte
	source, dest, size uint32 // in the network header
	loopback, probe    netip.Addr
}

var ruleFamilies = []ruleFamily{
	{unix.NFPROTO_IPV4, 12, 16, 4, netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.MustParseAddr(probeAddress4)},
	{unix.NFPROTO_IPV6, 8, 24, 16, netip.IPv6Loopback(), netip.MustParseAddr(probeAddress6)},
}

// redirection installs the rules of all tables. Those with addresses are there once for each family.
func redirection() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	base := func(table *nftables.Table, name string, typ nftables.ChainType, hook *nftables.ChainHook, priority nftables.ChainPriority) *nftables.Chain {
		chain := c.AddChain(&nftables.Chain{Name: name, Table: table, Type: typ, Hooknum: hook, Priority: &priority})
		regular := c.AddChain(&nftables.Chain{Name: "istio-" + name, Table: table})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: regular.Name}}})
		return regular
	}
	table := func(name string) *nftables.Table {
		return c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: name})
	}
	add := func(chain *nftables.Chain, parts ...[]expr.Any) {
		var all []expr.Any
		for _, p := range parts {
			all = append(all, p...)
		}
		c.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: all})
	}
	accept := []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}

	raw := table("istio-ambient-raw")
	rawOutput := base(raw, "output", nftables.ChainTypeFilter, nftables.ChainHookOutput, rawPriority)
	rawPrerouting := base(raw, "prerouting", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, rawPriority)
	zone := []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint16(conntrackZone)},
		&expr.Ct{Key: expr.CtKeyZONE, Register: 1, SourceRegister: true},
	}
	add(rawOutput, protocol(unix.IPPROTO_UDP), destinationPort(53, expr.CmpOpEq), mark(proxyMark, expr.CmpOpEq), zone)
	add(rawPrerouting, protocol(unix.IPPROTO_UDP), sourcePort(53), mark(proxyMark, expr.CmpOpNeq), zone)

	mangle := table("istio-ambient-mangle")
	manglePrerouting := base(mangle, "prerouting", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, manglePriority)
	mangleOutput := base(mangle, "output", nftables.ChainTypeRoute, nftables.ChainHookOutput, manglePriority)
	add(manglePrerouting, mark(proxyMark, expr.CmpOpEq), []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(^uint32(markMask)), Xor: binaryutil.NativeEndian.PutUint32(deliverMark)},
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1, SourceRegister: true},
	})
	add(mangleOutput, []expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: 1}}, masked(deliverMark, expr.CmpOpEq), []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	})

	nat := table("istio-ambient-nat")
	prerouting := base(nat, "prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, natPriority)
	output := base(nat, "output", nftables.ChainTypeNAT, nftables.ChainHookOutput, natPriority)
	tcp := protocol(unix.IPPROTO_TCP)
	for _, f := range ruleFamilies {
		add(prerouting, f.address(f.source, f.probe, expr.CmpOpEq), tcp, accept)
		add(output, f.address(f.dest, f.probe, expr.CmpOpEq), tcp, accept)
	}
	for _, f := range ruleFamilies {
		add(prerouting, f.address(f.dest, f.loopback, expr.CmpOpNeq), tcp, destinationPort(hbonePort, expr.CmpOpNeq), mark(proxyMark, expr.CmpOpNeq), redirectTo(inboundPort))
	}
	add(output, protocol(unix.IPPROTO_UDP), outInterface("lo", expr.CmpOpNeq), mark(proxyMark, expr.CmpOpNeq), destinationPort(53, expr.CmpOpEq), redirectTo(questionPort))
	for _, f := range ruleFamilies {
		add(output, f.address(f.dest, f.loopback, expr.CmpOpNeq), tcp, destinationPort(53, expr.CmpOpEq), mark(proxyMark, expr.CmpOpNeq), redirectTo(questionPort))
	}
	add(output, tcp, mark(deliverMark, expr.CmpOpEq), accept)
	for _, f := range ruleFamilies {
		add(output, f.address(f.dest, f.loopback, expr.CmpOpNeq), outInterface("lo", expr.CmpOpEq), accept)
	}
	for _, f := range ruleFamilies {
		add(output, f.address(f.dest, f.loopback, expr.CmpOpNeq), tcp, mark(proxyMark, expr.CmpOpNeq), redirectTo(outboundPort))
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}

func (f *ruleFamily) address(offset uint32, a netip.Addr, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.number}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: f.size},
		&expr.Cmp{Op: op, Register: 1, Data: a.AsSlice()},
	}
}

func protocol(number byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}}}
}

func sourcePort(port uint16) []expr.Any { return transportPort(0, port, expr.CmpOpEq) }

func destinationPort(port uint16, op expr.CmpOp) []expr.Any { return transportPort(2, port, op) }

func transportPort(offset uint32, port uint16, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2},
		&expr.Cmp{Op: op, Register: 1, Data: binaryutil.BigEndian.PutUint16(port)},
	}
}

func mark(value uint32, op expr.CmpOp) []expr.Any {
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}}, masked(value, op)...)
}

// masked compares the low bits of register 1.
func masked(value uint32, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(markMask), Xor: make([]byte, 4)},
		&expr.Cmp{Op: op, Register: 1, Data: binaryutil.NativeEndian.PutUint32(value)},
	}
}

func outInterface(name string, op expr.CmpOp) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: data}}
}

func redirectTo(port uint16) []expr.Any {
	return []expr.Any{&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(port)}, &expr.Redir{RegisterProtoMin: 1}}
}
