package dnsproxy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/miekg/dns"

	"ztun.dev/ztun/internal/loop"
)

// A ResolverConfig configures a Resolver. All fields but NoIPv6 and Entries are required.
type ResolverConfig struct {
	Upstream Upstream
	Servers  func() []netip.AddrPort // the process's own, of its resolv.conf
	Group    *loop.Group
	Rand     func() uint64 // as in Config
	NoIPv6   bool          // A only
	Entries  int           // names that are kept: 4096, ztunnel's
}

// A Resolver finds the addresses of hostnames outside the mesh: those of endpoints that have no address of their own. It asks the
// resolvers of this process, never the state. It is safe for concurrent use.
type Resolver struct {
	cfg ResolverConfig

	mu      sync.Mutex                // guards below
	known   *lru.Cache[string, found] // by name, absolute and in lower case
	pending map[string]*search        // what is being asked
}

// A found is what a name has led to.
type found struct {
	addrs []netip.Addr
	err   error // the name does not exist
	until time.Time
}

// A search is one lookup for everybody who wants the same name.
type search struct {
	found
	waiters []func()
}

const (
	minTTL      = 5 * time.Second // also of what does not exist
	maxTTL      = 24 * time.Hour
	searchTime  = 10 * time.Second        // of a name
	serverTime  = 2500 * time.Millisecond // of one question to one server
	askedRounds = 2                       // resolv.conf's attempts
)

// NewResolver checks the configuration.
func NewResolver(cfg ResolverConfig) (*Resolver, error) {
	if cfg.Upstream == nil || cfg.Servers == nil || cfg.Group == nil || cfg.Rand == nil {
		return nil, errors.New("dnsproxy: resolver config: Upstream, Servers, Group and Rand are required")
	}
	if cfg.Entries == 0 {
		cfg.Entries = 4096
	}
	known, err := lru.New[string, found](cfg.Entries)
	if err != nil {
		return nil, fmt.Errorf("dnsproxy: resolver config: Entries: %w", err)
	}
	return &Resolver{cfg: cfg, known: known, pending: make(map[string]*search)}, nil
}

// Resolve returns the addresses of a hostname, of both families. An answer is kept for as long as its records say, but for 5 s at
// least. An answer without addresses is none, and no error. It is called from set-ups (loop.Group.Go).
func (r *Resolver) Resolve(ctx context.Context, hostname string) ([]netip.Addr, error) {
	name := strings.ToLower(dns.Fqdn(hostname))
	if _, ok := dns.IsDomainName(name); !ok {
		return nil, fmt.Errorf("dnsproxy: %q is not a domain name", hostname)
	}
	var s *search
	err := loop.Await(ctx, func(wake func()) {
		var begin bool
		if s, begin = r.search(name, wake); begin {
			// It is not only for whoever came first, so it does not end with him.
			r.cfg.Group.Go(context.WithoutCancel(ctx), func(ctx context.Context) { r.end(name, s, r.ask(ctx, name)) })
		}
	})
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return s.addrs, s.err
}

// search is that for a name, which calls wake when it is over. begin: the caller has to begin it.
func (r *Resolver) search(name string, wake func()) (s *search, begin bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.known.Get(name); ok && r.cfg.Group.Now().Before(f.until) {
		wake()
		return &search{found: f}, false
	}
	if s = r.pending[name]; s == nil {
		s, begin = new(search), true
		r.pending[name] = s
	}
	s.waiters = append(s.waiters, wake)
	return s, begin
}

// end keeps what was found and wakes who waits. That nobody answered is not kept.
func (r *Resolver) end(name string, s *search, f found) {
	r.mu.Lock()
	s.found = f
	delete(r.pending, name)
	if !f.until.IsZero() {
		r.known.Add(name, f)
	}
	waiters := s.waiters
	s.waiters = nil
	r.mu.Unlock()
	for _, wake := range waiters {
		wake()
	}
}

// ask asks for both families at once.
func (r *Resolver) ask(ctx context.Context, name string) found {
	ctx, cancel := r.cfg.Group.WithTimeout(ctx, searchTime)
	defer cancel()
	types := []uint16{dns.TypeA}
	if !r.cfg.NoIPv6 {
		types = append(types, dns.TypeAAAA)
	}
	var mu sync.Mutex // guards below
	var answers []reply
	err := loop.Await(ctx, func(wake func()) {
		for _, t := range types {
			r.cfg.Group.Go(ctx, func(ctx context.Context) {
				a := r.askServers(ctx, name, t)
				mu.Lock()
				answers = append(answers, a)
				all := len(answers) == len(types)
				mu.Unlock()
				if all {
					wake()
				}
			})
		}
	})
	mu.Lock()
	defer mu.Unlock()
	f := merge(answers, r.cfg.Group.Now())
	if f.err == nil && len(f.addrs) == 0 && err != nil {
		f = found{err: err}
	}
	return f
}

