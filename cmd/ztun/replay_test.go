package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/workload"
)

const replaySamples = "../../testdata/replay"

func goldenOf(capture, suffix string) string {
	return filepath.Join(replaySamples, "golden", filepath.Base(capture)+suffix)
}

// replayed runs ztun replay on the mesh of the samples.
func replayed(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), append([]string{"replay", "--state", filepath.Join(replaySamples, "mesh.yaml")}, args...), nil, &out, &errs)
	return out.String(), errs.String(), code
}

// Each sample capture gives what its golden files have; -update writes them.
func TestReplayOfSamples(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(replaySamples, "*.pcap*"))
	if err != nil || len(names) < 15 {
		t.Fatalf("samples %v, %v", names, err)
	}
	partly := map[string]bool{"truncated.pcap": true, "unsupported.pcapng": true}
	for _, name := range names {
		base := filepath.Base(name)
		t.Run("T1/"+base, func(t *testing.T) {
			want := exitOK
			if partly[base] {
				want = exitPartly
			}
			for form, suffix := range map[string]string{"json": ".jsonl", "text": ".txt"} {
				golden := goldenOf(name, suffix)
				got, stderr, code := replayed(t, "-o", form, name)
				if code != want {
					t.Errorf("exit code %d, want %d; stderr %s", code, want, stderr)
				}
				if *update {
					if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				b, err := os.ReadFile(golden)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(b), got); diff != "" {
					t.Errorf("%s (-golden +got):\n%s", golden, diff)
				}
			}
			for _, args := range [][]string{{".jsonl"}, {".txt"}, {".jsonl", "-o", "json"}, {".txt", "-o", "text"}} {
				if stdout, stderr, code := replayed(t, append(args[1:], "--expect", goldenOf(name, args[0]), name)...); code != want || stdout != "" {
					t.Errorf("--expect %s: exit code %d, want %d; stdout %s, stderr %s", args, code, want, stdout, stderr)
				}
			}
		})
	}
}

// All link types and formats of the same packets say the same.
func TestReplayDoesNotDependOnTheFormat(t *testing.T) {
	for _, name := range []string{"vlan.pcap", "vxlan.pcap", "cooked-v1.pcap", "cooked-v2.pcap", "nanoseconds.pcap", "compressed.pcap.gz"} {
		t.Run("T1/"+name, func(t *testing.T) {
			args := []string{"--expect", goldenOf("mesh-http.pcap", ".jsonl"), filepath.Join(replaySamples, name)}
			if name == "vxlan.pcap" {
				args = append(args, "--decap")
			}
			stdout, stderr, code := replayed(t, args...)
			if code != exitOK || stdout != "" {
				t.Errorf("exit code %d, stdout %s, stderr %s", code, stdout, stderr)
			}
		})
	}
}

