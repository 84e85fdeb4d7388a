package hbone

import "time"

// A stream trickles when it has sent many tiny frames and nothing has come back: an application that writes byte by byte, and no
// conversation. Peers take very many tiny frames for an attack and end the whole tunnel. From then on what it writes within a
// millisecond goes in one frame, until that is a large one or it is answered. What is quiet is never delayed.
const (
	tinyFrame    = 1 << 10  // bytes, less than
	tinyFrames   = 64       // in a row
	largeFrame   = 16 << 10 // bytes
	tricklePause = time.Millisecond
)

type trickle struct {
	frames int // in a row, up to tinyFrames
	last   time.Time
	waits  bool // a timer will wake the stream's user
}

// sent counts a frame of n bytes.
func (s *stream) sent(n int) {
	tr := &s.trickle
	switch {
	case n >= largeFrame, n >= tinyFrame && tr.frames < tinyFrames:
		tr.frames = 0
		return
	case tr.frames < tinyFrames:
		tr.frames++
	}
	if tr.frames == tinyFrames {
		tr.last = s.t.ref.Now()
	}
}

// pauses reports that the next frame is not due yet. The stream's user is woken when it is.
func (s *stream) pauses() bool {
	tr := &s.trickle
	if tr.frames < tinyFrames || tr.waits {
		return tr.waits
	}
	left := tricklePause - s.t.ref.Now().Sub(tr.last)
	if left <= 0 {
		return false
	}
	tr.waits = true
	s.t.ref.After(left, func() {
		tr.waits = false
		s.wake()
	})
	return true
}
