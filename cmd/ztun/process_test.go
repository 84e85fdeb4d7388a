package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// stubborn is a program that does not end when it is asked to.
func stubborn() {
	ctx, _ := untilSignal(context.Background())
	fmt.Fprintln(os.Stderr, "waiting")
	<-ctx.Done()
	fmt.Fprintln(os.Stderr, "asked to end:", context.Cause(ctx))
	time.Sleep(time.Hour)
}

func TestSecondInterruptEndsAtOnce(t *testing.T) {
	for _, first := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		t.Run(first.String(), func(t *testing.T) {
			p := start(t, "stubborn")
			p.awaitLine("waiting")
			p.signal(first)
			p.awaitLine("asked to end: " + first.String())
			p.signal(os.Interrupt)
			p.awaitEnd()
			if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGINT {
				t.Errorf("ended with %s, want by the signal", p.cmd.ProcessState)
			}
		})
	}
}

// Once nobody waits for the context any more, signals do what they do without it.
func TestSignalsAreGivenBack(t *testing.T) {
	ctx, stop := untilSignal(t.Context())
	stop()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cause = %v, want %v", err, context.Canceled)
	}
}

// A process is a program of this test that runs.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines chan []byte // what it writes to stderr
	seen  bytes.Buffer
	ended chan struct{}
}

func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.CommandContext(t.Context(), name, args...), lines: make(chan []byte, 100), ended: make(chan struct{})}
	p.cmd.Stderr = writerFunc(func(b []byte) { p.lines <- bytes.Clone(b) })
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		var exit *exec.ExitError
		if err := p.cmd.Wait(); err != nil && !errors.As(err, &exit) {
			t.Errorf("wait: %v", err)
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
	})
	return p
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// awaitLine reads stderr until a text is in it.
func (p *process) awaitLine(text string) {
	p.t.Helper()
	deadline := time.After(20 * time.Second)
	for !bytes.Contains(p.seen.Bytes(), []byte(text)) {
		select {
		case b := <-p.lines:
			p.seen.Write(b)
		case <-p.ended:
			p.t.Fatalf("ended without %q\n%s", text, p.stderr())
		case <-deadline:
			p.t.Fatalf("no %q within 20 s\n%s", text, p.stderr())
		}
	}
}

func (p *process) awaitEnd() {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		p.t.Fatalf("has not ended within 20 s\n%s", p.stderr())
	}
}

// stderr is everything that was written by now.
func (p *process) stderr() string {
	for {
		select {
		case b := <-p.lines:
			p.seen.Write(b)
		default:
			return p.seen.String()
		}
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}
