package proxy

import (
	"container/list"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// A Kernel carries connections of the pod whose bytes nobody has to see. Its methods may be called from any goroutine and must not
// block.
type Kernel interface {
	// Destroy resets the connection of the pod's socket between these addresses, on both sides; os.ErrNotExist: there is none.
	Destroy(local, remote netip.AddrPort) error
	// Forget has the next SYN of the flow decided about anew.
	Forget(f stack.Flow)
	// GiveUp is Forget for a flow that has not come to be. False: it has already. It may come to be still, should the pod's kernel have
	// answered without remembering (SYN cookies): AdoptUnknown finds it then.
	GiveUp(f stack.Flow, local, remote netip.AddrPort) bool
	// Remember says that connections of the pod from src to dst need not be decided about one by one for a while, if the state is still that of
	// generation then: Generation returns it, before the state is read that the decision rests on. Where nothing is remembered
	// both do nothing.
	Remember(src netip.Addr, dst netip.AddrPort, generation uint64) error
	Generation() uint64
	// ForgetDestinations takes back all that is remembered.
	ForgetDestinations()
}

// handedBack are the connections of a pod that the kernel carries, by flow. Those of one flow, from the same port one after the
// other, are in the order in which they were opened: the kernel tells of their ends in that order.
type handedBack struct {
	mu    sync.Mutex // guards below
	flows map[stack.Flow]*carried
	gone  bool      // LetGo was called
	fresh list.List // of *carried whose sockets nobody has seen, the oldest first
	looks uint64    // at the kernel's sockets

	unknown map[stack.Flow]bool // of AdoptUnknown
}

// A carried connection is one of handedBack, whose lock guards it.
type carried struct {
	*connection
	flow   stack.Flow
	next   *carried
	fresh  *list.Element // nil: its socket was seen, or it is not one of handedBack any more
	seen   uint64        // the look that saw its socket last
	missed int           // looks since then
}

// add returns nil after LetGo. fresh: nobody has seen the connection's socket, and there may be none.
func (h *handedBack) add(f stack.Flow, c *connection, fresh bool) *carried {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone {
		return nil
	}
	k := &carried{connection: c, flow: f}
	if fresh {
		k.fresh = h.fresh.PushBack(k)
	}
	if h.flows == nil {
		h.flows = make(map[stack.Flow]*carried)
	}
	if last := h.flows[f]; last != nil {
		for last.next != nil {
			last = last.next
		}
		last.next = k
	} else {
		h.flows[f] = k
	}
	return k
}

// remove takes k out; false if it was not there.
func (h *handedBack) remove(f stack.Flow, k *carried) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	var before *carried
	for x := h.flows[f]; x != nil; before, x = x, x.next {
		switch {
		case x != k:
			continue
		case before != nil:
			before.next = k.next
		case k.next != nil:
			h.flows[f] = k.next
		default:
			delete(h.flows, f)
		}
		h.confirm(k)
		return true
	}
	return false
}

// take takes the oldest of a flow out; nil: there is none. last: the flow has no other.
func (h *handedBack) take(f stack.Flow) (k *carried, last bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if k = h.flows[f]; k == nil {
		return nil, false
	}
	if h.flows[f] = k.next; k.next == nil {
		delete(h.flows, f)
	}
	h.confirm(k)
	return k, k.next == nil
}

// confirm takes k from the fresh ones. mu is held.
func (h *handedBack) confirm(k *carried) {
	if k.fresh != nil {
		h.fresh.Remove(k.fresh)
		k.fresh = nil
	}
}

// oldest takes the oldest fresh one from these, if there is no room for another.
func (h *handedBack) oldest(limit int) *carried {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fresh.Len() < limit {
		return nil
	}
	k := h.fresh.Front().Value.(*carried)
	h.confirm(k)
	return k
}

// errUnanswered ends the record of a connection that was given up for a newer one.
var errUnanswered = fmt.Errorf("%w: unanswered, and given up for a newer attempt", stack.ErrGone)

// boundFresh gives the oldest connection up whose socket nobody has seen, if these are too many: SYNs with forged addresses cost
// a record each, and only a look at the pod's sockets tells that there is none.
func (p *Proxy) boundFresh() {
	k := p.handed.oldest(p.cfg.MaxUnanswered)
	if k == nil {
		return
	}
	local, remote := k.ends()
	if p.cfg.Kernel.GiveUp(k.flow, local, remote) && p.handed.remove(k.flow, k) {
		p.evicted.Add(1)
		p.expectLate()
		k.Finish(errUnanswered)
	}
}

