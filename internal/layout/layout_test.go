// Package layout keeps the picture of the packages true: which there are, what each is for, and who may import whom.
//
// It has no code of its own. Its test holds the table and compares it with the tree.
package layout

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "ztun.dev/ztun"

// A row is a package, its charter, and which packages of this module it may import (below internal without that prefix).
type row struct {
	path, charter string
	imports       []string
}

// Data flows down the page: state and transport first, then what is built of them.
var table = []row{
	{"tun", "layer-3 devices and what leads packets to them", nil},
	{"internal/loop", "event loops: which task moves bytes next, and on which thread", nil},
	{"internal/strict", "what people write, read so that each mistake is told with its place", nil},
	{"internal/workload", "the mesh as this node sees it", []string{"strict"}},
	{"internal/ca", "a small certificate authority in files", nil},
	{"internal/lab", "whole networks of namespaces to try things on", nil},
	{"internal/layout", "this table", nil},
	{"configs", "example configuration, loaded by a test", nil},
	{"stack", "a netstack on one device: packets in, flows out", []string{"tun", "loop"}},
	{"internal/underlay", "kernel sockets in a chosen network namespace", []string{"tun", "stack", "loop"}},
	{"internal/identity", "certificates for identities", []string{"workload"}},
	{"internal/authz", "policy evaluated on facts of a connection", []string{"workload"}},
	{"internal/telemetry", "connection records, their metrics, the access log and the logger", []string{"workload"}},
	{"internal/config", "one typed configuration of all sources", []string{"telemetry", "strict"}}, // filters, formats and labels are read by who uses them
	{"internal/hbone", "HTTP/2 CONNECT over mTLS", []string{"workload", "loop"}},
	{"internal/replay", "a packet capture played to a netstack", []string{"tun", "loop", "hbone", "workload"}},
	{"dnsproxy", "names of the mesh answered, others forwarded", []string{"workload", "telemetry", "loop"}}, // its resolver waits as set-ups do
	{"internal/admin", "HTTP for people and probes: state, metrics, readiness, log levels", []string{"workload", "telemetry"}},
	{"proxy", "decides what happens to a flow and moves its bytes", []string{"stack", "loop", "hbone", "authz", "workload", "telemetry"}},
	{"internal/explain", "why a flow goes where it goes", []string{"tun", "proxy", "dnsproxy", "authz", "workload"}}, // tun's exemptions; names mean what DNS says
	{"internal/node", "the composition root", []string{
		"tun", "stack", "proxy", "dnsproxy", "loop", "config", "workload", "ca", "underlay", "identity", "authz", "telemetry", "hbone",
		"admin", "replay", "explain",
	}},
	{"internal/demo", "the demonstration of the README", []string{"lab", "node", "ca", "config"}},
	{"internal/benchnet", "what ztun costs, beside direct traffic and yardsticks", []string{"lab", "ca", "config", "node"}},
	{"internal/scenarios", "which of the numbered scenarios the tests have shown", nil},
	{"cmd/ztun", "the command line", []string{"strict", "config", "node", "admin", "workload", "demo", "ca", "explain", "replay"}},
}

// outside lists packages that may use any module: they are for trials and tests.
var outside = []string{"internal/lab", "internal/ca", "internal/layout", "internal/benchnet", "internal/scenarios"}

// behind says behind which packages a module stays, so that it can be replaced there. The longest prefix counts.
var behind = map[string][]string{
	"gvisor.dev/gvisor":               {"stack"},
	"github.com/vishvananda/netns":    {"tun"},
	"github.com/vishvananda/netlink":  {"tun"},
	"github.com/google/nftables":      {"tun"},
	"github.com/cilium/ebpf":          {"tun"},
	"golang.org/x/net/bpf":            {"internal/underlay"},
	"golang.org/x/net/http2":          {"internal/hbone"},
	"github.com/miekg/dns":            {"dnsproxy"},
	"github.com/spf13/cobra":          {"cmd/ztun"},
	"github.com/spf13/pflag":          {"cmd/ztun"}, // cobra's
	"go.yaml.in/yaml/v3":              {"internal/strict", "internal/config", "internal/workload", "internal/replay"},
	"golang.org/x/sys/unix":           {"tun", "stack", "internal/loop", "internal/underlay", "internal/node", "internal/demo"}, // the kernel's interface
	"golang.org/x/sync":               {"internal/node", "internal/demo"},
	"github.com/hashicorp/golang-lru": {"internal/workload", "internal/identity", "dnsproxy"},
	"github.com/rogpeppe/go-internal": {"cmd/ztun"},                                                                                                        // its diff
	"github.com/prometheus":           {"tun", "stack", "proxy", "dnsproxy", "internal/hbone", "internal/identity", "internal/telemetry", "internal/node"}, // each counts for itself
}

// A pkg is what go list says of a package.
type pkg struct {
	ImportPath, Dir, Name                              string
	GoFiles, IgnoredGoFiles, TestGoFiles, XTestGoFiles []string
	Imports                                            []string
}

// name is the path within the module.
func (p *pkg) name() string { return strings.TrimPrefix(p.ImportPath, module+"/") }

