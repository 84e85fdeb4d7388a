package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"ztun.dev/ztun/internal/workload"
)

// goldenCase is a connection and both forms of its line.
type goldenCase struct {
	name       string
	facts      func() Facts
	early      bool
	recv, sent uint64
	took       time.Duration
	err        error
	text, json string // after the time
}

func inbound() Facts {
	f := outbound()
	f.Direction, f.Src = Inbound, netip.MustParseAddrPort("10.244.2.9:50312")
	return f
}

// The lines of the specification's examples, and their JSON form, byte for byte.
func TestGoldenLines(t *testing.T) {
	const both = `src.workload="cart-6d9f7c-x2x7p" src.namespace="shop" src.identity="spiffe://cluster.local/ns/shop/sa/cart" src.cluster="Kubernetes" `
	const orders = `dst.workload="orders-58c9-9q4ts" dst.namespace="shop" dst.identity="spiffe://cluster.local/ns/shop/sa/orders" dst.cluster="Kubernetes" `
	const jsonBoth = `"src.workload":"cart-6d9f7c-x2x7p","src.namespace":"shop","src.identity":"spiffe://cluster.local/ns/shop/sa/cart","src.cluster":"Kubernetes",`
	const jsonOrders = `"dst.workload":"orders-58c9-9q4ts","dst.namespace":"shop","dst.identity":"spiffe://cluster.local/ns/shop/sa/orders","dst.cluster":"Kubernetes",`
	tests := []goldenCase{
		{
			"FP-138 outbound", outbound, false, 11, 22, 3 * time.Millisecond, nil,
			"info\taccess\tconnection complete\tsrc.addr=10.244.2.9:41234 " + both + `dst.addr=10.244.1.7:15008 dst.hbone_addr=10.244.1.7:8080 dst.service="orders.shop.svc.cluster.local" ` + orders + `direction="outbound" bytes_sent=11 bytes_recv=22 duration="3ms"`,
			`"scope":"access","message":"connection complete","src.addr":"10.244.2.9:41234",` + jsonBoth + `"dst.addr":"10.244.1.7:15008","dst.hbone_addr":"10.244.1.7:8080","dst.service":"orders.shop.svc.cluster.local",` + jsonOrders + `"direction":"outbound","bytes_sent":11,"bytes_recv":22,"duration":"3ms"}`,
		},
		{
			"FP-138 inbound", inbound, false, 11, 22, 2 * time.Millisecond, nil,
			"info\taccess\tconnection complete\tsrc.addr=10.244.2.9:50312 " + both + `dst.addr=10.244.1.7:15008 dst.hbone_addr=10.244.1.7:8080 dst.service="orders.shop.svc.cluster.local" ` + orders + `direction="inbound" bytes_sent=22 bytes_recv=11 duration="2ms"`,
			`"scope":"access","message":"connection complete","src.addr":"10.244.2.9:50312",` + jsonBoth + `"dst.addr":"10.244.1.7:15008","dst.hbone_addr":"10.244.1.7:8080","dst.service":"orders.shop.svc.cluster.local",` + jsonOrders + `"direction":"inbound","bytes_sent":22,"bytes_recv":11,"duration":"2ms"}`,
		},
		{
			"denied in plaintext", func() Facts {
				f := inbound()
				f.Protocol, f.Src, f.Dst, f.HBONEAddr = TCP, netip.MustParseAddrPort("10.244.9.1:33100"), netip.MustParseAddrPort("10.244.1.7:8080"), ""
				f.Source, f.SrcIdentity, f.DstIdentity = nil, workload.Identity{}, workload.Identity{}
				return f
			}, false, 0, 0, 0, errors.New("connection closed due to policy rejection: explicitly denied by: istio-system/istio_converted_static_strict"),
			"error\taccess\tconnection complete\t" + `src.addr=10.244.9.1:33100 dst.addr=10.244.1.7:8080 dst.service="orders.shop.svc.cluster.local" dst.workload="orders-58c9-9q4ts" dst.namespace="shop" dst.cluster="Kubernetes" direction="inbound" bytes_sent=0 bytes_recv=0 duration="0ms" error="connection closed due to policy rejection: explicitly denied by: istio-system/istio_converted_static_strict"`,
			`"scope":"access","message":"connection complete","src.addr":"10.244.9.1:33100","dst.addr":"10.244.1.7:8080","dst.service":"orders.shop.svc.cluster.local","dst.workload":"orders-58c9-9q4ts","dst.namespace":"shop","dst.cluster":"Kubernetes","direction":"inbound","bytes_sent":0,"bytes_recv":0,"duration":"0ms","error":"connection closed due to policy rejection: explicitly denied by: istio-system/istio_converted_static_strict"}`,
		},
		{
			"upstream without an answer, of no service", func() Facts {
				f := outbound()
				f.Service, f.Src = "", netip.MustParseAddrPort("10.244.2.9:41300")
				return f
			}, false, 0, 0, 10_001 * time.Millisecond, errors.New("connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed"),
			"error\taccess\tconnection complete\tsrc.addr=10.244.2.9:41300 " + both + `dst.addr=10.244.1.7:15008 dst.hbone_addr=10.244.1.7:8080 ` + orders + `direction="outbound" bytes_sent=0 bytes_recv=0 duration="10001ms" error="connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed"`,
			`"scope":"access","message":"connection complete","src.addr":"10.244.2.9:41300",` + jsonBoth + `"dst.addr":"10.244.1.7:15008","dst.hbone_addr":"10.244.1.7:8080",` + jsonOrders + `"direction":"outbound","bytes_sent":0,"bytes_recv":0,"duration":"10001ms","error":"connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed"}`,
		},
		{
			"early", func() Facts {
				return Facts{Src: netip.MustParseAddrPort("10.244.2.9:41310"), OriginalDst: netip.MustParseAddrPort("10.96.0.77:80")}
			}, true, 0, 0, 0, errors.New("no healthy upstream: 10.96.0.77:80"),
			"warn\taccess\tconnection failed\t" + `src.addr=10.244.2.9:41310 dst.addr=10.96.0.77:80 direction="outbound" error="no healthy upstream: 10.96.0.77:80"`,
			`"scope":"access","message":"connection failed","src.addr":"10.244.2.9:41310","dst.addr":"10.96.0.77:80","direction":"outbound","error":"no healthy upstream: 10.96.0.77:80"}`,
		},
		{
			"IPv6, and signs that HTML would have escaped", func() Facts {
				return Facts{Src: netip.MustParseAddrPort("[fd00::1]:1"), OriginalDst: netip.MustParseAddrPort("[fd00::2]:2"), Direction: Inbound}
			}, true, 0, 0, 0, errors.New("a <b> & c"),
			"warn\taccess\tconnection failed\t" + `src.addr=[fd00::1]:1 dst.addr=[fd00::2]:2 direction="inbound" error="a <b> & c"`,
			`"scope":"access","message":"connection failed","src.addr":"[fd00::1]:1","dst.addr":"[fd00::2]:2","direction":"inbound","error":"a <b> & c"}`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, asJSON := range []bool{false, true} {
				l := newLab(t, Config{JSON: asJSON})
				at := func() string { return l.cfg.Now().Format("2006-01-02T15:04:05.000000Z") }
				if tt.early {
					l.Fail(tt.facts(), tt.err)
				} else {
					c := l.Open(tt.facts(), nil)
					c.Received.Add(tt.recv)
					c.Sent.Add(tt.sent)
					l.move(tt.took)
					c.Finish(tt.err)
				}
				want := at() + "\t" + tt.text + "\n"
				if asJSON {
					level, _, _ := strings.Cut(tt.text, "\t")
					want = `{"level":"` + level + `","time":"` + at() + `",` + tt.json + "\n"
				}
				if diff := cmp.Diff(want, l.written(t)); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestTextIsEscapedAsRustDoes(t *testing.T) {
	for in, want := range map[string]string{
		"plain ö 世": `"plain ö 世"`, "\x00\x01\x7f": `"\0\u{1}\u{7f}"`, "\"\\\n\r\t'": `"\"\\\n\r\t'"`, "e\u0301": `"e\u{301}"`, "\u00a0\u200b\u202e": `"\u{a0}\u{200b}\u{202e}"`, "\xff": "\"\ufffd\"",
	} {
		if got := string(appendQuoted(nil, in)); got != want {
			t.Errorf("%q is written as %s, want %s", in, got, want)
		}
	}
}

// fieldsOf reads a line as a log parser does: fields separated by spaces, values bare or in quotes.
func fieldsOf(t *testing.T, line string) map[string]string {
	t.Helper()
	parts := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 5)
	if len(parts) != 5 || strings.Count(line, "\n") != 1 {
		t.Fatalf("no line of five columns: %q", line)
	}
	got := make(map[string]string)
	for rest := parts[4]; rest != ""; rest = strings.TrimPrefix(rest, " ") {
		key, value, ok := strings.Cut(rest, "=")
		if !ok || strings.ContainsAny(key, " \"") {
			t.Fatalf("no field: %q in %q", rest, line)
		}
		if value[:1] != `"` {
			got[key], rest, _ = strings.Cut(value, " ")
			continue
		}
		end := 1
		for ; end < len(value) && value[end] != '"'; end++ {
			if value[end] == '\\' {
				end++
			}
		}
		if end >= len(value) {
			t.Fatalf("a value without an end: %q", value)
		}
		got[key], rest = unquoted(t, value[1:end]), value[end+1:]
	}
	return got
}

func unquoted(t *testing.T, s string) string {
	t.Helper()
	var b strings.Builder
	for len(s) > 0 {
		if s[0] != '\\' {
			b.WriteByte(s[0])
			s = s[1:]
			continue
		}
		switch s[1] {
		case 'n':
			b.WriteByte('\n')
		case 'r':
			b.WriteByte('\r')
		case 't':
			b.WriteByte('\t')
		case '0':
			b.WriteByte(0)
		case 'u':
			end := strings.IndexByte(s, '}')
			n, err := strconv.ParseUint(s[3:end], 16, 32)
			if err != nil {
				t.Fatalf("%q: %v", s, err)
			}
			b.WriteRune(rune(n))
			s = s[end+1:]
			continue
		default:
			b.WriteByte(s[1])
		}
		s = s[2:]
	}
	return b.String()
}

// FP-105: whatever peers say, a line is one line, its fields are those that were meant, and none is long.
func FuzzLine(f *testing.F) {
	f.Add("10.0.0.1:80", "web", "shop", "x", "an error")
	f.Add("a b\nc:1", "\x1b[2J\" dst.identity=\"spiffe://admin", "\\", strings.Repeat("世", 200), "x\" level=\"y\n\u202e")
	f.Fuzz(func(t *testing.T, authority, name, namespace, cluster, text string) {
		facts := inbound()
		facts.Source, facts.HBONEAddr = nil, authority
		facts.Claimed = &workload.Workload{CanonicalName: name, Namespace: namespace, ClusterID: cluster}
		want := make(map[string]string)
		for key, v := range map[string]struct {
			text  string
			limit int
		}{"dst.hbone_addr": {authority, maxHBONE}, "src.workload": {name, maxText}, "src.namespace": {namespace, maxText}, "src.cluster": {cluster, maxText}, "error": {text, maxError}} {
			shown := cut(v.text, v.limit)
			if len(shown) > v.limit+len("…") || len(v.text) <= v.limit && shown != v.text || !strings.HasPrefix(v.text, strings.TrimSuffix(shown, "…")) {
				t.Errorf("%q is shown as %q", v.text, shown)
			}
			if shown != "" {
				want[key] = strings.ToValidUTF8(shown, "\ufffd")
			}
		}
		for _, asJSON := range []bool{false, true} {
			l := newLab(t, Config{JSON: asJSON})
			l.Open(facts, nil).Finish(errors.New(text))
			line := l.written(t)
			if !utf8.ValidString(line) {
				t.Errorf("no UTF-8: %q", line)
			}
			got := make(map[string]string)
			if asJSON {
				fields := make(map[string]any)
				if err := json.Unmarshal([]byte(line), &fields); err != nil || strings.Count(line, "\n") != 1 {
					t.Fatalf("%v: %q", err, line)
				}
				for k, v := range fields {
					got[k] = fmt.Sprint(v)
				}
			} else {
				got = fieldsOf(t, line)
			}
			if got["src.addr"] != "10.244.2.9:50312" || got["direction"] != "inbound" || got["dst.identity"] != "spiffe://cluster.local/ns/shop/sa/orders" {
				t.Errorf("fields %v in %q", got, line)
			}
			for k, v := range want {
				// A run of bytes that are no UTF-8 is one or several U+FFFD, as who replaces them likes.
				if squeeze(got[k]) != squeeze(v) {
					t.Errorf("%s is %q in %q, want %q", k, got[k], line, v)
				}
			}
		}
	})
}

func squeeze(s string) string {
	for strings.Contains(s, "\ufffd\ufffd") {
		s = strings.ReplaceAll(s, "\ufffd\ufffd", "\ufffd")
	}
	return s
}

func TestTextOfPeersIsShownInPart(t *testing.T) {
	t.Run("FP-105", func(t *testing.T) {
		l := newLab(t, Config{})
		f := inbound()
		f.Source = nil
		f.Claimed = &workload.Workload{CanonicalName: strings.Repeat("x", 300), Namespace: "a\" src.identity=\"spiffe://td/ns/a/sa/admin\nnext"}
		l.Open(f, nil).Finish(nil)
		got := fieldsOf(t, l.written(t))
		if want := strings.Repeat("x", 256) + "…"; got["src.workload"] != want {
			t.Errorf("src.workload is %q, want %q", got["src.workload"], want)
		}
		if got["src.identity"] != f.SrcIdentity.String() || got["src.namespace"] != f.Claimed.Namespace {
			t.Errorf("a namespace has become more: %q", got)
		}
	})
}

// Whatever opens, moves and ends, in whatever order: no gauge is below zero, no counter goes back, and what is open is what was opened
// and has not ended.
func TestMetricsAddUp(t *testing.T) {
	t.Run("FP-134", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(13, 4))
		reg := prometheus.NewPedanticRegistry()
		l := newLab(t, Config{Registerer: reg, MaxSeries: 5, QueueLines: 3})
		var open []*Conn
		var received, sent, opened, closed uint64
		before := make(map[string]float64)
		for range 3000 {
			switch rng.IntN(7) {
			case 0, 1:
				f := outbound()
				f.Direction = Direction(rng.IntN(2))
				f.Service = fmt.Sprint("s", rng.IntN(8))
				open = append(open, l.Open(f, nil))
				opened++
			case 2, 3:
				if len(open) > 0 {
					n, m := uint64(rng.IntN(1000)), uint64(rng.IntN(1000))
					c := open[rng.IntN(len(open))]
					c.Received.Add(n)
					c.Sent.Add(m)
					received, sent = received+n, sent+m
				}
			case 4:
				if len(open) > 0 {
					i := rng.IntN(len(open))
					var err error
					if rng.IntN(2) == 0 {
						err = denied{}
					}
					open[i].Finish(err)
					open[i].Finish(nil) // once
					open = append(open[:i], open[i+1:]...)
					closed++
				}
			case 5:
				l.Fail(Facts{Direction: Direction(rng.IntN(2))}, denied{})
			case 6:
				l.move(time.Hour)
			}
			if rng.IntN(20) > 0 {
				continue
			}
			families := scrape(t, reg)
			for name, f := range families {
				for _, m := range f.GetMetric() {
					key := fmt.Sprint(name, m.GetLabel())
					if f.GetType() == dto.MetricType_GAUGE {
						if v := m.GetGauge().GetValue(); v < 0 {
							t.Fatalf("%s is %v", key, v)
						}
						continue
					}
					if v := m.GetCounter().GetValue(); v < before[key] {
						t.Fatalf("%s went from %v to %v", key, before[key], v)
					}
					before[key] = m.GetCounter().GetValue()
				}
			}
			for name, want := range map[string]float64{
				"istio_tcp_connections_opened_total": float64(opened), "istio_tcp_connections_closed_total": float64(closed), "istio_tcp_received_bytes_total": float64(received),
				"istio_tcp_sent_bytes_total": float64(sent), "istio_tcp_sockets_open": float64(len(open)), "ztun_flows_open": float64(len(open)),
			} {
				if got := values(families[name])[""]; got != want {
					t.Fatalf("%s is %v, want %v", name, got, want)
				}
			}
		}
	})
}

func TestOnDemandDNSIsCountedAndBounded(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	l := newLab(t, Config{Registerer: reg, MaxSeries: 3, DropLabels: []string{"source_version"}})
	w := outbound().Source
	described(w)
	for i := range 6 {
		l.OnDemandDNS(w, &workload.Workload{Hostname: fmt.Sprint("h", i%5)})
	}
	f := scrape(t, reg)["istio_on_demand_dns_total"]
	want := map[string]float64{"hostname=h0": 2, "hostname=h1": 1, "hostname=h2": 1, "hostname=other": 2}
	if diff := cmp.Diff(want, values(f, "hostname")); diff != "" {
		t.Errorf("by hostname (-want +got):\n%s", diff)
	}
	got := make(map[string]string)
	for _, x := range f.GetMetric()[0].GetLabel() {
		got[x.GetName()] = x.GetValue()
	}
	labels := map[string]string{
		"hostname": "h0", "source_workload": "cart", "source_canonical_service": "cart-svc", "source_canonical_revision": "v2", "source_workload_namespace": "shop",
		"source_principal": "spiffe://cluster.local/ns/shop/sa/cart", "source_app": "cart-svc", "source_cluster": "Kubernetes",
	}
	if diff := cmp.Diff(labels, got); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
}
