package config

import (
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"
)

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

func TestLogFilter(t *testing.T) {
	var f LogFilter
	if err := f.Set("warn,access=debug,proxy=off,proxy::outbound=trace"); err != nil {
		t.Fatal(err)
	}
	got := make(map[string]slog.Level)
	for _, target := range []string{"access", "proxy", "proxy::inbound", "proxy::outbound", "dns"} {
		got[target] = f.Level(target)
	}
	want := map[string]slog.Level{
		"access": slog.LevelDebug, "proxy": LevelOff, "proxy::inbound": LevelOff, "proxy::outbound": LevelTrace, "dns": slog.LevelWarn,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("levels (-want +got):\n%s", diff)
	}
	if s := f.String(); s != "warn,access=debug,proxy=off,proxy::outbound=trace" {
		t.Errorf("String() = %q", s)
	}
	if err := f.Set("access=debug"); err != nil || f.Default != slog.LevelError {
		t.Errorf("without a default: %v, level %s, want error", err, f.Default)
	}
}
