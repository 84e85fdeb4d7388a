package dnsproxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"ztun.dev/ztun/internal/workload"
)

// outcome says in one line what an answer is: "F" (forwarded), "ND" (local without data) or the local records, those of one owner sorted.
func outcome(t *testing.T, m *dns.Msg, seen []string, asked string) string {
	t.Helper()
	if len(seen) > 0 {
		if !slices.Equal(seen, []string{asked}) || m.Authoritative {
			return fmt.Sprintf("forwarded as %q, AA=%v", seen, m.Authoritative)
		}
		return "F"
	}
	if m.Rcode != dns.RcodeSuccess || !m.Authoritative || m.AuthenticatedData || m.Zero || len(m.Extra) > 0 {
		return "unexpected: " + m.String()
	}
	if len(m.Answer) == 0 {
		if len(m.Ns) != 1 || m.Ns[0].Header().Rrtype != dns.TypeSOA || m.Ns[0].Header().Ttl != 5 {
			return "no data without SOA: " + m.String()
		}
		return "ND"
	}
	var cname, addrs []string
	for _, r := range m.Answer {
		if r.Header().Ttl != 30 || r.Header().Class != dns.ClassINET {
			return "unexpected record: " + r.String()
		}
		owner := r.Header().Name
		if owner == m.Question[0].Name {
			owner = "="
		}
		f := strings.Fields(r.String())
		line := owner + " " + f[3] + " " + f[4]
		if r.Header().Rrtype == dns.TypeCNAME {
			cname = append(cname, line)
		} else {
			addrs = append(addrs, line)
		}
	}
	slices.Sort(addrs)
	return "L: " + strings.Join(append(cname, addrs...), ", ")
}