// Evicted counts connections in the kernel that were given up unanswered for newer ones.
func (p *Proxy) Evicted() uint64 { return p.evicted.Load() }

// lateFor is how long a connection may still come to be by a SYN cookie: a cookie is good for two minutes (MAX_SYNCOOKIE_AGE of Linux'
// include/net/tcp.h), and two looks have to see the connection.
const lateFor = 4 * time.Minute

// expectLate notes that a connection whose record ends may come to be without one.
func (p *Proxy) expectLate() { p.late.Store(p.cfg.Group.Now().Add(lateFor).UnixNano()) }

// MayComeLate reports whether there may be connections in the kernel without a record: AdoptUnknown finds them.
func (p *Proxy) MayComeLate() bool { return p.cfg.Group.Now().UnixNano() < p.late.Load() }

// ends are those of the pod's socket.
func (k *carried) ends() (local, remote netip.AddrPort) {
	if k.Direction == telemetry.Inbound {
		return k.flow.Dst, k.flow.Src
	}
	return k.flow.Src, k.flow.Dst
}

func (h *handedBack) has(f stack.Flow, k *carried) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for x := h.flows[f]; x != nil; x = x.next {
		if x == k {
			return true
		}
	}
	return false
}

// handBack has the kernel carry a connection from its SYN on. One that it cannot carry gets no answer: its next SYN is another attempt.
func (p *Proxy) handBack(req stack.TCPRequest, c *connection) (done bool) {
	f := req.Flow()
	p.boundFresh()
	k := p.carry(f, c, true)
	if k == nil {
		req.Drop()
		return false
	}
	err := c.Cause() // of who has closed it meanwhile
	if err == nil {
		err = req.HandBack()
	}
	if err != nil {
		p.handed.remove(f, k)
		c.CarriedByKernel(false)
		c.Finish(err)
		req.Drop()
	}
	return err == nil
}

// remember has the kernel carry further connections to where a flow was handed back to.
func (p *Proxy) remember(f stack.Flow, generation uint64) {
	if p.draining.Load() {
		return // had Drain forgotten everything before the generation was read
	}
	if err := p.cfg.Kernel.Remember(f.Src.Addr(), f.Dst, generation); err != nil {
		p.cfg.Log.Warn("destination not remembered", "flow", f.String(), "error", err.Error())
	}
}

// Begun takes the beginning of a connection to a destination that was remembered: the kernel carries it, and nobody has seen its SYN. It may
// be called from any goroutine.
func (p *Proxy) Begun(f stack.Flow) {
	state := p.cfg.Store.Snapshot()
	facts := outboundFlow(f)
	facts.Dst = f.Dst
	if self := state.Local(p.cfg.Client); self != nil {
		q := p.query(self, state, f)
		facts.Source = self
		if d := p.classify(state, &q); p.carries(&d, f) { // else the state has changed in these milliseconds
			facts = outboundFacts(facts, self, &d)
		}
	}
	p.carry(f, p.conns.open(p.cfg.Records, facts, nil), false)
}

// carry notes that the kernel carries a connection from now on, and how that is ended.
// It returns nil if the pod is not served any more, and ends the record.
func (p *Proxy) carry(f stack.Flow, c *connection, fresh bool) *carried {
	k := p.handed.add(f, c, fresh)
	if k == nil {
		c.Finish(nil)
		return nil
	}
	c.CarriedByKernel(true)
	c.SetCloser(func(cause error) { p.cut(f, k, cause, firstCut) })
	return k
}

// A CarriedFlow is a connection that the kernel carries already.
type CarriedFlow struct {
	Flow           stack.Flow
	Inbound        bool
	Received, Sent uint64 // bytes, from who opened it, and to it
}

// Adopt begins the records of connections that the kernel has carried for an earlier process, and returns how many there are: from now on
// changes of policy reach them, and what policy denies by now is cut. It is called before the pod is served. The pod's own workload has to be
// known. Unless decide is true, those that are there keep the path that they have until policies change.
func (p *Proxy) Adopt(flows []CarriedFlow, decide bool) int {
	state := p.cfg.Store.Snapshot()
	self := state.Local(p.cfg.Client)
	if p.cfg.Kernel == nil {
		return 0
	}
	if decide {
		p.expectLate() // what was answered by a SYN cookie before
	}
	if self == nil {
		return 0
	}
	p.conns.adopt(state, self)
	for _, x := range flows {
		p.adopt(state, self, x, decide)
	}
	p.conns.all.ring() // who looks at policies may have done so before
	return len(flows)
}

