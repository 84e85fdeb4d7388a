package telemetry

import (
	"cmp"
	"net/netip"
	"strconv"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"ztun.dev/ztun/internal/workload"
)

const timeLayout = "2006-01-02T15:04:05.000000Z"

// A lineWriter puts the fields of one line behind each other, in text or JSON.
type lineWriter struct {
	b    []byte
	json bool
	any  bool // a field was written
	open bool // JSON: no key yet in this object
}

func (w *lineWriter) key(k string) {
	if w.json {
		if !w.open {
			w.b = append(w.b, ',')
		}
		w.open = false
		w.b = appendJSON(w.b, k)
		w.b = append(w.b, ':')
		return
	}
	if w.any {
		w.b = append(w.b, ' ')
	}
	w.any = true
	w.b = append(append(w.b, k...), '=')
}

// str is a field that is left out when it is empty.
func (w *lineWriter) str(k, v string) {
	if v == "" {
		return
	}
	w.key(k)
	if w.json {
		w.b = appendJSON(w.b, v)
	} else {
		w.b = appendQuoted(w.b, v)
	}
}

// addr is an address, without quotes in text, that is left out when it is none.
func (w *lineWriter) addr(k string, a netip.AddrPort) {
	if !a.IsValid() {
		return
	}
	w.key(k)
	if !w.json {
		w.b = a.AppendTo(w.b)
		return
	}
	w.b = appendJSON(w.b, a.String())
}

func (w *lineWriter) num(k string, v uint64) {
	w.key(k)
	w.b = strconv.AppendUint(w.b, v, 10)
}

