package proxy

import (
	"encoding/binary"
	"errors"
	"math"
	"net/netip"

	"ztun.dev/ztun/internal/workload"
)

// The PROXY protocol, version 2 (haproxy's doc/proxy-protocol.txt, section 2.2), and the TLVs of its range for applications that
// Istio's workload API gives a meaning.
const (
	proxySignature = "\r\n\r\n\x00\r\nQUIT\n"
	proxyCommand   = 0x21 // version 2, PROXY
	proxyTCP4      = 0x11
	proxyTCP6      = 0x21
	proxyUnspec    = 0x01 // a stream between addresses of different families: none are given
	proxyIdentity  = 0xd0 // the SPIFFE ID of the peer
	proxyService   = 0xd1 // the FQDN of the service
)

var errProxyHeader = errors.New("proxy: the PROXY header is too long")

// proxyHeader says to an application who opened a connection, to what, and what is known of both. An identity and a service that are
// not known are left out.
func proxyHeader(src, dst netip.AddrPort, peer workload.Identity, service string) ([]byte, error) {
	b := append([]byte(proxySignature), proxyCommand, proxyUnspec, 0, 0)
	body := len(b)
	if src.Addr().Is4() == dst.Addr().Is4() {
		b[body-3] = proxyTCP6
		if src.Addr().Is4() {
			b[body-3] = proxyTCP4
		}
		b = append(append(b, src.Addr().AsSlice()...), dst.Addr().AsSlice()...)
		b = binary.BigEndian.AppendUint16(b, src.Port())
		b = binary.BigEndian.AppendUint16(b, dst.Port())
	}
	b = appendTLV(b, proxyIdentity, peer.String())
	b = appendTLV(b, proxyService, service)
	if len(b)-body > math.MaxUint16 { // a TLV that is longer makes this longer, too
		return nil, errProxyHeader
	}
	binary.BigEndian.PutUint16(b[body-2:], uint16(len(b)-body))
	return b, nil
}

func appendTLV(b []byte, kind byte, value string) []byte {
	if value == "" {
		return b
	}
	b = binary.BigEndian.AppendUint16(append(b, kind), uint16(len(value)))
	return append(b, value...)
}
