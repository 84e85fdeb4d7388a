package hbone

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
)

type feedState uint8

const (
	feedHeader  feedState = iota // frame header
	feedPreface                  // the client's preface; left counts
	feedPadLen                   // the byte before a padded payload
	feedData                     // payload of DATA: passed on as it comes
	feedControl                  // payload of a frame that has to be whole; left counts
)

// Feed takes bytes that arrived, cut as they may be. An error is a *ConnError and final: the Output has a GOAWAY, and no
// stream lives on.
func (e *Engine) Feed(p []byte, now time.Time) error {
	if e.err != nil {
		return e.err
	}
	e.now = now
	if len(p) > 0 {
		e.heard = now
		e.pinged = time.Time{}
	}
	for len(p) > 0 || e.skippable() {
		n, err := e.step(p)
		p = p[n:]
		if err == nil {
			err = e.err // a callback closed the connection
		}
		if err != nil {
			var ce *ConnError
			if !errors.As(err, &ce) {
				ce = &ConnError{http2.ErrCodeInternal, err.Error()}
			}
			return e.fail(ce)
		}
	}
	if e.level == loop.Calm {
		e.creditConnection(0)
	}
	if e.acks > maxAcks {
		return e.fail(&ConnError{http2.ErrCodeEnhanceYourCalm, "the peer does not read the answers to its frames"})
	}
	return nil
}

// skippable reports whether a frame without payload waits to be finished.
func (e *Engine) skippable() bool {
	return (e.state == feedData || e.state == feedControl) && e.left == 0 && e.pad == 0
}

func (e *Engine) step(p []byte) (int, error) {
	switch e.state {
	case feedPreface:
		at := len(http2.ClientPreface) - e.left
		n := min(e.left, len(p))
		if string(p[:n]) != http2.ClientPreface[at:at+n] {
			return 0, protocolError("no HTTP/2 preface")
		}
		if e.left -= n; e.left == 0 {
			e.state = feedHeader
		}
		return n, nil
	case feedHeader:
		n := copy(e.head[e.nhead:], p)
		if e.nhead += n; e.nhead < headerLen {
			return n, nil
		}
		e.nhead = 0
		h := &e.head
		e.fh = http2.FrameHeader{
			Length:   uint32(h[0])<<16 | uint32(h[1])<<8 | uint32(h[2]),
			Type:     http2.FrameType(h[3]),
			Flags:    http2.Flags(h[4]),
			StreamID: binary.BigEndian.Uint32(h[5:]) & maxWindow,
		}
		return n, e.startFrame()
	case feedPadLen:
		pad := int(p[0])
		if pad > e.left-1 {
			return 0, protocolError("more padding than payload")
		}
		e.left -= 1 + pad
		e.pad = pad
		if s := e.streams[e.fh.StreamID]; s != nil && !e.sink {
			e.Took(s.id, 1+pad)
		}
		e.state = feedData
		return 1, nil
	case feedData:
		return e.data(p)
	default:
		n := min(e.left, len(p))
		if !e.sink {
			e.buf = append(e.buf, p[:n]...)
		}
		if e.left -= n; e.left > 0 {
			return n, nil
		}
		e.state = feedHeader
		if e.sink {
			return n, nil
		}
		if err := e.checkPadding(); err != nil || e.block != 0 {
			return n, err
		}
		return n, e.controlFrame()
	}
}

// checkPadding looks at a HEADERS frame that is whole. Its error is the connection's (RFC 9113, section 6.2): what would be left of
// the block cannot be decoded, and without it the compression state is lost.
func (e *Engine) checkPadding() error {
	fh := e.fh
	if fh.Type != http2.FrameHeaders || !fh.Flags.Has(http2.FlagHeadersPadded) || fh.Length == 0 {
		return nil
	}
	left := int(fh.Length) - 1
	if fh.Flags.Has(http2.FlagHeadersPriority) {
		left -= 5
	}
	if int(e.buf[len(e.buf)-int(fh.Length)]) > left {
		return protocolError("more padding than payload")
	}
	return nil
}