// adopt begins the record of one.
func (p *Proxy) adopt(state *workload.Snapshot, self *workload.Workload, x CarriedFlow, decide bool) {
	facts := p.inboundFacts(state, self, x.Flow)
	if !x.Inbound {
		facts = outboundFlow(x.Flow)
		facts.Dst, facts.Source, facts.Destination = x.Flow.Dst, self, state.WorkloadAt(p.cfg.Network, x.Flow.Dst.Addr())
	}
	c := p.conns.open(p.cfg.Records, facts, nil)
	c.Resume(x.Received, x.Sent)
	c.Established(p.cfg.Group.Now())
	if p.carry(x.Flow, c, false) == nil || !x.Inbound || !decide {
		return
	}
	switch v := c.decide(); {
	case v.Allowed:
		c.SetPolicy(v.Policy)
	case v.Reason != authz.PolicyUnknown: // that one is waited for, as with any open connection
		c.deny(v)
	}
}

// AdoptUnknown begins the records of those that have none, were in the list the last time too, and are not about to be told of therefore:
// they were given up, and came to be after all. It is called now and then, by one goroutine, and returns how many these are.
func (p *Proxy) AdoptUnknown(flows []CarriedFlow) (n int) {
	state := p.cfg.Store.Snapshot()
	self := state.Local(p.cfg.Client)
	if self == nil {
		return 0
	}
	var again []CarriedFlow
	unknown := make(map[stack.Flow]bool)
	h := &p.handed
	h.mu.Lock()
	for _, x := range flows {
		if h.flows[x.Flow] != nil {
			continue
		}
		if h.unknown[x.Flow] {
			again = append(again, x)
		} else {
			unknown[x.Flow] = true
		}
	}
	h.unknown = unknown
	h.mu.Unlock()
	for _, x := range again {
		p.adopt(state, self, x, true)
	}
	return len(again)
}

// carries reports whether the kernel may carry what was decided about an outbound flow: nothing is to be changed in it.
func (p *Proxy) carries(d *Decision, f stack.Flow) bool {
	return p.cfg.Kernel != nil && d.Route == Passthrough && d.NextHop == f.Dst
}

// carriesInbound reports whether the kernel may carry plaintext to the pod.
func (p *Proxy) carriesInbound() bool { return p.cfg.Kernel != nil && !p.cfg.OwnSource }

// A connection whose socket is not there yet when it is to be cut is looked for again, until it must be: the SYN was handed back
// moments ago. The end of one that was cut is told at once, but of one of an earlier process nobody tells.
const (
	firstCut = 10 * time.Millisecond
	lastCut  = 2 * time.Second
	untold   = 100 * time.Millisecond
)

// cut resets a connection that the kernel carries. Its end is then told as any other.
func (p *Proxy) cut(f stack.Flow, k *carried, cause error, again time.Duration) {
	if !p.handed.has(f, k) {
		return // what has these addresses now is another
	}
	p.cfg.Kernel.Forget(f)
	local, remote := k.ends()
	err := p.cfg.Kernel.Destroy(local, remote)
	finish := func() {
		if p.handed.remove(f, k) {
			k.Finish(cause)
		}
	}
	switch {
	case !p.handed.has(f, k):
		return
	case err == nil:
		p.cfg.Group.After(untold, finish)
		return
	case !errors.Is(err, os.ErrNotExist):
		p.cfg.Log.Error("connection in the kernel not cut", "flow", f.String(), "error", err.Error())
	}
	if again < lastCut {
		if p.cfg.Group.After(again, func() { p.cut(f, k, cause, 2*again) }) == nil {
			finish()
		}
		return
	}
	p.cutLast(f, k, cause)
}

// cutLast ends the record of a connection that was to be cut and has had no socket so far. It may come to be still, by a SYN cookie: then it
// is found (AdoptUnknown), and decided about.
func (p *Proxy) cutLast(f stack.Flow, k *carried, cause error) {
	local, remote := k.ends()
	givenUp := p.cfg.Kernel.GiveUp(f, local, remote)
	late := givenUp
	if !givenUp { // it has come to be since
		err := p.cfg.Kernel.Destroy(local, remote)
		if late = err != nil; late && !errors.Is(err, os.ErrNotExist) {
			p.cfg.Log.Error("connection in the kernel not cut", "flow", f.String(), "error", err.Error())
		}
	}
	if !p.handed.remove(f, k) {
		return
	}
	if late {
		p.expectLate()
	}
	k.Finish(cause)
}

