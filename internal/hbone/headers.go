package hbone

import (
	"fmt"
	"strconv"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Names of the fields of Headers.
const (
	fieldBaggage     = "baggage"
	fieldForwarded   = "forwarded"
	fieldTraceparent = "traceparent"
	fieldNetwork     = "x-forwarded-network"
	fieldReason      = "x-ztun-reason"
)

func (e *Engine) writeRequest(id uint32, authority string, h Headers) {
	e.field(":method", "CONNECT")
	e.field(":authority", authority)
	e.field(fieldBaggage, h.Baggage)
	e.optional(fieldForwarded, h.Forwarded)
	e.optional(fieldTraceparent, h.Traceparent)
	if h.CrossNetwork {
		e.field(fieldNetwork, h.ForwardedNetwork)
	}
	e.writeBlock(id, false)
}

func (e *Engine) writeResponse(id uint32, status int, h Headers, end bool) {
	e.field(":status", strconv.Itoa(status))
	e.optional(fieldBaggage, h.Baggage)
	e.optional(fieldReason, h.Reason)
	e.writeBlock(id, end)
}

func (e *Engine) optional(name, value string) {
	if value != "" {
		e.field(name, value)
	}
}

func (e *Engine) field(name, value string) {
	must(e.henc.WriteField(hpack.HeaderField{Name: name, Value: value}))
}

// writeBlock sends the fields that were written as HEADERS and, where the peer's frames are too small, CONTINUATION.
func (e *Engine) writeBlock(id uint32, end bool) {
	b := e.hbuf.Bytes()
	first := true
	for first || len(b) > 0 {
		frag := b[:min(len(b), e.frameSize)]
		b = b[len(frag):]
		if first {
			must(e.framer.WriteHeaders(http2.HeadersFrameParam{
				StreamID:      id,
				BlockFragment: frag,
				EndStream:     end,
				EndHeaders:    len(b) == 0,
			}))
		} else {
			must(e.framer.WriteContinuation(id, len(b) == 0, frag))
		}
		first = false
	}
	e.hbuf.Reset()
}

// parsedHeaders is a header block of either direction.
type parsedHeaders struct {
	method, authority, status string
	scheme, path              string
	other                     bool // a pseudo-header field that has no place in a CONNECT
	bad                       bool // a field that HTTP/2 forbids
	h                         Headers
}

func parseHeaders(fields []hpack.HeaderField) (p parsedHeaders) {
	for _, f := range fields {
		switch f.Name {
		case ":method":
			p.method = f.Value
		case ":authority":
			p.authority = f.Value
		case ":status":
			p.status = f.Value
		case ":scheme":
			p.scheme, p.other = f.Value, true
		case ":path":
			p.path, p.other = f.Value, true
		case ":protocol":
			p.other = true
		case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
			p.bad = true // RFC 9113, section 8.2.2
		case "te":
			p.bad = p.bad || f.Value != "trailers"
		case fieldBaggage:
			if p.h.Baggage != "" && f.Value != "" {
				p.h.Baggage += ","
			}
			p.h.Baggage += f.Value // a list header: several lines are one list (RFC 9110, section 5.3)
		case fieldForwarded:
			if p.h.Forwarded != "" {
				p.h.Forwarded += ","
			}
			p.h.Forwarded += f.Value
		case fieldTraceparent:
			p.h.Traceparent = f.Value
		case fieldNetwork:
			p.h.ForwardedNetwork, p.h.CrossNetwork = f.Value, true
		case fieldReason:
			p.h.Reason = f.Value
		}
	}
	return p
}

func (e *Engine) headers(f *http2.MetaHeadersFrame) error {
	if e.cfg.Server {
		return e.request(f)
	}
	return e.response(f)
}

// admit makes the stream of a first HEADERS known. It returns false if the stream is not new.
func (e *Engine) admit(id uint32) (bool, error) {
	if id%2 == 0 {
		return false, protocolError("request on a stream of even number")
	}
	if id <= e.lastPeer {
		return false, nil
	}
	e.lastPeer = id
	return true, nil
}

// malformed is for a header block that the Framer could not make sense of, with its table in order.
func (e *Engine) malformed(id uint32) error {
	if !e.cfg.Server {
		return nil
	}
	_, err := e.admit(id)
	return err
}

func (e *Engine) request(f *http2.MetaHeadersFrame) error {
	id, end := f.StreamID, f.StreamEnded()
	isNew, err := e.admit(id)
	if err != nil {
		return err
	}
	if !isNew {
		return e.trailers(f)
	}
	if e.afterFinal(id) {
		return nil
	}
	if uint64(len(e.streams)+e.orphans) >= uint64(e.cfg.Settings.MaxStreams) {
		e.refuse(id, http2.ErrCodeRefusedStream)
		return e.suffer()
	}
	p := parseHeaders(f.Fields)
	switch {
	case f.Truncated:
		e.refuse(id, http2.ErrCodeEnhanceYourCalm)
		return e.suffer()
	case p.bad || p.method == "" || p.status != "" || p.method == "CONNECT" && p.other ||
		p.method != "CONNECT" && (p.scheme == "" || p.path == ""):
		// RFC 9113, section 8.1.1: malformed.
		e.refuse(id, http2.ErrCodeProtocol)
		return e.suffer()
	case p.method != "CONNECT" || p.authority == "":
		e.writeResponse(id, 400, Headers{}, true)
		if !end {
			e.refuse(id, http2.ErrCodeNo)
		}
		if p.method != "CONNECT" {
			e.ev.RequestRefused(&RequestError{fmt.Sprintf("expected method CONNECT, got %.32s", p.method)})
		} else {
			e.ev.RequestRefused(&RequestError{"no valid authority pseudo header: "})
		}
		return e.suffer()
	}
	s := e.newStream(id)
	s.setup = true
	e.ev.StreamRequest(id, p.authority, p.h)
	if s := e.streams[id]; s != nil && end {
		e.gotEnd(s)
	}
	return nil
}

// trailers is a HEADERS on a stream that had one. What it says is ignored.
func (e *Engine) trailers(f *http2.MetaHeadersFrame) error {
	id := f.StreamID
	s := e.streams[id]
	switch {
	case s == nil:
		if e.resetLately(id) || e.afterFinal(id) {
			return nil
		}
		return &ConnError{http2.ErrCodeStreamClosed, "HEADERS on a closed stream"}
	case s.gotEnd:
		e.resetStream(s, http2.ErrCodeStreamClosed)
	case !f.StreamEnded() || len(f.PseudoFields()) > 0: // RFC 9113, section 8.1
		e.resetStream(s, http2.ErrCodeProtocol)
	default:
		e.gotEnd(s)
	}
	return nil
}

func (e *Engine) response(f *http2.MetaHeadersFrame) error {
	id, end := f.StreamID, f.StreamEnded()
	if !e.known(id) {
		return protocolError("HEADERS on an idle stream")
	}
	s := e.streams[id]
	if s == nil {
		if e.resetLately(id) {
			return nil
		}
		// Not the connection's error: of the streams that we reset, only the latest are remembered.
		e.refuse(id, http2.ErrCodeStreamClosed)
		return e.suffer()
	}
	if s.answered {
		return e.trailers(f)
	}
	p := parseHeaders(f.Fields)
	status, err := strconv.Atoi(p.status)
	switch {
	case f.Truncated:
		e.resetStream(s, http2.ErrCodeEnhanceYourCalm)
		return nil
	case err != nil || len(p.status) != 3 || status < 100 || status == 101 || p.bad || p.other || p.method != "" || p.authority != "":
		e.resetStream(s, http2.ErrCodeProtocol)
		return nil
	case status < 200:
		if end {
			e.resetStream(s, http2.ErrCodeProtocol)
			return nil
		}
		return e.suffer()
	}
	s.answered = true
	e.ev.StreamResponse(id, status, p.h)
	if s := e.streams[id]; s != nil && end {
		e.gotEnd(s)
	}
	return nil
}
