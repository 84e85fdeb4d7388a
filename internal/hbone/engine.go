package hbone

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"ztun.dev/ztun/internal/loop"
)

// Events receives what an Engine found in the bytes that it was fed. The methods are called from within Feed and Tick, but
// for StreamWritable, which also Sent calls. They may call the methods of the Engine, with the exceptions of Feed, Tick and
// Sent; StreamWritable may call none.
type Events interface {
	// StreamRequest is a peer's CONNECT; the answer is Engine.Respond or Engine.Reset, and Engine.SetupDone once nothing
	// of the request's set-up is left.
	StreamRequest(id uint32, authority string, h Headers)

	// RequestRefused is a peer's request that is no CONNECT, or names no authority. It was answered with 400.
	RequestRefused(err error)

	// StreamResponse is the answer to an Engine.Open.
	StreamResponse(id uint32, status int, h Headers)

	// StreamData is application data in order; p is valid during the call only. What the application took of it is
	// reported by Engine.Took.
	StreamData(id uint32, p []byte)

	// StreamEnd is the peer's END_STREAM: no StreamData follows.
	StreamEnd(id uint32)

	// StreamReset ends a stream: by the peer's RST_STREAM, or because of an error that the Engine answered with one.
	// refused tells that the peer certainly did not process the request (RFC 9113, section 8.7).
	StreamReset(id uint32, code http2.ErrCode, refused bool)

	// StreamFault tells that a stream was reset, or never came to be, because of an error of the peer's. It has no part in the life
	// of streams.
	StreamFault(code http2.ErrCode)

	// StreamWritable tells that a Write or Reserve which returned ErrAgain may be tried again.
	StreamWritable(id uint32)

	// PeerSettings tells how many streams the peer lets us open at once.
	PeerSettings(maxStreams uint32)

	// PeerGoAway tells that the peer takes no new streams.
	PeerGoAway(code http2.ErrCode)
}

// An EngineConfig configures an Engine.
type EngineConfig struct {
	Server      bool
	Settings    Settings
	PingAfter   time.Duration // silence after which the peer is asked whether it lives: 10 s
	PingTimeout time.Duration // time that it has to answer: 20 s

	buffers *buffers   // where the output buffer comes from while it is in use; nil: the heap
	level   loop.Level // as of SetLevel, from the beginning
}

// Limits of the Engine that are no settings.
const (
	outputSoft  = 240 << 10 // bytes of output that bulk writes fill: sealed, they fit in the scratch of a loop
	outputHard  = 252 << 10 // bytes of output that the first small write of a stream may still use
	smallWrite  = 4 << 10   // bytes of such a write
	maxAcks     = 64 << 10  // bytes of acknowledgements and resets that the peer may leave unread
	floodBurst  = 1000      // frames that cost us and bring nothing, at once …
	floodPerSec = 100       // … and each second from then on
	maxBlock    = 16        // frames of one header block
	maxControl  = 16 << 10  // bytes of a control frame other than HEADERS, CONTINUATION and SETTINGS
	maxSettings = 100 * 6   // bytes of SETTINGS: each of them may concern all streams
	minCredit   = 16 << 10  // bytes of connection credit that are worth a frame, however little the peer has left
	headerLen   = 9         // RFC 9113, section 4.1
	maxWindow   = math.MaxInt32
	initWindow  = 65535 // RFC 9113, section 6.9.2
	minFrame    = 16384 // RFC 9113, section 4.2
	tableSize   = 4096  // bytes of either HPACK table, the protocol's default
)

// Errors of Engine.Open.
var (
	errGoingAway   = errors.New("hbone: the connection takes no new streams")
	errStreamLimit = errors.New("hbone: the peer's stream limit is reached")
)

// errEnded is returned for a write after CloseWrite.
var errEnded = errors.New("hbone: write after the end of the stream")

// A ConnError ends a whole connection. The Engine has put a GOAWAY with its code into the output.
type ConnError struct {
	Code   http2.ErrCode
	Reason string
}

func (e *ConnError) Error() string { return fmt.Sprintf("hbone: %s: %v", e.Reason, e.Code) }

