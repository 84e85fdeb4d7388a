package hbone

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

func TestParseHeaders(t *testing.T) {
	got := parseHeaders([]hpack.HeaderField{
		{Name: ":method", Value: "CONNECT"},
		{Name: ":authority", Value: "a:1"},
		{Name: "baggage", Value: "a=b"},
		{Name: "forwarded", Value: "for=x"},
		{Name: "baggage", Value: "c=d"},
		{Name: "te", Value: "trailers"},
		{Name: "x-else", Value: "ignored"},
	})
	want := parsedHeaders{method: "CONNECT", authority: "a:1", h: Headers{Baggage: "a=b,c=d", Forwarded: "for=x"}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(parsedHeaders{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// FuzzConnectHeaders gives a server arbitrary header blocks: what it accepts is a CONNECT, and it answers everything else
// without losing its place in the compression state.
func FuzzConnectHeaders(f *testing.F) {
	w := &wire{}
	w.henc = hpack.NewEncoder(&w.hbuf)
	good := w.block(":method", "CONNECT", ":authority", "10.0.0.1:80", "baggage", "k8s.namespace.name=a")
	f.Add(good)
	f.Add(w.block(":method", "GET", ":path", "/", ":scheme", "https", ":authority", "a"))
	f.Add(w.block(":method", "CONNECT", ":authority", "a:1", "connection", "close"))
	f.Add([]byte{0x3f, 0xe1, 0x1f})
	f.Fuzz(func(t *testing.T, block []byte) {
		rec := newRecorder()
		e := NewEngine(EngineConfig{Server: true}, rec, t0)
		in := []byte(http2.ClientPreface)
		in = appendHeader(in, 0, http2.FrameSettings, 0, 0)
		in = appendHeader(in, len(block), http2.FrameHeaders, http2.FlagHeadersEndHeaders, 1)
		in = append(in, block...)
		if err := e.Feed(in, t0); err != nil {
			return
		}
		if n := len(rec.requests); n > 1 || n == 1 && e.Streams() != 1 {
			t.Fatalf("%d requests, %d streams: %v", n, e.Streams(), rec.log)
		}
		before := len(rec.requests)
		in = appendHeader(nil, 6, http2.FrameHeaders, http2.FlagHeadersEndHeaders, 3)
		in = append(in, 0x02, 0x01, 'G', 0x01, 0x01, 'a') // literals: :method G, :authority a
		if err := e.Feed(in, t0); err != nil {
			t.Fatalf("a request after it: %v", err)
		}
		if len(rec.requests) != before {
			t.Fatalf("method G was taken for a CONNECT: %v", rec.log)
		}
	})
}
