package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/workload"
)

// status is what a CONNECT was answered with.
func status(t *testing.T, err error) int {
	t.Helper()
	if err == nil {
		return 200
	}
	var se *hbone.StatusError
	if !errors.As(err, &se) {
		t.Fatalf("open: %v", err)
	}
	return se.Code
}

func TestWaypointTakesStreamsForOthers(t *testing.T) {
	const own = "deliver from 10.244.9.9 to 10.244.0.5:80"
	gateway := func(m *mesh) { m.client.Services[m.gateway.Key()] = nil } // the bench's pod is one of the service wp
	tests := []struct {
		name      string
		change    func(*mesh)
		authority string
		dials     string
		status    int
	}{
		{"DP-96 its workload waypoint by address", func(m *mesh) { m.server.Waypoint = byIP("10.244.0.5") }, "10.244.1.7:80", own, 200},
		{"DP-97 by an address of its service", func(m *mesh) {
			gateway(m)
			m.gateway.VIPs = []workload.NetworkAddr{vip("10.96.0.20")}
			m.server.Waypoint = byIP("10.96.0.20")
		}, "10.244.1.7:80", own, 200},
		{"by the name of its service", func(m *mesh) { gateway(m); m.server.Waypoint = byName(m.gateway.Hostname) }, "10.244.1.7:80", own, 200},
		{"while it is not healthy", func(m *mesh) {
			gateway(m)
			m.client.Status = workload.Unhealthy
			m.server.Waypoint = byName(m.gateway.Hostname)
		}, "10.244.1.7:80", own, 200},
		{"DP-98 a service's waypoint", func(m *mesh) { m.web.Waypoint = byIP("10.244.0.5") }, "10.96.0.10:80", own, 200},
		{"one of several of a service", func(m *mesh) {
			m.web.Waypoint = byIP("10.244.2.10")
			m.web.WeightedWaypoints = []workload.WeightedWaypoint{{Destination: *byIP("10.244.2.10"), Weight: 1}, {Destination: *byIP("10.244.0.5"), Weight: 1}}
		}, "10.96.0.10:80", own, 200},
		{"DP-99 its service's waypoint, for the pod", func(m *mesh) { m.web.Waypoint = byIP("10.244.0.5") }, "10.244.1.7:80", "", 400},
		{"DP-99 its pod's waypoint, for the service", func(m *mesh) { m.server.Waypoint = byIP("10.244.0.5") }, "10.96.0.10:80", "", 400},
		{"another's waypoint", func(m *mesh) { m.server.Waypoint = byIP("10.244.2.10") }, "10.244.1.7:80", "", 400},
		{"a waypoint that is not there", func(m *mesh) { m.server.Waypoint = byIP("10.244.7.7") }, "10.244.1.7:80", "", 400},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			tt.change(m)
			p := newPeer(t, m, somebody)
			s, err := p.open(t, tt.authority, hbone.Headers{})
			if got := status(t, err); got != tt.status {
				t.Errorf("status %d, want %d", got, tt.status)
			}
			if got := strings.Join(p.net.dials, "; "); got != tt.dials {
				t.Errorf("connections %q, want %q", got, tt.dials)
			}
			if s != nil {
				s.Ref().Post(func() { s.Reset() })
				p.Settle()
			}
		})
	}
}

// proxied is a PROXY header in words, and what follows it.
func proxied(b []byte) (said, rest string, err error) {
	const fixed = 16
	if len(b) < fixed || !bytes.Equal(b[:12], []byte{13, 10, 13, 10, 0, 13, 10, 'Q', 'U', 'I', 'T', 10}) || b[12] != 0x21 {
		return "", "", fmt.Errorf("no PROXY header: %x", b)
	}
	family, length := b[13], int(binary.BigEndian.Uint16(b[14:]))
	if b = b[fixed:]; len(b) < length {
		return "", "", fmt.Errorf("%d bytes of %d", len(b), length)
	}
	b, rest = b[:length], string(b[length:])
	n := map[byte]int{0x11: 4, 0x21: 16, 0x01: 0}[family]
	switch {
	case n == 0 && family != 0x01, len(b) < 2*n:
		return "", "", fmt.Errorf("family %#x with %d bytes", family, len(b))
	case n == 0:
		said = "unspecified"
	default:
		src, _ := netip.AddrFromSlice(b[:n])
		dst, _ := netip.AddrFromSlice(b[n : 2*n])
		ports := b[2*n:]
		said = fmt.Sprint(netip.AddrPortFrom(src, binary.BigEndian.Uint16(ports)), " -> ", netip.AddrPortFrom(dst, binary.BigEndian.Uint16(ports[2:])))
		b = ports[4:]
	}
	for len(b) >= 3 {
		n := int(binary.BigEndian.Uint16(b[1:]))
		if len(b) < 3+n {
			break
		}
		said += fmt.Sprintf(" %x=%s", b[0], b[3:3+n])
		b = b[3+n:]
	}
	if len(b) > 0 {
		return "", "", fmt.Errorf("rest of the TLVs: %x", b)
	}
	return said, rest, nil
}

