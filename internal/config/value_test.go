package config

import "testing"

func TestValues(t *testing.T) {
	var c Config
	bind := func(key string) value {
		for i := range settings {
			if settings[i].key == key {
				return settings[i].bind(&c)
			}
		}
		t.Fatalf("no setting %s", key)
		return nil
	}
	for _, tt := range []struct {
		key  string
		good []string
		bad  []string
	}{
		{"fakeCa", []string{"true", "false"}, []string{"", "True", "1", "yes", " true"}},
		{"poolUnusedReleaseTimeout", []string{"0", "5s", "1m30s", "500ms", "1.5h"}, []string{"", "5", "-1s", "5 s", "1d"}},
		{"connectTimeout", []string{"1ns", "5s"}, []string{"0", "0s", "-5s", "x"}},
		{"poolMaxStreamsPerConnection", []string{"1", "65535"}, []string{"0", "65536", "-1", "1.5", "0x10", "ten"}},
		{"http2FrameSize", []string{"16384", "16KiB", "15MiB", "16777215"}, []string{"16383", "16MiB", "16777216", "1GiB", "KiB", "16 KiB", "4194305MiB"}},
		{"http2ConnectionWindowSize", []string{"65535", "2047MiB", "2147483647"}, []string{"65534", "2048MiB", "4294967295MiB"}},
		{"keepaliveRetries", []string{"1", "127"}, []string{"0", "128"}},
		{"workerThreads", []string{"auto", "0", "4", "1%", "100%"}, []string{"", "0%", "101%", "-1", "4.5", "%"}},
		{"rustLog", []string{"info", "OFF", "info,access=debug", "access=trace, info", "a::b=warn"}, []string{"", "inof", "info,", "info,access", "=info", "a=b=c", "info,[span]=debug"}},
		{"proxyMode", []string{"shared", "dedicated"}, []string{"", "Shared", "sidecar"}},
		{"dnsCapture", []string{"true", "TRUE", "", "no"}, nil},
		{"dnsProxyAddr", []string{"localhost:53", "127.0.0.1:15053", "[::1]:15053"}, []string{"", "localhost", "localhost:0", "localhost:x", "127.0.0.1", ":53", "host:53"}},
		{"packetMark", []string{"", "0", "1337", "4294967295"}, []string{"0x539", "-1", "4294967296"}},
		{"proxyWorkloadInfo", []string{"", "shop/cart/sa"}, []string{"shop/cart", "shop//sa", "//", "a/b/"}},
		{"hostCapture", []string{"mesh", "10.0.0.0/8", "10.0.0.0/8, fd00::/8"}, []string{"", "10.0.0.1/8", "10.0.0.0", "mesh,10.0.0.0/8"}},
		{"dnsUpstream", []string{"original", "resolvconf", "10.0.0.1", "10.0.0.1,fd00::1"}, []string{"", "dns", "10.0.0.1:53", "original,10.0.0.1"}},
		{"dnsSearch", []string{"", "corp.example", "a.example, b.example"}, []string{",", "a..b"}},
		{"accessLogFields", []string{"", "policy", "policy,trace_id"}, []string{"polic", "policy,"}},
		{"metricsDropLabels", []string{"", "revision", "source_principal,zone"}, []string{"reporter", "response_flags", "x", "revision,"}},
		{"resourceCpuLimit", []string{"", "2", "1.5", "500m", "0.1"}, []string{"0", "0m", "-1", "x", "1e3", "NaN", "Inf", "0x1p4", "1k"}},
		{"cpuLimit", []string{"", "2"}, []string{"0", "1.5", "500m"}},
		{"xdsRootCa", []string{"SYSTEM", "/root.pem", "-----BEGIN CERTIFICATE-----"}, []string{"", "-----BEGIN PRIVATE KEY-----"}},
		{"bufferLimit", []string{"1MiB", "8192MiB"}, []string{"0", "1023KiB"}},
		{"clusterDomain", []string{"cluster.local", "Cluster.Local.", "x"}, []string{"", ".", "a..b", ".a"}},
	} {
		for _, s := range tt.good {
			if err := bind(tt.key).Set(s); err != nil {
				t.Errorf("%s: Set(%q): %v", tt.key, s, err)
			}
		}
		for _, s := range tt.bad {
			if err := bind(tt.key).Set(s); err == nil {
				t.Errorf("%s: Set(%q) succeeds", tt.key, s)
			}
		}
	}
	if c.ClusterDomain != "x" {
		t.Errorf("clusterDomain = %q, want the last good value", c.ClusterDomain)
	}
}

func TestThreads(t *testing.T) {
	for _, tt := range []struct {
		set         string
		cores, want int
	}{
		{"auto", 1, 2},
		{"auto", 8, 2},
		{"auto", 9, 3},
		{"auto", 64, 16},
		{"0", 6, 6},
		{"3", 6, 3},
		{"12", 6, 12},
		{"50%", 6, 3},
		{"1%", 6, 1},
		{"34%", 6, 3},
		{"100%", 6, 6},
	} {
		var v Threads
		if err := (*threadsValue)(&v).Set(tt.set); err != nil {
			t.Fatal(err)
		}
		if got := v.Count(tt.cores); got != tt.want {
			t.Errorf("%s of %d cores = %d, want %d", tt.set, tt.cores, got, tt.want)
		}
		if v.String() != tt.set {
			t.Errorf("String() = %q, want %q", v, tt.set)
		}
	}
}

func TestThreadsOfAContainer(t *testing.T) {
	for _, tt := range []struct {
		name string
		env  []string
		want int // of 16 cores
	}{
		{"limit", []string{"ZTUNNEL_RESOURCE_CPU_LIMIT=3500m"}, 4},
		{"small limit", []string{"ZTUNNEL_RESOURCE_CPU_LIMIT=500m"}, 1},
		{"limit and request", []string{"ZTUNNEL_RESOURCE_CPU_LIMIT=2", "ZTUNNEL_RESOURCE_CPU_REQUEST=3"}, 3},
		{"request", []string{"ZTUNNEL_RESOURCE_CPU_REQUEST=5500m"}, 6},
		{"small request", []string{"ZTUNNEL_RESOURCE_CPU_REQUEST=200m"}, 4},
		{"plain limit", []string{"ZTUNNEL_CPU_LIMIT=4"}, 2},
		{"both limits", []string{"ZTUNNEL_CPU_LIMIT=4", "ZTUNNEL_RESOURCE_CPU_LIMIT=6"}, 6},
		{"share of the limit", []string{"ZTUNNEL_RESOURCE_CPU_LIMIT=6", "ZTUNNEL_WORKER_THREADS=50%"}, 3},
		{"all of the limit", []string{"ZTUNNEL_CPU_LIMIT=5", "ZTUNNEL_WORKER_THREADS=0"}, 5},
		{"a number", []string{"ZTUNNEL_RESOURCE_CPU_LIMIT=2", "ZTUNNEL_WORKER_THREADS=7"}, 7},
		{"concurrency", []string{`PROXY_CONFIG={"concurrency":3}`}, 3},
		{"no concurrency", []string{`PROXY_CONFIG={"concurrency":0}`}, 16},
		{"variable before concurrency", []string{`PROXY_CONFIG={"concurrency":3}`, "ZTUNNEL_WORKER_THREADS=2"}, 2},
	} {
		c, err := Load(Sources{Env: tt.env})
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if got := c.WorkerThreads.Count(16); got != tt.want {
			t.Errorf("%s: %d threads, want %d", tt.name, got, tt.want)
		}
	}
}
