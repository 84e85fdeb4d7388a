package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/lab"
)

// needPrivilege skips the test where no network can be built, unless ZTUN_REQUIRE_NETNS says that it has to.
func needPrivilege(t *testing.T) {
	t.Helper()
	l, err := lab.New(t.Context(), lab.Config{Nodes: 1})
	if err == nil {
		if _, err = os.Stat("/dev/net/tun"); err == nil {
			_ = l.Close()
			return
		}
		_ = l.Close()
	}
	if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
		t.Fatal(err)
	}
	t.Skip(err)
}

// run measures with ztun in this binary, with temporary files in a place of its own, where none may be left.
func run(t *testing.T, ctx context.Context, change func(o *options)) (*report, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var progress bytes.Buffer
	o := options{ztun: self, rounds: 1, duration: 50 * time.Millisecond, idle: 100, pods: 5, progress: &progress}
	change(&o)
	r, err := measure(ctx, o)
	if left, _ := filepath.Glob(tmp + "/*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	return r, err
}

func TestNetnsEveryFigureIsThere(t *testing.T) {
	needPrivilege(t)
	r, err := run(t, t.Context(), func(*options) {})
	if err != nil {
		t.Fatal(err)
	}
	everywhere := slices.Delete(slices.Clone(pathOrder), 0, 1) // but for what is of a process
	want := map[string][]string{"rss/process": {pathZtun}, podsRow: {pathZtun}, idleName + "/source": {pathPassthrough, pathMesh}, idleName + "/destination": {pathInbound, pathMesh}}
	for _, m := range measurements() {
		for _, w := range m.rows {
			switch {
			case !strings.HasPrefix(w.Name, "cpu/"):
				want[w.Name] = slices.DeleteFunc(slices.Clone(everywhere), func(p string) bool { return !m.isOn(p) })
			case strings.HasSuffix(w.Name, "/source"):
				want[w.Name] = []string{pathRelay, pathRelayPair, pathPassthrough, pathService, pathMesh, pathNetstackPassthrough, pathNetstackService, pathNetstackMesh}
			default:
				want[w.Name] = []string{pathRelayPair, pathInbound, pathMesh, pathNetstackInbound, pathNetstackMesh}
			}
		}
	}
	got := make(map[string][]string)
	for _, w := range r.Rows {
		for _, c := range w.Cells {
			got[w.Name] = append(got[w.Name], c.Path)
			// So few connections and namespaces may fit in what the process has already.
			if c.Median <= 0 && !strings.HasPrefix(w.Name, "rss/idle") && w.Name != podsRow {
				t.Errorf("%s on %s is %v", w.Name, c.Path, c.Median)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rows and paths (-want +got):\n%s", diff)
	}

	file := filepath.Join(t.TempDir(), "report.json")
	if err := r.write(file); err != nil {
		t.Fatal(err)
	}
	again, err := readReport(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r, again); diff != "" {
		t.Errorf("the report changes on its way through JSON (-written +read):\n%s", diff)
	}
}

func TestNetnsOnlyWhatIsAskedFor(t *testing.T) {
	needPrivilege(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "report.json")
	var stdout, stderr bytes.Buffer
	err = command(t.Context(), []string{"-ztun", self, "-only", "^pingpong/1/mesh$", "-rounds", "2", "-seconds", "0.03", "-json", file, "-markdown"}, &stdout, &stderr)
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range r.Rows {
		for _, c := range w.Cells {
			got = append(got, w.Name+"/"+c.Path)
			if len(c.Samples) != 2 {
				t.Errorf("%s/%s has %d samples, want one for each round", w.Name, c.Path, len(c.Samples))
			}
		}
	}
	want := []string{"pingpong/1/p50/direct", "pingpong/1/p50/mesh", "pingpong/1/p99/direct", "pingpong/1/p99/mesh"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what was measured (-want +got):\n%s", diff)
	}
	if !strings.Contains(stdout.String(), "| direct | mesh |") {
		t.Errorf("not Markdown:\n%s", stdout.String())
	}
}

// A ztun that serves nothing would be measured as direct.
func TestNetnsAPathAroundZtunIsNoFigure(t *testing.T) {
	needPrivilege(t)
	var b *bed
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if b, err = newBed(t.Context(), self, dir); err != nil {
		t.Fatal(err)
	}
	defer b.close()
	b.members = b.members[:0] // nodes without pods
	if err := b.startZtun(t.Context()); err != nil {
		t.Fatalf("a node without pods does not start: %v", err)
	}
	m := pingpongMeasurement(1)
	if _, err := m.through(t.Context(), b, b.paths[len(b.paths)-1], 10*time.Millisecond); err == nil || !strings.Contains(err.Error(), "not led through it") {
		t.Errorf("through = %v, want an error that says that ztun was not on the path", err)
	}
}

func TestNetnsInterrupted(t *testing.T) {
	needPrivilege(t)
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := run(t, ctx, func(o *options) { o.duration = time.Minute })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("measure = %v, want the end of the context", err)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("the end took %v", took)
	}
}
