package demo

import (
	"net/netip"
	"strings"
)

// A record is one line of the access log.
type record map[string]string

// parseRecord reads a line in ztunnel's text form: time, level, target, message and fields, separated by tabs. ok is false for
// any other line.
func parseRecord(line string) (r record, ok bool) {
	parts := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 5)
	if len(parts) != 5 || parts[2] != "access" {
		return nil, false
	}
	r = make(record)
	for rest := parts[4]; rest != ""; rest = strings.TrimPrefix(rest, " ") {
		var key, value string
		if key, rest, ok = strings.Cut(rest, "="); !ok {
			return nil, false
		}
		if value, rest, ok = cutValue(rest); !ok {
			return nil, false
		}
		r[key] = value
	}
	return r, true
}

// cutValue takes a value off the front of s: bare up to the next blank, or quoted.
func cutValue(s string) (value, rest string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		if i := strings.IndexByte(s, ' '); i >= 0 {
			return s[:i], s[i:], true
		}
		return s, "", true
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			return b.String(), s[i+1:], true
		case c == '\\' && i+1 < len(s):
			i++
			b.WriteByte(unescape(s[i]))
		default:
			b.WriteByte(c)
		}
	}
	return "", "", false
}

func unescape(c byte) byte {
	switch c {
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c
}

// from tells whether the record is of a connection in one direction from the pod with the address src.
func (r record) from(direction string, src netip.Addr) bool {
	a, err := netip.ParseAddrPort(r["src.addr"])
	return err == nil && a.Addr() == src && r["direction"] == direction
}
