package node

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/workload"
)

const replaySamples = "../../testdata/replay"

func replayState(t testing.TB) workload.State {
	t.Helper()
	name := filepath.Join(replaySamples, "mesh.yaml")
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	st, err := workload.ParseStatic(name, data)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// replayBytes plays a capture and returns its records as JSON lines, and the report.
func replayBytes(t testing.TB, st workload.State, capture []byte, change func(*ReplayConfig)) (string, *ReplayReport) {
	t.Helper()
	source, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: bytes.NewReader(capture)})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	cfg := ReplayConfig{State: st, Source: source, Emit: func(r ReplayRecord) error {
		if r.Text() == "" {
			t.Errorf("record %d has no text", r.Number())
		}
		return enc.Encode(r)
	}}
	if change != nil {
		change(&cfg)
	}
	report, err := Replay(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return out.String(), report
}

func replaySamplesOf(t testing.TB) map[string][]byte {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(replaySamples, "*.pcap*"))
	if err != nil || len(names) < 15 {
		t.Fatalf("samples %v, %v", names, err)
	}
	files := make(map[string][]byte)
	for _, name := range names {
		if files[filepath.Base(name)], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// Two runs say the same, byte for byte, also on one processor.
func TestReplayIsDeterministic(t *testing.T) {
	st := replayState(t)
	for name, b := range replaySamplesOf(t) {
		t.Run("T1/"+name, func(t *testing.T) {
			first, _ := replayBytes(t, st, b, nil)
			again, _ := replayBytes(t, st, b, nil)
			if diff := cmp.Diff(first, again); diff != "" {
				t.Errorf("second run (-first +second):\n%s", diff)
			}
			before := runtime.GOMAXPROCS(1)
			alone, _ := replayBytes(t, st, b, nil)
			runtime.GOMAXPROCS(before)
			if diff := cmp.Diff(first, alone); diff != "" {
				t.Errorf("with one processor (-several +one):\n%s", diff)
			}
		})
	}
}

// What comes in with the packets of a capture damaged in any way: an end, and no error but of the input.
func TestReplayOfDamagedCaptures(t *testing.T) {
	st := replayState(t)
	files := replaySamplesOf(t)
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	r := rand.New(rand.NewPCG(7, 70))
	for i := range 200 {
		b := damaged(r, files[names[i%len(names)]])
		t.Run(fmt.Sprintf("T3/%d", i), func(t *testing.T) {
			replayBytes(t, st, b, func(c *ReplayConfig) {
				c.Peer = replay.Peer(i % 5)
				c.Checksums = replay.Checksums(i % 2) // auto or off
				c.Decap = i%3 == 0
			})
		})
	}
}

// damaged changes some bytes, lengths, or the end of a capture.
func damaged(r *rand.Rand, b []byte) []byte {
	b = bytes.Clone(b)
	for range 1 + r.IntN(12) {
		at := r.IntN(len(b))
		switch r.IntN(6) {
		case 0:
			b[at] ^= 1 << r.IntN(8)
		case 1:
			b[at] = 0xff
		case 2:
			b[at] = 0
		case 3:
			b[at] = byte(r.Uint32())
		case 4: // a word of a length or count
			at &^= 3
			for j := at; j < min(at+4, len(b)); j++ {
				b[j] = byte(r.Uint32() & r.Uint32())
			}
		case 5: // a piece twice
			n := min(64, len(b)-at)
			b = slices.Insert(b, at, slices.Clone(b[at:at+n])...)
		}
	}
	if r.IntN(4) == 0 {
		b = b[:r.IntN(len(b))]
	}
	return b
}

// FuzzReplay plays any bytes.
func FuzzReplay(f *testing.F) {
	st := replayState(f)
	for _, b := range replaySamplesOf(f) {
		f.Add(b, byte(0))
	}
	f.Fuzz(func(t *testing.T, b []byte, how byte) {
		replayBytes(t, st, b, func(c *ReplayConfig) {
			c.Peer, c.Checksums, c.Decap = replay.Peer(how%5), replay.Checksums(how>>3%3), how&0x80 != 0
		})
	})
}
