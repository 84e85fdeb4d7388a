package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/node"
)

func newProxy(env []string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "proxy [ztunnel]",
		Short: "Serve the pods of this node",
		Long: `Serve the pods of this node until SIGTERM or SIGINT. Then connections may end, and each pod gets its network back. A second
SIGINT ends the process at once; its pods stay captured and closed until the next one starts. SIGHUP has the mesh state file read
again: it counts for open connections too, and one that is not valid changes nothing.

A setting is taken from its flag, else from its environment variable, else from PROXY_CONFIG, else from the configuration file, else
from the mesh configuration, else it has its default; "ztun config" shows them. The word "ztunnel" changes nothing: ztunnel is started
with it.`,
		Example: "  ztun proxy --config configs/node.yaml",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && args[0] == "ztunnel" {
				args = args[1:]
			}
			return noArgs(cmd, args)
		},
	}
	load := addSettings(cmd, env)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := load()
		if err != nil {
			return usageError{err}
		}
		ctx, stop := untilSignal(cmd.Context())
		defer stop()
		reload := make(chan os.Signal, 1) // another one that comes while it is read is heeded after that
		signal.Notify(reload, syscall.SIGHUP)
		defer signal.Stop(reload)
		info, _ := debug.ReadBuildInfo()
		b := readBuild(info)
		return node.Run(ctx, cfg, node.Options{
			Stdout: cmd.OutOrStdout(), Stderr: cmd.ErrOrStderr(), Reload: reload,
			Build: admin.Build{Version: b.Version, Revision: b.Revision, Modified: b.Modified},
		})
	}
	return cmd
}

// untilSignal gives a context that the first SIGINT or SIGTERM cancels; the cause names it. A second SIGINT then ends the process.
func untilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case s := <-signals:
			signal.Reset(os.Interrupt)
			cancel(errors.New(s.String()))
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-done
		signal.Stop(signals)
	}
}