func TestReplayTellsOfDifferences(t *testing.T) {
	capture := filepath.Join(replaySamples, "mesh-http.pcap")
	golden := filepath.Join(t.TempDir(), "golden")
	b, err := os.ReadFile(goldenOf(capture, ".jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(golden, bytes.Replace(b, []byte(`"class":"passthrough"`), []byte(`"class":"mesh"`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Run("T2/expected", func(t *testing.T) {
		stdout, stderr, code := replayed(t, "--expect", golden, capture)
		if code != exitDiffers || !strings.Contains(stdout, "\n--- "+golden+"\n+++ this run\n@@ -1,3 +1,3 @@\n") || strings.Count(stdout, "\n-{") != 1 || strings.Count(stdout, "\n+{") != 1 {
			t.Errorf("exit code %d, stdout %s, stderr %s", code, stdout, stderr)
		}
	})
	t.Run("T2/nothing", func(t *testing.T) {
		empty := filepath.Join(t.TempDir(), "golden")
		if err := os.WriteFile(empty, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		nobody := []string{"--local", "10.9.9.9", "--expect", empty, capture}
		if stdout, stderr, code := replayed(t, nobody...); code != exitOK || stdout != "" {
			t.Errorf("exit code %d, stdout %s, stderr %s", code, stdout, stderr)
		}
		if stdout, _, code := replayed(t, append(nobody, "-o", "text")...); code != exitDiffers || !strings.Contains(stdout, "\n+30 packets; flows: none;") {
			t.Errorf("as text: exit code %d, stdout %s", code, stdout)
		}
		if stdout, _, code := replayed(t, "-o", "text", "--expect", golden, capture); code != exitDiffers || !strings.Contains(stdout, "\n+30 packets;") {
			t.Errorf("JSON as text: exit code %d, stdout %s", code, stdout)
		}
	})
	t.Run("T2/a truncated capture that is as expected", func(t *testing.T) {
		cut := filepath.Join(replaySamples, "truncated.pcap")
		_, stderr, code := replayed(t, "--expect", goldenOf(cut, ".jsonl"), cut)
		if want := "ztun: " + cut + ": byte 2798: the last packet is cut off\n"; code != exitPartly || stderr != want {
			t.Errorf("exit code %d, want 4; stderr %q, want %q", code, stderr, want)
		}
	})
}

// What if: another state, of which those flows are told that it treats differently.
func TestReplayComparesStates(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(replaySamples, "mesh.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	capture := filepath.Join(replaySamples, "mesh-http.pcap")
	intruders := filepath.Join(replaySamples, "denied.pcap")
	for _, tt := range []struct {
		name, old, new string
		capture        string
		code           int
		want           string
	}{
		{"the same state", "x", "x", capture, exitOK, "30 packets; flows: 1 mesh, 2 passthrough; questions: 0 answered by the mesh, 0 by a resolver\n0 differ\n"},
		{"a policy that denies", "sa/client]", "sa/other]", capture, exitDiffers, "12:00:00.000000000  flow 1  outbound 10.244.1.10:40000 -> 10.96.0.10:80  mesh\n" +
			"  - mesh by 10.244.2.20:15008 to 10.244.2.20:8080, allowed: explicitly allowed by: shop/web-for-client\n" +
			"  + dropped, denied: allow policies exist, but none allowed\n"},
		{"a policy that allows", "sa/client]", "sa/intruder]", intruders, exitDiffers, "flow 1  outbound 10.244.1.66:41000 -> 10.96.0.10:80  dropped\n" +
			"  - dropped, denied: allow policies exist, but none allowed\n" +
			"  + mesh by 10.244.2.20:15008 to 10.244.2.20:8080, allowed: explicitly allowed by: shop/web-for-client\n"},
		{
			"a waypoint", "ipFamilies: Dual, ", "ipFamilies: Dual, waypoint: {destination: /10.244.1.66, hboneMtlsPort: 15008}, ", capture, exitDiffers,
			"  + mesh by 10.244.1.66:15008 to 10.96.0.10:80\n",
		},
	} {
		t.Run("T2/"+tt.name, func(t *testing.T) {
			other := filepath.Join(t.TempDir(), "other.yaml")
			if err := os.WriteFile(other, bytes.Replace(data, []byte(tt.old), []byte(tt.new), 1), 0o600); err != nil {
				t.Fatal(err)
			}
			stdout, stderr, code := replayed(t, "--compare", other, tt.capture)
			if code != tt.code || !strings.Contains(stdout, tt.want) {
				t.Errorf("exit code %d, want %d; stdout\n%s\nwant\n%s\nstderr %s", code, tt.code, stdout, tt.want, stderr)
			}
		})
	}
}

// States in which not the same pods are in the mesh: the flows of both are paired all the same, and those of one are told as such.
func TestReplayComparesMembership(t *testing.T) {
	mesh := filepath.Join(replaySamples, "mesh.yaml")
	data, err := os.ReadFile(mesh)
	if err != nil {
		t.Fatal(err)
	}
	leave := func(t *testing.T, pod string) string {
		t.Helper()
		other := filepath.Join(t.TempDir(), "other.yaml")
		old := "serviceAccount: " + pod + ", protocol: HBONE"
		if err := os.WriteFile(other, bytes.Replace(data, []byte(old), []byte(strings.Replace(old, "HBONE", "TCP", 1)), 1), 0o600); err != nil {
			t.Fatal(err)
		}
		return other
	}
	sample := func(name string) string { return filepath.Join(replaySamples, name) }
	const head = "12:00:00.000000000  flow 1  outbound 10.244.1.66:41000 -> 10.96.0.10:80  dropped\n"
	const denied = "dropped, denied: allow policies exist, but none allowed\n"
	for _, tt := range []struct {
		name, state, other string
		args               []string
		want               []string
		differ             int
	}{
		{"a pod leaves", mesh, leave(t, "intruder"), []string{sample("denied.pcap"), sample("mesh-http.pcap"), sample("dns.pcap")}, []string{head + "  - " + denied + "  + nothing\n"}, 1},
		{"a pod joins", leave(t, "intruder"), mesh, []string{sample("denied.pcap"), sample("mesh-http.pcap"), sample("dns.pcap")}, []string{head + "  - nothing\n  + " + denied}, 1},
		{"questions of a pod that leaves", mesh, leave(t, "client"), []string{sample("dns.pcap")}, []string{
			"  - NOERROR A 10.96.0.10, by mesh\n  + nothing\n", "  - SERVFAIL, by resolver\n  + nothing\n", "outbound 10.244.1.10:50054 -> 10.96.0.53:53  dns\n  - dns\n  + nothing\n",
		}, 8},
		{"an id is that of the first state", leave(t, "intruder"), mesh, []string{"--only", "2", sample("denied.pcap"), sample("mesh-http.pcap")}, nil, 0},
		{"an address chooses what only one state has", leave(t, "intruder"), mesh, []string{"--only", "10.244.1.66", sample("denied.pcap"), sample("mesh-http.pcap")}, []string{head + "  - nothing\n  + " + denied}, 1},
	} {
		t.Run("T2/"+tt.name, func(t *testing.T) {
			stdout, stderr, code := replayed(t, append([]string{"--state", tt.state, "--compare", tt.other}, tt.args...)...)
			want := exitOK
			if tt.differ > 0 {
				want = exitDiffers
			}
			if code != want || !strings.HasSuffix(stdout, fmt.Sprintf("\n%d differ\n", tt.differ)) {
				t.Errorf("exit code %d, want %d with %d that differ; stdout\n%s\nstderr %s", code, want, tt.differ, stdout, stderr)
			}
			for _, part := range tt.want {
				if !strings.Contains(stdout, part) {
					t.Errorf("stdout\n%s\nwant in it\n%s", stdout, part)
				}
			}
		})
	}
}

func TestReplayIsToldWhatIsWrong(t *testing.T) {
	capture := filepath.Join(replaySamples, "mesh-http.pcap")
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"no capture", nil, "want a capture"},
		{"no such capture", []string{"nowhere.pcap"}, "no such file"},
		{"an empty directory", []string{t.TempDir()}, "has no file"},
		{"peer", []string{"--peer", "friendly", capture}, "--peer friendly: want recorded"},
		{"replies", []string{"--peer", "file:nowhere", capture}, "--peer: open nowhere: no such file"},
		{"checksum", []string{"--checksum", "maybe", capture}, "--checksum maybe: want auto, off or strict"},
		{"speed", []string{"--speed", "0x", capture}, "--speed 0x: want a factor"},
		{"a speed that is no number", []string{"--speed", "NaN", capture}, "--speed NaN: want a factor"},
		{"an endless speed", []string{"--speed", "Inf", capture}, "--speed Inf: want a factor"},
		{"local", []string{"--local", "client", capture}, "--local client: want an address"},
		{"only", []string{"--only", "nobody", capture}, "--only nobody: neither an id"},
		{"expect", []string{"--expect", "nowhere", capture}, "--expect: open nowhere"},
		{"both", []string{"--expect", capture, "--compare", capture, capture}, "do not go together"},
		{"compare", []string{"--compare", capture, capture}, "mesh-http.pcap"},
		{"a state that is a capture", []string{"--state", capture, capture}, "--state: " + capture + " is no text: want a mesh state file (YAML)"},
		{"flag", []string{"--expct", capture}, "--expct"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stdout, stderr, code := replayed(t, tt.args...)
			if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.want) {
				t.Errorf("exit code %d, want 2; stdout %q; stderr %q, want %q in it", code, stdout, stderr, tt.want)
			}
		})
	}
}

