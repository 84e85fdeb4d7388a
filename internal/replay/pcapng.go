package replay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"strings"
)

// The blocks and options of pcapng (draft-ietf-opsawg-pcapng, section 4).
const (
	ngSection   = 0x0a0d0d0a // the same in both byte orders
	ngInterface = 1
	ngOldPacket = 2
	ngSimple    = 3
	ngPacket    = 6

	ngMagic   = 0x1a2b3c4d
	ngMinimum = 12 // type, length, length

	ngOptEnd      = 0
	ngOptComment  = 1
	ngOptName     = 2 // of an interface
	ngOptFlags    = 2 // of a packet
	ngOptTSResol  = 9
	ngOptTSOffset = 14

	maxInterfaces = 1 << 12 // of a section
	maxName       = 256     // bytes of an interface's name that are kept
)

// An ngReader reads pcapng.
type ngReader struct {
	in         *input
	order      byteOrder
	interfaces []ngIface // of the section
	last       int64     // time of the last packet: a simple packet block has none
	held       int       // bytes of the block that the last next lent out
}

type ngIface struct {
	link    LinkType
	name    string
	snap    uint32
	units   uint64 // ticks in a second
	seconds int64  // added to each time
}

func (r *ngReader) next(p *Packet) error {
	if err := r.in.skip(r.held); err != nil {
		return damage(r.in.at, err, "cut off")
	}
	r.held = 0
	for {
		found, err := r.block(p)
		if found || err != nil {
			return err
		}
	}
}

// block reads one block and reports whether it is a packet.
func (r *ngReader) block(p *Packet) (bool, error) {
	at := r.in.at
	b, err := r.in.peek(ngMinimum)
	switch {
	case len(b) == 0 && errors.Is(err, io.EOF):
		return false, io.EOF
	case err != nil:
		return false, damage(at, err, "the last block is cut off")
	}
	if binary.BigEndian.Uint32(b) == ngSection {
		switch {
		case binary.LittleEndian.Uint32(b[8:]) == ngMagic:
			r.order = binary.LittleEndian
		case binary.BigEndian.Uint32(b[8:]) == ngMagic:
			r.order = binary.BigEndian
		default:
			return false, &DamageError{at, "a section without a byte order"}
		}
		r.interfaces = r.interfaces[:0]
	}
	kind, length := r.order.Uint32(b), r.order.Uint32(b[4:])
	if length < ngMinimum || length%4 != 0 {
		return false, &DamageError{at, fmt.Sprintf("a block of %d bytes", length)}
	}
	switch kind {
	case ngInterface, ngOldPacket, ngSimple, ngPacket:
	default: // also the rest of a section's header
		if uint64(length) > math.MaxInt32 {
			return false, &DamageError{at, fmt.Sprintf("a block of %d bytes", length)}
		}
		if err := r.in.skip(int(length)); err != nil {
			return false, damage(at, err, "the last block is cut off")
		}
		return false, nil
	}
	if length > windowBytes {
		return false, &DamageError{at, fmt.Sprintf("a block of %d bytes", length)}
	}
	if b, err = r.in.peek(int(length)); err != nil {
		return false, damage(at, err, "the last block is cut off")
	}
	if again := r.order.Uint32(b[length-4:]); again != length {
		return false, &DamageError{at, fmt.Sprintf("a block of %d bytes at its beginning and %d at its end", length, again)}
	}
	r.held = int(length)
	body := b[8 : length-4]
	why := ""
	switch kind {
	case ngInterface:
		why = r.iface(body)
	case ngSimple:
		why = r.simple(p, body)
	default:
		why = r.packet(p, body, kind == ngOldPacket)
	}
	if why != "" {
		return false, &DamageError{at, why}
	}
	p.Offset = at
	if kind == ngInterface {
		r.held = 0
		return false, r.in.skip(int(length))
	}
	return true, nil
}

