package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"
	"time"
)

// options say what to measure, and for how long.
type options struct {
	ztun     string         // path of the binary
	rounds   int            // of everything but memory
	duration time.Duration  // of one measurement
	only     *regexp.Regexp // of MEASUREMENT/PATH; nil is all
	profile  string         // directory of CPU profiles; "" is none
	idle     int            // connections at most
	pods     int            // namespaces whose memory is measured
	progress io.Writer
}

// quick is a run of about two minutes; a full one takes about ten.
func (o *options) quick() {
	o.rounds, o.duration, o.idle, o.pods = 2, 250*time.Millisecond, 2000, 25
}

// wants tells whether a measurement on a path is part of the run.
func (o *options) wants(measurement, path string) bool {
	return o.only == nil || o.only.MatchString(measurement+"/"+path)
}

// say tells what goes on.
func (o *options) say(format string, args ...any) {
	_, _ = fmt.Fprintf(o.progress, format+"\n", args...)
}

func main() {
	if len(os.Args) > 1 {
		if tool, ok := tools[os.Args[1]]; ok {
			os.Exit(toolMain(os.Args[1], tool, os.Args[2:]))
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1) //nolint:gocritic // stop has nothing left to do
	}
}

// command is the program with its arguments.
func command(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := options{rounds: 5, duration: 500 * time.Millisecond, idle: 10_000, pods: 50, progress: stderr}
	fs := flag.NewFlagSet("benchnet", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&o.idle, "idle", o.idle, "idle connections to hold, at most as the limit of descriptors allows")
	quick := fs.Bool("quick", false, "about two minutes: 2 rounds of 0.25 s, fewer connections and namespaces")
	rounds := fs.Int("rounds", o.rounds, "how often each measurement is taken")
	seconds := fs.Float64("seconds", o.duration.Seconds(), "length of each measurement")
	only := fs.String("only", "", "measure only what `REGEXP` matches, of names such as bulk/8/up/mesh (direct comes with it)")
	fs.StringVar(&o.ztun, "ztun", "bin/ztun", "`PATH` of the binary")
	fs.StringVar(&o.profile, "profile", "", "after the rounds, write CPU profiles of each measurement through ztun to `DIR`")
	jsonFile := fs.String("json", "", "write everything to `FILE`, too")
	markdown := fs.Bool("markdown", false, "print the tables in Markdown")
	from := fs.String("from", "", "measure nothing: print what an earlier run has written with -json to `FILE`")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("benchnet: %q: takes flags only", fs.Args())
	}
	if *quick {
		o.quick()
	}
	var err error
	fs.Visit(func(f *flag.Flag) { // what is given wins over quick
		switch f.Name {
		case "rounds":
			o.rounds = *rounds
		case "seconds":
			o.duration = time.Duration(*seconds * float64(time.Second))
		case "only":
			if o.only, err = regexp.Compile(*only); err != nil {
				err = fmt.Errorf("benchnet: -only: %w", err)
			}
		}
	})
	switch {
	case err != nil:
		return err
	case o.rounds < 1 || o.duration < 10*time.Millisecond:
		return errors.New("benchnet: want at least one round, and 0.01 seconds")
	}
	show := (*report).text
	if *markdown {
		show = (*report).markdown
	}
	if *from != "" {
		r, err := readReport(*from)
		if err != nil {
			return err
		}
		return show(r, stdout)
	}
	if o.ztun, err = filepath.Abs(o.ztun); err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	r, err := measure(ctx, o)
	if r != nil && len(r.Rows) > 0 {
		if *jsonFile != "" {
			err = errors.Join(err, r.write(*jsonFile))
		}
		err = errors.Join(err, show(r, stdout))
	}
	return err
}
