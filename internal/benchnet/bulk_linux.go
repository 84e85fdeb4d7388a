package main

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A bulkResult is what bench-bulk found.
type bulkResult struct {
	Bytes   uint64  `json:"bytes"`   // as the receivers counted them
	Seconds float64 `json:"seconds"` // until the last byte had been received
}

func (r bulkResult) gbits() float64 { return float64(r.Bytes) * 8 / 1e9 / r.Seconds }

// running is what bench-bulk says once its streams flow.
const running = "running\n"

// bulkTool sends, or receives, as fast as it can.
func bulkTool(fs *flag.FlagSet, args []string) (any, error) {
	addr := fs.String("addr", "", "`ADDRESS:PORT` of the server")
	streams := fs.Int("streams", 1, "connections, a thread for each")
	down := fs.Bool("down", false, "from the server to here")
	duration := fs.Duration("time", time.Second, "of the measurement")
	one := fs.Bool("one-thread", false, "all connections on one thread")
	announce := fs.Bool("announce", false, "say when the streams flow")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	ownThreads(*streams)
	if *one {
		var r bulkResult
		err := <-onThread(func() (err error) {
			r, err = oneThread(*addr, *streams, *down, *duration)
			return err
		})
		return r, err
	}
	b := bulk{down: *down, duration: *duration, begin: make(chan time.Time, *streams)}
	ready := make(chan error, *streams)
	totals := make([]uint64, *streams)
	var done []<-chan error
	for i := range *streams {
		to, err := sockaddr(*addr)
		if err != nil {
			return nil, err
		}
		done = append(done, onThread(func() (err error) {
			totals[i], err = b.stream(to, ready)
			return err
		}))
	}
	for range *streams {
		if err := <-ready; err != nil {
			return nil, err
		}
	}
	start := time.Now()
	for range *streams {
		b.begin <- start
	}
	if *announce {
		fmt.Print(running)
	}
	var r bulkResult
	for i, d := range done {
		if err := <-d; err != nil {
			return nil, err
		}
		r.Bytes += totals[i]
	}
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

// A bulk is one measurement.
type bulk struct {
	down     bool
	duration time.Duration
	begin    chan time.Time
}

// stream reports on ready once its connection is there, waits for its turn, and returns the number of bytes received.
func (b *bulk) stream(to *unix.RawSockaddrInet4, ready chan<- error) (uint64, error) {
	buf := make([]byte, chunkBytes)
	buf[0] = verbUpload
	if b.down {
		buf[0] = verbDownload
	}
	fd, err := connect(to)
	if err == nil {
		defer unix.Close(fd)
		err = errors.Join(writeFull(fd, buf[:1]), readFull(fd, buf[:1]))
	}
	ready <- err
	if err != nil {
		return 0, nil // reported
	}
	start := <-b.begin
	if b.down {
		return b.receive(fd, buf, start)
	}
	return b.send(fd, buf, start)
}

func (b *bulk) receive(fd int, buf []byte, start time.Time) (uint64, error) {
	if err := writeFull(fd, buf[:1]); err != nil {
		return 0, err
	}
	var total uint64
	for time.Since(start) < b.duration {
		n, err := read(fd, buf)
		switch {
		case err != nil:
			return total, os.NewSyscallError("read", err)
		case n == 0:
			return total, fmt.Errorf("the stream ended after %d bytes", total)
		}
		total += uint64(n)
	}
	return total, nil
}

func (b *bulk) send(fd int, buf []byte, start time.Time) (uint64, error) {
	var total uint64
	for time.Since(start) < b.duration {
		n, err := write(fd, buf)
		if err != nil {
			return total, os.NewSyscallError("write", err)
		}
		total += uint64(n)
	}
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return total, os.NewSyscallError("shutdown", err)
	}
	if err := readFull(fd, buf[:8]); err != nil {
		return total, fmt.Errorf("the server's count: %w", err)
	}
	if n := binary.BigEndian.Uint64(buf); n != total {
		return total, fmt.Errorf("sent %d bytes, the server received %d", total, n)
	}
	return total, nil
}