// An Engine is one end of an HTTP/2 connection that carries CONNECT streams (RFC 9113, section 8.5) and nothing else. It
// does no I/O and has no clock: bytes that arrived go into Feed, bytes to send come out of Output, and whoever drives it
// calls Tick at Deadline. It is not safe for concurrent use.
//
// Connection credit is given as bytes arrive, stream credit as the application takes them: a slow reader makes its own
// sender wait, and nobody else. Where memory is short (SetLevel) that changes.
type Engine struct {
	cfg EngineConfig
	ev  Events
	err error // set once the connection is over

	// Receiving.
	state       feedState
	head        [headerLen]byte // frame header, as far as it arrived
	nhead       int
	fh          http2.FrameHeader
	left        int    // bytes of the frame's payload, padding aside, that are still to come
	pad         int    // bytes of padding to come
	sink        bool   // the payload is nobody's
	block       uint32 // stream whose header block is incomplete, or 0
	blockFrames int
	buf         []byte // control frames that are not whole yet
	in          memReader
	framer      *http2.Framer
	gotSettings bool
	level       loop.Level
	recv        int64 // connection window left to the peer
	credit      int64 // bytes that arrived and were not credited to the connection window yet
	forgiven    int64 // bytes held since calm times, credited then; -1: the next Holds tells
	calmCredit  int64 // credit when the calm ended
	recvInit    int64 // window of a new stream that the peer may count on: the larger of the next two
	recvAcked   int64 // of these, what it has acknowledged
	recvOffered int64 // what it has been told
	recvWanted  int64 // what it should be
	offering    bool  // SETTINGS are under way that it has not acknowledged
	lastPeer    uint32
	resets      [64]uint32 // streams that we reset lately: what is still under way for them is ignored
	nresets     int
	flood       int
	floodAt     time.Time

	// Sending.
	out          []byte
	side         []byte // control frames while a part of out is reserved
	reserved     *engineStream
	reservedLen  int
	reservedLess bool // than was asked for
	acks         int
	batch        uint32 // counts Sent
	henc         *hpack.Encoder
	hbuf         bytes.Buffer
	send         int64 // connection window left to us
	sendMost     int64 // the most that it was: what it is when all is credited
	sendInit     int64
	creditStep   int64 // the largest connection credit, up to all that there is; 0: none yet
	holders      int   // streams that wait for credit
	frameSize    int
	maxStreams   uint32 // that the peer lets us open
	nextID       uint32
	waiting      []*engineStream // in the order in which they found no room
	spare        []*engineStream

	streams map[uint32]*engineStream
	orphans int // streams that ended before their set-up did

	goneAway  bool // peer's GOAWAY
	draining  bool // ours, first or only
	finalSent bool // ours, with its final stream id
	finalID   uint32
	now       time.Time
	heard     time.Time
	pinged    time.Time // when the ping that is not answered was sent; zero: none
}

type engineStream struct {
	id       uint32
	send     int64 // window left to us
	recv     int64 // window left to the peer
	credit   int64 // bytes taken and not credited yet
	batch    uint32
	answered bool // response sent or received
	setup    bool // the set-up of a request has not returned
	sentEnd  bool
	gotEnd   bool
	waiting  bool
	holds    bool // has so many bytes that were not credited
	greedy   bool // had more to send than it could
	gone     bool
}

type memReader struct{ b []byte }

func (r *memReader) Read(p []byte) (int, error) {
	n := copy(p, r.b)
	r.b = r.b[n:]
	if n == 0 && len(p) > 0 {
		return 0, errShort
	}
	return n, nil
}

var errShort = errors.New("hbone: frame is short")

// controlWriter is where the Framer writes.
type controlWriter struct{ e *Engine }

func (w controlWriter) Write(p []byte) (int, error) {
	w.e.control(p)
	return len(p), nil
}

func (s Settings) withDefaults(server bool) Settings {
	s.StreamWindow = min(cmp.Or(s.StreamWindow, 4<<20), maxWindow)
	s.ConnectionWindow = min(max(cmp.Or(s.ConnectionWindow, 16<<20), initWindow), maxWindow)
	s.FrameSize = min(max(cmp.Or(s.FrameSize, 1<<20), minFrame), 1<<24-1)
	if server {
		s.HeaderList = cmp.Or(s.HeaderList, 64<<10)
		s.MaxStreams = cmp.Or(s.MaxStreams, 200)
	} else {
		s.HeaderList = cmp.Or(s.HeaderList, 16<<10)
	}
	return s
}

