package hbone

import (
	"maps"
	"slices"

	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
)

// SetLevel tells how short of memory the process is. Unless it is calm, the windows of streams are 64 KiB, those of open ones as
// soon as the peer has heard of it, and connection credit is given by Holds. When memory is full, no stream is given credit
// for more than that even if the peer has not.
func (e *Engine) SetLevel(level loop.Level) {
	if level == e.level || e.err != nil {
		return
	}
	if e.level == loop.Calm {
		e.forgiven, e.calmCredit = -1, e.credit
	}
	e.level = level
	e.recvWanted = e.wantedWindow()
	e.offerWindow()
	e.creditStreams()
	if level == loop.Calm {
		e.creditConnection(0)
	}
}

// Holds tells that the application has not taken n bytes of StreamData, of all streams together. At levels other than Calm the
// peer gets connection credit for the others only. What was held when the calm ended had been credited: if it counted, slow readers
// would stop all streams until they have taken it.
func (e *Engine) Holds(n int) {
	if e.level == loop.Calm || e.err != nil {
		return
	}
	held := int64(n)
	if e.forgiven < 0 {
		e.forgiven = max(0, held-(e.credit-e.calmCredit))
	}
	e.forgiven = min(e.forgiven, held)
	e.creditConnection(held - e.forgiven)
}

// wantedWindow is the window that streams are to have at the present level.
func (e *Engine) wantedWindow() int64 {
	w := int64(e.cfg.Settings.StreamWindow)
	if e.level != loop.Calm {
		w = min(w, loop.TightBytes)
	}
	return w
}

// offerWindow tells the peer of a new window. Only one offer is under way at a time: a peer that does not answer gets no more.
func (e *Engine) offerWindow() {
	if e.offering || e.recvWanted == e.recvAcked {
		return
	}
	e.offering = true
	e.recvOffered = e.recvWanted
	must(e.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(e.recvOffered)}))
	e.allowWindow()
}

// windowAcked is the peer's acknowledgement of our SETTINGS.
func (e *Engine) windowAcked() {
	e.offering = false
	e.recvAcked = e.recvOffered
	e.allowWindow()
	e.creditStreams()
	e.offerWindow()
}

// allowWindow makes recvInit what the peer may count on. A larger window is one as soon as it is told, a smaller one only when
// it was acknowledged (RFC 9113, section 6.9.2).
func (e *Engine) allowWindow() {
	more := max(e.recvAcked, e.recvOffered) - e.recvInit
	if more == 0 {
		return
	}
	e.recvInit += more
	for _, s := range e.streams {
		s.recv += more
	}
}

func (e *Engine) creditStreams() {
	for _, id := range slices.Sorted(maps.Keys(e.streams)) { // an order that replays
		e.creditStream(e.streams[id])
	}
}

// creditStream gives the peer credit for what the application took, if it is worth a frame and lets the peer send anything.
func (e *Engine) creditStream(s *engineStream) {
	n := s.credit
	if e.level == loop.Full {
		n = min(n, e.recvWanted-s.recv)
	}
	if n <= 0 || n < e.recvWanted/4 || s.recv+n <= 0 || s.gotEnd {
		return
	}
	s.recv += n
	s.credit -= n
	must(e.framer.WriteWindowUpdate(s.id, uint32(n)))
}

// creditConnection gives the peer credit for all that arrived but held bytes, if that is a quarter of the window, or else as
// much as it has left.
func (e *Engine) creditConnection(held int64) {
	n := e.credit - held
	if n <= 0 || n < min(int64(e.cfg.Settings.ConnectionWindow/4), max(e.recv, minCredit)) {
		return
	}
	e.recv += n
	e.credit -= n
	must(e.framer.WriteWindowUpdate(0, uint32(n)))
}
