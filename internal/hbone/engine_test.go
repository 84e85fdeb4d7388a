package hbone

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"ztun.dev/ztun/internal/loop"
)

var t0 = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

// recorder writes down the events of an Engine.
type recorder struct {
	log      []string
	data     map[uint32][]byte
	ended    map[uint32]bool
	requests []uint32
	faults   []http2.ErrCode
	onData   func(id uint32, n int)
}

func newRecorder() *recorder {
	return &recorder{data: make(map[uint32][]byte), ended: make(map[uint32]bool)}
}

func (r *recorder) add(format string, args ...any) {
	r.log = append(r.log, fmt.Sprintf(format, args...))
}

func (r *recorder) take() []string {
	l := r.log
	r.log = nil
	return l
}

func (r *recorder) StreamRequest(id uint32, authority string, h Headers) {
	r.requests = append(r.requests, id)
	r.add("request %d %s", id, authority)
}

func (r *recorder) StreamResponse(id uint32, status int, h Headers) {
	r.add("response %d %d %s", id, status, h.Reason)
}

func (r *recorder) StreamData(id uint32, p []byte) {
	r.data[id] = append(r.data[id], p...)
	if r.onData != nil {
		r.onData(id, len(p))
	}
}

func (r *recorder) StreamEnd(id uint32) {
	r.ended[id] = true
	r.add("end %d", id)
}

func (r *recorder) StreamReset(id uint32, code http2.ErrCode, refused bool) {
	s := fmt.Sprintf("reset %d %v", id, code)
	if refused {
		s += " refused"
	}
	r.log = append(r.log, s)
}
func (r *recorder) StreamFault(code http2.ErrCode) { r.faults = append(r.faults, code) }
func (r *recorder) StreamWritable(id uint32)       { r.add("writable %d", id) }
func (r *recorder) RequestRefused(error)           {}
func (r *recorder) PeerSettings(maxStreams uint32) {}
func (r *recorder) PeerGoAway(code http2.ErrCode)  { r.add("goaway %v", code) }

// A wire is an Engine with a peer that is played frame by frame.
type wire struct {
	t    *testing.T
	eng  *Engine
	rec  *recorder
	fr   *http2.Framer // writes into in, reads from out
	in   bytes.Buffer
	out  bytes.Buffer
	henc *hpack.Encoder
	hbuf bytes.Buffer
	now  time.Time
}

func newWire(t *testing.T, cfg EngineConfig) *wire {
	t.Helper()
	w := &wire{t: t, rec: newRecorder(), now: t0}
	w.eng = NewEngine(cfg, w.rec, t0)
	w.fr = http2.NewFramer(&w.in, &w.out)
	w.fr.AllowIllegalWrites = true
	w.fr.SetMaxReadFrameSize(1<<24 - 1)
	w.fr.ReadMetaHeaders = hpack.NewDecoder(tableSize, nil)
	w.henc = hpack.NewEncoder(&w.hbuf)
	if cfg.Server {
		w.in.WriteString(http2.ClientPreface)
	}
	if err := w.fr.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	if err := w.feed(); err != nil {
		t.Fatal(err)
	}
	if !cfg.Server {
		if got := string(w.out.Next(len(http2.ClientPreface))); got != http2.ClientPreface {
			t.Fatalf("preface = %q", got)
		}
	}
	return w
}

// feed gives the engine what was written with fr, and collects its output.
func (w *wire) feed() error {
	p := bytes.Clone(w.in.Bytes())
	w.in.Reset()
	err := w.eng.Feed(p, w.now)
	w.out.Write(w.eng.Output())
	w.eng.Sent()
	return err
}

