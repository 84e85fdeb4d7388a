package stack

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestAnswersOnTheWire compares whole packets; their sums were computed elsewhere.
func TestAnswersOnTheWire(t *testing.T) {
	data := segment{flow: flow4, seq: 0x01020304, flags: flagSYN, data: []byte("early")}.packet()
	tests := []struct {
		name string
		syn  []byte
		verb func(TCPRequest)
		want string
	}{
		{"reset/v4", syn(flow4, 0x01020304), TCPRequest.Reset, "" +
			"450000280000400040066ec8c00002010a000007" + "00509c4000000000010203055014000043310000"},
		{"reset/v4 acknowledges data on the SYN", data, TCPRequest.Reset, "" +
			"450000280000400040066ec8c00002010a000007" + "00509c40000000000102030a50140000432c0000"},
		{"reset/v6", syn(flow6, 0xffffffff), TCPRequest.Reset, "" +
			"600000000014064020010db800010000000000000000000120010db8000000000000000000000007" + "00509c40000000000000000050140000b7c50000"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, nil)
			r.send(tt.syn)
			tt.verb(r.asked[0].req)
			got := hex.EncodeToString(r.one())
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("answer mismatch (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUnreachableQuotesTheSYN(t *testing.T) {
	long := segment{flow: flow4, seq: 1, flags: flagSYN, data: make([]byte, 1200)}
	long6 := long
	long6.flow = flow6
	tests := []struct {
		name       string
		syn        []byte
		cause      Cause
		proto      byte
		typ, code  byte
		size       int // of the message, IP header included
		wantSource netip.Addr
	}{
		{"v4 host", syn(flow4, 7), HostUnreachable, 1, 3, 1, 20 + 8 + 40, flow4.Dst.Addr()},
		{"v4 network", syn(flow4, 7), NetworkUnreachable, 1, 3, 0, 20 + 8 + 40, flow4.Dst.Addr()},
		{"v4 prohibited", syn(flow4, 7), Prohibited, 1, 3, 13, 20 + 8 + 40, flow4.Dst.Addr()},
		{"v4 long", long.packet(), HostUnreachable, 1, 3, 1, 576, flow4.Dst.Addr()},
		{"v6 host", syn(flow6, 7), HostUnreachable, 58, 1, 3, 40 + 8 + 60, flow6.Dst.Addr()},
		{"v6 network", syn(flow6, 7), NetworkUnreachable, 58, 1, 0, 40 + 8 + 60, flow6.Dst.Addr()},
		{"v6 prohibited", syn(flow6, 7), Prohibited, 58, 1, 1, 40 + 8 + 60, flow6.Dst.Addr()},
		{"v6 long", long6.packet(), HostUnreachable, 58, 1, 3, 1280, flow6.Dst.Addr()},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, nil)
			r.send(tt.syn)
			r.asked[0].req.Unreachable(tt.cause)
			b := r.one()
			if len(b) != tt.size {
				t.Errorf("message of %d bytes, want %d", len(b), tt.size)
			}
			src, dst, at := addresses(b)
			orig, _, _ := addresses(tt.syn)
			if src != tt.wantSource || dst != orig {
				t.Errorf("from %v to %v, want from %v to %v", src, dst, tt.wantSource, orig)
			}
			m := b[at:]
			proto, sum := b[9], uint16(0)
			if src.Is6() {
				proto, sum = b[6], pseudoSum(protoICMPv6, src, dst, len(m))
			}
			if proto != tt.proto || m[0] != tt.typ || m[1] != tt.code {
				t.Errorf("protocol %d type %d code %d, want %d %d %d", proto, m[0], m[1], tt.proto, tt.typ, tt.code)
			}
			if got := sumOf(m, sum); got != 0xffff {
				t.Errorf("ICMP checksum is wrong: the sum is %#x", got)
			}
			if diff := cmp.Diff(tt.syn[:len(m)-icmpLen], m[icmpLen:]); diff != "" {
				t.Errorf("quoted packet mismatch (-want +got):\n%s", diff)
			}
		})
	}
}

