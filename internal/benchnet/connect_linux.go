package main

import (
	"flag"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A connectResult is what bench-connect found.
type connectResult struct {
	Connections uint64  `json:"connections"`
	Failed      uint64  `json:"failed"`
	FirstError  string  `json:"first_error,omitempty"`
	Seconds     float64 `json:"seconds"`
}

// connectTool opens connections, asks, reads the answer up to the server's FIN, and closes, over and over.
func connectTool(fs *flag.FlagSet, args []string) (any, error) {
	addr := fs.String("addr", "", "`ADDRESS:PORT` of the server")
	workers := fs.Int("workers", 1, "connections at once, a thread for each")
	duration := fs.Duration("time", time.Second, "of the measurement")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	ownThreads(*workers)
	all := make([]connectWorker, *workers)
	start := time.Now()
	until := start.Add(*duration)
	var wg sync.WaitGroup
	for i := range all {
		to, err := sockaddr(*addr)
		if err != nil {
			return nil, err
		}
		all[i].to = to
		wg.Go(func() {
			runtime.LockOSThread()
			all[i].run(until)
		})
	}
	var r connectResult
	wg.Wait()
	for i := range all {
		r.Connections += all[i].count
		r.Failed += all[i].failed
		if err := all[i].err; err != nil && r.FirstError == "" {
			r.FirstError = err.Error()
		}
	}
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

type connectWorker struct {
	to            *unix.RawSockaddrInet4
	message       [messageBytes]byte
	buf           [messageBytes]byte
	count, failed uint64
	err           error // the first
	_             [64]byte
}

func (w *connectWorker) run(until time.Time) {
	w.message[0] = verbClose
	for time.Now().Before(until) {
		if err := w.once(); err != nil {
			w.failed++
			if w.err == nil {
				w.err = err
			}
			continue
		}
		w.count++
	}
}

func (w *connectWorker) once() error {
	fd, err := connect(w.to)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := writeFull(fd, w.message[:]); err != nil {
		return err
	}
	if err := readFull(fd, w.buf[:]); err != nil {
		return err
	}
	_, err = read(fd, w.buf[:1])
	return err
}
