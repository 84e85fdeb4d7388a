package replay

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"ztun.dev/ztun/tun"
)

// A Device is the end of the netstack that a [Player] feeds. It implements [tun.Device]. The netstack reads one packet in a turn, so
// that it has done all that follows from one before it gets the next.
type Device struct {
	mtu   int
	wrote func(b []byte) // what the netstack sends; b is borrowed

	mu     sync.Mutex // guards below
	queue  [][]byte   // vnet header and packet, oldest first
	free   [][]byte
	lent   bool // the last Read returned a packet
	wake   func()
	closed bool
}

var _ tun.Device = (*Device)(nil)

// maxQueue bounds what may wait: a Player puts a few packets at a time.
const maxQueue = 1 << 12

var errOffset = fmt.Errorf("replay: offset is less than the %d bytes of the vnet header", tun.Headroom)

// buffer returns a buffer of n bytes behind the vnet header of a packet whose checksum is not looked at.
func (d *Device) buffer(n int) (whole, packet []byte) {
	d.mu.Lock()
	if last := len(d.free) - 1; last >= 0 {
		whole, d.free = d.free[last], d.free[:last]
	}
	d.mu.Unlock()
	if cap(whole) < tun.Headroom+n {
		whole = make([]byte, tun.Headroom+max(n, 2048))
	}
	whole = whole[:tun.Headroom+n]
	tun.VnetHdr{Flags: tun.VnetChecksumValid}.Encode(whole)
	return whole, whole[tun.Headroom:]
}

// put queues a buffer, which is the device's then.
func (d *Device) put(whole []byte) {
	d.mu.Lock()
	if d.closed || len(d.queue) == maxQueue {
		d.mu.Unlock()
		return
	}
	d.queue = append(d.queue, whole)
	wake := d.wake
	d.mu.Unlock()
	if wake != nil {
		wake()
	}
}

// Read implements [tun.Device].
func (d *Device) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	if offset < tun.Headroom {
		return 0, errOffset
	}
	d.mu.Lock()
	wake := d.wake
	var again bool
	defer func() {
		d.mu.Unlock()
		if again && wake != nil {
			wake()
		}
	}()
	if d.closed {
		return 0, os.ErrClosed
	}
	if d.lent || len(d.queue) == 0 || len(bufs) == 0 || len(sizes) == 0 {
		again = d.lent && len(d.queue) > 0
		d.lent = false
		return 0, tun.ErrAgain
	}
	b := d.queue[0]
	rest := copy(d.queue, d.queue[1:])
	d.queue[rest] = nil
	d.queue = d.queue[:rest]
	d.lent = true
	n := 0
	if to := bufs[0][offset-tun.Headroom:]; len(to) >= len(b) {
		sizes[0] = copy(to, b) - tun.Headroom
		n = 1
	}
	d.free = append(d.free, b)
	if n == 0 {
		return 0, tun.ErrAgain
	}
	return n, nil
}

// Write implements [tun.Device].
func (d *Device) Write(bufs [][]byte, offset int) (int, error) {
	if offset < tun.Headroom {
		return 0, errOffset
	}
	d.mu.Lock()
	closed := d.closed
	d.mu.Unlock()
	for i, b := range bufs {
		switch {
		case closed:
			return i, os.ErrClosed
		case len(b) <= offset:
			return i, errors.New("replay: packet is empty")
		}
		d.wrote(b[offset:])
	}
	return len(bufs), nil
}

// FD returns -1.
func (d *Device) FD() int { return -1 }

// Notify implements [tun.Device].
func (d *Device) Notify(wake func()) {
	d.mu.Lock()
	d.wake = wake
	waiting := len(d.queue) > 0
	d.mu.Unlock()
	if waiting && wake != nil {
		wake()
	}
}

// Watched reports whether somebody is told of packets that come.
func (d *Device) Watched() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.wake != nil
}

// MTU implements [tun.Device].
func (d *Device) MTU() (int, error) { return d.mtu, nil }

// BatchSize implements [tun.Device].
func (d *Device) BatchSize() int { return 1 }

// Close drops what waits.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.queue, d.free, d.wake = nil, nil, nil
	return nil
}
