package telemetry

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"strconv"
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

// bare is an address, without quotes in text.
func (w *lineWriter) bare(k, v string) {
	w.key(k)
	if w.json {
		w.b = appendJSON(w.b, v)
	} else {
		w.b = append(w.b, v...)
	}
}

func (w *lineWriter) addr(k string, a netip.AddrPort) {
	if a.IsValid() {
		w.bare(k, a.String())
	}
}

func (w *lineWriter) num(k string, v uint64) {
	w.key(k)
	w.b = strconv.AppendUint(w.b, v, 10)
}

func appendJSON(b []byte, s string) []byte {
	q, err := json.Marshal(s)
	if err != nil { // a string is always marshalled
		return b
	}
	return append(b, q...)
}

// appendQuoted escapes as Rust's debug form does: what a peer supplied cannot break the line.
func appendQuoted(b []byte, s string) []byte {
	b = append(b, '"')
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
		case !unicode.IsPrint(r):
			b = append(b, `\u{`...)
			b = strconv.AppendUint(b, uint64(r), 16)
			b = append(b, '}')
		default:
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}

// line is one line of the access log, in the fields and order of ztunnel.
func (r *Recorder) line(c *Conn, level, message string, err error, ended bool) []byte {
	now := r.cfg.Now()
	w := &lineWriter{b: make([]byte, 0, 512), json: r.cfg.JSON}
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
			w.bare("dst.hbone_addr", hboneAddr(c.HBONEAddr))
		}
		w.str("dst.service", c.Service)
		w.side("dst", c.Destination, c.DstIdentity)
	}
	w.str("direction", c.Direction.String())
	if ended {
		w.num("bytes_sent", c.localSent())
		w.num("bytes_recv", c.localReceived())
		w.str("duration", strconv.FormatInt(now.Sub(c.Start).Milliseconds(), 10)+"ms")
	}
	if err != nil {
		w.str("error", err.Error())
	}
	if c.Suppressed > 0 {
		w.num("suppressed", c.Suppressed)
	}
	for _, f := range r.cfg.Fields {
		w.extra(f, c, ended)
	}
	if w.json {
		w.b = append(w.b, '}')
	}
	return append(w.b, '\n')
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
		w.str(field, c.Policy)
	}
}

// hboneAddr is the authority as it may stand bare in a line: it comes from a peer.
func hboneAddr(s string) string {
	for _, r := range s {
		if r <= ' ' || r == '"' || r == '\\' || !unicode.IsPrint(r) {
			return string(appendQuoted(nil, s))
		}
	}
	return s
}

func (w *lineWriter) side(prefix string, wl *workload.Workload, id workload.Identity) {
	if wl != nil {
		w.str(prefix+".workload", cmp.Or(wl.Name, wl.CanonicalName)) // of what a peer claims only the latter is known
		w.str(prefix+".namespace", wl.Namespace)
	}
	w.str(prefix+".identity", id.String())
	if wl != nil {
		w.str(prefix+".cluster", wl.ClusterID)
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
