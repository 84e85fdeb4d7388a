package stack

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

// steps is a Steerer that notes what it is told.
type steps struct {
	mu       sync.Mutex // guards below
	list     []string
	fail     error
	standing map[Flow]string // what was said last

	during func(what string) // if not nil: called before anything is noted
}

func (s *steps) note(what string, f Flow) error {
	if s.during != nil {
		s.during(what)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, fmt.Sprintf("%s %v", what, f.Src))
	if s.standing == nil {
		s.standing = make(map[Flow]string)
	}
	s.standing[f] = what
	return s.fail
}

func (s *steps) HandBack(f Flow) error { return s.note("hand back", f) }
func (s *steps) Accept(f Flow) error   { return s.note("accept", f) }
func (s *steps) Unsteer(f Flow)        { _ = s.note("forget", f) }

// taken returns what was noted since the last call.
func (s *steps) taken() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.list
	s.list = nil
	return list
}

func newSteeredRig(t *testing.T) (*rig, *steps) {
	s := new(steps)
	return newRig(t, func(cfg *Config) { cfg.Steerer = s }), s
}

// writtenBack returns the packets that were written with their headers.
func (r *rig) writtenBack() (list []string) {
	buf, sizes := [][]byte{make([]byte, headroom+tun.MaxPacket)}, make([]int, 1)
	for {
		n, err := r.far.Read(buf, sizes, headroom)
		if n == 0 || err != nil {
			return list
		}
		list = append(list, fmt.Sprintf("%x", buf[0][:headroom+sizes[0]]))
	}
}

func (s *steps) want(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, s.taken()); diff != "" {
		t.Errorf("steps mismatch (-want +got):\n%s", diff)
	}
}

func TestHandBackWritesTheSYNAsItCame(t *testing.T) {
	for _, flow := range []Flow{flow4, flow6} {
		t.Run(flow.Dst.String(), func(t *testing.T) {
			r, s := newSteeredRig(t)
			// The application's kernel leaves the sum to the device: what is written back must say so again.
			h := tun.VnetHdr{Flags: tun.VnetNeedsChecksum, ChecksumStart: 20, ChecksumOffset: 16}
			packet := syn(flow, 77)
			r.sendVnet(h, packet)
			if err := r.asked[0].req.HandBack(); err != nil {
				t.Fatalf("HandBack = %v", err)
			}
			s.want(t, "hand back "+flow.Src.String())
			want := append(make([]byte, headroom), packet...)
			h.Encode(want)
			if diff := cmp.Diff([]string{fmt.Sprintf("%x", want)}, r.writtenBack()); diff != "" {
				t.Errorf("written mismatch (-want +got):\n%s", diff)
			}
			if err := r.asked[0].req.HandBack(); !errors.Is(err, ErrGone) {
				t.Errorf("a second verb = %v, want %v", err, ErrGone)
			}
			if st := r.s.Stats(); st.InFlight != 0 || st.HandedBack != 1 {
				t.Errorf("%d in flight, %d handed back, want 0 and 1", st.InFlight, st.HandedBack)
			}
		})
	}
}

func TestSYNOfAFlowHandedBack(t *testing.T) {
	begin := func(t *testing.T) (*rig, *steps) {
		r, s := newSteeredRig(t)
		r.send(syn(flow4, 77))
		if err := r.asked[0].req.HandBack(); err != nil {
			t.Fatalf("HandBack = %v", err)
		}
		s.taken()
		r.writtenBack()
		return r, s
	}
	t.Run("again goes the same way, unasked", func(t *testing.T) {
		r, s := begin(t)
		r.send(syn(flow4, 77))
		s.want(t, "hand back "+flow4.Src.String())
		if n := len(r.writtenBack()); n != 1 || len(r.asked) != 1 {
			t.Errorf("%d packets written and %d requests, want 1 and 1", n, len(r.asked))
		}
	})
	t.Run("with another number is another flow", func(t *testing.T) {
		r, s := begin(t)
		r.send(syn(flow4, 99999))
		s.want(t)
		if len(r.asked) != 2 {
			t.Errorf("%d requests, want 2", len(r.asked))
		}
	})
	t.Run("that has ended is another flow", func(t *testing.T) {
		r, s := begin(t)
		r.s.Ended(flow4)
		r.send(syn(flow4, 77))
		s.want(t)
		if len(r.asked) != 2 {
			t.Errorf("%d requests, want 2", len(r.asked))
		}
	})
}