func TestExactlyOneVerb(t *testing.T) {
	r := newRig(t, nil)
	r.send(syn(flow4, 1))
	req := r.asked[0].req
	if err := req.HandBack(); !errors.Is(err, ErrUnsupported) {
		t.Errorf("HandBack() = %v, want %v", err, ErrUnsupported)
	}
	req.Reset()
	req.Reset()
	req.Unreachable(HostUnreachable)
	req.Drop()
	if _, err := req.Accept(context.Background()); !errors.Is(err, ErrGone) {
		t.Errorf("Accept after Reset = %v, want %v", err, ErrGone)
	}
	r.one()
	if st := r.s.Stats(); st.InFlight != 0 || st.Requests != 1 {
		t.Errorf("%d in flight of %d requests, want 0 of 1", st.InFlight, st.Requests)
	}
}

func TestVerbsInlineFromServeTCP(t *testing.T) {
	r := newRig(t, nil)
	r.ontcp = func(_ context.Context, req TCPRequest) { req.Reset() }
	r.send(syn(flow6, 1))
	if p, ack := r.parsed(r.one()); p.flags != flagRST|flagACK || ack != 2 {
		t.Errorf("flags %#x ack %d, want RST|ACK of 2", p.flags, ack)
	}
}

func TestDroppedAttemptStartsAnewWithTheNextSYN(t *testing.T) {
	r := newRig(t, nil)
	r.send(syn(flow4, 1))
	r.asked[0].req.Drop()
	if got := r.received(); len(got) != 0 {
		t.Fatalf("Drop answered with %x", got)
	}
	r.send(syn(flow4, 1))
	if len(r.asked) != 2 {
		t.Errorf("%d requests, want 2", len(r.asked))
	}
}

func TestDuplicateSYNIsSwallowed(t *testing.T) {
	r := newRig(t, nil)
	for range 3 {
		r.send(syn(flow4, 1))
	}
	if st := r.s.Stats(); len(r.asked) != 1 || st.Duplicates != 2 {
		t.Errorf("%d requests, %d duplicates, want 1 and 2", len(r.asked), st.Duplicates)
	}
	if got := r.received(); len(got) != 0 {
		t.Errorf("answered with %x", got)
	}
}

func TestApplicationGivesUp(t *testing.T) {
	tests := []struct {
		name string
		send []byte
		ends bool
		left int // in flight
	}{
		{"by RST", segment{flow: flow4, seq: 1, flags: flagRST}.packet(), true, 0},
		{"by RST behind the SYN", segment{flow: flow4, seq: 2, flags: flagRST | flagACK}.packet(), true, 0},
		{"by another connection from its port", syn(flow4, 99), true, 1},
		{"not by a RST with another number", segment{flow: flow4, seq: 50, flags: flagRST}.packet(), false, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, nil)
			r.send(syn(flow4, 1))
			r.send(tt.send)
			if got := r.asked[0].ctx.Err() != nil; got != tt.ends {
				t.Errorf("ctx has ended: %v, want %v", got, tt.ends)
			}
			if st := r.s.Stats(); st.InFlight != tt.left {
				t.Errorf("%d in flight, want %d", st.InFlight, tt.left)
			}
			if tt.ends {
				if _, err := r.asked[0].req.Accept(context.Background()); !errors.Is(err, ErrGone) {
					t.Errorf("Accept = %v, want %v", err, ErrGone)
				}
				if cause := context.Cause(r.asked[0].ctx); !errors.Is(cause, errGaveUp) {
					t.Errorf("cause %v, want %v", cause, errGaveUp)
				}
			}
		})
	}
}

func flowN(n int) Flow {
	f := flow4
	f.Src = netip.AddrPortFrom(f.Src.Addr(), uint16(10000+n))
	return f
}

