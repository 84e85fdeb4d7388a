package hbone

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
)

// TestEngineLevels: what the peer is told as memory gets short and is there again.
func TestEngineLevels(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	start := func(t *testing.T) *wire {
		w := newWire(t, EngineConfig{Server: true})
		_ = w.fr.WriteSettingsAck()
		w.connect(1)
		w.connect(3)
		if err := w.feed(); err != nil {
			t.Fatal(err)
		}
		w.frames()
		return w
	}
	expect := func(t *testing.T, w *wire, what string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, w.frames()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	data := func(t *testing.T, w *wire, id uint32, n int) {
		t.Helper()
		for ; n > 0; n -= mib {
			_ = w.fr.WriteData(id, false, make([]byte, min(n, mib)))
		}
		if err := w.feed(); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("connection credit as bytes are taken", func(t *testing.T) {
		w := start(t)
		w.eng.SetLevel(loop.Tight)
		expect(t, w, "the new window", "SETTINGS 0 INITIAL_WINDOW_SIZE=65536")
		w.eng.SetLevel(loop.Tight)
		expect(t, w, "told once")
		data(t, w, 1, 4*mib) // it had not heard of it
		data(t, w, 3, 3*mib)
		w.eng.Holds(7 * mib)
		expect(t, w, "nothing was taken")
		w.eng.Took(3, 3*mib)
		w.eng.Holds(4 * mib)
		expect(t, w, "3 MiB are not a quarter of the window", "WINDOW_UPDATE 3 +3145728")
		w.eng.Took(1, mib)
		w.eng.Holds(3 * mib)
		expect(t, w, "4 MiB are", "WINDOW_UPDATE 1 +1048576", "WINDOW_UPDATE 0 +4194304")
		w.eng.Reset(1, http2.ErrCodeCancel)
		w.eng.Holds(0)
		expect(t, w, "what a reset stream held is no debt", "RST_STREAM 1 CANCEL")
		w.eng.SetLevel(loop.Calm)
		expect(t, w, "3 MiB are still too little for a frame")
		data(t, w, 3, mib)
		expect(t, w, "credited as it arrives again", "WINDOW_UPDATE 0 +4194304")
	})

	t.Run("what was held in calm times is forgiven", func(t *testing.T) {
		w := start(t)
		for id := uint32(5); id < 41; id += 2 {
			w.connect(id)
		}
		for id := uint32(1); id < 41; id += 2 { // 20 slow readers: 80 MiB in a window of 16
			data(t, w, id, 4*mib)
		}
		w.eng.Holds(80 * mib)
		w.frames()
		w.eng.SetLevel(loop.Tight)
		w.eng.Holds(80 * mib)
		w.connect(41)
		w.frames()
		data(t, w, 41, 4*mib)
		w.eng.Took(41, 4*mib)
		w.eng.Holds(80 * mib)
		expect(t, w, "a quick reader's bytes are credited beside them", "WINDOW_UPDATE 41 +4194304", "WINDOW_UPDATE 0 +4194304")
		data(t, w, 41, 4*mib)
		w.eng.Holds(84 * mib)
		expect(t, w, "what is new and held is not")
		w.eng.Took(1, 4*mib)
		w.eng.Holds(80 * mib)
		expect(t, w, "as much as was taken, whoever had it", "WINDOW_UPDATE 1 +4194304", "WINDOW_UPDATE 0 +4194304")
		w.eng.Took(3, 4*mib)
		w.eng.Holds(76 * mib)
		expect(t, w, "and no more", "WINDOW_UPDATE 3 +4194304")
	})

	t.Run("a peer without credit gets what there is", func(t *testing.T) {
		w := start(t)
		w.eng.SetLevel(loop.Tight)
		for id := uint32(5); id < 11; id += 2 {
			w.connect(id)
		}
		for _, id := range []uint32{1, 3, 5, 7} {
			data(t, w, id, 4*mib)
		}
		w.frames()
		w.eng.Holds(16*mib - 16*kib + 1)
		expect(t, w, "not worth a frame")
		w.eng.Holds(16*mib - 16*kib)
		expect(t, w, "worth one", "WINDOW_UPDATE 0 +16384")
		w.eng.Holds(16*mib - 32*kib)
		expect(t, w, "as much as it has left", "WINDOW_UPDATE 0 +16384")
		w.eng.Holds(16*mib - 64*kib + 1)
		expect(t, w, "less")
		w.eng.SetLevel(loop.Calm) // although nothing arrives that it could go along with
		expect(t, w, "all", "WINDOW_UPDATE 0 +16744448")
	})

	t.Run("streams have 64 KiB once the peer has heard of it", func(t *testing.T) {
		w := start(t)
		data(t, w, 1, 2*mib)
		w.eng.SetLevel(loop.Tight)
		_ = w.fr.WriteSettingsAck()
		data(t, w, 3, 64*kib)
		w.frames()
		w.eng.Took(1, 2*mib-64*kib) // leaves 64 KiB untaken: as much as there may be
		expect(t, w, "no credit that would leave the window at nothing")
		w.eng.Took(1, 16*kib)
		expect(t, w, "all of it, with the first 16 KiB that can be used", "WINDOW_UPDATE 1 +2048000")
		data(t, w, 1, 16*kib)
		expect(t, w, "that is what it had")
		_ = w.fr.WriteData(1, false, []byte("x"))
		_ = w.fr.WriteData(3, false, []byte("x"))
		if err := w.feed(); err != nil {
			t.Fatal(err)
		}
		expect(t, w, "more is an error of the stream", "RST_STREAM 1 FLOW_CONTROL_ERROR", "RST_STREAM 3 FLOW_CONTROL_ERROR")
		w.connect(5)
		data(t, w, 5, 64*kib)
		_ = w.fr.WriteData(5, false, []byte("x"))
		_ = w.feed()
		expect(t, w, "of a new one as well", "RST_STREAM 5 FLOW_CONTROL_ERROR")
	})

	t.Run("full: no credit for a peer that has more than 64 KiB", func(t *testing.T) {
		w := start(t)
		data(t, w, 1, 2*mib)
		data(t, w, 3, 4*mib)
		w.frames()
		w.eng.SetLevel(loop.Full)
		expect(t, w, "the new window", "SETTINGS 0 INITIAL_WINDOW_SIZE=65536")
		w.eng.Took(1, 2*mib)
		w.eng.Took(3, 4*mib)
		expect(t, w, "the one has 2 MiB left, the other nothing", "WINDOW_UPDATE 3 +65536")
		w.eng.SetLevel(loop.Tight)
		expect(t, w, "what was withheld", "WINDOW_UPDATE 1 +2097152", "WINDOW_UPDATE 3 +4128768")
		w.eng.SetLevel(loop.Calm)
		expect(t, w, "nothing new before the answer to the last SETTINGS")
		_ = w.fr.WriteSettingsAck()
		if err := w.feed(); err != nil {
			t.Fatal(err)
		}
		expect(t, w, "then the old window", "SETTINGS 0 INITIAL_WINDOW_SIZE=4194304")
		data(t, w, 1, 4*mib) // which it may use at once
		data(t, w, 3, 4*mib)
		if _, err := w.eng.Write(1, []byte("x")); err != nil {
			t.Errorf("Write = %v: a stream was reset", err)
		}
	})

	t.Run("from the beginning", func(t *testing.T) {
		w := newWire(t, EngineConfig{level: loop.Tight})
		if diff := cmp.Diff("SETTINGS 0 INITIAL_WINDOW_SIZE=65536 MAX_FRAME_SIZE=1048576 MAX_HEADER_LIST_SIZE=16384 ENABLE_PUSH=0", w.frames()[0]); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		w.eng.SetLevel(loop.Calm)
		expect(t, w, "nothing before the answer")
		_ = w.fr.WriteSettingsAck()
		_ = w.feed()
		expect(t, w, "the window of the settings", "SETTINGS 0 INITIAL_WINDOW_SIZE=4194304")
	})

	t.Run("a window that is smaller stays", func(t *testing.T) {
		w := newWire(t, EngineConfig{Server: true, Settings: Settings{StreamWindow: 20000}})
		_ = w.fr.WriteSettingsAck()
		_ = w.feed()
		w.frames()
		w.eng.SetLevel(loop.Full)
		expect(t, w, "nothing to tell")
	})
}
