package telemetry

import (
	"context"
	"encoding"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Format is how lines are written.
type Format uint8

// The formats.
const (
	Plain Format = iota
	JSON
)

func (f Format) String() string {
	if f == JSON {
		return "json"
	}
	return "plain"
}

// TargetKey is the attribute that says the target of a logger, which filters know: log.With(telemetry.TargetKey, "proxy").
const TargetKey = "target"

// defaultTarget is that of loggers that have none.
const defaultTarget = "node"

// NewLogger returns a logger that writes lines as ztunnel does, one Write each:
//
//	2026-08-20T10:11:12.131415Z	info	inpod::statemanager	pod received, starting proxy	uid="5d8c-uid" name="cart-0"
//
// The attribute [TargetKey] of With is the target; a group among the attributes of With is a span, which is written behind the target as
// :proxy{wl="shop/cart-0"}. In JSON the target is the key scope with ztunnel's prefix, and a span is an object.
func NewLogger(w io.Writer, format Format, levels *Levels) *slog.Logger {
	return slog.New(&handler{out: &output{w: w}, json: format == JSON, levels: levels, target: defaultTarget})
}

// An output is what the handlers of a logger share.
type output struct {
	mu sync.Mutex // guards below
	w  io.Writer
}

// A handler is immutable.
type handler struct {
	out    *output
	levels *Levels
	json   bool
	target string
	spans  []slog.Attr // groups
	attrs  []slog.Attr // with the prefix in their keys
	prefix string      // of WithGroup, with its dot
}

func (h *handler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.levels.Level(h.target) }

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := *h
	next.spans, next.attrs = slices.Clip(h.spans), slices.Clip(h.attrs)
	for _, a := range attrs {
		a.Value = a.Value.Resolve()
		switch {
		case h.prefix == "" && a.Key == TargetKey:
			next.target = a.Value.String()
		case h.prefix == "" && a.Key != "" && a.Value.Kind() == slog.KindGroup:
			next.spans = append(next.spans, a)
		default:
			a.Key = h.prefix + a.Key
			next.attrs = append(next.attrs, a)
		}
	}
	return &next
}

func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	next := *h
	next.prefix += name + "."
	return &next
}

func (h *handler) Handle(_ context.Context, r slog.Record) error {
	w := &lineWriter{b: make([]byte, 0, 256), json: h.json}
	if h.json {
		w.begin(LevelName(r.Level), r.Time, h.scope(), r.Message)
		for _, s := range h.spans {
			w.key(s.Key)
			w.b = append(w.b, '{')
			in := &lineWriter{b: w.b, json: true, open: true}
			for _, a := range s.Value.Group() {
				in.attr("", a)
			}
			w.b = append(in.b, '}')
		}
	} else {
		w.begin(LevelName(r.Level), r.Time, h.scope(), r.Message)
		if len(h.attrs)+r.NumAttrs() > 0 {
			w.b = append(w.b, '\t')
		}
	}
	for _, a := range h.attrs {
		w.attr("", a)
	}
	r.Attrs(func(a slog.Attr) bool {
		w.attr(h.prefix, a)
		return true
	})
	if h.json {
		w.b = append(w.b, '}')
	}
	w.b = append(w.b, '\n')
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	_, err := h.out.w.Write(w.b)
	return err
}

// scope is the target as it stands in a line.
func (h *handler) scope() string {
	if h.json {
		return crate + "::" + h.target
	}
	if len(h.spans) == 0 {
		return h.target
	}
	w := &lineWriter{b: []byte(h.target)}
	for _, s := range h.spans {
		w.b = append(append(append(w.b, ':'), s.Key...), '{')
		w.any = false
		for _, a := range s.Value.Group() {
			w.attr("", a)
		}
		w.b = append(w.b, '}')
	}
	return string(w.b)
}

// attr writes an attribute; those of a group one by one.
func (w *lineWriter) attr(prefix string, a slog.Attr) {
	v := a.Value.Resolve()
	if a.Equal(slog.Attr{}) {
		return
	}
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += a.Key + "."
		}
		for _, in := range v.Group() {
			w.attr(prefix, in)
		}
		return
	}
	w.key(prefix + a.Key)
	switch v.Kind() {
	case slog.KindInt64, slog.KindUint64, slog.KindFloat64, slog.KindBool:
		if f, ok := v.Any().(float64); ok && w.json {
			w.b = appendFloat(w.b, f)
		} else {
			w.b = append(w.b, v.String()...)
		}
	case slog.KindDuration:
		w.plain(v.Duration().String())
	case slog.KindTime:
		w.plain(v.Time().UTC().Format(timeLayout))
	case slog.KindString:
		if s := v.String(); a.Key == "error" || a.Key == "reason" {
			w.quoted(oneError(s))
		} else {
			w.quoted(s)
		}
	default:
		w.value(v.Any())
	}
}

// value writes what is no basic kind: addresses bare, as in the access log, everything else as text in quotes.
func (w *lineWriter) value(v any) {
	switch v := v.(type) {
	case nil:
		w.b = append(w.b, "null"...)
	case error:
		w.quoted(oneError(v.Error()))
	case interface {
		encoding.TextMarshaler
		fmt.Stringer
		IsValid() bool // net/netip
	}:
		w.plain(v.String())
	case fmt.Stringer:
		w.quoted(v.String())
	default:
		w.quoted(fmt.Sprint(v))
	}
}

// oneError is the text of an error in one line: errors.Join gives each of several a line of its own.
func oneError(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

// plain is text of ours without anything to escape.
func (w *lineWriter) plain(s string) {
	if w.json {
		w.b = appendJSON(w.b, s)
		return
	}
	w.b = append(w.b, s...)
}

func (w *lineWriter) quoted(s string) {
	if w.json {
		w.b = appendJSON(w.b, s)
		return
	}
	w.b = appendQuoted(w.b, s)
}

// appendFloat writes null for what JSON has no number for.
func appendFloat(b []byte, f float64) []byte {
	n, err := json.Marshal(f)
	if err != nil {
		return append(b, "null"...)
	}
	return append(b, n...)
}

// begin writes the head of a line: level, time, scope, message.
func (w *lineWriter) begin(level string, t time.Time, scope, message string) {
	if w.json {
		w.b = append(w.b, `{"level":`...)
		w.b = appendJSON(w.b, level)
		w.b = append(w.b, `,"time":"`...)
		w.b = t.UTC().AppendFormat(w.b, timeLayout)
		w.b = append(w.b, `","scope":`...)
		w.b = appendJSON(w.b, scope)
		w.b = append(w.b, `,"message":`...)
		w.b = appendJSON(w.b, message)
		return
	}
	w.b = t.UTC().AppendFormat(w.b, timeLayout)
	w.b = append(w.b, '\t')
	w.b = append(append(w.b, level...), '\t')
	w.b = append(append(w.b, scope...), '\t')
	w.b = append(w.b, oneLine(message)...)
}

// oneLine keeps a message, which should be a constant, from breaking its line.
func oneLine(s string) string {
	q := strconv.Quote(s)
	if q == `"`+s+`"` {
		return s
	}
	b := appendQuoted(nil, s)
	return string(b[1 : len(b)-1])
}
