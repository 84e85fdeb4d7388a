package hbone

// How the streams of a tunnel share the connection window of a peer that credits it only as its applications take the bytes
// (nghttp2, so Envoy and Node, h2, so ztunnel): streams whose readers are slow must not use it up, for then no stream goes on. All
// that a sender learns is credit, and that comes in steps of up to half a window, the stream's and the connection's. So
//
//   - a stream is held back while it has more bytes under way than are left to the others, or than three eighths of the connection
//     window, so that beside it half a window fits into seven eighths; but never below half of its own window, since the credit
//     would not come;
//   - all that is bulk together may use half of the connection window, since the credit would not come, and three eighths more, of
//     which the less, the more streams wait for credit;
//   - the rest is for streams that send a little at a time. Half a window of theirs brings the next credit, however slow all
//     others are. It is less for a peer that gives credit in smaller steps.

const (
	holdBytes  = 64 << 10   // bytes that were not credited from which on a stream counts as one that waits for credit
	sparseSend = smallWrite // bytes of one write in the part of the window that bulk may not use
)

// share is how many bytes the stream may send by its part of the connection window.
func (e *Engine) share(s *engineStream) int64 {
	under := min(e.sendInit-s.send, e.sendMost-e.send)
	own := max(min(e.send, e.sendMost*3/8), min(e.sendInit, e.sendMost)/2+1) - under
	all := e.bulkLeft()
	if !s.greedy {
		all = max(all, min(sparseSend, e.send))
	}
	return min(own, all)
}

// bulkLeft is how many bytes of the connection window all bulk may still use.
func (e *Engine) bulkLeft() int64 {
	w := e.sendMost
	rest := w / 2
	if e.creditStep > 0 {
		rest = min(rest, e.creditStep)
	}
	others := max(1, int64(e.holders)-1)
	most := min(w-rest+1+w*3/8/others, w*7/8)
	return most - (w - e.send)
}

// exhausted reports that little of the connection window is left to bulk: less than an eighth of the whole.
func (e *Engine) exhausted() bool { return e.bulkLeft() < e.sendMost/8 }

// countHolder counts the streams that wait for credit, after the window or the life of one has changed.
func (e *Engine) countHolder(s *engineStream) {
	holds := !s.gone && e.sendInit-s.send > holdBytes
	if holds == s.holds {
		return
	}
	if s.holds = holds; holds {
		e.holders++
	} else {
		e.holders--
	}
}
