// Package configs holds example configuration: node.yaml, the configuration of a node with every setting in it, and mesh.yaml, the state
// of a mesh. Its test loads every file and compares node.yaml with the settings that there are.
package configs

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/workload"
)

var update = flag.Bool("update", false, "write the list of settings into node.yaml anew")

// examples are values that node.yaml gives; other settings are there as comments.
var examples = map[string]string{"nodeName": "node-a", "localXdsPath": "configs/mesh.yaml", "fakeCa": "true", "fakeCaRoot": "/etc/ztun/root.pem"}

// reference is the list of settings in node.yaml.
func reference() string {
	var b strings.Builder
	for _, s := range config.Settings() {
		name, effect := s.Variable, ""
		if name == "" {
			name = s.Key
		}
		if s.Unused {
			effect = "; no effect yet"
		}
		fmt.Fprintf(&b, "\n# %s: %s (%s%s)\n", name, s.Meaning, s.Type, effect)
		if v, ok := examples[s.Key]; ok {
			fmt.Fprintf(&b, "%s: %s\n", s.Key, v)
		} else {
			fmt.Fprintf(&b, "#%s\n", strings.TrimSuffix(s.Key+": "+s.Default, " "))
		}
	}
	return b.String()
}

func TestNode(t *testing.T) {
	data, err := os.ReadFile("node.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const mark = "\n# Settings.\n"
	before, list, _ := strings.Cut(string(data), mark)
	if *update {
		if err := os.WriteFile("node.yaml", []byte(before+mark+reference()), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if list != reference() {
		t.Error("node.yaml does not list the settings as they are; run go test ./configs -update")
	}

	t.Chdir("..") // paths in it are relative to the root of the repository
	cfg, err := config.Load(config.Sources{File: "configs/node.yaml"})
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range examples {
		if o := cfg.Origin(key); o.Source != config.FromFile {
			t.Errorf("%s, in the file %s, is from the %s", key, want, o)
		}
	}
	state, err := os.ReadFile(cfg.LocalXDSPath)
	if err != nil {
		t.Fatal(err)
	}
	st, err := workload.ParseStatic(cfg.LocalXDSPath, state)
	if err != nil {
		t.Fatal(err)
	}
	snap := workload.NewSnapshot(st)
	if len(cfg.Pods) == 0 {
		t.Error("no pods")
	}
	for _, p := range cfg.Pods {
		c := &workload.Client{UID: p.UID, Name: p.Name, Namespace: p.Namespace, ServiceAccount: p.ServiceAccount, Node: cfg.NodeName}
		if snap.Local(c) == nil {
			t.Errorf("pod %s is not in %s", c, cfg.LocalXDSPath)
		}
	}
}

// The defaults that comments show are right: uncommented they change nothing but where a value comes from.
func TestCommentedSettings(t *testing.T) {
	data, err := os.ReadFile("node.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "node.yaml")
	var all strings.Builder
	for line := range strings.Lines(string(data)) {
		if key, ok := strings.CutPrefix(line, "#"); ok && !strings.HasPrefix(key, " ") && key != "\n" {
			line = key
		}
		all.WriteString(line)
	}
	if err := os.WriteFile(file, []byte(all.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := config.Load(config.Sources{File: file})
	if err != nil {
		t.Fatalf("with every setting: %v", err)
	}
	want, err := config.Load(config.Sources{File: "node.yaml"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(config.Config{}), cmpopts.IgnoreFields(config.Config{}, "File"), cmpopts.EquateComparable(config.Threads{}, netip.AddrPort{})); diff != "" {
		t.Errorf("with every setting (-node.yaml +uncommented):\n%s", diff)
	}
}

func TestEveryFileIsLoaded(t *testing.T) {
	files, err := filepath.Glob("*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(files, " "), "mesh.yaml node.yaml"; got != want {
		t.Errorf("files: %s, of which a test loads %s", got, want)
	}
}
