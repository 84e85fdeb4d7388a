package hbone

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
)

// A gate is a Conn that nothing is read from while it is shut.
type gate struct {
	loop.Conn
	shut bool
	ref  *loop.Ref
}

func (g *gate) Attach(r *loop.Ref) error {
	g.ref = r
	return g.Conn.Attach(r)
}

func (g *gate) TryRead(p []byte) (int, error) {
	if g.shut {
		return 0, loop.ErrAgain
	}
	return g.Conn.TryRead(p)
}

// answering is a handler that sends n bytes and END_STREAM at once, and then waits for the peer's.
func answering(n int) handlerFunc {
	return func(_ context.Context, r *Request) {
		_ = r.Accept(Headers{}, func(s Stream) { (&exchange{s: s, left: pattern(n)}).start() })
	}
}

// TestTunnelEndsBeforeReader: what was received in full is the application's, however late it comes for it and whatever
// became of the tunnel.
func TestTunnelEndsBeforeReader(t *testing.T) {
	const size = 2 << 20
	for _, how := range []string{"drained", "reset"} {
		t.Run(how, func(t *testing.T) {
			ms := newMesh(t, meshConfig{handler: answering(size)})
			s := ms.mustOpen()
			s.Ref().Post(func() { _ = s.CloseWrite() })
			ms.m.Settle()
			if how == "drained" {
				ms.server.Drain()
			} else {
				for tn := range ms.server.tunnels {
					tn.ref.Post(func() { _ = tn.link.conn.Reset(); tn.cut() })
				}
			}
			ms.m.Settle()
			if n := ms.server.Tunnels(); n != 0 {
				t.Fatalf("the server has %d tunnels, want none", n)
			}
			x := startExchange(s, nil)
			ms.m.Settle()
			if x.err != io.EOF || !bytes.Equal(x.got, pattern(size)) {
				t.Errorf("%d bytes, then %v; want the %d that were received, and the end", len(x.got), x.err, size)
			}
			if st := ms.pool.Stats(); st != (PoolStats{}) {
				t.Errorf("left: %+v", st)
			}
		})
	}
}

// TestTunnelEndAndFINInOneRead: the end of a stream and that of the connection arrive together, with all the data.
func TestTunnelEndAndFINInOneRead(t *testing.T) {
	const size = 100 << 10
	ms := newMesh(t, meshConfig{handler: answering(size)})
	var gates []*gate
	ms.wrap = func(c loop.Conn) loop.Conn {
		g := &gate{Conn: c}
		gates = append(gates, g)
		return g
	}
	s := ms.mustOpen()
	first := ms.mustOpen() // ends without END_STREAM of ours: what the peer sent is whole all the same
	gates[0].shut = true
	s.Ref().Post(func() { _ = s.CloseWrite() })
	ms.m.Settle()
	for tn := range ms.server.tunnels {
		tn.ref.Post(func() { tn.die(errTunnelClosed) })
	}
	ms.m.Advance(2 * time.Second)
	gates[0].shut = false
	gates[0].ref.Wake()
	xs := []*exchange{startExchange(s, nil), startExchange(first, nil)}
	ms.m.Settle()
	for i, x := range xs {
		if x.err != io.EOF || !bytes.Equal(x.got, pattern(size)) {
			t.Errorf("stream %d: %d bytes, then %v; want %d and the end", i, len(x.got), x.err, size)
		}
	}
}

// TestPoolCloseCutsReaders: at the end of Close nothing lingers, not even for an application that does not come.
func TestPoolCloseCutsReaders(t *testing.T) {
	ms := newMesh(t, meshConfig{handler: answering(1 << 20)})
	s := ms.mustOpen()
	var got error
	s.Ref().Post(func() {
		_ = s.CloseWrite()
		s.Ref().Child(func(r *loop.Ref) loop.Task {
			_ = s.Attach(r)
			return turnFunc(func(int) bool {
				if s.Ref().Removed() {
					_, got = s.TryRead(make([]byte, 1))
				}
				return false
			})
		})
	})
	ms.m.Settle()
	ms.server.Drain()
	ms.m.Settle()
	if st := ms.pool.Stats(); st.Tunnels != 1 {
		t.Fatalf("%+v, want the tunnel that holds the stream", st)
	}
	ms.do(func(ctx context.Context) {
		ctx, cancel := ms.m.Group().WithTimeout(ctx, time.Second)
		defer cancel()
		_ = ms.pool.Close(ctx)
	})
	if st := ms.pool.Stats(); st != (PoolStats{}) || !errors.Is(got, loop.ErrReset) {
		t.Errorf("left: %+v; the reader saw %v, want a reset", st, got)
	}
}