func TestLimits(t *testing.T) {
	t.Run("FP-17 at the pod's limit the oldest attempt is given up", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.MaxInFlight = 3 })
		for i := range 5 {
			r.send(syn(flowN(i), 1))
		}
		var ended []bool
		for _, a := range r.asked {
			ended = append(ended, errors.Is(context.Cause(a.ctx), errEvicted))
		}
		if diff := cmp.Diff([]bool{true, true, false, false, false}, ended); diff != "" {
			t.Errorf("evicted mismatch (-want +got):\n%s", diff)
		}
		if st := r.s.Stats(); st.InFlight != 3 || st.Drops[DropEvicted] != 2 {
			t.Errorf("%d in flight, %d evicted, want 3 and 2", st.InFlight, st.Drops[DropEvicted])
		}
		if got := r.received(); len(got) != 0 {
			t.Errorf("eviction answered with %x", got)
		}
	})
	t.Run("FP-17 a flood of one pod leaves another pod its share", func(t *testing.T) {
		limits := NewLimits(100)
		flood := newRig(t, func(c *Config) { c.MaxInFlight, c.Limits = 60, limits })
		calm := newRig(t, func(c *Config) { c.MaxInFlight, c.Limits = 60, limits })
		for i := range 5000 {
			flood.send(syn(flowN(i), 1))
		}
		calm.send(syn(flow4, 1))
		if len(calm.asked) != 1 {
			t.Error("the other pod's SYN became no request")
		}
		flood.close()
		calm.close()
		if n := limits.InFlight(); n != 0 {
			t.Errorf("%d SYNs in flight at the end, want 0", n)
		}
	})
	t.Run("at the process limit a new SYN is dropped", func(t *testing.T) {
		var log bytes.Buffer
		r := newRig(t, func(c *Config) { c.Limits, c.Log = NewLimits(2), slog.New(slog.NewTextHandler(&log, nil)) })
		for i := range 3 {
			r.send(syn(flowN(i), 1))
		}
		if n := strings.Count(log.String(), "too many connection attempts"); n != 1 {
			t.Errorf("the limit was logged %d times, want 1: %s", n, &log)
		}
		if st := r.s.Stats(); len(r.asked) != 2 || st.Drops[DropLimit] != 1 {
			t.Errorf("%d requests, %d dropped, want 2 and 1", len(r.asked), st.Drops[DropLimit])
		}
		r.asked[0].req.Reset()
		r.send(syn(flowN(2), 1))
		if len(r.asked) != 3 {
			t.Error("the freed slot is not used")
		}
	})
	t.Run("FP-18 an attempt without answer ages out", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(syn(flowN(0), 1))
		r.m.Advance(10 * time.Second)
		r.send(syn(flowN(1), 1))
		r.m.Advance(maxAttempt - 10*time.Second)
		if a, b := r.asked[0].ctx.Err(), r.asked[1].ctx.Err(); a == nil || b != nil {
			t.Errorf("after 75 s: the first attempt's ctx %v, want ended; the second's %v, want alive", a, b)
		}
		r.m.Advance(10 * time.Second)
		if st := r.s.Stats(); st.InFlight != 0 || st.Drops[DropAged] != 2 {
			t.Errorf("%d in flight, %d aged, want 0 and 2", st.InFlight, st.Drops[DropAged])
		}
	})
	t.Run("FP-18 a handshake that the application does not complete ages out", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(syn(flow4, 1))
		o := r.accept(context.Background(), r.asked[0].req)
		r.until("the SYN is answered", func() bool { return len(r.received()) > 0 })
		r.m.Advance(maxAttempt)
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, ErrGone) {
			t.Errorf("Accept = %v, want %v", o.err, ErrGone)
		}
		r.until("the netstack has no endpoint left", func() bool { ep, _ := r.s.find(flow4); return ep == nil })
	})
}

