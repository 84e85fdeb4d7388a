package main

import (
	"errors"
	"flag"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// slowBytes is what each slow reader takes in a second.
const slowBytes = 1000

// slowTool holds downloads of which it takes next to nothing, so that all that is between here and the server fills up.
func slowTool(fs *flag.FlagSet, args []string) (any, error) {
	addr := fs.String("addr", "", "`ADDRESS:PORT` of the server")
	conns := fs.Int("conns", 99, "connections")
	duration := fs.Duration("time", time.Second, "how long")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	ownThreads(1)
	to, err := sockaddr(*addr)
	if err != nil {
		return nil, err
	}
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	var taken uint64
	err = <-onThread(func() error {
		buf := make([]byte, slowBytes)
		for range *conns {
			fd, err := connect(to)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
			buf[0] = verbDownload
			if err := errors.Join(writeFull(fd, buf[:1]), readFull(fd, buf[:1]), writeFull(fd, buf[:1])); err != nil {
				return err
			}
		}
		fmt.Print(running)
		for end := time.Now().Add(*duration); time.Now().Before(end); time.Sleep(time.Second) {
			for _, fd := range fds {
				if err := readFull(fd, buf); err != nil {
					return err
				}
				taken += slowBytes
			}
		}
		return nil
	})
	return taken, err
}