// A KernelEnd is what became of a connection that the kernel has carried.
type KernelEnd struct {
	Established    bool
	Received, Sent uint64 // bytes, from who opened the connection, and to it
	Err            error  // of the socket: why it was not established, or broke
}

// Ended takes the end of the oldest connection of a flow that the kernel has carried. It may be called from any goroutine.
func (p *Proxy) Ended(f stack.Flow, e KernelEnd) {
	k, last := p.handed.take(f)
	if k == nil {
		return // of an earlier process
	}
	if last {
		p.cfg.Kernel.Forget(f)
	}
	k.Received.Store(e.Received)
	k.Sent.Store(e.Sent)
	k.Finish(e.cause(k.Direction, f))
}

// cause is nil for an ordinary end, as resets of established connections are.
func (e *KernelEnd) cause(d telemetry.Direction, f stack.Flow) error {
	switch {
	case !e.Established && e.Err == nil:
		return stack.ErrGone
	case !e.Established && d == telemetry.Inbound:
		return &connectError{e.Err}
	case !e.Established:
		return fmt.Errorf("connect %s: %w", f.Dst, e.Err)
	case e.Err == nil, errors.Is(e.Err, syscall.ECONNRESET), errors.Is(e.Err, syscall.EPIPE), errors.Is(e.Err, syscall.ECONNABORTED):
		return nil
	}
	return &brokenError{"in the kernel", e.Err}
}

// A KernelSocket is a connection of the pod as the kernel has it.
type KernelSocket struct {
	Local, Remote  netip.AddrPort
	Established    bool
	Received, Sent uint64 // bytes, by the application
}

// goneAfter is how many looks in a row do not see the socket of a connection that is over: one may miss a socket that changes.
const goneAfter = 2

// Look compares the connections that the kernel carries with its sockets, all of which sockets calls its argument for: it takes over how many bytes
// were moved, and ends those whose sockets are gone, should nobody have told. It is called now and then.
func (p *Proxy) Look(sockets func(f func(KernelSocket)) error) error {
	h := &p.handed
	h.mu.Lock()
	h.looks++
	look, empty := h.looks, len(h.flows) == 0
	h.mu.Unlock()
	if empty {
		return nil
	}
	now := p.cfg.Group.Now()
	err := sockets(func(s KernelSocket) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if k := h.flows[stack.Flow{Proto: stack.TCP, Src: s.Local, Dst: s.Remote}]; k != nil && k.next == nil && k.Direction == telemetry.Outbound {
			if s.Established {
				h.confirm(k)
			}
			k.see(look, now, s.Established, s.Sent-min(s.Sent, 1), s.Received) // without the SYN
		}
		if k := h.flows[stack.Flow{Proto: stack.TCP, Src: s.Remote, Dst: s.Local}]; k != nil && k.next == nil && k.Direction == telemetry.Inbound {
			if s.Established {
				h.confirm(k)
			}
			k.see(look, now, s.Established, s.Received, s.Sent)
		}
	})
	if err != nil {
		return err
	}
	gone := make(map[stack.Flow]KernelEnd)
	h.mu.Lock()
	for f, k := range h.flows {
		if k.seen == look {
			continue
		}
		if k.missed++; k.missed >= goneAfter {
			if k.fresh != nil && k.Direction == telemetry.Inbound {
				p.expectLate()
			}
			gone[f] = KernelEnd{Established: true, Received: k.Received.Load(), Sent: k.Sent.Load()}
		}
	}
	h.mu.Unlock()
	for f, end := range gone {
		p.Ended(f, end)
	}
	return nil
}

// see takes over what the kernel says of the connection's socket.
func (k *carried) see(look uint64, now time.Time, established bool, received, sent uint64) {
	first := k.seen == 0
	k.seen, k.missed = look, 0
	if established && first {
		k.Established(now)
	}
	before := k.Received.Swap(received) + k.Sent.Swap(sent)
	if before != received+sent {
		k.Active(now, 0)
	}
}

// LetGo ends the records of the connections that the kernel carries; these go on without us.
func (p *Proxy) LetGo() {
	h := &p.handed
	h.mu.Lock()
	flows := h.flows
	h.flows, h.gone = nil, true
	h.fresh.Init()
	h.mu.Unlock()
	for f, k := range flows {
		p.cfg.Kernel.Forget(f)
		for ; k != nil; k = k.next {
			k.Finish(nil)
		}
	}
}
