package proxy

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"strings"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/workload"
)

// requestHeaders are those of a CONNECT for a flow from the application at src.
func requestHeaders(source *workload.Workload, src netip.AddrPort, v *workload.Service, trace string) hbone.Headers {
	h := hbone.Headers{
		Baggage:     baggage(source),
		Forwarded:   `for="` + src.String() + `"`,
		Traceparent: trace,
	}
	if v != nil {
		h.Forwarded += ";host=" + v.Hostname
	}
	return h
}

// traceparent is a W3C Trace Context of 128 and 64 random bits, not sampled.
func traceparent(r1, r2, r3 uint64) string {
	var raw [24]byte
	binary.BigEndian.PutUint64(raw[0:], r1)
	binary.BigEndian.PutUint64(raw[8:], r2)
	binary.BigEndian.PutUint64(raw[16:], r3)
	const hexLen = 48
	var text [hexLen]byte
	hex.Encode(text[:], raw[:])
	return "00-" + string(text[:32]) + "-" + string(text[32:]) + "-00"
}

// traceID is the id of the trace in a traceparent (W3C Trace Context, section 3.2), or "" if it is not one. It is kept as long as the
// connection.
func traceID(h string) string {
	const from, to = 3, 35
	if len(h) < 55 || h[2] != '-' || h[to] != '-' || strings.Trim(h[from:to], "0") == "" {
		return ""
	}
	for _, c := range []byte(h[from:to]) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return ""
		}
	}
	return strings.Clone(h[from:to])
}

// maxHostname is the length of the longest name in text (RFC 1035, section 2.3.4).
const maxHostname = 253

// forwardedHost is the host parameter of a Forwarded header (RFC 7239), or "" if it has none that can be a name. It is kept as long
// as the connection.
func forwardedHost(h string) string {
	for i := range len(h) {
		if h[i] >= 0x80 {
			return ""
		}
	}
	for part := range strings.SplitSeq(h, ";") {
		if host, ok := strings.CutPrefix(strings.TrimSpace(part), "host="); ok {
			if n := len(host); n >= 2 && host[0] == '"' && host[n-1] == '"' {
				host = host[1 : n-1]
			}
			if len(host) > maxHostname {
				return ""
			}
			return strings.Clone(host) // not the header with it
		}
	}
	return ""
}
