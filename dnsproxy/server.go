package dnsproxy

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"ztun.dev/ztun/internal/workload"
)

// An Upstream asks a resolver. Exchange sends msg and returns the first answer that accept takes; accept is called with each
// message that arrives and must not keep it. The answer is in buf if it fits. Over UDP one that is longer is cut to
// len(buf); over TCP it is allocated.
type Upstream interface {
	Exchange(ctx context.Context, server netip.AddrPort, tcp bool, msg, buf []byte, accept func(answer []byte) bool) ([]byte, error)
}

// A Config configures a Server.
type Config struct {
	Store              *workload.Store
	Network            string // of clients whose workload is not known yet
	ClusterDomain      string // "": cluster.local
	PreferredNamespace string // whose services win among those of other namespaces, after canonical ones; "": none
	NoIPv6             bool   // AAAA of services: none
	Upstream           Upstream
	Now                func() time.Time
	Rand               func() uint64 // safe for concurrent use; the ids of forwarded questions come from it, so it must not be predictable
	Log                *slog.Logger
}

// A Server answers questions. It is safe for concurrent use.
type Server struct {
	cfg    Config
	domain string // of the cluster: lower case, without a dot at its end
	state  atomic.Pointer[version]
}

// A version is a snapshot and the serial number of zones made of it.
type version struct {
	snapshot *workload.Snapshot
	serial   uint32 // Unix time at which the snapshot was first seen
}

// New checks the configuration.
func New(cfg Config) (*Server, error) {
	if cfg.Store == nil || cfg.Upstream == nil || cfg.Now == nil || cfg.Rand == nil || cfg.Log == nil {
		return nil, errors.New("dnsproxy: config: Store, Upstream, Now, Rand and Log are required")
	}
	s := &Server{cfg: cfg, domain: ClusterDomain(cfg.ClusterDomain)}
	if _, ok := dns.IsDomainName(s.domain); !ok {
		return nil, errors.New("dnsproxy: config: ClusterDomain " + s.domain + " is not a domain name")
	}
	return s, nil
}

// ServeDNS answers one message of a client; server is the resolver that the application addressed. The answer is in buf if it fits,
// else allocated; it is nil if there is none to give: for what is not a question, and with an error if ctx was cancelled. That a
// resolver did not answer, also within ctx's deadline, is an answer (SERVFAIL). msg is not kept; buf must not overlap it.
func (s *Server) ServeDNS(ctx context.Context, client *workload.Client, _, server netip.AddrPort, tcp bool, msg, buf []byte) ([]byte, error) {
	if len(msg) < headerLen || flagsOf(msg)&flagQR != 0 {
		return nil, nil // not a question: an answer could start a loop
	}
	q := &query{msg: msg, tcp: tcp}
	switch opcodeOf(msg) {
	case dns.OpcodeQuery:
	case dns.OpcodeUpdate, dns.OpcodeNotify:
		q.parseQuestion() // of an update it is the zone
		return s.relay(ctx, q, server, buf)
	default:
		q.parseQuestion() // repeated, if there is one
		return q.fail(buf, dns.RcodeNotImplemented, noEDE), nil
	}
	switch rcode := q.parse(); {
	case rcode != dns.RcodeSuccess:
		return q.fail(buf, rcode, noEDE), nil
	case q.qtype == dns.TypeAXFR, q.qtype == dns.TypeIXFR:
		return q.fail(buf, dns.RcodeRefused, noEDE), nil // more than one message
	case q.signed:
		return s.relay(ctx, q, server, buf)
	case q.class == dns.ClassINET && locallyAnswered(q.qtype):
		if a, ok := s.lookup(client, q); ok {
			return a.pack(q, buf), nil
		}
	}
	return s.forward(ctx, q, server, buf)
}

// locallyAnswered reports whether questions of a type are answered for names of the mesh. SVCB and HTTPS have no data there:
// what another resolver says of such a name would lead past its virtual address.
func locallyAnswered(qtype uint16) bool {
	switch qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypeSVCB, dns.TypeHTTPS:
		return true
	}
	return false
}

// serial numbers a snapshot by the time at which it was first seen.
func (s *Server) serial(snap *workload.Snapshot) uint32 {
	for {
		v := s.state.Load()
		if v != nil && v.snapshot == snap {
			return v.serial
		}
		next := &version{snap, uint32(s.cfg.Now().Unix())}
		if s.state.CompareAndSwap(v, next) {
			return next.serial
		}
	}
}
