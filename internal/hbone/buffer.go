package hbone

import "sync"

// bufferSize is that of the buffers that a turn uses: the plain text of what arrived, and of what is to be sent.
const bufferSize = 256 << 10

// buffers lends large buffers for the length of a turn, or for as long as a socket takes no more. Nothing is held by what is
// idle. A nil *buffers uses the heap.
type buffers struct{ pool sync.Pool }

// get returns an empty slice with room for at least some bytes, of *buffers: for bufferSize.
func (b *buffers) get() []byte {
	if b == nil {
		return make([]byte, 0, 4<<10)
	}
	if p, _ := b.pool.Get().(*[bufferSize]byte); p != nil {
		return p[:0]
	}
	return new([bufferSize]byte)[:0]
}

// put takes a slice of get back, if it is still the one that was lent, and returns what its user may go on with.
func (b *buffers) put(p []byte) []byte {
	if b == nil {
		return p[:0]
	}
	if cap(p) == bufferSize {
		b.pool.Put((*[bufferSize]byte)(p[:bufferSize]))
	}
	return nil
}