func protocolError(reason string) *ConnError { return &ConnError{http2.ErrCodeProtocol, reason} }

// startFrame decides what becomes of the payload of e.fh.
func (e *Engine) startFrame() error {
	fh := e.fh
	switch {
	case fh.Length > e.cfg.Settings.FrameSize:
		return &ConnError{http2.ErrCodeFrameSize, "frame is larger than allowed"}
	case !e.gotSettings && (fh.Type != http2.FrameSettings || fh.Flags.Has(http2.FlagSettingsAck)):
		return protocolError("first frame is not SETTINGS")
	case e.block != 0 && (fh.Type != http2.FrameContinuation || fh.StreamID != e.block):
		return protocolError("header block is interrupted")
	case e.block == 0 && fh.Type == http2.FrameContinuation:
		return protocolError("CONTINUATION without HEADERS")
	}
	e.left = int(fh.Length)
	e.pad = 0
	e.sink = false
	e.state = feedControl
	limit := maxControl
	switch fh.Type {
	case http2.FrameData:
		return e.startData()
	case http2.FrameHeaders, http2.FrameContinuation:
		// A block that is larger than the header list can be is not worth decoding.
		limit = 2*int(e.cfg.Settings.HeaderList) - len(e.buf)
		e.blockFrames++
		if e.blockFrames > maxBlock {
			return &ConnError{http2.ErrCodeEnhanceYourCalm, "too many frames in a header block"}
		}
		e.block = 0
		if !fh.Flags.Has(http2.FlagHeadersEndHeaders) {
			e.block = fh.StreamID
		}
		if fh.StreamID == 0 {
			return protocolError("HEADERS on stream 0")
		}
	case http2.FramePriority:
		if err := e.suffer(); err != nil {
			return err
		}
	case http2.FrameSettings:
		limit = maxSettings
	case http2.FrameRSTStream, http2.FramePing, http2.FrameGoAway, http2.FrameWindowUpdate:
	case http2.FramePushPromise:
		return protocolError("PUSH_PROMISE was not allowed")
	default:
		e.sink = true // RFC 9113, section 4.1: unknown types are ignored
		return nil
	}
	if int(fh.Length) > limit {
		return &ConnError{http2.ErrCodeEnhanceYourCalm, fh.Type.String() + " frame is too long"}
	}
	e.buf = append(e.buf, e.head[:]...)
	return nil
}

// startData checks a DATA frame against the windows before any of it is passed on.
func (e *Engine) startData() error {
	fh := e.fh
	size := int64(fh.Length)
	if fh.StreamID == 0 {
		return protocolError("DATA on stream 0")
	}
	if !e.known(fh.StreamID) {
		return protocolError("DATA on an idle stream")
	}
	if size > e.recv {
		return &ConnError{http2.ErrCodeFlowControl, "connection window exceeded"}
	}
	e.recv -= size
	e.state = feedData
	if fh.Flags.Has(http2.FlagDataPadded) {
		if size == 0 {
			return &ConnError{http2.ErrCodeFrameSize, "padded DATA without pad length"}
		}
		e.state = feedPadLen
	}
	s := e.streams[fh.StreamID]
	switch {
	case s == nil:
		e.sink = true
		if !e.resetLately(fh.StreamID) && !e.afterFinal(fh.StreamID) {
			e.refuse(fh.StreamID, http2.ErrCodeStreamClosed)
			return e.suffer()
		}
		return nil
	case s.gotEnd:
		e.sink = true
		e.resetStream(s, http2.ErrCodeStreamClosed)
		return nil
	case !e.cfg.Server && !s.answered:
		e.sink = true
		e.resetStream(s, http2.ErrCodeProtocol)
		return nil
	case size > s.recv:
		e.sink = true
		e.resetStream(s, http2.ErrCodeFlowControl)
		return nil
	}
	s.recv -= size
	if size == 0 && !fh.Flags.Has(http2.FlagDataEndStream) {
		return e.suffer()
	}
	return nil
}

// afterFinal reports whether the stream came after the last one that our GOAWAY named: it is ignored.
func (e *Engine) afterFinal(id uint32) bool { return e.finalSent && e.cfg.Server && id > e.finalID }

