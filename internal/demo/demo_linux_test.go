package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ztun.dev/ztun/internal/lab"
)

// needPrivilege skips the test where a demonstration cannot run, unless ZTUN_REQUIRE_NETNS says that it has to.
func needPrivilege(t *testing.T) {
	t.Helper()
	err := preflight()
	if err == nil {
		var l *lab.Lab
		if l, err = lab.New(t.Context(), lab.Config{Nodes: 1}); err == nil {
			_ = l.Close()
			return
		}
	}
	if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
		t.Fatal(err)
	}
	t.Skip(err)
}

// demonstrate runs a demonstration with temporary files in a place of its own, where none may be left.
func demonstrate(t *testing.T, ctx context.Context, cfg Config) (string, error) {
	t.Helper()
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var out bytes.Buffer
	cfg.Out = &out
	err := Run(ctx, cfg)
	if left, _ := filepath.Glob(tmp + "/*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	return out.String(), err
}

func TestNetnsDemonstration(t *testing.T) {
	needPrivilege(t)
	for _, own := range []bool{false, true} {
		name := "with installed programs"
		if own {
			name = "with ztun's own programs"
		}
		t.Run(name, func(t *testing.T) {
			out, err := demonstrate(t, t.Context(), Config{Binary: program(t, realZtun), JSON: true, OwnClients: own, Measure: time.Second})
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			var r Report
			if err := json.Unmarshal([]byte(out), &r); err != nil {
				t.Fatal(err)
			}
			if !r.OK || !r.RequestOK || r.RequestOK6 != r.IPv6 || r.ClientAddressSeen != "10.77.1.10" || !r.Denied || r.ClearBytesWithZtun != 0 ||
				r.ClearBytesWithout == 0 || r.ThroughputRatio <= 0 || r.SourceIdentity != client.identity() || r.DestinationIdentity != web.identity() {
				t.Errorf("report: %s", out)
			}
		})
	}
}

// What a demonstration says is what it sees: with a ztun that does nothing hardly any of it holds.
func TestNetnsDemonstrationOfNothing(t *testing.T) {
	needPrivilege(t)
	cfg := Config{Binary: program(t, idleZtun), JSON: true, OwnClients: true, Measure: 50 * time.Millisecond}
	out, err := demonstrate(t, t.Context(), cfg)
	var e *Error
	if !errors.As(err, &e) || e.ExitCode() != 1 || !strings.Contains(err.Error(), "facts do not hold") {
		t.Errorf("Run = %v, want an Error with exit code 1", err)
	}
	var r Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if r.OK || r.RequestOK || r.RequestOK6 || r.Denied || r.DeniedReason != "" || r.SourceIdentity != "" || r.ClientAddressSeen != "" {
		t.Errorf("the report shows what cannot be: %s", out)
	}
	if r.ClearBytesWithout == 0 || r.Without.RequestHits < 2 || r.Without.ReplyHits < 2 || r.With.TunnelBytes != 0 {
		t.Errorf("wire without ztun: %+v, with: %+v", r.Without, r.With)
	}
	if r.SpeedWithout.Up == 0 || r.SpeedWith.Down == 0 { // by address, which works without ztun
		t.Errorf("throughput: %+v, %+v", r.SpeedWithout, r.SpeedWith)
	}
}

func TestNetnsDemonstrationWithoutItsNodes(t *testing.T) {
	needPrivilege(t)
	out, err := demonstrate(t, t.Context(), Config{Binary: program(t, dyingZtun), OwnClients: true, Measure: 50 * time.Millisecond})
	if want := "demo: node-a: ztun ended before it was ready: exit status 1: port 15008 is taken"; err == nil || err.Error() != want {
		t.Errorf("Run = %v, want %s", err, want)
	}
	if !strings.Contains(out, "Two nodes") {
		t.Errorf("the report begins %q", out)
	}
}

func TestNetnsDemonstrationIsInterrupted(t *testing.T) {
	needPrivilege(t)
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := demonstrate(t, ctx, Config{Binary: program(t, silentZtun), OwnClients: true, Measure: 50 * time.Millisecond})
	var e *Error
	if !errors.As(err, &e) || e.ExitCode() != 1 || err.Error() != "demo: interrupted" {
		t.Errorf("Run = %v, want an Error that says interrupted", err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("the end took %v", took)
	}
}

func TestNetnsKeepRunsUntilTheEndOfItsContext(t *testing.T) {
	needPrivilege(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out lines
	go func() {
		if out.wait(ctx, 0, func(line string) bool { return strings.Contains(line, "tail -f") }) == nil {
			cancel()
		}
	}()
	t.Setenv("TMPDIR", t.TempDir())
	err := Run(ctx, Config{Binary: program(t, realZtun), Out: &out, Keep: true, OwnClients: true, Measure: 50 * time.Millisecond})
	if err != nil {
		t.Errorf("Run = %v\n%s", err, out.last(100))
	}
	if text := out.last(100); !strings.Contains(text, "Everything holds") || !strings.Contains(text, "nsenter -t") {
		t.Errorf("the report:\n%s", text)
	}
}

func TestRunRefusesAWrongConfig(t *testing.T) {
	for _, cfg := range []Config{{}, {Binary: "/nowhere/ztun", Out: &bytes.Buffer{}}} {
		var e *Error
		if err := Run(t.Context(), cfg); !errors.As(err, &e) || e.ExitCode() != 2 {
			t.Errorf("Run(%+v) = %v, want an Error with exit code 2", cfg, err)
		}
	}
}

func TestIperf3Throughput(t *testing.T) {
	tests := []struct {
		name, in string
		want     float64
		err      string
	}{
		{"a result", `{"end":{"sum_sent":{"bits_per_second":2},"sum_received":{"bits_per_second":1.5e9}}}`, 1.5e9, ""},
		{"an error", `{"start":{},"end":{},"error":"unable to connect to server"}`, 0, "iperf3: unable to connect to server"},
		{"no result", `{"end":{}}`, 0, "names no throughput"},
		{"no JSON", `iperf3: parameter error`, 0, "its answer"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := iperf3Throughput([]byte(tt.in))
			if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("throughput %v, %v; want %v, %q", got, err, tt.want, tt.err)
			}
		})
	}
}
