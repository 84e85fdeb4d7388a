package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Cmd is a program inside a host of the lab: in its network namespace, with a mount namespace and a process group of its own.
// It is used as an exec.Cmd is. Its whole process group is killed when its context ends, when the program itself ends, and by
// [Lab.Close]; the program is killed when this process dies, however that comes.
type Cmd struct {
	Args       []string // with the program's name or path in front
	Env        []string // nil is this process's
	Dir        string
	Stdin      io.Reader
	Stdout     io.Writer
	Stderr     io.Writer
	ResolvConf string // /etc/resolv.conf of this program; empty is that of the lab's Config

	host *Host
	ctx  context.Context
	cmd  *exec.Cmd
	done chan struct{} // closed when the program was waited for
	err  error         // of Wait, once done is closed

	mu    sync.Mutex // guards below
	ended bool       // its process group may be another's from now on
}

// waitDelay is how long the end of a program waits for what it has left behind to let go of its output.
const waitDelay = time.Second

// Command prepares a program. Nothing runs before Start, Run or Output.
func (h *Host) Command(ctx context.Context, name string, args ...string) *Cmd {
	return &Cmd{Args: append([]string{name}, args...), host: h, ctx: ctx}
}

// Start starts the program.
func (c *Cmd) Start() error {
	if c.cmd != nil {
		return fmt.Errorf("lab: %s: %s: already started", c.host.Name, c.Args[0])
	}
	c.cmd = exec.CommandContext(c.ctx, c.Args[0], c.Args[1:]...)
	c.cmd.Env, c.cmd.Dir, c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = c.Env, c.Dir, c.Stdin, c.Stdout, c.Stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	c.cmd.Cancel = func() error { c.kill(); return nil }
	c.cmd.WaitDelay = waitDelay
	c.done = make(chan struct{})

	// The thread is used up by what it has unshared. It lives until the program ends: the signal that Pdeathsig asks for comes
	// at the end of the thread that forked, not of its process.
	started := make(chan error, 1)
	onOwnThread(func() {
		err := c.start()
		started <- err
		if err == nil {
			c.wait()
		}
	})
	if err := <-started; err != nil {
		return fmt.Errorf("lab: %s: %s: %w", c.host.Name, c.Args[0], err)
	}
	return nil
}

// start moves the thread and forks from it.
func (c *Cmd) start() error {
	if err := unix.Setns(int(c.host.ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	resolv := c.ResolvConf
	if resolv == "" {
		resolv = c.host.lab.cfg.ResolvConf
	}
	if err := privateMounts(resolv); err != nil {
		return err
	}
	l := c.host.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return os.ErrClosed
	}
	if err := c.cmd.Start(); err != nil {
		return err
	}
	l.cmds[c] = struct{}{}
	return nil
}

func (c *Cmd) wait() {
	// While the program is a zombie its process group cannot be another's.
	for {
		err := unix.Waitid(unix.P_PID, c.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	c.kill()
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.err = c.cmd.Wait()
	l := c.host.lab
	l.mu.Lock()
	delete(l.cmds, c)
	l.mu.Unlock()
	close(c.done)
}

// kill ends the process group.
func (c *Cmd) kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		_ = unix.Kill(-c.cmd.Process.Pid, unix.SIGKILL)
	}
}

// Wait waits for the end of the program and of the copies of its output. It may be called by several, and again.
func (c *Cmd) Wait() error {
	if c.done == nil {
		return fmt.Errorf("lab: %s: %s: not started", c.host.Name, c.Args[0])
	}
	<-c.done
	return c.err
}

// Done is closed at the end of the program.
func (c *Cmd) Done() <-chan struct{} { return c.done }

// Pid is the program's process id.
func (c *Cmd) Pid() int { return c.cmd.Process.Pid }

// Signal sends a signal to the program alone.
func (c *Cmd) Signal(sig os.Signal) error { return c.cmd.Process.Signal(sig) }

// Stop asks the program to end (SIGTERM), kills it after grace, and waits. It returns what Wait returns, or an error that
// says that the program had to be killed.
func (c *Cmd) Stop(grace time.Duration) error {
	_ = c.Signal(syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-c.done:
		return c.err
	case <-timer.C:
		c.kill()
		<-c.done
		return fmt.Errorf("lab: %s: %s: still running %v after SIGTERM, killed", c.host.Name, c.Args[0], grace)
	}
}

// Run is Start and Wait.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the program and returns what it wrote to its standard output. An *exec.ExitError holds its standard error,
// unless Stderr is set.
func (c *Cmd) Output() ([]byte, error) {
	var out, errOut bytes.Buffer
	c.Stdout = &out
	if c.Stderr == nil {
		c.Stderr = &errOut
	}
	err := c.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		exit.Stderr = errOut.Bytes()
	}
	return out.Bytes(), err
}
