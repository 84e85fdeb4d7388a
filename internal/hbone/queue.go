package hbone

// Sizes of the memory that a stream takes for what its application has not: as much as arrived, within these.
const (
	minChunk  = 4 << 10
	keptSlots = 16 // pieces that an empty queue has room for without allocating
)

// A queue is what a stream received and its application has not taken: pieces of the queue's own memory, then pieces lent
// for the turn.
type queue struct {
	pieces [][]byte // the first head are done
	head   int
	own    int // pieces before this index are the queue's own memory
	front  int // bytes that were taken of the piece at head
	mem    int // bytes of its own memory
}

func (q *queue) empty() bool { return q.head == len(q.pieces) }

// size is how many bytes are in it.
func (q *queue) size() (n int) {
	for _, p := range q.pieces[q.head:] {
		n += len(p)
	}
	return n
}

func (q *queue) lend(p []byte) { q.pieces = append(q.pieces, p) }

// read moves bytes to p.
func (q *queue) read(p []byte) int {
	total := 0
	for total < len(p) && !q.empty() {
		n := copy(p[total:], q.pieces[q.head])
		q.drop(n)
		total += n
	}
	return total
}

// peek appends up to limit bytes to bufs without taking them.
func (q *queue) peek(bufs [][]byte, limit int) [][]byte {
	for _, p := range q.pieces[q.head:] {
		if limit <= 0 {
			break
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
		if n < len(p) {
			q.pieces[q.head] = p[n:]
			q.front += n
			return
		}
		n -= len(p)
		if q.head < q.own {
			q.mem -= q.front + cap(p)
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
		q.front = 0 // of a piece that was lent
	}
	lent := 0
	for _, p := range live[own:] {
		lent += len(p)
	}
	n := own
	for _, p := range live[own:] {
		for len(p) > 0 {
			if n == 0 || len(live[n-1]) == cap(live[n-1]) {
				// One chunk takes all the rest, so that live[n] is a piece that was read already.
				live[n] = make([]byte, 0, max(lent, minChunk))
				q.mem += cap(live[n])
				n++
			}
			last := &live[n-1]
			k := min(len(p), cap(*last)-len(*last))
			*last = append(*last, p[:k]...)
			p = p[k:]
			lent -= k
		}
	}
	all := q.pieces
	q.pieces = append(all[:0], live[:n]...)
	clear(all[n:])
	q.head, q.own = 0, n
}
