package replay

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// ringStream is a capture of packets a second apart, on two interfaces in turn, with counts at its end.
func ringStream(t *testing.T, packets int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := NewWriter(&b, "test", 0, "pod", "tunnel")
	for i := range packets {
		if err := w.Packet(i%2, epoch.Add(time.Duration(i)*time.Second), DirInbound, meshHTTP()[0].ip, 60, "flow 1"); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Statistics(0, epoch, uint64(packets), 0); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// A ring has the last packets, in files that are each a capture of its own.
func TestRing(t *testing.T) {
	const packets = 10
	stream := ringStream(t, packets)
	one := (len(stream) - len(ringStream(t, 0))) / packets
	head := len(ringStream(t, 1)) - one // with the counts, which is a little more than the header
	for _, tt := range []struct {
		name  string
		cfg   RingConfig
		chunk int // bytes that are written at a time
		want  map[string]int
	}{
		{"P8 by size", RingConfig{Files: 3, Bytes: int64(head + 2*one)}, 7, map[string]int{"c-000003.pcapng": 2, "c-000004.pcapng": 2, "c-000005.pcapng": 2}},
		{"P8 by time", RingConfig{Files: 2, Bytes: 1 << 20, Every: 4 * time.Second}, len(stream), map[string]int{"c-000002.pcapng": 4, "c-000003.pcapng": 2}},
		{"P8 a packet that is longer than a file", RingConfig{Files: 2, Bytes: 1}, 1, map[string]int{"c-000009.pcapng": 1, "c-000010.pcapng": 1}},
		{"P8 one is enough", RingConfig{Files: 2, Bytes: 1 << 20}, 100, map[string]int{"c-000001.pcapng": 10}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			tt.cfg.Path = filepath.Join(dir, "c.pcapng")
			r, err := NewRing(tt.cfg)
			if err != nil {
				t.Fatal(err)
			}
			for b := stream; len(b) > 0; {
				n := min(tt.chunk, len(b))
				if _, err := r.Write(b[:n]); err != nil {
					t.Fatal(err)
				}
				b = b[n:]
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			s, err := NewSource(SourceConfig{Paths: []string{dir}})
			if err != nil {
				t.Fatal(err)
			}
			got := make(map[string]int)
			last := time.Duration(-1)
			for p := new(Packet); s.Next(p) == nil; {
				got[filepath.Base(s.Name())]++
				at := time.Unix(0, p.Time).Sub(epoch)
				if want := []string{"pod", "tunnel"}[int(at/time.Second)%2]; p.Interface != want || last >= 0 && at != last+time.Second {
					t.Errorf("packet of %s at %v after %v, want it of %s", p.Interface, at, last, want)
				}
				last = at
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || last != (packets-1)*time.Second || s.Problems() != nil {
				t.Errorf("the last packet is of %v, problems %v (-want +got):\n%s", last, s.Problems(), diff)
			}
		})
	}
}

func TestRingRefuses(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "old-000001.pcapng"), []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		cfg  RingConfig
		want string
	}{
		{RingConfig{Files: 2, Bytes: 1}, "Path is required"},
		{RingConfig{Path: "x", Files: 1, Bytes: 1}, "Files: 1 is less than 2"},
		{RingConfig{Path: "x", Files: 2}, "Bytes: 0 is not positive"},
		{RingConfig{Path: filepath.Join(dir, "old.pcapng"), Files: 2, Bytes: 1}, "old-000001.pcapng is there already: remove it, or name another file"},
		{RingConfig{Path: filepath.Join(dir, "none", "x"), Files: 2, Bytes: 1}, "no such file or directory"},
	} {
		if _, err := NewRing(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.cfg, err, tt.want)
		}
	}
	for _, stream := range [][]byte{[]byte("this is something else"), {6, 0, 0, 0, 12, 0, 0, 0, 12, 0, 0, 0}} {
		r, err := NewRing(RingConfig{Path: filepath.Join(t.TempDir(), "x"), Files: 2, Bytes: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Write(stream); err == nil || !strings.Contains(err.Error(), "not that of a ztun") {
			t.Errorf("%q: %v", stream, err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