func (e *Engine) data(p []byte) (int, error) {
	n := min(e.left, len(p))
	id := e.fh.StreamID
	if n > 0 {
		e.left -= n
		if !e.sink && e.streams[id] != nil {
			e.ev.StreamData(id, p[:n:n])
		}
	}
	if e.left == 0 && e.pad > 0 {
		skip := min(e.pad, len(p)-n)
		e.pad -= skip
		n += skip
	}
	if e.left > 0 || e.pad > 0 {
		return n, nil
	}
	e.state = feedHeader
	e.credit += int64(e.fh.Length)
	if s := e.streams[id]; s != nil && !e.sink && e.fh.Flags.Has(http2.FlagDataEndStream) {
		e.gotEnd(s)
	}
	return n, nil
}

func (e *Engine) gotEnd(s *engineStream) {
	s.gotEnd = true
	e.closeIfDone(s)
	e.ev.StreamEnd(s.id)
}

// suffer counts a frame that costs us something and moves no data.
func (e *Engine) suffer() error {
	if back := int(e.now.Sub(e.floodAt) * floodPerSec / time.Second); back > 0 {
		e.flood = min(floodBurst, e.flood+back)
		e.floodAt = e.now
	}
	if e.flood--; e.flood < 0 {
		return &ConnError{http2.ErrCodeEnhanceYourCalm, "too many frames without purpose"}
	}
	return nil
}

// refuse resets a stream that has no state.
func (e *Engine) refuse(id uint32, code http2.ErrCode) {
	e.writeReset(id, code)
	e.acks += headerLen + 4
	if code != http2.ErrCodeNo {
		e.ev.StreamFault(code)
	}
}

// controlFrame handles the whole frame, or header block, in e.buf.
func (e *Engine) controlFrame() error {
	e.blockFrames = 0
	e.in.b = e.buf
	f, err := e.framer.ReadFrame()
	e.in.b = nil
	if cap(e.buf) > 4<<10 {
		e.buf = nil
	} else {
		e.buf = e.buf[:0]
	}
	if err != nil {
		return e.frameError(err)
	}
	switch f := f.(type) {
	case *http2.MetaHeadersFrame:
		return e.headers(f)
	case *http2.SettingsFrame:
		return e.settings(f)
	case *http2.PingFrame:
		return e.ping(f)
	case *http2.GoAwayFrame:
		return e.goAway(f)
	case *http2.WindowUpdateFrame:
		return e.windowUpdate(f)
	case *http2.RSTStreamFrame:
		return e.rstStream(f)
	}
	return nil
}

// frameError turns an error of the Framer into ours.
func (e *Engine) frameError(err error) error {
	var se http2.StreamError
	var ce http2.ConnectionError
	switch {
	case errors.As(err, &se):
		if e.fh.Type == http2.FrameHeaders || e.fh.Type == http2.FrameContinuation {
			if err := e.malformed(se.StreamID); err != nil {
				return err
			}
		}
		if s := e.streams[se.StreamID]; s != nil {
			e.resetStream(s, se.Code)
			return nil
		}
		if !e.known(se.StreamID) {
			return protocolError("frame on an idle stream")
		}
		if !e.resetLately(se.StreamID) {
			e.refuse(se.StreamID, se.Code)
		}
		return e.suffer()
	case errors.As(err, &ce):
		reason := e.fh.Type.String() + " frame is malformed"
		if d := e.framer.ErrorDetail(); d != nil {
			reason = d.Error()
		}
		return &ConnError{http2.ErrCode(ce), reason}
	case errors.Is(err, http2.ErrFrameTooLarge):
		return &ConnError{http2.ErrCodeFrameSize, "frame is larger than allowed"}
	}
	return &ConnError{http2.ErrCodeFrameSize, e.fh.Type.String() + " frame is short"}
}

