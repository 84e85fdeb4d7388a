package tun

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// An endSource knows connections of one netns that the kernel carries, and tells of their ends.
type endSource interface {
	descriptor() int                        // is readable when the kernel has said something; -1 where it says nothing
	read(buf []byte, ended func(EndedFlow)) // tells what that was
	sweep(ended func(EndedFlow))            // finds, every sweepEvery, what it has not said
}

// An endWatch hears the endSources of all netns where no program tells of the ends of flows.
type endWatch struct {
	log    *slog.Logger
	wake   int           // eventfd: the list has changed
	missed atomic.Uint64 // times that the kernel had no room for what it had to say

	mu      sync.Mutex // guards below
	sources map[endSource]bool
}

func newEndWatch(log *slog.Logger) (*endWatch, error) {
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return &endWatch{log: log, wake: wake, sources: make(map[endSource]bool)}, nil
}

func (w *endWatch) close() error { return unix.Close(w.wake) }

// notify has run look at the list anew.
func (w *endWatch) notify() { _, _ = unix.Write(w.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

func (w *endWatch) add(s endSource) {
	w.mu.Lock()
	w.sources[s] = true
	w.mu.Unlock()
	w.notify()
}

func (w *endWatch) remove(s endSource) {
	w.mu.Lock()
	delete(w.sources, s)
	w.mu.Unlock()
	w.notify()
}

// run hears them until ctx ends.
func (w *endWatch) run(ctx context.Context, ended func(EndedFlow)) error {
	defer atEnd(ctx, w.notify)() // it has the descriptor
	buf := make([]byte, 64<<10)  // of one message of the kernel's at least
	next := monotonic() + sweepEvery
	for ctx.Err() == nil {
		w.mu.Lock()
		var list []endSource
		for s := range w.sources {
			list = append(list, s)
		}
		w.mu.Unlock()
		fds := []unix.PollFd{{Fd: int32(w.wake), Events: unix.POLLIN}}
		for _, s := range list {
			fds = append(fds, unix.PollFd{Fd: int32(s.descriptor()), Events: unix.POLLIN}) // -1 is passed over
		}
		_, err := unix.Poll(fds, int(sweepEvery.Milliseconds()))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("ends of sockets: poll: %w", err)
		}
		if fds[0].Revents != 0 {
			_, _ = unix.Read(w.wake, buf[:8])
		}
		due := monotonic() >= next // whatever else happens
		if due {
			next = monotonic() + sweepEvery
		}
		for i, s := range list {
			if fds[i+1].Revents != 0 {
				s.read(buf, ended)
			}
			if due {
				s.sweep(ended)
			}
		}
	}
	return nil
}

// A handedFlow is a flow that user space has decided about.
type handedFlow struct {
	way   Way
	old   bool // it was there at the sweep before
	ended bool // and told of
}

// handedFlows tells of the flows of one netns by the sockets that the kernel destroys there.
type handedFlows struct {
	watch  *endWatch
	netns  *Netns // its own
	cookie uint64

	// forget takes flows out of the map below, and of wherever else they are. It is called with mu held.
	forget func(keys ...flowKey) error

	sockets func(each func(*diagSocket)) error // podSockets, but for tests

	mu    sync.Mutex // guards below
	fd    int        // hears of sockets that are destroyed; -1 after close
	flows map[flowKey]*handedFlow
}

// watchHanded is called in the netns.
func watchHanded(w *endWatch, s *setup, forget func(keys ...flowKey) error) (*handedFlows, error) {
	fd, err := destroyedSockets()
	if err != nil {
		return nil, err
	}
	netns, err := s.cfg.Netns.dup()
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	h := &handedFlows{watch: w, netns: netns, cookie: s.cookie, forget: forget, fd: fd, flows: make(map[flowKey]*handedFlow)}
	h.sockets = h.podSockets
	return h, nil
}

// close is called with mu held, when run does not know of it any more.
func (h *handedFlows) close() error {
	if h.fd < 0 {
		return nil
	}
	err := errors.Join(unix.Close(h.fd), h.netns.Close())
	h.fd = -1
	return err
}

func (h *handedFlows) descriptor() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fd
}

// read takes what the kernel has said of sockets that are no more.
func (h *handedFlows) read(buf []byte, ended func(EndedFlow)) {
	var list []EndedFlow
	h.mu.Lock()
	for h.fd >= 0 {
		size, err := unix.Read(h.fd, buf)
		if errors.Is(err, unix.ENOBUFS) { // some are missing: the sweep finds them
			h.watch.missed.Add(1)
			continue
		}
		if err != nil {
			break
		}
		for d := range destroyed(buf[:size]) {
			if e, ok := h.end(&d); ok {
				list = append(list, e)
			}
		}
	}
	h.mu.Unlock()
	for _, e := range list {
		ended(e)
	}
}

