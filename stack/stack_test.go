package stack

import (
	"context"
	"encoding/binary"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"gvisor.dev/gvisor/pkg/refs"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

func TestMain(m *testing.M) {
	refs.SetLeakMode(refs.LeaksPanic)
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		refs.DoLeakCheck()
		os.Exit(code)
	}))
}

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// A rig is a Stack driven by hand, with the far end of its device in the test's hands.
type rig struct {
	testing.TB
	m      *loop.Manual
	s      *Stack
	near   *tun.PipeEnd
	far    *tun.PipeEnd
	rd     *reader
	asked  []asked    // what ServeTCP got, in order
	grams  []datagram // what ServeUDP got
	ontcp  func(context.Context, TCPRequest)
	closed bool
}

type asked struct {
	ctx context.Context
	req TCPRequest
}

type datagram struct {
	Flow    Flow
	Payload string
	conn    UDPConn
}

func (r *rig) ServeTCP(ctx context.Context, req TCPRequest) {
	r.asked = append(r.asked, asked{ctx, req})
	if r.ontcp != nil {
		r.ontcp(ctx, req)
	}
}

func (r *rig) ServeUDP(_ context.Context, c UDPConn) {
	r.grams = append(r.grams, datagram{c.Flow(), string(c.Payload()), c})
}

