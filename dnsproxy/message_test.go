package dnsproxy

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const productpage = "0b70726f6475637470616765 036e7331 03737663 07636c7573746572 056c6f63616c 00 0001 0001"

func TestNoAnswer(t *testing.T) {
	s, u := newServer(t)
	for name, msg := range map[string][]byte{
		"DNS-94":                     make([]byte, 11),
		"DNS-95":                     unhex(t, "1234 8180 0001 0000 0000 0000"+productpage),
		"empty":                      nil,
		"answer that cannot be read": unhex(t, "1234 8180 0001 0000 0000 0000 05"),
	} {
		got, err := s.ServeDNS(t.Context(), client("c1"), pod, resolver, false, msg, nil)
		if got != nil || err != nil || len(u.seen) > 0 {
			t.Errorf("%s: answer %x, error %v, forwarded %v", name, got, err, u.seen)
		}
	}
}

// Answers as exact bytes.
func TestAnswers(t *testing.T) {
	const none = " 0000 0000 0000 "
	for _, tt := range []struct{ name, msg, want string }{
		{"DNS-96 cut question", "1234 0110 0001" + none + "0b70726f64", "1234 8191 0000" + none},
		{"DNS-98 opcode STATUS", "1234 1000 0001" + none + productpage, "1234 9084 0001" + none + productpage},
		{"opcode STATUS without a question", "1234 1000 0000" + none, "1234 9084 0000" + none},
		{"DNS-99 two questions", "1234 0100 0002" + none + productpage + productpage, "1234 8181 0000" + none},
		{"no question", "1234 0100 0000" + none, "1234 8181 0000" + none},
		{"name with a pointer", "1234 0100 0001" + none + "c00c 0001 0001", "1234 8181 0000" + none},
		{"question without a class", "1234 0100 0001" + none + "00 0001", "1234 8181 0000" + none},
		{"record that is not there", "1234 0100 0001 0000 0000 0001" + productpage, "1234 8181 0000" + none},
		{"record that is cut", "1234 0100 0001 0000 0000 0001" + productpage + "00 0029 04", "1234 8181 0000" + none},
		{"DNS-100", "1234 0100 0001" + none + productpage, "1234 8580 0001 0001 0000 0000" + productpage + "c00c 0001 0001 0000001e 0004 0a60000b"},
		{"DNS-101", "1234 0010 0001" + none + productpage, "1234 8490 0001 0001 0000 0000" + productpage + "c00c 0001 0001 0000001e 0004 0a60000b"},
		{
			"OPT", "1234 0100 0001 0000 0000 0001" + productpage + "00 0029 1000 00 00 8000 0000",
			"1234 8580 0001 0001 0000 0001" + productpage + "c00c 0001 0001 0000001e 0004 0a60000b" + "00 0029 04d0 00 00 8000 0000",
		},
		{
			"DNS-108 OPT version 1", "1234 0100 0001 0000 0000 0001" + productpage + "00 0029 1000 00 01 0000 0000",
			"1234 8180 0001 0000 0000 0001" + productpage + "00 0029 04d0 01 00 0000 0000",
		},
		{
			"DNS-110 two OPT", "1234 0100 0001 0000 0000 0002" + productpage + "00 0029 1000 00 00 0000 0000 00 0029 1000 00 00 0000 0000",
			"1234 8181 0000 0000 0000 0001" + "00 0029 04d0 00 00 0000 0000",
		},
		{"zone transfer", "1234 0000 0001" + none + "036e7331 00 00fc 0001", "1234 8085 0001" + none + "036e7331 00 00fc 0001"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, u := newServer(t)
			for _, tcp := range []bool{false, true} {
				got, err := s.ServeDNS(t.Context(), client("c1"), pod, resolver, tcp, unhex(t, tt.msg), make([]byte, 0, 512))
				if want := unhex(t, tt.want); err != nil || !bytes.Equal(got, want) || len(u.seen) > 0 {
					t.Errorf("tcp=%v: %v, forwarded %v\n got %x\nwant %x", tcp, err, u.seen, got, want)
				}
			}
		})
	}
}

func TestSizes(t *testing.T) {
	type size struct {
		TC             bool
		Answers, Bytes int
	}
	s, _ := newServer(t)
	for _, tt := range []struct {
		name string
		opt  uint16
		tcp  bool
		want size
	}{
		{"DNS-102", 0, false, size{true, 29, 508}},
		{"DNS-103", 512, false, size{true, 28, 503}},
		{"DNS-104", 1232, false, size{true, 73, 1223}},
		{"DNS-105", 4096, false, size{true, 73, 1223}},
		{"DNS-106", 100, false, size{true, 28, 503}},
		{"DNS-107", 0, true, size{false, 100, 1644}},
		{"TCP with OPT", 512, true, size{false, 100, 1655}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var change []func(*dns.Msg)
			if tt.opt > 0 {
				change = append(change, edns(tt.opt))
			}
			raw, m := ask(t, s, "c1", tt.tcp, question(t, dns.TypeA, "many.ns1.svc.cluster.local", change...))
			if diff := cmp.Diff(tt.want, size{m.Truncated, len(m.Answer), len(raw)}); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if (m.IsEdns0() != nil) != (tt.opt > 0) {
				t.Errorf("OPT of the answer = %v", m.IsEdns0())
			}
		})
	}
}

