package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A pingpongResult is what bench-pingpong found.
type pingpongResult struct {
	P50   float64 `json:"p50_seconds"`
	P99   float64 `json:"p99_seconds"`
	Count uint64  `json:"count"` // round trips
}

// pingpongTool sends a small message on each connection and the next one when the answer is there.
func pingpongTool(fs *flag.FlagSet, args []string) (any, error) {
	addr := fs.String("addr", "", "`ADDRESS:PORT` of the server")
	conns := fs.Int("conns", 1, "connections, all on one thread")
	warmup := fs.Duration("warmup", 0, "how long not to measure yet")
	duration := fs.Duration("time", time.Second, "of the measurement")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	ownThreads(1)
	p := pingpong{message: make([]byte, messageBytes), buf: make([]byte, messageBytes)}
	p.message[0] = verbEcho
	if err := p.connect(*addr, *conns); err != nil {
		return nil, err
	}
	defer p.close()
	err := <-onThread(func() error { return p.run(*warmup, *duration) })
	if err != nil {
		return nil, err
	}
	return pingpongResult{P50: p.hist.quantile(0.5) / 1e9, P99: p.hist.quantile(0.99) / 1e9, Count: p.hist.total}, nil
}

// A pingpong is one measurement.
type pingpong struct {
	epoll        int
	fds          []int
	got          []int       // bytes of the answer, by connection
	sent         []time.Time // when the message was
	message, buf []byte
	hist         histogram
}

func (p *pingpong) connect(addr string, n int) (err error) {
	to, err := sockaddr(addr)
	if err != nil {
		return err
	}
	if p.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	p.got, p.sent = make([]int, n), make([]time.Time, n)
	for i := range n {
		fd, err := connect(to)
		if err != nil {
			return err
		}
		p.fds = append(p.fds, fd)
		ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)}
		if err := unix.EpollCtl(p.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
			return os.NewSyscallError("epoll_ctl", err)
		}
		// Once and for all of the path to be there before the clock runs.
		if err := writeFull(fd, p.message); err != nil {
			return err
		}
		if err := readFull(fd, p.buf); err != nil {
			return err
		}
	}
	return nil
}

func (p *pingpong) close() {
	for _, fd := range p.fds {
		unix.Close(fd)
	}
	unix.Close(p.epoll)
}

func (p *pingpong) run(warmup, duration time.Duration) error {
	events := make([]unix.EpollEvent, len(p.fds))
	now := time.Now()
	from := now.Add(warmup)
	until := from.Add(duration)
	for i := range p.fds {
		if err := p.send(i, now); err != nil {
			return err
		}
	}
	for now.Before(until) {
		n := 1
		if len(p.fds) > 1 { // one connection needs no help: its read waits
			var err error
			if n, err = epollWait(p.epoll, events, -1); err != nil {
				return err
			}
		}
		for _, ev := range events[:n] {
			whole, err := p.receive(int(ev.Fd))
			if err != nil {
				return err
			}
			if !whole {
				continue
			}
			now = time.Now()
			if !now.Before(from) {
				p.hist.add(now.Sub(p.sent[ev.Fd]))
			}
			if err := p.send(int(ev.Fd), now); err != nil {
				return err
			}
		}
	}
	if p.hist.total == 0 {
		return fmt.Errorf("not one answer within %v", duration)
	}
	return nil
}

func (p *pingpong) send(i int, now time.Time) error {
	p.sent[i] = now
	return writeFull(p.fds[i], p.message)
}

func (p *pingpong) receive(i int) (whole bool, err error) {
	n, err := read(p.fds[i], p.buf[:messageBytes-p.got[i]])
	switch {
	case err != nil:
		return false, os.NewSyscallError("read", err)
	case n == 0:
		return false, io.ErrUnexpectedEOF
	}
	p.got[i] += n
	if p.got[i] < messageBytes {
		return false, nil
	}
	p.got[i] = 0
	return true, nil
}
