//go:build linux

package hbone

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// serveFrames is a peer that answers each CONNECT with 200 and counts DATA frames and bytes, until the stream ends.
func serveFrames(c net.Conn, cfg *tls.Config) (frames, size int, err error) {
	defer func() { _ = c.Close() }()
	tc := tls.Server(c, cfg)
	r := bufio.NewReaderSize(tc, 256<<10)
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(r, preface); err != nil {
		return 0, 0, err
	}
	w := bufio.NewWriter(tc)
	fr := http2.NewFramer(w, r)
	fr.SetMaxReadFrameSize(1<<24 - 1)
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := errors.Join(fr.WriteSettings(), w.Flush()); err != nil {
		return 0, 0, err
	}
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			return frames, size, err
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = fr.WriteSettingsAck()
			}
		case *http2.PingFrame:
			_ = fr.WritePing(true, f.Data)
		case *http2.MetaHeadersFrame:
			_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: f.StreamID, BlockFragment: []byte{0x88}, EndHeaders: true}) // :status 200
		case *http2.DataFrame:
			if n := len(f.Data()); n > 0 {
				frames++
				size += n
				_ = fr.WriteWindowUpdate(0, uint32(n))
				_ = fr.WriteWindowUpdate(f.StreamID, uint32(n))
			}
			if f.StreamEnded() {
				return frames, size, nil
			}
		}
		if err := w.Flush(); err != nil {
			return frames, size, err
		}
	}
}

func TestTinyWrites(t *testing.T) {
	t.Run("FP-11 100 000 writes of one byte", func(t *testing.T) {
		g := runGroup(t)
		p := newPKI(t)
		type result struct {
			frames, size int
			err          error
		}
		done := make(chan result, 1)
		pool, err := NewPool(PoolConfig{Group: g, TLS: clientFrom(p.clientTLS(client1.String())), Dialer: dialFunc(func(context.Context, netip.AddrPort) (loop.Conn, error) {
			a, b := tcpPair(t)
			go func() {
				var r result
				r.frames, r.size, r.err = serveFrames(b, p.serverTLS(server1.String()))
				done <- r
			}()
			return newSock(t, a), nil
		})})
		if err != nil {
			t.Fatal(err)
		}
		s, err := pool.Open(t.Context(), Target{NextHop: serverAddr, Authority: "a:1", Accept: []workload.Identity{server1}})
		if err != nil {
			t.Fatal(err)
		}
		app, near := tcpPair(t)
		src := newSock(t, near)
		var relayed sync.WaitGroup
		relayed.Add(1)
		s.Ref().Post(func() {
			s.Ref().Child(func(r *loop.Ref) loop.Task {
				_ = errors.Join(s.Attach(r), src.Attach(r))
				return turnFunc(func(budget int) bool {
					for budget > 0 {
						n, err := s.(Receiver).TryReadFrom(src, budget)
						budget -= n
						if _, ended := errors.AsType[*SourceError](err); ended {
							_ = s.CloseWrite()
							_ = src.Close()
							r.Remove()
							relayed.Done()
							return false
						}
						if err != nil {
							return false
						}
					}
					return true
				})
			})
		})
		const writes = 100_000
		for range writes {
			if _, err := app.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		_ = app.Close()
		relayed.Wait()
		select {
		case r := <-done:
			if r.err != nil || r.size != writes {
				t.Errorf("%d bytes, %v; want %d", r.size, r.err, writes)
			}
			// Some hundred on an idle machine; 4,000 to 8,000 where each is sent at once.
			if most := writes / 50; r.frames > most {
				t.Errorf("%d frames, want at most %d", r.frames, most)
			}
		case <-time.After(30 * time.Second):
			t.Fatal("stuck")
		}
		gone, stop := context.WithCancel(context.Background())
		stop()
		_ = pool.Close(gone)
	})
}

// TestTrickle: who waits for how long, by a clock that is moved by hand.
func TestTrickle(t *testing.T) {
	start := func(t *testing.T, answers bool) (ms *mesh, send func(size int) (sent bool), s Stream) {
		ms = newMesh(t, meshConfig{handler: func(_ context.Context, r *Request) {
			_ = r.Accept(Headers{}, func(s Stream) {
				if answers {
					startEcho(s, nil)
				}
			})
		}})
		s = ms.mustOpen()
		send = func(size int) (sent bool) {
			s.Ref().Post(func() {
				n, err := s.(Receiver).TryReadFrom(&source{left: size}, size)
				if sent = n == size; !sent && (n != 0 || !errors.Is(err, loop.ErrAgain)) {
					t.Errorf("TryReadFrom = %d, %v", n, err)
				}
			})
			ms.m.Settle()
			return sent
		}
		t.Cleanup(func() {
			s.Ref().Post(func() { _ = s.Reset() })
			ms.m.Settle()
		})
		return ms, send, s
	}
	t.Run("FP-11 many tiny frames in a row, and what comes next waits", func(t *testing.T) {
		_, send, _ := start(t, false)
		for i := range tinyFrames {
			if !send(1) {
				t.Fatalf("frame %d waits", i)
			}
		}
		if send(1) {
			t.Error("the next does not wait")
		}
	})
	t.Run("a pause of a millisecond is enough", func(t *testing.T) {
		ms, send, _ := start(t, false)
		for i := range 10 * tinyFrames {
			if !send(1) {
				t.Fatalf("frame %d waits", i)
			}
			ms.m.Advance(tricklePause)
		}
	})
	t.Run("after a larger frame nothing waits", func(t *testing.T) {
		_, send, _ := start(t, false)
		for i := range 10 * tinyFrames {
			size := 1
			if i%tinyFrames == tinyFrames-1 { // none comes to the number
				size = tinyFrame
			}
			if !send(size) {
				t.Fatalf("frame %d waits", i)
			}
		}
	})
	t.Run("what is answered does not wait", func(t *testing.T) {
		ms, send, s := start(t, true)
		for i := range 10 * tinyFrames {
			if !send(1) {
				t.Fatalf("message %d waits", i)
			}
			ms.m.Settle() // the echo
			s.Ref().Post(func() { _, _ = s.TryRead(make([]byte, 10)) })
		}
	})
	t.Run("the user is woken", func(t *testing.T) {
		ms, send, s := start(t, false)
		for send(1) {
		}
		turns := 0
		s.Ref().Post(func() {
			s.Ref().Child(func(r *loop.Ref) loop.Task {
				_ = s.Attach(r)
				return turnFunc(func(int) bool { turns++; return false })
			})
		})
		ms.m.Settle()
		before := turns
		ms.m.Advance(tricklePause - 1)
		if turns != before {
			t.Error("it is woken before its time")
		}
		ms.m.Advance(1)
		if turns == before || !send(1) {
			t.Error("it is not woken, or waits all the same")
		}
	})
}