func TestAccept(t *testing.T) {
	for _, flow := range []Flow{flow4, flow6} {
		t.Run(fmt.Sprint("returns a connection with its application, from ", flow.Src), func(t *testing.T) {
			r := newRig(t, nil)
			c, _ := r.handshake(flow, 1000)
			defer c.Reset()
			if c.LocalAddr() != flow.Dst || c.RemoteAddr() != flow.Src {
				t.Errorf("ends %v and %v, want %v and %v", c.LocalAddr(), c.RemoteAddr(), flow.Dst, flow.Src)
			}
			if r.asked[0].ctx.Err() != nil {
				t.Error("the request's ctx has ended with Accept")
			}
			if st := r.s.Stats(); st.InFlight != 0 || st.Accepted != 1 {
				t.Errorf("%d in flight, %d accepted, want 0 and 1", st.InFlight, st.Accepted)
			}
		})
	}
	t.Run("nothing is sent before it", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(syn(flow4, 1))
		r.m.Advance(20 * time.Second)
		if got := r.received(); len(got) != 0 {
			t.Errorf("sent %x", got)
		}
	})
	t.Run("ends with its ctx", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(syn(flow4, 1))
		ctx, cancel := context.WithCancel(context.Background())
		o := r.accept(ctx, r.asked[0].req)
		p, _ := r.parsed(r.one())
		cancel()
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, context.Canceled) || o.conn != nil {
			t.Errorf("Accept = %v, %v, want %v", o.conn, o.err, context.Canceled)
		}
		r.until("the handshake is gone", func() bool { ep, _ := r.s.find(flow4); return ep == nil })
		r.send(segment{flow: flow4, seq: 2, ack: p.seq + 1, flags: flagACK}.packet())
		if p, _ := r.parsed(r.one()); p.flags&flagRST == 0 {
			t.Errorf("the late ACK was answered with flags %#x, want RST", p.flags)
		}
	})
	t.Run("with a ctx that has ended", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(syn(flow4, 1))
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		o := r.accept(ctx, r.asked[0].req)
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, context.Canceled) {
			t.Errorf("Accept = %v, want %v", o.err, context.Canceled)
		}
	})
	t.Run("ends when the application resets the handshake", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(syn(flow4, 1))
		o := r.accept(context.Background(), r.asked[0].req)
		r.one()
		r.send(segment{flow: flow4, seq: 2, flags: flagRST}.packet())
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, ErrGone) {
			t.Errorf("Accept = %v, want %v", o.err, ErrGone)
		}
		if r.asked[0].ctx.Err() == nil {
			t.Error("the request's ctx goes on")
		}
	})
	t.Run("ends when a limit evicts it", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.MaxInFlight = 1 })
		r.send(syn(flowN(0), 1))
		o := r.accept(context.Background(), r.asked[0].req)
		r.one()
		r.send(syn(flowN(1), 1))
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, ErrGone) {
			t.Errorf("Accept = %v, want %v", o.err, ErrGone)
		}
	})
	t.Run("a handshake that follows an abandoned one of the same flow", func(t *testing.T) {
		r := newRig(t, nil)
		for i := range 50 {
			known := len(r.asked)
			r.send(syn(flow4, uint32(1000*i)))
			if len(r.asked) == known {
				continue // the netstack got it, for the handshake that is not yet gone
			}
			ctx, cancel := context.WithCancel(context.Background())
			r.accept(ctx, r.asked[known].req)
			r.m.Step()
			cancel()
			r.m.Settle()
			r.received()
		}
		r.until("the abandoned handshakes are gone", func() bool {
			r.received()
			ep, _ := r.s.find(flow4)
			return ep == nil
		})
		c, _ := r.handshake(flow4, 99000)
		c.Reset()
	})
	t.Run("from a port that is in TIME-WAIT", func(t *testing.T) {
		r := newRig(t, nil)
		c, seq := r.handshake(flow4, 1000)
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		r.one() // FIN
		r.send(segment{flow: flow4, seq: 1001, ack: seq + 1, flags: flagFIN | flagACK}.packet())
		r.until("the connection is in TIME-WAIT", func() bool { _, s := r.s.find(flow4); return s.String() == "TIME-WAIT" })
		c.Close()
		r.received()
		r.send(syn(flow4, 500000))
		o := r.accept(context.Background(), r.asked[1].req)
		var synack packet
		r.until("the SYN is answered", func() bool {
			for _, b := range r.received() {
				if p, _ := r.parsed(b); p.flags == flagSYN|flagACK {
					synack = p
					return true
				}
			}
			return false
		})
		r.send(segment{flow: flow4, seq: 500001, ack: synack.seq + 1, flags: flagACK}.packet())
		r.until("the connection is accepted", o.ready)
		if o.err != nil {
			t.Fatal(o.err)
		}
		o.conn.Reset()
	})
	t.Run("refuses an address that no connection can have", func(t *testing.T) {
		r := newRig(t, nil)
		f := flow4
		f.Dst = ap("224.0.0.1:80")
		b := syn(f, 1) // which the parser drops
		r.s.table.syn(&packet{src: f.Src, dst: f.Dst, proto: TCP, transport: ipv4Len, payload: len(b), end: len(b), flags: flagSYN, seq: 1}, make([]byte, headroom), b)
		o := r.accept(context.Background(), r.asked[0].req)
		r.until("Accept returns", o.ready)
		if o.err == nil {
			t.Error("Accept of a connection to a multicast address succeeded")
		}
	})
}

