package config

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/telemetry"
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

// comparing is how configurations are compared.
var comparing = []cmp.Option{
	cmpopts.IgnoreUnexported(Config{}), cmp.AllowUnexported(Threads{}), cmpopts.EquateComparable(netip.AddrPort{}, netip.Addr{}, netip.Prefix{}),
}

func TestDefaults(t *testing.T) {
	got := mustLoad(t, Sources{})
	want := &Config{
		EnableProxy:                true,
		DNSCapture:                 true,
		DNSProxyAddr:               netip.AddrPortFrom(netip.Addr{}, 15053),
		InpodUDS:                   "/var/run/ztunnel/ztunnel.sock",
		InpodPortReuse:             true,
		IstioVersion:               "unknown",
		XDSRootCA:                  "./var/run/secrets/istio/root-cert.pem",
		CARootCA:                   "./var/run/secrets/istio/root-cert.pem",
		AuthToken:                  "./var/run/secrets/tokens/istio-token",
		SecretTTL:                  24 * time.Hour,
		ReadyIgnorePending:         30 * time.Second,
		RemovedPodGrace:            5 * time.Second,
		AdminPort:                  15000,
		StatsPort:                  15020,
		LocalhostAppTunnel:         true,
		EnableResponseBaggage:      true,
		KeepaliveEnabled:           true,
		UserTimeoutEnabled:         true,
		HalfClosedTimeout:          time.Hour,
		TerminationDeadline:        5 * time.Second,
		BufferLimitBytes:           256 << 20,
		XDSInitialVersionsBytes:    3584 << 10,
		XDSOnDemandTimeout:         2 * time.Second,
		XDSMaxMessageBytes:         2 << 30,
		DNSResolvConf:              "/etc/resolv.conf",
		DNSCacheEntries:            16384,
		DNSCacheBytes:              32 << 20,
		DNSStale:                   time.Hour,
		DNSUDPBytes:                1232,
		DNSTimeout:                 4500 * time.Millisecond,
		ClusterID:                  "Kubernetes",
		ClusterDomain:              "cluster.local",
		TrustDomain:                "cluster.local",
		IPv6Enabled:                true,
		HandoverSocket:             "/var/run/ztunnel/ztun.sock",
		LogFilter:                  telemetry.Filter{Default: slog.LevelInfo},
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
	if diff := cmp.Diff(want, got, comparing...); diff != "" {
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
		"string": "some", "domain": "mesh.example", "bool": "true", "duration": "90s", "number": "7", "size": "2070KiB", "threads": "50%", "filter": "debug,access=info",
		"address": "127.0.0.1:53", "mark": "7", "workload": "shop/cart/default", "roots": "SYSTEM", "prefixes": "10.0.0.0/8", "cores": "3", "quantity": "2500m",
		"labels": "revision", "words": "policy", "seconds": "30", "upstream": "10.0.0.1", "domains": "a.example,b.example",
		"dnsUdpSize": "4096", // of one setting
	}
	opts := append([]cmp.Option{cmpopts.IgnoreFields(Config{}, "File", "Metadata")}, comparing...)
	for _, s := range Settings() {
		t.Run(s.Key, func(t *testing.T) {
			v, ok := samples[s.Key]
			if choices := strings.Split(s.Type, "|"); !ok && len(choices) > 1 {
				v = choices[len(choices)-1]
			} else if !ok {
				if v, ok = samples[s.Type]; !ok {
					t.Fatalf("no sample of type %q", s.Type)
				}
			}
			if s.Meaning == "" {
				t.Errorf("%s has no meaning", s.Key)
			}
			sources := map[Source]Sources{FromFile: {File: writeFile(t, s.Key+": "+v+"\n")}}
			if s.Variable != "" {
				sources[FromEnvironment] = Sources{Env: []string{s.Variable + "=" + v}}
			}
			if s.Flag != "" {
				sources[FromFlag] = Sources{Flags: map[string]string{s.Flag: v}}
			}
			file := loadUnchecked(t, sources[FromFile])
			for from, src := range sources {
				c := loadUnchecked(t, src)
				if diff := cmp.Diff(file, c, opts...); diff != "" {
					t.Errorf("file and %s differ (-file +%s):\n%s", from, from, diff)
				}
				if o := c.Origin(s.Key); o.Source != from {
					t.Errorf("origin = %s, want %s", o, from)
				}
			}
			if s.Default != v && s.Type != "bool" && s.Key != "logFormat" {
				if diff := cmp.Diff(loadUnchecked(t, Sources{}), file, opts...); diff == "" {
					t.Errorf("%s: %s changes nothing", s.Key, v)
				}
			}
		})
	}
}

// loadUnchecked reads the sources, whatever their values mean together.
func loadUnchecked(t *testing.T, src Sources) *Config {
	t.Helper()
	l := newLoader()
	l.read(src)
	if err := errors.Join(l.errs...); err != nil {
		t.Fatalf("%+v: %v", src, err)
	}
	return l.cfg
}

func TestNamesAreUnique(t *testing.T) {
	seen := make(map[string]bool)
	for _, s := range Settings() {
		for _, n := range []string{s.Variable, s.Key + ":", "--" + s.Flag} {
			if seen[n] && n != "" && n != "--" {
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
		{"a packet capture", "\xd4\xc3\xb2\xa1\x02\x00", []string{`config: node.yaml:1: this is no text in UTF-8; want a YAML file`}},
		{"a program", "\x7fELF\x02\x01\x01\x00", []string{`config: node.yaml:1: this is no text in UTF-8; want a YAML file`}},
		{"Latin-1", "network: a\nclusterId: caf\xe9\n", []string{`config: node.yaml:2: this is no text in UTF-8; want a YAML file`}},
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

// The order of all sources: mesh file, file, PROXY_CONFIG, environment.
func TestProxyConfig(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{
		"mesh": `
trustDomain: somewhere.else
defaultConfig:
  statsPort: 1
  proxyAdminPort: 1
  concurrency: 3
  drainDuration: 45s
  proxyMetadata:
    DNS_CAPTURE: "false"
    ISTIO_META_ISTIO_VERSION: mesh
    CLUSTER_ID: mesh
    OTHER: kept
`,
		"node.yaml": "proxyAdminPort: 2\nstatsPort: 2\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := mustLoad(t, Sources{Mesh: "mesh", File: "node.yaml", Env: []string{
		`PROXY_CONFIG={"statsPort": 3, "proxyMetadata": {"CLUSTER_ID": "proxy", "ISTIO_META_ISTIO_VERSION": "proxy"}}`,
		"ISTIO_META_ISTIO_VERSION=1.30.0", "ISTIO_METAJSON_LABELS={\"a\":1}", "ISTIO_META_EXTRA=x", "XDS_HEADER_x-token=secret", "CA_HEADER_b=c",
	}})
	type result struct{ Value, Origin string }
	got := make(map[string]result)
	for _, e := range c.Entries() {
		if e.Origin.Source != FromDefault {
			got[e.Name()] = result{e.Value, e.Origin.String()}
		}
	}
	want := map[string]result{
		"proxyAdminPort":           {"2", "file node.yaml:1"},
		"statsPort":                {"3", "PROXY_CONFIG statsPort"},
		"ZTUNNEL_WORKER_THREADS":   {"3", "mesh file mesh:6"},
		"ISTIO_META_DNS_CAPTURE":   {"false", "mesh file mesh:9"},
		"CLUSTER_ID":               {"proxy", "PROXY_CONFIG proxyMetadata.CLUSTER_ID"},
		"ISTIO_META_ISTIO_VERSION": {"1.30.0", "environment ISTIO_META_ISTIO_VERSION"},
		"XDS_HEADER_x-token":       {"***", "environment XDS_HEADER_x-token"},
		"CA_HEADER_b":              {"***", "environment CA_HEADER_b"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	meta := map[string]string{"DNS_CAPTURE": "false", "CLUSTER_ID": "proxy", "ISTIO_VERSION": "1.30.0", "OTHER": "kept", "EXTRA": "x"}
	if diff := cmp.Diff(meta, c.Metadata); diff != "" {
		t.Errorf("metadata (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]json.RawMessage{"LABELS": json.RawMessage(`{"a":1}`)}, c.MetadataJSON); diff != "" {
		t.Errorf("JSON metadata (-want +got):\n%s", diff)
	}
	if c.XDSHeaders["x-token"] != "secret" || c.CAHeaders["b"] != "c" {
		t.Errorf("headers: %v, %v", c.XDSHeaders, c.CAHeaders)
	}
}

func TestProxyConfigErrors(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("mesh", []byte("defaultConfig:\n  statsPort: none\n  proxyMetadata: [a]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Load(Sources{Mesh: "mesh", Env: []string{"PROXY_CONFIG=concurrency: many", "ISTIO_METAJSON_X={"}})
	want := []string{
		`config: mesh:2: defaultConfig.statsPort: want a number from 1 to 65535, have "none"`,
		`config: mesh:3: defaultConfig.proxyMetadata: want a mapping, have a list`,
		`config: PROXY_CONFIG:1: concurrency: want auto, a number of threads (0 = one per core) or a share of the cores from 1% to 100%, have "many"`,
		`config: invalid env var ISTIO_METAJSON_X (want JSON)`,
	}
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("errors (-want +got):\n%s", diff)
	}
	mustLoad(t, Sources{Mesh: "nowhere"})
	mustLoad(t, Sources{Env: []string{"PROXY_CONFIG=", "ISTIO_META_="}})
	if err := os.WriteFile("mesh", []byte("defaultConfig: {}\n---\ndefaultConfig: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Load(Sources{Mesh: "mesh", Env: []string{"PROXY_CONFIG=concurrency: 1\n---\nconcurrency: 2"}})
	for _, want := range []string{"config: mesh: more than one YAML document", "config: PROXY_CONFIG: more than one YAML document"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q in it", err, want)
		}
	}
	if _, err := Load(Sources{Env: []string{"PROXY_CONFIG=a: [", "AUTH_TOKEN=x"}}); err == nil || !strings.Contains(err.Error(), "PROXY_CONFIG:") {
		t.Errorf("PROXY_CONFIG that is no YAML: %v", err)
	}
}

// What cannot be done yet and must not be taken for done is refused; so is what excludes itself.
func TestCheck(t *testing.T) {
	for _, tt := range []struct{ env, want string }{
		{"XDS_ADDRESS=https://istiod:15012", "XDS_ADDRESS (environment XDS_ADDRESS): xDS is not built yet: set LOCAL_XDS_PATH"},
		{`PROXY_CONFIG={"discoveryAddress":"istiod:15012"}`, "XDS_ADDRESS (PROXY_CONFIG discoveryAddress): xDS is not built yet"},
		{"CA_ADDRESS=https://istiod:15012", "set FAKE_CA=true"},
		{"CRL_PATH=/crl.pem", "CRL_PATH (environment CRL_PATH): revocation is not built yet"},
		{"ZTUN_CRL_MODE=strict", "revocation is not built yet"},
		{"COMPLIANCE_POLICY=pqc", "pqc is not built yet"},
		{"ZTUN_FAIL_MODE=open", "ZTUN_FAIL_MODE=open (environment ZTUN_FAIL_MODE): on a node"},
		{"PROXY_MODE=dedicated", "dedicated mode is not built yet"},
		{"PROXY_MODE=dedicated", "needs PROXY_WORKLOAD_INFO"},
		{"ENABLE_PROXY=false", "DNS alone is not built yet"},
		{"ENABLE_PROXY=false ISTIO_META_DNS_CAPTURE=false", "nothing is left to do"},
		{"XDS_ON_DEMAND=true", "needs DNS off"},
		{"PROXY_CONFIG=statsPort: 15000", "are both 15000"},
	} {
		env := []string{tt.env}
		if !strings.HasPrefix(tt.env, "PROXY_CONFIG") {
			env = strings.Fields(tt.env)
		}
		if _, err := Load(Sources{Env: env}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want %q", tt.env, err, tt.want)
		}
	}
	mustLoad(t, Sources{Env: []string{"XDS_ADDRESS=", "CA_ADDRESS=https://istiod:15012", "FAKE_CA=true", "COMPLIANCE_POLICY=other"}})
}

func TestTerminationDeadline(t *testing.T) { t.Run("DP-137", checkTerminationDeadline) }

func checkTerminationDeadline(t *testing.T) {
	for _, tt := range []struct {
		env  string
		want time.Duration
	}{
		{"", 5 * time.Second},
		{"TERMINATION_GRACE_PERIOD_SECONDS=30", 25 * time.Second},
		{"TERMINATION_GRACE_PERIOD_SECONDS=11", 6 * time.Second},
		{"TERMINATION_GRACE_PERIOD_SECONDS=10", 9 * time.Second},
		{"TERMINATION_GRACE_PERIOD_SECONDS=1", time.Second},
		{"TERMINATION_GRACE_PERIOD_SECONDS=0", time.Second},
		{"TERMINATION_GRACE_PERIOD_SECONDS=30 CONNECTION_TERMINATION_DEADLINE=7s", 7 * time.Second},
	} {
		c := mustLoad(t, Sources{Env: strings.Fields(tt.env)})
		if c.TerminationDeadline != tt.want {
			t.Errorf("%s: %s, want %s", tt.env, c.TerminationDeadline, tt.want)
		}
	}
}

func TestSecretsAreNotShown(t *testing.T) {
	c := mustLoad(t, Sources{Env: []string{"AUTH_TOKEN=eyJhbGciOi"}})
	for _, e := range c.Entries() {
		if strings.Contains(e.Value, "eyJ") || e.Secret && e.Flag != "" {
			t.Errorf("%s: value %q, flag %q", e.Name(), e.Value, e.Flag)
		}
	}
	if c.AuthToken != "eyJhbGciOi" {
		t.Errorf("token = %q", c.AuthToken)
	}
}

func TestIgnored(t *testing.T) {
	c := mustLoad(t, Sources{Env: []string{"INPOD_UDS=/x", "NODE_NAME=a", "INPOD_PORT_REUSE=true", "XDS_HEADER_a=b"}})
	if diff := cmp.Diff([]string{"INPOD_UDS", "XDS_HEADER_a"}, c.Ignored()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzProxyConfig(f *testing.F) {
	f.Add("concurrency: 2\nproxyMetadata: {A: b}\n", true)
	f.Add("defaultConfig: {discoveryAddress: x, proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}\n", false)
	f.Add("defaultConfig: &a [*a]\n", false)
	f.Fuzz(func(t *testing.T, text string, variable bool) {
		l, from := newLoader(), FromMesh
		if variable {
			from = FromProxyConfig
		}
		l.proxyConfig(from, "fuzz", []byte(text))
		for _, err := range l.errs {
			if !strings.HasPrefix(err.Error(), "config: fuzz:") {
				t.Errorf("%q: error %q does not name the source", text, err)
			}
		}
		for _, s := range Settings() {
			if o := l.cfg.Origin(s.Key).Source; o != FromDefault && o != from {
				t.Errorf("%q: %s is from %s", text, s.Key, o)
			}
		}
	})
}

func FuzzFile(f *testing.F) {
	f.Add("network: a\npods:\n- {netns: /run/netns/a, name: a, namespace: b}\n")
	f.Add("a: &a [*a]\n")
	f.Add("pods: &p\n- *p\n")
	f.Fuzz(func(t *testing.T, text string) {
		l := newLoader()
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
