package replay

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// maxCaptured is the longest packet that a capture may have, in bytes: a segmentation-offload packet of Linux may have 512 KiB
// (GSO_MAX_SIZE). A longer one is taken for damage, as libpcap does above 256 KiB (MAXIMUM_SNAPLEN).
const maxCaptured = 1 << 20

// windowBytes is how much of a capture is held at a time; a packet and the header of its record fit.
const windowBytes = 2 * maxCaptured

// A Packet is one packet of a capture.
type Packet struct {
	Time      int64    // of its capture, in nanoseconds since 1970
	Data      []byte   // borrowed: valid until the next one is read
	Length    int      // on the wire; len(Data) is less if the capture cut it off
	Link      LinkType // how Data begins
	Interface string   // name, if the capture has one
	Offset    int64    // of its record, in bytes of the file as it is uncompressed
	Carried   bool     // a SYN that was given to the kernel, which carries its connection past what was captured: its comment has CarriedNote
}

// CarriedNote is in the comments of SYNs that were given to the kernel: what follows does not pass the place that was captured.
const CarriedNote = "the kernel carries what follows"

// A DamageError says where a capture cannot be read any further. What came before is whole.
type DamageError struct {
	Offset int64 // of the record or block, in bytes of the file as it is uncompressed
	Why    string
}

func (e *DamageError) Error() string { return fmt.Sprintf("byte %d: %s", e.Offset, e.Why) }

// A reader reads one capture.
type reader interface {
	next(p *Packet) error // io.EOF at the end, a *DamageError where it cannot be read
}

// An input is a capture's bytes with the place in it. Peeked bytes are borrowed until the next peek or skip.
type input struct {
	r  *bufio.Reader
	at int64
}

// peek returns the next n bytes; fewer with io.EOF or another error.
func (in *input) peek(n int) ([]byte, error) { return in.r.Peek(n) }

// skip passes over bytes.
func (in *input) skip(n int) error {
	for n > 0 {
		part := min(n, windowBytes)
		done, err := in.r.Discard(part)
		in.at += int64(done)
		if err != nil {
			return err
		}
		n -= part
	}
	return nil
}

// damage makes an error of what ended a record: a read error as it is, the end of the file as damage.
func damage(offset int64, err error, why string) error {
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &DamageError{offset, why}
	}
	return &DamageError{offset, err.Error()}
}

// newReader tells by the first bytes which kind of capture it is.
func newReader(r io.Reader) (reader, error) {
	in := &input{r: bufio.NewReaderSize(r, windowBytes)}
	b, err := in.peek(4)
	if len(b) == 0 {
		return nil, damage(0, err, "it is empty")
	}
	if len(b) < 4 {
		return nil, damage(0, err, "it is too short for a capture")
	}
	if binary.BigEndian.Uint32(b) == ngSection {
		return &ngReader{in: in}, nil
	}
	for _, order := range []byteOrder{binary.LittleEndian, binary.BigEndian} {
		switch order.Uint32(b) {
		case pcapMicro:
			return newPcap(in, order, 1000)
		case pcapNano:
			return newPcap(in, order, 1)
		}
	}
	return nil, &DamageError{0, fmt.Sprintf("it begins with %#08x: neither pcap nor pcapng", binary.BigEndian.Uint32(b))}
}

type byteOrder interface {
	binary.ByteOrder
	binary.AppendByteOrder
}

// The format of libpcap (draft-ietf-opsawg-pcap, section 4).
const (
	pcapMicro      = 0xa1b2c3d4
	pcapNano       = 0xa1b23c4d
	pcapHeader     = 24
	pcapRecord     = 16
	pcapLinkMask   = 0xffff // above it: the length of the frame check sequence
	secondsToNanos = 1_000_000_000
)

// A pcapReader reads the format of libpcap.
type pcapReader struct {
	in    *input
	order byteOrder
	unit  int64 // nanoseconds
	link  LinkType
	held  int // bytes of the record that the last next lent out
}

func newPcap(in *input, order byteOrder, unit int64) (*pcapReader, error) {
	b, err := in.peek(pcapHeader)
	if err != nil {
		return nil, damage(0, err, "the header is cut off")
	}
	r := &pcapReader{in: in, order: order, unit: unit, link: LinkType(order.Uint32(b[20:]) & pcapLinkMask)}
	if version := order.Uint16(b[4:]); version != 2 {
		return nil, &DamageError{0, fmt.Sprintf("pcap of version %d, want 2", version)}
	}
	return r, in.skip(pcapHeader)
}

func (r *pcapReader) next(p *Packet) error {
	if err := r.in.skip(r.held); err != nil {
		return damage(r.in.at, err, "cut off")
	}
	r.held = 0
	at := r.in.at
	b, err := r.in.peek(pcapRecord)
	switch {
	case len(b) == 0 && errors.Is(err, io.EOF):
		return io.EOF
	case err != nil:
		return damage(at, err, "the header of the last packet is cut off")
	}
	seconds, part := int64(r.order.Uint32(b)), int64(r.order.Uint32(b[4:]))
	captured, length := r.order.Uint32(b[8:]), r.order.Uint32(b[12:])
	if captured > maxCaptured {
		return &DamageError{at, fmt.Sprintf("a packet of %d bytes", captured)}
	}
	n := pcapRecord + int(captured)
	if b, err = r.in.peek(n); err != nil {
		return damage(at, err, "the last packet is cut off")
	}
	r.held = n
	*p = Packet{
		Time: seconds*secondsToNanos + min(part*r.unit, secondsToNanos-1), Data: b[pcapRecord:n], Link: r.link, Offset: at,
		Length: max(int(captured), int(min(length, maxCaptured))),
	}
	return nil
}