func TestHandBackThatFailsLeavesTheRequest(t *testing.T) {
	r, s := newSteeredRig(t)
	s.fail = errors.New("no room")
	r.send(syn(flow4, 1))
	if err := r.asked[0].req.HandBack(); !errors.Is(err, s.fail) {
		t.Errorf("HandBack = %v, want %v", err, s.fail)
	}
	if list := r.writtenBack(); len(list) > 0 {
		t.Errorf("written: %v", list)
	}
	r.asked[0].req.Reset()
	if p, _ := r.parsed(r.one()); p.flags != flagRST|flagACK {
		t.Errorf("answered with flags %#x, want RST|ACK", p.flags)
	}
}

// listener is what the Steerer's listener accepts for a flow.
func listener(f Flow) (ours, application loop.Conn) { return loop.PipeAddrs(f.Dst, f.Src) }

func TestAcceptByTheListener(t *testing.T) {
	r, s := newSteeredRig(t)
	r.send(syn(flow6, 5))
	o := r.accept(context.Background(), r.asked[0].req)
	r.m.Settle()
	s.want(t, "accept "+flow6.Src.String())
	if n := len(r.writtenBack()); n != 1 || o.ready() {
		t.Fatalf("%d packets written, Accept has returned: %v; want 1 and false", n, o.ready())
	}
	r.send(syn(flow6, 5)) // the first may be lost
	s.want(t, "accept "+flow6.Src.String())
	if n := len(r.writtenBack()); n != 1 {
		t.Errorf("%d packets written for another SYN, want 1", n)
	}
	ours, app := listener(flow6)
	defer app.Close()
	if !r.s.Accepted(ours) {
		t.Fatal("Accepted = false")
	}
	r.until("Accept returns", o.ready)
	if o.err != nil || o.conn != ours {
		t.Errorf("Accept = %v, %v, want the listener's connection", o.conn, o.err)
	}
	if st := r.s.Stats(); st.InFlight != 0 || st.Accepted != 1 {
		t.Errorf("%d in flight, %d accepted, want 0 and 1", st.InFlight, st.Accepted)
	}
	if r.s.Accepted(ours) {
		t.Error("Accepted takes a connection that nobody waits for")
	}
	_ = ours.Close()
}

func TestListenerAcceptsForNobody(t *testing.T) {
	r, _ := newSteeredRig(t)
	ours, app := listener(flow4)
	defer app.Close()
	defer ours.Close()
	if r.s.Accepted(ours) {
		t.Error("without a request: taken")
	}
	r.send(syn(flow4, 1))
	if r.s.Accepted(ours) {
		t.Error("before Accept was called: taken")
	}
	r.asked[0].req.Reset()
}

func TestAcceptByTheListenerEnds(t *testing.T) {
	t.Run("with its set-up", func(t *testing.T) {
		r, s := newSteeredRig(t)
		r.send(syn(flow4, 1))
		ctx, cancel := context.WithCancel(context.Background())
		o := r.accept(ctx, r.asked[0].req)
		r.m.Settle()
		s.taken()
		cancel()
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, context.Canceled) {
			t.Errorf("Accept = %v, want %v", o.err, context.Canceled)
		}
		s.want(t, "forget "+flow4.Src.String())
	})
	t.Run("when the application goes", func(t *testing.T) {
		r, s := newSteeredRig(t)
		r.send(syn(flow4, 1))
		o := r.accept(context.Background(), r.asked[0].req)
		r.m.Settle()
		s.taken()
		r.send(syn(flow4, 5000)) // another connect from the port
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, ErrGone) {
			t.Errorf("Accept = %v, want %v", o.err, ErrGone)
		}
		s.want(t, "forget "+flow4.Src.String())
		r.asked[1].req.Drop()
	})
	t.Run("when nothing comes of it", func(t *testing.T) {
		r, _ := newSteeredRig(t)
		r.send(syn(flow4, 1))
		o := r.accept(context.Background(), r.asked[0].req)
		r.m.Settle()
		r.m.Advance(maxAttempt)
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, ErrGone) {
			t.Errorf("Accept = %v, want %v", o.err, ErrGone)
		}
	})
	t.Run("when the kernel refuses", func(t *testing.T) {
		r, s := newSteeredRig(t)
		s.fail = errors.New("no room")
		r.send(syn(flow4, 1))
		o := r.accept(context.Background(), r.asked[0].req)
		r.until("Accept returns", o.ready)
		if !errors.Is(o.err, s.fail) {
			t.Errorf("Accept = %v, want %v", o.err, s.fail)
		}
	})
}

// read gives the table a SYN at once, as the reader does.
func (r *rig) read(b []byte) {
	var p packet
	p.parse(b, len(b))
	r.s.table.syn(&p, make([]byte, headroom), b)
}

