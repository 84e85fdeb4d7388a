package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
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
		w.Header().Set("Content-Type", captureType)
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

// What answers may be no ztun, or go away: a capture that is whole is told from one that is not.
func TestCaptureThatIsNotWhole(t *testing.T) {
	whole := func(w http.ResponseWriter) {
		w.Header().Set("X-Ztun-Captured", "0")
		w.Header().Set("X-Ztun-Dropped", "0")
	}
	for _, tt := range []struct {
		name, kind string
		end        func(w http.ResponseWriter)
		code       int
		want       string
		written    bool
	}{
		{"whole", captureType, whole, exitOK, "ztun: 0 packets captured, 0 dropped\n", true},
		{"a web page", "text/html; charset=utf-8", whole, exitFailure, "is no ztun: it sends \"text/html; charset=utf-8\"; --admin says where one is\n", false},
		{"a ztun that ends", captureType, func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, exitFailure, "the running ztun went away after 40 bytes: what it had sent is in ", true},
		{"a capture that ends early", captureType, func(http.ResponseWriter) {}, exitFailure, "the running ztun went away after 40 bytes: what it had sent is in ", true},
	} {
		for _, ring := range []bool{false, true} {
			t.Run(fmt.Sprintf("P8/%s/ring=%v", tt.name, ring), func(t *testing.T) {
				server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", tt.kind)
					w.Header().Set("Trailer", "X-Ztun-Captured, X-Ztun-Dropped")
					replay.NewWriter(w, "test", 0)
					w.(http.Flusher).Flush()
					tt.end(w)
				}))
				defer server.Close()
				dir := t.TempDir()
				var out, errs bytes.Buffer
				args := []string{"capture", "--admin", server.Listener.Addr().String(), "-w", filepath.Join(dir, "x.pcapng")}
				if ring {
					args = append(args, "--files", "2")
				}
				if code := run(t.Context(), args, nil, &out, &errs); code != tt.code || !strings.Contains(errs.String(), tt.want) {
					t.Errorf("exit code %d, want %d; stderr %q, want %q in it", code, tt.code, &errs, tt.want)
				}
				if files, err := os.ReadDir(dir); err != nil || (len(files) > 0) != tt.written {
					t.Errorf("written: %v, %v", files, err)
				}
			})
		}
	}
}

// A capture that a limit ends before its time says which one, and when.
func TestCaptureThatEndsEarly(t *testing.T) {
	for _, tt := range []struct {
		name, limit, seconds string
		args                 []string
		want                 string
	}{
		{"by its time", "", "", nil, ""},
		{"by its size", "bytes", "0.271", []string{"--duration", "3s"}, "; ended early: 64 MiB (--bytes) reached after 0.3 s of 3 s"},
		{"by another size", "bytes", "12.04", []string{"--bytes", "1000000"}, "; ended early: 1000000 bytes (--bytes) reached after 12.0 s of 60 s"},
		{"by the number of packets", "packets", "0.01", []string{"--packets", "7"}, "; ended early: 7 packets (--packets) reached after 0.0 s of 60 s"},
		{"a ring", "bytes", "70000", []string{"--files", "2", "--duration", "24h"}, "; ended early: 1 TiB, the most that a ztun sends, reached after 70000.0 s of 86400 s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", captureType)
				w.Header().Set("Trailer", "X-Ztun-Captured, X-Ztun-Dropped, X-Ztun-Limit, X-Ztun-Seconds")
				replay.NewWriter(w, "test", 0, "pod")
				for key, value := range map[string]string{"X-Ztun-Captured": "1774", "X-Ztun-Dropped": "0", "X-Ztun-Limit": tt.limit, "X-Ztun-Seconds": tt.seconds} {
					if value != "" {
						w.Header().Set(key, value)
					}
				}
			}))
			defer server.Close()
			var out, errs bytes.Buffer
			args := append([]string{"capture", "--admin", server.Listener.Addr().String(), "-w", filepath.Join(t.TempDir(), "x.pcapng")}, tt.args...)
			code := run(t.Context(), args, nil, &out, &errs)
			if want := "ztun: 1774 packets captured, 0 dropped" + tt.want + "\n"; code != exitOK || errs.String() != want {
				t.Errorf("exit code %d, stderr %q, want %q", code, &errs, want)
			}
		})
	}
}
