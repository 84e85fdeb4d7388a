package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// The protocol of the small port: each message of messageBytes is answered with as many. Where the first byte of a message is
// verbClose, the server closes the connection behind its answer.
//
// That of the bulk port: the client says upload or download in one byte and is answered with one. After an upload, which ends with
// the client's FIN, the server answers with the number of bytes it got (8, big endian). A download begins at a second byte and
// ends when the client closes.
const (
	smallPort = 7000
	bulkPort  = 7001
	onePort   = 7002 // as the bulk port, on one thread

	messageBytes = 64
	verbEcho     = 'e'
	verbClose    = 'c'

	verbUpload   = 'u'
	verbDownload = 'd'

	chunkBytes = 128 << 10 // of one read or write: iperf3's default
	bulkMost   = 32        // connections to the bulk port that are served at once, a thread for each
)

// serverTool answers on all ports until it is killed.
func serverTool(fs *flag.FlagSet, args []string) (any, error) {
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	ownThreads(bulkMost + 2)
	small, err := newSmallServer(smallPort)
	if err != nil {
		return nil, err
	}
	bulk, err := listen(bulkPort, 0)
	if err != nil {
		return nil, err
	}
	for range bulkMost {
		go func() { // until the end of the process
			if err := <-onThread(func() error { return serveBulk(bulk) }); err != nil {
				fmt.Fprintln(os.Stderr, "bench-server:", err)
			}
		}()
	}
	one, err := newOneThreadServer(onePort)
	if err != nil {
		return nil, err
	}
	oneDone := onThread(one.run)
	select {
	case err = <-onThread(small.run):
	case err = <-oneDone:
	}
	return nil, err
}

// serveBulk serves one connection after the other. What goes wrong with them is the client's to report.
func serveBulk(ln int) error {
	buf := make([]byte, chunkBytes)
	for {
		fd, err := accept(ln, 0)
		if err != nil {
			return os.NewSyscallError("accept4", err)
		}
		serveStream(fd, buf)
		unix.Close(fd)
	}
}

func serveStream(fd int, buf []byte) {
	verb := buf[:1]
	if readFull(fd, verb) != nil || writeFull(fd, verb) != nil {
		return
	}
	if verb[0] == verbDownload {
		if readFull(fd, verb) != nil {
			return
		}
		for {
			if _, err := write(fd, buf); err != nil {
				return
			}
		}
	}
	var total uint64
	for {
		n, err := read(fd, buf)
		if err != nil {
			return
		}
		if n == 0 {
			break
		}
		total += uint64(n)
	}
	binary.BigEndian.PutUint64(buf, total)
	_ = writeFull(fd, buf[:8])
}

// A smallServer answers small messages of any number of connections on one thread.
type smallServer struct {
	epoll, ln int
	got       []uint8 // bytes of an unfinished message, by descriptor
	verb      []byte  // its first byte
	buf       []byte
	events    []unix.EpollEvent
}

func newSmallServer(port int) (*smallServer, error) {
	n, err := descriptors()
	if err != nil {
		return nil, err
	}
	s := &smallServer{got: make([]uint8, n), verb: make([]byte, n), buf: make([]byte, 16*messageBytes), events: make([]unix.EpollEvent, 256)}
	if s.ln, err = listen(port, unix.SOCK_NONBLOCK); err != nil {
		return nil, err
	}
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	return s, s.watch(s.ln)
}

func (s *smallServer) watch(fd int) error {
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, fd, &ev))
}

func (s *smallServer) run() error {
	for {
		n, err := epollWait(s.epoll, s.events, -1)
		if err != nil {
			return err
		}
		for i := range n {
			if fd := int(s.events[i].Fd); fd == s.ln {
				if err := s.acceptAll(); err != nil {
					return err
				}
			} else if !s.serve(fd) {
				unix.Close(fd)
			}
		}
	}
}

func (s *smallServer) acceptAll() error {
	for {
		fd, err := accept(s.ln, unix.SOCK_NONBLOCK)
		switch {
		case err == unix.EAGAIN:
			return nil
		case err != nil:
			return os.NewSyscallError("accept4", err)
		}
		s.got[fd] = 0
		if !s.serve(fd) { // the message has often come with the connection
			unix.Close(fd)
		} else if err := s.watch(fd); err != nil {
			return err
		}
	}
}

// serve reads once and answers what is complete. It is false if the connection is done with.
func (s *smallServer) serve(fd int) bool {
	n, err := read(fd, s.buf)
	switch {
	case err == unix.EAGAIN:
		return true
	case err != nil || n == 0:
		return false
	}
	if s.got[fd] == 0 {
		s.verb[fd] = s.buf[0]
	}
	all := int(s.got[fd]) + n
	s.got[fd] = uint8(all % messageBytes)
	answer := s.buf[:all/messageBytes*messageBytes]
	if len(answer) == 0 {
		return true
	}
	// The answers to 16 small messages fit the socket's buffer: less than all is an error, too.
	if n, err := write(fd, answer); n < len(answer) || err != nil {
		return false
	}
	return s.verb[fd] != verbClose
}