// The set-up of a flow is slow; meanwhile the application connects again from the same port, and that is decided about otherwise.
func TestLateDecisionLeavesThatOfALaterRequest(t *testing.T) {
	handBack := func(r *rig, i int) error { return r.asked[i].req.HandBack() }
	accept := func(r *rig, i int) error {
		o := r.accept(context.Background(), r.asked[i].req)
		r.m.Settle()
		if o.ready() {
			return o.err
		}
		return nil
	}
	tests := []struct {
		name          string
		first, second func(*rig, int) error
		want          string // stands in the end
	}{
		{"to the network, after one to the listener", handBack, accept, "accept"},
		{"to the listener, after one to the network", accept, handBack, "hand back"},
	}
	for _, tt := range tests {
		t.Run(tt.name+", before it is made", func(t *testing.T) {
			r, s := newSteeredRig(t)
			r.send(syn(flow4, 1))
			r.send(syn(flow4, 5000))
			if err := tt.second(r, 1); err != nil {
				t.Fatal(err)
			}
			if err := tt.first(r, 0); !errors.Is(err, ErrGone) {
				t.Errorf("the first = %v, want %v", err, ErrGone)
			}
			if got := s.standing[flow4]; got != tt.want {
				t.Errorf("%q stands, want %q; steps: %v", got, tt.want, s.taken())
			}
		})
		t.Run(tt.name+", while it is made", func(t *testing.T) {
			r, s := newSteeredRig(t)
			r.send(syn(flow4, 1))
			second := make(chan error, 1)
			var once sync.Once
			s.during = func(string) {
				once.Do(func() {
					r.read(syn(flow4, 5000))
					go func() { second <- tt.second(r, 1) }()
					time.Sleep(10 * time.Millisecond) // more than it takes, if it does not wait
				})
			}
			if err := tt.first(r, 0); !errors.Is(err, ErrGone) {
				t.Errorf("the first = %v, want %v", err, ErrGone)
			}
			if err := <-second; err != nil {
				t.Errorf("the second = %v", err)
			}
			if got := s.standing[flow4]; got != tt.want {
				t.Errorf("%q stands, want %q; steps: %v", got, tt.want, s.taken())
			}
		})
	}
}

// The Accept of a request that was given up returns only after a later one of the flow was handed back.
func TestEndOfARequestLeavesTheDecisionAboutALaterOne(t *testing.T) {
	r, s := newSteeredRig(t)
	r.send(syn(flow4, 1))
	first := r.asked[0].req.(*request)
	o := r.accept(context.Background(), first)
	r.m.Settle()
	wake := first.wake
	first.wake = func() {} // it is slow
	r.send(syn(flow4, 5000))
	if err := r.asked[1].req.HandBack(); err != nil {
		t.Fatal(err)
	}
	wake()
	r.until("Accept returns", o.ready)
	s.want(t, "accept "+flow4.Src.String(), "hand back "+flow4.Src.String())
}

// A SYN that was sent again while the upstream was slow may be read after the flow was accepted: it is no new flow.
func TestLateSYNOfAnAcceptedFlow(t *testing.T) {
	accept := func(t *testing.T, after time.Duration) *rig {
		r, _ := newSteeredRig(t)
		r.send(syn(flow4, 1))
		r.m.Advance(after)
		o := r.accept(context.Background(), r.asked[0].req)
		r.m.Settle()
		ours, app := listener(flow4)
		t.Cleanup(func() { ours.Close(); app.Close() })
		if !r.s.Accepted(ours) {
			t.Fatal("Accepted = false")
		}
		r.until("Accept returns", o.ready)
		return r
	}
	tests := []struct {
		name         string
		after, later time.Duration // the acceptance, and the SYN after it
		seq          uint32
		want         int // requests
	}{
		{"is swallowed", retransmitted, time.Millisecond, 1, 1},
		{"with another number is a new flow", retransmitted, time.Millisecond, 2, 2},
		{"after a while is a new flow", retransmitted, queued, 1, 2},
		{"of one that was fast cannot be", time.Millisecond, time.Millisecond, 1, 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := accept(t, tt.after)
			r.m.Advance(tt.later)
			r.send(syn(flow4, tt.seq))
			if len(r.asked) != tt.want {
				t.Errorf("%d requests, want %d", len(r.asked), tt.want)
			}
			for _, a := range r.asked {
				a.req.Drop()
			}
		})
	}
}

func TestAcceptedFlowsThatAreRememberedAreBounded(t *testing.T) {
	var k steered
	now := epoch
	for i := range 2 * maxAnswered {
		f := flow4
		f.Dst = ap(fmt.Sprintf("10.9.%d.%d:80", i>>8, i&255))
		k.remember(&request{flow: f}, now)
	}
	if len(k.answered) != maxAnswered {
		t.Errorf("%d are remembered, want %d", len(k.answered), maxAnswered)
	}
	k.remember(&request{flow: flow6}, now.Add(queued))
	if _, ok := k.answered[flow6]; !ok || len(k.answered) != 1 {
		t.Errorf("once all are old %d are remembered, want the one new", len(k.answered))
	}
}
