package node

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"ztun.dev/ztun/dnsproxy"
	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/stack"
	"ztun.dev/ztun/tun"
)

// A ReplayConfig says what a capture is played against. State, Source and Emit are required.
type ReplayConfig struct {
	State              workload.State
	Network            string // of the node
	ClusterDomain      string // "": cluster.local
	PreferredNamespace string // whose services win in DNS
	NoIPv6             bool   // DNS has no AAAA for services
	AllowUnknownPolicy bool

	// Local are the addresses of the pods that are served; empty: those of all workloads of the state that speak HBONE. A flow is
	// served by the pod that opened it if that is one of them, else by the pod that it was opened to.
	Local []netip.Addr

	Source *replay.Source
	Emit   func(r ReplayRecord) error // is given each flow and each DNS question once it is over
	Log    *slog.Logger               // nil: nothing is logged

	Compare *workload.State               // another state, in the same run
	Differ  func(a, b ReplayRecord) error // is given each pair whose outcome is not the same; one is nil if only the other state has it

	Wait func(ctx context.Context, t int64, first bool) error // until it is time for a packet, which may be the first of a capture; nil: no wait

	Peer      replay.Peer
	Replies   []byte
	Checksums replay.Checksums
	Decap     bool
	Only      func(id uint64, src, dst netip.AddrPort) bool // nil: all
	Recorded  *replay.Writer
	Played    *replay.Writer
	MaxOpen   int
}

// errCaptureEnds is the cause with which connections are closed that are open when the capture ends.
var errCaptureEnds = errors.New("the capture ends")

// Replay plays the captures of a Source through the pipeline that pods have: netstack, proxy, DNS and policy. Nothing but the Source's
// files is touched, and nothing depends on the time of day or on what else the machine does.
func Replay(ctx context.Context, cfg ReplayConfig) (*ReplayReport, error) {
	defer cfg.Source.Close()
	var first replay.Packet
	err := cfg.Source.Next(&first)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	empty := err != nil
	a := &replayRun{cfg: &cfg, emit: cfg.Emit}
	runs := []*replayRun{a}
	var c *comparison
	if cfg.Compare != nil {
		other := cfg
		other.State, other.Recorded, other.Played = *cfg.Compare, nil, nil
		b := &replayRun{cfg: &other, ids: a}
		runs = append(runs, b)
		c = newComparison(cfg.Differ)
		for side, r := range runs {
			c.open[side] = r.open
			emit := r.emit
			r.emit = func(rec ReplayRecord) error {
				c.take(side, rec)
				if emit == nil {
					return nil
				}
				return emit(rec)
			}
		}
	}
	for i, r := range runs {
		if err := r.start(first.Time); err != nil {
			for _, started := range runs[:i] {
				_ = started.end() // the error of the other says more
			}
			return nil, err
		}
	}
	err = nil
	if !empty {
		err = playAll(ctx, &cfg, runs, c, &first)
	}
	for _, r := range runs {
		err = errors.Join(err, r.end())
	}
	if c != nil && err == nil {
		err = c.end()
	}
	return a.report(), err
}

// ReplayScript plays a script in place of captures, of which cfg needs no Source, and tells of its steps. False: one has gone wrong.
func ReplayScript(cfg ReplayConfig, s *replay.Script, tell func(r *replay.StepResult) error) (ok bool, err error) {
	r := &replayRun{cfg: &cfg, emit: cfg.Emit}
	if err := r.start(0); err != nil {
		return false, err
	}
	ok, err = r.player.RunScript(s, tell)
	return ok, errors.Join(err, r.end())
}

