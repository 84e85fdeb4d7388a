package tun

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// Defaults of a new Pipe.
const (
	DefaultPipeMTU   = 1500 // bytes
	DefaultPipeQueue = 512  // packets; a kernel TUN's own default is 500
)

var errOffset = fmt.Errorf("tun: offset is less than the %d bytes of the vnet header", Headroom)

// Pipe returns a pair of devices in memory: what is written to one is read from the other, in order. Nothing is lost
// except what finds the queue of the reading end full, and nothing happens but in the caller's own calls, so that a
// test which drives both ends by hand always sees the same.
func Pipe() (a, b *PipeEnd) {
	a = &PipeEnd{mtu: DefaultPipeMTU, limit: DefaultPipeQueue}
	b = &PipeEnd{mtu: DefaultPipeMTU, limit: DefaultPipeQueue}
	a.peer, b.peer = b, a
	return a, b
}

// A PipeEnd is one end of a [Pipe]. It implements [Device]. Unlike a kernel device it is safe for any number of
// concurrent readers and writers.
type PipeEnd struct {
	peer *PipeEnd

	mu     sync.Mutex // guards below; the mutexes of both ends are never held together
	queue  [][]byte   // vnet header and packet, oldest first: what this end will read
	free   [][]byte   // buffers to use again
	limit  int        // packets
	mtu    int        // bytes
	wake   func()
	closed bool
	drops  PipeDrops
}

// PipeDrops counts the packets that one end of a pipe has lost, by reason.
type PipeDrops struct {
	Full     uint64 // written by the peer while the queue was full
	TooLong  uint64 // longer than the buffer of the reader
	PeerGone uint64 // written by the peer after this end was closed
}

var _ Device = (*PipeEnd)(nil)

// Read implements [Device].
func (p *PipeEnd) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	if offset < Headroom {
		return 0, errOffset
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, os.ErrClosed
	}
	n, taken := 0, 0
	for taken < len(p.queue) && n < len(bufs) && n < len(sizes) {
		pkt := p.queue[taken]
		taken++
		if to := bufs[n][offset-Headroom:]; len(to) < len(pkt) {
			p.drops.TooLong++
		} else {
			sizes[n] = copy(to, pkt) - Headroom
			n++
		}
		p.free = append(p.free, pkt)
	}
	rest := copy(p.queue, p.queue[taken:])
	clear(p.queue[rest:])
	p.queue = p.queue[:rest]
	if n == 0 {
		return 0, ErrAgain
	}
	return n, nil
}

// Write implements [Device]. It copies the packets to the queue of the other end and then calls that end's wake function
// once.
func (p *PipeEnd) Write(bufs [][]byte, offset int) (int, error) {
	if offset < Headroom {
		return 0, errOffset
	}
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	if closed {
		return 0, os.ErrClosed
	}
	return p.peer.put(bufs, offset)
}

// put queues packets that this end will read.
func (p *PipeEnd) put(bufs [][]byte, offset int) (n int, err error) {
	p.mu.Lock()
	var wake func()
	for ; n < len(bufs); n++ {
		if len(bufs[n]) <= offset {
			err = errors.New("tun: packet is empty")
			break
		}
		switch pkt := bufs[n][offset-Headroom:]; {
		case p.closed:
			p.drops.PeerGone++
		case len(p.queue) >= p.limit:
			p.drops.Full++
		default:
			var b []byte
			if last := len(p.free) - 1; last >= 0 {
				b, p.free = p.free[last], p.free[:last]
			}
			p.queue = append(p.queue, append(b[:0], pkt...))
			wake = p.wake
		}
	}
	p.mu.Unlock()
	if wake != nil {
		wake()
	}
	return n, err
}

// FD returns -1.
func (p *PipeEnd) FD() int { return -1 }

// Notify implements [Device].
func (p *PipeEnd) Notify(wake func()) {
	p.mu.Lock()
	p.wake = wake
	waiting := len(p.queue) > 0
	p.mu.Unlock()
	if waiting && wake != nil {
		wake()
	}
}

// MTU implements [Device].
func (p *PipeEnd) MTU() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mtu, nil
}

// SetMTU sets what MTU of this end returns, in bytes. The pipe itself carries packets of any length: superpackets are
// longer than the MTU.
func (p *PipeEnd) SetMTU(mtu int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mtu = mtu
}

// SetQueue sets how many packets may wait at this end. What waits already stays.
func (p *PipeEnd) SetQueue(packets int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limit = packets
}

// Drops returns the packets toward this end that were lost.
func (p *PipeEnd) Drops() PipeDrops {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.drops
}

// BatchSize implements [Device].
func (p *PipeEnd) BatchSize() int { return 64 }

// Close closes this end and drops what waits at it. The other end stays open; what it writes is counted as dropped.
func (p *PipeEnd) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.queue, p.free, p.wake = nil, nil, nil
	return nil
}
