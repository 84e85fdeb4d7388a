package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	passes = `{"Action":"start","Package":"p"}
{"Action":"output","Package":"p","Output":"-test.shuffle 1\n"}
{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestA/DP-1"}
{"Action":"output","Package":"p","Test":"TestA/DP-1","Output":"    a_test.go:1: chatter\n"}
{"Action":"pass","Package":"p","Test":"TestA/DP-1"}
{"Action":"pass","Package":"p","Test":"TestA/AZ-2,_FP-03:_both"}
{"Action":"skip","Package":"p","Test":"TestA/DP-3"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Output":"PASS\n"}
{"Action":"output","Package":"p","Output":"ok  \tp\t0.1s\n"}
{"Action":"pass","Package":"p"}
`
	fails = `{"Action":"output","Package":"q","Test":"TestB/DP-2","Output":"    b_test.go:1: wrong\n"}
{"Action":"fail","Package":"q","Test":"TestB/DP-2"}
{"Action":"fail","Package":"q","Test":"TestB"}
{"Action":"output","Package":"q","Output":"FAIL\tq\t0.1s\n"}
{"Action":"fail","Package":"q"}
`
	scenarios = `areas:
- {prefix: DP, about: data path, ids: 1-4, finished: "1, 2"}
- {prefix: FP, about: field, ids: 1-3, finished: "3"}
- {prefix: AZ, about: policy, ids: 1-2, finished: ""}
`
)

func TestRun(t *testing.T) {
	tests := []struct {
		name, events, scenarios, untested string
		args                              []string
		code                              int
		want                              []string // in the output, in this order
		not                               string
	}{
		{
			name: "missing", events: passes, scenarios: scenarios, untested: "{}", code: 1,
			want: []string{"ok  \tp\t0.1s\n", "DP   data path", "1 of   4,   2 due", "missing: DP-2;", "FP   field", "1 of   3,   1 due", "1 of   2,   0 due"}, not: "chatter",
		},
		{name: "with a reason", events: passes, scenarios: scenarios, untested: "{DP-2: later}", code: 0, not: "missing"},
		{
			name: "each", events: passes, scenarios: scenarios, untested: "{DP-2: later}", args: []string{"-list"}, code: 0,
			want: []string{"DP-1     p.TestA/DP-1\n", "DP-2     untested: later\n", "DP-3     not due\n", "FP-03    p.TestA/AZ-2,_FP-03:_both\n"},
		},
		{name: "a reason too many", events: passes, scenarios: scenarios, untested: "{DP-2: later, DP-1: never}", code: 1, want: []string{"why not: DP-1\n"}},
		{
			name: "failed", events: passes + fails, scenarios: scenarios, untested: "{DP-2: later}", code: 1,
			want: []string{"b_test.go:1: wrong", "FAIL\tq", "scenarios: failed: q\n", "scenarios: failed: q.TestB\n", "scenarios: failed: q.TestB/DP-2\nscenarios:     b_test.go:1: wrong\n"},
		},
		{
			name: "not built", events: `{"ImportPath":"r","Action":"build-output","Output":"r.go:1: no\n"}` + "\n" + `{"ImportPath":"r","Action":"build-fail"}`,
			scenarios: scenarios, untested: "{}", code: 1, want: []string{"r.go:1: no\n", "scenarios: failed: r\n"},
		},
		{name: "nothing", events: "", scenarios: scenarios, untested: "{}", code: 1, want: []string{"no package was tested"}},
		{
			name: "died midway", events: passes + `{"Action":"start","Package":"z"}` + "\n" + `{"Action":"run","Package":"z","Test":"TestZ"}`, scenarios: scenarios, untested: "{DP-2: x}", code: 1,
			want: []string{"scenarios: failed: z (did not end)\n"},
		},
		{
			name: "a command", args: []string{"--", "printf", "%s\n", `{"Action":"pass","Package":"p","Test":"TestA/DP-1,DP-2,FP-03"}`, `{"Action":"pass","Package":"p"}`},
			scenarios: scenarios, untested: "{}", code: 0, want: []string{"2 of   4,   2 due"},
		},
		{
			name: "a command that fails", args: []string{"--", "sh", "-c", `echo '{"Action":"pass","Package":"p","Test":"TestA/DP-1,DP-2,FP-03"}'; echo '{"Action":"pass","Package":"p"}'; exit 3`},
			scenarios: scenarios, untested: "{}", code: 1, want: []string{"2 of   4,   2 due", "scenarios: sh: exit status 3"},
		},
		{name: "no command", args: []string{"--", "./nothing"}, scenarios: scenarios, untested: "{}", code: 1, want: []string{"./nothing"}},
		{name: "go's own words", events: "go: no\n" + passes, scenarios: scenarios, untested: "{DP-2: x}", code: 0, want: []string{"go: no\n"}},
		{name: "unknown scenario", events: passes, scenarios: scenarios, untested: "{DP-9: x}", code: 2, want: []string{"DP-9: there is no such scenario"}},
		{name: "no reason", events: passes, scenarios: scenarios, untested: `{DP-2: ""}`, code: 2, want: []string{"DP-2: no reason"}},
		{name: "bad range", events: passes, scenarios: "areas: [{prefix: DP, ids: 1-x}]", untested: "{}", code: 2, want: []string{"DP: ids:"}},
		{name: "finished and unknown", events: passes, scenarios: `areas: [{prefix: DP, ids: 1-2, finished: "3"}]`, untested: "{}", code: 2, want: []string{"there is no DP-3"}},
		{name: "unknown key", events: passes, scenarios: "areas: [{prefiks: DP}]", untested: "{}", code: 2, want: []string{"prefiks"}},
		{name: "usage", args: []string{"-x"}, scenarios: scenarios, untested: "{}", code: 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range map[string]string{"scenarios.yaml": tt.scenarios, "untested.yaml": tt.untested} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var out strings.Builder
			code := run(t.Context(), append([]string{"-dir", dir}, tt.args...), strings.NewReader(tt.events), &out, &out)
			if code != tt.code {
				t.Errorf("ends with %d, want %d", code, tt.code)
			}
			rest := out.String()
			for _, w := range tt.want {
				_, after, found := strings.Cut(rest, w)
				if !found {
					t.Errorf("no %q in what is left of the output:\n%s", w, out.String())
				}
				rest = after
			}
			if tt.not != "" && strings.Contains(out.String(), tt.not) {
				t.Errorf("%q is in the output:\n%s", tt.not, out.String())
			}
		})
	}
	t.Run("no plan", func(t *testing.T) {
		var out strings.Builder
		if code := run(t.Context(), []string{"-dir", t.TempDir()}, strings.NewReader(passes), &out, &out); code != 2 {
			t.Errorf("ends with %d: %s", code, out.String())
		}
	})
}

func TestThePlanOfTheRepository(t *testing.T) {
	p, err := load("../../testdata/scenarios.yaml", "../../testdata/untested.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(p.areas) != 7 {
		t.Errorf("%d areas, want those of the seven prefixes", len(p.areas))
	}
}

func TestIDsOf(t *testing.T) {
	for name, want := range map[string][]string{
		"TestX/DP-17":            {"DP-17"},
		"TestX/DP-17_DP-18/v4":   {"DP-17", "DP-18"},
		"TestX/DP-17,_FP-101:_a": {"DP-17", "FP-101"},
		"TestX/IPID-17":          nil,
		"TestX/DP-17-3":          nil,
		"TestX/DP-171x":          {"DP-171"},
	} {
		if got := idsOf(name); !slices.Equal(got, want) {
			t.Errorf("idsOf(%q) = %q, want %q", name, got, want)
		}
	}
}