// NewEngine returns an Engine whose output starts with its preface and SETTINGS.
func NewEngine(cfg EngineConfig, ev Events, now time.Time) *Engine {
	cfg.Settings = cfg.Settings.withDefaults(cfg.Server)
	cfg.PingAfter = cmp.Or(cfg.PingAfter, 10*time.Second)
	cfg.PingTimeout = cmp.Or(cfg.PingTimeout, 20*time.Second)
	set := cfg.Settings
	e := &Engine{
		cfg:        cfg,
		ev:         ev,
		recv:       int64(set.ConnectionWindow),
		recvAcked:  initWindow,
		send:       initWindow,
		sendMost:   initWindow,
		sendInit:   initWindow,
		frameSize:  minFrame,
		maxStreams: math.MaxUint32,
		nextID:     1,
		streams:    make(map[uint32]*engineStream),
		now:        now,
		heard:      now,
		flood:      floodBurst,
		floodAt:    now,
	}
	e.level = cfg.level
	e.recvWanted = e.wantedWindow()
	e.recvOffered, e.offering = e.recvWanted, true
	e.recvInit = max(e.recvAcked, e.recvOffered)
	e.henc = hpack.NewEncoder(&e.hbuf)
	e.framer = http2.NewFramer(controlWriter{e}, &e.in)
	e.framer.ReadMetaHeaders = hpack.NewDecoder(tableSize, nil)
	e.framer.MaxHeaderListSize = set.HeaderList
	e.framer.SetMaxReadFrameSize(set.FrameSize)

	s := []http2.Setting{
		{ID: http2.SettingInitialWindowSize, Val: uint32(e.recvOffered)},
		{ID: http2.SettingMaxFrameSize, Val: set.FrameSize},
		{ID: http2.SettingMaxHeaderListSize, Val: set.HeaderList},
	}
	if cfg.Server {
		e.state = feedPreface
		e.left = len(http2.ClientPreface)
		s = append(s, http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: set.MaxStreams})
	} else {
		e.control([]byte(http2.ClientPreface))
		s = append(s, http2.Setting{ID: http2.SettingEnablePush, Val: 0})
	}
	must(e.framer.WriteSettings(s...))
	if more := set.ConnectionWindow - initWindow; more > 0 {
		must(e.framer.WriteWindowUpdate(0, more))
	}
	return e
}

// must is for the Framer's writes, which fail only when they are given something that is not a frame.
func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("hbone: writing a frame: %v", err))
	}
}

// Output is what is to be sent. It is valid until the next call of a method.
func (e *Engine) Output() []byte { return e.out }

// Sent tells that the Output was sent, or copied: all of it.
func (e *Engine) Sent() {
	e.out = e.cfg.buffers.put(e.out)
	e.acks = 0
	e.batch++
	e.wakeWaiting()
}

// Open sends a CONNECT. The stream is open for writing at once; it is of no use to the application before StreamResponse.
func (e *Engine) Open(authority string, h Headers) (id uint32, err error) {
	switch {
	case e.err != nil:
		return 0, e.err
	case e.goneAway || e.draining || e.nextID > maxWindow:
		return 0, errGoingAway
	case uint64(len(e.streams)) >= uint64(e.maxStreams):
		return 0, errStreamLimit
	}
	s := e.newStream(e.nextID)
	e.nextID += 2
	e.writeRequest(s.id, authority, h)
	return s.id, nil
}

// Respond answers a StreamRequest. end also ends our side of the stream.
func (e *Engine) Respond(id uint32, status int, h Headers, end bool) error {
	s := e.streams[id]
	if s == nil || s.answered || s.sentEnd {
		return loop.ErrReset
	}
	s.answered = true
	e.writeResponse(id, status, h, end)
	if end {
		s.sentEnd = true
		e.closeIfDone(s)
	}
	return nil
}

// SetupDone tells that nothing works any more on answering a StreamRequest. Until then the stream counts against the limit
// that the peer was given, even if it ended: otherwise a peer that opens and resets streams would have more than that many
// set up at once.
func (e *Engine) SetupDone(id uint32) {
	if s := e.streams[id]; s != nil {
		s.setup = false
	} else if e.orphans > 0 {
		e.orphans--
	}
}

// CloseWrite sends END_STREAM after everything that was written.
func (e *Engine) CloseWrite(id uint32) error {
	s := e.streams[id]
	if s == nil {
		return loop.ErrReset
	}
	if !s.sentEnd {
		s.sentEnd = true
		e.control(appendHeader(nil, 0, http2.FrameData, http2.FlagDataEndStream, id))
		e.closeIfDone(s)
	}
	return nil
}

// Reset sends RST_STREAM, if the stream has not ended. Data that is in the Output is sent before it.
func (e *Engine) Reset(id uint32, code http2.ErrCode) {
	s := e.streams[id]
	if s == nil {
		return
	}
	e.remove(s)
	e.writeReset(id, code)
}

// Took tells that the application took n bytes of StreamData: the peer may send as many more.
func (e *Engine) Took(id uint32, n int) {
	s := e.streams[id]
	if s == nil || s.gotEnd {
		return
	}
	s.credit += int64(n)
	e.creditStream(s)
}

