// Command ztun carries the TCP connections of pods over HBONE, without their knowing: see ztun help.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"ztun.dev/ztun/internal/demo"
	"ztun.dev/ztun/internal/node"
	"ztun.dev/ztun/internal/strict"
)

// Exit codes of every command.
const (
	exitOK      = 0
	exitFailure = 1 // something that was right did not work
	exitUsage   = 2 // wrong usage or invalid configuration: nothing was tried
	exitDiffers = 3 // a check or comparison found a difference
	exitPartly  = 4 // not all of the input could be used; the result of the rest was written
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Environ(), os.Stdout, os.Stderr)) }

// run runs one command line and returns the exit code. Data goes to stdout; an error is one line on stderr for each thing that is wrong.
func run(ctx context.Context, args, env []string, stdout, stderr io.Writer) int {
	root := newRoot(env)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	if code := exitCode(0); errors.As(err, &code) {
		return int(code)
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if !commandPath.MatchString(line) {
			line = "ztun: " + line
		}
		_, _ = fmt.Fprintln(stderr, line) // nobody is left to tell if this fails
	}
	var coded interface{ ExitCode() int }
	switch {
	case errors.As(err, &coded):
		return coded.ExitCode()
	case errors.Is(err, errUsage), errors.Is(err, node.ErrInvalid):
		return exitUsage
	}
	return exitFailure
}

// commandPath matches the beginning of an error that says of which command it is.
var commandPath = regexp.MustCompile(`^ztun( [a-z-]+)*: `)

// errUsage is wrapped by errors that the user mends on the command line or in the configuration. It says nothing itself.
var errUsage = errors.New("usage")

type usageError struct{ error }

func (e usageError) Is(target error) bool { return target == errUsage }
func (e usageError) Unwrap() error        { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// An exitCode is the error of a command that has said everything itself.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

func newRoot(env []string) *cobra.Command {
	root := newProxy(env)
	root.Use = "ztun"
	root.Short = "A node proxy in user space: TCP of pods over HBONE"
	root.Long = `ztun carries the TCP connections of pods to the nodes of their peers, as HTTP/2 CONNECT streams over mutual TLS (HBONE),
and answers their DNS. The pods need no change and do not notice.

Without a command it does what "ztun proxy" does.`
	root.Example = "  ztun --config configs/node.yaml"
	root.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return usagef("unknown command %q%s", args[0], strict.Suggestion(args[0], commandNames(cmd)))
	}
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(newProxy(env), newConfig(env), newExplain(), newConns(), newReplay(), newCapture(), newVersion(), newDemo(),
		newDemoProgram("demo-server", "The server in a pod of the demonstration", demo.ServerMain),
		newDemoProgram("demo-client", "The client in a pod of the demonstration", demo.ClientMain))
	root.SetHelpCommand(newHelp())
	info, _ := debug.ReadBuildInfo()
	root.Version = readBuild(info).text()
	root.SetVersionTemplate("{{.Version}}\n")
	root.InitDefaultCompletionCmd()
	completion, _, _ := root.Find([]string{"completion"})
	amendCompletion(completion)
	return root
}

func commandNames(root *cobra.Command) []string {
	var names []string
	for _, c := range root.Commands() {
		if !c.Hidden {
			names = append(names, c.Name())
		}
	}
	return names
}

// flagError names the nearest flag if one is unknown, and says what is wanted if a value is not right.
func flagError(cmd *cobra.Command, err error) error {
	if bad, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		f := bad.GetFlag()
		return usagef("%s: invalid flag --%s=%s (%s)", cmd.CommandPath(), f.Name, bad.GetValue(), wanted(f.Value.Type(), bad.Unwrap()))
	}
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || len(unknown.GetSpecifiedName()) < 2 {
		return usagef("%s: %w", cmd.CommandPath(), err)
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
	name := "--" + unknown.GetSpecifiedName()
	return usagef("%s: unknown flag %s%s", cmd.CommandPath(), name, strict.Suggestion(name, names))
}

// wanted says what a flag of a type takes. The package's own types say it in terms of Go, ours (err) in words.
func wanted(kind string, err error) string {
	switch kind {
	case "bool":
		return "want true or false"
	case "duration":
		return "want a duration such as 5s, 1m30s or 500ms"
	case "uint", "uint64":
		return "want a whole number that is not negative"
	}
	return err.Error()
}

// noArgs is cobra.NoArgs with our exit code.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s: unexpected argument %q", cmd.CommandPath(), args[0])
	}
	return nil
}

// amendCompletion has cobra's command refuse what it does not know, and gives it examples.
func amendCompletion(cmd *cobra.Command) {
	var shells []string
	for _, c := range cmd.Commands() {
		shells = append(shells, c.Name())
		c.Args = noArgs
		c.Example = "  ztun completion " + c.Name()
	}
	cmd.Example = "  source <(ztun completion bash)"
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return usagef("%s: %q is none of %s%s", cmd.CommandPath(), args[0], strings.Join(shells, ", "), strict.Suggestion(args[0], shells))
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
}

// newHelp is cobra's command, but a name that it does not know is an error.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:     "help [command]",
		Short:   "Say how a command is used",
		Example: "  ztun help proxy",
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			found, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return usagef("unknown command %q%s", strings.Join(args, " "), strict.Suggestion(args[0], commandNames(root)))
			}
			found.InitDefaultHelpFlag()
			return found.Help()
		},
	}
}
