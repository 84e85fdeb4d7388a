package proxy

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

// A ConnectionsConfig configures Connections.
type ConnectionsConfig struct {
	Store      *workload.Store
	Group      *loop.Group
	Log        *slog.Logger
	Registerer prometheus.Registerer // nil: none

	PolicyWait         time.Duration // for a policy that a workload lists and that has not arrived: 1 s
	AllowMissingPolicy bool          // do not wait for it, and do not deny: ztunnel's way
}

// Connections are the open connections of the process, by pod. While Run runs, a change of the state has those inbound connections
// decided about again whose policies have changed, and the ones that are denied now are closed.
//
// That no change is missed rests on three things: a connection is here before policy decides about it; it tells which state it was
// decided by, and is decided about again if other policies applied then than Run has looked at; and policies are compared, not announced.
type Connections struct {
	cfg     ConnectionsConfig
	metrics *policyMetrics
	leaving atomic.Int64 // connections that were told to close and have not gone

	mu   sync.Mutex // guards below
	pods []*podConnections
	due  bool   // there is something for Run to look at
	wake func() // wakes Run while it waits
}

// NewConnections checks the configuration.
func NewConnections(cfg ConnectionsConfig) (*Connections, error) {
	if cfg.Store == nil || cfg.Group == nil || cfg.Log == nil {
		return nil, errors.New("proxy: connections config: Store, Group and Log are required")
	}
	if cfg.PolicyWait == 0 {
		cfg.PolicyWait = time.Second
	}
	c := &Connections{cfg: cfg, metrics: newPolicyMetrics(), due: true} // what changed before Run
	if cfg.Registerer != nil {
		if err := errors.Join(cfg.Registerer.Register(c.metrics.closed), cfg.Registerer.Register(c.metrics.decisions)); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Run enforces changes of policy until ctx ends: to the very end of the process, as long as there are connections. It may be given
// to loop.Group.Go.
func (c *Connections) Run(ctx context.Context) error {
	defer c.cfg.Store.Subscribe(c.ring)()
	var told int // since nobody was leaving
	var since time.Time
	for {
		if err := loop.Await(ctx, c.rest); err != nil {
			return nil
		}
		now := c.cfg.Group.Now()
		if told == 0 {
			since = now
		}
		told += c.look(now)
		if told > 0 && c.leaving.Load() == 0 {
			c.cfg.Log.Info("connections closed by policy", "count", told, "duration", c.cfg.Group.Now().Sub(since).Round(time.Microsecond).String())
			told = 0
		}
	}
}

// ring has Run look. It is safe from any goroutine.
func (c *Connections) ring() {
	c.mu.Lock()
	c.due = true
	wake := c.wake
	c.mu.Unlock()
	if wake != nil {
		wake()
	}
}

// rest begins a wait for ring.
func (c *Connections) rest(wake func()) {
	c.mu.Lock()
	c.wake = wake
	due := c.due
	c.mu.Unlock()
	if due {
		wake()
	}
}

// look decides again where policies have changed. It tells those that are denied to close and returns how many these are; it does not
// wait for them.
func (c *Connections) look(now time.Time) (told int) {
	c.mu.Lock()
	c.due = false
	pods := slices.Clone(c.pods)
	c.mu.Unlock()
	s := c.cfg.Store.Snapshot()
	for _, p := range pods {
		told += p.look(s, now)
	}
	return told
}

// Close tells all connections to end but those that the kernel carries; cause is what their lines say. It does not wait.
func (c *Connections) Close(cause error) {
	c.mu.Lock()
	pods := slices.Clone(c.pods)
	c.mu.Unlock()
	for _, p := range pods {
		p.each(func(x *connection) {
			if !x.Kernel() {
				x.Close(cause)
			}
		})
	}
}

// policyMetrics count what policy decided, and what it closed.
type policyMetrics struct {
	decisions *prometheus.CounterVec
	closed    *prometheus.CounterVec

	mu   sync.Mutex // guards below
	seen map[string]bool
}

// maxCutPolicies bounds the values of the label.
const maxCutPolicies = 1000

func newPolicyMetrics() *policyMetrics {
	return &policyMetrics{
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ztun_rbac_decisions_total", Help: "Decisions of policy about new inbound connections; would_deny: a policy for trial would have denied it.",
		}, []string{"result", "reason"}),
		closed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ztun_connections_closed_by_policy_total", Help: "Open connections that a change of policy closed, by the policy that denied them; none_allowed: none that allows them applies any more.",
		}, []string{"policy"}),
		seen: make(map[string]bool),
	}
}

