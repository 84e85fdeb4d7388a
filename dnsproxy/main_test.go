package dnsproxy

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/workload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	pod      = netip.MustParseAddrPort("10.244.1.1:40000")
	resolver = netip.MustParseAddrPort("10.96.0.10:53")
	changed  = time.Unix(1_700_000_000, 0) // when the state changed last
)

// A fakeUpstream is a resolver with a few names. It answers as an authority that forgot RA, so that what the server changes is seen.
type fakeUpstream struct {
	answer func(server netip.AddrPort, tcp bool, q *dns.Msg) *dns.Msg // nil: names below
	stray  [][]byte                                                   // arrive before the answer, with the id of the question where they begin with 0
	err    error
	wait   bool // until the context ends

	mu   sync.Mutex // guards below
	seen []string
	raw  [][]byte
}

func rr(text string) dns.RR {
	r, err := dns.NewRR(text)
	if err != nil {
		panic(err)
	}
	return r
}

func (u *fakeUpstream) Exchange(ctx context.Context, server netip.AddrPort, tcp bool, msg, buf []byte, accept func([]byte) bool) ([]byte, error) {
	q := new(dns.Msg)
	if err := q.Unpack(msg); err != nil {
		return nil, err
	}
	u.mu.Lock()
	u.raw = append(u.raw, append([]byte(nil), msg...))
	for _, question := range q.Question {
		u.seen = append(u.seen, dns.TypeToString[question.Qtype]+" "+question.Name)
	}
	u.mu.Unlock()
	if u.wait {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if u.err != nil {
		return nil, u.err
	}
	for _, s := range u.stray {
		if s = append([]byte(nil), s...); s[0] == 0 {
			copy(s, msg[:2])
		}
		if n := copy(buf, s); accept(buf[:n]) {
			return buf[:n], nil
		}
	}
	make := u.answer
	if make == nil {
		make = names
	}
	packed, err := make(server, tcp, q).Pack()
	if err != nil {
		return nil, err
	}
	if len(packed) > len(buf) && tcp {
		buf = append([]byte(nil), packed...)
	}
	n := copy(buf, packed)
	if !accept(buf[:n]) {
		return nil, fmt.Errorf("the answer to %v was not taken", q.Question)
	}
	return buf[:n], nil
}

// names are those of the resolver.
func names(_ netip.AddrPort, tcp bool, q *dns.Msg) *dns.Msg {
	m := new(dns.Msg).SetReply(q)
	m.Authoritative = true
	if q.Opcode != dns.OpcodeQuery {
		return m
	}
	question := q.Question[0]
	switch strings.ToLower(question.Name) {
	case "www.bing.com.":
		if question.Qtype == dns.TypeA {
			m.Answer = []dns.RR{rr("www.bing.com. 60 IN A 204.79.197.200")}
		} else {
			m.Ns = []dns.RR{rr("bing.com. 900 IN SOA ns. host. 1 2 3 4 10")}
		}
	case "alias.ext.test.":
		m.Answer = []dns.RR{rr("alias.ext.test. 120 IN CNAME real.ext.test."), rr("real.ext.test. 20 IN A 192.0.2.50")}
	case "fail.ext.test.":
		m.Rcode = dns.RcodeServerFailure
	case "refuse.ext.test.":
		m.Rcode = dns.RcodeRefused
	case "big.ext.test.":
		if m.Truncated = !tcp; tcp {
			for range 12 {
				m.Answer = append(m.Answer, rr(`big.ext.test. 60 IN TXT "`+strings.Repeat("x", 250)+`"`))
			}
		}
	case "_http._tcp.productpage.ns1.svc.cluster.local.":
		if question.Qtype == dns.TypeSRV {
			m.Answer = []dns.RR{rr("_http._tcp.productpage.ns1.svc.cluster.local. 5 IN SRV 0 100 80 productpage.ns1.svc.cluster.local.")}
			break
		}
		fallthrough
	default:
		m.Rcode = dns.RcodeNameError
		m.Ns = []dns.RR{rr(". 60 IN SOA ns. host. 1 2 3 4 10")}
	}
	if o := q.IsEdns0(); o != nil {
		m.SetEdns0(1232, o.Do())
	}
	return m
}

// newStore holds testdata/mesh.yaml and the service many, whose endpoints are 100.
func newStore(t testing.TB) *workload.Store {
	t.Helper()
	data, err := os.ReadFile("testdata/mesh.yaml")
	if err != nil {
		t.Fatal(err)
	}
	st, err := workload.ParseStatic("mesh.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	many := &workload.Service{Name: "many", Namespace: "ns1", Hostname: "many.ns1.svc.cluster.local", IPFamilies: workload.FamilyIPv4, Canonical: true}
	st.Services = append(st.Services, many)
	for i := range 100 {
		st.Workloads = append(st.Workloads, &workload.Workload{
			UID: fmt.Sprintf("w/many-%d", i), Namespace: "ns1", Network: "nw1", Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 2, byte(i)})},
			Services: map[workload.ServiceKey]workload.PortMap{many.Key(): {80: 80}},
		})
	}
	store := new(workload.Store)
	store.Replace(st)
	return store
}

func newServer(t testing.TB, change ...func(*Config)) (*Server, *fakeUpstream) {
	t.Helper()
	u := new(fakeUpstream)
	cfg := Config{
		Store: newStore(t), Network: "nw1", ClusterDomain: "cluster.local", Upstream: u,
		Now: func() time.Time { return changed }, Rand: rand.Uint64, Log: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s, u
}

func client(name string) *workload.Client {
	ns := "ns" + strings.TrimPrefix(name, "c")
	if name == "cx" {
		ns = "ns1"
	}
	return &workload.Client{UID: "w/" + name, Name: name, Namespace: ns, ServiceAccount: "default", Node: "n1"}
}

// question packs a question with RD.
func question(t testing.TB, qtype uint16, name string, change ...func(*dns.Msg)) []byte {
	t.Helper()
	m := new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
	for _, f := range change {
		f(m)
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func edns(size uint16) func(*dns.Msg) { return func(m *dns.Msg) { m.SetEdns0(size, false) } }

// ask returns the answer, in wire form and read.
func ask(t testing.TB, s *Server, from string, tcp bool, msg []byte) ([]byte, *dns.Msg) {
	t.Helper()
	raw, err := s.ServeDNS(t.Context(), client(from), pod, resolver, tcp, msg, nil)
	if err != nil {
		t.Fatalf("ServeDNS: %v", err)
	}
	m := new(dns.Msg)
	if err := m.Unpack(raw); err != nil {
		t.Fatalf("answer %x: %v", raw, err)
	}
	if got, want := binary.BigEndian.Uint16(raw), binary.BigEndian.Uint16(msg); got != want {
		t.Errorf("id of the answer = %#x, want %#x", got, want)
	}
	if !m.RecursionAvailable {
		t.Error("RA is not set")
	}
	return raw, m
}
