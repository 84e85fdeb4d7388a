package main

import (
	"encoding/json"
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"ztun": main, "stubborn": stubborn})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:           "testdata",
		UpdateScripts: *update,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits,
			"lines": lines,
		},
		Condition: func(cond string) (bool, error) { return cond == "root" && os.Geteuid() == 0, nil },
	})
}

// exits runs a command that has to end with an exit code: exits 2 ztun frobnicate.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits code command [argument...]")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := "0"
	if err != nil {
		got = strings.TrimPrefix(err.Error(), "exit status ")
	}
	if got != args[0] {
		ts.Fatalf("exit code %s, want %s", got, args[0])
	}
}

// lines counts the lines of stdout or stderr: lines stderr 1.
func lines(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: lines file count")
	}
	text := ts.ReadFile(args[0])
	var n int
	ts.Check(json.Unmarshal([]byte(args[1]), &n))
	if got := strings.Count(text, "\n"); got != n {
		ts.Fatalf("%s has %d lines, want %d:\n%s", args[0], got, n, text)
	}
}

// Every command that people see says what it does and shows one example.
func TestCommandsAreExplained(t *testing.T) {
	root := newRoot(nil)
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if !c.Hidden && (c.Short == "" || !strings.Contains(c.Example, "ztun ")) {
			t.Errorf("%s has no short description or no example", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
}

func TestReadBuild(t *testing.T) {
	info := &debug.BuildInfo{
		Main: debug.Module{Version: "v1.2.3"},
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
		},
	}
	got := readBuild(info)
	want := build{Version: "v1.2.3", Revision: "abc", Time: "2026-01-02T03:04:05Z", Modified: true, Go: got.Go, Platform: got.Platform}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var text strings.Builder
	if err := got.print(&text, outputText); err != nil {
		t.Fatal(err)
	}
	if want := "ztun v1.2.3 (revision abc, modified, " + got.Go + ", " + got.Platform + ")\n"; text.String() != want {
		t.Errorf("text = %q, want %q", text.String(), want)
	}
	if b := readBuild(nil); b.Version != "unknown" || b.Revision != "unknown" {
		t.Errorf("without information: %+v", b)
	}
}