// count counts an open connection that policy closes.
func (m *policyMetrics) count(policy string) {
	if policy == "" {
		policy = "none_allowed"
	}
	m.mu.Lock()
	switch {
	case m.seen[policy]:
	case len(m.seen) < maxCutPolicies:
		m.seen[policy] = true
	default:
		policy = "other"
	}
	m.mu.Unlock()
	m.closed.WithLabelValues(policy).Inc()
}

// podConnections are the open connections of one pod.
type podConnections struct {
	all    *Connections
	client *workload.Client

	mu       sync.Mutex // guards below
	lists    [2][]*connection
	workload *workload.Workload // the last that was known
	looked   uint64             // generation of the state that Run has looked at last
	policies []*workload.Policy // that applied then; nil: one that was missing
	ahead    bool               // a connection was admitted by a newer state, with other policies
	adopted  bool               // nobody has decided about some connections yet

	// Of Run.
	until   time.Time   // until when a missing one is waited for; zero: none is missing
	timer   *loop.Timer // rings then
	overdue bool        // that time is past
}

func (c *Connections) of(client *workload.Client) *podConnections {
	return &podConnections{all: c, client: client}
}

// Connections are the records of the pod's open connections.
func (p *Proxy) Connections() (list []*telemetry.Conn) {
	p.conns.each(func(c *connection) { list = append(list, c.Conn) })
	byID := func(a, b *telemetry.Conn) int { return cmp.Compare(a.ID, b.ID) }
	slices.SortFunc(list, byID)
	return slices.CompactFunc(list, func(a, b *telemetry.Conn) bool { return a == b })
}

// A connection is an open connection: its record, and its place among those of the pod. Its facts are what policy decides by.
type connection struct {
	*telemetry.Conn
	pod     *podConnections
	at      int // in its list
	state   atomic.Uint32
	waiting atomic.Bool // its set-up waits for a policy, and will decide itself
}

// The states of a connection.
const (
	connOpen uint32 = iota
	connTold        // to close, by policy
	connGone
)

// open begins the life of a connection; its set-up ends by closer. Finish ends it.
func (p *podConnections) open(records *telemetry.Recorder, f telemetry.Facts, closer func(cause error)) *connection {
	c := &connection{Conn: records.Open(f, closer), pod: p}
	p.mu.Lock()
	defer p.mu.Unlock()
	list := &p.lists[c.Direction]
	c.at = len(*list)
	*list = append(*list, c)
	if len(p.lists[0])+len(p.lists[1]) == 1 {
		p.all.join(p)
	}
	return c
}

// Finish takes the connection from the list and ends its record. Only the first call counts.
func (c *connection) Finish(err error) {
	before := c.state.Swap(connGone)
	if before == connGone {
		return
	}
	c.pod.remove(c)
	if denied, ok := errors.AsType[*PolicyError](c.Cause()); ok {
		c.SetPolicy(denied.Verdict.Policy)
	}
	c.Conn.Finish(err)
	if before == connTold {
		c.pod.all.left()
	}
}

func (c *Connections) left() {
	if c.leaving.Add(-1) == 0 {
		c.ring()
	}
}

func (p *podConnections) remove(c *connection) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.lists[c.Direction]
	last := len(list) - 1
	list[c.at] = list[last]
	list[c.at].at = c.at
	list[last] = nil
	if list = list[:last]; last == 0 {
		list = nil
	}
	p.lists[c.Direction] = list
	if len(p.lists[0])+len(p.lists[1]) == 0 {
		p.all.leave(p)
	}
}

// join and leave are called with the lock of the pod held.
func (c *Connections) join(p *podConnections) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods = append(c.pods, p)
}

func (c *Connections) leave(p *podConnections) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.pods, p)
	last := len(c.pods) - 1
	c.pods[i] = c.pods[last]
	c.pods[last] = nil
	c.pods = c.pods[:last]
}

// chunk is how many connections are taken from a list at once: the lock is held for well below a microsecond.
const chunk = 128

// each calls f, without the lock, for every connection that is open throughout; for some it may do so twice.
func (p *podConnections) each(f func(*connection)) {
	for d := range p.lists {
		p.eachOf(telemetry.Direction(d), f)
	}
}

// eachOf goes through a list from its end: what moves to the place of one that is removed has been seen, or comes yet.
func (p *podConnections) eachOf(d telemetry.Direction, f func(*connection)) {
	var some [chunk]*connection
	at := -1
	for {
		p.mu.Lock()
		list := p.lists[d]
		if at < 0 || at > len(list) {
			at = len(list)
		}
		n := copy(some[:], list[max(0, at-chunk):at])
		at -= n
		p.mu.Unlock()
		for _, c := range some[:n] {
			f(c)
		}
		if at == 0 {
			return
		}
	}
}