func list(t *testing.T, goos string) []*pkg {
	t.Helper()
	touch(t)
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json", module+"/...")
	cmd.Env = append(os.Environ(), "GOOS="+goos, "CGO_ENABLED=0")
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		t.Fatalf("go list: %v\n%s", err, exit.Stderr)
	} else if err != nil {
		t.Fatal(err)
	}
	var pkgs []*pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		p := new(pkg)
		if err := dec.Decode(p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

// touch opens every directory of the tree: go test takes an old result of this test for good unless something that it opened itself has
// changed, and go list is another process.
func touch(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir("../..", func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (d.Name() == ".git" || d.Name() == "bin" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func find(name string) (row, bool) {
	i := slices.IndexFunc(table, func(r row) bool { return r.path == name })
	if i < 0 {
		return row{}, false
	}
	return table[i], true
}

// forbidden says why a package may not import another; "" if it may.
func forbidden(r row, imported string) string {
	if own, ok := strings.CutPrefix(imported, module+"/"); ok {
		if !slices.Contains(r.imports, strings.TrimPrefix(own, "internal/")) {
			return "the table does not allow it; declare an interface, or change the table and say why"
		}
		return ""
	}
	if first, _, _ := strings.Cut(imported, "/"); !strings.Contains(first, ".") || slices.Contains(outside, r.path) {
		return ""
	}
	longest := ""
	for prefix := range behind {
		if (imported == prefix || strings.HasPrefix(imported, prefix+"/")) && len(prefix) > len(longest) {
			longest = prefix
		}
	}
	switch {
	case longest == "":
		return "the module is not in the table; name the package that it stays behind"
	case !slices.Contains(behind[longest], r.path):
		return fmt.Sprintf("it stays behind %s", strings.Join(behind[longest], ", "))
	}
	return ""
}

func TestImports(t *testing.T) {
	for _, goos := range []string{"linux", "darwin"} {
		for _, p := range list(t, goos) {
			r, ok := find(p.name())
			if !ok {
				t.Errorf("%s is not in the table; give it a row with its charter and imports", p.name())
				continue
			}
			for _, imported := range p.Imports {
				if why := forbidden(r, imported); why != "" {
					t.Errorf("%s (%s) imports %s: %s", p.name(), goos, imported, why)
				}
			}
		}
	}
}

func TestForbidden(t *testing.T) {
	for _, tt := range []struct {
		name, imported string
		want           bool
	}{
		{"proxy", "ztun.dev/ztun/stack", false},
		{"proxy", "ztun.dev/ztun/internal/hbone", false},
		{"proxy", "ztun.dev/ztun/internal/underlay", true},
		{"stack", "ztun.dev/ztun/proxy", true},
		{"stack", "gvisor.dev/gvisor/pkg/tcpip", false},
		{"proxy", "gvisor.dev/gvisor/pkg/tcpip", true},
		{"internal/hbone", "golang.org/x/net/http2/hpack", false},
		{"internal/hbone", "golang.org/x/net/html", true},
		{"internal/lab", "github.com/vishvananda/netlink", false},
		{"internal/lab", "ztun.dev/ztun/tun", true},
		{"dnsproxy", "net/netip", false},
	} {
		r, ok := find(tt.name)
		if !ok {
			t.Fatalf("no row %s", tt.name)
		}
		if why := forbidden(r, tt.imported); (why != "") != tt.want {
			t.Errorf("%s imports %s: %q, want forbidden = %v", tt.name, tt.imported, why, tt.want)
		}
	}
}

func TestTable(t *testing.T) {
	seen := make(map[string]bool)
	for _, r := range table {
		if seen[r.path] || r.charter == "" {
			t.Errorf("row %s is there twice or has no charter", r.path)
		}
		for _, i := range r.imports {
			if !seen[i] && !seen["internal/"+i] {
				t.Errorf("row %s allows %s, which is not above it: data flows down", r.path, i)
			}
		}
		seen[r.path] = true
	}
	for prefix, pkgs := range behind {
		for _, p := range pkgs {
			if !seen[p] {
				t.Errorf("%s stays behind %s, which is not in the table", prefix, p)
			}
		}
	}
}

// Each package has one package doc, in one file, that begins as godoc wants it.
func TestPackageDocs(t *testing.T) {
	for _, p := range list(t, "linux") {
		files := slices.Concat(p.GoFiles, p.IgnoredGoFiles)
		if len(p.GoFiles) == 0 {
			files = slices.Concat(p.TestGoFiles, p.XTestGoFiles)
		}
		var docs []string
		for _, f := range files {
			doc := packageDoc(t, filepath.Join(p.Dir, f))
			if doc == "" {
				continue
			}
			docs = append(docs, f)
			begin := "Package " + p.Name + " "
			if p.Name == "main" {
				begin = "Command " + path.Base(p.ImportPath) + " "
			}
			if first, _, _ := strings.Cut(doc, "\n\n"); !strings.HasPrefix(doc, begin) || !strings.HasSuffix(strings.TrimSpace(first), ".") {
				t.Errorf("%s/%s: the package doc is %q; begin with a sentence %q that says the charter", p.name(), f, first, begin+"…")
			}
		}
		if len(docs) != 1 {
			t.Errorf("%s: package docs in %v, want exactly one", p.name(), docs)
		}
	}
}

func packageDoc(t *testing.T, file string) string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly|parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	return f.Doc.Text()
}
