package tun

import (
	"errors"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// older tells of the ends of connections that the kernel carried before this process came: an earlier one has handed them back,
// or they were there before the capture. Nobody else knows of them.
type older struct {
	netns  *Netns
	cookie uint64

	mu    sync.Mutex // guards below
	fd    int        // hears of sockets that are destroyed; -1 after close
	alive map[socketAddrs]bool
}

// socketAddrs are those of a connected socket.
type socketAddrs struct{ local, remote netip.AddrPort }

// findOlder is called in the netns, before this process has connections there. It returns nil where there is nothing to tell.
func findOlder(s *setup) (*older, error) {
	fd, err := destroyedSockets() // first, so that none ends unheard
	if err != nil {
		return nil, err
	}
	o := &older{cookie: s.cookie, fd: fd, alive: make(map[socketAddrs]bool)}
	carried, err := s.steerer.stored().carriedByKernel(s.cfg.Marks)
	if err == nil {
		err = eachSocket(func(d *diagSocket) {
			if carried(d) {
				o.alive[socketAddrs{d.local, d.remote}] = true
			}
		})
	}
	if err == nil && len(o.alive) > 0 {
		if o.netns, err = s.cfg.Netns.dup(); err == nil {
			return o, nil
		}
	}
	return nil, errors.Join(err, unix.Close(fd))
}

func (o *older) close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.letGo()
}

// letGo closes what is open. mu is held.
func (o *older) letGo() error {
	if o.fd < 0 {
		return nil
	}
	err := errors.Join(unix.Close(o.fd), o.netns.Close())
	o.fd = -1
	return err
}

// done lets go once all have ended: the kernel would tell of every other connection of the pod, too. mu is held.
func (o *older) done() {
	if len(o.alive) == 0 {
		_ = o.letGo() // nothing comes of it
	}
}

func (o *older) descriptor() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fd
}

// read takes what the kernel has said of sockets that are no more, and tells of those that it knows.
func (o *older) read(buf []byte, ended func(EndedFlow)) {
	var list []EndedFlow
	o.mu.Lock()
	for o.fd >= 0 {
		size, err := unix.Read(o.fd, buf)
		if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR) { // sweep finds what is missing
			continue
		}
		if err != nil {
			break
		}
		for d := range destroyed(buf[:size]) {
			list = o.end(list, &d)
		}
	}
	o.done()
	o.mu.Unlock()
	for _, e := range list {
		ended(e)
	}
}

// sweep tells of those whose socket is gone without a word.
func (o *older) sweep(ended func(EndedFlow)) {
	var list []EndedFlow
	o.mu.Lock()
	if o.fd >= 0 && len(o.alive) > 0 {
		now := make(map[socketAddrs]bool)
		err := o.netns.Do(func() error {
			return eachSocket(func(d *diagSocket) {
				if d.info.State != tcpTimeWait {
					now[socketAddrs{d.local, d.remote}] = true
				}
			})
		})
		for a := range o.alive {
			if err == nil && !now[a] {
				list = o.end(list, &diagSocket{local: a.local, remote: a.remote})
			}
		}
	}
	o.done()
	o.mu.Unlock()
	for _, e := range list {
		ended(e)
	}
}

// end appends the end of a socket. Nothing says who has opened the connection: it is told both ways.
func (o *older) end(list []EndedFlow, d *diagSocket) []EndedFlow {
	a := socketAddrs{d.local, d.remote}
	if !o.alive[a] {
		return list
	}
	delete(o.alive, a)
	acked, received := d.applicationBytes()
	return append(list,
		EndedFlow{Netns: o.cookie, Src: d.local, Dst: d.remote, Established: true, Received: acked, Sent: received},
		EndedFlow{Netns: o.cookie, Src: d.remote, Dst: d.local, Established: true, Received: received, Sent: acked})
}

// applicationBytes returns what of the application's the peer has acknowledged, and what has come. What is sent counts neither SYN
// nor FIN; of what has come one byte is taken for a FIN, which is one too many after a reset.
func (d *diagSocket) applicationBytes() (acked, received uint64) {
	return min(d.info.BytesAcked, d.sent), max(d.info.BytesReceived, 1) - 1
}
