package node

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"

	"ztun.dev/ztun/dnsproxy"
	"ztun.dev/ztun/internal/underlay"
)

// A resolver asks the resolvers that applications address, through the sockets of their pod.
type resolver struct{ u *underlay.Underlay }

var _ dnsproxy.Upstream = resolver{}

// Exchange implements dnsproxy.Upstream.
func (r resolver) Exchange(ctx context.Context, server netip.AddrPort, tcp bool, msg, buf []byte, accept func([]byte) bool) ([]byte, error) {
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
