package telemetry

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var discard = slog.New(slog.DiscardHandler)

// stamp replaces the time, which is the machine's.
var stamp = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z`)

type secretive struct{}

func (secretive) LogValue() slog.Value { return slog.StringValue("resolved") }

func writeLines(log *slog.Logger) {
	log.Info("ready", "pods", 3, "took", 12300*time.Microsecond, "ok", true, "share", 0.5)
	log.Warn("no attributes")
	log.Warn("joined", "reason", errors.Join(errors.New("one"), errors.New("two")).Error(), "text", "a\nb")
	pod := log.With(TargetKey, "inpod::statemanager").With(slog.Group("proxy", "wl", "shop/cart"))
	pod.Info("pod received, starting proxy", "uid", "5d8c", "addr", netip.MustParseAddr("10.0.0.1"), "error", errors.New("a \"b\"\nc"))
	pod.WithGroup("dst").Error("in a group", "addr", netip.MustParseAddrPort("10.0.0.1:80"), slog.Group("", "v", secretive{}), slog.Group("w", "x", 1))
	log.Debug("too little")
	log.With(TargetKey, "dns").Debug("enough", "none", nil, "list", []string{"a"})
}

func TestLoggerPlain(t *testing.T) {
	var out bytes.Buffer
	levels := NewLevels(Filter{Targets: map[string]slog.Level{"dns": slog.LevelDebug}})
	writeLines(NewLogger(&out, Plain, levels))
	want := strings.Join([]string{
		"T\tinfo\tnode\tready\tpods=3 took=12.3ms ok=true share=0.5",
		"T\twarn\tnode\tno attributes",
		"T\twarn\tnode\tjoined\treason=\"one; two\" text=\"a\\nb\"",
		"T\tinfo\tinpod::statemanager:proxy{wl=\"shop/cart\"}\tpod received, starting proxy\tuid=\"5d8c\" addr=10.0.0.1 error=\"a \\\"b\\\"; c\"",
		"T\terror\tinpod::statemanager:proxy{wl=\"shop/cart\"}\tin a group\tdst.addr=10.0.0.1:80 dst.v=\"resolved\" dst.w.x=1",
		"T\tdebug\tdns\tenough\tnone=null list=\"[a]\"",
		"",
	}, "\n")
	if diff := cmp.Diff(want, stamp.ReplaceAllString(out.String(), "T")); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
}

func TestLoggerJSON(t *testing.T) {
	var out bytes.Buffer
	levels := NewLevels(Filter{Targets: map[string]slog.Level{"ztunnel::dns": slog.LevelDebug}})
	writeLines(NewLogger(&out, JSON, levels))
	want := strings.Join([]string{
		`{"level":"info","time":"T","scope":"ztunnel::node","message":"ready","pods":3,"took":"12.3ms","ok":true,"share":0.5}`,
		`{"level":"warn","time":"T","scope":"ztunnel::node","message":"no attributes"}`,
		`{"level":"warn","time":"T","scope":"ztunnel::node","message":"joined","reason":"one; two","text":"a\nb"}`,
		`{"level":"info","time":"T","scope":"ztunnel::inpod::statemanager","message":"pod received, starting proxy","proxy":{"wl":"shop/cart"},"uid":"5d8c","addr":"10.0.0.1","error":"a \"b\"; c"}`,
		`{"level":"error","time":"T","scope":"ztunnel::inpod::statemanager","message":"in a group","proxy":{"wl":"shop/cart"},"dst.addr":"10.0.0.1:80","dst.v":"resolved","dst.w.x":1}`,
		`{"level":"debug","time":"T","scope":"ztunnel::dns","message":"enough","none":null,"list":"[a]"}`,
		"",
	}, "\n")
	if diff := cmp.Diff(want, stamp.ReplaceAllString(out.String(), "T")); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
	for line := range strings.Lines(out.String()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
}

func TestLoggerFollowsLevels(t *testing.T) {
	var out bytes.Buffer
	levels := NewLevels(Filter{})
	log := NewLogger(&out, Plain, levels).With(TargetKey, "proxy")
	log.Debug("one")
	if _, err := levels.Change("ztunnel::proxy=debug", false); err != nil {
		t.Fatal(err)
	}
	log.Debug("two")
	if _, err := levels.Change("proxy=off", true); err != nil {
		t.Fatal(err)
	}
	log.Error("three")
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "\ttwo") {
		t.Errorf("lines %q, want only two", got)
	}
}

func TestAccessLogFollowsLevels(t *testing.T) {
	levels := NewLevels(Filter{})
	l := newLab(t, Config{Levels: levels})
	flows := func(name, directives string) {
		t.Helper()
		if _, err := levels.Change(directives, true); err != nil {
			t.Fatal(err)
		}
		f := outbound()
		f.Service = name
		l.Open(f, nil).Finish(nil)
		l.Open(f, nil).Finish(errors.New("x"))
	}
	flows("debugging", "access=debug")
	flows("normal", "info")
	flows("errors", "info,access=error")
	flows("nothing", "access=off")
	got := l.written(t)
	for name, want := range map[string]int{"debugging": 4, "normal": 2, "errors": 1, "nothing": 0} {
		if n := strings.Count(got, `"`+name+`"`); n != want {
			t.Errorf("%s: %d lines, want %d\n%s", name, n, want, got)
		}
	}
}

func BenchmarkLogger(b *testing.B) {
	log := NewLogger(discardWriter{}, Plain, NewLevels(Filter{Targets: map[string]slog.Level{"access": slog.LevelDebug}})).With(TargetKey, "proxy")
	b.ReportAllocs()
	for b.Loop() {
		log.Info("pod received", "uid", "5d8c-uid", "ns", "shop")
	}
}

type discardWriter struct{}

func (discardWriter) Write(p []byte) (int, error) { return len(p), nil }
