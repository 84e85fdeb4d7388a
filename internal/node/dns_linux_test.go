package node

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"ztun.dev/ztun/internal/lab"
)

const webName = "web.shop.svc.cluster.local"

// serveDNS runs a resolver on a host that knows one name, over UDP and TCP.
func (b *bed) serveDNS(h *lab.Host, name string, v4, v6 netip.Addr) {
	b.t.Helper()
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		m.RecursionAvailable = true
		hdr := dns.RR_Header{Name: q.Question[0].Name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET, Ttl: 7}
		switch {
		case q.Question[0].Name != name:
			m.Rcode = dns.RcodeNameError
		case hdr.Rrtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: hdr, A: v4.AsSlice()})
		case hdr.Rrtype == dns.TypeAAAA:
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: hdr, AAAA: v6.AsSlice()})
		}
		w.WriteMsg(m)
	})
	pc, err := h.ListenPacket("udp", "[::]:53")
	if err != nil {
		b.t.Fatal(err)
	}
	l, err := h.Listen("tcp", "[::]:53")
	if err != nil {
		b.t.Fatal(err)
	}
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: handler}, {Listener: l, Handler: handler}} {
		started, ended := make(chan struct{}), make(chan error, 1)
		s.NotifyStartedFunc = func() { close(started) }
		go func() { ended <- s.ActivateAndServe() }()
		<-started
		b.t.Cleanup(func() { s.Shutdown(); <-ended })
	}
}

func TestNetnsNamesAreAnswered(t *testing.T) { eachBackend(t, checkNamesAreAnswered) }

func checkNamesAreAnswered(t *testing.T, b *bed) {
	b.start(0)
	b.start(1)
	client := b.pods[clientA]
	b.serveDNS(b.Wire().Host, "foreign.example.", netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7"))
	wire4, wire6 := b.Wire().Addr4.String(), b.Wire().Addr6.String()

	for _, tt := range []struct{ name, args, want string }{
		{"A", "@10.96.0.53 " + webName + " A", "10.96.0.10"},
		{"AAAA", "@10.96.0.53 " + webName + " AAAA", "fd96::10"},
		{"A, of the configured resolver", webName + " A", "10.96.0.10"},
		{"A, of a resolver that knows nothing of it", "@" + wire4 + " " + webName + " A", "10.96.0.10"},
		{"AAAA, over IPv6", "@" + wire6 + " " + webName + " AAAA", "fd96::10"},
		{"foreign A", "@" + wire4 + " foreign.example A", "192.0.2.7"},
		{"foreign AAAA, over IPv6", "@" + wire6 + " foreign.example AAAA", "2001:db8::7"},
	} {
		for _, over := range []string{"+notcp", "+tcp"} {
			args := append(strings.Fields(tt.args), over, "+short", "+time=3", "+tries=1")
			out, err := client.Command(t.Context(), "dig", args...).Output()
			if got := strings.TrimSpace(string(out)); err != nil || got != tt.want {
				t.Errorf("%s, %s: %q, %v, want %q", tt.name, over, got, err, tt.want)
			}
		}
	}
	out, err := client.Command(t.Context(), "dig", "@"+wire4, "nobody.example", "A", "+time=3", "+tries=1").Output()
	if err != nil || !strings.Contains(string(out), "status: NXDOMAIN") {
		t.Errorf("a name that nobody has: %v\n%s", err, out)
	}

	out, err = client.Command(t.Context(), "getent", "ahosts", webName).Output()
	var seen []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 1 && f[1] == "STREAM" {
			seen = append(seen, f[0])
		}
	}
	slices.Sort(seen)
	if diff := cmp.Diff([]string{"10.96.0.10", "fd96::10"}, seen); err != nil || diff != "" {
		t.Errorf("getent: %v (-want +got):\n%s", err, diff)
	}
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return client.Dial(ctx, network, "10.96.0.53:53")
	}}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	addrs, err := resolver.LookupNetIP(ctx, "ip", webName+".")
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	want := []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd96::10")}
	if diff := cmp.Diff(want, addrs, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); err != nil || diff != "" {
		t.Errorf("resolver of Go: %v (-want +got):\n%s", err, diff)
	}
}

// From the name to the page, by a program that knows nothing of ztun.
func TestNetnsCurlByName(t *testing.T) { eachBackend(t, checkCurlByName) }

func checkCurlByName(t *testing.T, b *bed) {
	b.start(0)
	b.start(1)
	l, err := b.pods[webB].Listen("tcp", "[::]:8080")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		w.Write([]byte(r.Host + " for " + netip.MustParseAddr(host).Unmap().String()))
	})}
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() { s.Close(); <-ended })
	for _, family := range []string{"-4", "-6"} {
		want := webName + " for " + b.pods[clientA].Addr4.String()
		if family == "-6" {
			want = webName + " for " + b.pods[clientA].Addr6.String()
		}
		out, err := b.pods[clientA].Command(t.Context(), "curl", family, "-sS", "--max-time", "5", "http://"+webName+"/").Output()
		if err != nil || string(out) != want {
			t.Errorf("curl %s: %q, %v, want %q", family, out, err, want)
		}
	}
}