// Flags that would have no effect are refused, and nothing is written.
func TestReplayRefusesFlagsWithoutEffect(t *testing.T) {
	capture := filepath.Join(replaySamples, "mesh-http.pcap")
	script := filepath.Join(replaySamples, "scripts", "http.yaml")
	dir := t.TempDir()
	out := func(name string) string { return filepath.Join(dir, name) }
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--script", script, "--write-pcap", out("s"), "--report", out("r"), "--only", "77", "--anonymize", out("a"), "--expect", "x", "--speed", "1x"}, "--script and --anonymize do not"},
		{[]string{"--script", script, "--write-pcap", out("s")}, "--script and --write-pcap do not"},
		{[]string{"--script", script, "--report", out("r")}, "--script and --report do not"},
		{[]string{"--script", script, "--only", "77"}, "--script and --only do not"},
		{[]string{"--script", script, "--expect", script}, "--script and --expect do not"},
		{[]string{"--script", script, "--speed", "1x"}, "--script and --speed do not"},
		{[]string{"--script", script, "--peer", "echo"}, "--script and --peer do not"},
		{[]string{"--anonymize", out("a"), "--expect", capture, capture}, "--anonymize and --expect do not"},
		{[]string{"--anonymize", out("a"), "--report", out("r"), capture}, "--anonymize and --report do not"},
		{[]string{"--anonymize", out("a"), "--write-pcap", out("w"), capture}, "--anonymize and --write-pcap do not"},
		{[]string{"--anonymize", out("a"), "-o", "json", capture}, "--anonymize and --output do not"},
		{[]string{"--anonymize", out("a"), "--local", "10.244.1.10", capture}, "--local has no effect on --anonymize without --only"},
		{[]string{"--seed", "a seed", capture}, "--seed is for --anonymize"},
		{[]string{"--report", "-", capture}, "--report -: it cannot be standard output"},
	} {
		t.Run("T1/"+tt.want, func(t *testing.T) {
			stdout, stderr, code := replayed(t, tt.args...)
			if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.want) {
				t.Errorf("exit code %d, want 2; stdout %q; stderr %q, want %q in it", code, stdout, stderr, tt.want)
			}
			if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
				t.Errorf("written: %v, %v", files, err)
			}
		})
	}
}

