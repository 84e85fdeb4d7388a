package hbone

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
)

// fresh makes the engine a new one, to which the peer has only sent this.
func (w *wire) fresh(preface string) {
	w.eng = NewEngine(EngineConfig{Server: w.eng.cfg.Server}, w.rec, t0)
	w.eng.Sent()
	w.in.WriteString(preface)
}

// TestRFC9113 plays one peer's frames and compares what the engine answers and reports. The names begin with the section.
func TestRFC9113(t *testing.T) {
	raw := func(typ http2.FrameType, flags http2.Flags, id uint32, payload string) func(*wire) {
		return func(w *wire) { _ = w.fr.WriteRawFrame(typ, flags, id, []byte(payload)) }
	}
	open := func(w *wire) { w.connect(1) }
	accept := func(w *wire) { _ = w.feed(); _ = w.eng.Respond(1, 200, Headers{}, false); w.frames(); w.rec.take() }
	clientOpen := func(w *wire) { _, _ = w.eng.Open("10.0.0.1:80", Headers{}); w.frames() }
	clientOK := func(w *wire) { w.headers(1, false, ":status", "200"); _ = w.feed(); w.rec.take() }
	write := func(id uint32, n int) func(*wire) {
		return func(w *wire) { _ = w.feed(); _, _ = w.eng.Write(id, make([]byte, n)) }
	}
	tests := []struct {
		name   string
		client bool
		play   []func(*wire)
		frames []string
		events []string
		code   http2.ErrCode // of the connection's end; -1: it lives
	}{
		{name: "3.4 no preface", play: []func(*wire){func(w *wire) { w.fresh("GET / HTTP/1.1\r\n\r\n") }}, code: http2.ErrCodeProtocol},
		{name: "3.4 first frame of the client is not SETTINGS", play: []func(*wire){func(w *wire) { w.fresh(http2.ClientPreface) }, raw(http2.FramePing, 0, 0, "12345678")}, code: http2.ErrCodeProtocol},
		{name: "3.4 first frame of the server is not SETTINGS", client: true, play: []func(*wire){func(w *wire) { w.fresh("") }, raw(http2.FramePing, 0, 0, "12345678")}, code: http2.ErrCodeProtocol},
		{name: "3.4 first frame is an acknowledgement", client: true, play: []func(*wire){func(w *wire) { w.fresh("") }, raw(http2.FrameSettings, http2.FlagSettingsAck, 0, "")}, code: http2.ErrCodeProtocol},
		{name: "4.1 unknown type is ignored", play: []func(*wire){raw(0x77, 0xff, 5, "abc"), open}, events: []string{"request 1 10.0.0.1:80"}, code: alive},
		{name: "4.1 reserved bit and undefined flags are ignored", play: []func(*wire){raw(http2.FramePing, 0xfe, 1<<31, "12345678")}, frames: []string{`PING 0 ack "12345678"`}, code: alive},
		{name: "4.2 frame too large", play: []func(*wire){raw(http2.FrameData, 0, 1, strings.Repeat("x", 1<<20+1))}, code: http2.ErrCodeFrameSize},
		{name: "4.3 broken compression", play: []func(*wire){raw(http2.FrameHeaders, http2.FlagHeadersEndHeaders, 1, "\xff\xff\xff\xff\xff\xff\xff")}, code: http2.ErrCodeCompression},
		{name: "5.1 idle: DATA", play: []func(*wire){raw(http2.FrameData, 0, 1, "x")}, code: http2.ErrCodeProtocol},
		{name: "5.1 idle: RST_STREAM", play: []func(*wire){raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x08")}, code: http2.ErrCodeProtocol},
		{name: "5.1 idle: WINDOW_UPDATE", play: []func(*wire){raw(http2.FrameWindowUpdate, 0, 1, "\x00\x00\x00\x08")}, code: http2.ErrCodeProtocol},
		{name: "5.1 idle: PRIORITY", play: []func(*wire){raw(http2.FramePriority, 0, 1, "\x00\x00\x00\x00\x10"), open}, events: []string{"request 1 10.0.0.1:80"}, code: alive},
		{name: "5.1 idle: HEADERS, as client", client: true, play: []func(*wire){func(w *wire) { w.headers(1, false, ":status", "200") }}, code: http2.ErrCodeProtocol},
		{name: "5.1 half-closed: WINDOW_UPDATE", play: []func(*wire){
			raw(http2.FrameSettings, 0, 0, "\x00\x04\x00\x00\x00\x00"), open, accept, raw(http2.FrameData, http2.FlagDataEndStream, 1, ""), raw(http2.FrameWindowUpdate, 0, 1, "\x00\x00\x00\x01"), write(1, 5),
		}, frames: []string{"DATA 1 len=1"}, events: []string{"end 1"}, code: alive},
		{name: "5.1 half-closed: PRIORITY", play: []func(*wire){
			open, accept, raw(http2.FrameData, http2.FlagDataEndStream, 1, ""), raw(http2.FramePriority, 0, 1, "\x00\x00\x00\x00\x10"), write(1, 5),
		}, frames: []string{"DATA 1 len=5"}, events: []string{"end 1"}, code: alive},
		{name: "5.1 half-closed: HEADERS", play: []func(*wire){
			open, accept, raw(http2.FrameData, http2.FlagDataEndStream, 1, ""), func(w *wire) { w.headers(1, true, "a", "b") },
		}, frames: []string{"RST_STREAM 1 STREAM_CLOSED"}, events: []string{"end 1", "reset 1 STREAM_CLOSED"}, code: alive},
		{name: "5.1 half-closed: DATA", play: []func(*wire){
			open, accept, raw(http2.FrameData, http2.FlagDataEndStream, 1, "x"), raw(http2.FrameData, 0, 1, "y"),
		}, frames: []string{"RST_STREAM 1 STREAM_CLOSED"}, events: []string{"end 1", "reset 1 STREAM_CLOSED"}, code: alive},
		{name: "5.1 closed: DATA after our reset is ignored", play: []func(*wire){
			open, accept, func(w *wire) { w.eng.Reset(1, http2.ErrCodeCancel) }, raw(http2.FrameData, 0, 1, "y"),
		}, frames: []string{"RST_STREAM 1 CANCEL"}, code: alive},
		{name: "5.1 closed: DATA after both resets", play: []func(*wire){
			open, accept, func(w *wire) { w.eng.Reset(1, http2.ErrCodeCancel) }, raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x08"), raw(http2.FrameData, 0, 1, "y"),
		}, frames: []string{"RST_STREAM 1 CANCEL", "RST_STREAM 1 STREAM_CLOSED"}, code: alive},
		{name: "5.1 closed: HEADERS", play: []func(*wire){open, accept, raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x08"), open}, events: []string{"reset 1 CANCEL"}, code: http2.ErrCodeStreamClosed},
		{name: "5.1 closed: HEADERS, as client", client: true, play: []func(*wire){clientOpen, clientOK, raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x08"), func(w *wire) { w.headers(1, true, ":status", "200") }}, frames: []string{"RST_STREAM 1 STREAM_CLOSED"}, events: []string{"reset 1 CANCEL"}, code: alive},
		{name: "5.1 closed: DATA, as client", client: true, play: []func(*wire){clientOpen, clientOK, raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x08"), raw(http2.FrameData, 0, 1, "x")}, frames: []string{"RST_STREAM 1 STREAM_CLOSED"}, events: []string{"reset 1 CANCEL"}, code: alive},
		{name: "5.1 closed: PRIORITY, RST_STREAM and WINDOW_UPDATE are ignored", play: []func(*wire){
			open, accept, raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x08"), raw(http2.FramePriority, 0, 1, "\x00\x00\x00\x00\x10"), raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x08"), raw(http2.FrameWindowUpdate, 0, 1, "\x00\x00\x00\x01"),
		}, events: []string{"reset 1 CANCEL"}, code: alive},
		{name: "5.1.1 even stream", play: []func(*wire){func(w *wire) { w.connect(2) }}, code: http2.ErrCodeProtocol},
		{name: "5.1.1 lower stream than before", play: []func(*wire){func(w *wire) { w.connect(5); w.connect(3) }}, code: http2.ErrCodeStreamClosed},
		{name: "5.1.2 too many streams", play: []func(*wire){func(w *wire) {
			for id := uint32(1); id <= 7; id += 2 {
				w.connect(id)
			}
		}}, frames: []string{"RST_STREAM 7 REFUSED_STREAM"}, events: []string{"request 1 10.0.0.1:80", "request 3 10.0.0.1:80", "request 5 10.0.0.1:80"}, code: alive},
		{name: "5.1.2 reset streams count while they are set up", play: []func(*wire){func(w *wire) {
			for id := uint32(1); id <= 7; id += 2 {
				w.connect(id)
				_ = w.fr.WriteRSTStream(id, http2.ErrCodeCancel)
			}
		}}, frames: []string{"RST_STREAM 7 REFUSED_STREAM"}, events: []string{
			"request 1 10.0.0.1:80", "reset 1 CANCEL", "request 3 10.0.0.1:80", "reset 3 CANCEL", "request 5 10.0.0.1:80", "reset 5 CANCEL",
		}, code: alive},
		{name: "6.1 DATA on stream 0", play: []func(*wire){raw(http2.FrameData, 0, 0, "x")}, code: http2.ErrCodeProtocol},
		{name: "6.1 padding too long", play: []func(*wire){open, accept, raw(http2.FrameData, http2.FlagDataPadded, 1, "\x05abc")}, code: http2.ErrCodeProtocol},
		{name: "6.1 end of stream", play: []func(*wire){open, accept, raw(http2.FrameData, http2.FlagDataEndStream|http2.FlagDataPadded, 1, "\x02abcdpp"[:7])}, events: []string{"end 1"}, code: alive},
		{name: "6.1 padded without a length", play: []func(*wire){open, accept, raw(http2.FrameData, http2.FlagDataPadded, 1, "")}, code: http2.ErrCodeFrameSize},
		{name: "6.2 HEADERS on stream 0", play: []func(*wire){func(w *wire) { w.connect(0) }}, code: http2.ErrCodeProtocol},
		{name: "6.2 padding too long", play: []func(*wire){raw(http2.FrameHeaders, http2.FlagHeadersPadded|http2.FlagHeadersEndHeaders, 1, "\x02\x82")}, code: http2.ErrCodeProtocol},
		{name: "6.2 padding too long, with priority, in a block that goes on", play: []func(*wire){raw(http2.FrameHeaders, http2.FlagHeadersPadded|http2.FlagHeadersPriority, 1, "\x02\x00\x00\x00\x00\x10\x82")}, code: http2.ErrCodeProtocol},
		{name: "6.2 block is interrupted", play: []func(*wire){raw(http2.FrameHeaders, 0, 1, "\x82"), raw(http2.FramePing, 0, 0, "12345678")}, code: http2.ErrCodeProtocol},
		{name: "6.2 padded without a length", play: []func(*wire){raw(http2.FrameHeaders, http2.FlagHeadersPadded|http2.FlagHeadersEndHeaders, 1, "")}, code: http2.ErrCodeFrameSize},
		{name: "6.2 priority that is cut", play: []func(*wire){raw(http2.FrameHeaders, http2.FlagHeadersPriority|http2.FlagHeadersEndHeaders, 1, "\x00\x00")}, code: http2.ErrCodeFrameSize},
		{name: "6.3 PRIORITY on stream 0", play: []func(*wire){raw(http2.FramePriority, 0, 0, "\x00\x00\x00\x00\x10")}, code: http2.ErrCodeProtocol},
		{name: "6.3 PRIORITY of wrong length", play: []func(*wire){raw(http2.FramePriority, 0, 1, "\x00\x00\x00\x00")}, code: http2.ErrCodeFrameSize},
		{name: "6.4 RST_STREAM on stream 0", play: []func(*wire){raw(http2.FrameRSTStream, 0, 0, "\x00\x00\x00\x08")}, code: http2.ErrCodeProtocol},
		{name: "6.4 RST_STREAM of wrong length", play: []func(*wire){open, raw(http2.FrameRSTStream, 0, 1, "\x00\x00")}, events: []string{"request 1 10.0.0.1:80"}, code: http2.ErrCodeFrameSize},
		{name: "6.5 SETTINGS of wrong length", play: []func(*wire){raw(http2.FrameSettings, 0, 0, "\x00\x00")}, code: http2.ErrCodeFrameSize},
		{name: "6.5 SETTINGS ack with payload", play: []func(*wire){raw(http2.FrameSettings, http2.FlagSettingsAck, 0, "\x00\x00\x00\x00\x00\x00")}, code: http2.ErrCodeFrameSize},
		{name: "6.5 SETTINGS on a stream", play: []func(*wire){raw(http2.FrameSettings, 0, 1, "")}, code: http2.ErrCodeProtocol},
		{name: "6.5.2 unknown setting is ignored", play: []func(*wire){raw(http2.FrameSettings, 0, 0, "\xff\xff\x00\x00\x00\x01")}, frames: []string{"SETTINGS 0 ack"}, code: alive},
		{name: "6.5.2 push neither on nor off", play: []func(*wire){raw(http2.FrameSettings, 0, 0, "\x00\x02\x00\x00\x00\x02")}, code: http2.ErrCodeProtocol},
		{name: "6.5.2 server that allows push", client: true, play: []func(*wire){raw(http2.FrameSettings, 0, 0, "\x00\x02\x00\x00\x00\x01")}, code: http2.ErrCodeProtocol},
		{name: "6.5.2 frame size too large", play: []func(*wire){raw(http2.FrameSettings, 0, 0, "\x00\x05\x01\x00\x00\x00")}, code: http2.ErrCodeProtocol},
		{name: "6.5.2 frame size is kept to", play: []func(*wire){open, accept, write(1, 20_000)}, frames: []string{"DATA 1 len=16384", "DATA 1 len=3616"}, code: alive},
		{name: "6.5.2 window too large", play: []func(*wire){raw(http2.FrameSettings, 0, 0, "\x00\x04\x80\x00\x00\x00")}, code: http2.ErrCodeFlowControl},
		{name: "6.5.2 frame size too small", play: []func(*wire){raw(http2.FrameSettings, 0, 0, "\x00\x05\x00\x00\x00\x01")}, code: http2.ErrCodeProtocol},
		{name: "6.5.3 SETTINGS are acknowledged", play: []func(*wire){raw(http2.FrameSettings, 0, 0, "")}, frames: []string{"SETTINGS 0 ack"}, code: alive},
		{name: "6.5.3 values are taken in order", play: []func(*wire){
			raw(http2.FrameSettings, 0, 0, "\x00\x04\x00\x00\x00\x64\x00\x04\x00\x00\x00\x01"), open, func(w *wire) { _ = w.feed(); _ = w.eng.Respond(1, 200, Headers{}, false); w.rec.take() }, write(1, 50),
		}, frames: []string{"SETTINGS 0 ack", "HEADERS 1 :status=200", "DATA 1 len=1"}, code: alive},
		{name: "6.6 PUSH_PROMISE", client: true, play: []func(*wire){clientOpen, raw(http2.FramePushPromise, http2.FlagPushPromiseEndHeaders, 1, "\x00\x00\x00\x02\x82")}, code: http2.ErrCodeProtocol},
		{name: "6.7 PING", play: []func(*wire){raw(http2.FramePing, 0, 0, "12345678")}, frames: []string{`PING 0 ack "12345678"`}, code: alive},
		{name: "6.7 PING of wrong length", play: []func(*wire){raw(http2.FramePing, 0, 0, "1234567")}, code: http2.ErrCodeFrameSize},
		{name: "6.7 PING on a stream", play: []func(*wire){raw(http2.FramePing, 0, 1, "12345678")}, code: http2.ErrCodeProtocol},
		{name: "6.7 acknowledgement is not answered", play: []func(*wire){raw(http2.FramePing, http2.FlagPingAck, 0, "12345678")}, code: alive},
		{name: "6.8 GOAWAY on a stream", play: []func(*wire){raw(http2.FrameGoAway, 0, 1, "\x00\x00\x00\x00\x00\x00\x00\x00")}, code: http2.ErrCodeProtocol},
		{name: "6.8 GOAWAY that is cut", play: []func(*wire){raw(http2.FrameGoAway, 0, 0, "\x00\x00\x00\x00\x00\x00\x00")}, code: http2.ErrCodeFrameSize},
		{name: "6.8 GOAWAY refuses later streams", client: true, play: []func(*wire){
			clientOpen, clientOpen, clientOK, raw(http2.FrameGoAway, 0, 0, "\x00\x00\x00\x01\x00\x00\x00\x00"),
		}, events: []string{"reset 3 REFUSED_STREAM refused", "goaway NO_ERROR"}, code: alive},
		{name: "6.9 increment 0 on a stream", play: []func(*wire){open, accept, raw(http2.FrameWindowUpdate, 0, 1, "\x00\x00\x00\x00")}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, events: []string{"reset 1 PROTOCOL_ERROR"}, code: alive},
		{name: "6.9 increment 0 on the connection", play: []func(*wire){raw(http2.FrameWindowUpdate, 0, 0, "\x00\x00\x00\x00")}, code: http2.ErrCodeProtocol},
		{name: "6.9 WINDOW_UPDATE of wrong length", play: []func(*wire){raw(http2.FrameWindowUpdate, 0, 0, "\x00\x00\x01")}, code: http2.ErrCodeFrameSize},
		{name: "6.9.1 a window of one byte", play: []func(*wire){
			raw(http2.FrameSettings, 0, 0, "\x00\x04\x00\x00\x00\x01"), open, accept, write(1, 5), raw(http2.FrameWindowUpdate, 0, 1, "\x00\x00\x00\x01"), write(1, 4),
		}, frames: []string{"DATA 1 len=1", "DATA 1 len=1"}, events: []string{"writable 1"}, code: alive},
		{name: "6.9.1 stream window overflows", play: []func(*wire){open, accept, raw(http2.FrameWindowUpdate, 0, 1, "\x7f\xff\xff\xff")}, frames: []string{"RST_STREAM 1 FLOW_CONTROL_ERROR"}, events: []string{"reset 1 FLOW_CONTROL_ERROR"}, code: alive},
		{name: "6.9.1 connection window overflows", play: []func(*wire){raw(http2.FrameWindowUpdate, 0, 0, "\x7f\xff\xff\xff")}, code: http2.ErrCodeFlowControl},
		{name: "6.9.1 connection window exceeded", play: []func(*wire){func(w *wire) { w.eng.SetLevel(loop.Full) }, open, accept, func(w *wire) {
			w.eng.Holds(16 << 20) // so that no credit is given
			for id := uint32(3); id < 10; id += 2 {
				w.connect(id)
				for range 4 {
					_ = w.fr.WriteData(id, false, make([]byte, 1<<20))
				}
			}
			w.connect(11)
			_ = w.fr.WriteData(11, false, []byte("x"))
		}}, code: http2.ErrCodeFlowControl},
		{name: "6.9.1 DATA that is ignored counts", play: []func(*wire){
			open, accept, func(w *wire) {
				w.eng.Reset(1, http2.ErrCodeCancel)
				_ = w.fr.WriteData(1, false, make([]byte, 1<<20))
				_ = w.feed()
				w.frames()
			},
			func(w *wire) {
				for range 3 {
					_ = w.fr.WriteData(1, false, make([]byte, 1<<20))
				}
			},
		}, frames: []string{"WINDOW_UPDATE 0 +4194304"}, code: alive},
		{name: "6.9.1 stream window exceeded", play: []func(*wire){open, accept, func(w *wire) {
			for range 4 {
				_ = w.fr.WriteData(1, false, make([]byte, 1<<20))
			}
			_ = w.fr.WriteData(1, false, []byte("x"))
		}}, frames: []string{"RST_STREAM 1 FLOW_CONTROL_ERROR", "WINDOW_UPDATE 0 +4194305"}, events: []string{"reset 1 FLOW_CONTROL_ERROR"}, code: alive},
		{name: "6.9.2 SETTINGS open the windows of streams", play: []func(*wire){
			raw(http2.FrameSettings, 0, 0, "\x00\x04\x00\x00\x00\x00"), open, accept, write(1, 5), raw(http2.FrameSettings, 0, 0, "\x00\x04\x00\x00\x00\x03"), write(1, 5),
		}, frames: []string{"SETTINGS 0 ack", "DATA 1 len=3"}, events: []string{"writable 1"}, code: alive},
		{name: "6.9.2 SETTINGS make a window negative", play: []func(*wire){
			open, accept, write(1, 100), raw(http2.FrameSettings, 0, 0, "\x00\x04\x00\x00\x00\x0a"), raw(http2.FrameWindowUpdate, 0, 1, "\x00\x00\x00\x5a"), write(1, 5), raw(http2.FrameWindowUpdate, 0, 1, "\x00\x00\x00\x01"), write(1, 5),
		}, frames: []string{"DATA 1 len=100", "SETTINGS 0 ack", "DATA 1 len=1"}, events: []string{"writable 1"}, code: alive},
		{name: "6.9.2 window overflows by SETTINGS", play: []func(*wire){
			open, accept, raw(http2.FrameWindowUpdate, 0, 1, "\x7f\xff\x00\x00"), raw(http2.FrameSettings, 0, 0, "\x00\x04\x7f\xff\xff\xff"),
		}, code: http2.ErrCodeFlowControl},
		{name: "6.10 CONTINUATION without HEADERS", play: []func(*wire){raw(http2.FrameContinuation, http2.FlagContinuationEndHeaders, 1, "\x82")}, code: http2.ErrCodeProtocol},
		{name: "6.10 CONTINUATION on another stream", play: []func(*wire){raw(http2.FrameHeaders, 0, 1, "\x82"), raw(http2.FrameContinuation, http2.FlagContinuationEndHeaders, 3, "\x82")}, code: http2.ErrCodeProtocol},
		{name: "6.10 CONTINUATION after the end", play: []func(*wire){open, raw(http2.FrameContinuation, http2.FlagContinuationEndHeaders, 1, "\x82")}, events: []string{"request 1 10.0.0.1:80"}, code: http2.ErrCodeProtocol},
		{name: "6.10 CONTINUATION completes a block", play: []func(*wire){func(w *wire) {
			b := w.block(":method", "CONNECT", ":authority", "a:1")
			_ = w.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:1]})
			_ = w.fr.WriteContinuation(1, false, b[1:2])
			_ = w.fr.WriteContinuation(1, true, b[2:])
		}}, events: []string{"request 1 a:1"}, code: alive},
		{name: "8.1 response ends the stream", client: true, play: []func(*wire){clientOpen, func(w *wire) { w.headers(1, true, ":status", "503", "x-ztun-reason", "no") }}, events: []string{"response 1 503 no", "end 1"}, code: alive},
		{name: "8.1 informational response", client: true, play: []func(*wire){clientOpen, func(w *wire) { w.headers(1, false, ":status", "103"); w.headers(1, false, ":status", "200") }}, events: []string{"response 1 200 "}, code: alive},
		{name: "8.1 trailers end the stream", play: []func(*wire){open, accept, func(w *wire) { w.headers(1, true, "a", "b") }}, events: []string{"end 1"}, code: alive},
		{name: "8.1 trailers without end", play: []func(*wire){open, accept, func(w *wire) { w.headers(1, false, "a", "b") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, events: []string{"reset 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.1 trailers with a pseudo-header field", play: []func(*wire){open, accept, func(w *wire) { w.headers(1, true, ":method", "CONNECT") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, events: []string{"reset 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.1 DATA before the response", client: true, play: []func(*wire){clientOpen, raw(http2.FrameData, 0, 1, "x")}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, events: []string{"reset 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.2 upper case", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", "Baggage", "x") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.2.2 connection-specific field", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", "connection", "close") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.2.1 character that is not allowed", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", "baggage", "a\r\nb: c") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.3 pseudo-header twice", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", ":authority", "b:1") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.3 unknown pseudo-header", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", ":x", "y") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.3.1 pseudo-header of a response in a request", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", ":status", "200") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.3 pseudo-header after field", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", "a", "b", ":authority", "a:1") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.3.1 no path", play: []func(*wire){func(w *wire) { w.headers(1, true, ":method", "GET", ":authority", "a:1", ":scheme", "https") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.3.2 no status", client: true, play: []func(*wire){clientOpen, func(w *wire) { w.headers(1, false, "a", "b") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, events: []string{"reset 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.5 with path", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", ":path", "/") }}, frames: []string{"RST_STREAM 1 PROTOCOL_ERROR"}, code: alive},
		{name: "8.5 ended at once", play: []func(*wire){func(w *wire) { w.headers(1, true, ":method", "CONNECT", ":authority", "a:1") }}, events: []string{"request 1 a:1", "end 1"}, code: alive},
		{name: "8.5 other method", play: []func(*wire){func(w *wire) {
			w.headers(1, true, ":method", "GET", ":authority", "a:1", ":path", "/", ":scheme", "https")
		}}, frames: []string{"HEADERS 1 :status=400 end"}, code: alive},
		{name: "8.5 no authority", play: []func(*wire){func(w *wire) { w.headers(1, false, ":method", "CONNECT") }}, frames: []string{"HEADERS 1 :status=400 end", "RST_STREAM 1 NO_ERROR"}, code: alive},
		{name: "8.7 refused before the response", client: true, play: []func(*wire){clientOpen, raw(http2.FrameRSTStream, 0, 1, "\x00\x00\x00\x07")}, events: []string{"reset 1 REFUSED_STREAM refused"}, code: alive},
		{name: "10.5 PING flood", play: []func(*wire){func(w *wire) {
			for range floodBurst + 1 {
				_ = w.fr.WritePing(false, [8]byte{})
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 unread answers", play: []func(*wire){func(w *wire) {
			for w.now = w.now.Add(time.Hour); w.eng.err == nil && len(w.eng.Output()) < 2*maxAcks; w.now = w.now.Add(time.Second) {
				_ = w.eng.Feed(append(appendHeader(nil, 8, http2.FramePing, 0, 0), "12345678"...), w.now) // none is a flood by itself
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 SETTINGS flood", play: []func(*wire){func(w *wire) {
			for range floodBurst + 1 {
				_ = w.fr.WriteSettings()
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 empty DATA flood", play: []func(*wire){open, accept, func(w *wire) {
			for range floodBurst + 1 {
				_ = w.fr.WriteData(1, false, nil)
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 PRIORITY flood", play: []func(*wire){func(w *wire) {
			for range floodBurst + 1 {
				_ = w.fr.WriteRawFrame(http2.FramePriority, 0, 1, []byte("\x00\x00\x00\x00\x10"))
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 GOAWAY flood", play: []func(*wire){func(w *wire) {
			for range floodBurst + 1 {
				_ = w.fr.WriteGoAway(0, http2.ErrCodeNo, nil)
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 flood of refused requests", play: []func(*wire){func(w *wire) {
			for id := uint32(1); id < 2*floodBurst+10; id += 2 {
				w.headers(id, true, ":method", "GET", ":authority", "a:1", ":path", "/", ":scheme", "https")
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 too many settings", play: []func(*wire){raw(http2.FrameSettings, 0, 0, strings.Repeat("\x00\x04\x00\x00\x00\x00", 101))}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 rapid reset", play: []func(*wire){func(w *wire) {
			for id := uint32(1); id < 2*floodBurst+10; id += 2 {
				w.connect(id)
				_ = w.fr.WriteRSTStream(id, http2.ErrCodeCancel)
			}
		}}, events: []string{
			"request 1 10.0.0.1:80", "reset 1 CANCEL", "request 3 10.0.0.1:80", "reset 3 CANCEL", "request 5 10.0.0.1:80", "reset 5 CANCEL",
		}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5 CONTINUATION flood", play: []func(*wire){func(w *wire) {
			_ = w.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1})
			for range maxBlock {
				_ = w.fr.WriteContinuation(1, false, nil)
			}
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5.1 header block too large", play: []func(*wire){func(w *wire) {
			_ = w.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: make([]byte, 100<<10)})
			_ = w.fr.WriteContinuation(1, false, make([]byte, 100<<10))
		}}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5.1 control frame too large", play: []func(*wire){raw(http2.FrameGoAway, 0, 0, strings.Repeat("x", 20<<10))}, code: http2.ErrCodeEnhanceYourCalm},
		{name: "10.5.1 header list too large", play: []func(*wire){func(w *wire) {
			w.headers(1, false, ":method", "CONNECT", ":authority", "a:1", "baggage", strings.Repeat("\xff", 40<<10), "b", strings.Repeat("\xfe", 40<<10))
		}}, frames: []string{"RST_STREAM 1 ENHANCE_YOUR_CALM"}, code: alive},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cfg := EngineConfig{Server: !tt.client}
			if strings.HasPrefix(tt.name, "5.1.2") || strings.Contains(tt.name, "rapid") {
				cfg.Settings.MaxStreams = 3
			}
			w := newWire(t, cfg)
			w.frames()
			for _, f := range tt.play {
				f(w)
			}
			err := w.feed()
			if n := w.out.Len(); n > maxAcks+1<<10 {
				t.Errorf("%d bytes of answers", n)
			}
			frames := w.frames()
			if held := cap(w.eng.buf); held > 4<<10 {
				t.Errorf("%d bytes are kept of frames that are dealt with", held)
			}
			if tt.code != alive {
				var ce *ConnError
				if !errors.As(err, &ce) || ce.Code != tt.code {
					t.Fatalf("Feed = %v, want code %v", err, tt.code)
				}
				last := frames[len(frames)-1]
				if !strings.HasPrefix(last, "GOAWAY 0 ") || !strings.HasSuffix(last, tt.code.String()) {
					t.Errorf("last frame is %q, want GOAWAY with %v", last, tt.code)
				}
				if err2 := w.eng.Feed([]byte("x"), t0); !errors.Is(err2, err) {
					t.Errorf("Feed after the end = %v, want %v", err2, err)
				}
			} else {
				if err != nil {
					t.Fatalf("Feed: %v", err)
				}
				if diff := cmp.Diff(tt.frames, frames); diff != "" {
					t.Errorf("frames (-want +got):\n%s", diff)
				}
			}
			if tt.events != nil || tt.code == alive {
				if diff := cmp.Diff(tt.events, w.rec.take()); diff != "" {
					t.Errorf("events (-want +got):\n%s", diff)
				}
			}
		})
	}
}

// alive is the code of a connection that did not end.
const alive = ^http2.ErrCode(0)
