package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"ztun.dev/ztun/dnsproxy"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
	"ztun.dev/ztun/stack"
)

// A ReplayRecord is what is said of a flow or a DNS question of a capture. Its JSON form is stable: keys only get added.
type ReplayRecord interface {
	Number() uint64
	Text() string
	// outcome is what a comparison of two states looks at.
	outcome() string
	// packet is the number of the packet that it began with: of the flow, or of the question over UDP.
	packet() uint64
}

// A ReplayFlow is a TCP connection of a capture and what becomes of it.
type ReplayFlow struct {
	Type        string          `json:"type"` // flow
	ID          uint64          `json:"id"`
	Start       string          `json:"start"` // by the capture's clock, UTC
	End         string          `json:"end"`
	Direction   string          `json:"direction"`
	Src         string          `json:"src"`
	Dst         string          `json:"dst"`
	Class       string          `json:"class"`                 // mesh, passthrough, inbound, dns, dropped, tunnel or midstream
	Source      *ReplayParty    `json:"source,omitempty"`      // as far as it is known
	Destination *ReplayParty    `json:"destination,omitempty"` //
	Service     string          `json:"service,omitempty"`     // hostname
	Opened      []ReplayConnect `json:"opened,omitempty"`      // what would be connected to, in this order
	Policy      *ReplayPolicy   `json:"policy,omitempty"`      // of the destination
	Answer      string          `json:"answer,omitempty"`      // to the SYN: accepted, reset, unreachable, none, or "not captured"
	Attempts    int             `json:"attempts,omitempty"`    // SYNs that were decided about, if there were several
	Kernel      bool            `json:"kernel,omitempty"`      // carries it: of what was to be captured there is the SYN only
	Sent        uint64          `json:"sent"`                  // bytes that were carried from Src
	Received    uint64          `json:"received"`              // and to it
	Recorded    ReplayCounts    `json:"recorded"`
	Flags       string          `json:"responseFlags,omitempty"`
	Close       string          `json:"close"` // why it is over
	Error       string          `json:"error,omitempty"`
	Warnings    []string        `json:"warnings,omitempty"`

	began uint64 // packet of the input, from 1 on
}

// ReplayCounts are packets as they were captured.
type ReplayCounts struct {
	Sent     replay.Count `json:"sent"`
	Received replay.Count `json:"received"`
}

// A ReplayParty is one of the two sides of a flow.
type ReplayParty struct {
	Workload string `json:"workload,omitempty"` // namespace/name
	Identity string `json:"identity,omitempty"` // that it proves, or would have to
}

// A ReplayConnect is a connection that would be made for a flow.
type ReplayConnect struct {
	Kind      string            `json:"kind"` // connect (over HBONE), dial, deliver or loopback
	NextHop   string            `json:"nextHop"`
	Authority string            `json:"authority,omitempty"`
	Accepts   []string          `json:"accepts,omitempty"` // identities of which the peer has to present one
	Headers   map[string]string `json:"headers,omitempty"`
	Gateway   *ReplayConnect    `json:"gateway,omitempty"` // the stream that this one is within
}

// A ReplayPolicy is what policy says.
type ReplayPolicy struct {
	Allowed bool   `json:"allowed"`
	Verdict string `json:"verdict"`
	At      string `json:"at"` // who decides: here, or the node of the destination, with its own state
}

// A ReplayAnswer is a DNS question and its answer.
type ReplayAnswer struct {
	Type    string   `json:"type"` // dns
	ID      uint64   `json:"id"`   // over TCP that of the flow
	Start   string   `json:"start"`
	End     string   `json:"end"`
	Proto   string   `json:"proto"`
	Client  string   `json:"client"`
	Server  string   `json:"server"` // that was asked
	Name    string   `json:"name"`
	Query   string   `json:"query"`           // type that was asked for
	By      string   `json:"by"`              // who answers: mesh or resolver
	Rcode   string   `json:"rcode,omitempty"` // empty: no answer
	Answers []string `json:"answers,omitempty"`
	Cut     bool     `json:"truncated,omitempty"`
	Error   string   `json:"error,omitempty"`

	began uint64 // packet of the input, from 1 on; over TCP that of the flow
}