// Input that is no capture, or a broken one: what of it can be used is, the rest is named, and the exit code tells.
func TestReplayOfBadInput(t *testing.T) {
	sample, err := os.ReadFile(filepath.Join(replaySamples, "mesh-http.pcap"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(t *testing.T, name string, b []byte) string {
		t.Helper()
		name = filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	zipped := func(b []byte, more int) []byte {
		var out bytes.Buffer
		z := gzip.NewWriter(&out)
		for _, piece := range [][]byte{b, make([]byte, more)} {
			if _, err := z.Write(piece); err != nil {
				t.Fatal(err)
			}
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	wireless := bytes.Clone(sample)
	wireless[20] = 105 // IEEE 802.11
	snapless := bytes.Clone(sample)
	copy(snapless[16:20], []byte{0, 0, 0, 0})
	for _, tt := range []struct {
		name    string
		path    func(t *testing.T) string
		code    int
		packets int
		want    string // on stderr
	}{
		{"an empty file", func(t *testing.T) string { return write(t, "x", nil) }, exitPartly, 0, "byte 0: it is empty\n"},
		{"no capture", func(t *testing.T) string { return write(t, "x", []byte("hello, world")) }, exitPartly, 0, "neither pcap nor pcapng\n"},
		{"a directory with a capture", func(t *testing.T) string { return filepath.Dir(write(t, "x", sample)) }, exitOK, 30, ""},
		{"a directory without one", func(t *testing.T) string { return t.TempDir() }, exitUsage, -1, "has no file\n"},
		{"a gzip bomb", func(t *testing.T) string { return write(t, "x", zipped(sample, 16<<20)) }, exitOK, 30 + 16<<20/16, ""},
		{"a gzip file that is cut off", func(t *testing.T) string { b := zipped(sample, 0); return write(t, "x", b[:len(b)-20]) }, exitPartly, -1, "the gzip file is cut off\n"},
		{"100 bytes of a gzip file", func(t *testing.T) string { return write(t, "x", zipped(sample, 0)[:100]) }, exitPartly, 0, "byte 0: the gzip file is cut off\n"},
		{"the beginning of a gzip file", func(t *testing.T) string { return write(t, "x", zipped(sample, 0)[:5]) }, exitPartly, 0, "byte 0: the gzip file is cut off\n"},
		{"a gzip file with something behind it", func(t *testing.T) string { return write(t, "x", append(zipped(sample, 0), "junk"...)) }, exitPartly, 30, "something follows the end of the gzip file: it was passed over\n"},
		{"a gzip file with zeros behind it", func(t *testing.T) string { return write(t, "x", append(zipped(sample, 0), make([]byte, 512)...)) }, exitPartly, 30, "it was passed over\n"},
		{"two gzip files in one", func(t *testing.T) string {
			return write(t, "x", append(zipped(sample[:1000], 0), zipped(sample[1000:], 0)...))
		}, exitOK, 30, ""},
		{"two gzip files in one, the second cut off", func(t *testing.T) string { return write(t, "x", append(zipped(sample, 0), zipped(nil, 16)[:12]...)) }, exitPartly, 30, "the gzip file is cut off\n"},
		{"a gzip file in a gzip file", func(t *testing.T) string { return write(t, "x", zipped(zipped(sample, 0), 0)) }, exitPartly, 0, "neither pcap nor pcapng\n"},
		{"snaplen 0", func(t *testing.T) string { return write(t, "x", snapless) }, exitOK, 30, ""},
		{"a link type that is not supported", func(t *testing.T) string { return write(t, "x", wireless) }, exitPartly, 30, "ztun: link type 105: not supported: 30 packets were passed over\n"},
	} {
		t.Run("T3/"+tt.name, func(t *testing.T) {
			stdout, stderr, code := replayed(t, tt.path(t))
			if code != tt.code || !strings.HasSuffix(stderr, tt.want) || tt.want == "" && stderr != "" || strings.Count(stderr, "\n") > 1 {
				t.Errorf("exit code %d, want %d; stderr %q, want %q at its end", code, tt.code, stderr, tt.want)
			}
			if !strings.Contains("\n"+stdout, fmt.Sprintf("\n%d packets;", tt.packets)) && tt.packets >= 0 {
				t.Errorf("stdout\n%s\nwant %d packets", stdout, tt.packets)
			}
		})
	}
	t.Run("T3/any bit", func(t *testing.T) {
		name := filepath.Join(t.TempDir(), "x")
		for at := range len(sample) {
			b := bytes.Clone(sample)
			b[at] ^= 1 << (at % 8)
			if at%12 != 0 { // 200 of them
				continue
			}
			if err := os.WriteFile(name, b, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, stderr, code := replayed(t, name); code != exitOK && (code != exitPartly || stderr == "") {
				t.Errorf("byte %d: exit code %d, stderr %q", at, code, stderr)
			}
		}
	})
}

// The speed of the capture's clock: what is ahead is waited for, but not longer than that clock goes on.
func TestReplayWaits(t *testing.T) {
	type packet struct {
		at    time.Duration // by its time
		first bool          // of a capture
		want  time.Duration // since the first of all
	}
	const day = 24 * time.Hour
	for _, tt := range []struct {
		name    string
		speed   float64
		packets []packet
	}{
		{"as it was recorded", 1, []packet{{day, true, 0}, {day + time.Second, false, time.Second}, {day + time.Hour, false, time.Hour}}},
		{"twice as fast", 2, []packet{{day, true, 0}, {day + time.Hour, false, time.Hour / 2}}},
		{"packets out of order", 1, []packet{{day, true, 0}, {day + 30*time.Second, false, 30 * time.Second}, {day, false, 30 * time.Second}, {day + time.Minute, false, time.Minute}}},
		{"the clock was set back", 1, []packet{{day, true, 0}, {0, false, 0}, {time.Hour, false, time.Hour}}},
		{"a gap of a year", 1, []packet{{0, true, 0}, {365 * day, false, day}, {365*day + time.Second, false, day + time.Second}}},
		{"a gap of a year, a thousand times as fast", 1000, []packet{{0, true, 0}, {365 * day, false, day / 1000}, {366 * day, false, day / 500}}},
		{"one packet with a time in the future", 1, []packet{{0, true, 0}, {3650 * day, false, day}, {time.Second, false, day}, {2 * time.Second, false, day + time.Second}}},
		{"a capture that follows", 1, []packet{{0, true, 0}, {time.Hour, true, time.Hour}}},
		{"a capture of a year later", 1, []packet{{0, true, 0}, {365 * day, true, 0}, {365*day + time.Second, false, time.Second}}},
		{"a capture of a second earlier", 1, []packet{{time.Second, true, 0}, {0, true, 0}, {time.Second, false, time.Second}}},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wait, began := pace(tt.speed), time.Now()
				for i, p := range tt.packets {
					if err := wait(t.Context(), int64(p.at), p.first); err != nil {
						t.Fatal(err)
					}
					if got := time.Since(began); got != p.want {
						t.Errorf("packet %d, of %v: after %v, want %v", i, p.at, got, p.want)
					}
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				cancel(errors.New("waited"))
				if err := wait(ctx, int64(tt.packets[len(tt.packets)-1].at+time.Hour), false); err == nil || err.Error() != "waited" {
					t.Errorf("a wait that is over: %v", err)
				}
			})
		})
	}
}

// A replay that keeps time shows what has happened, and when it is interrupted it tells of the rest and keeps its files.
func TestReplayIsInterrupted(t *testing.T) {
	const hour = 3600
	dns, mesh := filepath.Join(replaySamples, "dns.pcap"), filepath.Join(replaySamples, "mesh-http.pcap")
	later := filepath.Join(t.TempDir(), "later.pcap")
	b, err := os.ReadFile(mesh)
	if err != nil {
		t.Fatal(err)
	}
	for at := 24; at < len(b); at += 16 + int(binary.LittleEndian.Uint32(b[at+8:])) {
		binary.LittleEndian.PutUint32(b[at:], binary.LittleEndian.Uint32(b[at:])+hour)
	}
	if err := os.WriteFile(later, b, 0o600); err != nil {
		t.Fatal(err)
	}
	interrupted := func(t *testing.T, args ...string) (stdout, stderr string, code int) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		out := &watchedWriter{until: "www.example.com", then: cancel}
		var errs bytes.Buffer
		args = append([]string{"replay", "--state", filepath.Join(replaySamples, "mesh.yaml"), "--speed", "1x"}, args...)
		code = run(ctx, args, nil, out, &errs)
		return out.String(), errs.String(), code
	}
	const note = "ztun: interrupted: the rest of what there is was not played\n"
	t.Run("T1/what has happened", func(t *testing.T) {
		report := filepath.Join(t.TempDir(), "report.json")
		stdout, stderr, code := interrupted(t, "--report", report, dns, later)
		if code != exitPartly || stderr != note || !strings.Contains(stdout, "questions: 2 answered by the mesh, 1 by a resolver\n") {
			t.Errorf("exit code %d, stdout\n%s\nstderr %s", code, stdout, stderr)
		}
		if b, err := os.ReadFile(report); err != nil || !json.Valid(b) {
			t.Errorf("report %q, %v", b, err)
		}
	})
	t.Run("T2/differences", func(t *testing.T) {
		other := filepath.Join(t.TempDir(), "other.yaml")
		state, err := os.ReadFile(filepath.Join(replaySamples, "mesh.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(other, bytes.Replace(state, []byte("serviceAccount: client, protocol: HBONE"), []byte("serviceAccount: client, protocol: TCP"), 1), 0o600); err != nil {
			t.Fatal(err)
		}
		stdout, stderr, code := interrupted(t, "--compare", other, dns, later)
		if code != exitPartly || stderr != note {
			t.Errorf("exit code %d, stdout\n%s\nstderr %s", code, stdout, stderr)
		}
	})
	t.Run("T2/a capture that is anonymized", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		dir := t.TempDir()
		var out, errs bytes.Buffer
		if help := newReplay().Long; !strings.Contains(help, fmt.Sprintf("An interrupt of --anonymize leaves nothing: %d.", exitFailure)) {
			t.Errorf("the help does not say what an interrupt does:\n%s", help)
		}
		args := []string{"replay", "--state", filepath.Join(replaySamples, "mesh.yaml"), "--anonymize", filepath.Join(dir, "a.pcapng"), dns}
		if code := run(ctx, args, nil, &out, &errs); code != exitFailure || !strings.Contains(errs.String(), "context canceled") {
			t.Errorf("exit code %d, stderr %s", code, &errs)
		}
		if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
			t.Errorf("written: %v, %v", files, err)
		}
	})
}

// A watchedWriter does something once a text was written.
type watchedWriter struct {
	bytes.Buffer
	until string
	then  func()
}

func (w *watchedWriter) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if strings.Contains(w.String(), w.until) {
		w.then()
	}
	return n, err
}

