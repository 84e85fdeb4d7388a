// Command scenarios reads what go test -json prints, repeats it for people, and tells which of the numbered scenarios were shown:
// those whose id, DP-17 for example, is in the name of a test that passed.
//
// It ends with 1 if a test failed, or if a scenario of a finished area neither passed nor has a reason in testdata/untested.yaml.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("scenarios", flag.ContinueOnError)
	fs.SetOutput(stderr)
	dir := fs.String("dir", "testdata", "`DIR` with scenarios.yaml and untested.yaml")
	list := fs.Bool("list", false, "print a line for each scenario, not only for each area")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	plan, err := load(filepath.Join(*dir, "scenarios.yaml"), filepath.Join(*dir, "untested.yaml"))
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "scenarios:", err)
		return 2
	}
	res, err := read(stdin, stdout)
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "scenarios:", err)
		return 1
	}
	ok := plan.report(stdout, res.passed, *list)
	for _, f := range res.failed {
		_, _ = fmt.Fprintln(stderr, "scenarios: failed:", f)
	}
	if !ok || len(res.failed) > 0 {
		return 1
	}
	return 0
}