func (e *Engine) settings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		e.windowAcked()
		return nil
	}
	first := !e.gotSettings
	e.gotSettings = true
	err := f.ForeachSetting(func(s http2.Setting) error {
		if err := s.Valid(); err != nil {
			return err
		}
		switch s.ID {
		case http2.SettingHeaderTableSize:
			e.henc.SetMaxDynamicTableSize(min(s.Val, tableSize))
		case http2.SettingInitialWindowSize:
			more := int64(s.Val) - e.sendInit
			e.sendInit = int64(s.Val)
			for _, st := range e.streams {
				if st.send += more; st.send > maxWindow {
					return http2.ConnectionError(http2.ErrCodeFlowControl)
				}
			}
		case http2.SettingMaxFrameSize:
			e.frameSize = int(s.Val)
		case http2.SettingMaxConcurrentStreams:
			e.maxStreams = s.Val
		case http2.SettingEnablePush:
			if s.Val != 0 && !e.cfg.Server {
				return http2.ConnectionError(http2.ErrCodeProtocol)
			}
		}
		return nil
	})
	if err != nil {
		var ce http2.ConnectionError
		if !errors.As(err, &ce) {
			ce = http2.ConnectionError(http2.ErrCodeProtocol)
		}
		return &ConnError{http2.ErrCode(ce), "SETTINGS has a value that is not allowed"}
	}
	must(e.framer.WriteSettingsAck())
	e.acks += headerLen
	e.ev.PeerSettings(e.maxStreams)
	e.wakeWaiting()
	if first {
		return nil
	}
	return e.suffer()
}

func (e *Engine) ping(f *http2.PingFrame) error {
	if !f.IsAck() {
		must(e.framer.WritePing(true, f.Data))
		e.acks += headerLen + 8
		return e.suffer()
	}
	if f.Data == drainPing && e.draining && !e.finalSent {
		e.finalGoAway()
	}
	return nil
}

func (e *Engine) goAway(f *http2.GoAwayFrame) error {
	e.goneAway = true
	code := f.ErrCode
	if !e.cfg.Server {
		for _, id := range slices.Sorted(maps.Keys(e.streams)) {
			if s := e.streams[id]; s != nil && id > f.LastStreamID {
				e.remove(s)
				e.ev.StreamReset(id, http2.ErrCodeRefusedStream, !s.answered)
			}
		}
	}
	e.ev.PeerGoAway(code)
	return e.suffer()
}

func (e *Engine) windowUpdate(f *http2.WindowUpdateFrame) error {
	if f.StreamID == 0 {
		if e.send += int64(f.Increment); e.send > maxWindow {
			return &ConnError{http2.ErrCodeFlowControl, "connection window overflows"}
		}
		if e.send <= e.sendMost {
			e.creditStep = max(e.creditStep, int64(f.Increment))
		}
		e.sendMost = max(e.sendMost, e.send)
		e.wakeWaiting()
		return nil
	}
	s := e.streams[f.StreamID]
	if s == nil {
		if !e.known(f.StreamID) {
			return protocolError("WINDOW_UPDATE on an idle stream")
		}
		return nil
	}
	if s.send += int64(f.Increment); s.send > maxWindow {
		e.resetStream(s, http2.ErrCodeFlowControl)
		return nil
	}
	held := s.holds
	e.countHolder(s)
	if s.waiting || held != s.holds { // there may be more for others
		e.wakeWaiting()
	}
	return nil
}

func (e *Engine) rstStream(f *http2.RSTStreamFrame) error {
	s := e.streams[f.StreamID]
	if s == nil {
		if !e.known(f.StreamID) {
			return protocolError("RST_STREAM on an idle stream")
		}
		if i := slices.Index(e.resets[:], f.StreamID); i >= 0 {
			e.resets[i] = 0 // nothing is under way for it any more
		}
		return nil
	}
	e.remove(s)
	refused := !e.cfg.Server && !s.answered && f.ErrCode == http2.ErrCodeRefusedStream
	early := e.cfg.Server && !s.answered
	e.ev.StreamReset(s.id, f.ErrCode, refused)
	e.wakeWaiting()
	if early {
		return e.suffer() // rapid reset: a stream that was never used
	}
	return nil
}
