package dnsproxy

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"ztun.dev/ztun/internal/loop"
)

// A resolverBed is a Resolver driven by hand, before fake servers.
type resolverBed struct {
	*loop.Manual
	r      *Resolver
	silent map[netip.AddrPort]bool
	zone   map[string][]string // records, by "A name."; a single "NXDOMAIN", "SERVFAIL" or "EMPTY"
	asked  []string
}

var (
	server1 = netip.MustParseAddrPort("192.0.2.53:53")
	server2 = netip.MustParseAddrPort("192.0.2.54:53")
)

func newResolverBed(t *testing.T, change ...func(*ResolverConfig)) *resolverBed {
	t.Helper()
	b := &resolverBed{Manual: loop.NewManual(changed), silent: make(map[netip.AddrPort]bool), zone: make(map[string][]string)}
	id := uint64(0)
	cfg := ResolverConfig{
		Upstream: b, Servers: func() []netip.AddrPort { return []netip.AddrPort{server1, server2} }, Group: b.Group(),
		Rand: func() uint64 { id++; return id },
	}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	if b.r, err = NewResolver(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// Exchange implements Upstream.
func (b *resolverBed) Exchange(ctx context.Context, server netip.AddrPort, tcp bool, msg, buf []byte, accept func([]byte) bool) ([]byte, error) {
	var q dns.Msg
	if err := q.Unpack(msg); err != nil {
		return nil, err
	}
	key := dns.TypeToString[q.Question[0].Qtype] + " " + q.Question[0].Name
	said := key + " of " + server.Addr().String()
	if tcp {
		said += " over TCP"
	}
	b.asked = append(b.asked, said)
	if b.silent[server] {
		return nil, loop.Await(ctx, func(func()) {})
	}
	m := new(dns.Msg).SetReply(&q)
	for _, text := range b.zone[key] {
		switch text {
		case "NXDOMAIN":
			m.Rcode = dns.RcodeNameError
		case "SERVFAIL":
			m.Rcode = dns.RcodeServerFailure
		case "EMPTY":
		case "TRUNCATED":
			m.Truncated = !tcp
		default:
			m.Answer = append(m.Answer, rr(text))
		}
	}
	packed, err := m.Pack()
	if err != nil {
		return nil, err
	}
	stray := slices.Clone(packed)
	stray[0] ^= 1 // another id
	if accept(stray) {
		return nil, errors.New("an answer to another question was taken")
	}
	if !accept(packed) {
		return nil, errors.New("the answer was not taken")
	}
	return append(buf[:0], packed...), nil
}

// resolve asks and says what came: addresses, an error, or that it waits.
func (b *resolverBed) resolve(t *testing.T, name string) func() string {
	t.Helper()
	got := "waits"
	b.Group().Go(t.Context(), func(ctx context.Context) {
		addrs, err := b.r.Resolve(ctx, name)
		switch {
		case err != nil:
			got = "error: " + err.Error()
		default:
			var list []string
			for _, a := range addrs {
				list = append(list, a.String())
			}
			slices.Sort(list)
			got = strings.Join(list, " ")
		}
	})
	b.Settle()
	return func() string { return got }
}

func TestResolverAnswers(t *testing.T) {
	tests := []struct {
		name    string
		a, aaaa []string
		want    string
	}{
		{"both families", []string{"db.test. 60 IN A 192.0.2.1"}, []string{"db.test. 60 IN AAAA 2001:db8::1"}, "192.0.2.1 2001:db8::1"},
		{"an alias", []string{"db.test. 60 IN CNAME x.test.", "x.test. 60 IN A 192.0.2.1"}, []string{"db.test. 60 IN CNAME x.test."}, "192.0.2.1"},
		{"one family fails", []string{"db.test. 60 IN A 192.0.2.1"}, []string{"SERVFAIL"}, "192.0.2.1"},
		{"no address", []string{"EMPTY"}, []string{"EMPTY"}, ""},
		{"only an alias", []string{"db.test. 60 IN CNAME x.test."}, []string{"EMPTY"}, ""},
		{"no such name", []string{"NXDOMAIN"}, []string{"NXDOMAIN"}, "error: dnsproxy: db.test. does not exist, says 192.0.2.53:53"},
		{"failure", []string{"SERVFAIL"}, []string{"EMPTY"}, "error: dnsproxy: question about db.test.: 192.0.2.54:53 answers SERVFAIL"},
		{"too long for UDP", []string{"TRUNCATED", "db.test. 60 IN A 192.0.2.1"}, []string{"EMPTY"}, "192.0.2.1"},
		{"addresses that lead into the pod", []string{"db.test. 60 IN A 127.0.0.1", "db.test. 60 IN A 0.0.0.0"}, []string{"db.test. 60 IN AAAA ::1", "db.test. 60 IN AAAA ::ffff:127.0.0.1", "db.test. 60 IN AAAA ff02::1"}, ""},
		{"a mapped address", []string{"EMPTY"}, []string{"db.test. 60 IN AAAA ::ffff:192.0.2.1"}, "192.0.2.1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newResolverBed(t)
			b.zone["A db.test."], b.zone["AAAA db.test."] = tt.a, tt.aaaa
			if got := b.resolve(t, "DB.test")(); got != tt.want {
				t.Errorf("%v and %v give %q, want %q", tt.a, tt.aaaa, got, tt.want)
			}
		})
	}
}

func TestResolverKeepsAnswers(t *testing.T) {
	tests := []struct {
		name    string
		a, aaaa []string
		kept    time.Duration
	}{
		{"FP-116 as long as the records say", []string{"db.test. 60 IN A 192.0.2.1"}, []string{"db.test. 30 IN AAAA 2001:db8::1"}, 30 * time.Second},
		{"FP-116 for five seconds at least", []string{"db.test. 1 IN A 192.0.2.1"}, []string{"EMPTY"}, 5 * time.Second},
		{"a family without addresses does not count", []string{"db.test. 60 IN A 192.0.2.1"}, []string{"EMPTY"}, time.Minute},
		{"half an answer", []string{"db.test. 60 IN A 192.0.2.1"}, []string{"SERVFAIL"}, 5 * time.Second},
		{"that a name does not exist", []string{"NXDOMAIN"}, []string{"NXDOMAIN"}, 5 * time.Second},
		{"a day at most", []string{"db.test. 1000000 IN A 192.0.2.1"}, []string{"EMPTY"}, 24 * time.Hour},
		{"failures are not kept", []string{"SERVFAIL"}, []string{"SERVFAIL"}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newResolverBed(t)
			b.zone["A db.test."], b.zone["AAAA db.test."] = tt.a, tt.aaaa
			first := b.resolve(t, "db.test")()
			n := len(b.asked)
			if tt.kept > 0 {
				b.Advance(tt.kept - time.Millisecond)
				if again := b.resolve(t, "db.test.")(); again != first || len(b.asked) != n {
					t.Errorf("before its end: %q after %q, %d questions, want %d", again, first, len(b.asked), n)
				}
			}
			b.Advance(time.Millisecond)
			b.resolve(t, "db.test")
			if len(b.asked) == n {
				t.Error("after its end nobody was asked")
			}
		})
	}
}

