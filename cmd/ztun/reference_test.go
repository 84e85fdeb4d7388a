package main

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/telemetry"
)

var update = flag.Bool("update", false, "write the table of settings into the reference anew")

const referencePage = "../../docs/reference.md"

// The reference page lists the settings as they are.
func TestReferenceOfSettings(t *testing.T) {
	data, err := os.ReadFile(referencePage)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "-update -->\n", "<!-- end of settings -->"
	before, rest, _ := strings.Cut(string(data), begin)
	got, after, ok := strings.Cut(rest, end)
	if !ok {
		t.Fatal("the marks around the table are gone")
	}
	var b strings.Builder
	b.WriteString("\n| variable | key | type | default | meaning |\n|---|---|---|---|---|\n")
	code := func(s string) string {
		if s == "" {
			return ""
		}
		return "`" + strings.ReplaceAll(s, "|", "`, `") + "`"
	}
	for _, s := range config.Settings() {
		kind := s.Type
		if strings.Contains(kind, "|") {
			kind = code(kind)
		}
		meaning := s.Meaning
		if s.Secret {
			meaning += "; secret: no flag"
		}
		if s.Unused {
			meaning += "; *" + notUsed + "*"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", code(s.Variable), code(s.Key), kind, code(s.Default), strings.ReplaceAll(meaning, "|", `\|`))
	}
	b.WriteString("\n")
	if *update {
		if err := os.WriteFile(referencePage, []byte(before+begin+b.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(b.String(), got); diff != "" {
		t.Errorf("run go test ./cmd/ztun -run Reference -update (-settings +page):\n%s", diff)
	}
}

// The reference page names every metric of the connection records, every label, flag and reason.
func TestReferenceOfMetrics(t *testing.T) {
	data, err := os.ReadFile(referencePage)
	if err != nil {
		t.Fatal(err)
	}
	r, err := telemetry.NewRecorder(telemetry.Config{Now: time.Now, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ch := make(chan *prometheus.Desc, 100)
	r.Describe(ch)
	close(ch)
	name := regexp.MustCompile(`fqName: "([^"]+)"`)
	var want []string
	for d := range ch {
		want = append(want, name.FindStringSubmatch(d.String())[1])
	}
	for f := telemetry.FlagNone; f <= telemetry.FlagReset; f++ {
		want = append(want, f.String())
	}
	for _, r := range telemetry.Reasons() {
		want = append(want, string(r))
	}
	if len(want) < 30 {
		t.Errorf("only %d names: %v", len(want), want)
	}
	for _, w := range want {
		if !strings.Contains(string(data), "`"+w+"`") {
			t.Errorf("%s is not there", w)
		}
	}
}
