package telemetry

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFilter(t *testing.T) {
	var f Filter
	if err := f.Set("warn,access=debug,proxy=off,proxy::outbound=trace"); err != nil {
		t.Fatal(err)
	}
	got := make(map[string]slog.Level)
	for _, target := range []string{"access", "proxy", "proxy::inbound", "proxy::outbound", "dns"} {
		got[target] = f.Level(target)
	}
	want := map[string]slog.Level{
		"access": slog.LevelDebug, "proxy": LevelOff, "proxy::inbound": LevelOff, "proxy::outbound": LevelTrace, "dns": slog.LevelWarn,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("levels (-want +got):\n%s", diff)
	}
	if s := f.String(); s != "warn,access=debug,proxy=off,proxy::outbound=trace" {
		t.Errorf("String() = %q", s)
	}
	if err := f.Set("access=debug"); err != nil || f.Default != slog.LevelError {
		t.Errorf("without a default: %v, level %s, want error", err, f.Default)
	}
}

func TestTargetsOfZtunnel(t *testing.T) {
	for _, tt := range []struct {
		filter, target string
		want           slog.Level
	}{
		{"info,ztunnel=debug", "proxy", slog.LevelDebug},
		{"info,ztunnel=debug", "access", slog.LevelInfo},
		{"info,ztunnel::proxy=trace,ztunnel=warn", "proxy::inbound", LevelTrace},
		{"info,ztunnel::proxy=trace,ztunnel=warn", "dns", slog.LevelWarn},
		{"hickory_server::server=off,info", "dns", slog.LevelInfo},
		{"error", "dns", slog.LevelError},
	} {
		var f Filter
		if err := f.Set(tt.filter); err != nil {
			t.Fatal(err)
		}
		if got := f.Level(tt.target); got != tt.want {
			t.Errorf("%s: level of %s = %s, want %s", tt.filter, tt.target, LevelName(got), LevelName(tt.want))
		}
	}
}

func TestLevelsChange(t *testing.T) {
	var f Filter
	if err := f.Set("info,access=warn"); err != nil {
		t.Fatal(err)
	}
	l := NewLevels(f)
	steps := []struct {
		directives string
		reset      bool
		want       string
	}{
		{"debug", false, "debug,access=warn"},
		{"access=off,proxy::inbound:trace", false, "debug,access=off,proxy::inbound=trace"},
		{"warn", true, "warn,access=warn"},
		{"", true, "info,access=warn"},
	}
	for _, s := range steps {
		if _, err := l.Change(s.directives, s.reset); err != nil {
			t.Fatalf("Change(%q): %v", s.directives, err)
		}
		if l.String() != s.want {
			t.Errorf("after %q: %s, want %s", s.directives, l, s.want)
		}
	}
	if _, err := l.Change("debug,nonsense", false); err == nil || l.String() != "info,access=warn" {
		t.Errorf("after an error (%v): %s, want no change", err, l)
	}
	undo, err := l.Change("trace", false)
	if err != nil {
		t.Fatal(err)
	}
	undo()
	if l.String() != "info,access=warn" {
		t.Errorf("undone: %s", l)
	}
	if undo, err = l.Change("trace", false); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Change("error", false); err != nil {
		t.Fatal(err)
	}
	undo()
	if l.String() != "error,access=warn" {
		t.Errorf("undo of an earlier change: %s, want the later one to stay", l)
	}
}

func FuzzFilter(f *testing.F) {
	for _, s := range []string{"info", "info,access=debug", "a::b:warn", "ztunnel=off", "=", ",", "x=y=z"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var one Filter
		if next, err := (&Filter{}).With(s); err == nil {
			if again, err := (&Filter{}).With(next.String()); err != nil {
				t.Errorf("%q gives %q, which is refused: %v", s, next.String(), err)
			} else if again.String() != next.String() {
				t.Errorf("%q gives %q and then %q", s, next.String(), again.String())
			}
		}
		if one.Set(s) != nil {
			return
		}
		var again Filter
		if err := again.Set(one.String()); err != nil || again.String() != one.String() {
			t.Errorf("%q: %q reads back as %q (%v)", s, one.String(), again.String(), err)
		}
		for target := range one.Targets {
			if strings.ContainsAny(target, "[]{}") {
				t.Errorf("%q: target %q", s, target)
			}
		}
	})
}
