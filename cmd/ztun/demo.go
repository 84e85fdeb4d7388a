package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"ztun.dev/ztun/internal/demo"
)

func newDemo() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show it at work: two nodes in network namespaces, as root",
		Long: `Build a network of two nodes with two pods each out of network namespaces, run ztun on both nodes and unmodified programs in the
pods, and print what they and the wire between the nodes see, beside the same without ztun. It takes about 15 seconds,
needs root, and leaves the machine as it was, also after Ctrl-C.`,
		Example: "  sudo ztun demo\n  sudo ztun demo --keep",
		Args:    noArgs,
	}
	o := addOutput(cmd)
	keep := cmd.Flags().Bool("keep", false, "leave it running until Ctrl-C and print commands to play with")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		binary, err := os.Executable()
		if err != nil {
			return fmt.Errorf("demo: path of this program: %w", err)
		}
		ctx, stop := untilSignal(cmd.Context())
		defer stop()
		return demo.Run(ctx, demo.Config{Binary: binary, Out: cmd.OutOrStdout(), Err: cmd.ErrOrStderr(), JSON: *o == outputJSON, Keep: *keep})
	}
	return cmd
}

// newDemoProgram is one of the programs in the demonstration's pods. It reads its arguments itself.
func newDemoProgram(name, short string, program func(args []string) int) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Short:              short,
		Hidden:             true,
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			if code := program(args); code != exitOK {
				return exitCode(code)
			}
			return nil
		},
	}
}
