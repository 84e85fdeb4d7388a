// Command scenarios runs what comes after --, a go test -json, repeats its output for people, and tells which of the numbered scenarios
// were shown: those whose id, DP-17 for example, is in the name of a test that passed. Without a command it reads the output of one.
//
// It ends with 1 if a test failed, if the command did, or if a scenario of a finished area neither passed nor has a reason in
// testdata/untested.yaml.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) //nolint:gocritic // stop has nothing left to do
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("scenarios", flag.ContinueOnError)
	fs.SetOutput(stderr)
	dir := fs.String("dir", "testdata", "`DIR` with scenarios.yaml and untested.yaml")
	list := fs.Bool("list", false, "print a line for each scenario, not only for each area")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(stderr, "scenarios: "+format+"\n", args...) }
	plan, err := load(filepath.Join(*dir, "scenarios.yaml"), filepath.Join(*dir, "untested.yaml"))
	if err != nil {
		say("%v", err)
		return 2
	}
	var res *results
	if fs.NArg() > 0 {
		res, err = runTests(ctx, fs.Args(), stdout, stderr)
	} else {
		res, err = read(stdin, stdout)
	}
	if res == nil {
		say("%v", err)
		return 1
	}
	ok := plan.report(stdout, res.passed, *list)
	for _, f := range res.failed {
		say("failed: %s", f)
		for _, line := range res.why[f] {
			say("    %s", line)
		}
	}
	if err != nil {
		say("%v", err)
	}
	if !ok || err != nil || len(res.failed) > 0 {
		return 1
	}
	return 0
}

// runTests reads the output of a command. Its failure is an error also where no event told of it.
func runTests(ctx context.Context, args []string, stdout, stderr io.Writer) (*results, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // it is what we are asked to run
	cmd.Stderr = stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	res, err := read(out, stdout)
	if waitErr := cmd.Wait(); waitErr != nil {
		err = errors.Join(err, fmt.Errorf("%s: %w", args[0], waitErr))
	}
	return res, err
}
