package stack

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

const (
	// copyLimit is the payload up to which a packet is copied into a view of its size; above, the view that it was read
	// into is handed over and another one taken. A view of 64 KiB costs its clearing, 6 % of the process's CPU (measured),
	// and the memory for as long as the application's data waits in it.
	copyLimit = 4 << 10

	// packetCost is what a small packet counts against the budget of a turn, in bytes: reading and handling it takes about
	// as long as copying that much.
	packetCost = 1 << 10

	viewBytes   = buffer.MaxChunkSize
	frameBytes  = headroom + tun.MaxPacket
	maxHeaders  = 60 + 60 // IPv4 and TCP header with all options
	memoryBatch = 3       // frames that fit into the scratch buffer of a loop

	// secondLook is how long after an event the device is read once more, at least. A device that is deleted wakes its reader before
	// it lets go of it: who reads in between is told that there is nothing, and never woken again (Linux 6.18).
	secondLook = 100 * time.Millisecond
)

// A reader is the task that reads the device. Between turns it holds nothing but, in the midst of bulk data, one view.
type reader struct {
	s   *Stack
	ref *loop.Ref

	stopped bool
	looks   bool       // a second look is due
	events  uint64     // of the device
	looked  uint64     // for how many of them there was a second look
	done    chan error // receives one value, with room for it: why the task ended

	// Devices with a descriptor. In bulk mode, which the last large packet began, headers and payload are read into
	// separate buffers, so that the payload's can be handed over; how long the headers are is predicted from the packet
	// before (about 30 misses in 250,000 packets, measured).
	bulk      bool
	large     bool // a large packet was read in this turn
	view      *buffer.View
	predicted int // bytes of IP and TCP header
	hdr       [headroom + maxHeaders]byte
	vec       rxVec

	// Devices in memory.
	bufs  [memoryBatch][]byte
	sizes [memoryBatch]int
}

// start is called on the reader's loop.
func (rd *reader) start(ref *loop.Ref) loop.Task {
	rd.ref = ref
	ref.Lead()
	rd.predicted = ipv4Len + tcpLen + 12 // with timestamps
	if fd := rd.s.link.fd; fd >= 0 {
		if err := ref.Watch(fd, func(loop.Events) { rd.events++; ref.Wake() }); err != nil {
			rd.done <- fmt.Errorf("stack: %w", err)
			return nil
		}
	} else {
		rd.s.cfg.Device.Notify(ref.Wake)
	}
	return rd
}

func (rd *reader) String() string { return "the reader of a device" }

// stop ends the reader; it is called on its loop. The device stays open.
func (rd *reader) stop(why error) {
	if rd.stopped {
		return
	}
	rd.stopped = true
	if fd := rd.s.link.fd; fd >= 0 {
		rd.ref.Unwatch(fd)
	} else {
		rd.s.cfg.Device.Notify(nil)
	}
	rd.dropView()
	rd.ref.Remove()
	rd.done <- why
}

// Turn implements loop.Task.
func (rd *reader) Turn(budget int) (more bool) {
	if rd.stopped {
		return false
	}
	rd.large = false
	var err error
	for budget > 0 && err == nil {
		var n int
		switch {
		case rd.s.link.fd < 0:
			n, err = rd.readMemory()
		case rd.bulk:
			n, err = rd.readSplit()
		default:
			n, err = rd.readWhole()
		}
		budget -= n
		rd.ref.Moved(n)
	}
	rd.s.batch.end()
	if !rd.large {
		rd.dropView()
	}
	if rd.s.cfg.Manual {
		rd.s.settle()
	}
	switch {
	case err == nil:
		return true
	case errors.Is(err, tun.ErrAgain):
		rd.lookAgain()
		return false
	case errors.Is(err, unix.EINTR):
		return true
	}
	rd.stop(fmt.Errorf("stack: read the device: %w", err))
	return false
}

// lookAgain has the device read once more after the events so far.
func (rd *reader) lookAgain() {
	if rd.looks || rd.looked == rd.events {
		return
	}
	rd.looks = true
	events := rd.events
	rd.ref.After(secondLook, func() {
		rd.looks, rd.looked = false, events
		rd.ref.WakeLocal()
	})
}

