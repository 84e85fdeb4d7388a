package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Bulk on one thread at each end, as iperf3 did before its version 3.16: one epoll, and one read or write for each socket that is
// ready. Its streams have to cross from core to core, where a thread for each stream often finds both ends on one core; figures
// that were measured with iperf3 compare with this.

// A oneThreadServer speaks the protocol of the bulk port.
type oneThreadServer struct {
	epoll, ln int
	state     []byte   // by descriptor: 0, verbUpload, verbDownload, or sending
	total     []uint64 // received
	buf       []byte
	events    []unix.EpollEvent
}

const sending = 's'

func newOneThreadServer(port int) (*oneThreadServer, error) {
	n, err := descriptors()
	if err != nil {
		return nil, err
	}
	s := &oneThreadServer{state: make([]byte, n), total: make([]uint64, n), buf: make([]byte, chunkBytes), events: make([]unix.EpollEvent, bulkMost)}
	if s.ln, err = listen(port, unix.SOCK_NONBLOCK); err != nil {
		return nil, err
	}
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	return s, watch(s.epoll, unix.EPOLL_CTL_ADD, s.ln, unix.EPOLLIN)
}

func watch(epoll, op, fd int, events uint32) error {
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(epoll, op, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}))
}

func (s *oneThreadServer) run() error {
	for {
		n, err := epollWait(s.epoll, s.events, -1)
		if err != nil {
			return err
		}
		for _, ev := range s.events[:n] {
			fd := int(ev.Fd)
			if fd != s.ln {
				if !s.serve(fd) {
					unix.Close(fd)
				}
				continue
			}
			fd, err := accept(s.ln, unix.SOCK_NONBLOCK)
			if err == unix.EAGAIN {
				continue
			} else if err != nil {
				return os.NewSyscallError("accept4", err)
			}
			s.state[fd], s.total[fd] = 0, 0
			if err := watch(s.epoll, unix.EPOLL_CTL_ADD, fd, unix.EPOLLIN); err != nil {
				return err
			}
		}
	}
}

// serve is false if the connection is done with. What goes wrong is the client's to report.
func (s *oneThreadServer) serve(fd int) bool {
	if s.state[fd] == sending {
		_, err := write(fd, s.buf)
		return err == nil || err == unix.EAGAIN
	}
	b := s.buf
	if s.state[fd] != verbUpload {
		b = b[:1]
	}
	n, err := read(fd, b)
	switch {
	case err == unix.EAGAIN:
		return true
	case err != nil:
		return false
	case n == 0:
		binary.BigEndian.PutUint64(s.buf, s.total[fd])
		_ = writeFull(fd, s.buf[:8])
		return false
	}
	switch s.state[fd] {
	case 0:
		s.state[fd] = b[0]
		return writeFull(fd, b) == nil
	case verbDownload:
		s.state[fd] = sending
		return watch(s.epoll, unix.EPOLL_CTL_MOD, fd, unix.EPOLLOUT) == nil
	}
	s.total[fd] += uint64(n)
	return true
}

// oneThread is the client.
func oneThread(addr string, streams int, down bool, duration time.Duration) (r bulkResult, err error) {
	buf := make([]byte, chunkBytes)
	verb, events := byte(verbUpload), uint32(unix.EPOLLOUT)
	if down {
		verb, events = verbDownload, unix.EPOLLIN
	}
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return r, os.NewSyscallError("epoll_create1", err)
	}
	defer unix.Close(epoll)
	fds := make([]int, streams)
	for i := range fds {
		to, err := sockaddr(addr)
		if err != nil {
			return r, err
		}
		if fds[i], err = connect(to); err != nil {
			return r, err
		}
		defer unix.Close(fds[i])
		buf[0] = verb
		if err := writeFull(fds[i], buf[:1]); err != nil {
			return r, err
		}
		if err := readFull(fds[i], buf[:1]); err != nil {
			return r, err
		}
		if err := unix.SetNonblock(fds[i], true); err != nil {
			return r, os.NewSyscallError("fcntl", err)
		}
		if err := watch(epoll, unix.EPOLL_CTL_ADD, fds[i], events); err != nil {
			return r, err
		}
	}
	start := time.Now()
	if down {
		for _, fd := range fds {
			if err := writeFull(fd, buf[:1]); err != nil {
				return r, err
			}
		}
	}
	ready := make([]unix.EpollEvent, streams)
	for time.Since(start) < duration {
		n, err := epollWait(epoll, ready, int(slack.Milliseconds()))
		if err != nil {
			return r, err
		}
		for _, ev := range ready[:n] {
			move := write
			if down {
				move = read
			}
			switch n, err := move(int(ev.Fd), buf); {
			case err == unix.EAGAIN:
			case err != nil:
				return r, err
			case n == 0:
				return r, fmt.Errorf("a stream ended after %d bytes of all", r.Bytes)
			default:
				r.Bytes += uint64(n)
			}
		}
	}
	if !down {
		if err := finishUploads(fds, buf, r.Bytes); err != nil {
			return r, err
		}
	}
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

// finishUploads waits until the server has all that was sent.
func finishUploads(fds []int, buf []byte, sent uint64) error {
	for _, fd := range fds {
		if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
			return os.NewSyscallError("shutdown", err)
		}
	}
	var received uint64
	for _, fd := range fds {
		if err := unix.SetNonblock(fd, false); err != nil {
			return os.NewSyscallError("fcntl", err)
		}
		if err := readFull(fd, buf[:8]); err != nil {
			return fmt.Errorf("the server's count: %w", err)
		}
		received += binary.BigEndian.Uint64(buf)
	}
	if received != sent {
		return fmt.Errorf("sent %d bytes, the server received %d", sent, received)
	}
	return nil
}
