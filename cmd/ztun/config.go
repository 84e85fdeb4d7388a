package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/workload"
)

func newConfig(env []string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show every setting, its value and where that comes from",
		Long: `Show every setting, its value and where that comes from, as "ztun proxy" with the same flags and environment would have them.
Secrets are not shown. What is wrong is said as by "ztun proxy".`,
		Example: "  ztun config --config configs/node.yaml -o json",
		Args:    noArgs,
	}
	o := addOutput(cmd)
	load := addSettings(cmd, env)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := load()
		if err != nil {
			return usageError{err}
		}
		if *o == outputJSON {
			return printConfigJSON(cmd.OutOrStdout(), cfg)
		}
		return printConfig(cmd.OutOrStdout(), cfg)
	}
	cmd.AddCommand(newValidate())
	return cmd
}

// An entry is a setting in JSON.
type entry struct {
	Key      string `json:"key"`
	Variable string `json:"variable"`
	Value    string `json:"value"`
	Type     string `json:"type"`
	Default  string `json:"default"`
	Origin   string `json:"origin"`
	Meaning  string `json:"meaning"`
	Secret   bool   `json:"secret,omitempty"`
	Unused   bool   `json:"unused,omitempty"` // no effect yet
}

func printConfigJSON(w io.Writer, cfg *config.Config) error {
	out := struct {
		File     string  `json:"file"`
		Settings []entry `json:"settings"`
		Pods     []pod   `json:"pods"`
	}{File: cfg.File, Pods: []pod{}}
	for _, e := range cfg.Entries() {
		out.Settings = append(out.Settings, entry{
			Key: e.Key, Variable: e.Variable, Value: e.Value, Type: e.Type, Default: e.Default, Origin: e.Origin.String(), Meaning: e.Meaning,
			Secret: e.Secret, Unused: e.Unused,
		})
	}
	for _, p := range cfg.Pods {
		out.Pods = append(out.Pods, pod(p))
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(out)
}

// A pod is a pod of the file in JSON.
type pod struct {
	Netns          string `json:"netns"`
	UID            string `json:"uid"`
	Name           string `json:"name"`
	Namespace      string `json:"namespace"`
	ServiceAccount string `json:"serviceAccount"`
}

func printConfig(w io.Writer, cfg *config.Config) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	// A write to a tabwriter fails where Flush does.
	_, _ = fmt.Fprintln(t, "VARIABLE\tKEY\tVALUE\tORIGIN\tMEANING")
	for _, e := range cfg.Entries() {
		meaning := e.Meaning
		if e.Unused {
			meaning = "(" + notUsed + ") " + meaning
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", dash(e.Variable), dash(e.Key), dash(short(e.Value)), e.Origin, meaning)
	}
	for _, p := range cfg.Pods {
		_, _ = fmt.Fprintf(t, "-\tpods\t%s/%s\tfile %s\tnetwork namespace %s\n", p.Namespace, p.Name, cfg.File, p.Netns)
	}
	return t.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// short is a text that fits into a column.
func short(s string) string {
	const most = 60
	first, _, more := strings.Cut(s, "\n")
	if r := []rune(first); len(r) > most {
		first, more = string(r[:most]), true
	}
	if more {
		first += "…"
	}
	return first
}

func newValidate() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE",
		Short: "Say what is wrong with a configuration or a mesh state file",
		Long: `Say what is wrong with a file, with line numbers. A file that has one of the keys workloads, services and policies is the state of a
mesh (LOCAL_XDS_PATH), any other a configuration. Nothing outside of the file is looked at. The exit code is 0 if it is right, else 2.`,
		Example: "  ztun config validate configs/node.yaml",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("%s: want one file, have %d arguments", cmd.CommandPath(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			what, err := validate(args[0])
			if err != nil {
				return usageError{err}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: a valid %s\n", args[0], what)
			return err
		},
	}
}

// validate says what a file is and what is wrong with it.
func validate(name string) (what string, err error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	if config.HasKey(data, "workloads", "services", "policies") {
		_, err := workload.ParseStatic(name, data)
		return "mesh state", err
	}
	_, err = config.Load(config.Sources{File: name})
	return "configuration", err
}