// A reply is what the resolvers have said of a name and one type.
type reply struct {
	addrs []netip.Addr
	ttl   time.Duration
	err   error
	none  bool // err: the name does not exist
}

// merge makes one of the replies for both families. One that has addresses is enough.
func merge(answers []reply, now time.Time) (f found) {
	ttl, failed := maxTTL, error(nil)
	for _, a := range answers {
		switch {
		case a.err != nil && !a.none:
			failed = a.err
			continue
		case a.err != nil:
			f.err = a.err
		}
		if len(a.addrs) > 0 {
			ttl = min(ttl, a.ttl)
		}
		f.addrs = append(f.addrs, a.addrs...)
	}
	switch {
	case len(f.addrs) == 0 && failed != nil:
		return found{err: failed}
	case len(f.addrs) == 0, failed != nil: // the other family may have some soon
		ttl = minTTL
	}
	if len(f.addrs) > 0 {
		f.err = nil
	}
	f.until = now.Add(max(ttl, minTTL))
	return f
}

// askServers asks one server after the other, until one answers.
func (r *Resolver) askServers(ctx context.Context, name string, qtype uint16) reply {
	servers := r.cfg.Servers()
	err := errors.New("dnsproxy: resolv.conf names no resolver")
	for range askedRounds {
		for _, server := range servers {
			var a reply
			if a, err = r.askServer(ctx, server, name, qtype); err == nil {
				return a
			}
			if ctx.Err() != nil {
				return reply{err: context.Cause(ctx)}
			}
		}
	}
	return reply{err: err}
}

// askServer asks over UDP and, if the answer does not fit, over TCP. An error says that this server does not help.
func (r *Resolver) askServer(ctx context.Context, server netip.AddrPort, name string, qtype uint16) (reply, error) {
	ctx, cancel := r.cfg.Group.WithTimeout(ctx, serverTime)
	defer cancel()
	msg := addressQuestion(name, qtype, uint16(r.cfg.Rand()))
	q := query{msg: msg}
	if !q.parseQuestion() {
		return reply{}, fmt.Errorf("dnsproxy: no question about %s", name)
	}
	accept := func(answer []byte) bool {
		return len(answer) >= headerLen && binary.BigEndian.Uint16(answer) == binary.BigEndian.Uint16(msg) && q.answeredBy(answer)
	}
	answer, err := r.cfg.Upstream.Exchange(ctx, server, false, msg, make([]byte, maxUDP), accept)
	if err == nil && flagsOf(answer)&flagTC != 0 {
		answer, err = r.cfg.Upstream.Exchange(ctx, server, true, msg, make([]byte, maxUDP), accept)
	}
	if err != nil {
		return reply{}, err
	}
	return readReply(answer, server, name)
}

func addressQuestion(name string, qtype, id uint16) []byte {
	var m dns.Msg
	m.SetQuestion(name, qtype)
	m.Id = id
	msg, err := m.Pack()
	if err != nil { // the name was looked at before
		return make([]byte, headerLen)
	}
	return msg
}

// readReply takes all addresses of an answer, whatever names lead to them. Those that no other host can have are left out: a name must
// not lead into the pod that asks.
func readReply(answer []byte, server netip.AddrPort, name string) (reply, error) {
	var m dns.Msg
	if err := m.Unpack(answer); err != nil {
		return reply{}, fmt.Errorf("dnsproxy: answer of %s: %w", server, err)
	}
	switch m.Rcode {
	case dns.RcodeSuccess:
	case dns.RcodeNameError:
		return reply{err: fmt.Errorf("dnsproxy: %s does not exist, says %s", name, server), none: true}, nil
	default:
		return reply{}, fmt.Errorf("dnsproxy: question about %s: %s answers %s", name, server, dns.RcodeToString[m.Rcode])
	}
	a := reply{ttl: maxTTL}
	for _, rr := range m.Answer {
		var ip netip.Addr
		switch rr := rr.(type) {
		case *dns.A:
			ip, _ = netip.AddrFromSlice(rr.A.To4())
		case *dns.AAAA:
			ip, _ = netip.AddrFromSlice(rr.AAAA)
		}
		a.ttl = min(a.ttl, time.Duration(rr.Header().Ttl)*time.Second)
		ip = ip.Unmap()
		if ip.IsValid() && !ip.IsLoopback() && !ip.IsUnspecified() && !ip.IsMulticast() && !slices.Contains(a.addrs, ip) {
			a.addrs = append(a.addrs, ip)
		}
	}
	return a, nil
}