// frames returns the frames that the engine sent, in words.
func (w *wire) frames() []string {
	w.t.Helper()
	w.out.Write(w.eng.Output())
	w.eng.Sent()
	var got []string
	for w.out.Len() > 0 {
		f, err := w.fr.ReadFrame()
		if err != nil {
			w.t.Fatalf("output is no frame: %v", err)
		}
		h := f.Header()
		s := fmt.Sprintf("%v %d", h.Type, h.StreamID)
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if f.IsAck() {
				s += " ack"
			} else {
				_ = f.ForeachSetting(func(set http2.Setting) error { s += fmt.Sprintf(" %v=%d", set.ID, set.Val); return nil })
			}
		case *http2.PingFrame:
			if f.IsAck() {
				s += " ack"
			}
			s += fmt.Sprintf(" %q", f.Data[:])
		case *http2.GoAwayFrame:
			s += fmt.Sprintf(" last=%d %v", f.LastStreamID, f.ErrCode)
		case *http2.RSTStreamFrame:
			s += fmt.Sprintf(" %v", f.ErrCode)
		case *http2.WindowUpdateFrame:
			s += fmt.Sprintf(" +%d", f.Increment)
		case *http2.DataFrame:
			s += fmt.Sprintf(" len=%d", len(f.Data()))
			if f.StreamEnded() {
				s += " end"
			}
		case *http2.MetaHeadersFrame:
			for _, hf := range f.Fields {
				s += fmt.Sprintf(" %s=%s", hf.Name, hf.Value)
			}
			if f.StreamEnded() {
				s += " end"
			}
		}
		got = append(got, s)
	}
	return got
}

func (w *wire) block(fields ...string) []byte {
	w.hbuf.Reset()
	for i := 0; i < len(fields); i += 2 {
		if err := w.henc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}); err != nil {
			w.t.Fatal(err)
		}
	}
	return bytes.Clone(w.hbuf.Bytes())
}

func (w *wire) headers(id uint32, end bool, fields ...string) {
	w.t.Helper()
	err := w.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: w.block(fields...), EndHeaders: true, EndStream: end})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *wire) connect(id uint32) {
	w.headers(id, false, ":method", "CONNECT", ":authority", "10.0.0.1:80", "baggage", "")
}

func TestEnginePreface(t *testing.T) {
	client := NewEngine(EngineConfig{}, newRecorder(), t0)
	server := NewEngine(EngineConfig{Server: true}, newRecorder(), t0)
	w := &wire{t: t, rec: newRecorder(), eng: client}
	w.fr = http2.NewFramer(io.Discard, &w.out)
	w.out.Write(client.Output()[len(http2.ClientPreface):])
	client.Sent()
	want := []string{
		"SETTINGS 0 INITIAL_WINDOW_SIZE=4194304 MAX_FRAME_SIZE=1048576 MAX_HEADER_LIST_SIZE=16384 ENABLE_PUSH=0",
		"WINDOW_UPDATE 0 +16711681",
	}
	if diff := cmp.Diff(want, w.frames()); diff != "" {
		t.Errorf("client (-want +got):\n%s", diff)
	}
	w.eng = server
	want = []string{
		"SETTINGS 0 INITIAL_WINDOW_SIZE=4194304 MAX_FRAME_SIZE=1048576 MAX_HEADER_LIST_SIZE=65536 MAX_CONCURRENT_STREAMS=200",
		"WINDOW_UPDATE 0 +16711681",
	}
	if diff := cmp.Diff(want, w.frames()); diff != "" {
		t.Errorf("server (-want +got):\n%s", diff)
	}
}