func TestForwarded(t *testing.T) {
	for _, tt := range []struct {
		name   string
		qtype  uint16
		host   string
		tcp    bool
		change func(*dns.Msg)
		rcode  int
		want   []string // answer and authority
	}{
		{"DNS-116 first", dns.TypeA, "www.bing.com", false, nil, 0, []string{"www.bing.com. 60 IN A 204.79.197.200"}},
		{"DNS-117", dns.TypeAAAA, "www.bing.com", false, nil, 0, []string{"bing.com. 900 IN SOA ns. host. 1 2 3 4 10"}},
		{"DNS-118", dns.TypeA, "alias.ext.test", false, nil, 0, []string{"alias.ext.test. 120 IN CNAME real.ext.test.", "real.ext.test. 20 IN A 192.0.2.50"}},
		{"DNS-109", dns.TypeA, "nx.ext.test", false, edns(1232), dns.RcodeNameError, []string{". 60 IN SOA ns. host. 1 2 3 4 10"}},
		{"DNS-111", dns.TypeTXT, "version.bind", false, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, dns.RcodeNameError, []string{". 60 IN SOA ns. host. 1 2 3 4 10"}},
		{"DNS-121 first", dns.TypeA, "fail.ext.test", false, nil, dns.RcodeServerFailure, nil},
		{"refused", dns.TypeA, "refuse.ext.test", false, nil, dns.RcodeRefused, nil},
		{"DNS-127", dns.TypeSRV, "_http._tcp.productpage.ns1.svc.cluster.local", true, nil, 0, []string{"_http._tcp.productpage.ns1.svc.cluster.local. 5 IN SRV 0 100 80 productpage.ns1.svc.cluster.local."}},
		{"class other than IN of a name of the mesh", dns.TypeA, "productpage", false, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassANY }, dns.RcodeNameError, []string{". 60 IN SOA ns. host. 1 2 3 4 10"}},
		{"mixed case", dns.TypeA, "wWw.BiNg.cOm", false, nil, 0, []string{"www.bing.com. 60 IN A 204.79.197.200"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, u := newServer(t)
			var change []func(*dns.Msg)
			if tt.change != nil {
				change = append(change, tt.change)
			}
			msg := question(t, tt.qtype, tt.host, change...)
			before := bytes.Clone(msg)
			_, m := ask(t, s, "c1", tt.tcp, msg)
			if !bytes.Equal(msg, before) {
				t.Error("the message of the client was changed")
			}
			if m.Authoritative || m.Rcode != tt.rcode || len(u.raw) != 1 {
				t.Errorf("answer %v after %d questions", m, len(u.raw))
			}
			if !bytes.Equal(u.raw[0][2:], msg[2:]) {
				t.Errorf("forwarded %x, want all but the id of %x", u.raw[0], msg)
			}
			if got, want := m.Question[0].Name, dns.Fqdn(tt.host); got != want {
				t.Errorf("question %q, want %q", got, want)
			}
			if (m.IsEdns0() == nil) != (len(change) == 0 || m.Question[0].Qclass != dns.ClassINET) {
				t.Errorf("OPT of the answer = %v", m.IsEdns0())
			}
			var got []string
			for _, r := range append(m.Answer, m.Ns...) {
				got = append(got, strings.Join(strings.Fields(r.String()), " "))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("records (-want +got):\n%s", diff)
			}
		})
	}
}

func TestForwardedIDsAreNew(t *testing.T) {
	s, u := newServer(t)
	q := question(t, dns.TypeA, "www.bing.com")
	ids := make(map[string]bool)
	for range 20 {
		ask(t, s, "c1", false, q)
		ids[string(u.raw[len(u.raw)-1][:2])] = true
	}
	if len(ids) < 15 {
		t.Errorf("20 questions had %d different ids", len(ids))
	}
}

func TestTruncatedAnswerIsRelayed(t *testing.T) { // DNS-125
	s, u := newServer(t)
	q := question(t, dns.TypeTXT, "big.ext.test")
	if _, m := ask(t, s, "c1", false, q); !m.Truncated || len(m.Answer) != 0 {
		t.Errorf("over UDP: %v, want TC", m)
	}
	if _, m := ask(t, s, "c1", true, q); m.Truncated || len(m.Answer) != 12 {
		t.Errorf("over TCP: %v, want everything", m)
	}
	if len(u.seen) != 2 {
		t.Errorf("forwarded %v", u.seen)
	}
}

