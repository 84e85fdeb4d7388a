package proxy

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/workload"
)

// hosted makes the endpoint of web one that has only a hostname.
func hosted(m *mesh) {
	m.server.Addresses, m.server.Hostname = nil, "db.example.com"
}

// dns is the counter of hostnames that were looked for, by hostname.
func (b *bench) dns(t *testing.T) map[string]float64 {
	t.Helper()
	got := make(map[string]float64)
	families, err := b.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "istio_on_demand_dns_total" {
			continue
		}
		for _, x := range f.GetMetric() {
			for _, l := range x.GetLabel() {
				if l.GetName() == "hostname" {
					got[l.GetValue()] += x.GetCounter().GetValue()
				}
			}
		}
	}
	return got
}

func TestHostnamesAreResolved(t *testing.T) {
	both := []netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("192.0.2.1")}
	tests := []struct {
		name   string
		addrs  []netip.Addr
		change func(m *mesh)
		target string
		want   string // what is connected to, and with which authority
	}{
		{"DP-54 the family of the virtual address", both, nil, "10.96.0.10:80", "192.0.2.1:15008 to 192.0.2.1:8080"},
		{"DP-54 outside HBONE", both, func(m *mesh) { m.server.Protocol = workload.ProtocolTCP }, "10.96.0.10:80", "dial 192.0.2.1:8080"},
		{"the other family if there is no other", both[:1], nil, "10.96.0.10:80", "[2001:db8::1]:15008 to [2001:db8::1]:8080"},
		{"an IPv6 virtual address", both, func(m *mesh) { m.web.VIPs = append(m.web.VIPs, vip("fd00:96::a")) }, "[fd00:96::a]:80", "[2001:db8::1]:15008 to [2001:db8::1]:8080"},
		{"addresses that the service does not take", both[:1], func(m *mesh) {
			m.server.Addresses, m.web.IPFamilies = addrs("10.244.1.7"), workload.FamilyIPv6
		}, "10.96.0.10:80", "[2001:db8::1]:15008 to [2001:db8::1]:8080"},
		{"a waypoint", both, func(m *mesh) {
			m.server.Addresses, m.server.Hostname = addrs("10.244.1.7"), ""
			m.wp.Addresses, m.wp.Hostname = nil, "db.example.com"
			m.web.Waypoint = byName("wp.default.svc.cluster.local")
		}, "10.96.0.10:80", "192.0.2.1:15008 to 10.96.0.10:80"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			hosted(m)
			if tt.change != nil {
				tt.change(m)
			}
			b := newBench(t, m)
			b.names["db.example.com"] = tt.addrs
			for range 2 {
				req := request(tt.target)
				b.ServeTCP(t.Context(), req)
				b.Settle()
				if req.answer != "accepted" {
					t.Fatalf("answer %q; log %s", req.answer, b.lines(t))
				}
				req.app.Reset()
				b.Settle()
			}
			got := ""
			if len(b.tunnel.targets) > 0 {
				got = b.tunnel.targets[0].NextHop.String() + " to " + b.tunnel.targets[0].Authority
			} else {
				got = b.net.dials[0]
			}
			if got != tt.want {
				t.Errorf("%s goes to %q, want %q", tt.target, got, tt.want)
			}
			if diff := cmp.Diff(map[string]float64{"db.example.com": 2}, b.dns(t)); diff != "" {
				t.Errorf("names looked for in two flows (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHostnamesThatAreNotResolved(t *testing.T) {
	t.Run("DP-55", func(t *testing.T) {
		m := newMesh()
		hosted(m)
		b := newBench(t, m)
		req := request("10.96.0.10:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		const want = "connection failed\tsrc.addr=10.244.0.5:40000 dst.addr=10.96.0.10:80 direction=\"outbound\" error=\"no ip addresses were resolved for workload: Kubernetes//Pod/default/server\"\n"
		if got := b.lines(t); req.answer != "RST" || !strings.HasSuffix(got, want) || strings.Count(got, "\n") != 1 {
			t.Errorf("answer %q, access log\n%swant RST and\n%s", req.answer, got, want)
		}
	})
	t.Run("DP-55 an answer without addresses", func(t *testing.T) {
		m := newMesh()
		hosted(m)
		b := newBench(t, m)
		b.names["db.example.com"] = nil
		req := request("10.96.0.10:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		const want = `error="ip addresses were resolved for workload Kubernetes//Pod/default/server, but valid dns response had no A/AAAA records"`
		if got := b.lines(t); req.answer != "RST" || !strings.Contains(got, want) {
			t.Errorf("answer %q, access log\n%swant RST and %s", req.answer, got, want)
		}
	})
	t.Run("another endpoint is taken", func(t *testing.T) {
		m := newMesh()
		hosted(m)
		second := pod0("second", "10.244.1.8")
		second.Services[webKey] = nil
		m.more.Workloads = append(m.more.Workloads, second)
		b := newBench(t, m)
		for range 8 { // whichever is picked first
			req := request("10.96.0.10:80")
			b.ServeTCP(t.Context(), req)
			b.Settle()
			if req.answer != "accepted" {
				t.Fatalf("answer %q", req.answer)
			}
			req.app.Reset()
			b.Settle()
		}
		if got := b.lines(t); strings.Contains(got, "error") {
			t.Errorf("access log\n%s", got)
		}
	})
	t.Run("no answer within the flow's time", func(t *testing.T) {
		m := newMesh()
		hosted(m)
		m.server.Hostname = "never"
		b := newBench(t, m)
		req := request("10.96.0.10:80")
		b.ServeTCP(t.Context(), req)
		b.Advance(39 * time.Second)
		if req.answer != "" {
			t.Fatalf("answer %q before its time is over", req.answer)
		}
		b.Advance(2 * time.Second)
		if req.answer != "nothing" {
			t.Errorf("answer %q, want none", req.answer)
		}
	})
	t.Run("the pod's own proxy port", func(t *testing.T) {
		m := newMesh()
		hosted(m)
		m.server.Protocol, m.web.Ports[80] = workload.ProtocolTCP, 15001
		b := newBench(t, m)
		b.names["db.example.com"] = m.client.Addresses
		req := request("10.96.0.10:80")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		if got := b.lines(t); req.answer != "RST" || !strings.Contains(got, "attempted recursive call to ourselves") {
			t.Errorf("answer %q, access log\n%s", req.answer, got)
		}
	})
}