func (rd *reader) dropView() {
	rd.bulk = false
	if rd.view != nil {
		rd.view.Release()
		rd.view = nil
	}
}

// readMemory reads a batch from a device in memory.
func (rd *reader) readMemory() (cost int, err error) {
	scratch := rd.ref.Scratch()
	for i := range rd.bufs {
		rd.bufs[i] = scratch[i*frameBytes:][:frameBytes:frameBytes]
	}
	n, err := rd.s.cfg.Device.Read(rd.bufs[:], rd.sizes[:], headroom)
	for i := range n {
		rd.s.receive(rd.bufs[i][:headroom], rd.bufs[i][headroom:][:rd.sizes[i]])
		cost += max(packetCost, rd.sizes[i])
	}
	return cost, err
}

// readWhole reads a packet into the scratch buffer of the loop.
func (rd *reader) readWhole() (cost int, err error) {
	b := rd.ref.Scratch()[:frameBytes]
	n, err := readFD(rd.s.link.fd, b)
	if err != nil {
		return 0, err
	}
	if n <= headroom {
		rd.s.count.drop(DropMalformed)
		return packetCost, nil
	}
	if n > copyLimit {
		rd.bulk, rd.large = true, true
	}
	rd.s.receive(b[:headroom], b[headroom:n])
	return max(packetCost, n), nil
}

// readSplit reads a packet whose payload is probably large.
func (rd *reader) readSplit() (cost int, err error) {
	if rd.view == nil {
		rd.view = buffer.NewViewSize(viewBytes)
	}
	hdr, body := rd.hdr[:headroom+rd.predicted], rd.view.AsSlice()
	n, err := rd.vec.read(rd.s.link.fd, hdr, body)
	if err != nil {
		return 0, err
	}
	return rd.split(hdr, body, n), nil
}

// split receives a packet of which n bytes, vnet header included, were read into hdr and then body.
func (rd *reader) split(hdr, body []byte, n int) (cost int) {
	if n <= headroom {
		rd.s.count.drop(DropMalformed)
		return packetCost
	}
	total := n - headroom
	hdr, body = hdr[headroom:min(n, len(hdr))], body[:max(0, n-len(hdr))]
	if len(body) > copyLimit {
		rd.large = true
		if at := rd.splitAt(hdr, body); at > 0 {
			rd.handOver(hdr, len(body), at)
			return total
		}
	} else {
		rd.bulk = false
	}
	b := rd.ref.Scratch()[:total]
	copy(b[copy(b, hdr):], body)
	rd.s.receive(rd.hdr[:headroom], b)
	return max(packetCost, total)
}

// splitAt returns the length of the headers of a TCP segment without IP options, or 0 for anything else.
func (rd *reader) splitAt(hdr, body []byte) int {
	at := 0
	switch {
	case hdr[0] == 4<<4|ipv4Len/4 && hdr[9] == byte(TCP):
		at = ipv4Len
	case hdr[0]>>4 == 6 && hdr[6] == byte(TCP):
		at = ipv6Len
	default:
		return 0
	}
	var offset byte // the byte with the data offset (RFC 9293, section 3.1)
	if i := at + 12; i < len(hdr) {
		offset = hdr[i]
	} else {
		offset = body[i-len(hdr)]
	}
	n := int(offset>>4) * 4
	if n < tcpLen {
		return 0
	}
	return at + n
}

// handOver receives a packet whose first bytes are in hdr and whose other n bytes are in the view. Its headers end at at: what
// a wrong prediction put on the wrong side is moved.
func (rd *reader) handOver(hdr []byte, n, at int) {
	view := rd.view
	rd.view = nil
	view.CapLength(n)
	if miss := at - len(hdr); miss > 0 {
		have := len(hdr)
		hdr = rd.hdr[headroom:][:at]
		copy(hdr[have:], view.AsSlice()[:miss])
		view.TrimFront(miss)
	}
	rd.predicted = at
	rd.s.receiveSegment(rd.hdr[:headroom], hdr[:at], hdr[at:], view)
}
