package replay

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"ztun.dev/ztun/tun"
)

// An Anonymizer replaces addresses, names and payload, each always by the same. Addresses that have a prefix in common have one of the
// same length in common afterwards, and names keep their lengths, so that sizes, policies and routes stay what they are. What it does
// depends on the key alone.
type Anonymizer struct {
	key   []byte
	addrs map[netip.Addr]netip.Addr
	words map[string]string
	taken map[string]bool
}

// NewAnonymizer returns one for a key, which is to be kept secret: who has it can try all addresses.
func NewAnonymizer(key []byte) *Anonymizer {
	a := &Anonymizer{key: key, addrs: make(map[netip.Addr]netip.Addr), words: make(map[string]string), taken: make(map[string]bool)}
	for _, w := range keptWords {
		a.words[w], a.taken[w] = w, true
	}
	return a
}

// keptWords are of the platform, not of whoever uses it.
var keptWords = []string{"svc", "cluster", "local", "pod", "ns", "sa", "spiffe", "kubernetes", "arpa", "in-addr", "ip6", "istio-system", "default"}

func (a *Anonymizer) hash(kind byte, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, a.key)
	h.Write([]byte{kind})
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

// maxKnown bounds what is remembered: an attacker's scan may have any number of addresses and names. Above it they are found anew.
const maxKnown = 1 << 16

// Addr replaces an address, bit by bit: each is turned or not, as those before it say (Xu, Fan, Ammar, Moon 2002). Special ranges
// keep what makes them special.
func (a *Anonymizer) Addr(addr netip.Addr) netip.Addr {
	if !addr.IsValid() {
		return addr
	}
	if known, ok := a.addrs[addr]; ok {
		return known
	}
	b := addr.AsSlice()
	keep := keptBits(addr)
	for i := keep; i < 8*len(b); i++ {
		prefix, _ := addr.Prefix(i) // of a length that there is
		if slices.ContainsFunc(probes, prefix.Contains) {
			continue
		}
		in, _ := prefix.MarshalBinary()
		b[i/8] ^= a.hash('a', in)[0] & 1 << (7 - i%8)
	}
	out, _ := netip.AddrFromSlice(b)
	if len(a.addrs) < maxKnown {
		a.addrs[addr] = out
	}
	return out
}

// probes stay what they are: no bit is turned on the way to them, and so none becomes one of them either.
var probes = tun.Probes()

// keptBits is how much of an address stays: all of what no packet of a flow has, and the kind of others.
func keptBits(addr netip.Addr) int {
	switch {
	case addr.IsUnspecified(), addr.IsLoopback(), addr == broadcast:
		return addr.BitLen()
	case addr.IsMulticast(), addr.Is4() && addr.As4()[0]>>4 == 7: // beside loopback
		return 8
	case addr.IsLinkLocalUnicast():
		return 16
	case addr.Is4():
		return 4 // what is below 16.0.0.0, where 10.0.0.0 is, does not come to where multicast is
	}
	return 7 // unique local, or global
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// Prefix replaces a prefix.
func (a *Anonymizer) Prefix(p netip.Prefix) netip.Prefix {
	if !p.IsValid() {
		return p
	}
	within := p.Masked().Addr().AsSlice()
	if p.Bits() < p.Addr().BitLen() {
		within[len(within)-1] |= 1 // the first address of a prefix may be a special one
	}
	addr, _ := netip.AddrFromSlice(within)
	return netip.PrefixFrom(a.Addr(addr), p.Bits()).Masked()
}

// Word replaces one word of a name by lower-case letters, as many. Words that differ in case only become different ones.
func (a *Anonymizer) Word(w string) string {
	if known, ok := a.words[w]; ok || w == "" {
		return known
	}
	out := make([]byte, len(w))
	for try := range uint32(1000) { // short words run out; then two have the same
		var seed [4]byte
		binary.BigEndian.PutUint32(seed[:], try)
		sum := a.hash('w', seed[:], []byte(w))
		for i := range out {
			if i > 0 && i%len(sum) == 0 {
				sum = a.hash('m', sum)
			}
			out[i] = 'a' + sum[i%len(sum)]%26
		}
		if !a.taken[string(out)] {
			break
		}
	}
	if len(a.words) < maxKnown {
		a.words[w], a.taken[string(out)] = string(out), true
	}
	return string(out)
}

// UID replaces the uid of a workload by one that no other has. Its length says nothing.
func (a *Anonymizer) UID(uid string) string {
	if uid == "" {
		return ""
	}
	out := a.hash('u', []byte(uid))
	for i := range out {
		out[i] = 'a' + out[i]%26
	}
	return string(out)
}

// Text replaces the words of a text, and keeps what is between them.
func (a *Anonymizer) Text(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		n := strings.IndexAny(s, "./:@*,;= ")
		if n < 0 {
			n = len(s)
		}
		if addr, err := netip.ParseAddr(s[:n]); err == nil {
			b.WriteString(a.Addr(addr).String())
		} else {
			b.WriteString(a.Word(s[:n]))
		}
		if n < len(s) {
			b.WriteByte(s[n])
			n++
		}
		s = s[n:]
	}
	return b.String()
}

