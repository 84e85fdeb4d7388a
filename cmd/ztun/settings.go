package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"ztun.dev/ztun/internal/config"
)

// addSettings adds a flag for the file and one for each setting. load reads all sources.
func addSettings(cmd *cobra.Command, env []string) (load func() (*config.Config, error)) {
	file := cmd.Flags().String("config", "", "YAML file with the configuration (ZTUN_CONFIG)")
	for _, s := range config.Settings() {
		if s.Flag == "" {
			continue
		}
		meaning := s.Meaning
		if s.Variable != "" {
			meaning += " (" + s.Variable + ")"
		}
		if s.Unused {
			meaning += "; " + notUsed
		}
		cmd.Flags().Var(&settingValue{text: s.Default, kind: s.Type}, s.Flag, meaning)
		switch {
		case s.Type == "bool":
			cmd.Flags().Lookup(s.Flag).NoOptDefVal = "true"
			offer(cmd, s.Flag, "true", "false")
		case s.Type == "string", s.Type == "roots": // may be files
		case strings.Contains(s.Type, "|"):
			offer(cmd, s.Flag, strings.Split(s.Type, "|")...)
		default:
			offer(cmd, s.Flag)
		}
	}
	return func() (*config.Config, error) {
		given := make(map[string]string)
		cmd.Flags().Visit(func(f *pflag.Flag) { given[f.Name] = f.Value.String() })
		return config.Load(config.Sources{Mesh: config.MeshFile, File: *file, Env: env, Flags: given})
	}
}

// notUsed says of a setting that it is read and checked for nothing.
const notUsed = "no effect yet"

// A settingValue keeps the text of a flag. The configuration reads it, together with everything else that is wrong.
type settingValue struct{ text, kind string }

func (v *settingValue) String() string { return v.text }
func (v *settingValue) Type() string   { return v.kind }

func (v *settingValue) Set(s string) error {
	v.text = s
	return nil
}
