package replay

import (
	"encoding/binary"
	"io"
	"math"
	"net/netip"
	"time"
)

// A Direction of a packet, as pcapng's flags have it (epb_flags).
type Direction uint32

// The directions, as seen from the interface that was captured.
const (
	DirUnknown  Direction = 0
	DirInbound  Direction = 1
	DirOutbound Direction = 2
)

// A Writer writes pcapng: little-endian, in nanoseconds, whole IP packets. It buffers nothing.
type Writer struct {
	w   io.Writer
	buf []byte
	err error
}

// NewWriter writes the header and an interface of raw IP packets for each name. snap is the length at which packets are cut; 0: none is.
func NewWriter(w io.Writer, application string, snap int, interfaces ...string) *Writer {
	o := &Writer{w: w}
	section := binary.LittleEndian.AppendUint32(nil, ngMagic)
	section = binary.LittleEndian.AppendUint16(section, 1) // version 1.0
	section = binary.LittleEndian.AppendUint16(section, 0)
	section = binary.LittleEndian.AppendUint64(section, math.MaxUint64) // length: not known
	const userApplication = 4
	o.block(ngSection, endOptions(option(section, userApplication, []byte(application))))
	for _, name := range interfaces {
		b := binary.LittleEndian.AppendUint16(nil, uint16(LinkRaw))
		b = binary.LittleEndian.AppendUint16(b, 0)
		b = binary.LittleEndian.AppendUint32(b, uint32(snap))
		b = option(b, ngOptName, []byte(name))
		o.block(ngInterface, endOptions(option(b, ngOptTSResol, []byte{9}))) // 10^-9 s
	}
	return o
}

func option(b []byte, code uint16, v []byte) []byte {
	v = v[:min(len(v), math.MaxUint16)]
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(v)))
	return pad(append(b, v...))
}

func endOptions(b []byte) []byte { return append(b, 0, 0, 0, 0) }

func pad(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func (o *Writer) block(kind uint32, body []byte) {
	n := uint32(ngMinimum + len(body))
	b := binary.LittleEndian.AppendUint32(o.buf[:0], kind)
	b = binary.LittleEndian.AppendUint32(b, n)
	b = append(b, body...)
	o.buf = binary.LittleEndian.AppendUint32(b, n)
	o.write(o.buf)
}

func (o *Writer) write(b []byte) {
	if o.err == nil {
		_, o.err = o.w.Write(b)
	}
}

// Packet writes a packet of the interface with the index. length is its length on the wire, comment may be empty. It returns the first
// error of any call.
func (o *Writer) Packet(index int, at time.Time, dir Direction, data []byte, length int, comment string) error {
	nanos := uint64(at.UnixNano())
	b := append(o.buf[:0], ngPacket, 0, 0, 0, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(index))
	b = binary.LittleEndian.AppendUint32(b, uint32(nanos>>32))
	b = binary.LittleEndian.AppendUint32(b, uint32(nanos))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(data)))
	b = binary.LittleEndian.AppendUint32(b, uint32(length))
	b = pad(append(b, data...))
	if comment != "" {
		b = option(b, ngOptComment, []byte(comment))
	}
	if dir != DirUnknown {
		b = option(b, ngOptFlags, binary.LittleEndian.AppendUint32(nil, uint32(dir)))
	}
	if comment != "" || dir != DirUnknown {
		b = endOptions(b)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(b)+4))
	binary.LittleEndian.PutUint32(b[4:], uint32(len(b)))
	o.buf = b
	o.write(b)
	return o.err
}

// Statistics writes how many packets of an interface were captured, and how many were lost.
func (o *Writer) Statistics(index int, at time.Time, captured, dropped uint64) error {
	const received, lost = 4, 5 // isb_ifrecv, isb_ifdrop
	nanos := uint64(at.UnixNano())
	b := binary.LittleEndian.AppendUint32(nil, uint32(index))
	b = binary.LittleEndian.AppendUint32(b, uint32(nanos>>32))
	b = binary.LittleEndian.AppendUint32(b, uint32(nanos))
	b = option(b, received, binary.LittleEndian.AppendUint64(nil, captured+dropped))
	b = option(b, lost, binary.LittleEndian.AppendUint64(nil, dropped))
	const statistics = 5
	o.block(statistics, endOptions(b))
	return o.err
}

// IsSYN reports whether an IP packet is the first of a TCP connection.
func IsSYN(b []byte) bool {
	var k packet
	return k.parse(b, math.MaxInt32) == "" && k.proto == protoTCP && !k.fragment && k.flags&(flagSYN|flagACK) == flagSYN
}

// Endpoints are who sends and who gets an IP packet, with the ports of TCP and UDP.
func Endpoints(b []byte) (src, dst netip.AddrPort, ok bool) {
	var k packet
	if k.parse(b, math.MaxInt32) != "" {
		return src, dst, false
	}
	return k.src, k.dst, true
}
