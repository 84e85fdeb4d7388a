package dnsproxy

import (
	"encoding/binary"
	"strings"

	"github.com/miekg/dns"
)

const (
	localTTL    = 30 // seconds; ztunnel's
	negativeTTL = 5  // seconds that "no data" may be kept: operators that wait for an endpoint ask again and again

	pointer   = 0xc000 // to a name that is there already; RFC 1035, section 4.1.4
	recordLen = 12     // with such an owner and without data

	optLen = 11 // without options; RFC 6891, section 6.1.2
	optDO  = 1 << 15
)

// Extended errors (RFC 8914, section 4).
const (
	noEDE            = -1
	edeNotReachable  = 22
	edeNetworkError  = 23
	edeOption        = 15
	edeOptionDataLen = 2
)

// A writer appends records to an answer as long as they fit.
type writer struct {
	b     []byte
	limit int // without what is reserved for the OPT record
	cut   bool
}

// begin writes header and question. The counts of records are zero yet.
func (q *query) begin(buf []byte, flags uint16) *writer {
	w := &writer{b: buf[:0], limit: q.limit()}
	if q.edns {
		w.limit -= optLen
	}
	w.b = append(w.b, q.msg[0], q.msg[1])
	w.b = binary.BigEndian.AppendUint16(w.b, flagQR|flagRA|flagsOf(q.msg)&(maskOpcode|flagRD|flagCD)|flags)
	w.b = append(w.b, 0, 0, 0, 0, 0, 0, 0, 0)
	if len(q.question) > 0 {
		w.b[5] = 1
		w.b = append(w.b, q.question...)
	}
	return w
}

// Sections of a message, in the order of the header's counts.
const (
	answers    = 1
	authority  = 2
	additional = 3
)

// add appends a record of class IN and counts it. If it does not fit it is left out; of answers, all that follow are, too, and the
// client is told. The owner is the offset of a name, the data are in wire form.
func (w *writer) add(section, owner int, rtype uint16, ttl uint32, data []byte) {
	if w.cut || len(w.b)+recordLen+len(data) > w.limit {
		w.cut = w.cut || section == answers
		return
	}
	w.b = binary.BigEndian.AppendUint16(w.b, uint16(pointer|owner))
	w.b = binary.BigEndian.AppendUint16(w.b, rtype)
	w.b = binary.BigEndian.AppendUint16(w.b, dns.ClassINET)
	w.b = binary.BigEndian.AppendUint32(w.b, ttl)
	w.b = binary.BigEndian.AppendUint16(w.b, uint16(len(data)))
	w.b = append(w.b, data...)
	w.count(section)
}

func (w *writer) count(section int) {
	at := w.b[4+2*section:]
	binary.BigEndian.PutUint16(at, binary.BigEndian.Uint16(at)+1)
}

// end sets TC if something is missing and appends the OPT record if the client sent one. rcode is the whole extended one.
func (w *writer) end(q *query, rcode, ede int) []byte {
	flags := flagsOf(w.b)
	if w.cut {
		flags |= flagTC
	}
	binary.BigEndian.PutUint16(w.b[2:], flags|uint16(rcode&maskRcode))
	if !q.edns {
		return w.b
	}
	w.b = append(w.b, 0)
	w.b = binary.BigEndian.AppendUint16(w.b, dns.TypeOPT)
	w.b = binary.BigEndian.AppendUint16(w.b, maxUDP)
	w.b = append(w.b, byte(rcode>>4), 0)
	var z uint16
	if q.do {
		z = optDO
	}
	w.b = binary.BigEndian.AppendUint16(w.b, z)
	if ede == noEDE {
		w.b = append(w.b, 0, 0)
	} else {
		w.b = binary.BigEndian.AppendUint16(w.b, 4+edeOptionDataLen)
		w.b = binary.BigEndian.AppendUint16(w.b, edeOption)
		w.b = binary.BigEndian.AppendUint16(w.b, edeOptionDataLen)
		w.b = binary.BigEndian.AppendUint16(w.b, uint16(ede))
	}
	w.count(additional)
	return w.b
}

// pack writes the answer: the addresses under the name as it was asked, or, if a search domain had been appended, under the name
// without it, to which a CNAME leads.
func (a local) pack(q *query, buf []byte) []byte {
	w := q.begin(buf, flagAA)
	owner := headerLen
	switch {
	case len(a.addrs) == 0:
		w.add(authority, headerLen+q.labels[len(q.labels)-a.zone], dns.TypeSOA, negativeTTL, a.soa())
	case a.match.stripped > 0 && !a.match.wildcard():
		w.add(answers, owner, dns.TypeCNAME, localTTL, q.prefix(a.match.stripped))
		owner = headerLen + len(q.question) + recordLen // where the data of the CNAME are
	}
	for _, addr := range a.addrs {
		w.add(answers, owner, q.qtype, localTTL, addr.AsSlice())
	}
	return w.end(q, dns.RcodeSuccess, noEDE)
}

// soa is the data of the SOA record (RFC 1035, section 3.3.13). The times for secondaries are customary; there are none.
func (a local) soa() []byte {
	data := append(packName("ns.dns."+a.domain), packName("hostmaster."+a.domain)...)
	for _, n := range []uint32{a.serial, 7200, 1800, 86400, negativeTTL} {
		data = binary.BigEndian.AppendUint32(data, n)
	}
	return data
}

// packName is the wire form of a name without escapes.
func packName(name string) []byte {
	b := make([]byte, 0, len(name)+2)
	for label := range strings.SplitSeq(name, ".") {
		b = append(append(b, byte(len(label))), label...)
	}
	return append(b, 0)
}

// fail writes an answer that has nothing but a code.
func (q *query) fail(buf []byte, rcode, ede int) []byte {
	return q.begin(buf, 0).end(q, rcode, ede)
}

// truncated writes an answer that says no more than that the client has to ask over TCP.
func (q *query) truncated(buf []byte) []byte {
	return q.begin(buf, flagTC).end(q, dns.RcodeSuccess, noEDE)
}