func TestResolverAsksTheNextServer(t *testing.T) {
	b := newResolverBed(t, func(c *ResolverConfig) { c.NoIPv6 = true })
	b.silent[server1] = true
	b.zone["A db.test."] = []string{"db.test. 60 IN A 192.0.2.1"}
	first, second := b.resolve(t, "db.test"), b.resolve(t, "db.test")
	if first() != "waits" {
		t.Fatalf("before the first server's time is over: %q", first())
	}
	b.Advance(serverTime)
	want := []string{"A db.test. of 192.0.2.53", "A db.test. of 192.0.2.54"}
	if diff := cmp.Diff(want, b.asked); diff != "" {
		t.Errorf("questions of two connections at once (-want +got):\n%s", diff)
	}
	if first() != "192.0.2.1" || second() != first() {
		t.Errorf("the connections got %q and %q", first(), second())
	}
}

func TestResolverGivesUp(t *testing.T) {
	b := newResolverBed(t)
	b.silent[server1], b.silent[server2] = true, true
	got := b.resolve(t, "db.test")
	b.Advance(searchTime - time.Millisecond)
	if got() != "waits" {
		t.Errorf("before the limit: %q", got())
	}
	b.Advance(time.Millisecond)
	if got() != "error: context deadline exceeded" {
		t.Errorf("after the limit: %q", got())
	}
}

// Who gives up does not end what others wait for.
func TestResolverSearchesOnForOthers(t *testing.T) {
	b := newResolverBed(t)
	b.silent[server1] = true
	b.zone["A db.test."] = []string{"db.test. 60 IN A 192.0.2.1"}
	ctx, cancel := context.WithCancel(t.Context())
	var err error
	b.Group().Go(ctx, func(ctx context.Context) { _, err = b.r.Resolve(ctx, "db.test") })
	b.Settle()
	other := b.resolve(t, "db.test")
	cancel()
	b.Settle()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("who gave up got %v", err)
	}
	b.Advance(serverTime)
	if other() != "192.0.2.1" {
		t.Errorf("the other got %q", other())
	}
}

func TestResolverKeepsSoManyNames(t *testing.T) {
	b := newResolverBed(t, func(c *ResolverConfig) { c.Entries, c.NoIPv6 = 2, true })
	for _, name := range []string{"a.test", "b.test", "c.test", "c.test", "a.test"} {
		b.zone["A "+name+"."] = []string{name + ". 60 IN A 192.0.2.1"}
		b.resolve(t, name)
	}
	if len(b.asked) != 4 {
		t.Errorf("questions %q, want one more for the name that was longest not asked for", b.asked)
	}
}

func TestResolverRefusesWhatIsNoName(t *testing.T) {
	b := newResolverBed(t)
	for _, name := range []string{strings.Repeat("x", 64) + ".test", strings.Repeat("x.", 200), "a..b"} {
		if got := b.resolve(t, name)(); !strings.HasSuffix(got, "is not a domain name") || len(b.asked) > 0 {
			t.Errorf("%.70q gives %q, and %d questions", name, got, len(b.asked))
		}
	}
}

func FuzzReadReply(f *testing.F) {
	m := new(dns.Msg).SetQuestion("db.test.", dns.TypeA)
	m.Answer = []dns.RR{rr("db.test. 60 IN CNAME x.test."), rr("x.test. 60 IN A 192.0.2.1")}
	seed, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, answer []byte) {
		a, err := readReply(answer, server1, "db.test.")
		if err != nil {
			return
		}
		if a.ttl < 0 || a.ttl > maxTTL {
			t.Errorf("ttl %v", a.ttl)
		}
		for _, ip := range a.addrs {
			if !ip.IsValid() || ip.Is4In6() || ip.IsLoopback() || ip.IsUnspecified() || ip.IsMulticast() {
				t.Errorf("address %v", ip)
			}
		}
	})
}