// playAll plays packets in all runs, each before the next one; compared is nil if there is one run only.
func playAll(ctx context.Context, cfg *ReplayConfig, runs []*replayRun, compared *comparison, c *replay.Packet) error {
	captures := 0
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		begins := cfg.Source.Captures() != captures
		captures = cfg.Source.Captures()
		if cfg.Wait != nil {
			if err := cfg.Wait(ctx, c.Time, begins); err != nil {
				return err
			}
		}
		for _, r := range runs {
			if err := errors.Join(r.player.Play(c, begins), r.err); err != nil {
				return err
			}
		}
		if compared != nil {
			if err := compared.settle(); err != nil {
				return err
			}
		}
		if err := cfg.Source.Next(c); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// A replayRun is one pipeline. Everything happens in the goroutine that plays, or while that waits for it.
type replayRun struct {
	cfg  *ReplayConfig
	emit func(ReplayRecord) error
	err  error // the first of emit

	manual  *loop.Manual
	store   workload.Store
	records *telemetry.Recorder
	conns   *proxy.Connections
	player  *replay.Player
	stack   *stack.Stack
	reading <-chan error
	stop    context.CancelCauseFunc // ends what waits, and the reader
	base    context.Context
	pods    map[netip.Addr]*replayPod
	random  uint64 // state of the generator
	counts  map[string]int
	asking  map[uint64]bool // packets whose question has no answer yet
	ids     *replayRun      // by whose ids Only chooses; nil: the own ones
	names   replayNames
}

// A replayPod is a pod and its proxy, which is made when it is needed.
type replayPod struct {
	client workload.Client
	addrs  []netip.Addr
	proxy  *proxy.Proxy
}

func (p *replayPod) local(a netip.Addr) bool { return slices.Contains(p.addrs, a) }

// start builds the pipeline; its clock stands at the time of the first packet.
func (r *replayRun) start(at int64) (err error) {
	r.store.Replace(r.cfg.State)
	r.counts, r.asking = make(map[string]int), make(map[uint64]bool)
	if r.cfg.Log == nil {
		r.cfg.Log = slog.New(slog.DiscardHandler)
	}
	r.findPods()
	r.manual = loop.NewManual(time.Unix(0, at).UTC())
	r.base, r.stop = context.WithCancelCause(context.Background())
	group := r.manual.Group()
	r.records, err = telemetry.NewRecorder(telemetry.Config{Now: group.Now, Log: r.cfg.Log, Ended: r.ended, Classify: proxy.ClassifyError})
	if err != nil {
		return err
	}
	r.conns, err = proxy.NewConnections(proxy.ConnectionsConfig{Store: &r.store, Group: group, Log: r.cfg.Log, AllowMissingPolicy: r.cfg.AllowUnknownPolicy})
	if err != nil {
		return err
	}
	only := func(f *replay.Flow) bool {
		id := f.ID
		if r.ids != nil {
			id = r.ids.player.Began(f.Packet)
		}
		return r.cfg.Only(id, f.Src, f.Dst)
	}
	if r.cfg.Only == nil {
		only = nil
	}
	r.player, err = replay.New(replay.Config{
		Manual: r.manual, Start: at, Local: func(a netip.Addr) bool { return r.pods[a] != nil }, Uncaptured: r.uncaptured, Done: r.done, Seed: r.seed, Only: only,
		Peer: r.cfg.Peer, Replies: r.cfg.Replies, Checksums: r.cfg.Checksums, Decap: r.cfg.Decap, Recorded: r.cfg.Recorded, Played: r.cfg.Played,
		MaxOpen: r.cfg.MaxOpen,
	})
	if err != nil {
		return err
	}
	r.stack, err = stack.New(stack.Config{
		Device: r.player.Device(), Group: group, Handler: r, Log: r.cfg.Log, Manual: true, Rand: rand.NewChaCha8([32]byte{}),
		KeepaliveTime: -1, // applications live as long as the capture says nothing else
		UserTimeout:   -1,
	})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	r.reading = ended
	go func() { ended <- r.stack.Read(r.base) }() // adds its task, which runs by hand, and waits
	for !r.player.Device().Watched() {
		r.manual.Settle()
		runtime.Gosched()
	}
	return nil
}

// findPods tells whose addresses the local ones are.
func (r *replayRun) findPods() {
	r.pods = make(map[netip.Addr]*replayPod)
	s := r.store.Snapshot()
	byUID := make(map[string]*replayPod)
	add := func(a netip.Addr, w *workload.Workload) {
		if r.pods[a] != nil {
			return
		}
		if w == nil {
			r.pods[a] = &replayPod{client: workload.Client{Name: a.String()}, addrs: []netip.Addr{a}}
			return
		}
		p := byUID[w.UID]
		if p == nil {
			p = &replayPod{client: workload.Client{UID: w.UID, Name: w.Name, Namespace: w.Namespace, ServiceAccount: w.ServiceAccount}}
			byUID[w.UID] = p
		}
		p.addrs = append(p.addrs, a)
		r.pods[a] = p
	}
	for _, a := range r.cfg.Local {
		a = a.Unmap()
		add(a, s.WorkloadAt(r.cfg.Network, a))
	}
	if len(r.cfg.Local) > 0 {
		return
	}
	for _, w := range s.State().Workloads {
		if w.Protocol != workload.ProtocolHBONE || w.Network != r.cfg.Network {
			continue
		}
		for _, a := range w.Addresses {
			if s.WorkloadAt(r.cfg.Network, a) == w {
				add(a, w)
			}
		}
	}
}

// seed makes what is random about a flow depend on its addresses alone, so that it is decided about alike in each capture that has it.
func (r *replayRun) seed(f *replay.Flow) {
	h := fnv.New64a()
	for _, a := range []netip.AddrPort{f.Src, f.Dst} {
		b, _ := a.MarshalBinary() // never fails
		_, _ = h.Write(b)
	}
	r.random = h.Sum64()
}

// next is a random number: splitmix64 (Steele, Lea, Flood 2014).
func (r *replayRun) next() uint64 {
	r.random += 0x9e3779b97f4a7c15
	z := r.random
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// proxyOf is the proxy of a pod.
func (r *replayRun) proxyOf(p *replayPod) *proxy.Proxy {
	if p.proxy != nil {
		return p.proxy
	}
	dns, err := dnsproxy.New(dnsproxy.Config{
		Store: &r.store, Network: r.cfg.Network, ClusterDomain: r.cfg.ClusterDomain, PreferredNamespace: r.cfg.PreferredNamespace, NoIPv6: r.cfg.NoIPv6,
		Upstream: r.player.Resolver(), Now: r.manual.Group().Now, Rand: r.next, Log: r.cfg.Log,
	})
	if err == nil {
		p.proxy, err = proxy.New(proxy.Config{
			Client: &p.client, Local: p.local, Network: r.cfg.Network, Store: &r.store, Underlay: r.player.Underlay(r.connects),
			Tunnel: r.player.Tunnel(r.admit), DNS: answers{r, dns}, Resolver: &r.names, Records: r.records, Connections: r.conns, Group: r.manual.Group(), Rand: r.next, Log: r.cfg.Log,
		})
	}
	if err != nil {
		r.fail(err) // of the configuration: the flow gets no answer
		return nil
	}
	return p.proxy
}

func (r *replayRun) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// A flowNote is what the pipeline says of a flow.
type flowNote struct {
	answer   string // to the SYN
	accepted bool   // that was begun
	conn     *telemetry.Conn
	err      error
	opened   []ReplayConnect
	verdict  *authz.Verdict // of the destination's policy, with HBONE
	attempts int
	looked   []netip.Addr // that stand for hostnames of endpoints
}

func noteOf(f *replay.Flow) *flowNote {
	n, ok := f.Note.(*flowNote)
	if !ok {
		n = new(flowNote)
		f.Note = n
	}
	return n
}

// ServeTCP implements stack.Handler: it gives the flow to the proxy of its pod.
func (r *replayRun) ServeTCP(ctx context.Context, req stack.TCPRequest) {
	flow := req.Flow()
	f, p := r.player.Find(flow.Src, flow.Dst), r.podOf(flow)
	if f == nil || p == nil {
		req.Reset()
		return
	}
	px := r.proxyOf(p)
	if px == nil {
		req.Drop()
		return
	}
	n := noteOf(f)
	n.attempts++
	n.answer, n.accepted = "", false
	r.player.Serving(f)
	noted := &notedRequest{req, r, f, n}
	if n.err = checkAddresses(f); n.err != nil {
		noted.Unreachable(stack.HostUnreachable) // as the rules have it that refuse it
		return
	}
	px.ServeTCP(replay.WithFlow(ctx, f), noted)
}

// checkAddresses says why a flow does not come to a proxy.
func checkAddresses(f *replay.Flow) error {
	return cmp.Or(proxy.CheckAddress(f.Src.Addr()), proxy.CheckAddress(f.Dst.Addr()))
}

// uncaptured says why a packet between a pod and another address is not captured, or "".
func (r *replayRun) uncaptured(src, dst netip.Addr) string {
	p, other := r.pods[src], dst
	if p == nil {
		p, other = r.pods[dst], src
	}
	switch {
	case p == nil:
	case proxy.StaysInPod(p.addrs, other):
		return "stays_in_the_pod"
	case tun.IsProbe(other):
		return "kubelet_probe"
	}
	return ""
}

// podOf is the pod that serves a flow.
func (r *replayRun) podOf(f stack.Flow) *replayPod {
	if p := r.pods[f.Src.Addr()]; p != nil {
		return p
	}
	return r.pods[f.Dst.Addr()]
}

// ServeUDP implements stack.Handler.
func (r *replayRun) ServeUDP(_ context.Context, conn stack.UDPConn) {
	p := r.podOf(conn.Flow())
	if p == nil {
		return
	}
	if px := r.proxyOf(p); px != nil {
		id, packet := r.player.Asked()
		px.ServeUDP(context.WithValue(r.base, askedKey{}, asked{id, packet}), conn)
	}
}

// A notedRequest is a SYN whose answer is noted.
type notedRequest struct {
	stack.TCPRequest
	r *replayRun
	f *replay.Flow
	n *flowNote
}

// Accept implements stack.TCPRequest.
func (q *notedRequest) Accept(ctx context.Context) (loop.Conn, error) {
	q.n.accepted, q.n.answer = true, "accepted"
	c, err := q.TCPRequest.Accept(ctx)
	if err != nil {
		q.n.answer = "accepted, but not acknowledged"
	}
	return c, err
}

// Reset implements stack.TCPRequest.
func (q *notedRequest) Reset() { q.answered("reset"); q.TCPRequest.Reset() }

// Unreachable implements stack.TCPRequest.
func (q *notedRequest) Unreachable(c stack.Cause) {
	q.answered("unreachable")
	q.TCPRequest.Unreachable(c)
}

// Drop implements stack.TCPRequest.
func (q *notedRequest) Drop() { q.answered("none"); q.TCPRequest.Drop() }

func (q *notedRequest) answered(how string) {
	if q.f.Cut != replay.CutEnd { // what is cut then has no answer yet
		q.n.answer = how
	}
	q.r.player.Over(q.f)
}

// ended is told of the records of connections.
func (r *replayRun) ended(c *telemetry.Conn, err error) {
	f := r.player.Find(c.Src, c.OriginalDst)
	if f == nil {
		return
	}
	n := noteOf(f)
	n.conn, n.err = c, err
	if n.accepted {
		r.player.Over(f)
	}
}

// connects notes what the proxy connects to without HBONE.
func (r *replayRun) connects(f *replay.Flow, how string, dst netip.AddrPort) {
	n := noteOf(f)
	n.opened = append(n.opened, ReplayConnect{Kind: how, NextHop: r.names.told(n, dst.String())})
}

// admit plays the node of the destination, as far as its state is known here: policy decides before it connects to the application.
func (r *replayRun) admit(_ context.Context, f *replay.Flow, gateway, t *hbone.Target) error {
	n := noteOf(f)
	told := func(text string) string { return r.names.told(n, text) }
	c := ReplayConnect{Kind: "connect", NextHop: told(t.NextHop.String()), Authority: told(t.Authority), Accepts: texts(t.Accept), Headers: headersOf(&t.Headers)}
	if gateway != nil {
		c.NextHop = told(gateway.NextHop.String())
		c.Gateway = &ReplayConnect{Kind: "connect", NextHop: c.NextHop, Authority: gateway.Authority, Accepts: texts(gateway.Accept), Headers: headersOf(&gateway.Headers)}
	}
	n.opened = append(n.opened, c)
	if gateway != nil {
		return nil
	}
	s := r.store.Snapshot()
	dst, err := netip.ParseAddrPort(t.Authority)
	w := s.Workload(t.PeerUID)
	if err != nil || w == nil || !slices.Contains(w.Addresses, dst.Addr()) && !slices.Contains(n.looked, dst.Addr()) {
		return nil // a waypoint, which decides by itself
	}
	port, err := proxy.ApplicationPort(w, dst.Port())
	if err != nil {
		return &hbone.StatusError{Code: http.StatusServiceUnavailable, Reason: proxy.ErrorText(err)}
	}
	self, source := s.Local(&r.podOf(stack.Flow{Src: f.Src, Dst: f.Dst}).client), f.Src.Addr()
	if !slices.Contains(n.looked, t.NextHop.Addr()) { // which has a family by chance
		source = proxy.SourceAddress(self, source, t.NextHop.Addr())
	}
	v := authz.Evaluate(s, &authz.Request{
		Source: netip.AddrPortFrom(source, f.Src.Port()), Peer: self.Identity(), Destination: netip.AddrPortFrom(dst.Addr(), port), Workload: w,
		IgnoreMissing: r.cfg.AllowUnknownPolicy,
	})
	n.verdict = &v
	if !v.Allowed {
		return &hbone.StatusError{Code: http.StatusUnauthorized, Reason: (&proxy.PolicyError{Verdict: v}).Error()}
	}
	return nil
}

func texts(ids []workload.Identity) (list []string) {
	for _, id := range ids {
		list = append(list, id.String())
	}
	return list
}

// done is told of each flow that is over.
func (r *replayRun) done(f *replay.Flow) {
	rec := newReplayFlow(f)
	for _, a := range noteOf(f).looked {
		w := "the address of " + r.names.names[a] + " is looked up for each connection: here it is taken to be the recorded peer's"
		if !slices.Contains(rec.Warnings, w) {
			rec.Warnings = append(rec.Warnings, w)
		}
	}
	rec.Error = r.names.told(noteOf(f), rec.Error)
	r.counts[rec.Class]++
	r.give(rec)
}

func (r *replayRun) give(rec ReplayRecord) {
	if r.err == nil {
		r.err = r.emit(rec)
	}
}

// open reports whether something that began with a packet has not been told of.
func (r *replayRun) open(packet uint64) bool { return r.asking[packet] || r.player.Open(packet) }

type askedKey struct{}

// An asked is a question over UDP: its id, and the packet that it came in.
type asked struct{ id, packet uint64 }

// answers tells of each DNS question, whoever answers it.
type answers struct {
	r   *replayRun
	dns *dnsproxy.Server
}

// ServeDNS implements proxy.DNS.
func (a answers) ServeDNS(ctx context.Context, client *workload.Client, from, server netip.AddrPort, tcp bool, msg, buf []byte) ([]byte, error) {
	rec := &ReplayAnswer{Type: "dns", Start: text(a.r.player.When()), Client: from.String(), Server: server.String(), Proto: "udp", By: "mesh"}
	x, _ := ctx.Value(askedKey{}).(asked)
	rec.ID, rec.began = x.id, x.packet
	q := &replay.Question{Client: from, Local: true}
	if tcp {
		rec.Proto = "tcp"
		if q.Flow = replay.FlowOf(ctx); q.Flow != nil {
			rec.ID, rec.began = q.Flow.ID, q.Flow.Packet
		}
	} else {
		a.r.asking[rec.began] = true
	}
	if len(msg) >= 2 {
		q.ID = binary.BigEndian.Uint16(msg)
	}
	answer, err := a.dns.ServeDNS(replay.WithQuestion(ctx, q), client, from, server, tcp, msg, buf)
	if !q.Local {
		rec.By = "resolver"
	}
	rec.End = text(a.r.player.When())
	rec.describe(msg, answer, err)
	if !tcp {
		delete(a.r.asking, rec.began)
	}
	a.r.counts["dns_"+rec.By]++
	a.r.give(rec)
	return answer, err
}

// end ends the pipeline, in order.
func (r *replayRun) end() error {
	r.player.Finish(func() {
		var open []*telemetry.Conn
		r.records.Each(func(c *telemetry.Conn) { open = append(open, c) })
		slices.SortFunc(open, func(a, b *telemetry.Conn) int { return cmp.Compare(a.ID, b.ID) })
		for _, c := range open {
			c.Close(errCaptureEnds)
		}
		r.manual.Settle()
	})
	r.stop(errCaptureEnds)
	for waiting := true; waiting; {
		r.manual.Settle()
		select {
		case err := <-r.reading:
			r.fail(err)
			waiting = false
		default: // the reader's end is posted by its goroutine
			runtime.Gosched()
		}
	}
	err := r.stack.Close()
	r.manual.Settle()
	err = errors.Join(r.err, err, r.manual.Close())
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	return nil
}
