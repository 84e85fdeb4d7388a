package hbone

import (
	"fmt"
	"testing"

	"golang.org/x/net/http2"
)

// A creditor is a peer that credits as its applications take the bytes, in steps of half its windows, as nghttp2 and h2 do.
type creditor struct {
	w            *wire
	stream, conn int64 // its windows
	taken        map[uint32]int64
	takenAll     int64
	zeros        [64 << 10]byte
}

func newCreditor(t *testing.T, stream, conn int64) *creditor {
	t.Helper()
	c := &creditor{w: newWire(t, EngineConfig{}), stream: stream, conn: conn, taken: make(map[uint32]int64)}
	_ = c.w.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(stream)})
	if conn > initWindow {
		_ = c.w.fr.WriteWindowUpdate(0, uint32(conn-initWindow))
	}
	c.feed()
	return c
}

func (c *creditor) feed() {
	c.w.t.Helper()
	if err := c.w.feed(); err != nil {
		c.w.t.Fatal(err)
	}
	c.w.out.Reset()
	c.w.rec.log = nil
}

func (c *creditor) open() uint32 {
	c.w.t.Helper()
	id, err := c.w.eng.Open("a:1", Headers{})
	if err != nil {
		c.w.t.Fatal(err)
	}
	return id
}

// send writes up to n bytes and returns how many were taken.
func (c *creditor) send(id uint32, n int) (sent int) {
	for sent < n {
		k, err := c.w.eng.Write(id, c.zeros[:min(n-sent, len(c.zeros))])
		c.w.out.Reset()
		c.w.eng.Sent()
		if sent += k; err != nil {
			break
		}
	}
	return sent
}

// take is the application taking n bytes.
func (c *creditor) take(id uint32, n int) {
	c.taken[id] += int64(n)
	c.takenAll += int64(n)
	if c.taken[id] >= c.stream/2 {
		_ = c.w.fr.WriteWindowUpdate(id, uint32(c.taken[id]))
		c.taken[id] = 0
	}
	if c.takenAll >= c.conn/2 {
		_ = c.w.fr.WriteWindowUpdate(0, uint32(c.takenAll))
		c.takenAll = 0
	}
	if c.w.in.Len() > 0 {
		c.feed()
	}
}

// peers are windows: of Envoy, of ztunnel, of Node, and odd ones.
var peers = []struct{ stream, conn int64 }{{16 << 20, 24 << 20}, {4 << 20, 16 << 20}, {65535, 65535}, {1 << 16, 1 << 16}, {16 << 20, 1 << 20}, {16384, 1 << 20}}

// TestShareGoesOn: whatever the windows, a stream whose bytes are taken goes on, alone and beside others like it.
func TestShareGoesOn(t *testing.T) {
	for _, p := range peers {
		for _, n := range []int{1, 2, 3, 8, 99} {
			t.Run(fmt.Sprintf("windows %d and %d, %d streams", p.stream, p.conn, n), func(t *testing.T) {
				c := newCreditor(t, p.stream, p.conn)
				ids := make([]uint32, n)
				for i := range ids {
					ids[i] = c.open()
				}
				for total := int64(0); total < 8*p.conn; {
					before := total
					for _, id := range ids {
						k := c.send(id, 300_000)
						c.take(id, k)
						total += int64(k)
					}
					if total == before {
						t.Fatalf("stuck after %d bytes", total)
					}
				}
			})
		}
	}
}

// TestShareBesideOneStuck: one reader that takes nothing does not stop bulk on another stream.
func TestShareBesideOneStuck(t *testing.T) {
	for _, p := range peers[:2] {
		c := newCreditor(t, p.stream, p.conn)
		stuck, other := c.open(), c.open()
		held := c.send(stuck, 64<<20)
		for total := int64(0); total < 8*p.conn; {
			k := c.send(other, 300_000)
			if c.take(other, k); k == 0 {
				t.Fatalf("windows %d and %d: stuck after %d bytes, beside %d that are not taken", p.stream, p.conn, total, held)
			}
			total += int64(k)
		}
	}
}

// TestShareBesideManyStuck: beside 99 readers that together take a tenth of what it sends, and whose senders take all they are
// given, a stream that sends a little at a time goes on for ever.
func TestShareBesideManyStuck(t *testing.T) {
	for _, p := range peers[:2] {
		c := newCreditor(t, p.stream, p.conn)
		ping := c.open()
		slow := make([]uint32, 99)
		for i := range slow {
			slow[i] = c.open()
		}
		const size, trips = 2000, 40_000
		for trip := range trips {
			for more := trip%500 == 0; more; { // by turns, as long as anybody can
				more = false
				for _, id := range slow {
					more = c.send(id, 64<<10) > 0 || more
				}
			}
			c.take(slow[trip%len(slow)], size/10)
			for left := size; left > 0; {
				k := c.send(ping, left)
				if c.take(ping, k); k == 0 {
					t.Fatalf("windows %d and %d: stuck in round trip %d", p.stream, p.conn, trip)
				}
				left -= k
			}
		}
	}
}