// Drain stops new streams: a server announces it, gives requests under way a round trip to arrive, and then tells which was
// the last one it took (RFC 9113, section 6.8).
func (e *Engine) Drain() {
	if e.draining || e.err != nil {
		return
	}
	e.draining = true
	if !e.cfg.Server {
		e.finalGoAway()
		return
	}
	must(e.framer.WriteGoAway(maxWindow, http2.ErrCodeNo, nil))
	must(e.framer.WritePing(false, drainPing))
}

func (e *Engine) finalGoAway() {
	e.finalSent = true
	e.finalID = e.lastPeer
	must(e.framer.WriteGoAway(e.lastPeer, http2.ErrCodeNo, nil))
}

// Drained reports that a drain is complete: no stream is left and none can come. The connection may be closed once the
// Output was sent.
func (e *Engine) Drained() bool { return e.finalSent && len(e.streams) == 0 && e.orphans == 0 }

// Close ends the connection with a GOAWAY of this code; nothing is accepted any more. Closing without an error is to be
// preceded by Drain where streams may still come.
func (e *Engine) Close(code http2.ErrCode) {
	if e.err == nil {
		_ = e.fail(&ConnError{code, "the connection was closed"})
	}
}

// Streams is how many streams are open.
func (e *Engine) Streams() int { return len(e.streams) }

// Settled reports whether the peer's SETTINGS have arrived: it speaks HTTP/2.
func (e *Engine) Settled() bool { return e.gotSettings }

var (
	keepalivePing = [8]byte{'z', 't', 'u', 'n', 'l', 'i', 'v', 'e'}
	drainPing     = [8]byte{'z', 't', 'u', 'n', 'l', 'a', 's', 't'}
)

// Deadline is when Tick is due.
func (e *Engine) Deadline() time.Time {
	if e.pinged.IsZero() {
		return e.heard.Add(e.cfg.PingAfter)
	}
	return e.pinged.Add(e.cfg.PingTimeout)
}

// Tick sends a PING when nothing was heard for a while, and ends the connection when that brought no sign of life. A peer
// that sends anything is not asked.
func (e *Engine) Tick(now time.Time) error {
	e.now = now
	if e.err != nil || now.Before(e.Deadline()) {
		return e.err
	}
	if e.pinged.IsZero() {
		e.pinged = now
		must(e.framer.WritePing(false, keepalivePing))
		return nil
	}
	return e.fail(&ConnError{http2.ErrCodeNo, "the peer did not answer a ping"})
}

// Probe asks the peer whether it lives, if nothing was heard of it for silence. Without an answer the connection ends as by Tick.
func (e *Engine) Probe(now time.Time, silence time.Duration) bool {
	if e.err != nil || now.Sub(e.heard) < silence {
		return false
	}
	if e.pinged.IsZero() {
		e.pinged = now
		must(e.framer.WritePing(false, keepalivePing))
	}
	return true
}

// Silent reports that nothing was heard of the peer since a Probe at that time.
func (e *Engine) Silent(since time.Time) bool { return !e.pinged.IsZero() && !e.pinged.After(since) }

func (e *Engine) newStream(id uint32) *engineStream {
	s := &engineStream{id: id, send: e.sendInit, recv: e.recvInit, batch: e.batch - 1}
	e.streams[id] = s
	return s
}

func (e *Engine) closeIfDone(s *engineStream) {
	if s.sentEnd && s.gotEnd {
		e.remove(s)
	}
}

func (e *Engine) remove(s *engineStream) {
	s.gone = true
	e.countHolder(s)
	delete(e.streams, s.id)
	if s.setup {
		e.orphans++
	}
}

// known reports whether the stream was opened at some time.
func (e *Engine) known(id uint32) bool {
	switch {
	case id%2 == 0:
		return false // a server opens none: there is no push
	case e.cfg.Server:
		return id <= e.lastPeer
	}
	return id < e.nextID
}

// fail ends the connection.
func (e *Engine) fail(err *ConnError) error {
	if e.err == nil {
		e.err = err
		e.buf = nil
		must(e.framer.WriteGoAway(e.lastPeer, err.Code, []byte(err.Reason)))
	}
	return e.err
}

// resetStream is for errors of the peer that concern one stream.
func (e *Engine) resetStream(s *engineStream, code http2.ErrCode) {
	e.remove(s)
	e.writeReset(s.id, code)
	e.ev.StreamFault(code)
	e.ev.StreamReset(s.id, code, false)
}

func (e *Engine) writeReset(id uint32, code http2.ErrCode) {
	e.resets[e.nresets%len(e.resets)] = id
	e.nresets++
	must(e.framer.WriteRSTStream(id, code))
}

func (e *Engine) resetLately(id uint32) bool { return slices.Contains(e.resets[:], id) }
