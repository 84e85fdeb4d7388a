package replay

import "slices"

// Sequence numbers are counted from the first byte of data, as 64 bits, so that a stream may be longer than their 32.

// relative is the number of seq in a stream whose first byte of data has the number first, as near to reference as can be.
func relative(seq, first uint32, reference int64) int64 {
	return reference + int64(int32(seq-first-uint32(reference)))
}

// An assembler puts the segments of one direction in order. Where two have the same bytes, the first that is delivered counts.
type assembler struct {
	next    int64 // all before was delivered
	pieces  []piece
	held    int   // bytes of pieces
	memory  int   // what they take
	lost    int64 // bytes that were not in the capture, for which zeros stand
	fin     int64 // number of the FIN, or noFIN
	discard bool  // only what is there counts, not the bytes
}

type piece struct {
	from int64
	n    int
	data []byte // of a discarding assembler nil
}

const (
	noFIN     = -1
	maxHeld   = 1 << 20 // bytes, and
	maxPieces = 256     // pieces that wait for one before them

	pieceBytes = 64 // of memory for a piece, beside its data: 48, and room in the list

	maxLoss = 1 << 20 // bytes of one hole that are made up
)

// add takes the n bytes at from, of which data are the first that are known, and gives deliver what is in order now: bytes and, as nil
// and a count, zeros.
func (a *assembler) add(from int64, data []byte, n int, deliver func(data []byte, zeros int)) {
	if n > 0 && from+int64(n) > a.next {
		switch {
		case from <= a.next:
			a.take(from, data, n, deliver)
		case a.held+n <= maxHeld && len(a.pieces) < maxPieces:
			at, _ := slices.BinarySearchFunc(a.pieces, from+1, func(p piece, t int64) int { return int(p.from - t) })
			p := piece{from: from, n: n}
			if !a.discard {
				p.data = slices.Clone(data)
			}
			a.pieces = slices.Insert(a.pieces, at, p)
			a.held += n
			a.memory += pieceBytes + len(p.data)
		}
	}
	for len(a.pieces) > 0 && a.pieces[0].from <= a.next {
		p := a.pieces[0]
		a.pieces = slices.Delete(a.pieces, 0, 1)
		a.held -= p.n
		a.memory -= pieceBytes + len(p.data)
		a.take(p.from, p.data, p.n, deliver)
	}
}

func (a *assembler) take(from int64, data []byte, n int, deliver func(data []byte, zeros int)) {
	skip := int(a.next - from)
	if skip >= n {
		return
	}
	if known := data[min(skip, len(data)):]; len(known) > 0 {
		deliver(known, 0)
		skip += len(known)
	}
	if skip < n {
		deliver(nil, n-skip)
	}
	a.next = from + int64(n)
}

// proven is told that the peer has acknowledged everything before to. What of it the capture does not have is made up of zeros, up to
// the next piece that is there; it is called until nothing is missing. It reports the first byte and the number of those.
func (a *assembler) proven(to int64, deliver func(data []byte, zeros int)) (at int64, n int) {
	if a.fin != noFIN {
		to = min(to, a.fin)
	}
	if len(a.pieces) > 0 {
		to = min(to, a.pieces[0].from)
	}
	at = a.next
	if to <= a.next || to-a.next > maxLoss {
		return at, 0
	}
	n = int(to - a.next)
	a.lost += int64(n)
	a.add(at, nil, n, deliver)
	return at, n
}

// ended reports whether everything up to the FIN was delivered.
func (a *assembler) ended() bool { return a.fin != noFIN && a.next >= a.fin }
