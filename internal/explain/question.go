package explain

import (
	"fmt"
	"net/netip"
	"net/url"

	"ztun.dev/ztun/proxy"
)

// A Question is about one flow, as somebody types it.
type Question struct {
	From      string // as Find has it; inbound also any other address
	To        string // as Target has it
	UDP       bool
	Inbound   bool // what the policies of the destination say
	Plaintext bool // inbound: the source has no identity
}

// Names of a Question in a query.
const (
	queryFrom      = "from"
	queryTo        = "to"
	queryUDP       = "udp"
	queryInbound   = "inbound"
	queryPlaintext = "plaintext"
)

// Query is the question in the query of a URL.
func (q Question) Query() url.Values {
	v := url.Values{queryFrom: {q.From}, queryTo: {q.To}}
	for name, is := range map[string]bool{queryUDP: q.UDP, queryInbound: q.Inbound, queryPlaintext: q.Plaintext} {
		if is {
			v.Set(name, "")
		}
	}
	return v
}

// ParseQuery reads a Query. Any value of the yes-or-no ones is a yes.
func ParseQuery(v url.Values) Question {
	return Question{From: v.Get(queryFrom), To: v.Get(queryTo), UDP: v.Has(queryUDP), Inbound: v.Has(queryInbound), Plaintext: v.Has(queryPlaintext)}
}

// Ask answers a question. Errors begin with from: or to: and say what the state does not have.
func (m Mesh) Ask(q Question) (r Report, err error) {
	from, err := m.Find(q.From)
	address, perr := netip.ParseAddr(q.From)
	anybody := q.Inbound && perr == nil // the address need not be a workload's
	if err != nil && !anybody {
		return r, fmt.Errorf("from: %w", err)
	}
	like := address.Unmap()
	if !anybody {
		like = addressOf(from)
	}
	to, err := m.Target(q.To, from, like)
	if err != nil {
		return r, fmt.Errorf("to: %w", err)
	}
	switch {
	case q.UDP:
		return m.UDP(from, to), nil
	case !q.Inbound:
		return m.Outbound(from, to), nil
	}
	at := m.State.WorkloadAt(m.Network, to.Addr())
	if at == nil {
		return r, fmt.Errorf("to: no workload has the address %s in network %q: policy is asked by the workload, not by the service", to.Addr(), m.Network)
	}
	source := like
	if !anybody {
		source = addressLike(from, to.Addr())
	}
	if !source.IsUnspecified() && proxy.StaysInPod(at.Addresses, source) {
		r = m.Outbound(at, to)
		r.Inbound = true
		return r, nil
	}
	if q.Plaintext {
		from = nil
	}
	return m.Inbound(from, source, at, to), nil
}