// iface reads an interface description; it says what is wrong with it.
func (r *ngReader) iface(b []byte) string {
	if len(b) < 8 {
		return "an interface description that is too short"
	}
	if len(r.interfaces) == maxInterfaces {
		return fmt.Sprintf("more than %d interfaces", maxInterfaces)
	}
	i := ngIface{link: LinkType(r.order.Uint16(b)), snap: r.order.Uint32(b[4:]), units: 1e6}
	wrong := ""
	r.options(b[8:], func(code uint16, v []byte) {
		switch {
		case code == ngOptName:
			i.name = strings.ToValidUTF8(strings.Clone(string(v[:min(len(v), maxName)])), "?")
		case code == ngOptTSResol && len(v) == 1:
			if i.units = ticks(v[0]); i.units == 0 {
				wrong = fmt.Sprintf("an interface whose times have the resolution %#x", v[0])
			}
		case code == ngOptTSOffset && len(v) == 8:
			i.seconds = int64(r.order.Uint64(v))
		}
	})
	r.interfaces = append(r.interfaces, i)
	return wrong
}

// ticks is how many units of a resolution (if_tsresol) there are in a second; 0: more than can be counted.
func ticks(resolution byte) uint64 {
	n := resolution & 0x7f
	if resolution&0x80 != 0 {
		if n > 63 {
			return 0
		}
		return 1 << n
	}
	if n > 19 {
		return 0
	}
	units := uint64(1)
	for range n {
		units *= 10
	}
	return units
}

// options calls f for each option that is whole.
func (r *ngReader) options(b []byte, f func(code uint16, v []byte)) {
	for len(b) >= 4 {
		code, n := r.order.Uint16(b), int(r.order.Uint16(b[2:]))
		if code == ngOptEnd || 4+n > len(b) {
			return
		}
		f(code, b[4:4+n])
		b = b[min(len(b), 4+(n+3)&^3):]
	}
}

func (r *ngReader) packet(p *Packet, b []byte, old bool) string {
	if len(b) < 20 {
		return "a packet block that is too short"
	}
	id := int(r.order.Uint32(b))
	if old { // the packet block of early versions: 16 bits, and a count of drops
		id = int(r.order.Uint16(b))
	}
	if id >= len(r.interfaces) {
		return fmt.Sprintf("a packet of interface %d, of %d", id, len(r.interfaces))
	}
	i := &r.interfaces[id]
	captured, length := int(r.order.Uint32(b[12:])), int(r.order.Uint32(b[16:]))
	if captured > len(b)-20 || captured > maxCaptured {
		return fmt.Sprintf("a packet of %d bytes in a block of %d", captured, len(b)+ngMinimum)
	}
	r.last = i.time(uint64(r.order.Uint32(b[4:]))<<32 | uint64(r.order.Uint32(b[8:])))
	*p = Packet{Time: r.last, Data: b[20 : 20+captured], Length: max(captured, min(length, maxCaptured)), Link: i.link, Interface: i.name}
	if options := b[min(len(b), 20+(captured+3)&^3):]; len(options) > 0 {
		r.options(options, func(code uint16, v []byte) {
			p.Carried = p.Carried || code == ngOptComment && bytes.Contains(v, []byte(CarriedNote))
		})
	}
	return ""
}

func (r *ngReader) simple(p *Packet, b []byte) string {
	if len(b) < 4 {
		return "a packet block that is too short"
	}
	if len(r.interfaces) == 0 {
		return "a packet of interface 0, of 0"
	}
	i := &r.interfaces[0]
	length := int(r.order.Uint32(b))
	captured := min(length, len(b)-4)
	if i.snap != 0 {
		captured = min(captured, int(i.snap))
	}
	if captured > maxCaptured {
		return fmt.Sprintf("a packet of %d bytes", captured)
	}
	*p = Packet{Time: r.last, Data: b[4 : 4+captured], Length: max(captured, min(length, maxCaptured)), Link: i.link, Interface: i.name}
	return ""
}

// maxTime is the last time that is told apart, in nanoseconds: the year 2116.
const maxTime = math.MaxInt64 / 2

// time turns a count of units into nanoseconds since 1970, within 0 and maxTime.
func (i *ngIface) time(count uint64) int64 {
	seconds, rest := count/i.units, count%i.units
	hi, lo := bits.Mul64(rest, secondsToNanos)
	nanos, _ := bits.Div64(hi, lo, i.units) // rest < units: it fits
	const most = maxTime / secondsToNanos
	if seconds > most || i.seconds > most || i.seconds < -most || int64(seconds)+i.seconds >= most {
		return maxTime
	}
	return max(0, (int64(seconds)+i.seconds)*secondsToNanos+int64(nanos))
}
