package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
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
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		to, err := sockaddr(*addr)
		if err != nil {
			return nil, err
		}
		wg.Go(func() {
			var message [messageBytes]byte
			message[0] = verbEcho
			for i := w; i < *conns && errs[w] == nil; i += workers {
				fd, err := connect(to)
				if err == nil {
					err = writeFull(fd, message[:])
				}
				if err == nil {
					err = readFull(fd, message[:])
				}
				if err != nil {
					errs[w] = fmt.Errorf("connection %d: %w", i, err)
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	fmt.Print(opened)
	_, err := io.Copy(io.Discard, os.Stdin)
	return nil, err
}