func TestEngineRequestHeaders(t *testing.T) {
	h := Headers{Forwarded: `for="10.244.2.9:41234"`, Traceparent: "00-1-2-00"}
	through := h
	through.ForwardedNetwork, through.CrossNetwork = "n", true
	unnamed := h
	unnamed.CrossNetwork = true
	const want = `HEADERS 1 :method=CONNECT :authority=10.244.1.7:8080 baggage= forwarded=for="10.244.2.9:41234" traceparent=00-1-2-00`
	tests := []struct {
		name    string
		headers Headers
		want    string
	}{
		{"DP-64 DP-66 all that there is", h, want},
		{"DP-67 through a gateway", through, want + " x-forwarded-network=n"},
		{"DP-67 through a gateway, of a network without a name", unnamed, want + " x-forwarded-network="},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWire(t, EngineConfig{})
			w.frames()
			if _, err := w.eng.Open("10.244.1.7:8080", tt.headers); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{tt.want}, w.frames()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestEngineStreamLimit: more streams than were offered are refused, and the connection goes on.
func TestEngineStreamLimit(t *testing.T) {
	t.Run("DP-110", func(t *testing.T) {
		w := newWire(t, EngineConfig{Server: true})
		w.frames()
		const limit = 200
		id := func(n int) uint32 { return uint32(2*n - 1) }
		for n := 1; n <= limit+1; n++ {
			w.connect(id(n))
		}
		if err := w.feed(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"RST_STREAM 401 REFUSED_STREAM"}, w.frames()); diff != "" {
			t.Errorf("of 201 streams (-want +got):\n%s", diff)
		}
		if n := len(w.rec.requests); n != limit || w.rec.requests[limit-1] != id(limit) {
			t.Errorf("%d requests, want those of the first %d streams", n, limit)
		}
		_ = w.eng.Respond(1, 200, Headers{}, false)
		w.eng.SetupDone(1)
		_ = w.fr.WriteRSTStream(1, http2.ErrCodeCancel)
		w.connect(id(limit + 2))
		if err := w.feed(); err != nil {
			t.Fatal(err)
		}
		if n := len(w.rec.requests); n != limit+1 {
			t.Error("a stream was refused although another had ended")
		}
	})
}

func TestEngineWindows(t *testing.T) {
	w := newWire(t, EngineConfig{})
	id, err := w.eng.Open("a:1", Headers{})
	if err != nil {
		t.Fatal(err)
	}
	other, err := w.eng.Open("a:1", Headers{})
	if err != nil {
		t.Fatal(err)
	}
	w.frames()
	const share = 65535/2 + 1 // of the initial window, for one stream that is not credited
	n, err := w.eng.Write(id, make([]byte, 100_000))
	if n != share || err != nil {
		t.Fatalf("Write = %d, %v; want %d", n, err, share)
	}
	if _, err := w.eng.Write(id, []byte("x")); !errors.Is(err, loop.ErrAgain) {
		t.Fatalf("Write = %v, want ErrAgain", err)
	}
	const bulk = 65535/2 + 1 + 65535*3/8 // of the initial window, for all that is bulk
	if n, err := w.eng.Write(other, make([]byte, 100_000)); n != bulk-share || err != nil {
		t.Fatalf("Write = %d, %v; want what bulk may use of the initial window", n, err)
	}
	want := []string{"DATA 1 len=16384", "DATA 1 len=16384", "DATA 3 len=16384", "DATA 3 len=8191"}
	if diff := cmp.Diff(want, w.frames()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	_ = w.fr.WriteWindowUpdate(1, 7)
	_ = w.feed()
	if got := w.rec.take(); got != nil {
		t.Errorf("events %v while the connection window is used up", got)
	}
	_ = w.fr.WriteWindowUpdate(0, 5)
	_ = w.feed()
	if diff := cmp.Diff([]string{"writable 1", "writable 3"}, w.rec.take()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n, err := w.eng.Write(id, make([]byte, 100)); n != 5 || err != nil {
		t.Errorf("Write = %d, %v; want 5: what fits", n, err)
	}
	// SETTINGS may make a window negative.
	_ = w.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1000})
	_ = w.fr.WriteWindowUpdate(0, 1<<20)
	_ = w.fr.WriteWindowUpdate(1, 30000)
	if err := w.feed(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.eng.Write(id, []byte("x")); !errors.Is(err, loop.ErrAgain) {
		t.Errorf("Write = %v, want ErrAgain: the window is negative", err)
	}
}

func TestEngineCredit(t *testing.T) {
	w := newWire(t, EngineConfig{Server: true})
	w.connect(1)
	_ = w.feed()
	w.frames()
	for range 4 {
		_ = w.fr.WriteData(1, false, make([]byte, 1<<20))
	}
	if err := w.feed(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"WINDOW_UPDATE 0 +4194304"}, w.frames()); diff != "" {
		t.Errorf("connection credit as bytes arrive (-want +got):\n%s", diff)
	}
	w.eng.Took(1, 1<<20-1)
	if got := w.frames(); got != nil {
		t.Errorf("frames %v before a quarter of the window was taken", got)
	}
	w.eng.Took(1, 1)
	if diff := cmp.Diff([]string{"WINDOW_UPDATE 1 +1048576"}, w.frames()); diff != "" {
		t.Errorf("stream credit as bytes are taken (-want +got):\n%s", diff)
	}
}

func TestEngineKeepalive(t *testing.T) {
	w := newWire(t, EngineConfig{})
	w.frames()
	tick := func(after time.Duration) error {
		w.now = t0.Add(after)
		return w.eng.Tick(w.now)
	}
	if got, want := w.eng.Deadline(), t0.Add(10*time.Second); !got.Equal(want) {
		t.Fatalf("Deadline = %v, want %v", got, want)
	}
	w.now = t0.Add(5 * time.Second)
	_ = w.fr.WriteRawFrame(0x77, 0, 0, nil)
	_ = w.feed()
	if err := tick(10 * time.Second); err != nil || w.frames() != nil {
		t.Error("a peer that sends was asked whether it lives")
	}
	if err := tick(15 * time.Second); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{`PING 0 "ztunlive"`}, w.frames()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := tick(34 * time.Second); err != nil {
		t.Fatal(err)
	}
	_ = w.fr.WritePing(true, keepalivePing)
	_ = w.feed()
	if err := tick(44 * time.Second); err != nil {
		t.Fatal(err)
	}
	w.frames()
	if err := tick(64 * time.Second); err == nil {
		t.Error("a dead peer was not found")
	}
}

func TestEngineDrain(t *testing.T) {
	w := newWire(t, EngineConfig{Server: true})
	w.connect(1)
	_ = w.feed()
	w.frames()
	w.eng.Drain()
	if diff := cmp.Diff([]string{"GOAWAY 0 last=2147483647 NO_ERROR", `PING 0 "ztunlast"`}, w.frames()); diff != "" {
		t.Errorf("first (-want +got):\n%s", diff)
	}
	w.connect(3) // was under way
	_ = w.fr.WritePing(true, drainPing)
	w.connect(5) // too late
	_ = w.feed()
	if diff := cmp.Diff([]string{"GOAWAY 0 last=3 NO_ERROR"}, w.frames()); diff != "" {
		t.Errorf("second (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"request 1 10.0.0.1:80", "request 3 10.0.0.1:80"}, w.rec.take()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	for _, id := range []uint32{1, 3} {
		if w.eng.Drained() {
			t.Fatal("drained with open streams")
		}
		w.eng.SetupDone(id)
		w.eng.Reset(id, http2.ErrCodeCancel)
	}
	if !w.eng.Drained() {
		t.Error("not drained")
	}
}

// TestEngineRoundRobin: those that found no room are told in the order in which they came, and a small write of a stream that
// had no share yet does not wait for room at all.
func TestEngineRoundRobin(t *testing.T) {
	w := newWire(t, EngineConfig{})
	_ = w.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	_ = w.fr.WriteWindowUpdate(0, 1<<24)
	_ = w.feed()
	for range 3 {
		if _, err := w.eng.Open("a:1", Headers{}); err != nil {
			t.Fatal(err)
		}
	}
	w.frames()
	big := make([]byte, 1<<20)
	if _, err := w.eng.Write(3, big); err != nil {
		t.Fatal(err)
	}
	if n, err := w.eng.Write(5, []byte("small")); n != 5 || err != nil {
		t.Errorf("small write beside a bulk one = %d, %v", n, err)
	}
	for _, id := range []uint32{3, 5} {
		if _, err := w.eng.Write(id, big); !errors.Is(err, loop.ErrAgain) {
			t.Fatalf("Write on %d = %v, want ErrAgain", id, err)
		}
	}
	if n := len(w.eng.Output()); n > outputHard {
		t.Errorf("output of %d bytes", n)
	}
	w.eng.Sent()
	if diff := cmp.Diff([]string{"writable 3", "writable 5"}, w.rec.take()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestEnginesModel lets two engines talk, with random cuts and a random schedule: on every stream the bytes arrive in order
// and whole, and its end after them.
func TestEnginesModel(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1))
			set := Settings{StreamWindow: uint32(1 + r.IntN(200_000)), FrameSize: uint32(1 << (14 + r.IntN(7)))}
			cr, sr := newRecorder(), newRecorder()
			side := [2]*Engine{NewEngine(EngineConfig{Settings: set}, cr, t0), NewEngine(EngineConfig{Server: true, Settings: set}, sr, t0)}
			recs := [2]*recorder{cr, sr}
			var flight [2][]byte // to side i
			owed := [2]map[uint32]int{{}, {}}
			for i := range recs {
				recs[i].onData = func(id uint32, n int) { owed[i][id] += n }
			}
			type half struct{ sent, total int }
			sends := [2]map[uint32]*half{{}, {}}
			for range 1 + r.IntN(5) {
				id, err := side[0].Open("a:1", Headers{})
				if err != nil {
					t.Fatal(err)
				}
				sends[0][id] = &half{total: r.IntN(1 << 20)}
				sends[1][id] = &half{total: r.IntN(1 << 20)}
			}
			ids := make([]uint32, 0, len(sends[0]))
			for id := uint32(1); sends[0][id] != nil; id += 2 {
				ids = append(ids, id)
			}
			pattern := func(i int, id uint32, off, n int) []byte {
				b := make([]byte, n)
				for k := range b {
					b[k] = byte((off+k)*7 + (off+k)>>8 + int(id) + i)
				}
				return b
			}
			done := func() bool {
				for i := range 2 {
					for _, id := range ids {
						if !recs[i].ended[id] {
							return false
						}
					}
				}
				return true
			}
			for step := 0; !done(); step++ {
				if step > 2_000_000 {
					t.Fatal("stuck")
				}
				i := r.IntN(2)
				switch r.IntN(5) {
				case 0, 1: // deliver
					if n := min(len(flight[i]), 1+r.IntN(1<<r.IntN(18))); n > 0 {
						if err := side[i].Feed(flight[i][:n], t0); err != nil {
							t.Fatal(err)
						}
						flight[i] = flight[i][n:]
					}
					for _, id := range sr.requests {
						if err := side[1].Respond(id, 200, Headers{}, false); err != nil {
							t.Fatal(err)
						}
						side[1].SetupDone(id)
					}
					sr.requests = nil
				case 2: // take
					for id, n := range owed[i] {
						k := r.IntN(n + 1)
						side[i].Took(id, k)
						owed[i][id] -= k
					}
				case 3: // send
					flight[1-i] = append(flight[1-i], side[i].Output()...)
					side[i].Sent()
				case 4: // write
					id := ids[r.IntN(len(ids))]
					h := sends[i][id]
					if s := side[i].streams[id]; s == nil || !s.answered || s.sentEnd {
						continue
					}
					if h.sent == h.total {
						if err := side[i].CloseWrite(id); err != nil {
							t.Fatal(err)
						}
						continue
					}
					n := min(h.total-h.sent, 1+r.IntN(100_000))
					n, err := side[i].Write(id, pattern(i, id, h.sent, n))
					if err != nil && !errors.Is(err, loop.ErrAgain) {
						t.Fatal(err)
					}
					h.sent += n
				}
			}
			for i := range 2 {
				for _, id := range ids {
					if !bytes.Equal(recs[1-i].data[id], pattern(i, id, 0, sends[i][id].total)) {
						t.Errorf("stream %d from %d: %d bytes arrived differ from the %d sent", id, i, len(recs[1-i].data[id]), sends[i][id].total)
					}
				}
				if n := side[i].Streams(); n != 0 {
					t.Errorf("%d streams left", n)
				}
			}
		})
	}
}