// Packet replaces what is in an IP packet, in place. False: it cannot be read, and must not be kept.
func (a *Anonymizer) Packet(b []byte, wire int) bool {
	var k packet
	if why := k.parse(b, wire); why != "" {
		return false
	}
	full := len(k.b) == k.length && !k.fragment
	data := k.captured()
	a.ends(k.b, k.v6)
	switch {
	case k.fragment && k.offset > 0:
		clear(data) // it may be of anything
	case k.proto == protoICMP || k.proto == protoICMPv6:
		a.icmp(&k, data)
	case k.fragment && (k.proto == protoTCP || k.proto == protoUDP):
		clear(data[min(udpLen, len(data)):]) // ports, and of TCP the sequence number
	case k.proto == protoUDP && (isDNS(k.src) || isDNS(k.dst)) && full:
		a.message(data)
	case k.proto == protoTCP && (isDNS(k.src) || isDNS(k.dst)) && full && len(data) > 2 && int(binary.BigEndian.Uint16(data)) == len(data)-2:
		a.message(data[2:])
	default:
		clear(data)
	}
	if !k.fragment {
		cleanOptions(k.options())
	}
	clear(b[len(k.b):]) // padding
	if k.v6 {
		if k.extended {
			clear(k.b[ipv6Len:])
			return false
		}
	} else {
		clear(k.b[ipv4Len:max(ipv4Len, int(k.b[0]&15)*4)]) // options may have addresses; 0 ends the list
		headerSum(k.b[:int(k.b[0]&15)*4])
	}
	if k.offset == 0 {
		fillSum(&k, full)
	}
	return true
}

// cleanOptions keeps the options of a TCP header that say how TCP works. Others may have anything: those of Multipath TCP have addresses (RFC
// 8684, section 3.4.1).
func cleanOptions(b []byte) {
	for len(b) > 0 && b[0] != optEnd {
		n := 1
		if b[0] != optNop {
			if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
				break
			}
			n = int(b[1])
		}
		switch {
		case b[0] == optNop, b[0] == optMSS && n == 4, b[0] == optScale && n == 3, b[0] == optSACKOK && n == 2, b[0] == optSACK && n%8 == 2, b[0] == optStamps && n == 10:
		default:
			for i := range n {
				b[i] = optNop
			}
		}
		b = b[n:]
	}
	clear(b)
}

// ends replaces the addresses of an IP header.
func (a *Anonymizer) ends(b []byte, v6 bool) {
	at, n := 12, 4
	if v6 {
		at, n = 8, 16
	}
	for range 2 {
		addr, _ := netip.AddrFromSlice(b[at : at+n])
		copy(b[at:], a.Addr(addr).AsSlice())
		at += n
	}
}

// icmp keeps type and code, of an echo its numbers, and of what an error quotes headers and ports.
func (a *Anonymizer) icmp(k *packet, data []byte) {
	_, ok := quoted(k)
	if len(data) > 0 {
		switch kind := data[0]; {
		case k.proto == protoICMP && (kind == 0 || kind == 8), k.proto == protoICMPv6 && (kind == 128 || kind == 129): // echo
		default:
			clear(data[min(4, len(data)):min(icmpLen, len(data))]) // that of a redirect is an address
		}
	}
	if !ok {
		clear(data[min(icmpLen, len(data)):])
		return
	}
	q := data[icmpLen:]
	n := ipv6Len
	if q[0]>>4 == 4 {
		n = int(q[0]&15) * 4
	}
	a.ends(q, q[0]>>4 == 6)
	clear(q[n+8:])
	if q[0]>>4 == 4 {
		clear(q[ipv4Len:n])
		headerSum(q[:n])
	}
}

