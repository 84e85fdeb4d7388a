package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/replay"
)

// A ring asks for a capture without a size of its own, and keeps the last files of it.
func TestCaptureOfARing(t *testing.T) {
	const packets, packet = 20, 200
	var query string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		query = r.URL.RawQuery
		w.Header().Set("Trailer", "X-Ztun-Captured, X-Ztun-Dropped")
		out := replay.NewWriter(w, "test", 0, "pod")
		for i := range packets {
			if err := out.Packet(0, time.Unix(1_772_366_400+int64(i), 0), replay.DirOutbound, make([]byte, packet), packet, ""); err != nil {
				t.Error(err)
			}
		}
		w.Header().Set("X-Ztun-Captured", fmt.Sprint(packets))
		w.Header().Set("X-Ztun-Dropped", "0")
	}))
	defer server.Close()
	for _, tt := range []struct {
		name string
		args []string
		want []string
	}{
		{"P8 by size", []string{"--files", "2", "--bytes", "1100"}, []string{"ring-000004.pcapng", "ring-000005.pcapng"}},
		{"P8 by time", []string{"--files", "3", "--every", "5s"}, []string{"ring-000002.pcapng", "ring-000003.pcapng", "ring-000004.pcapng"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			var out, errs bytes.Buffer
			args := append([]string{"capture", "--admin", server.Listener.Addr().String(), "-w", filepath.Join(dir, "ring.pcapng")}, tt.args...)
			if code := run(t.Context(), args, nil, &out, &errs); code != exitOK || errs.String() != "ztun: 20 packets captured, 0 dropped\n" {
				t.Fatalf("exit code %d, stderr %s", code, &errs)
			}
			if want := "bytes=1099511627776&pod=&point=pod&seconds=60"; query != want {
				t.Errorf("asked for %s, want %s", query, want)
			}
			got, err := filepath.Glob(filepath.Join(dir, "*"))
			if err != nil {
				t.Fatal(err)
			}
			for i := range got {
				got[i] = filepath.Base(got[i])
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
