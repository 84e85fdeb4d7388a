package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// opened is what bench-idle says once all of its connections are there.
const opened = "opened\n"

// idleTool opens connections, sends one message on each to see it answered, and holds them until its standard input ends.
func idleTool(fs *flag.FlagSet, args []string) (any, error) {
	addr := fs.String("addr", "", "`ADDRESS:PORT` of the server")
	conns := fs.Int("conns", 1000, "how many")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	const workers = 16
	ownThreads(workers)
	done := make(chan error, workers)
	for w := range workers {
		to, err := sockaddr(*addr)
		if err != nil {
			return nil, err
		}
		go func() {
			for i := w; i < *conns; i += workers {
				err := openOne(to)
				if errors.Is(err, unix.ECONNRESET) { // see mostFailed
					err = openOne(to)
				}
				if err != nil {
					done <- fmt.Errorf("connection %d: %w", i, err)
					return
				}
			}
			done <- nil
		}()
	}
	for range workers {
		if err := <-done; err != nil {
			return nil, err // others may wait for ever
		}
	}
	fmt.Print(opened)
	_, err := io.Copy(io.Discard, os.Stdin)
	return nil, err
}

// openOne opens a connection that stays, and sees a message answered.
func openOne(to *unix.RawSockaddrInet4) error {
	var message [messageBytes]byte
	message[0] = verbEcho
	fd, err := connect(to)
	if err != nil {
		return err
	}
	if err := writeFull(fd, message[:]); err != nil {
		return err
	}
	return readFull(fd, message[:])
}