// A crossing Conn meets bytes of the peer's that were under way when it is closed: WINDOW_UPDATEs, as a rule.
type crossing struct {
	loop.Conn
	peer loop.Conn
}

func (c *crossing) CloseWrite() error {
	_, _ = c.peer.TryWrite(make([]byte, 64))
	return c.Conn.CloseWrite()
}

func (c *crossing) Close() error {
	_, _ = c.peer.TryWrite(make([]byte, 64))
	return c.Conn.Close()
}

// TestTunnelCloseDelivers: a tunnel that is closed in order does not cut what it sent last, although the peer is still sending.
func TestTunnelCloseDelivers(t *testing.T) {
	const size = 100 << 10
	ms := newMesh(t, meshConfig{handler: func(_ context.Context, r *Request) {
		_ = r.Accept(Headers{}, func(s Stream) {
			s.Ref().Child(func(r *loop.Ref) loop.Task {
				_ = s.Attach(r)
				return turnFunc(func(int) bool {
					if _, err := s.TryRead(make([]byte, 1)); !errors.Is(err, io.EOF) {
						return err == nil
					}
					_, _ = s.TryWrite(pattern(size)) // the last bytes, in the last turn
					_ = s.Close()
					r.Remove()
					return false
				})
			})
		})
	}})
	var ends []loop.Conn
	ms.wrap = func(c loop.Conn) loop.Conn {
		if ends = append(ends, c); len(ends) == 2 {
			return &crossing{Conn: c, peer: ends[0]}
		}
		return c
	}
	s := ms.mustOpen()
	for tn := range ms.server.tunnels {
		tn.ref.Post(func() { tn.eng.Drain(); tn.eng.finalGoAway() }) // closes in the turn in which the stream ends
	}
	x := startExchange(s, []byte("x"))
	ms.m.Settle()
	if x.err != io.EOF || !bytes.Equal(x.got, pattern(size)) {
		t.Errorf("%d bytes, then %v; want %d and the end", len(x.got), x.err, size)
	}
	if n := ms.server.Tunnels(); n != 0 {
		t.Errorf("the server has %d tunnels, want none", n)
	}
}

// TestTunnelLinger: a peer that never closes its side holds a closed tunnel for a second, and not more.
func TestTunnelLinger(t *testing.T) {
	ms := newMesh(t, meshConfig{})
	var gates []*gate
	ms.wrap = func(c loop.Conn) loop.Conn {
		g := &gate{Conn: c}
		gates = append(gates, g)
		return g
	}
	s := ms.mustOpen()
	s.Ref().Post(func() { _ = s.Close() })
	ms.m.Settle()
	gates[0].shut = true
	for tn := range ms.server.tunnels {
		tn.ref.Post(func() { tn.die(errTunnelClosed) })
	}
	ms.m.Advance(lingerTime - time.Millisecond)
	if n := ms.server.Tunnels(); n != 1 {
		t.Errorf("%d tunnels within the time to linger, want 1", n)
	}
	ms.m.Advance(time.Millisecond)
	if n := ms.server.Tunnels(); n != 0 {
		t.Errorf("%d tunnels after it, want none", n)
	}
	gates[0].shut = false
	gates[0].ref.Wake()
	ms.m.Settle()
}