// An anonymized capture does what the real one does, and has nothing of it.
func TestReplayAnonymized(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(replaySamples, "*.pcap*"))
	if err != nil {
		t.Fatal(err)
	}
	facts := func(t *testing.T, out string) (list []string) {
		t.Helper()
		for line := range strings.SplitSeq(strings.TrimSpace(out), "\n") {
			var r struct {
				Type, Class, Answer, Close, By, Rcode, Query string
				ID, Sent, Received                           uint64
				Answers                                      []string
				Policy                                       struct{ Allowed bool }
			}
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatal(err)
			}
			list = append(list, fmt.Sprint(r.Type, r.ID, r.Class, r.Answer, r.Close, r.By, r.Rcode, r.Query, r.Sent, r.Received, len(r.Answers), r.Policy.Allowed))
		}
		return list
	}
	for _, name := range names {
		base := filepath.Base(name)
		if base == "disorder.pcap" || base == "unsupported.pcapng" || base == "vxlan.pcap" {
			continue // pieces of DNS messages, and what is within UDP, become zeros; packets that cannot be read are left out
		}
		t.Run("T2/"+base, func(t *testing.T) {
			want, _, code := replayed(t, "-o", "json", name)
			file := filepath.Join(t.TempDir(), "anonymous.pcapng")
			if stdout, stderr, got := replayed(t, "--anonymize", file, "--seed", "a seed", name); got != code || stdout != "" {
				t.Fatalf("exit code %d, want %d; stdout %s, stderr %s", got, code, stdout, stderr)
			}
			var out, errs bytes.Buffer
			if code := run(t.Context(), []string{"replay", "--state", file + ".state.json", "-o", "json", file}, nil, &out, &errs); code != exitOK {
				t.Fatalf("exit code %d; stderr %s", code, errs.String())
			}
			if diff := cmp.Diff(facts(t, want), facts(t, out.String())); diff != "" {
				t.Errorf("(-real +anonymous):\n%s", diff)
			}
			for _, file := range []string{file, file + ".state.json"} {
				b, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, secret := range []string{"shop", "web", "intruder", "10.244.", "\x0a\xf4\x01", "\x0a\x60\x00\x0a", "example", "HTTP", "hello"} {
					if bytes.Contains(b, []byte(secret)) {
						t.Errorf("%s has %q", filepath.Base(file), secret)
					}
				}
			}
		})
	}
}

// A small capture that can be given away: one flow, anonymized. With --only the whole is played as it is, so that ids are those of a
// run before.
func TestReplayAnonymizesOneThing(t *testing.T) {
	capture := filepath.Join(replaySamples, "mesh-http.pcap")
	for _, tt := range []struct {
		only    string
		packets int
		want    string
	}{
		{"1", 10, "10 packets; flows: 1 mesh;"},
		{"10.244.1.10:40001", 10, "10 packets; flows: 1 passthrough;"},
		{"shop/intruder", 0, "0 packets; flows: none;"},
	} {
		t.Run("T2/"+tt.only, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "anonymous.pcapng")
			if stdout, stderr, code := replayed(t, "--anonymize", file, "--only", tt.only, capture); code != exitOK || stdout+stderr != "" {
				t.Fatalf("exit code %d; stdout %s, stderr %s", code, stdout, stderr)
			}
			if got, stderr, code := replayed(t, "--state", file+".state.json", file); code != exitOK || !strings.Contains(got, tt.want) {
				t.Errorf("exit code %d, stdout\n%s\nwant %q; stderr %s", code, got, tt.want, stderr)
			}
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, secret := range []string{"\x0a\xf4\x01\x0a", "HTTP", "hello"} {
				if bytes.Contains(b, []byte(secret)) {
					t.Errorf("the capture has %q", secret)
				}
			}
		})
	}
	t.Run("T2/a disk that is full", func(t *testing.T) {
		if _, err := os.Stat("/dev/full"); err != nil {
			t.Skip("there is no /dev/full")
		}
		dir := t.TempDir()
		if err := os.Symlink("/dev/full", filepath.Join(dir, "full")); err != nil {
			t.Fatal(err)
		}
		if _, stderr, code := replayed(t, "--anonymize", filepath.Join(dir, "full"), "--only", "1", capture); code != exitFailure || !strings.Contains(stderr, "no space left") {
			t.Errorf("exit code %d, stderr %s", code, stderr)
		}
		if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
			t.Errorf("files %v, %v: want the link alone", files, err)
		}
	})
}

