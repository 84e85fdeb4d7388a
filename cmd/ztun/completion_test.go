package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/config"
)

// Where a flag takes one of a few words, shells offer these words and no files.
func TestValuesOfFlagsAreCompleted(t *testing.T) {
	type flag struct{ args, want string }
	flags := []flag{
		{"conns --state", "connecting open half-closed half-closed-local half-closed-remote closing draining"},
		{"conns --sort", "age bytes id idle setup"},
		{"capture --point", "pod tunnel pod,tunnel"},
		{"replay --peer", "recorded none accept echo file:"},
		{"replay --checksum", "auto off strict"},
		{"config --fake-ca=", "true false"},
		{"config --connect-timeout", ""},
	}
	for _, command := range []string{"config", "conns", "demo", "explain", "replay", "version"} {
		flags = append(flags, flag{command + " -o", "text json"}, flag{command + " --output", "text json"})
	}
	for _, s := range config.Settings() {
		if strings.Contains(s.Type, "|") && s.Flag != "" {
			for _, command := range []string{"", "proxy ", "config "} {
				flags = append(flags, flag{command + "--" + s.Flag, strings.ReplaceAll(s.Type, "|", " ")})
			}
		}
	}
	const noFiles = ":4"
	for _, tt := range flags {
		t.Run(tt.args, func(t *testing.T) {
			args := append([]string{"__complete"}, strings.Fields(tt.args)...)
			if !strings.HasSuffix(tt.args, "=") {
				args = append(args, "") // the word that is completed
			}
			var out, errs bytes.Buffer
			code := run(t.Context(), args, nil, &out, &errs)
			got := strings.Fields(out.String())
			if diff := cmp.Diff(append(strings.Fields(tt.want), noFiles), got); code != exitOK || diff != "" {
				t.Errorf("exit code %d, %s(-want +got):\n%s", code, &errs, diff)
			}
		})
	}
}