// TestStreamResetRead: what a reader gets of a stream that was reset. After END_STREAM nothing is missing, and the reset only
// refuses what we would send: bytes, not the absence of them.
func TestStreamResetRead(t *testing.T) {
	for _, tt := range []struct {
		name string
		code http2.ErrCode
		end  bool
		want string
		err  error
	}{
		{"RST_STREAM(CANCEL)", http2.ErrCodeCancel, false, "", loop.ErrReset},
		{"RST_STREAM(NO_ERROR)", http2.ErrCodeNo, false, "part", loop.ErrReset},
		{"RST_STREAM(CANCEL) after END_STREAM", http2.ErrCodeCancel, true, "part", io.EOF},
		{"RST_STREAM(NO_ERROR) after END_STREAM", http2.ErrCodeNo, true, "part", io.EOF},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ms := newMesh(t, meshConfig{handler: func(_ context.Context, r *Request) {
				_ = r.Accept(Headers{}, func(s Stream) {
					_, _ = s.TryWrite([]byte("part"))
					if tt.end {
						_ = s.CloseWrite()
					}
					st := s.(*stream)
					st.t.eng.Reset(st.id, tt.code)
					st.release()
					st.t.kick()
				})
			}})
			s := ms.mustOpen()
			x := &exchange{s: s}
			s.Ref().Post(func() {
				if _, err := s.TryWrite([]byte("unwanted")); !errors.Is(err, loop.ErrReset) {
					t.Errorf("TryWrite = %v, want ErrReset", err)
				}
				if tt.end {
					silent, app := loop.Pipe()
					from := s.(Receiver)
					if n, err := from.TryReadFrom(silent, 10); n != 0 || err != loop.ErrAgain {
						t.Errorf("TryReadFrom of a silent source = %d, %v; want ErrAgain", n, err)
					}
					_, _ = app.TryWrite([]byte("x"))
					_ = app.CloseWrite()
					if n, err := from.TryReadFrom(silent, 10); n != 0 || err != loop.ErrReset {
						t.Errorf("TryReadFrom of a source with bytes = %d, %v; want ErrReset", n, err)
					}
					var source *SourceError
					if n, err := from.TryReadFrom(silent, 10); n != 0 || !errors.As(err, &source) || source.Err != io.EOF {
						t.Errorf("TryReadFrom of a source at its end = %d, %v; want its EOF", n, err)
					}
				}
				x.start()
			})
			ms.m.Settle()
			if string(x.got) != tt.want || x.err != tt.err {
				t.Errorf("read %q, then %v; want %q, then %v", x.got, x.err, tt.want, tt.err)
			}
		})
	}
}

// TestStreamBroken: a stream tells whether its reset was meant.
func TestStreamBroken(t *testing.T) {
	tests := []struct {
		name string
		end  func(ms *mesh, atServer *stream)
		want string // what Broken says; "": nothing
	}{
		{"cancelled", func(_ *mesh, s *stream) { _ = s.Reset() }, ""},
		{"not wanted", func(_ *mesh, s *stream) { s.t.eng.Reset(s.id, http2.ErrCodeNo); s.release(); s.t.kick() }, ""},
		{"an error of the peer", func(_ *mesh, s *stream) { s.t.eng.Reset(s.id, http2.ErrCodeInternal); s.release(); s.t.kick() }, "stream reset: INTERNAL_ERROR"},
		{"lost tunnel", func(ms *mesh, _ *stream) { _ = ms.conns[0].Reset() }, "tunnel lost: loop: connection reset"},
		{"tunnel closed by the peer", func(_ *mesh, s *stream) { s.t.cut() }, "tunnel lost: hbone: the peer closed the tunnel: unexpected EOF"},
		{"tunnel closed by us", func(ms *mesh, _ *stream) {
			for p := range ms.pool.tunnels {
				p.t.cut()
			}
		}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var atServer *stream
			ms := newMesh(t, meshConfig{handler: func(_ context.Context, r *Request) {
				_ = r.Accept(Headers{}, func(s Stream) { atServer = s.(*stream) })
			}})
			s := ms.mustOpen()
			var read, broken error
			s.Ref().Post(func() {
				s.Ref().Child(func(r *loop.Ref) loop.Task {
					_ = s.Attach(r)
					return turnFunc(func(int) bool {
						if _, err := s.TryRead(make([]byte, 1)); err != loop.ErrAgain && read == nil {
							read, broken = err, s.Broken()
							_ = s.Reset()
							r.Remove()
						}
						return false
					})
				})
			})
			ms.m.Settle()
			if read != nil {
				t.Fatalf("reads %v before the end", read)
			}
			s.Ref().Post(func() { tt.end(ms, atServer) })
			ms.m.Advance(time.Minute)
			if !errors.Is(read, loop.ErrReset) {
				t.Fatalf("reads %v, want a reset", read)
			}
			if got := fmt.Sprint(broken); got != tt.want && (broken != nil || tt.want != "") {
				t.Errorf("Broken = %v, want %q", broken, tt.want)
			}
			if err := s.Broken(); err != nil {
				t.Errorf("after Reset Broken is %v", err)
			}
		})
	}
}