// end returns the end of the flow that had this socket in the pod.
func (h *handedFlows) end(d *diagSocket) (e EndedFlow, ok bool) {
	e = EndedFlow{Netns: h.cookie, Src: d.local, Dst: d.remote}
	f := h.flows[keyOf(h.cookie, d.local, d.remote)]
	if f == nil || f.way != ToNetwork {
		e.Src, e.Dst = d.remote, d.local
		if f = h.flows[keyOf(h.cookie, d.remote, d.local)]; f == nil || f.way != ToApplication {
			return e, false
		}
	}
	if f.ended {
		return e, false
	}
	f.ended = true
	acked, received := d.applicationBytes()
	if f.way == ToNetwork {
		e.Established = d.info.BytesAcked > 0 // its SYN
		e.Received, e.Sent = acked, received
		if !e.Established { // the likeliest: what is refused ends at once
			e.Received, e.Sent, e.Err = 0, 0, unix.ECONNREFUSED
			if d.info.Retransmits > 0 {
				e.Err = unix.ETIMEDOUT
			}
		}
	} else {
		e.Established = true
		e.Received, e.Sent = received, acked
	}
	return e, true
}

// sweep forgets flows whose socket is gone, TIME_WAIT included. It looks at all sockets without the lock, which who steers needs.
func (h *handedFlows) sweep(ended func(EndedFlow)) {
	h.mu.Lock()
	nothing := h.fd < 0 || len(h.flows) == 0
	h.mu.Unlock()
	if nothing {
		return
	}
	alive := make(map[flowKey]bool)
	err := h.sockets(func(d *diagSocket) {
		alive[keyOf(h.cookie, d.local, d.remote)] = true
		alive[keyOf(h.cookie, d.remote, d.local)] = true
	})
	if err == nil {
		gone, list := h.without(alive)
		for _, e := range list {
			ended(e)
		}
		err = h.forgetAll(gone)
	}
	if err != nil && !errors.Is(err, os.ErrClosed) {
		h.watch.log.Warn("flows that have ended are not forgotten", "netns", h.netns.String(), "reason", err)
	}
}

// podSockets calls each for the TCP sockets of the netns. mu is not held.
func (h *handedFlows) podSockets(each func(*diagSocket)) error {
	h.mu.Lock()
	if h.fd < 0 {
		h.mu.Unlock()
		return os.ErrClosed
	}
	netns, err := h.netns.dup() // close may come meanwhile
	h.mu.Unlock()
	if err != nil {
		return err
	}
	defer netns.Close()
	return netns.Do(func() error { return eachSocket(each) })
}

// A goneFlow is a flow whose socket is gone. Should the flow be steered anew it is another one.
type goneFlow struct {
	key  flowKey
	flow *handedFlow
}

// without returns the flows that had no socket at the sweep before and have none now, and the ends that are to be told. Those that were
// steered since the sockets were looked at have a sweep to come yet.
func (h *handedFlows) without(alive map[flowKey]bool) (gone []goneFlow, list []EndedFlow) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key, f := range h.flows {
		switch {
		case alive[key]:
			f.old = false
		case !f.old: // perhaps it is on its way
			f.old = true
		default:
			gone = append(gone, goneFlow{key, f})
			if !f.ended && (f.way == ToNetwork || f.way == ToApplication) {
				f.ended = true
				src, dst := key.addrs()
				list = append(list, EndedFlow{Netns: h.cookie, Src: src, Dst: dst, Err: unix.ETIMEDOUT})
			}
		}
	}
	return gone, list
}

// forgetAtOnce is how many flows are forgotten at once. With nft that is one transaction, whose acknowledgements all have to find room in the
// socket's buffer: 208 KiB by default, a few hundred. And who steers waits for no more.
const forgetAtOnce = 64

// forgetAll forgets the flows that were not steered anew meanwhile.
func (h *handedFlows) forgetAll(gone []goneFlow) error {
	for part := range slices.Chunk(gone, forgetAtOnce) {
		if err := h.forgetSome(part); err != nil {
			return err
		}
	}
	return nil
}

func (h *handedFlows) forgetSome(gone []goneFlow) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fd < 0 {
		return os.ErrClosed
	}
	keys := make([]flowKey, 0, len(gone))
	for _, g := range gone {
		if h.flows[g.key] == g.flow && g.flow.old {
			keys = append(keys, g.key)
		}
	}
	return h.forget(keys...)
}

// destroyedSockets opens a socket that hears of each TCP socket of the netns of this thread that is destroyed.
func destroyedSockets() (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_INET_DIAG)
	if err != nil {
		return -1, fmt.Errorf("ends of sockets: %w", err)
	}
	// Groups 1 and 3: SKNLGRP_INET_TCP_DESTROY and SKNLGRP_INET6_TCP_DESTROY of include/uapi/linux/sock_diag.h.
	const groups = 0b101
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20), // bytes: some thousand ends at once
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}))
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("ends of sockets: %w", err)
	}
	return fd, nil
}

// destroyed reads what such a socket has said.
func destroyed(b []byte) func(yield func(diagSocket) bool) {
	return func(yield func(diagSocket) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			size := int(nl.NativeEndian().Uint32(b))
			if size < unix.NLMSG_HDRLEN || size > len(b) {
				return
			}
			if d, err := parseDiagSocket(b[unix.NLMSG_HDRLEN:size]); err == nil && !yield(d) {
				return
			}
			b = b[min(len(b), (size+3)&^3):]
		}
	}
}
