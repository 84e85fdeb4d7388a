package config

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// writeFile puts text into node.yaml of a new directory, which becomes the working directory.
func writeFile(t *testing.T, text string) string {
	t.Helper()
	t.Chdir(t.TempDir())
	if err := os.WriteFile("node.yaml", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return "node.yaml"
}

func mustLoad(t *testing.T, src Sources) *Config {
	t.Helper()
	c, err := Load(src)
	if err != nil {
		t.Fatalf("Load(%+v): %v", src, err)
	}
	return c
}

func TestDefaults(t *testing.T) {
	got := mustLoad(t, Sources{})
	want := &Config{
		ClusterID:                  "Kubernetes",
		ClusterDomain:              "cluster.local",
		TrustDomain:                "cluster.local",
		IPv6Enabled:                true,
		HandoverSocket:             "/var/run/ztunnel/ztun.sock",
		LogFilter:                  LogFilter{Default: slog.LevelInfo},
		PoolMaxStreams:             100,
		PoolUnusedRelease:          5 * time.Minute,
		HTTP2StreamWindowBytes:     4 << 20,
		HTTP2ConnectionWindowBytes: 16 << 20,
		HTTP2FrameBytes:            1 << 20,
		KeepaliveTime:              45 * time.Second,
		KeepaliveInterval:          15 * time.Second,
		KeepaliveRetries:           3,
		ConnectTimeout:             10 * time.Second,
		HandshakeTimeout:           10 * time.Second,
		ResponseTimeout:            20 * time.Second,
		MaxInFlight:                8192,
		MaxInFlightPerPod:          2048,
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Config{}), cmp.AllowUnexported(Threads{})); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	for _, s := range Settings() {
		if o := got.Origin(s.Key); o.String() != "default" {
			t.Errorf("origin of %s = %s, want default", s.Key, o)
		}
	}
}

