package replay

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Limits of packets in pieces.
const (
	fragTime4  = int64(30e9) // nanoseconds; Linux: net.ipv4.ipfrag_time
	fragTime6  = int64(60e9) // RFC 8200, section 4.5
	maxFrags   = 4 << 20     // bytes of all; Linux: net.ipv4.ipfrag_high_thresh
	maxOfFrags = 64          // pieces of a packet; one of 64 KiB in the smallest MTU of IPv6 has 53
)

// A defragmenter puts together packets that were sent in pieces.
type defragmenter struct {
	open  map[fragKey]*fragments
	order []*fragments // as they began; those that are done are still in it
	held  int          // bytes
}

type fragKey struct {
	src, dst netip.Addr
	id       uint32
	proto    byte
}

type fragments struct {
	key    fragKey
	since  int64
	header []byte // of the first piece
	pieces []fragPiece
	total  int // -1: the last piece is missing
	done   bool
}

type fragPiece struct {
	at   int
	data []byte
}

// add takes a piece. It returns the packet once it is whole, or says why the piece is not used.
func (d *defragmenter) add(k *packet, now int64) (whole []byte, why string) {
	d.expire(now)
	data := k.captured()
	switch {
	case len(k.b) < k.length:
		return nil, "fragment_cut_off"
	case k.extended:
		return nil, "ipv6_extension"
	case k.more && len(data)%8 != 0, len(data) == 0, k.offset+len(data) > 65535:
		return nil, "fragment_malformed"
	}
	key := fragKey{k.src.Addr(), k.dst.Addr(), k.id, k.proto}
	f := d.open[key]
	if f == nil {
		if d.held+len(data) > maxFrags {
			return nil, "fragment_limit"
		}
		f = &fragments{key: key, since: now, total: -1}
		if d.open == nil {
			d.open = make(map[fragKey]*fragments)
		}
		d.open[key] = f
		if len(d.order) > 2*len(d.open)+64 { // those that are done, behind one that is not
			d.order = slices.DeleteFunc(d.order, func(f *fragments) bool { return f.done })
		}
		d.order = append(d.order, f)
	}
	at, same := slices.BinarySearchFunc(f.pieces, k.offset, func(p fragPiece, at int) int { return p.at - at })
	if same && len(f.pieces[at].data) == len(data) {
		return nil, "fragment_again"
	}
	end := k.offset + len(data)
	if at > 0 && f.pieces[at-1].at+len(f.pieces[at-1].data) > k.offset || at < len(f.pieces) && f.pieces[at].at < end ||
		f.total >= 0 && (end > f.total || !k.more) || len(f.pieces) == maxOfFrags || d.held+len(data) > maxFrags {
		d.drop(f) // pieces that overlap: RFC 5722, and Linux with IPv4 as well
		return nil, "fragment_overlap"
	}
	f.pieces = slices.Insert(f.pieces, at, fragPiece{k.offset, slices.Clone(data)})
	d.held += len(data)
	if k.offset == 0 {
		f.header = slices.Clone(k.b[:k.transport])
	}
	if !k.more {
		f.total = end
	}
	if whole = f.whole(k.v6); whole != nil {
		d.drop(f)
	}
	return whole, ""
}

// whole is the packet if no piece is missing.
func (f *fragments) whole(v6 bool) []byte {
	next := 0
	for _, p := range f.pieces {
		if p.at != next {
			return nil
		}
		next += len(p.data)
	}
	if next != f.total || f.header == nil {
		return nil
	}
	b := f.header
	if v6 {
		b = b[:ipv6Len]
		b[6] = f.key.proto
	}
	b = slices.Clone(b)
	for _, p := range f.pieces {
		b = append(b, p.data...)
	}
	if len(b) > 65535 {
		return nil
	}
	if v6 {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-ipv6Len))
	} else {
		b[6], b[7] = 0, 0
		setLength(b, false, len(b))
	}
	return b
}

func (d *defragmenter) drop(f *fragments) {
	delete(d.open, f.key)
	for _, p := range f.pieces {
		d.held -= len(p.data)
	}
	f.pieces, f.done = nil, true
}

func (d *defragmenter) expire(now int64) {
	for len(d.order) > 0 {
		f := d.order[0]
		limit := fragTime4
		if f.key.src.Is6() {
			limit = fragTime6
		}
		if !f.done && now-f.since < limit {
			return
		}
		if !f.done {
			d.drop(f)
		}
		d.order = d.order[1:]
	}
}
