package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"

	"ztun.dev/ztun/dnsproxy"
	"ztun.dev/ztun/internal/underlay"
	"ztun.dev/ztun/tun"
)

// A resolver asks the resolvers that applications address, through the sockets of their pod. Where that address is not known, as
// with UDP and the redirect backend, it asks those of a resolv.conf, one after the other.
type resolver struct {
	u        *underlay.Underlay
	fallback func() []netip.AddrPort
}

var _ dnsproxy.Upstream = resolver{}

// newResolver resolves hostnames of endpoints from the network namespace of this process, with its own resolv.conf.
func (n *Node) newResolver() (_ *dnsproxy.Resolver, err error) {
	if n.netns, err = tun.CurrentNetns(); err != nil {
		return nil, err
	}
	u, err := underlay.New(underlay.Config{Netns: n.netns, Group: n.group, Marks: n.marks, Rand: n.rand, Log: n.log, Descriptors: n.descriptors})
	if err != nil {
		return nil, err
	}
	return dnsproxy.NewResolver(dnsproxy.ResolverConfig{
		Upstream: resolver{u: u}, Servers: func() []netip.AddrPort { return nameservers(n.cfg.DNSResolvConf) }, Group: n.group, Rand: n.rand, NoIPv6: !n.cfg.IPv6Enabled,
	})
}

// Exchange implements dnsproxy.Upstream.
func (r resolver) Exchange(ctx context.Context, server netip.AddrPort, tcp bool, msg, buf []byte, accept func([]byte) bool) ([]byte, error) {
	if !server.Addr().IsUnspecified() {
		return r.ask(ctx, server, tcp, msg, buf, accept)
	}
	err := errors.New("no resolver: the application's is not known, and resolv.conf names none")
	for _, server := range r.fallback() {
		var answer []byte
		if answer, err = r.ask(ctx, server, tcp, msg, buf, accept); err == nil || ctx.Err() != nil {
			return answer, err
		}
	}
	return nil, err
}

// nameservers reads the resolvers of a resolv.conf.
func nameservers(path string) (list []netip.AddrPort) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) >= 2 && f[0] == "nameserver" {
			if a, err := netip.ParseAddr(f[1]); err == nil {
				list = append(list, netip.AddrPortFrom(a, 53))
			}
		}
	}
	return list
}

func (r resolver) ask(ctx context.Context, server netip.AddrPort, tcp bool, msg, buf []byte, accept func([]byte) bool) ([]byte, error) {
	if !tcp {
		return r.u.Exchange(ctx, server, msg, buf, accept)
	}
	conn, err := r.u.ExchangeStream(ctx, server)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	// Length prefix and message in one write (RFC 7766, section 8).
	out := append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(msg)), uint16(len(msg))), msg...)
	if _, err := conn.Write(out); err != nil {
		return nil, fmt.Errorf("resolver %s: %w", server, err)
	}
	for {
		var prefix [2]byte
		if _, err := io.ReadFull(conn, prefix[:]); err != nil {
			return nil, fmt.Errorf("resolver %s: %w", server, err)
		}
		n := int(binary.BigEndian.Uint16(prefix[:]))
		if n > len(buf) {
			buf = make([]byte, n)
		}
		if _, err := io.ReadFull(conn, buf[:n]); err != nil {
			return nil, fmt.Errorf("resolver %s: %w", server, err)
		}
		if accept(buf[:n]) {
			return buf[:n], nil
		}
	}
}
