package hbone

import (
	"encoding/binary"
	"slices"

	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
)

func appendHeader(b []byte, n int, t http2.FrameType, flags http2.Flags, id uint32) []byte {
	b = append(b, byte(n>>16), byte(n>>8), byte(n), byte(t), byte(flags))
	return binary.BigEndian.AppendUint32(b, id)
}

// control appends a frame that no window bounds.
func (e *Engine) control(p []byte) {
	if e.reserved != nil {
		e.side = append(e.side, p...)
		return
	}
	if e.out == nil {
		e.out = e.cfg.buffers.get()
	}
	e.out = append(e.out, p...)
}

// room is how many bytes of data the stream may send now.
func (e *Engine) room(s *engineStream) int {
	out := outputSoft - len(e.out) - headerLen
	if s.batch != e.batch && out < smallWrite {
		// A stream that has not had its share of this batch does not stand behind those that filled it.
		out = min(smallWrite, outputHard-len(e.out)-headerLen)
	}
	return int(max(0, min(int64(out), s.send, e.send, e.share(s), int64(e.frameSize))))
}

// Reserve returns a place for up to limit bytes of a DATA frame in the output buffer itself, so that a source can be read
// into it. Commit has to follow before anything else is written. Its errors are those of Write.
func (e *Engine) Reserve(id uint32, limit int) ([]byte, error) {
	s := e.streams[id]
	switch {
	case s == nil || e.err != nil:
		return nil, loop.ErrReset
	case s.sentEnd:
		return nil, errEnded
	}
	n := min(e.room(s), limit)
	if n <= 0 {
		if !s.waiting {
			s.waiting = true
			e.waiting = append(e.waiting, s)
		}
		return nil, loop.ErrAgain
	}
	if e.out == nil {
		e.out = e.cfg.buffers.get()
	}
	at := len(e.out) + headerLen
	e.out = slices.Grow(e.out, headerLen+n)
	e.reserved = s
	e.reservedLen = n
	e.reservedLess = n < limit
	return e.out[at : at+n : at+n], nil
}

// Commit makes a DATA frame of the first n bytes of what Reserve returned; 0 means none.
func (e *Engine) Commit(n int) {
	s := e.reserved
	e.reserved = nil
	switch {
	case n < e.reservedLen || !e.reservedLess && n < sparseSend:
		s.greedy = false // all that there was
	case e.reservedLess && n >= sparseSend:
		s.greedy = true
	}
	if n > e.reservedLen {
		panic("hbone: more bytes committed than reserved")
	}
	if n > 0 && !s.gone {
		at := len(e.out)
		appendHeader(e.out[at:at:cap(e.out)], n, http2.FrameData, 0, s.id)
		e.out = e.out[:at+headerLen+n]
		s.send -= int64(n)
		e.send -= int64(n)
		e.countHolder(s)
		s.batch = e.batch
	}
	if len(e.side) > 0 {
		e.control(e.side)
		e.side = e.side[:0]
	} else if len(e.out) == 0 {
		e.out = e.cfg.buffers.put(e.out)
	}
}

// Write sends as much of p as the windows and the output buffer have room for. It returns ErrAgain when that is nothing, and
// StreamWritable follows; ErrReset when the stream has ended.
func (e *Engine) Write(id uint32, p []byte) (int, error) {
	total := 0
	for {
		b, err := e.Reserve(id, len(p)-total)
		if err != nil {
			if total > 0 {
				return total, nil
			}
			return 0, err
		}
		n := copy(b, p[total:])
		e.Commit(n)
		if total += n; total == len(p) {
			return total, nil
		}
	}
}

// wakeWaiting tells those that found no room and have some now, in the order in which they came.
func (e *Engine) wakeWaiting() {
	if len(e.waiting) == 0 {
		return
	}
	w := e.waiting
	e.waiting = e.spare[:0]
	for _, s := range w {
		switch {
		case s.gone:
		case e.room(s) > 0:
			s.waiting = false
			e.ev.StreamWritable(s.id)
		default:
			e.waiting = append(e.waiting, s)
		}
	}
	clear(w)
	e.spare = w[:0]
}
