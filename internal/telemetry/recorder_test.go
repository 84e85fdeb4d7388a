package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/workload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2026, 8, 22, 9, 15, 2, 101_233_000, time.UTC)

// A lab is a Recorder on a clock that is moved by hand.
type lab struct {
	*Recorder
	mu  sync.Mutex
	now time.Time
	out bytes.Buffer
}

func newLab(t *testing.T, cfg Config) *lab {
	t.Helper()
	l := &lab{now: start}
	cfg.Now = func() time.Time { l.mu.Lock(); defer l.mu.Unlock(); return l.now }
	cfg.Log = slog.New(slog.DiscardHandler)
	cfg.Access = &l.out
	r, err := NewRecorder(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l.Recorder = r
	return l
}

func (l *lab) move(d time.Duration) { l.mu.Lock(); l.now = l.now.Add(d); l.mu.Unlock() }

// written ends the writer and returns what it wrote.
func (l *lab) written(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Run(ctx); err != nil {
		t.Fatal(err)
	}
	return l.out.String()
}

func outbound() Facts {
	cart := &workload.Workload{Name: "cart-6d9f7c-x2x7p", Namespace: "shop", ServiceAccount: "cart", TrustDomain: "cluster.local", ClusterID: "Kubernetes"}
	orders := &workload.Workload{Name: "orders-58c9-9q4ts", Namespace: "shop", ServiceAccount: "orders", TrustDomain: "cluster.local", ClusterID: "Kubernetes"}
	return Facts{
		Direction: Outbound, Protocol: HBONE, Src: netip.MustParseAddrPort("10.244.2.9:41234"), Dst: netip.MustParseAddrPort("10.244.1.7:15008"),
		OriginalDst: netip.MustParseAddrPort("10.96.0.7:80"), HBONEAddr: "10.244.1.7:8080", Service: "orders.shop.svc.cluster.local",
		Source: cart, Destination: orders, SrcIdentity: cart.Identity(), DstIdentity: orders.Identity(),
	}
}

const outboundFields = `src.addr=10.244.2.9:41234 src.workload="cart-6d9f7c-x2x7p" src.namespace="shop" src.identity="spiffe://cluster.local/ns/shop/sa/cart" src.cluster="Kubernetes" ` +
	`dst.addr=10.244.1.7:15008 dst.hbone_addr=10.244.1.7:8080 dst.service="orders.shop.svc.cluster.local" dst.workload="orders-58c9-9q4ts" dst.namespace="shop" ` +
	`dst.identity="spiffe://cluster.local/ns/shop/sa/orders" dst.cluster="Kubernetes" direction="outbound"`

func TestLinesAreThoseOfZtunnel(t *testing.T) {
	l := newLab(t, Config{Opened: true})
	c := l.Open(outbound(), nil)
	c.Received.Add(11)
	c.Sent.Add(22)
	l.move(3 * time.Millisecond)
	c.Finish(nil)
	c.Finish(errors.New("only the first end counts"))
	l.Fail(Facts{Src: netip.MustParseAddrPort("10.244.2.9:41310"), OriginalDst: netip.MustParseAddrPort("10.96.0.77:80")}, errors.New("no healthy upstream: 10.96.0.77:80"))
	want := "2026-08-22T09:15:02.101233Z\tdebug\taccess\tconnection opened\t" + outboundFields + "\n" +
		"2026-08-22T09:15:02.104233Z\tinfo\taccess\tconnection complete\t" + outboundFields + ` bytes_sent=11 bytes_recv=22 duration="3ms"` + "\n" +
		"2026-08-22T09:15:02.104233Z\twarn\taccess\tconnection failed\t" + `src.addr=10.244.2.9:41310 dst.addr=10.96.0.77:80 direction="outbound" error="no healthy upstream: 10.96.0.77:80"` + "\n"
	if diff := cmp.Diff(want, l.written(t)); diff != "" {
		t.Errorf("access log (-want +got):\n%s", diff)
	}
	if got, want := l.Stats(), (Stats{Opened: 1, Closed: 1, Failed: 1}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
}

func TestInboundCountsFromTheApplicationsSide(t *testing.T) {
	l := newLab(t, Config{JSON: true})
	f := outbound()
	f.Direction = Inbound
	c := l.Open(f, nil)
	c.Received.Add(11)
	c.Sent.Add(22)
	c.Finish(errors.New("a \"quoted\"\nerror"))
	var got map[string]any
	if err := json.Unmarshal([]byte(l.written(t)), &got); err != nil {
		t.Fatal(err)
	}
	for k, want := range map[string]any{
		"level": "error", "scope": "access", "message": "connection complete", "bytes_sent": 22.0, "bytes_recv": 11.0,
		"direction": "inbound", "error": "a \"quoted\"\nerror", "dst.hbone_addr": "10.244.1.7:8080",
	} {
		if got[k] != want {
			t.Errorf("%s is %v, want %v", k, got[k], want)
		}
	}
}

func TestLinesHaveTheFieldsThatAreAskedFor(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fields []string
		err    error
		want   string // the end of the line
	}{
		{"none", nil, nil, ` duration="0ms"`},
		{"order", []string{"flow_id", "response_flags"}, nil, ` duration="0ms" flow_id=1 response_flags="-"`},
		{"after the error", []string{"response_flags"}, denied{}, ` error="denied" response_flags="DENY"`},
		{"all", AccessFields(), nil, ` response_flags="-" trace_id="abc" flow_id=1 tunnel.local_addr=10.0.0.1:15008 policy="shop/allow"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t, Config{Fields: tt.fields})
			f := outbound()
			f.TraceID, f.Policy, f.TunnelLocal = "abc", "shop/allow", netip.MustParseAddrPort("10.0.0.1:15008")
			l.Open(f, nil).Finish(tt.err)
			if got := l.written(t); !strings.HasSuffix(got, tt.want+"\n") {
				t.Errorf("line %q does not end with %q", got, tt.want)
			}
		})
	}
	l := newLab(t, Config{Fields: AccessFields()})
	l.Open(outbound(), nil).Finish(nil)
	if got := l.written(t); !strings.HasSuffix(got, ` response_flags="-" flow_id=1`+"\n") {
		t.Errorf("line %q has fields of which nothing is known", got)
	}
}

func TestTextOfPeersCannotBreakALine(t *testing.T) {
	l := newLab(t, Config{})
	f := outbound()
	f.HBONEAddr = "a b\nc:1"
	l.Open(f, nil).Finish(errors.New("x\" level=\"y\n\x1b[2J\u202e"))
	got := l.written(t)
	if strings.Count(got, "\n") != 1 || strings.ContainsAny(got, "\x1b\u202e") {
		t.Errorf("line %q", got)
	}
	if want := `error="x\" level=\"y\n\u{1b}[2J\u{202e}"`; !strings.Contains(got, want) {
		t.Errorf("line %q lacks %q", got, want)
	}
}

func TestFullQueueDropsOrdinaryLinesFirst(t *testing.T) {
	l := newLab(t, Config{QueueLines: 8})
	for range 20 {
		l.Open(outbound(), nil).Finish(nil)
	}
	for range 4 {
		l.Open(outbound(), nil).Finish(errors.New("denied"))
	}
	got := l.written(t)
	if n := strings.Count(got, "\tinfo\t"); n != 6 {
		t.Errorf("%d ordinary lines, want 6", n)
	}
	if n := strings.Count(got, "denied"); n != 2 {
		t.Errorf("%d lines of errors, want 2", n)
	}
	if n := l.Stats().LinesDropped; n != 16 {
		t.Errorf("%d lines counted as dropped, want 16", n)
	}
}

func TestCloseReachesWhoeverMovesTheBytes(t *testing.T) {
	l := newLab(t, Config{})
	why := errors.New("connection closed due to policy change")
	var setUp, relay []error
	c := l.Open(outbound(), func(err error) { setUp = append(setUp, err) })
	c.SetCloser(func(err error) { relay = append(relay, err) })
	l.Each(func(c *Conn) { c.Close(why) })
	c.Close(errors.New("the first cause wins"))
	if len(setUp) != 0 || len(relay) != 1 || relay[0] != why {
		t.Errorf("closers called with %v and %v, want the second with %v", setUp, relay, why)
	}
	late := l.Open(outbound(), nil)
	late.Close(why)
	late.SetCloser(func(err error) { relay = append(relay, err) })
	if len(relay) != 2 {
		t.Error("a closer that is set after Close does not run")
	}
	c.Finish(nil)
	late.Finish(nil)
	if got := l.written(t); strings.Count(got, why.Error()) != 2 {
		t.Errorf("lines do not say why:\n%s", got)
	}
	if n := l.Stats().Open; n != 0 {
		t.Errorf("%d connections open, want 0", n)
	}
}
