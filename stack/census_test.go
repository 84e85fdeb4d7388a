package stack

import (
	"net/netip"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// counts drives a rig whose connections are counted.
type counts struct {
	*rig
	budget *loop.Budget
	refs   []*loop.Ref
}

func newCounts(t *testing.T, limit int64) *counts {
	b := loop.NewBudget(limit)
	t.Cleanup(func() { // after that of the rig
		if n := b.Held(); n != 0 {
			t.Errorf("after Close %d bytes are counted", n)
		}
	})
	c := &counts{rig: newRig(t, func(c *Config) { c.Budget = b }), budget: b}
	t.Cleanup(func() { // before it
		for _, r := range c.refs {
			r.Post(r.Remove)
		}
	})
	return c
}

// expect lets the census look once and compares what it has counted; 4 KiB more or less are not counted.
func (c *counts) expect(what string, want int) {
	c.Helper()
	c.m.Advance(censusEvery)
	if got := int(c.budget.Held()); got < want-2*probeStep || got > want {
		c.Errorf("%s: %d bytes are counted, want about %d", what, got, want)
	}
}

// acknowledge plays an application that takes n bytes, or a FIN, from the number una on; its next segment has the number seq.
func (c *counts) acknowledge(seq, una uint32, n int) {
	c.Helper()
	for at := una; at != una+uint32(n); {
		for _, b := range c.received() {
			if p, _ := c.parsed(b); p.flow() == (Flow{TCP, flow4.Dst, flow4.Src}) {
				if end := p.seq + uint32(p.end-p.payload) + uint32(p.flags&flagFIN); int32(end-at) > 0 {
					at = end
				}
			}
		}
		if int32(at-una) > int32(n) {
			at = una + uint32(n)
		}
		c.send(segment{flow: flow4, seq: seq, ack: at, flags: flagACK}.packet())
	}
}

// attach gives a connection somebody to wake.
func (c *counts) attach(conn loop.Conn) {
	c.m.Group().Add(func(r *loop.Ref) loop.Task {
		conn.Attach(r)
		c.refs = append(c.refs, r)
		return idle{}
	})
	c.m.Settle()
}

type idle struct{}

func (idle) Turn(int) bool { return false }

func TestCensus(t *testing.T) {
	const size = 200_000
	write := func(c *counts, conn loop.Conn) {
		if n, err := conn.TryWrite(make([]byte, size)); n != size || err != nil {
			c.Fatalf("TryWrite = %d, %v", n, err)
		}
	}
	t.Run("what the application has not acknowledged", func(t *testing.T) {
		c := newCounts(t, 1<<30)
		conn, una := c.handshake(flow4, 1000)
		defer conn.Reset()
		c.expect("nothing was sent", 0)
		write(c, conn)
		c.expect("all of it waits", size)
		c.acknowledge(1001, una, size/2)
		c.expect("half of it waits", size/2)
		c.acknowledge(1001, una+size/2, size/2)
		c.expect("it has all", 0)
		if c.s.census.timer != nil {
			t.Error("a connection that holds nothing is looked at again")
		}
		if n, err := conn.TryWrite([]byte("x")); n != 1 || err != nil {
			t.Errorf("TryWrite = %d, %v: looking has changed the connection", n, err)
		}
	})
	t.Run("also after the connection was closed", func(t *testing.T) {
		for _, first := range []string{"", "CloseWrite"} {
			c := newCounts(t, 1<<30)
			conn, una := c.handshake(flow4, 1000)
			write(c, conn)
			if first != "" {
				conn.CloseWrite()
				c.expect("before "+first, size)
			}
			conn.Close()
			c.expect("it lingers", size)
			c.acknowledge(1001, una, size)
			c.expect("the FIN is not acknowledged", size) // it cannot be told
			c.acknowledge(1001, una+size, 1)
			c.expect("it has all", 0)
			if c.s.census.timer != nil {
				t.Error("a connection that is over is looked at again")
			}
		}
	})
	t.Run("until it is reset", func(t *testing.T) {
		c := newCounts(t, 1<<30)
		conn, _ := c.handshake(flow4, 1000)
		write(c, conn)
		c.expect("all of it waits", size)
		conn.Reset()
		c.expect("nothing waits", 0)
	})
	t.Run("what was not read", func(t *testing.T) {
		c := newCounts(t, 1<<30)
		conn, una := c.handshake(flow4, 1000)
		defer conn.Reset()
		c.attach(conn)
		seq := uint32(1001)
		for range 40 {
			c.send(segment{flow: flow4, seq: seq, ack: una, flags: flagACK, data: make([]byte, 1000)}.packet())
			seq += 1000
		}
		c.expect("40 segments", 40_000)
		if n, err := conn.TryRead(make([]byte, 30_000)); n != 30_000 || err != nil {
			t.Fatalf("TryRead = %d, %v", n, err)
		}
		c.expect("30 were read", 10_000)
		conn.TryRead(make([]byte, 30_000))
		c.expect("all were read", 0)
	})
	t.Run("of many connections", func(t *testing.T) {
		c := newCounts(t, 1<<30)
		const many = 3*censusBatch + 1
		var all []loop.Conn
		for i := range uint16(many) {
			f := flow4
			f.Src = netip.AddrPortFrom(f.Src.Addr(), 1000+i)
			c.received()
			conn, _ := c.handshake(f, 1000)
			conn.TryWrite(make([]byte, 8192))
			all = append(all, conn)
		}
		c.m.Advance(censusEvery + 4*censusPause)
		if got := c.budget.Held(); got != many*8192 {
			t.Errorf("%d bytes are counted, want %d", got, many*8192)
		}
		for _, conn := range all {
			conn.Reset()
		}
		c.m.Advance(2 * (censusEvery + 4*censusPause))
		if got := c.budget.Held(); got != 0 {
			t.Errorf("in the end %d bytes are counted", got)
		}
	})
}

// TestBuffersWhileMemoryIsFull: what one more connection may hold then, and that it has its buffers back afterwards.
func TestBuffersWhileMemoryIsFull(t *testing.T) {
	fill := func(c loop.Conn) (total int) {
		for {
			n, err := c.TryWrite(make([]byte, 10_000))
			if total += n; err != nil {
				return total
			}
		}
	}
	t.Run("FP-09 64 KiB", func(t *testing.T) {
		c := newCounts(t, 8<<20)
		hog := loop.NewAccount(c.budget)
		defer hog.Set(0)
		before, _ := c.handshake(flow4, 1000)
		defer before.Reset()
		before.TryWrite([]byte("x"))
		hog.Set(8 << 20)
		c.m.Advance(censusEvery)
		if n := fill(before) + 1; n != bufferShort {
			t.Errorf("a connection that was there takes %d bytes, want %d", n, bufferShort)
		}
		c.received()
		f := flow4
		f.Src = ap("10.0.0.7:40001")
		later, _ := c.handshake(f, 1000)
		defer later.Reset()
		if n := fill(later); n != bufferShort {
			t.Errorf("a new connection takes %d bytes, want %d", n, bufferShort)
		}
		hog.Set(0)
		c.m.Advance(censusEvery)
		for name, conn := range map[string]loop.Conn{"before": before, "later": later} {
			if n := fill(conn); n != bufferSize-bufferShort {
				t.Errorf("%s: takes %d bytes more, want %d", name, n, bufferSize-bufferShort)
			}
		}
	})
	t.Run("FP-09 back-pressure reaches the application", func(t *testing.T) {
		// It sends as fast as it can, and nobody reads: what is taken of it before and after memory is full.
		for _, tt := range []struct {
			hog, most int
		}{{0, bufferSize}, {8 << 20, bufferShort}} {
			budget := loop.NewBudget(8 << 20)
			hog := loop.NewAccount(budget)
			hog.Set(tt.hog)
			l := newLiveWith(t, "memory", budget)
			conn, app := l.connect(flow4)
			app.SetWriteDeadline(time.Now().Add(time.Second)) // nothing tells that nothing follows
			for {
				if _, err := app.Write(make([]byte, 100_000)); err != nil {
					break
				}
			}
			held := conn.(interface{ holds() int }).holds()
			if held < tt.most/4 || held > tt.most {
				t.Errorf("with %d bytes held elsewhere: %d bytes wait to be read, want up to %d", tt.hog, held, tt.most)
			}
			app.Close()
			conn.Reset()
			l.stop()
			hog.Set(0)
		}
	})
	t.Run("bytes go on", func(t *testing.T) {
		budget := loop.NewBudget(1)
		hog := loop.NewAccount(budget)
		hog.Set(1 << 20)
		l := newLiveWith(t, "memory", budget)
		b, app := l.pair(flow6)
		defer b.Close()
		defer app.Close()
		transfer(t, b, app, 5<<20)
		if budget.TimesFull() != 1 {
			t.Errorf("%d times full, want 1", budget.TimesFull())
		}
	})
}