// A resolver that sends more than the client takes: the client is told to ask over TCP.
func TestAnswerThatIsTooLong(t *testing.T) {
	s, u := newServer(t)
	u.answer = func(_ netip.AddrPort, _ bool, q *dns.Msg) *dns.Msg { return names(resolver, true, q) }
	raw, m := ask(t, s, "c1", false, question(t, dns.TypeTXT, "big.ext.test", edns(1400)))
	if !m.Truncated || len(m.Answer) != 0 || m.IsEdns0() == nil || m.Authoritative || len(raw) > 100 {
		t.Errorf("answer %v, want TC and nothing else", m)
	}
	if _, m := ask(t, s, "c1", false, question(t, dns.TypeTXT, "big.ext.test", edns(4096))); m.Truncated || len(m.Answer) != 12 {
		t.Errorf("answer %v, want everything: the client takes it", m)
	}
}

func TestAuthenticatedDataIsForThoseWhoAsk(t *testing.T) {
	s, u := newServer(t)
	u.answer = func(_ netip.AddrPort, _ bool, q *dns.Msg) *dns.Msg {
		m := names(resolver, false, q)
		m.AuthenticatedData = true
		return m
	}
	for _, tt := range []struct {
		name   string
		change func(*dns.Msg)
		want   bool
	}{
		{"plain", edns(1232), false},
		{"AD", func(m *dns.Msg) { m.AuthenticatedData = true }, true},
		{"DO", func(m *dns.Msg) { m.SetEdns0(1232, true) }, true},
	} {
		if _, m := ask(t, s, "c1", false, question(t, dns.TypeA, "www.bing.com", tt.change)); m.AuthenticatedData != tt.want {
			t.Errorf("%s: AD = %v, want %v", tt.name, m.AuthenticatedData, tt.want)
		}
	}
}

func TestWrongAnswersAreIgnored(t *testing.T) { // DNS-137
	s, u := newServer(t)
	other := new(dns.Msg).SetQuestion("www.example.com.", dns.TypeA)
	other.Response = true
	wrongName, err := other.Pack()
	if err != nil {
		t.Fatal(err)
	}
	q := question(t, dns.TypeA, "www.bing.com")
	notAnAnswer := bytes.Clone(q)
	wrongType := bytes.Clone(q)
	wrongType[2] |= 0x80
	wrongType[len(wrongType)-3]++
	wrongID := bytes.Clone(q)
	wrongID[0], wrongID[2] = 1, wrongID[2]|0x80 // ids of other strays are made to fit
	s.cfg.Rand = func() uint64 { return 0x0203 }
	for _, b := range [][]byte{wrongName, notAnAnswer, wrongType} {
		b[0] = 0
	}
	u.stray = [][]byte{wrongID, wrongName, notAnAnswer, wrongType, {0, 0, 0x80}, unhex(t, "0000 8180 0000 0000 0000 0000"), unhex(t, "0000 8180 0001 0000 0000 0000")}
	if _, m := ask(t, s, "c1", false, q); len(m.Answer) != 1 {
		t.Errorf("answer %v, want the right one", m)
	}
}

func TestErrorWithoutQuestionIsTaken(t *testing.T) {
	s, u := newServer(t)
	u.stray = [][]byte{unhex(t, "0000 8101 0000 0000 0000 0000")}
	if _, m := ask(t, s, "c1", false, question(t, dns.TypeA, "www.bing.com")); m.Rcode != dns.RcodeFormatError {
		t.Errorf("answer %v, want FORMERR", m)
	}
}

func TestResolverThatDoesNotAnswer(t *testing.T) { // DNS-123
	s, u := newServer(t)
	ede := func(m *dns.Msg) int {
		o := m.IsEdns0()
		if o == nil || len(o.Option) != 1 {
			return noEDE
		}
		return int(o.Option[0].(*dns.EDNS0_EDE).InfoCode)
	}
	u.err = errors.New("connection refused")
	for _, tt := range []struct {
		change []func(*dns.Msg)
		want   int
	}{{nil, noEDE}, {[]func(*dns.Msg){edns(1232)}, 23}} {
		_, m := ask(t, s, "c1", false, question(t, dns.TypeA, "dead.ext.test", tt.change...))
		if m.Rcode != dns.RcodeServerFailure || ede(m) != tt.want {
			t.Errorf("answer %v, want SERVFAIL with extended error %d", m, tt.want)
		}
	}

	u.err, u.wait = nil, true
	late, cancel := context.WithCancelCause(t.Context())
	cancel(context.DeadlineExceeded)
	raw, err := s.ServeDNS(late, client("c1"), pod, resolver, false, question(t, dns.TypeA, "dead.ext.test", edns(1232)), nil)
	m := new(dns.Msg)
	if err != nil || m.Unpack(raw) != nil || m.Rcode != dns.RcodeServerFailure || ede(m) != 22 {
		t.Errorf("at the deadline: %v, %v, want SERVFAIL with extended error 22", m, err)
	}

	gone, cancelGone := context.WithCancel(t.Context())
	cancelGone()
	if raw, err := s.ServeDNS(gone, client("c1"), pod, resolver, false, question(t, dns.TypeA, "dead.ext.test"), nil); raw != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: answer %x, error %v", raw, err)
	}
}

