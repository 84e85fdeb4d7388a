package tun

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestLeftovers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"netns-4-4026532208.json":     `{"uid":"b","sysctls":[]}`,
		"netns-4-4026532100.json":     `{"uid":"a"}`,
		"netns-4-4026532300.json":     `{`,
		"netns-4-4026532100.json.bak": `{"uid":"c"}`,
		".netns-123":                  `{"uid":"d"}`,
		"marks.json":                  `{}`,
	} {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	got, err := Leftovers(dir)
	if err == nil || !strings.Contains(err.Error(), "netns-4-4026532300.json") || strings.Contains(err.Error(), "\n") {
		t.Errorf("Leftovers: %v, want the damaged file named", err)
	}
	want := []Leftover{
		{4, 4026532100, "a", filepath.Join(dir, "netns-4-4026532100.json")},
		{4, 4026532208, "b", filepath.Join(dir, "netns-4-4026532208.json")},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Leftovers (-want +got):\n%s", diff)
	}
	for _, dir := range []string{"", filepath.Join(dir, "none")} {
		if got, err := Leftovers(dir); len(got) > 0 || err != nil {
			t.Errorf("Leftovers(%q) = %v, %v, want none", dir, got, err)
		}
	}
}

func TestNetnsLeftoversNameTheDeadOnesPod(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	cfg := Config{Netns: l.pod, StateDir: t.TempDir()}
	_, kill := startOwner(t, l.pod, cfg.StateDir, "")
	kill()
	dev, ino := l.pod.ID()
	got, err := Leftovers(cfg.StateDir)
	must(t, err)
	if diff := cmp.Diff([]Leftover{{dev, ino, testConfig(nil).UID, statePath(&cfg)}}, got); diff != "" {
		t.Errorf("Leftovers (-want +got):\n%s", diff)
	}
	must(t, Remove(t.Context(), cfg))
	if got, err := Leftovers(cfg.StateDir); len(got) > 0 || err != nil {
		t.Errorf("Leftovers after Remove = %v, %v, want none", got, err)
	}
}

// What an adopted netns has are ztun's values. Without the file nothing may pass for the earlier ones.
func TestNetnsLostStateIsNotMadeUp(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	var log bytes.Buffer
	cfg := testConfig(l.pod)
	cfg.StateDir, cfg.Log = t.TempDir(), slog.New(slog.NewTextHandler(&log, nil))
	must(t, open(t, cfg).Close())
	must(t, os.Remove(statePath(&cfg)))
	k := open(t, cfg)
	if !k.Adopted() || !strings.Contains(log.String(), "values that sysctls had before the earlier start are not known") {
		t.Errorf("Adopted = %v, log:\n%s\nwant a warning that values are lost", k.Adopted(), log.String())
	}
	if got, err := Leftovers(cfg.StateDir); len(got) > 0 || err != nil {
		t.Errorf("kept %v, %v, want nothing", got, err)
	}
	must(t, k.Unenrol(t.Context())) // works all the same
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		if rules := strings.Join(rulesOf(t, l.pod, family), "\n"); strings.Contains(rules, "protocol 133") {
			t.Errorf("Unenrol leaves rules:\n%s", rules)
		}
	}
}

// Somebody's rule for a part of the packets is not the pod's rule for table local.
func TestNetnsLocalRuleComesBack(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*netlink.Rule)
		back   bool
	}{
		"from":     {func(r *netlink.Rule) { r.Src = hostNet(remote4) }, true},
		"mark":     {func(r *netlink.Rule) { r.Mark = 7 }, true},
		"iif":      {func(r *netlink.Rule) { r.IifName = "lo" }, true},
		"suppress": {func(r *netlink.Rule) { r.SuppressPrefixlen = 31 }, true},
		"all":      {func(*netlink.Rule) {}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, true)
			k := open(t, testConfig(l.pod))
			must(t, l.pod.Do(func() error {
				r := netlink.NewRule()
				r.Family, r.Priority, r.Table = unix.AF_INET, 2000, unix.RT_TABLE_LOCAL
				tt.change(r)
				return netlink.RuleAdd(r)
			}))
			must(t, k.Unenrol(t.Context()))
			rules := strings.Join(rulesOf(t, l.pod, unix.AF_INET), "\n")
			if got := strings.Contains(rules, "pref 0 lookup 255 protocol 2"); got != tt.back {
				t.Errorf("rules after Unenrol:\n%s\nwith the kernel's for table local: %v, want %v", rules, got, tt.back)
			}
		})
	}
}