// text is a time as records have it.
func text(nanos int64) string {
	return time.Unix(0, nanos).UTC().Format("2006-01-02T15:04:05.000000000Z")
}

func headersOf(h *hbone.Headers) map[string]string {
	m := map[string]string{"baggage": h.Baggage}
	for name, v := range map[string]string{"forwarded": h.Forwarded, "traceparent": h.Traceparent} {
		if v != "" {
			m[name] = v
		}
	}
	if h.CrossNetwork {
		m["x-forwarded-network"] = h.ForwardedNetwork
	}
	return m
}

func newReplayFlow(f *replay.Flow) *ReplayFlow {
	r := &ReplayFlow{
		Type: "flow", ID: f.ID, Start: text(f.Start), End: text(f.End), Src: f.Src.String(), Dst: f.Dst.String(), Direction: telemetry.Outbound.String(),
		Recorded: ReplayCounts{f.Sent, f.Received}, Warnings: f.Warnings(), began: f.Packet,
	}
	if f.Inbound {
		r.Direction = telemetry.Inbound.String()
	}
	switch f.Kind {
	case replay.Midstream:
		r.Class, r.Close = "midstream", "its beginning is not in the capture: nothing was decided"
		return r
	case replay.TunnelLeg:
		r.Class, r.Close = "tunnel", "a connection between nodes, which is not captured"
		return r
	}
	n := noteOf(f)
	if r.Kernel = f.Cut == replay.CutCarried; r.Kernel {
		n.answer, n.err = answerNotCaptured, nil
	}
	r.Opened, r.Answer = n.opened, n.answer
	if n.attempts > 1 {
		r.Attempts = n.attempts
	}
	if n.verdict != nil {
		r.Policy = &ReplayPolicy{Allowed: n.verdict.Allowed, Verdict: n.verdict.String(), At: "destination"}
	}
	if n.conn != nil {
		r.facts(n)
	}
	r.classify(f, n)
	r.closed(f, n)
	return r
}

// facts fills in what the record of the connection has.
func (r *ReplayFlow) facts(n *flowNote) {
	c := n.conn
	r.Source, r.Destination = party(c.Source, c.SrcIdentity), party(c.Destination, c.DstIdentity)
	r.Service = c.Service
	r.Sent, r.Received = c.Received.Load(), c.Sent.Load() // of the side that opened the connection
	flag := telemetry.FlagNone
	if n.err != nil {
		flag, _ = proxy.ClassifyError(n.err)
	}
	r.Flags = flag.String()
	var denied *proxy.PolicyError
	switch {
	case errors.As(n.err, &denied):
		r.Policy = &ReplayPolicy{Verdict: denied.Verdict.String(), At: "here"}
	case c.Direction == telemetry.Inbound && !c.EarlyFailure && c.Policy != "":
		r.Policy = &ReplayPolicy{Allowed: true, Verdict: "explicitly allowed by: " + c.Policy, At: "here"}
	case c.Direction == telemetry.Inbound && !c.EarlyFailure:
		r.Policy = &ReplayPolicy{Allowed: true, Verdict: "no allow policies", At: "here"}
	}
}

func party(w *workload.Workload, id workload.Identity) *ReplayParty {
	p := new(ReplayParty)
	if w != nil {
		p.Workload = w.Namespace + "/" + w.Name
	}
	if !id.IsZero() {
		p.Identity = id.String()
	}
	if *p == (ReplayParty{}) {
		return nil
	}
	return p
}

func (r *ReplayFlow) classify(f *replay.Flow, n *flowNote) {
	refused := n.answer != "accepted" && n.answer != "accepted, but not acknowledged" && !r.Kernel
	switch {
	case n.conn != nil && n.conn.EarlyFailure, r.Policy != nil && !r.Policy.Allowed:
		r.Class = "dropped"
	case !f.Inbound && proxy.IsQuestion(f.Dst) && !refused:
		r.Class = "dns"
	case n.conn == nil && len(n.opened) == 0:
		r.Class = "dropped"
	case f.Inbound:
		r.Class = "inbound"
	case n.conn != nil && n.conn.Protocol != telemetry.TCP, len(n.opened) > 0 && n.opened[len(n.opened)-1].Kind == "connect":
		r.Class = "mesh"
	default:
		r.Class = "passthrough"
	}
}