func TestApplicationTunnel(t *testing.T) {
	const id = " d0=spiffe://cluster.local/ns/default/sa/somebody"
	tunnel := func(proxy bool, port uint16) func(*mesh) {
		return func(m *mesh) { m.client.AppTunnel = &workload.AppTunnel{PROXY: proxy, Port: port} }
	}
	named := func(change func(*mesh)) func(*mesh) {
		return func(m *mesh) {
			tunnel(true, 15088)(m)
			change(m)
		}
	}
	both := func(m *mesh) { m.web.VIPs = []workload.NetworkAddr{vip("fd00:96::a"), vip("10.96.0.10")} }
	tests := []struct {
		name      string
		change    func(*mesh)
		podAddr   bool
		to        string // the tunnel's address; "": the usual one
		authority string
		forwarded string
		dials     string
		status    int
		header    string // in words; "": none
		line      string
	}{
		{"DP-100 PROXY", tunnel(true, 15088), false, "", "10.10.0.1:80", "", "loopback 127.0.0.1:15088", 200, "10.244.9.9:41000 -> 10.10.0.1:80" + id, "bytes_recv=4"},
		{"DP-100 IPv6", tunnel(true, 15088), false, "[fd00::5]:15008", "[fd00::77]:80", "", "loopback [::1]:15088", 200, "[fd00::9]:41000 -> [fd00::77]:80" + id, ""},
		{"addresses of two families", tunnel(true, 15088), false, "", "[fd00::77]:80", "", "loopback 127.0.0.1:15088", 200, "unspecified" + id, ""},
		{"without a port of its own", tunnel(true, 0), false, "", "10.10.0.1:80", "", "loopback 127.0.0.1:80", 200, "10.244.9.9:41000 -> 10.10.0.1:80" + id, ""},
		{"DP-101 no header, no port", tunnel(false, 0), false, "", "10.10.0.1:80", "", "deliver from 10.244.9.9 to 10.244.0.5:80", 200, "", ""},
		{"no header, a port", tunnel(false, 9000), false, "", "10.10.0.1:80", "", "deliver from 10.244.9.9 to 10.244.0.5:9000", 200, "", ""},
		{"DP-102 by name", named(both), false, "", "web.default.svc.cluster.local:80", "", "loopback 127.0.0.1:15088", 200, "10.244.9.9:41000 -> 10.96.0.10:80" + id + " d1=web.default.svc.cluster.local", `dst.service="web.default.svc.cluster.local"`},
		{"by name, IPv6 of our network before IPv4 of another", named(func(m *mesh) {
			m.web.VIPs = []workload.NetworkAddr{{Network: "other", Addr: netip.MustParseAddr("10.96.0.10")}, vip("fd00:96::a")}
		}), false, "", "web.default.svc.cluster.local:80", "", "loopback 127.0.0.1:15088", 200, "unspecified" + id + " d1=web.default.svc.cluster.local", ""},
		{"by name, no address", named(func(m *mesh) { m.web.VIPs = nil }), false, "", "web.default.svc.cluster.local:80", "", "", 503, "", "requested service web.default.svc.cluster.local found, but has no IP addresses"},
		{"DP-103 on the pod's address", tunnel(true, 15088), true, "", "10.10.0.1:80", "", "deliver from 10.244.9.9 to 10.244.0.5:15088", 200, "10.244.9.9:41000 -> 10.10.0.1:80" + id, ""},
		{"a service that the peer names and the address has", tunnel(true, 15088), false, "", "10.96.0.10:80", "for=x;host=web.default.svc.cluster.local", "loopback 127.0.0.1:15088", 200, "10.244.9.9:41000 -> 10.96.0.10:80" + id + " d1=web.default.svc.cluster.local", ""},
		{"a service that the peer names and the workload serves", tunnel(true, 15088), false, "", "10.244.1.7:8080", "for=x;host=web.default.svc.cluster.local", "loopback 127.0.0.1:15088", 200, "10.244.9.9:41000 -> 10.244.1.7:8080" + id + " d1=web.default.svc.cluster.local", ""},
		{"a service that the peer names and that is another's", tunnel(true, 15088), false, "", "10.96.0.10:80", "for=x;host=wp.default.svc.cluster.local", "loopback 127.0.0.1:15088", 200, "10.244.9.9:41000 -> 10.96.0.10:80" + id, ""},
		{"a tunnel that leads back", tunnel(true, 15008), false, "", "10.10.0.1:80", "", "", 503, "", "attempted recursive call to ourselves"},
		{"policy sees the tunnel's port", named(func(m *mesh) {
			p := denies("d", "", workload.ScopePolicyGlobal)
			p.Groups = []workload.Group{{{{DestinationPorts: []uint16{15088}, DestinationIPs: []netip.Prefix{netip.MustParsePrefix("10.244.0.5/32")}}}}}
			m.more.Policies = []*workload.Policy{p}
		}), false, "", "10.10.0.1:80", "", "", 401, "", "explicitly denied by: default/d"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh()
			tt.change(m)
			p := newPeer(t, m, somebody)
			p.cfg.AppTunnelOnPodAddress = tt.podAddr
			if tt.to != "" {
				p.from, p.to = netip.MustParseAddrPort("[fd00::9]:41000"), netip.MustParseAddrPort(tt.to)
			}
			s, err := p.open(t, tt.authority, hbone.Headers{Forwarded: tt.forwarded})
			if got := status(t, err); got != tt.status {
				t.Fatalf("status %d, want %d", got, tt.status)
			}
			if got := strings.Join(p.net.dials, "; "); got != tt.dials {
				t.Errorf("connections %q, want %q", got, tt.dials)
			}
			if s != nil {
				s.Ref().Post(func() { s.TryWrite([]byte("text")) })
				p.Settle()
				text, _ := all(p.net.far[0])
				said := ""
				if tt.header != "" {
					if said, text, err = proxied([]byte(text)); err != nil {
						t.Error(err)
					}
				}
				if said != tt.header || text != "text" {
					t.Errorf("the application got %q, then %q; want %q and the text", said, text, tt.header)
				}
				s.Ref().Post(func() { s.Reset() })
				p.Settle()
			}
			if got := p.lines(t); !strings.Contains(got, tt.line) {
				t.Errorf("access log %q lacks %q", got, tt.line)
			}
		})
	}
}

