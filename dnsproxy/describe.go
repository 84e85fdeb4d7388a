package dnsproxy

import (
	"strconv"
	"strings"

	"github.com/miekg/dns"
)

// A Description is a message in words: of an answer, who asked for what and what he got.
type Description struct {
	Name    string   // that was asked for; "" if there is no question
	Type    string   // such as A
	Rcode   string   // such as NXDOMAIN
	Answers []string // as "TYPE DATA", in their order
	Cut     bool     // the answer has the flag that there is more
}

// Describe reads a message; false if it is none.
func Describe(msg []byte) (d Description, ok bool) {
	var m dns.Msg
	if m.Unpack(msg) != nil {
		return d, false
	}
	if len(m.Question) > 0 {
		d.Name = m.Question[0].Name
		d.Type = nameOf(dns.TypeToString, m.Question[0].Qtype, "TYPE")
	}
	d.Rcode = nameOf(dns.RcodeToString, m.Rcode, "RCODE")
	d.Cut = m.Truncated
	for _, rr := range m.Answer {
		data := strings.TrimPrefix(rr.String(), rr.Header().String())
		d.Answers = append(d.Answers, nameOf(dns.TypeToString, rr.Header().Rrtype, "TYPE")+" "+data)
	}
	return d, true
}

// nameOf is the name of a number, or as RFC 3597 writes unknown ones.
func nameOf[N ~int | ~uint16](names map[N]string, n N, unknown string) string {
	if name := names[n]; name != "" {
		return name
	}
	return unknown + strconv.Itoa(int(n))
}