// errNoSYN is the reason of a flow whose SYNs make no sense.
var errNoSYN = errors.New("the netstack took no SYN of it")

// answerNotCaptured is that of a flow which the kernel carries.
const answerNotCaptured = "not captured"

func (r *ReplayFlow) closed(f *replay.Flow, n *flowNote) {
	switch {
	case n.attempts == 0:
		r.Close, r.Error = "refused", cmp.Or(checkAddresses(f), errNoSYN).Error()
		return
	case f.Cut == replay.CutEnd && (n.err == nil || errors.Is(n.err, errCaptureEnds)):
		r.Close = errCaptureEnds.Error()
		r.Flags = telemetry.FlagNone.String()
		return
	case r.Kernel:
		r.Close = "the kernel carries it: the capture has its SYN only"
		return
	case f.Cut == replay.CutTooMany:
		r.Close = "given up: too many flows are open at once"
		return
	case f.Cut == replay.CutReused:
		r.Close = "its ports were used again"
		return
	case n.err == nil && n.conn != nil:
		r.Close = "ended"
	case r.Policy != nil && !r.Policy.Allowed:
		r.Close = "denied"
	case n.answer == "none" || errors.Is(n.err, context.DeadlineExceeded):
		r.Close = "no answer"
	case n.answer == "accepted":
		r.Close = "broken"
	default:
		r.Close = "refused"
	}
	switch {
	case n.err != nil:
		r.Error = n.err.Error()
	case n.conn == nil && n.answer == "reset": // before there was a record
		r.Error = "a limit of connections for questions was reached"
	}
}

func (r *ReplayAnswer) describe(question, answer []byte, err error) {
	if d, ok := dnsproxy.Describe(question); ok {
		r.Name, r.Query = d.Name, d.Type
	}
	if err != nil {
		r.Error = err.Error()
	}
	if d, ok := dnsproxy.Describe(answer); ok && len(answer) > 0 {
		r.Rcode, r.Answers, r.Cut = d.Rcode, d.Answers, d.Cut
	}
}

// Number implements ReplayRecord.
func (r *ReplayFlow) Number() uint64 { return r.ID }

// Number implements ReplayRecord.
func (r *ReplayAnswer) Number() uint64 { return r.ID }

func (r *ReplayFlow) packet() uint64   { return r.began }
func (r *ReplayAnswer) packet() uint64 { return r.began }

func (r *ReplayFlow) outcome() string {
	parts := []string{r.Class, r.Answer, r.Service}
	if r.Destination != nil {
		parts = append(parts, r.Destination.Workload)
	}
	for _, c := range r.Opened {
		parts = append(parts, c.Kind+" "+c.NextHop+" "+c.Authority)
	}
	if r.Policy != nil {
		parts = append(parts, r.Policy.Verdict)
	}
	return strings.Join(append(parts, r.Error), "\n")
}

func (r *ReplayAnswer) outcome() string {
	return strings.Join(append([]string{r.Name, r.Query, r.By, r.Rcode}, r.Answers...), "\n")
}

// Outcome is the outcome in a few words.
func Outcome(r ReplayRecord) string {
	switch r := r.(type) {
	case *ReplayFlow:
		s := r.Class
		if n := len(r.Opened); n > 0 && r.Class != "dropped" {
			s += " by " + r.Opened[n-1].NextHop
			if a := r.Opened[n-1].Authority; a != "" {
				s += " to " + a
			}
		}
		switch {
		case r.Policy != nil:
			s += ", " + r.Policy.String()
		case r.Error != "":
			s += ", " + r.Error
		}
		return s
	case *ReplayAnswer:
		return r.answer()
	}
	return "nothing"
}

func (p *ReplayPolicy) String() string {
	if p.Allowed {
		return "allowed: " + p.Verdict
	}
	return "denied: " + p.Verdict
}

