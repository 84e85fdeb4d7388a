package node

import (
	"context"
	"encoding/binary"
	"net/netip"
	"strings"

	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/proxy"
)

// replayNames stand for the resolver of endpoints that have only a hostname: a replay asks nobody. Each name gets an address of
// 0.0.0.0/8, which no destination has (RFC 1122, section 3.2.1.3) and which leads to the recorded peer as any other does. Records have the
// hostname in its place. The zero value is ready.
type replayNames struct {
	addrs map[string]netip.Addr
	names map[netip.Addr]string
}

var _ proxy.Resolver = (*replayNames)(nil)

// Resolve implements proxy.Resolver.
func (n *replayNames) Resolve(ctx context.Context, hostname string) ([]netip.Addr, error) {
	addr, ok := n.addrs[hostname]
	if !ok {
		if n.addrs == nil {
			n.addrs, n.names = make(map[string]netip.Addr), make(map[netip.Addr]string)
		}
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(len(n.addrs)+1)&0xffffff)
		addr = netip.AddrFrom4(b)
		n.addrs[hostname], n.names[addr] = addr, hostname
	}
	if f := replay.FlowOf(ctx); f != nil {
		note := noteOf(f)
		note.looked = append(note.looked, addr)
	}
	return []netip.Addr{addr}, nil
}

// told is a text of a flow with hostnames in place of the addresses that stand for them.
func (n *replayNames) told(note *flowNote, text string) string {
	for _, a := range note.looked {
		text = replaceAddr(text, a.String(), n.names[a])
	}
	return text
}

// replaceAddr puts a name in place of an address that has a port, but not of a longer address with the same end.
func replaceAddr(text, addr, name string) string {
	var b strings.Builder
	for {
		at := strings.Index(text, addr+":")
		if at < 0 {
			return b.String() + text
		}
		b.WriteString(text[:at])
		if at > 0 && strings.IndexByte("0123456789.", text[at-1]) >= 0 {
			b.WriteString(addr)
		} else {
			b.WriteString(name)
		}
		text = text[at+len(addr):]
	}
}