func TestProxyHeaderBytes(t *testing.T) {
	t.Run("DP-100", func(t *testing.T) {
		id := workload.Identity{TrustDomain: "cluster.local", Namespace: "default", ServiceAccount: "client"}
		got, err := proxyHeader(netip.MustParseAddrPort("10.0.0.1:41234"), netip.MustParseAddrPort("10.10.0.1:80"), id, "")
		if err != nil {
			t.Fatal(err)
		}
		want := "0d0a0d0a000d0a515549540a2111003a0a0000010a0a0001a1120050d0002b" + hex.EncodeToString([]byte("spiffe://cluster.local/ns/default/sa/client"))
		if hex.EncodeToString(got) != want {
			t.Errorf("header\n%x, want\n%s", got, want)
		}
	})
	for _, n := range []int{65535 - 12 - 3, 65535 - 12 - 3 + 1, 65536, 65536 + 20} {
		_, err := proxyHeader(netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2"), workload.Identity{}, strings.Repeat("x", n))
		if long := n > 65535-12-3; (err != nil) != long {
			t.Errorf("a service name of %d bytes: %v", n, err)
		}
	}
}

// What is written is read back as it was meant, by a reader that knows nothing of the writer.
func FuzzProxyHeader(f *testing.F) {
	f.Add([]byte{10, 0, 0, 1}, []byte{10, 0, 0, 2}, uint16(1), uint16(2), "cluster.local", "web.default")
	f.Add(make([]byte, 16), []byte{10, 0, 0, 2}, uint16(1), uint16(2), "", "")
	f.Fuzz(func(t *testing.T, a, b []byte, ap, bp uint16, domain, service string) {
		src, ok := netip.AddrFromSlice(a)
		dst, ok2 := netip.AddrFromSlice(b)
		if !ok || !ok2 {
			t.Skip()
		}
		from, to := netip.AddrPortFrom(src, ap), netip.AddrPortFrom(dst, bp)
		id := workload.Identity{TrustDomain: domain}
		h, err := proxyHeader(from, to, id, service)
		if err != nil {
			return
		}
		want := fmt.Sprint(from, " -> ", to)
		if src.Is4() != dst.Is4() {
			want = "unspecified"
		}
		if !id.IsZero() {
			want += " d0=" + id.String()
		}
		if service != "" {
			want += " d1=" + service
		}
		if got, rest, err := proxied(append(h, "rest"...)); err != nil || got != want || rest != "rest" {
			t.Errorf("read back %q, then %q, %v; want %q", got, rest, err, want)
		}
	})
}