// decide has policy decide about an inbound connection, by the newest state.
func (c *connection) decide() authz.Verdict {
	p := c.pod
	for {
		s := p.all.cfg.Store.Snapshot()
		w := s.Local(p.client)
		if w == nil {
			w = c.Destination
		}
		v := authz.Evaluate(s, c.request(w))
		if p.decided(s, w, v.Allowed) {
			return v
		}
	}
}

// request is what policy decides by, but for the state.
func (c *connection) request(w *workload.Workload) *authz.Request {
	return &authz.Request{Source: c.Src, Peer: c.SrcIdentity, Destination: c.AppDst, Workload: w, IgnoreMissing: c.pod.all.cfg.AllowMissingPolicy}
}

// decided notes which state a connection was decided about by. False: Run has looked at a newer one, which counts.
func (p *podConnections) decided(s *workload.Snapshot, w *workload.Workload, admitted bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.Generation() < p.looked {
		return false
	}
	p.workload = w
	p.ahead = p.ahead || admitted && s.Generation() > p.looked && p.differ(s, w)
	return true
}

// adopt notes that connections come which nobody has decided about: the next change of the policies of s does. The pod has no others yet.
func (p *podConnections) adopt(s *workload.Snapshot, w *workload.Workload) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.adopted, p.workload, p.looked = true, w, s.Generation()
	p.policies = slices.Collect(authz.Applying(s, w))
}

// look decides again about the inbound connections if other policies apply than before, and tells those to close that are denied. A
// policy that has not arrived denies once it is overdue. A workload that has left the state keeps its policies: its removal is not a
// denial.
func (p *podConnections) look(s *workload.Snapshot, now time.Time) (told int) {
	p.mu.Lock()
	w := s.Local(p.client)
	if w == nil {
		w = p.workload
	}
	ahead, all := p.ahead, p.ahead || p.adopted
	p.workload, p.ahead, p.looked = w, false, s.Generation()
	again := ahead || w != nil && p.differ(s, w)
	var deny []*workload.Policy
	if again {
		before := p.policies
		p.policies = slices.Collect(authz.Applying(s, w))
		if p.adopted = false; !all {
			deny, all = authz.Changed(before, p.policies)
		}
	}
	missing := slices.Contains(p.policies, nil)
	p.mu.Unlock()
	if ahead {
		p.until = time.Time{} // nothing was missing when the newest connection was admitted
	}
	over := p.wait(missing, now)
	switch {
	case !over && !again, !over && !all && len(deny) == 0:
		return 0
	case over || all:
		p.eachOf(telemetry.Inbound, func(c *connection) {
			v := authz.Evaluate(s, c.request(w))
			if !v.Allowed && (v.Reason != authz.PolicyUnknown || p.overdue && !c.waiting.Load()) && c.deny(v) {
				told++
			}
		})
	default:
		// What all of them were allowed by has not changed: with 200 policies that saves 199 of 200 matches.
		p.eachOf(telemetry.Inbound, func(c *connection) {
			if v, denied := authz.Denied(deny, c.request(w)); denied && c.deny(v) {
				told++
			}
		})
	}
	return told
}

// differ reports whether other policies apply than when Run looked last. Policies are immutable, so that it is enough to see whether
// they are the same objects. mu is held.
func (p *podConnections) differ(s *workload.Snapshot, w *workload.Workload) bool {
	n := 0
	for policy := range authz.Applying(s, w) {
		if n == len(p.policies) || p.policies[n] != policy {
			return true
		}
		n++
	}
	return n < len(p.policies)
}

// wait begins and ends the wait for policies that are missing. It reports whether it is over just now, without them.
func (p *podConnections) wait(missing bool, now time.Time) bool {
	all := p.all
	switch {
	case all.cfg.AllowMissingPolicy || !missing:
		if p.timer != nil {
			p.timer.Stop()
		}
		p.timer, p.until, p.overdue = nil, time.Time{}, false
	case p.until.IsZero():
		p.overdue, p.until = false, now.Add(all.cfg.PolicyWait)
		p.timer = all.cfg.Group.After(all.cfg.PolicyWait, all.ring)
	case !p.overdue && !now.Before(p.until):
		p.overdue = true
		return true
	}
	return false
}

// deny tells a connection to close, by a reset of both sides. False: it was told before, or is gone.
func (c *connection) deny(v authz.Verdict) bool {
	all := c.pod.all
	all.leaving.Add(1)
	if !c.state.CompareAndSwap(connOpen, connTold) {
		all.left()
		return false
	}
	all.metrics.count(v.Policy)
	if log := all.cfg.Log; log.Enabled(context.Background(), slog.LevelDebug) {
		log.Debug("connection denied by a change of policy", "flow_id", c.ID, "src", c.Src.String(), "identity", c.SrcIdentity.String(), "dst", c.AppDst.String(), "verdict", v.String())
	}
	c.Close(&PolicyError{Verdict: v, Change: true})
	return true
}
