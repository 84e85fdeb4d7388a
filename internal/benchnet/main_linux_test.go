package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/node"
)

// The test binary is what it starts: the tools, and ztun.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		if tool, ok := tools[os.Args[1]]; ok {
			syscall.Exit(toolMain(os.Args[1], tool, os.Args[2:])) // not os.Exit: under the race detector that takes a second longer
		}
		switch os.Args[1] {
		case "proxy":
			os.Exit(proxyMain(os.Args[2:]))
		case "version":
			fmt.Println("ztun of a test")
			return
		}
	}
	goleak.VerifyTestMain(m)
}

func proxyMain(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if len(args) != 2 || args[0] != "--config" {
		fmt.Fprintln(os.Stderr, "arguments:", args)
		return 2
	}
	cfg, err := config.Load(config.Sources{File: args[1]})
	if err == nil {
		err = node.Run(ctx, cfg, node.Options{Stdout: os.Stdout, Stderr: os.Stderr})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
