package stack

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// storm answers each request in a goroutine of its own, in one of several ways.
type storm struct {
	wg       sync.WaitGroup
	n        atomic.Int64
	accepted atomic.Int64
}

func (h *storm) ServeUDP(context.Context, UDPConn) {}

func (h *storm) ServeTCP(ctx context.Context, req TCPRequest) {
	n := h.n.Add(1)
	h.wg.Go(func() {
		switch n % 8 {
		case 0:
			req.Reset()
		case 1:
			req.Unreachable(Prohibited)
		case 2:
			ctx, cancel := context.WithTimeout(ctx, time.Duration(n%5)*100*time.Microsecond)
			defer cancel()
			if c, err := req.Accept(ctx); err == nil {
				c.Close()
			}
		case 3:
			req.Drop()
			req.Reset() // too late
		default:
			c, err := req.Accept(ctx)
			if err != nil {
				return
			}
			h.accepted.Add(1)
			if n%2 == 0 {
				c.Close()
			} else {
				c.Reset()
			}
		}
	})
}

// TestStorm opens many connections at once and ends the stack in the midst of them.
func TestStorm(t *testing.T) {
	h := new(storm)
	l := newLive(t, "memory")
	l.s.cfg.Handler = h
	l.s.cfg.MaxInFlight = 20
	var dials sync.WaitGroup
	for i := range 8 {
		dials.Go(func() {
			for j := range 40 {
				f := flow4
				f.Src = netip.AddrPortFrom(f.Src.Addr(), uint16(20000+100*i+j%30))
				ctx, cancel := context.WithTimeout(l.ctx, time.Duration(1+j%20)*time.Millisecond)
				if c, err := l.h.dial(ctx, f); err == nil {
					c.Close()
				}
				cancel()
			}
		})
	}
	dials.Wait()
	if h.accepted.Load() == 0 {
		t.Error("nothing was accepted")
	}
	waitFor(t, "no request is in flight", func() bool { return l.s.Stats().InFlight == 0 })
	h.wg.Wait()

	l.h.mu.Lock()
	l.h.deaf = true // it would answer a SYN-ACK that it knows nothing of with RST
	l.h.mu.Unlock()
	late := make(chan error, 1)
	l.s.cfg.Handler = later(func(ctx context.Context, req TCPRequest) {
		go func() { _, err := req.Accept(ctx); late <- err }()
	})
	l.s.Inject(syn(flowN(1), 1))
	waitFor(t, "a handshake is in progress", func() bool { ep, _ := l.s.find(flowN(1)); return ep != nil })
	l.stop()
	if err := <-late; !errors.Is(err, ErrGone) {
		t.Errorf("Accept at the end of the stack = %v, want %v", err, ErrGone)
	}
}

type later func(context.Context, TCPRequest)

func (f later) ServeTCP(ctx context.Context, req TCPRequest) { f(ctx, req) }
func (f later) ServeUDP(context.Context, UDPConn)            {}