// Text implements ReplayRecord: a few lines for people.
func (r *ReplayFlow) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  flow %d  %s %s -> %s  %s\n", short(r.Start), r.ID, r.Direction, r.Src, r.Dst, r.Class)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "    %-12s "+format+"\n", append([]any{name}, args...)...)
	}
	for _, side := range []struct {
		name string
		p    *ReplayParty
	}{{"source", r.Source}, {"destination", r.Destination}} {
		if side.p != nil {
			line(side.name, "%s", strings.TrimSpace(side.p.Workload+" "+side.p.Identity))
		}
	}
	if r.Service != "" {
		line("service", "%s", r.Service)
	}
	for i := range r.Opened {
		r.Opened[i].text(line)
	}
	if r.Policy != nil {
		line("policy", "%s", r.Policy)
	}
	if r.Answer != "" {
		line("answer", "%s", r.Answer)
	}
	if r.Class != "midstream" && r.Class != "tunnel" && !r.Kernel {
		line("carried", "%d bytes sent, %d received", r.Sent, r.Received)
	}
	end := r.Close
	if r.Error != "" && end != "denied" {
		end += ": " + r.Error
	}
	line("end", "%s  %s", short(r.End), end)
	for _, w := range r.Warnings {
		line("warning", "%s", w)
	}
	return b.String()
}

func (c *ReplayConnect) text(line func(name, format string, args ...any)) {
	if c.Kind != "connect" {
		line(c.Kind, "%s", c.NextHop)
		return
	}
	if c.Gateway != nil {
		c.Gateway.text(line)
		line("within", "CONNECT %s", c.Authority)
	} else {
		line("HBONE", "CONNECT %s by %s", c.Authority, c.NextHop)
	}
	line("expects", "%s", strings.Join(c.Accepts, " "))
	for _, name := range slices.Sorted(maps.Keys(c.Headers)) {
		line("", "%s: %s", name, c.Headers[name])
	}
}

// short is the time of day.
func short(t string) string { return strings.TrimSuffix(t[strings.IndexByte(t, 'T')+1:], "Z") }

func (r *ReplayAnswer) answer() string {
	switch {
	case r.Rcode == "":
		return cmp.Or(r.Error, "no answer")
	case len(r.Answers) == 0:
		return r.Rcode + ", by " + r.By
	}
	return r.Rcode + " " + strings.Join(r.Answers, ", ") + ", by " + r.By
}

// Text implements ReplayRecord.
func (r *ReplayAnswer) Text() string {
	return fmt.Sprintf("%s  dns %d  %s %s -> %s  %s %s\n    %-12s %s\n", short(r.Start), r.ID, r.Proto, r.Client, r.Server, r.Name, r.Query, "answer", r.answer())
}

// A ReplayReport sums a replay up. Its JSON form is stable: keys only get added.
type ReplayReport struct {
	Captures int               `json:"captures"`
	Packets  replay.Counts     `json:"packets"`
	Records  map[string]int    `json:"records"`            // flows by class, questions by who answers
	Stack    map[string]uint64 `json:"stack"`              // what the netstack got, and what it dropped, by reason
	Problems []replay.Problem  `json:"problems,omitempty"` // what of the input could not be used
}

func (r *replayRun) report() *ReplayReport {
	st := r.stack.Stats()
	rep := &ReplayReport{
		Captures: r.cfg.Source.Captures(), Packets: r.player.Counts(), Records: r.counts, Problems: r.cfg.Source.Problems(),
		Stack: map[string]uint64{"received": st.RxPackets, "sent": st.TxPackets, "requests": st.Requests, "accepted": st.Accepted, "datagrams": st.Datagrams},
	}
	for why, n := range st.Drops {
		if n > 0 {
			rep.Stack["dropped_"+stack.DropReason(why).String()] = n
		}
	}
	for _, link := range slices.Sorted(maps.Keys(rep.Packets.LinkTypes)) {
		rep.Problems = append(rep.Problems, replay.Problem{File: "link type " + link, Text: fmt.Sprintf("not supported: %d packets were passed over", rep.Packets.LinkTypes[link])})
	}
	return rep
}
