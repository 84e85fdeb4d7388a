package dnsproxy

import (
	"bytes"
	"encoding/binary"
	"strings"

	"github.com/miekg/dns"
)

// The header (RFC 1035, section 4.1.1; AD and CD: RFC 4035, section 3.2).
const (
	headerLen = 12

	flagQR     = 1 << 15
	flagAA     = 1 << 10
	flagTC     = 1 << 9
	flagRD     = 1 << 8
	flagRA     = 1 << 7
	flagAD     = 1 << 5
	flagCD     = 1 << 4
	maskOpcode = 0xf << 11
	maskRcode  = 0xf
)

func flagsOf(msg []byte) uint16 { return binary.BigEndian.Uint16(msg[2:]) }

func opcodeOf(msg []byte) int { return int(flagsOf(msg) & maskOpcode >> 11) }

// count is one of the four record counts of a header: questions, answers, authority, additional.
func count(msg []byte, i int) int { return int(binary.BigEndian.Uint16(msg[4+2*i:])) }

// A query is what a client asks.
type query struct {
	msg      []byte // whole; borrowed
	question []byte // part of msg; empty if it cannot be copied into an answer
	labels   []int  // offsets within question of the labels' length bytes, without the root's
	qtype    uint16
	class    uint16
	tcp      bool

	edns    bool
	udpSize int // that the client takes; of edns
	version uint8
	do      bool
	signed  bool // by TSIG or SIG(0)
}

// parse reads a message of opcode QUERY. A code other than success says that it has to be refused.
func (q *query) parse() int {
	switch {
	case !q.parseQuestion(), !q.parseRecords():
		q.question, q.labels = nil, nil // not all of it is known, so nothing is repeated
		return dns.RcodeFormatError
	case q.version > 0:
		return dns.RcodeBadVers
	}
	return dns.RcodeSuccess
}

// parseQuestion reads the question in wire form and reports whether there is exactly one (RFC 9619) and it is sound. Its name
// cannot be compressed: no other is before it.
func (q *query) parseQuestion() bool {
	if count(q.msg, 0) != 1 {
		return false
	}
	body := q.msg[headerLen:]
	q.labels = make([]int, 0, 10) // names in Kubernetes have 5, with a search domain appended 10
	off := 0
	for {
		if off >= len(body) || off >= maxName {
			return false
		}
		n := int(body[off])
		if n == 0 {
			break
		}
		if n > maxLabel {
			return false
		}
		q.labels = append(q.labels, off)
		off += 1 + n
	}
	off++
	if off+4 > len(body) {
		return false
	}
	q.question = body[:off+4]
	q.qtype = binary.BigEndian.Uint16(body[off:])
	q.class = binary.BigEndian.Uint16(body[off+2:])
	return true
}

// RFC 1035, section 2.3.4.
const (
	maxLabel = 63
	maxName  = 255
)

// parseRecords reads what follows the question and reports whether it is well-formed.
func (q *query) parseRecords() bool {
	if count(q.msg, 1)+count(q.msg, 2)+count(q.msg, 3) == 0 {
		return true
	}
	var m dns.Msg
	if err := m.Unpack(q.msg); err != nil {
		return false
	}
	// The library takes a message that ends before its counts do.
	if len(m.Answer) != count(q.msg, 1) || len(m.Ns) != count(q.msg, 2) || len(m.Extra) != count(q.msg, 3) {
		return false
	}
	for i, rr := range m.Extra {
		switch rr := rr.(type) {
		case *dns.OPT:
			if q.edns || rr.Hdr.Name != "." { // RFC 6891, sections 6.1.1 and 6.1.2
				return false
			}
			q.edns, q.udpSize, q.version, q.do = true, int(rr.UDPSize()), rr.Version(), rr.Do()
		case *dns.TSIG, *dns.SIG:
			q.signed = q.signed || i == len(m.Extra)-1
		}
	}
	return true
}

// name is the name in lower case, without a dot at its end; "" for the root. A name with a label that no hostname has (a dot
// or something unprintable in it) is not one that the state could know.
func (q *query) name() (string, bool) {
	var b strings.Builder
	b.Grow(len(q.question))
	for i, off := range q.labels {
		if i > 0 {
			b.WriteByte('.')
		}
		for _, c := range q.label(off) {
			switch {
			case c == '.', c <= ' ', c >= 0x7f:
				return "", false
			case 'A' <= c && c <= 'Z':
				c += 'a' - 'A'
			}
			b.WriteByte(c)
		}
	}
	return b.String(), true
}

func (q *query) label(off int) []byte {
	n := int(q.question[off])
	return q.question[off+1 : off+1+n]
}

// prefix is the wire form, as it was asked, of the first n labels, with the root at its end.
func (q *query) prefix(n int) []byte {
	end := len(q.question) - 5
	if n < len(q.labels) {
		end = q.labels[n]
	}
	return append(bytes.Clone(q.question[:end]), 0)
}

// limit is how long an answer may be.
func (q *query) limit() int {
	switch {
	case q.tcp:
		return maxTCP
	case q.edns:
		return min(max(q.udpSize, minUDP), maxUDP)
	}
	return minUDP
}

const (
	minUDP = 512   // RFC 1035, section 4.2.1; RFC 6891, section 6.2.3, takes smaller sizes for it
	maxUDP = 1232  // DNS flag day 2020: fits into IPv6's least MTU, so it is never fragmented
	maxTCP = 65535 // RFC 1035, section 4.2.2
)