func TestEachSourceIsStrongerThanTheOneBefore(t *testing.T) {
	file := writeFile(t, "network: file\nclusterId: file\nnodeName: file\n")
	c := mustLoad(t, Sources{
		File:  file,
		Env:   []string{"CLUSTER_ID=env", "NODE_NAME=env", "NODE_NAME=second", "ISTIO_META_CLUSTER_ID=meta"},
		Flags: map[string]string{"node-name": "flag"},
	})
	type result struct{ Value, Origin string }
	got := map[string]result{
		"trustDomain": {c.TrustDomain, c.Origin("trustDomain").String()},
		"network":     {c.Network, c.Origin("network").String()},
		"clusterId":   {c.ClusterID, c.Origin("clusterId").String()},
		"nodeName":    {c.NodeName, c.Origin("nodeName").String()},
	}
	want := map[string]result{
		"trustDomain": {"cluster.local", "default"},
		"network":     {"file", "file node.yaml:1"},
		"clusterId":   {"meta", "environment ISTIO_META_CLUSTER_ID"},
		"nodeName":    {"flag", "flag --node-name"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFileIsNamedByFlagOrVariable(t *testing.T) {
	file := writeFile(t, "network: here\n")
	other := filepath.Join(t.TempDir(), "other.yaml")
	if err := os.WriteFile(other, []byte("network: there\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		src  Sources
		want string
	}{
		{"variable", Sources{Env: []string{"ZTUN_CONFIG=" + file}}, "here"},
		{"flag wins", Sources{File: other, Env: []string{"ZTUN_CONFIG=" + file}}, "there"},
		{"empty variable is none", Sources{Env: []string{"ZTUN_CONFIG="}}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := mustLoad(t, tt.src).Network; got != tt.want {
				t.Errorf("network = %q, want %q", got, tt.want)
			}
		})
	}
}

// Every setting can be given in all three ways, and they mean the same.
func TestEverySettingFromEverySource(t *testing.T) {
	samples := map[string]string{
		"string": "some", "domain": "mesh.example", "bool": "true", "duration": "90s", "number": "7", "size": "70KiB", "threads": "50%", "filter": "debug,access=info",
	}
	opts := []cmp.Option{cmpopts.IgnoreUnexported(Config{}), cmpopts.IgnoreFields(Config{}, "File"), cmp.AllowUnexported(Threads{})}
	for _, s := range Settings() {
		t.Run(s.Key, func(t *testing.T) {
			v, ok := samples[s.Type]
			if !ok {
				t.Fatalf("no sample of type %q", s.Type)
			}
			if s.Meaning == "" {
				t.Errorf("%s has no meaning", s.Key)
			}
			file := mustLoad(t, Sources{File: writeFile(t, s.Key+": "+v+"\n")})
			env := mustLoad(t, Sources{Env: []string{s.Variable + "=" + v}})
			flag := mustLoad(t, Sources{Flags: map[string]string{s.Flag: v}})
			if diff := cmp.Diff(env, file, opts...); diff != "" {
				t.Errorf("environment and file differ (-env +file):\n%s", diff)
			}
			if diff := cmp.Diff(env, flag, opts...); diff != "" {
				t.Errorf("environment and flag differ (-env +flag):\n%s", diff)
			}
			if s.Default != v && s.Type != "string" && s.Type != "bool" {
				if diff := cmp.Diff(mustLoad(t, Sources{}), env, opts...); diff == "" {
					t.Errorf("%s=%s changes nothing", s.Variable, v)
				}
			}
			for _, o := range []struct {
				got  Origin
				want Source
			}{{file.Origin(s.Key), FromFile}, {env.Origin(s.Key), FromEnvironment}, {flag.Origin(s.Key), FromFlag}} {
				if o.got.Source != o.want {
					t.Errorf("origin = %s, want %s", o.got, o.want)
				}
			}
		})
	}
}

func TestNamesAreUnique(t *testing.T) {
	seen := make(map[string]bool)
	for _, s := range Settings() {
		for _, n := range []string{s.Variable, s.Key + ":", "--" + s.Flag} {
			if seen[n] {
				t.Errorf("%s is there twice", n)
			}
			seen[n] = true
		}
	}
}

func TestFileErrors(t *testing.T) {
	tests := []struct {
		name, file string
		want       []string
	}{
		{"unknown key", "keepaliveTim: 5s\n", []string{`config: node.yaml:1: keepaliveTim: unknown key; did you mean keepaliveTime?`}},
		{"unknown key without a neighbour", "proxyProtocolVersion: 2\n", []string{`config: node.yaml:1: proxyProtocolVersion: unknown key`}},
		{"key twice", "network: a\nnetwork: b\n", []string{`config: node.yaml:2: network: is given twice`}},
		{"kinds", "network: [a]\nfakeCa: {}\npods: 3\n", []string{
			`config: node.yaml:1: network: want a string, have a list`,
			`config: node.yaml:2: fakeCa: want a bool, have a mapping`,
			`config: node.yaml:3: pods: want a list, have "3"`,
		}},
		{"values", "fakeCa: yes\nkeepaliveTime: 5\n", []string{
			`config: node.yaml:1: fakeCa: want true or false, have "yes"`,
			`config: node.yaml:2: keepaliveTime: want a duration such as 5s, 1m30s or 500ms, have "5"`,
		}},
		{"root", "- a\n", []string{`config: node.yaml:1: want a mapping, have a list`}},
		{"syntax", "network: a\n  b: c\n", []string{`config: node.yaml:2: mapping values are not allowed in this context`}},
		{"two documents", "network: a\n---\nnetwork: b\n", []string{`config: node.yaml: more than one YAML document; put everything into one`}},
		{"pods", `pods:
- {netns: /run/netns/a, nam: a, namespace: shop}
- {netns: b, name: b, namespace: shop}
- {netns: /run/netns/c, name: c, namespace: shop, serviceAccount: ""}
- {netns: /run/netns/d, name: d, namespace: shop}
- {netns: /run/netns/d, name: d, namespace: shop}
- {netns: /run/netns/e, name: e, namespace: null}
- oops
`, []string{
			`config: node.yaml:2: pods[0].nam: unknown key; did you mean name?`,
			`config: node.yaml:2: pods[0].name: is missing`,
			`config: node.yaml:3: pods[1].netns: want the path of a network namespace such as /run/netns/web, have "b"`,
			`config: node.yaml:4: pods[2]: name, namespace and serviceAccount must not be empty`,
			`config: node.yaml:6: pods[4].netns: /run/netns/d is that of pods[3] already`,
			`config: node.yaml:6: pods[4].name: shop/d is that of pods[3] already`,
			`config: node.yaml:7: pods[5].namespace: is missing`,
			`config: node.yaml:8: pods[6]: want a mapping, have "oops"`,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Load(Sources{File: writeFile(t, tt.file)})
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(tt.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("errors (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAllErrorsAtOnce(t *testing.T) {
	file := writeFile(t, "netwrk: a\nlocalXds: '{}'\n")
	_, err := Load(Sources{
		File:  file,
		Env:   []string{"ZTUN_HANDOVR_SOCKET=/x", "IPV6_ENABLED=1", "LOCAL_XDS_PATH=/mesh.yaml"},
		Flags: map[string]string{"keepalive-retries": "many"},
	})
	want := []string{
		`config: environment: ZTUN_HANDOVR_SOCKET: unknown variable; did you mean ZTUN_HANDOVER_SOCKET?`,
		`config: node.yaml:1: netwrk: unknown key; did you mean network?`,
		`config: invalid env var IPV6_ENABLED=1 (want true or false)`,
		`config: invalid flag --keepalive-retries=many (want a number from 1 to 127)`,
		`config: LOCAL_XDS (file node.yaml:2) and LOCAL_XDS_PATH (environment LOCAL_XDS_PATH): only one may be set`,
	}
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("errors (-want +got):\n%s", diff)
	}
}

func TestFileThatIsNotThere(t *testing.T) {
	_, err := Load(Sources{File: "/nowhere/node.yaml"})
	if want := "config: open /nowhere/node.yaml: no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("error = %v, want %s", err, want)
	}
}

func TestEmptyFilesSetNothing(t *testing.T) {
	for _, text := range []string{"", "# a comment\n", "{}\n", "null\n", "network:\n"} {
		if c := mustLoad(t, Sources{File: writeFile(t, text)}); c.Network != "" || c.ClusterID != "Kubernetes" {
			t.Errorf("file %q gives %+v", text, c)
		}
	}
}

func TestPods(t *testing.T) {
	c := mustLoad(t, Sources{File: writeFile(t, `
pods:
- &web {netns: /run/netns/web, uid: Kubernetes//Pod/shop/web-0, name: web-0, namespace: shop, serviceAccount: web}
- {netns: /proc/4711/ns/net, name: curl, namespace: test}
`)})
	want := []Pod{
		{"/run/netns/web", "Kubernetes//Pod/shop/web-0", "web-0", "shop", "web"},
		{"/proc/4711/ns/net", "", "curl", "test", "default"},
	}
	if diff := cmp.Diff(want, c.Pods); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
}

func TestVariablesThatAreNotOurs(t *testing.T) {
	mustLoad(t, Sources{Env: []string{
		"ZTUN_SERVICE_HOST=10.96.0.1", "ZTUN_SERVICE_PORT=80", "ZTUN_SERVICE_PORT_HTTP=80", "ZTUN_PORT=tcp://10.96.0.1:80",
		"ZTUN_PORT_80_TCP=tcp://10.96.0.1:80", "ZTUN_PORT_80_TCP_ADDR=10.96.0.1", "ZTUN_ADMIN_PORT_80_TCP_PROTO=tcp", "ZTUN_ADMIN_SERVICE_HOST=10.96.0.2",
		"ZTUN_REQUIRE_NETNS=1", "ZTUNNEL_SOMETHING=x", "HOME=/root", "nonsense",
	}})
	for _, v := range []string{"ZTUN_SUPPORT=x", "ZTUN_PORTS=1", "ZTUN_PORT_X=1", "ZTUN_=1", "ZTUN_TYPO=1"} {
		if _, err := Load(Sources{Env: []string{v}}); err == nil || !strings.Contains(err.Error(), "unknown variable") {
			t.Errorf("Load with %s: error = %v, want unknown variable", v, err)
		}
	}
}

func FuzzFile(f *testing.F) {
	f.Add("network: a\npods:\n- {netns: /run/netns/a, name: a, namespace: b}\n")
	f.Add("a: &a [*a]\n")
	f.Add("pods: &p\n- *p\n")
	f.Fuzz(func(t *testing.T, text string) {
		l := &loader{cfg: &Config{origins: make(map[string]Origin)}}
		l.parse("fuzz", []byte(text))
		for _, err := range l.errs {
			if !strings.HasPrefix(err.Error(), "config: fuzz:") {
				t.Errorf("file %q: error %q does not name the file", text, err)
			}
		}
		for _, p := range l.cfg.Pods {
			if len(l.errs) == 0 && (!strings.HasPrefix(p.Netns, "/") || p.Name == "" || p.Namespace == "" || p.ServiceAccount == "") {
				t.Errorf("file %q: accepted %+v", text, p)
			}
		}
	})
}
