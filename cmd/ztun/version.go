package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersion() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print which ztun this is",
		Example: "  ztun version -o json",
		Args:    noArgs,
	}
	o := addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		info, _ := debug.ReadBuildInfo()
		return readBuild(info).print(cmd.OutOrStdout(), *o)
	}
	return cmd
}

// A build is what is known of the binary: what the go command wrote into it.
type build struct {
	Version  string `json:"version"`  // of the module, or "unknown"
	Revision string `json:"revision"` // commit, or "unknown"
	Time     string `json:"time,omitempty"`
	Modified bool   `json:"modified"` // built with changes that were not committed
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func readBuild(info *debug.BuildInfo) build {
	b := build{Version: "unknown", Revision: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info == nil {
		return b
	}
	if info.Main.Version != "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.time":
			b.Time = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func (b build) print(w io.Writer, o output) error {
	if o == outputJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(b)
	}
	_, err := fmt.Fprintln(w, b.text())
	return err
}

func (b build) text() string {
	modified := ""
	if b.Modified {
		modified = ", modified"
	}
	return fmt.Sprintf("ztun %s (revision %s%s, %s, %s)", b.Version, b.Revision, modified, b.Go, b.Platform)
}