func TestSYNOfALiveConnectionIsChallenged(t *testing.T) {
	r := newRig(t, nil)
	c, _ := r.handshake(flow4, 1000)
	defer c.Reset()
	r.m.Advance(time.Second)
	r.send(syn(flow4, 777777))
	if p, ack := r.parsed(r.one()); p.flags != flagACK || ack != 1001 {
		t.Errorf("flags %#x ack %d, want a challenge ACK of 1001 (RFC 5961, section 4)", p.flags, ack)
	}
	if len(r.asked) != 1 {
		t.Errorf("%d requests, want 1", len(r.asked))
	}
}

func TestCloseEndsRequests(t *testing.T) {
	r := newRig(t, nil)
	r.send(syn(flowN(0), 1))
	r.send(syn(flowN(1), 1))
	o := r.accept(context.Background(), r.asked[1].req)
	r.until("the handshake begins", func() bool { ep, _ := r.s.find(flowN(1)); return ep != nil })
	r.rd.stop(nil)
	if err := r.s.Close(); err != nil {
		t.Fatal(err)
	}
	r.until("Accept returns", o.ready)
	if !errors.Is(o.err, ErrGone) {
		t.Errorf("Accept = %v, want %v", o.err, ErrGone)
	}
	if r.asked[0].ctx.Err() == nil {
		t.Error("the ctx of a request outlives the stack")
	}
	r.asked[0].req.Reset() // must not write to the closed device
}

func TestStraySegments(t *testing.T) {
	ack := segment{flow: flow4, seq: 5, ack: 77, flags: flagACK, data: []byte("x")}.packet()
	t.Run("FP-77 are reset", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(ack)
		if p, _ := r.parsed(r.one()); p.flags&flagRST == 0 || p.seq != 77 {
			t.Errorf("flags %#x seq %d, want RST of 77", p.flags, p.seq)
		}
	})
	t.Run("are shown to Stray first", func(t *testing.T) {
		var seen []string
		r := newRig(t, func(c *Config) {
			c.Stray = func(f Flow, p []byte) bool {
				seen = append(seen, f.String()+" "+hex.EncodeToString(p))
				return true
			}
		})
		r.send(ack)
		if diff := cmp.Diff([]string{flow4.String() + " " + hex.EncodeToString(ack)}, seen); diff != "" {
			t.Errorf("Stray mismatch (-want +got):\n%s", diff)
		}
		if got := r.received(); len(got) != 0 {
			t.Errorf("answered with %x", got)
		}
	})
}

func TestInject(t *testing.T) {
	r := newRig(t, nil)
	if !r.s.Inject(syn(flow4, 1)) {
		t.Fatal("Inject() = false with a reader")
	}
	r.m.Settle()
	if len(r.asked) != 1 {
		t.Errorf("%d requests, want 1", len(r.asked))
	}
	r.rd.stop(nil)
	if r.s.Inject(syn(flow4, 2)) {
		t.Error("Inject() = true without a reader")
	}
}

func TestReaderStopsWithoutClosing(t *testing.T) {
	r := newRig(t, nil)
	r.rd.stop(nil)
	r.send(syn(flow4, 1))
	if len(r.asked) != 0 {
		t.Fatal("a stopped reader read a packet")
	}
	r.rd = &reader{s: r.s, done: make(chan error, 1)}
	r.s.startReader(r.rd)
	r.m.Settle()
	if len(r.asked) != 1 {
		t.Errorf("%d requests after the reader began again, want 1", len(r.asked))
	}
}