// Updates and whatever is signed pass both ways without a changed bit.
func TestUntouched(t *testing.T) {
	update := new(dns.Msg).SetUpdate("ext.test.")
	update.Insert([]dns.RR{rr("a.ext.test. 60 IN A 192.0.2.1")})
	notify := new(dns.Msg).SetNotify("ext.test.")
	signed := new(dns.Msg).SetQuestion("productpage.ns1.svc.cluster.local.", dns.TypeA)
	signed.SetTsig("key.", dns.HmacSHA256, 300, 1_700_000_000)
	for name, m := range map[string]*dns.Msg{"DNS-97 update": update, "notify": notify, "signed": signed} {
		t.Run(name, func(t *testing.T) {
			s, u := newServer(t)
			var want []byte
			u.answer = func(_ netip.AddrPort, _ bool, q *dns.Msg) *dns.Msg {
				a := new(dns.Msg).SetReply(q)
				a.Authoritative = true
				want, _ = a.Pack()
				return a
			}
			msg, err := m.Pack()
			if err != nil {
				t.Fatal(err)
			}
			got, err := s.ServeDNS(t.Context(), client("c1"), pod, resolver, false, msg, nil)
			if err != nil || !bytes.Equal(got, want) || len(u.raw) != 1 || !bytes.Equal(u.raw[0], msg) {
				t.Errorf("%v\nforwarded %x\n     want %x\nanswer %x\n  want %x", err, u.raw, msg, got, want)
			}
		})
	}
}

func TestResolverIsTheOneThatWasAddressed(t *testing.T) { // DNS-136
	s, u := newServer(t)
	var asked []netip.AddrPort
	u.answer = func(server netip.AddrPort, tcp bool, q *dns.Msg) *dns.Msg {
		asked = append(asked, server)
		return names(server, tcp, q)
	}
	want := []netip.AddrPort{resolver, netip.MustParseAddrPort("[2001:db8::53]:5353")}
	for _, server := range want {
		if _, err := s.ServeDNS(t.Context(), client("c1"), pod, server, false, question(t, dns.TypeA, "www.bing.com"), nil); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(want, asked, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
}

func FuzzServeDNS(f *testing.F) {
	s, u := newServer(f)
	u.err = errors.New("offline")
	f.Add(unhex(f, "1234 0100 0001 0000 0000 0000"+productpage), false)
	f.Add(unhex(f, "1234 0100 0001 0000 0000 0001"+productpage+"00 0029 1000 00 00 8000 0000"), true)
	f.Add(question(f, dns.TypeA, "productpage.ns1.cluster.local", edns(512)), false)
	f.Add(question(f, dns.TypeA, "many", edns(600)), false)
	f.Add(question(f, dns.TypeAAAA, "x.y.wildcard.test"), false)
	f.Add(unhex(f, "1234 2800 0001 0000 0000 0000"+productpage), false)
	f.Fuzz(func(t *testing.T, msg []byte, tcp bool) {
		got, err := s.ServeDNS(t.Context(), client("c1"), pod, resolver, tcp, msg, nil)
		u.seen, u.raw = nil, nil
		if err != nil {
			t.Fatalf("message %x: %v", msg, err)
		}
		if len(msg) < headerLen || msg[2]&0x80 != 0 {
			if got != nil {
				t.Errorf("message %x has the answer %x", msg, got)
			}
			return
		}
		m := new(dns.Msg)
		if err := m.Unpack(got); err != nil {
			t.Fatalf("message %x: answer %x: %v", msg, got, err)
		}
		q := &query{msg: msg, tcp: tcp}
		if rcode := q.parse(); opcodeOf(msg) == dns.OpcodeQuery && len(got) > q.limit() {
			t.Errorf("message %x (%d): answer of %d bytes is above %d", msg, rcode, len(got), q.limit())
		}
		if !bytes.Equal(got[:2], msg[:2]) || got[2]&0x80 == 0 || got[3]&0x80 == 0 {
			t.Errorf("message %x: header of the answer %x", msg, got[:headerLen])
		}
		if n := count(got, 0); n > 1 || n == 1 && !bytes.HasPrefix(got[headerLen:], q.question) {
			t.Errorf("message %x: question of the answer %x", msg, got)
		}
	})
}
