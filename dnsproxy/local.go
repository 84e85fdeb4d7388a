package dnsproxy

import (
	"net/netip"
	"strings"

	"github.com/miekg/dns"

	"ztun.dev/ztun/internal/workload"
)

// A local is an answer from the state.
type local struct {
	match  match
	addrs  []netip.Addr // shuffled; none: the name exists without data of the type
	zone   int          // of the SOA that an answer without data has: the number of labels at the end of the name
	domain string       // of the cluster
	serial uint32
}

// lookup answers from the current snapshot, if a service has the name.
func (s *Server) lookup(client *workload.Client, q *query) (local, bool) {
	name, ok := q.name()
	if !ok || name == "" {
		return local{}, false
	}
	snap := s.cfg.Store.Snapshot()
	network, namespace := s.cfg.Network, client.Namespace
	if w := snap.Local(client); w != nil {
		network, namespace = w.Network, w.Namespace
	}
	n := Names{
		Snapshot: snap, Namespace: namespace, Network: network, Domain: s.domain, PreferredNamespace: s.cfg.PreferredNamespace, NoIPv6: s.cfg.NoIPv6,
	}
	m, ok := n.find(name)
	if !ok {
		return local{}, false
	}
	a := local{match: m, domain: s.domain}
	if q.qtype == dns.TypeA || q.qtype == dns.TypeAAAA {
		a.addrs = n.Addresses(m.service, q.qtype == dns.TypeAAAA)
	}
	if len(a.addrs) == 0 {
		a.zone, a.serial = s.zone(name, m.service.Hostname), s.serial(snap)
	}
	for i := len(a.addrs) - 1; i > 0; i-- {
		j := int(s.cfg.Rand() % uint64(i+1))
		a.addrs[i], a.addrs[j] = a.addrs[j], a.addrs[i]
	}
	return a, true
}

// zone is the number of labels at the end of a name that make the zone of its SOA: the zone is the name or an ancestor of it (RFC 2308,
// section 3).
func (s *Server) zone(name, host string) int {
	host = strings.TrimPrefix(host, "*.")
	for _, z := range []string{s.domain, host} {
		if name == z || strings.HasSuffix(name, "."+z) {
			return strings.Count(z, ".") + 1
		}
	}
	return strings.Count(name, ".") + 1
}
