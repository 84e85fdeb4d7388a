package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"ztun.dev/ztun/internal/lab"
)

// Limits of a node's process. The end takes as long as open connections are let run.
const (
	readyWithin = 15 * time.Second
	endWithin   = 10 * time.Second
)

// environment is that of every program of the demonstration: settings of the user's own ztun must not leak in.
var environment = []string{"PATH=" + searchPath, "LC_ALL=C"}

const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// A nodeProcess is one node's ztun.
type nodeProcess struct {
	name   string
	cmd    *lab.Cmd
	access lines // its standard output
	log    lines // its standard error
	files  []*os.File
}

// startNode starts a process that outlives ctx: it is to end in order.
func startNode(ctx context.Context, binary string, host *lab.Host, dir string) (_ *nodeProcess, err error) {
	p := &nodeProcess{name: host.Name}
	defer func() {
		if err != nil {
			p.closeFiles()
		}
	}()
	p.cmd = host.Command(context.WithoutCancel(ctx), binary, "proxy", "--config", filepath.Join(dir, host.Name+".yaml"))
	p.cmd.Env, p.cmd.Dir = environment, dir
	if p.cmd.Stdout, err = p.tee(filepath.Join(dir, host.Name+".access.log"), &p.access); err != nil {
		return nil, err
	}
	if p.cmd.Stderr, err = p.tee(filepath.Join(dir, host.Name+".log"), &p.log); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *nodeProcess) tee(path string, l *lines) (io.Writer, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	p.files = append(p.files, f)
	return io.MultiWriter(f, l), nil
}

func (p *nodeProcess) closeFiles() {
	for _, f := range p.files {
		f.Close()
	}
}

// errEnded is the cause of waits that the end of the process makes hopeless.
var errEnded = errors.New("the process has ended")

// untilEnded is a context that ends with the process, too.
func (p *nodeProcess) untilEnded(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-p.cmd.Done():
			cancel(errEnded)
		case <-stop:
		}
	}()
	return ctx, func() { close(stop); <-done; cancel(nil) }
}

// ready waits until the process serves its pods.
func (p *nodeProcess) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyWithin, fmt.Errorf("not ready within %v", readyWithin))
	defer cancel()
	ctx, release := p.untilEnded(ctx)
	defer release()
	err := p.log.wait(ctx, 0, func(line string) bool {
		return strings.Contains(line, "\tready\t")
	})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errEnded):
		how := "exit status 0"
		if err := p.cmd.Wait(); err != nil {
			how = err.Error()
		}
		return fmt.Errorf("demo: %s: ztun ended before it was ready: %s%s", p.name, how, p.lastWords())
	case errors.Is(err, context.Canceled):
		return err
	}
	return fmt.Errorf("demo: %s: ztun: %w%s", p.name, err, p.lastWords())
}

// lastWords are what the process said about its end, to stand behind an error: its last line, or the reason of a panic, which
// many lines follow.
func (p *nodeProcess) lastWords() string {
	said := strings.Split(p.log.last(1000), "\n")
	last := said[len(said)-1]
	for _, line := range said {
		if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
			last = line
			break
		}
	}
	if last == "" {
		return ", without a word"
	}
	return ": " + last
}

// logged is how long the record of a connection may take from the connection's end.
const logged = 2 * time.Second

// record waits for a line of the access log, of those from number first on.
func (p *nodeProcess) record(ctx context.Context, first int, match func(record) bool) (record, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, logged, errors.New("no such line"))
	defer cancel()
	ctx, release := p.untilEnded(ctx)
	defer release()
	var found record
	err := p.access.wait(ctx, first, func(line string) bool {
		r, ok := parseRecord(line)
		if ok && match(r) {
			found = r
			return true
		}
		return false
	})
	if err != nil {
		return nil, fmt.Errorf("access log of %s: %w", p.name, err)
	}
	return found, nil
}

// stop asks the process to end, which gives the pods their network back, and waits. After a start that failed, and was reported,
// it does not matter how a process ended.
func (p *nodeProcess) stop(started bool) error {
	defer p.closeFiles()
	err := p.cmd.Stop(endWithin)
	if _, exited := errors.AsType[*exec.ExitError](err); exited && !started {
		return nil
	}
	if err != nil {
		return fmt.Errorf("demo: %s: ztun: %w%s", p.name, err, p.lastWords())
	}
	return nil
}