// fillSum fills in the checksum of what was captured in whole. That of anything else would tell of what was replaced.
func fillSum(k *packet, full bool) {
	at := -1
	sum := k.pseudo()
	switch k.proto {
	case protoTCP:
		at = k.transport + 16
	case protoUDP:
		at = k.transport + 6
	case protoICMPv6:
		at = k.transport + 2
	case protoICMP:
		at, sum = k.transport+2, 0
	}
	if at < 0 || at+2 > len(k.b) {
		return
	}
	k.b[at], k.b[at+1] = 0, 0
	if full {
		binary.BigEndian.PutUint16(k.b[at:], ^fold(sum16(k.b[k.transport:], sum)))
	}
}

// message replaces names and addresses of a DNS message, in place; one that cannot be read becomes zeros.
func (a *Anonymizer) message(b []byte) {
	if !a.records(b) {
		clear(b)
	}
}

const dnsHeader = 12

func (a *Anonymizer) records(b []byte) bool {
	if len(b) < dnsHeader {
		return false
	}
	at := dnsHeader
	for range binary.BigEndian.Uint16(b[4:]) {
		if at = a.name(b, at); at < 0 || at+4 > len(b) {
			return false
		}
		at += 4
	}
	rest := 0
	for i := range 3 {
		rest += int(binary.BigEndian.Uint16(b[6+2*i:]))
	}
	for range rest {
		if at = a.name(b, at); at < 0 || at+10 > len(b) {
			return false
		}
		kind, n := binary.BigEndian.Uint16(b[at:]), int(binary.BigEndian.Uint16(b[at+8:]))
		if at += 10; at+n > len(b) || !a.data(b[:at+n], at, kind) {
			return false
		}
		at += n
	}
	return at == len(b)
}

// Types of records (RFC 1035, 3596, 2782, 6672, 6891).
const (
	rrA, rrNS, rrCNAME, rrSOA, rrPTR, rrMX, rrAAAA, rrSRV, rrDNAME, rrOPT = 1, 2, 5, 6, 12, 15, 28, 33, 39, 41
)

// data replaces that of a record, from at to the end of b.
func (a *Anonymizer) data(b []byte, at int, kind uint16) bool {
	d := b[at:]
	switch {
	case kind == rrA && len(d) == 4, kind == rrAAAA && len(d) == 16:
		addr, _ := netip.AddrFromSlice(d)
		copy(d, a.Addr(addr).AsSlice())
	case kind == rrNS, kind == rrCNAME, kind == rrPTR, kind == rrDNAME:
		return a.name(b, at) == len(b)
	case kind == rrMX:
		return a.name(b, at+2) == len(b)
	case kind == rrSRV:
		return a.name(b, at+6) == len(b)
	case kind == rrSOA:
		if at = a.name(b, at); at >= 0 {
			at = a.name(b, at)
		}
		return at >= 0 && at+20 == len(b)
	case kind == rrOPT && len(d) == 0:
	default:
		clear(d)
	}
	return true
}

// name replaces the labels of a name that stand at its place, and returns where it ends; -1: it is none. What a pointer leads to is
// replaced where it stands.
func (a *Anonymizer) name(b []byte, at int) int {
	for at >= 0 && at < len(b) {
		n := int(b[at])
		switch {
		case n == 0:
			return at + 1
		case n&0xc0 == 0xc0:
			if at+2 > len(b) {
				return -1
			}
			return at + 2
		case n > 63 || at+1+n > len(b):
			return -1
		}
		copy(b[at+1:], a.Word(strings.ToLower(string(b[at+1:at+1+n])))) // DNS does not tell case apart
		at += 1 + n
	}
	return -1
}

// Capture writes the packets of a Source to w, replaced, as raw IP. It returns how many it left out because they cannot be read.
func (a *Anonymizer) Capture(s *Source, w *Writer) (left uint64, err error) {
	var p Packet
	for {
		if err := s.Next(&p); errors.Is(err, io.EOF) {
			return left, nil
		} else if err != nil {
			return left, err
		}
		at, ok := p.Link.network(p.Data)
		if !ok {
			left++
			continue
		}
		b := bytes.Clone(p.Data[at:])
		if !a.Packet(b, p.Length-at) {
			left++
			continue
		}
		note := ""
		if p.Carried {
			note = CarriedNote
		}
		if err := w.Packet(0, time.Unix(0, p.Time), DirUnknown, b, p.Length-at, note); err != nil {
			return left, fmt.Errorf("replay: write: %w", err)
		}
	}
}