// The network of the node is anonymized with those of the state, and so are the settings that decide with it.
func TestReplayAnonymizedNetwork(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(replaySamples, "mesh.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	mesh := filepath.Join(t.TempDir(), "mesh.yaml")
	named := strings.NewReplacer("namespace: shop, serviceAccount", "network: Blue, namespace: shop, serviceAccount", "  namespace: shop\n  serviceAccount", "  network: Blue\n  namespace: shop\n  serviceAccount",
		`"/`, `"Blue/`).Replace(string(data))
	if err := os.WriteFile(mesh, []byte(named), 0o600); err != nil {
		t.Fatal(err)
	}
	file, capture := filepath.Join(t.TempDir(), "anonymous.pcapng"), filepath.Join(replaySamples, "mesh-http.pcap")
	want, stderr, code := replayed(t, "--state", mesh, "--network", "Blue", capture)
	if code != exitOK || !strings.Contains(want, "flows: 1 mesh, 2 passthrough") {
		t.Fatalf("exit code %d, stdout\n%s\nstderr %s", code, want, stderr)
	}
	if _, stderr, code := replayed(t, "--state", mesh, "--network", "Blue", "--anonymize", file, "--seed", "a seed", capture); code != exitOK {
		t.Fatalf("exit code %d, stderr %s", code, stderr)
	}
	if got, stderr, code := replayed(t, "--state", file+".state.json", file); code != exitOK || !strings.Contains(got, "flows: 1 mesh, 2 passthrough") {
		t.Errorf("exit code %d, stdout\n%s\nstderr %s", code, got, stderr)
	}
	b, err := os.ReadFile(file + ".state.json")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(b, []byte("Blue")) || bytes.Contains(b, []byte("blue")) || !bytes.Contains(b, []byte(`"clusterDomain"`)) {
		t.Errorf("the state is\n%s", b)
	}
}

// A node that does not serve IPv6 has no AAAA for services: by the settings of its dump, and still when that is anonymized.
func TestReplayOfANodeWithoutIPv6(t *testing.T) {
	mesh, capture := filepath.Join(replaySamples, "mesh.yaml"), filepath.Join(replaySamples, "dns.pcap")
	data, err := os.ReadFile(mesh)
	if err != nil {
		t.Fatal(err)
	}
	st, err := workload.ParseStatic(mesh, data)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		enabled string
		want    int // addresses
	}{{"true", 1}, {"false", 0}} {
		t.Run("ipv6Enabled="+tt.enabled, func(t *testing.T) {
			d := stateDump{Dump: workload.NewDump(workload.NewSnapshot(st))}
			d.Config.Settings = []dumpSetting{{"ipv6Enabled", tt.enabled}}
			data, err := json.Marshal(d)
			if err != nil {
				t.Fatal(err)
			}
			state, file := filepath.Join(t.TempDir(), "dump.json"), filepath.Join(t.TempDir(), "anonymous.pcapng")
			if err := os.WriteFile(state, data, 0o600); err != nil {
				t.Fatal(err)
			}
			if stdout, stderr, code := replayed(t, "--state", state, "--anonymize", file, capture); code != exitOK {
				t.Fatalf("exit code %d, stdout %s, stderr %s", code, stdout, stderr)
			}
			for _, args := range [][]string{{state, capture}, {file + ".state.json", file}} {
				stdout, stderr, code := replayed(t, "-o", "json", "--state", args[0], args[1])
				if code != exitOK {
					t.Fatalf("%s: exit code %d, stderr %s", args, code, stderr)
				}
				asked := 0
				for line := range strings.SplitSeq(strings.TrimSpace(stdout), "\n") {
					var r struct {
						Query, By string
						Answers   []string
					}
					if err := json.Unmarshal([]byte(line), &r); err != nil {
						t.Fatal(err)
					}
					if r.Query != "AAAA" {
						continue
					}
					if asked++; r.By != "mesh" || len(r.Answers) != tt.want {
						t.Errorf("%s: answered by %s: %v, want %d addresses", args[1], r.By, r.Answers, tt.want)
					}
				}
				if asked == 0 {
					t.Errorf("%s: no question for AAAA in\n%s", args[1], stdout)
				}
			}
		})
	}
}