func TestEngineDataAllocates(t *testing.T) {
	w := newWire(t, EngineConfig{Server: true, Settings: Settings{StreamWindow: maxWindow, ConnectionWindow: maxWindow}})
	w.connect(1)
	_ = w.feed()
	_ = w.eng.Respond(1, 200, Headers{}, false)
	w.frames()
	w.rec.data = nil
	sink := &discard{recorder: w.rec}
	w.eng.ev = sink
	_ = w.fr.WriteData(1, false, make([]byte, 1000))
	frame := bytes.Clone(w.in.Bytes())
	w.in.Reset()
	if n := testing.AllocsPerRun(1000, func() {
		if err := w.eng.Feed(frame, t0); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations per DATA frame received", n)
	}
	_ = w.fr.WriteWindowUpdate(0, 1<<30)
	_ = w.fr.WriteWindowUpdate(1, 1<<30)
	if err := w.feed(); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 1000)
	if n := testing.AllocsPerRun(1000, func() {
		if _, err := w.eng.Write(1, p); err != nil {
			t.Fatal(err)
		}
		w.eng.Sent()
	}); n != 0 {
		t.Errorf("%v allocations per DATA frame sent", n)
	}
}

// discard is a recorder that keeps no data.
type discard struct{ *recorder }

func (*discard) StreamData(uint32, []byte) {}

