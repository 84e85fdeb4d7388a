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
	f := finder{s, snap, namespace}
	m, ok := f.find(name)
	if !ok {
		return local{}, false
	}
	a := local{match: m, addrs: s.addresses(snap, m.service, network, q.qtype), domain: s.domain}
	if len(a.addrs) == 0 {
		a.zone, a.serial = s.zone(name, m.service.Hostname), s.serial(snap)
	}
	for i := len(a.addrs) - 1; i > 0; i-- {
		j := int(s.cfg.Rand() % uint64(i+1))
		a.addrs[i], a.addrs[j] = a.addrs[j], a.addrs[i]
	}
	return a, true
}

// addresses are those of a service that a client in a network can reach, in the family that was asked for. They belong to the caller.
func (s *Server) addresses(snap *workload.Snapshot, v *workload.Service, network string, qtype uint16) []netip.Addr {
	var wanted func(netip.Addr) bool
	switch {
	case qtype == dns.TypeA && v.IPFamilies != workload.FamilyIPv6:
		wanted = netip.Addr.Is4
	case qtype == dns.TypeAAAA && v.IPFamilies != workload.FamilyIPv4 && !s.cfg.NoIPv6:
		wanted = netip.Addr.Is6
	default:
		return nil
	}
	var list []netip.Addr
	for _, a := range v.VIPs {
		if a.Network == network && wanted(a.Addr) {
			list = append(list, a.Addr)
		}
	}
	if len(v.VIPs) > 0 {
		return list
	}
	for _, e := range snap.Endpoints(v.Key()) {
		if e.Workload.Network != network {
			continue
		}
		for _, a := range e.Workload.Addresses {
			if wanted(a) {
				list = append(list, a)
				break
			}
		}
	}
	return list
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