// One thing of a capture: what becomes of it is the same, and so is what is written of it.
func TestReplayOfOneThing(t *testing.T) {
	for _, tt := range []struct{ name, only, capture string }{
		{"a flow", "3", "mesh-http.pcap"},
		{"an address and port", "10.244.1.10:40001", "mesh-http.pcap"},
		{"an address", "192.0.2.80", "mesh-http.pcap"},
		{"a workload", "shop/intruder", "denied.pcap"},
		{"a question", "3", "dns.pcap"},
	} {
		t.Run("T2/"+tt.name, func(t *testing.T) {
			capture := filepath.Join(replaySamples, tt.capture)
			all, _, _ := replayed(t, "-o", "json", capture)
			file := filepath.Join(t.TempDir(), "small.pcapng")
			one, stderr, code := replayed(t, "-o", "json", "--only", tt.only, "--write-pcap", file, capture)
			if code != exitOK || strings.Count(one, "\n") != 1 || !strings.Contains(all, one) {
				t.Fatalf("exit code %d, stdout %s, stderr %s; want one of\n%s", code, one, stderr, all)
			}
			again, stderr, code := replayed(t, "-o", "json", file)
			_, want, _ := strings.Cut(one, `"start"`)
			if _, got, _ := strings.Cut(again, `"start"`); code != exitOK || got != want {
				t.Errorf("exit code %d, stderr %s; the small capture gives\n%s\nwant\n%s", code, stderr, got, want)
			}
		})
	}
}

// Packets by hand, for what TCP toward the pod has to do. Each script says what it expects; its golden file has all that happened.
func TestReplayOfScripts(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(replaySamples, "scripts", "*.yaml"))
	if err != nil || len(names) < 4 {
		t.Fatalf("scripts %v, %v", names, err)
	}
	for _, name := range names {
		id := map[string]string{"challenge.yaml": "FP-76 ", "hole.yaml": "FP-76 "}[filepath.Base(name)]
		t.Run("T4/"+id+filepath.Base(name), func(t *testing.T) {
			golden := goldenOf(name, ".txt")
			got, stderr, code := replayed(t, "--script", name)
			if code != exitOK {
				t.Errorf("exit code %d; stdout\n%s\nstderr %s", code, got, stderr)
			}
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			b, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(b), got); diff != "" {
				t.Errorf("%s (-golden +got):\n%s", golden, diff)
			}
		})
	}
	wrong := filepath.Join(t.TempDir(), "wrong.yaml")
	text := "src: 10.244.1.10:1\ndst: 10.96.0.10:80\nsteps:\n- send: {flags: S}\n- expect: {flags: RA, ack: 7}\n- send: {flags: A}\n"
	if err := os.WriteFile(wrong, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Run("T4/what is not as expected", func(t *testing.T) {
		stdout, stderr, code := replayed(t, "--script", wrong)
		const want = "  0.000000  < SA seq 0 ack 0\n            step 2: want < RA ack 7\n"
		if code != exitDiffers || !strings.Contains(stdout, want) || strings.Contains(stdout, "> A") {
			t.Errorf("exit code %d, stdout\n%s\nwant %s\nstderr %s", code, stdout, want, stderr)
		}
		stdout, _, code = replayed(t, "--script", wrong, "-o", "json")
		const line = `{"type":"step","step":2,"time":"0.000000","done":"< SA seq 0 ack 0","want":"< RA ack 7","ok":false}`
		if code != exitDiffers || !strings.Contains(stdout, line) {
			t.Errorf("exit code %d, stdout\n%s\nwant %s", code, stdout, line)
		}
		if _, stderr, code := replayed(t, "--script", wrong, "in.pcap"); code != exitUsage || !strings.Contains(stderr, "in place of captures") {
			t.Errorf("with a capture: exit code %d, stderr %s", code, stderr)
		}
		if _, stderr, code := replayed(t, "--script", "nowhere"); code != exitUsage || !strings.Contains(stderr, "--script: open nowhere") {
			t.Errorf("no file: exit code %d, stderr %s", code, stderr)
		}
	})
}