func TestNames(t *testing.T) {
	const A, AAAA = dns.TypeA, dns.TypeAAAA
	preferred := func(c *Config) { c.PreferredNamespace = "pref" }
	noIPv6 := func(c *Config) { c.NoIPv6 = true }
	long := strings.Repeat("a", 63)
	tests := []struct {
		id     string
		client string
		qtype  uint16
		name   string
		want   string
		change func(*Config)
	}{
		{"DNS-1", "c1", A, "productpage.ns1.svc.cluster.local", "L: = A 10.96.0.11", nil},
		{"DNS-2", "c1", AAAA, "productpage.ns1.svc.cluster.local", "ND", nil},
		{"DNS-3", "c1", A, "productpage", "L: = A 10.96.0.11", nil},
		{"DNS-4", "c1", A, "productpage.ns1", "L: = A 10.96.0.11", nil},
		{"DNS-5", "c1", A, "productpage.ns1.svc", "L: = A 10.96.0.11", nil},
		{"DNS-6", "c1", A, "ProductPage.NS1.svc.Cluster.Local", "L: = A 10.96.0.11", nil},
		{"DNS-7", "c1", A, "productpage.ns1.svc.cluster", "F", nil},
		{"DNS-8", "c1", A, "productpage.ns1.ns1.svc.cluster.local", "L: = CNAME productpage.ns1., productpage.ns1. A 10.96.0.11", nil},
		{"DNS-9", "c1", AAAA, "productpage.ns1.ns1.svc.cluster.local", "ND", nil},
		{"DNS-10", "c1", A, "productpage.ns1.svc.cluster.local.ns1.svc.cluster.local", "L: = CNAME productpage.ns1.svc.cluster.local., productpage.ns1.svc.cluster.local. A 10.96.0.11", nil},
		{"DNS-11", "c1", A, "productpage.ns1.svc.cluster.local.svc.cluster.local", "L: = CNAME productpage.ns1.svc.cluster.local., productpage.ns1.svc.cluster.local. A 10.96.0.11", nil},
		{"DNS-12", "c1", A, "productpage.svc.cluster.local", "L: = CNAME productpage., productpage. A 10.96.0.11", nil},
		{"DNS-13", "c1", A, "productpage.cluster.local", "L: = CNAME productpage., productpage. A 10.96.0.11", nil},
		{"DNS-14", "c1", A, "productpage.ns1.cluster.local", "L: = CNAME productpage.ns1., productpage.ns1. A 10.96.0.11", nil},
		{"DNS-15", "c1", A, "productpage.ns1.svc.svc.cluster.local", "L: = CNAME productpage.ns1.svc., productpage.ns1.svc. A 10.96.0.11", nil},
		{"DNS-16", "c2", A, "productpage", "F", nil},
		{"DNS-17", "c2", A, "productpage.ns1", "L: = A 10.96.0.11", nil},
		{"DNS-18", "c1", A, "example", "F", nil},
		{"DNS-19", "c1", A, "example.ns2", "L: = A 10.96.0.12", nil},
		{"DNS-20", "c1", A, "example.ns2.svc", "L: = A 10.96.0.12", nil},
		{"DNS-21", "c1", A, "example.ns2.svc.cluster.local", "L: = A 10.96.0.12", nil},
		{"DNS-22", "c1", A, "example.ns2.ns1.svc.cluster.local", "L: = CNAME example.ns2., example.ns2. A 10.96.0.12", nil},
		{"DNS-23", "c1", A, "example.ns1.svc.cluster.local", "F", nil},
		{"DNS-24", "c1", A, "details.ns2.svc.cluster.remote", "L: = A 10.98.0.17, = A 10.98.0.18", nil},
		{"DNS-25", "c1", AAAA, "details.ns2.svc.cluster.remote", "ND", nil},
		{"DNS-26", "c1", A, "details.ns2", "F", nil},
		{"DNS-27", "c1", A, ".", "F", nil},
		{"DNS-28", "c1", A, "svc.cluster.local", "F", nil},
		{"DNS-29", "c1", A, "ns1.svc.cluster.local", "F", nil},
		{"DNS-30", "c1", A, "cluster.local", "F", nil},
		{"DNS-31", "c1", A, "google", "F", nil},
		{"DNS-32", "c1", A, "productpage.ns1.svc.cluster.local.example.org", "F", nil},
		{"DNS-33", "c1", A, "_http._tcp.productpage.ns1.svc.cluster.local", "F", nil},
		{"DNS-34", "c1", A, "h0.db.ns1.svc.cluster.local", "F", nil},
		{"DNS-35", "c1", A, "www.google.com", "L: = A 240.240.0.1", nil},
		{"DNS-36", "c1", AAAA, "www.google.com", "L: = AAAA 2001:2::1", nil},
		{"DNS-37", "c1", A, "www.google.com.ns1.svc.cluster.local", "L: = CNAME www.google.com., www.google.com. A 240.240.0.1", nil},
		{"DNS-38", "c1", A, "www.google.com.svc.cluster.local", "L: = CNAME www.google.com., www.google.com. A 240.240.0.1", nil},
		{"DNS-39", "c1", A, "www.google.com.cluster.local", "L: = CNAME www.google.com., www.google.com. A 240.240.0.1", nil},
		{"DNS-40", "c1", A, "www.google.com.ns2.svc.cluster.local", "F", nil},
		{"DNS-41", "c2", A, "www.google.com.ns2.svc.cluster.local", "L: = CNAME www.google.com., www.google.com. A 240.240.0.1", nil},
		{"DNS-42", "c1", A, "api.example.com", "L: = A 240.240.0.2", nil},
		{"DNS-43", "c1", AAAA, "api.example.com", "ND", nil},
		{"DNS-44", "c1", A, "bare.example.com", "F", nil},
		{"DNS-45", "c1", A, "cidr.example.com", "F", nil},
		{"DNS-46", "c1", A, "foo.wildcard.test", "L: = A 240.240.0.3", nil},
		{"DNS-47", "c1", A, "wildcard.test", "F", nil},
		{"DNS-48", "c1", A, "a.b.wildcard.test", "L: = A 240.240.0.4", nil},
		{"DNS-49", "c1", A, "b.wildcard.test", "L: = A 240.240.0.3", nil},
		{"DNS-50", "c1", A, "x.y.b.wildcard.test", "L: = A 240.240.0.4", nil},
		{"DNS-51", "c1", A, "x.y.z.wildcard.test", "L: = A 240.240.0.3", nil},
		{"DNS-52", "c1", A, "*.wildcard.test", "L: = A 240.240.0.3", nil},
		{"DNS-53", "c1", A, "foo.wildcard.test.ns1.svc.cluster.local", "L: = A 240.240.0.3", nil},
		{"DNS-54", "c1", A, "foo.svc.mesh.company.net", "L: = A 240.240.0.5", nil},
		{"DNS-55", "c1", A, "foo.foons.svc.mesh.company.net", "L: = A 240.240.0.5", nil},
		{"DNS-56", "c1", A, "foo.none.test", "F", nil},
		{"DNS-57", "c1", A, "everywhere.io", "L: = A 240.240.0.21", nil},
		{"DNS-58", "c2", A, "everywhere.io", "L: = A 240.240.0.22", nil},
		{"DNS-59", "c9", A, "everywhere.io", "L: = A 240.240.0.23", nil},
		{"DNS-60", "c1", A, "canon.io", "L: = A 240.240.0.25", nil},
		{"DNS-61", "c1", A, "canon.io", "L: = A 240.240.0.25", preferred},
		{"DNS-62", "c2", A, "canon.io", "L: = A 240.240.0.24", nil},
		{"DNS-63", "c1", A, "preferred.io", "L: = A 240.240.0.27", nil},
		{"DNS-64", "c1", A, "preferred.io", "L: = A 240.240.0.28", preferred},
		{"DNS-65", "c1", A, "hidden.corp", "F", nil},
		{"DNS-66", "c2", A, "hidden.corp", "L: = A 240.240.0.29", nil},
		{"DNS-67", "c1", A, "split.corp", "L: = A 240.240.0.31", nil},
		{"DNS-68", "c2", A, "split.corp", "L: = A 240.240.0.30", nil},
		{"DNS-69", "c1", A, "shadow.ns2", "L: = A 240.240.0.34", nil},
		{"DNS-70", "c2", A, "shadow.ns2", "L: = A 10.96.0.35", nil},
		{"DNS-71", "c3", A, "shadow.ns2", "L: = A 10.96.0.35", nil},
		{"DNS-72", "c1", A, "api.upper.test", "L: = A 240.240.0.32", nil},
		{"DNS-73", "c1", A, "xn--bcher-kva.example", "L: = A 240.240.0.33", nil},
		{"DNS-74", "c1", A, "dual.ns1.svc.cluster.local", "L: = A 10.96.0.13", nil},
		{"DNS-75", "c1", AAAA, "dual.ns1.svc.cluster.local", "L: = AAAA fd00:96::13", nil},
		{"DNS-76", "c1", AAAA, "dual.ns1.svc.cluster.local", "ND", noIPv6},
		{"DNS-77", "c1", A, "v6svc", "ND", nil},
		{"DNS-78", "c1", AAAA, "v6svc", "L: = AAAA fd00:96::14", nil},
		{"DNS-79", "c1", A, "nw2only", "ND", nil},
		{"DNS-80", "cx", A, "nw2only", "L: = A 10.97.0.15", nil},
		{"DNS-81", "c1", A, "both", "L: = A 10.96.0.16", nil},
		{"DNS-82", "cx", A, "both", "L: = A 10.97.0.16", nil},
		{"DNS-83", "c1", A, "db", "L: = A 10.244.1.10, = A 10.244.1.11", nil},
		{"DNS-84", "c1", AAAA, "db", "ND", nil},
		{"DNS-85/A", "c1", A, "dbdual", "L: = A 10.244.1.10, = A 10.244.1.11", nil},
		{"DNS-85/AAAA", "c1", AAAA, "dbdual", "L: = AAAA fd00:10::10, = AAAA fd00:10::11", nil},
		{"DNS-86", "c1", A, "db6", "ND", nil},
		{"DNS-87", "c1", AAAA, "db6", "L: = AAAA fd00:10::20", nil},
		{"DNS-88", "c1", A, "notready", "ND", nil},
		{"DNS-89", "c1", A, "peers", "L: = A 10.244.1.30", nil},
		{"DNS-90", "c1", A, "empty", "ND", nil},
		{"DNS-91", "c1", A, "mapped.example.com", "L: = A 10.96.0.40", nil},
		{"DNS-92", "c1", AAAA, "mapped.example.com", "ND", nil},
		{"DNS-130", "c1", dns.TypeHTTPS, "www.google.com", "ND", nil},
		{"DNS-131", "c1", dns.TypeHTTPS, "www.bing.com", "F", nil},
		{"CNAME in the case that was asked", "c1", A, "ProductPage.Ns1.cluster.local", "L: = CNAME ProductPage.Ns1., ProductPage.Ns1. A 10.96.0.11", nil},
		{"search domain alone", "c1", A, "ns1.svc.cluster.local.ns1.svc.cluster.local", "F", nil},
		{"dot within a label", "c1", A, `productpage\.ns1.svc.cluster.local`, "F", nil},
		{"octet within a label", "c1", A, `\000.wildcard.test`, "F", nil},
		{"longest name", "c1", AAAA, long + "." + long + "." + long + "." + long[:47] + ".wildcard.test", "ND", nil},
	}
	for _, tt := range tests {
		for _, tcp := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/tcp=%v", tt.id, tcp), func(t *testing.T) {
				t.Parallel()
				var change []func(*Config)
				if tt.change != nil {
					change = append(change, tt.change)
				}
				s, u := newServer(t, change...)
				_, m := ask(t, s, tt.client, tcp, question(t, tt.qtype, tt.name))
				asked := dns.TypeToString[tt.qtype] + " " + dns.Fqdn(tt.name)
				if got := outcome(t, m, u.seen, asked); got != tt.want {
					t.Errorf("client %s, %s\n got %s\nwant %s", tt.client, asked, got, tt.want)
				}
				if diff := cmp.Diff([]dns.Question{{Name: dns.Fqdn(tt.name), Qtype: tt.qtype, Qclass: dns.ClassINET}}, m.Question); diff != "" {
					t.Errorf("question of the answer (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestShuffle(t *testing.T) { // DNS-93
	s, _ := newServer(t)
	q := question(t, dns.TypeA, "details.ns2.svc.cluster.remote")
	first := make(map[string]int)
	for range 1000 {
		_, m := ask(t, s, "c1", false, q)
		first[m.Answer[0].(*dns.A).A.String()]++
	}
	for _, a := range []string{"10.98.0.17", "10.98.0.18"} {
		if n := first[a]; n < 400 || n > 600 {
			t.Errorf("%s is first in %d of 1000 answers", a, n)
		}
	}
}

func TestSOA(t *testing.T) {
	now := changed
	s, _ := newServer(t, func(c *Config) { c.Now = func() time.Time { return now } })
	for _, tt := range []struct{ name, zone string }{
		{"empty.ns1.svc.cluster.local", "cluster.local."},
		{"EMPTY.ns1.svc.Cluster.Local", "Cluster.Local."},
		{"empty", "empty."},
		{"empty.ns1.svc", "empty.ns1.svc."},
		{"api.example.com", "api.example.com."},
		{"a.b.wildcard.test", "b.wildcard.test."},
		{"api.example.com.ns1.svc.cluster.local", "cluster.local."},
	} {
		_, m := ask(t, s, "c1", false, question(t, dns.TypeAAAA, tt.name))
		want := rr(tt.zone + " 5 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. 1700000000 7200 1800 86400 5")
		if len(m.Ns) != 1 || m.Ns[0].String() != want.String() {
			t.Errorf("AAAA %s: authority %v, want %v", tt.name, m.Ns, want)
		}
		now = now.Add(time.Second) // the serial is that of the state, not of the answer
	}
	s.cfg.Store.Replace(s.cfg.Store.Snapshot().State())
	_, m := ask(t, s, "c1", false, question(t, dns.TypeAAAA, "empty"))
	if got, want := m.Ns[0].(*dns.SOA).Serial, uint32(now.Unix()); got != want {
		t.Errorf("serial after a change = %d, want %d", got, want)
	}
}

// A workload that is not in the state yet has its names from its namespace and the node's network.
func TestClientThatIsNotKnownYet(t *testing.T) {
	s, _ := newServer(t)
	c := &workload.Client{UID: "w/new", Name: "new", Namespace: "ns1", ServiceAccount: "default"}
	raw, err := s.ServeDNS(t.Context(), c, pod, resolver, false, question(t, dns.TypeA, "productpage"), nil)
	m := new(dns.Msg)
	if err != nil || m.Unpack(raw) != nil || len(m.Answer) != 1 || !m.Authoritative {
		t.Errorf("answer = %v, %v, want the address of productpage.ns1", m, err)
	}
}

func TestStateOfTheMoment(t *testing.T) { // DNS-115, DNS-140, DNS-141
	s, u := newServer(t, func(c *Config) { c.Store = new(workload.Store) })
	q := question(t, dns.TypeA, "late.ext.test")
	if _, m := ask(t, s, "c1", false, q); m.Rcode != dns.RcodeNameError || len(u.seen) != 1 {
		t.Errorf("with an empty state: %v, want what the resolver says", m)
	}
	st, err := workload.ParseStatic("late", []byte(`{services: [{name: late, namespace: ns1, hostname: late.ext.test, vips: ["nw1/240.240.0.50"], ports: {80: 80}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	s.cfg.Store.Replace(st)
	if _, m := ask(t, s, "c1", false, q); len(m.Answer) != 1 || len(u.seen) != 1 {
		t.Errorf("after the service came: %v", m)
	}
	s.cfg.Store.Replace(workload.State{})
	if _, m := ask(t, s, "c1", false, q); m.Rcode != dns.RcodeNameError || len(u.seen) != 2 {
		t.Errorf("after the service went: %v", m)
	}
}

func BenchmarkLocal(b *testing.B) {
	s, _ := newServer(b)
	c := client("c1")
	for _, name := range []string{"productpage.ns1.svc.cluster.local", "www.google.com.ns1.svc.cluster.local"} {
		q := question(b, dns.TypeA, name, edns(1232))
		buf := make([]byte, 4096)
		b.Run("name="+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.ServeDNS(b.Context(), c, pod, resolver, false, q, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
