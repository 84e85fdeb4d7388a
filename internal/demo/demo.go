package demo

import (
	"errors"
	"io"
	"time"
)

// A Config says how to run. Binary and Out are needed.
type Config struct {
	Binary string    // path of ztun itself: it is started as "proxy", "demo-server" and "demo-client"
	Out    io.Writer // the report
	Err    io.Writer // what has to be said beside it; nil is nowhere
	JSON   bool      // one JSON object instead of text
	Keep   bool      // go on until the context ends, and print commands to try

	// OwnClients uses the small clients of ztun's own binary even where curl and iperf3 are installed.
	OwnClients bool
	// Measure is the time of one measurement of throughput, of which there are four; 0 is DefaultMeasure. iperf3 knows whole
	// seconds only.
	Measure time.Duration
}

// DefaultMeasure is long enough for TCP to find its speed on a network without delay.
const DefaultMeasure = 2 * time.Second

func (c *Config) check() error {
	if c.Binary == "" || c.Out == nil {
		return errors.New("demo: Config.Binary and Config.Out are needed")
	}
	if c.Err == nil {
		c.Err = io.Discard
	}
	if c.Measure == 0 {
		c.Measure = DefaultMeasure
	}
	return nil
}

// An Error is what [Run] returns, with the exit code of a command line: 1 the demonstration did not work or did not show what it
// should, 2 it was called wrongly.
type Error struct {
	Code int
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ExitCode is 1 or 2.
func (e *Error) ExitCode() int { return e.Code }