func newRig(t testing.TB, change func(*Config)) *rig {
	t.Helper()
	r := &rig{TB: t, m: loop.NewManual(epoch)}
	r.near, r.far = tun.Pipe()
	cfg := Config{Device: r.near, Group: r.m.Group(), Handler: r, Manual: true, Limits: NewLimits(0)}
	if change != nil {
		change(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.s = s
	r.rd = &reader{s: s, done: make(chan error, 1)}
	s.startReader(r.rd)
	r.m.Settle()
	t.Cleanup(r.close)
	return r
}

// close ends everything and checks that nothing is left.
func (r *rig) close() {
	if r.closed {
		return
	}
	r.closed = true
	r.m.Settle()
	r.rd.stop(nil)
	if err := r.s.Close(); err != nil {
		r.Error(err)
	}
	r.m.Settle()
	if st := r.m.Group().Stats(); st != (loop.Stats{}) {
		r.Errorf("after Close the group holds %+v, want nothing", st)
	}
	if n := r.s.Stats().InFlight; n != 0 {
		r.Errorf("after Close %d SYNs are in flight", n)
	}
	if err := r.m.Close(); err != nil {
		r.Error(err)
	}
}

// until drives everything until cond holds.
func (r *rig) until(what string, cond func() bool) {
	r.Helper()
	for limit := time.Now().Add(10 * time.Second); ; runtime.Gosched() {
		r.m.Settle()
		if cond() {
			return
		}
		if time.Now().After(limit) {
			r.Fatalf("after 10 s still not: %s", what)
		}
	}
}

// send writes a packet to the stack and lets it be handled.
func (r *rig) send(p []byte) {
	r.Helper()
	r.sendVnet(tun.VnetHdr{}, p)
}

func (r *rig) sendVnet(h tun.VnetHdr, p []byte) {
	r.Helper()
	buf := append(make([]byte, headroom), p...)
	h.Encode(buf)
	if _, err := r.far.Write([][]byte{buf}, headroom); err != nil {
		r.Fatal(err)
	}
	r.m.Settle()
}

// received returns the packets that the stack has sent since the last call.
func (r *rig) received() [][]byte {
	var all [][]byte
	buf, sizes := [][]byte{make([]byte, headroom+tun.MaxPacket)}, make([]int, 1)
	for {
		n, err := r.far.Read(buf, sizes, headroom)
		if n == 0 || err != nil {
			return all
		}
		all = append(all, append([]byte(nil), buf[0][headroom:][:sizes[0]]...))
	}
}

// one returns the one packet that the stack has sent, or sends soon.
func (r *rig) one() []byte {
	r.Helper()
	var all [][]byte
	r.m.Advance(icmpAge)
	r.until("a packet arrives", func() bool {
		all = append(all, r.received()...)
		return len(all) > 0
	})
	if len(all) != 1 {
		r.Fatalf("the stack sent %d packets, want 1: %x", len(all), all)
	}
	return all[0]
}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// The flows of most tests.
var (
	flow4 = Flow{TCP, ap("10.0.0.7:40000"), ap("192.0.2.1:80")}
	flow6 = Flow{TCP, ap("[2001:db8::7]:40000"), ap("[2001:db8:1::1]:80")}
)

// segment is a TCP segment of a flow.
type segment struct {
	flow     Flow
	seq, ack uint32
	flags    byte
	options  []byte
	data     []byte
}

func (g segment) packet() []byte {
	n := tcpLen + len(g.options)
	buf, t := newPacket(TCP, g.flow.Src.Addr(), g.flow.Dst.Addr(), n+len(g.data))
	binary.BigEndian.PutUint16(t[0:], g.flow.Src.Port())
	binary.BigEndian.PutUint16(t[2:], g.flow.Dst.Port())
	binary.BigEndian.PutUint32(t[4:], g.seq)
	binary.BigEndian.PutUint32(t[8:], g.ack)
	t[12], t[13] = byte(n/4)<<4, g.flags
	binary.BigEndian.PutUint16(t[14:], 65535)
	copy(t[tcpLen:], g.options)
	copy(t[n:], g.data)
	binary.BigEndian.PutUint16(t[16:], ^checksum.Checksum(t, pseudoSum(TCP, g.flow.Src.Addr(), g.flow.Dst.Addr(), len(t))))
	return buf[headroom:]
}

func syn(f Flow, seq uint32) []byte { return segment{flow: f, seq: seq, flags: flagSYN}.packet() }

// parsed is what a received packet says; it must be right.
func (r *rig) parsed(b []byte) (packet, uint32) {
	r.Helper()
	var p packet
	if why, ok := p.parse(b, len(b)); !ok {
		r.Fatalf("the stack sent a packet that is wrong: %v: %x", why, b)
	}
	ack := uint32(0)
	if p.proto == TCP {
		ack = binary.BigEndian.Uint32(b[p.transport+8:])
		if !p.sumIsRight(b) && p.flags&flagSYN != 0 {
			r.Errorf("wrong checksum: %x", b)
		}
	}
	return p, ack
}

// accept calls Accept in a set-up and returns its outcome, once there is one.
func (r *rig) accept(ctx context.Context, req TCPRequest) *outcome {
	o := new(outcome)
	r.m.Group().Go(ctx, func(ctx context.Context) {
		c, err := req.Accept(ctx)
		o.mu.Lock()
		defer o.mu.Unlock()
		o.done, o.conn, o.err = true, c, err
	})
	return o
}

type outcome struct {
	mu   sync.Mutex // guards below
	done bool
	conn loop.Conn
	err  error
}

func (o *outcome) ready() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.done
}

// handshake opens a connection of the flow by hand, from the SYN's number seq on, and returns it with the number of the first
// byte that the stack sends.
func (r *rig) handshake(f Flow, seq uint32) (loop.Conn, uint32) {
	r.Helper()
	r.send(syn(f, seq))
	o := r.accept(context.Background(), r.asked[len(r.asked)-1].req)
	p, ack := r.parsed(r.one())
	if p.flags != flagSYN|flagACK || ack != seq+1 {
		r.Fatalf("the answer to the SYN %d has flags %#x, ack %d", seq, p.flags, ack)
	}
	r.send(segment{flow: f, seq: seq + 1, ack: p.seq + 1, flags: flagACK}.packet())
	r.until("the connection is accepted", o.ready)
	if o.err != nil {
		r.Fatal(o.err)
	}
	return o.conn, p.seq + 1
}
