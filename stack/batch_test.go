package stack

import (
	"errors"
	"io"
	"testing"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

// queue writes packets to the stack without letting it read them.
func (r *rig) queue(packets ...[]byte) {
	r.Helper()
	for _, p := range packets {
		buf := append(make([]byte, headroom), p...)
		tun.VnetHdr{}.Encode(buf)
		if _, err := r.far.Write([][]byte{buf}, headroom); err != nil {
			r.Fatal(err)
		}
	}
}

// asleep keeps the netstack's own goroutines from processing anything until f has returned.
func (r *rig) asleep(f func()) {
	r.s.cfg.Manual = false // nobody waits for them
	r.s.net.Pause()
	defer func() {
		r.s.net.Resume()
		r.s.cfg.Manual = true
	}()
	f()
}

func TestTheReaderProcessesSegments(t *testing.T) {
	r := newRig(t, nil)
	r.send(syn(flow4, 1000))
	o := r.accept(t.Context(), r.asked[0].req)
	p, _ := r.parsed(r.one())
	seq := p.seq + 1
	buf := make([]byte, 100)

	r.asleep(func() {
		r.send(segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK}.packet())
		r.until("the connection is accepted", o.ready)
		if o.err != nil {
			t.Fatal(o.err)
		}
		r.queue(
			segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK, data: []byte("one ")}.packet(),
			segment{flow: flow4, seq: 1005, ack: seq, flags: flagACK, data: []byte("two ")}.packet(),
			segment{flow: flow4, seq: 1009, ack: seq, flags: flagACK | flagPSH, data: []byte("three")}.packet(),
		)
		r.m.Settle()
		if _, ack := r.parsed(r.one()); ack != 1014 {
			t.Errorf("the one ACK for three segments is for %d, want 1014", ack)
		}
		if n, err := o.conn.TryRead(buf); err != nil || string(buf[:n]) != "one two three" {
			t.Errorf("TryRead = %q, %v, want all that was sent", buf[:n], err)
		}
		r.send(segment{flow: flow4, seq: 1014, ack: seq, flags: flagACK | flagFIN}.packet())
		if _, ack := r.parsed(r.one()); ack != 1015 {
			t.Errorf("the FIN is acknowledged with %d, want 1015", ack)
		}
		if _, err := o.conn.TryRead(buf); !errors.Is(err, io.EOF) {
			t.Errorf("TryRead = %v, want EOF", err)
		}
		r.send(segment{flow: flow4, seq: 1015, ack: seq, flags: flagRST}.packet())
		if _, err := o.conn.TryRead(buf); !errors.Is(err, loop.ErrReset) {
			t.Errorf("TryRead = %v, want %v", err, loop.ErrReset)
		}
	})
	if err := o.conn.Close(); err != nil {
		t.Error(err)
	}
}

func TestABatchIsOfOneConnection(t *testing.T) {
	r := newRig(t, nil)
	one, seq1 := r.handshake(flow4, 1000)
	two, seq2 := r.handshake(flow6, 2000)
	defer one.Reset()
	defer two.Reset()
	r.asleep(func() {
		other := flow4
		other.Src = ap("10.0.0.7:40001")
		r.queue(
			segment{flow: flow4, seq: 1001, ack: seq1, flags: flagACK, data: []byte("a")}.packet(),
			segment{flow: flow6, seq: 2001, ack: seq2, flags: flagACK, data: []byte("b")}.packet(),
			syn(other, 1),
		)
		r.m.Settle()
		got := r.received()
		if len(got) != 2 {
			t.Fatalf("%d packets, want an ACK for each connection", len(got))
		}
		for i, want := range []uint32{1002, 2002} {
			if _, ack := r.parsed(got[i]); ack != want {
				t.Errorf("ACK %d is for %d, want %d", i, ack, want)
			}
		}
		if got := len(r.asked); got != 3 {
			t.Errorf("%d SYNs were asked about, want 3", got)
		}
	})
	r.asked[2].req.Drop()
}

func TestSegmentsWhileTheEndpointIsLocked(t *testing.T) {
	r := newRig(t, nil)
	c, seq := r.handshake(flow4, 1000)
	defer c.Reset()
	ep := c.(*conn).ep.(interface {
		LockUser()
		UnlockUser()
	})
	locked, read := make(chan struct{}), make(chan struct{})
	go func() { // as the netstack does in Read
		ep.LockUser()
		close(locked)
		<-read
		ep.UnlockUser()
	}()
	<-locked
	data := segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK, data: []byte("later")}.packet()
	r.queue(data)
	go close(read) // the reader waits for it
	r.m.Settle()
	r.until("the bytes are there", func() bool {
		buf := make([]byte, 10)
		n, _ := c.TryRead(buf)
		return string(buf[:n]) == "later"
	})
}
