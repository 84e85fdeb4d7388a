package hbone

import "sync"

// Sizes of the memory that a stream takes for what its application has not: as much as arrived, within these.
const (
	minChunk  = 4 << 10
	keptSlots = 16 // pieces that an empty queue has room for without allocating

	// pooledChunk is taken from a pool where half of it is needed at least. A download that is faster than its reader keeps a part of
	// every turn: 60 MB/s of garbage and a fifth of the CPU time without the pool (measured).
	pooledChunk = 64 << 10
)

var chunks = sync.Pool{New: func() any { return new([pooledChunk]byte) }}

func newChunk(n int) []byte {
	if n >= pooledChunk/2 {
		return chunks.Get().(*[pooledChunk]byte)[:0]
	}
	return make([]byte, 0, max(n, minChunk))
}

// freeChunk takes memory of the queue's own back, of which nothing is used any more.
func freeChunk(b []byte) {
	if cap(b) == pooledChunk {
		chunks.Put((*[pooledChunk]byte)(b[:pooledChunk]))
	}
}

// A queue is what a stream received and its application has not taken: pieces of the queue's own memory, then pieces lent
// for the turn.
type queue struct {
	pieces [][]byte // the first head are done
	head   int
	own    int // pieces before this index are the queue's own memory
	front  int // bytes of the piece at head that were taken
	mem    int // bytes of its own memory
}

func (q *queue) empty() bool { return q.head == len(q.pieces) }

// size is how many bytes are in it.
func (q *queue) size() (n int) {
	for _, p := range q.pieces[q.head:] {
		n += len(p)
	}
	return n - q.front
}

func (q *queue) lend(p []byte) { q.pieces = append(q.pieces, p) }

// read moves bytes to p.
func (q *queue) read(p []byte) int {
	total := 0
	for total < len(p) && !q.empty() {
		n := copy(p[total:], q.pieces[q.head][q.front:])
		q.drop(n)
		total += n
	}
	return total
}

// peek appends up to limit bytes to bufs without taking them.
func (q *queue) peek(bufs [][]byte, limit int) [][]byte {
	for i, p := range q.pieces[q.head:] {
		if limit <= 0 {
			break
		}
		if i == 0 {
			p = p[q.front:]
		}
		p = p[:min(len(p), limit)]
		limit -= len(p)
		bufs = append(bufs, p)
	}
	return bufs
}

// drop takes n bytes.
func (q *queue) drop(n int) {
	for n > 0 {
		p := q.pieces[q.head]
		if n < len(p)-q.front {
			q.front += n
			return
		}
		n -= len(p) - q.front
		if q.head < q.own {
			q.mem -= cap(p)
			freeChunk(p)
		}
		q.front = 0
		q.pieces[q.head] = nil
		q.head++
	}
	if q.empty() {
		q.reset()
	}
}

func (q *queue) reset() {
	q.head, q.own, q.mem = 0, 0, 0
	if cap(q.pieces) > keptSlots {
		q.pieces = nil
		return
	}
	q.pieces = q.pieces[:0]
}

// keep copies what is lent.
func (q *queue) keep() {
	if q.empty() {
		return
	}
	live := q.pieces[q.head:]
	own := max(0, q.own-q.head)
	if own == 0 {
		live[0], q.front = live[0][q.front:], 0
	}
	lent := 0
	for _, p := range live[own:] {
		lent += len(p)
	}
	var few [8][]byte
	fresh, last := few[:0], (*[]byte)(nil)
	if own > 0 {
		last = &live[own-1] // there may be room behind it
	}
	for _, p := range live[own:] {
		for len(p) > 0 {
			if last == nil || len(*last) == cap(*last) {
				c := newChunk(lent)
				q.mem += cap(c)
				fresh = append(fresh, c)
				last = &fresh[len(fresh)-1]
			}
			k := min(len(p), cap(*last)-len(*last))
			*last = append(*last, p[:k]...)
			p = p[k:]
			lent -= k
		}
	}
	all := q.pieces
	n := copy(all, live[:own])
	clear(all[n:])
	q.pieces = append(all[:n], fresh...)
	q.head, q.own = 0, len(q.pieces)
}