func FuzzEngineFeed(f *testing.F) {
	for _, server := range []bool{true, false} {
		w := &wire{rec: newRecorder()}
		w.henc = hpack.NewEncoder(&w.hbuf)
		w.fr = http2.NewFramer(&w.in, nil)
		if server {
			w.in.WriteString(http2.ClientPreface)
		}
		_ = w.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 9})
		fields := []string{":status", "200"}
		if server {
			fields = []string{":method", "CONNECT", ":authority", "10.0.0.1:80", "baggage", "k=v"}
		}
		for i := 0; i < len(fields); i += 2 {
			_ = w.henc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
		}
		_ = w.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: w.hbuf.Bytes(), EndHeaders: true})
		_ = w.fr.WriteDataPadded(1, false, []byte("hello"), make([]byte, 3))
		_ = w.fr.WriteWindowUpdate(1, 5)
		_ = w.fr.WritePing(false, [8]byte{1})
		_ = w.fr.WriteData(1, true, []byte("x"))
		_ = w.fr.WriteRSTStream(1, http2.ErrCodeCancel)
		_ = w.fr.WriteGoAway(1, http2.ErrCodeNo, nil)
		f.Add(server, uint8(3), w.in.Bytes())
	}
	f.Fuzz(func(t *testing.T, server bool, cut uint8, p []byte) {
		run := func(cut int) (*recorder, []byte, error) {
			rec := newRecorder()
			app := &eager{recorder: rec}
			e := NewEngine(EngineConfig{Server: server}, app, t0)
			app.e = e
			if !server {
				_, _ = e.Open("a:1", Headers{})
			}
			for rest := p; len(rest) > 0; {
				n := len(rest)
				if cut > 0 {
					n = min(n, cut)
				}
				err := e.Feed(rest[:n], t0)
				if held, most := cap(e.buf), 4*(64<<10); held > most {
					t.Fatalf("%d bytes are kept of frames", held)
				}
				if err != nil {
					var ce *ConnError
					if !errors.As(err, &ce) || !bytes.Contains(e.Output(), []byte(ce.Reason)) {
						t.Fatalf("%v, and no GOAWAY that says so", err)
					}
					return rec, e.Output(), err
				}
				rest = rest[n:]
			}
			if n := len(e.streams); server && n > int(e.cfg.Settings.MaxStreams) {
				t.Fatalf("%d streams", n)
			}
			return rec, e.Output(), nil
		}
		whole, out, err := run(0)
		cutRec, _, cutErr := run(int(cut) + 1)
		if (err == nil) != (cutErr == nil) {
			t.Fatalf("whole: %v; cut: %v", err, cutErr)
		}
		if diff := cmp.Diff(whole.log, cutRec.log); diff != "" {
			t.Fatalf("events depend on the cut:\n%s", diff)
		}
		for id, b := range whole.data {
			if !bytes.Equal(b, cutRec.data[id]) {
				t.Fatalf("data depends on the cut")
			}
		}
		if len(out) > 8*len(p)+maxAcks+1024 {
			t.Fatalf("%d bytes of output for %d of input", len(out), len(p))
		}
	})
}

// eager is a recorder that accepts every request and takes all data at once.
type eager struct {
	*recorder
	e *Engine
}

func (r *eager) StreamRequest(id uint32, authority string, h Headers) {
	r.recorder.StreamRequest(id, authority, h)
	_ = r.e.Respond(id, 200, Headers{}, false)
	r.e.SetupDone(id)
}

func (r *eager) StreamData(id uint32, p []byte) {
	r.recorder.StreamData(id, p)
	r.e.Took(id, len(p))
}