// appendJSON escapes as serde_json does, which leaves <, > and & as they are: what is not UTF-8 becomes U+FFFD.
func appendJSON(b []byte, s string) []byte {
	b = append(b, '"')
	if isPlain(s) {
		return append(append(b, s...), '"')
	}
	for _, r := range s {
		switch r {
		case '"', '\\':
			b = append(b, '\\', byte(r))
		case '\b':
			b = append(b, `\b`...)
		case '\f':
			b = append(b, `\f`...)
		case '\n':
			b = append(b, `\n`...)
		case '\r':
			b = append(b, `\r`...)
		case '\t':
			b = append(b, `\t`...)
		default:
			if r < ' ' {
				b = append(b, `\u00`...)
				b = append(b, "0123456789abcdef"[r>>4], "0123456789abcdef"[r&0xf])
				continue
			}
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}

// isPlain reports whether a text is escaped nowhere: names and numbers are not. A line takes a third of the time for it (measured).
func isPlain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

// appendQuoted escapes as Rust's debug form does: what a peer supplied cannot break the line.
func appendQuoted(b []byte, s string) []byte {
	b = append(b, '"')
	if isPlain(s) {
		return append(append(b, s...), '"')
	}
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case r == 0:
			b = append(b, `\0`...)
		case !unicode.IsPrint(r), unicode.In(r, unicode.Mn, unicode.Me, unicode.Other_Grapheme_Extend):
			b = append(b, `\u{`...)
			b = strconv.AppendUint(b, uint64(r), 16)
			b = append(b, '}')
		default:
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}

// How much of a text is shown in the access log, in bytes: peers and pods supply some of it.
const (
	maxText     = 256  // names are shorter
	maxIdentity = 1024 // a trust domain, a namespace and a service account, each of at most 253
	maxError    = 1024
	maxHBONE    = 260 // a hostname of 253, and a port
)

// cut is the beginning of a text that is longer than it may be.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit] + "…"
}

// lineWriters are those that no line is written in.
var lineWriters = sync.Pool{New: func() any { return &lineWriter{b: make([]byte, 0, 1024)} }}

// write puts one line into the access log.
func (r *Recorder) write(c *Conn, level, message string, err error, ended bool) {
	w := lineWriters.Get().(*lineWriter)
	w.line(r, c, level, message, err, ended)
	r.log.put(w.b, err != nil)
	lineWriters.Put(w)
}

// line is one line of the access log, in the fields and order of ztunnel.
func (w *lineWriter) line(r *Recorder, c *Conn, level, message string, err error, ended bool) {
	now := r.cfg.Now()
	*w = lineWriter{b: w.b[:0], json: r.cfg.JSON}
	w.begin(level, now, AccessTarget, message)
	if !w.json {
		w.b = append(w.b, '\t')
	}
	w.addr("src.addr", c.Src)
	if c.EarlyFailure {
		w.addr("dst.addr", c.OriginalDst)
	} else {
		w.side("src", c.source(), c.SrcIdentity)
		w.addr("dst.addr", c.Dst)
		if c.HBONEAddr != "" {
			w.hboneAddr("dst.hbone_addr", cut(c.HBONEAddr, maxHBONE))
		}
		w.str("dst.service", cut(c.Service, maxText))
		w.side("dst", c.Destination, c.DstIdentity)
	}
	w.str("direction", c.Direction.String())
	if ended {
		w.num("bytes_sent", c.localSent())
		w.num("bytes_recv", c.localReceived())
		w.str("duration", strconv.FormatInt(now.Sub(c.Start).Milliseconds(), 10)+"ms")
	}
	if err != nil {
		w.str("error", cut(r.cfg.ErrorText(err), maxError))
	}
	if c.Suppressed > 0 {
		w.num("suppressed", c.Suppressed)
	}
	if c.Kernel() {
		w.str("carried", "kernel")
	}
	for _, f := range r.cfg.Fields {
		w.extra(f, c, ended)
	}
	if w.json {
		w.b = append(w.b, '}')
	}
	w.b = append(w.b, '\n')
}

// AccessFields are what lines of the access log may have beside ztunnel's fields.
func AccessFields() []string {
	return []string{"response_flags", "trace_id", "flow_id", "tunnel.local_addr", "policy"}
}

// extra is one of AccessFields, if it is known.
func (w *lineWriter) extra(field string, c *Conn, ended bool) {
	switch field {
	case "response_flags":
		if ended {
			w.str(field, c.flag.String())
		}
	case "trace_id":
		w.str(field, c.TraceID)
	case "flow_id":
		w.num(field, c.ID)
	case "tunnel.local_addr":
		w.addr(field, c.TunnelLocal)
	case "policy":
		w.str(field, cut(c.Policy, maxError))
	}
}

// hboneAddr is an authority, which comes from a peer: bare, if it may stand so in a line.
func (w *lineWriter) hboneAddr(k, s string) {
	w.key(k)
	if w.json {
		w.b = appendJSON(w.b, s)
		return
	}
	for _, r := range s {
		if r <= ' ' || r == '"' || r == '\\' || r == utf8.RuneError || !unicode.IsPrint(r) {
			w.b = appendQuoted(w.b, s)
			return
		}
	}
	w.b = append(w.b, s...)
}

func (w *lineWriter) side(prefix string, wl *workload.Workload, id workload.Identity) {
	if wl != nil {
		w.str(prefix+".workload", cut(cmp.Or(wl.Name, wl.CanonicalName), maxText)) // of what a peer claims only the latter is known
		w.str(prefix+".namespace", cut(wl.Namespace, maxText))
	}
	w.str(prefix+".identity", cut(id.String(), maxIdentity))
	if wl != nil {
		w.str(prefix+".cluster", cut(wl.ClusterID, maxText))
	}
}

// localSent counts the bytes that the local application sent: requests if it opened the connection, else responses.
func (c *Conn) localSent() uint64 {
	if c.Direction == Outbound {
		return c.Received.Load()
	}
	return c.Sent.Load()
}

func (c *Conn) localReceived() uint64 {
	if c.Direction == Outbound {
		return c.Sent.Load()
	}
	return c.Received.Load()
}

// Duration is how long the connection has lasted.
func (c *Conn) Duration(now time.Time) time.Duration { return now.Sub(c.Start) }