// Several captures, what is written beside the output, and standard input.
func TestReplayWritesReportsAndPackets(t *testing.T) {
	dir := t.TempDir()
	for i, name := range []string{"mesh-http.pcap", "dns.pcap", "truncated.pcap"} {
		b, err := os.ReadFile(filepath.Join(replaySamples, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)+name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	report, packets := filepath.Join(t.TempDir(), "report.json"), filepath.Join(t.TempDir(), "out.pcapng")
	t.Run("T1/a directory, a report and packets", func(t *testing.T) {
		stdout, stderr, code := replayed(t, "--dir", dir, "--report", report, "--write-pcap", packets)
		if code != exitPartly || !strings.Contains(stdout, "89 packets; flows: 3 mesh, 4 passthrough, 1 dns; questions: 3 answered by the mesh, 3 by a resolver\n") {
			t.Errorf("exit code %d, stdout\n%s\nstderr %s", code, stdout, stderr)
		}
		b, err := os.ReadFile(report)
		if err != nil {
			t.Fatal(err)
		}
		var r struct {
			Captures int
			Packets  struct{ Packets, Played uint64 }
			Records  map[string]int
			Stack    map[string]uint64
			Problems []struct{ File, Text string }
		}
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		if r.Captures != 3 || r.Packets.Packets != 89 || r.Records["mesh"] != 3 || r.Stack["accepted"] != 8 || len(r.Problems) != 1 {
			t.Errorf("report %s", b)
		}
	})
	t.Run("T1/what the netstack has read and sent", func(t *testing.T) {
		// As a capture it has the same conversations, answered by the netstack.
		if _, stderr, code := replayed(t, "--write-pcap", packets, filepath.Join(replaySamples, "mesh-http.pcap")); code != exitOK {
			t.Fatalf("exit code %d, stderr %s", code, stderr)
		}
		stdout, stderr, code := replayed(t, packets)
		if code != exitOK || !strings.Contains(stdout, "flows: 1 mesh, 2 passthrough;") || strings.Count(stdout, "carried      53 bytes sent, 63 received") != 3 {
			t.Errorf("exit code %d, stdout\n%s\nstderr %s", code, stdout, stderr)
		}
	})
	t.Run("T1/standard input", func(t *testing.T) {
		b, err := os.ReadFile(filepath.Join(replaySamples, "ipv6.pcap"))
		if err != nil {
			t.Fatal(err)
		}
		var out, errs bytes.Buffer
		cmd := newReplay()
		cmd.SetIn(bytes.NewReader(b))
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		cmd.SetArgs([]string{"--state", filepath.Join(replaySamples, "mesh.yaml"), "-"})
		if err := cmd.ExecuteContext(t.Context()); err != nil || !strings.HasPrefix(out.String(), "12:00:00.000000000  flow 1  outbound [fd00:1::10]:40000") {
			t.Errorf("%v, stdout\n%s\nstderr %s", err, &out, &errs)
		}
	})
}

// No output takes the place of an input, however either is named, or of another output; and one that fails leaves nothing behind.
func TestReplayKeepsItsInputs(t *testing.T) {
	read := func(t *testing.T, name string) []byte {
		t.Helper()
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	sample, mesh := read(t, filepath.Join(replaySamples, "mesh-http.pcap")), read(t, filepath.Join(replaySamples, "mesh.yaml"))
	for _, tt := range []struct {
		name, args string
		want       string // on stderr
	}{
		{"packets to the capture", "--write-pcap d/a.pcap d/a.pcap", "--write-pcap d/a.pcap: that is also an input, d/a.pcap"},
		{"the report to the capture", "--report d/a.pcap d/a.pcap", "that is also an input"},
		{"the anonymous capture to the capture", "--anonymize d/a.pcap d/a.pcap", "that is also an input"},
		{"packets to a file of a directory", "--write-pcap d/a.pcap d/", "that is also an input"},
		{"the report to a file of a directory", "--report d/a.pcap --dir d/", "that is also an input"},
		{"the report to a file below a directory", "--report e/d/a.pcap --dir e --recursive", "that is also an input"},
		{"a symbolic link to the capture", "--write-pcap link d/a.pcap", "that is also an input"},
		{"the anonymous state to the state", "--state x.state.json --anonymize x d/a.pcap", "--anonymize (the state) x.state.json: that is also an input"},
		{"the replies of the peer", "--peer file:replies --report replies d/a.pcap", "that is also an input"},
		{"two outputs", "--write-pcap out --report out d/a.pcap", "--write-pcap out: --report writes that file as well"},
		{"two outputs, by two names", "--write-pcap out --report d/../out d/a.pcap", "--write-pcap out: --report writes that file as well"},
		{"standard output", "--write-pcap - d/a.pcap", "--write-pcap -: it cannot be standard output"},
		{"a directory that is not there", "--report nowhere/out --write-pcap out d/a.pcap", "--report: open "},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			if err := os.MkdirAll("e/d", 0o700); err != nil {
				t.Fatal(err)
			}
			for name, to := range map[string]string{"d": "e/d", "link": "d/a.pcap"} {
				if err := os.Symlink(to, name); err != nil {
					t.Fatal(err)
				}
			}
			was := map[string][]byte{"d/a.pcap": sample, "mesh.yaml": mesh, "x.state.json": mesh, "replies": []byte("replies")}
			for name, b := range was {
				if err := os.WriteFile(name, b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var out, errs bytes.Buffer
			code := run(t.Context(), append([]string{"replay", "--state", "mesh.yaml"}, strings.Fields(tt.args)...), nil, &out, &errs)
			if code == exitOK || !strings.Contains(errs.String(), tt.want) {
				t.Errorf("exit code %d, stderr %q, want %q in it", code, &errs, tt.want)
			}
			for name, b := range was {
				if now := read(t, name); !bytes.Equal(now, b) {
					t.Errorf("%s has changed: %d bytes", name, len(now))
				}
			}
			for dir, want := range map[string]int{".": len(was) + 2, "d": 1} {
				if files, err := os.ReadDir(dir); err != nil || len(files) != want {
					t.Errorf("files %v, %v; want %d", files, err, want)
				}
			}
		})
	}
}

// A file is replaced at the end, once it is whole; what is no regular file is written to.
func TestReplayReplacesFilesAtTheEnd(t *testing.T) {
	capture := filepath.Join(replaySamples, "mesh-http.pcap")
	t.Run("T1/a failure keeps what was there", func(t *testing.T) {
		dir := t.TempDir()
		name := filepath.Join(dir, "out.pcapng")
		if err := os.WriteFile(name, []byte("of yesterday"), 0o600); err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		args := []string{"replay", "--state", filepath.Join(replaySamples, "mesh.yaml"), "--write-pcap", name, capture}
		if code := run(t.Context(), args, nil, fullWriter{}, &errs); code != exitFailure {
			t.Errorf("exit code %d, stderr %s", code, &errs)
		}
		b, err := os.ReadFile(name)
		if err != nil || string(b) != "of yesterday" {
			t.Errorf("the file is %q, %v", b, err)
		}
		if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
			t.Errorf("files %v, %v", files, err)
		}
	})
	t.Run("T1/its permissions stay", func(t *testing.T) {
		name := filepath.Join(t.TempDir(), "out.json")
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, stderr, code := replayed(t, "--report", name, capture); code != exitOK {
			t.Fatalf("exit code %d, stderr %s", code, stderr)
		}
		if info, err := os.Stat(name); err != nil || info.Mode() != 0o600 || info.Size() == 0 {
			t.Errorf("%+v, %v", info, err)
		}
	})
	t.Run("T1/a device", func(t *testing.T) {
		if _, stderr, code := replayed(t, "--report", os.DevNull, "--write-pcap", os.DevNull, capture); code != exitOK {
			t.Fatalf("exit code %d, stderr %s", code, stderr)
		}
		if info, err := os.Stat(os.DevNull); err != nil || info.Mode().IsRegular() {
			t.Errorf("%s is %v, %v", os.DevNull, info.Mode(), err)
		}
	})
}

// A fullWriter takes nothing.
type fullWriter struct{}

func (fullWriter) Write([]byte) (int, error) { return 0, syscall.ENOSPC }
