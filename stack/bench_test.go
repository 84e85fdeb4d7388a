package stack

import (
	"context"
	"net"
	"testing"
	"time"
)

// BenchmarkBulk moves data between the two netstacks of a pair, one of which is the test's: half of the time is its.
func BenchmarkBulk(b *testing.B) {
	for kind := range devices {
		for _, dir := range []string{"up", "down"} {
			b.Run("device="+kind+"/direction="+dir, func(b *testing.B) {
				l := newLive(b, kind)
				end, app := l.pair(flow4)
				defer end.Close()
				defer app.Close()
				var from, to net.Conn = app, end
				if dir == "down" {
					from, to = end, app
				}
				from.SetDeadline(time.Time{})
				to.SetDeadline(time.Time{})
				bulk(b, from, to)
			})
		}
	}
}

// BenchmarkRefuse is the cost of an attempt that is answered by RST.
func BenchmarkRefuse(b *testing.B) {
	r := newRig(b, nil)
	r.s.cfg.Manual = false
	r.s.cfg.Handler = refuser{}
	p, vnet := syn(flow4, 1), make([]byte, headroom)
	b.ReportAllocs()
	for b.Loop() {
		r.s.receive(vnet, p)
		if r.s.count.txPackets.Load()%256 == 0 {
			r.received()
		}
	}
}

// BenchmarkParse is the cost of a packet's headers.
func BenchmarkParse(b *testing.B) {
	for name, data := range map[string][]byte{"family=v4": syn(flow4, 1), "family=v6": syn(flow6, 1)} {
		b.Run(name, func(b *testing.B) {
			var p packet
			b.ReportAllocs()
			for b.Loop() {
				p.parse(data, len(data))
			}
		})
	}
}

type refuser struct{}

func (refuser) ServeTCP(_ context.Context, req TCPRequest) { req.Reset() }
func (refuser) ServeUDP(context.Context, UDPConn)          {}
