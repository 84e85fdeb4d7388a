package tun

import (
	"encoding/binary"
	"fmt"
)

// Values of VnetHdr.Flags and VnetHdr.GSOType: VIRTIO_NET_HDR_F_* and VIRTIO_NET_HDR_GSO_* of
// include/uapi/linux/virtio_net.h.
const (
	VnetNeedsChecksum = 1 // the transport checksum field holds the sum of the pseudo-header only
	VnetChecksumValid = 2 // the checksum was verified

	VnetGSONone  = 0
	VnetGSOTCPv4 = 1
	VnetGSOTCPv6 = 4
	VnetGSOECN   = 0x80 // added to a TCP type: the first segment carries CWR
)

// A VnetHdr is the kernel's struct virtio_net_hdr in its 10-byte form. It says which work on a packet has been left to
// whoever sends it on: the checksum, and the cut into segments. The zero value is a complete packet.
type VnetHdr struct {
	Flags          uint8
	GSOType        uint8
	HeaderBytes    uint16 // IP and TCP header together; a hint when GSOType is VnetGSONone
	SegmentBytes   uint16 // payload of each segment, the MSS
	ChecksumStart  uint16 // first byte that is summed, counted from the IP header; a TUN has no link-layer header
	ChecksumOffset uint16 // place of the checksum, counted from ChecksumStart
}

// Encode writes h to b, which must have at least [Headroom] bytes. The numbers are in host byte order, as the kernel has
// them on a TUN unless told otherwise.
func (h VnetHdr) Encode(b []byte) {
	_ = b[Headroom-1]
	b[0], b[1] = h.Flags, h.GSOType
	binary.NativeEndian.PutUint16(b[2:], h.HeaderBytes)
	binary.NativeEndian.PutUint16(b[4:], h.SegmentBytes)
	binary.NativeEndian.PutUint16(b[6:], h.ChecksumStart)
	binary.NativeEndian.PutUint16(b[8:], h.ChecksumOffset)
}

// Decode reads h from b, which must have at least [Headroom] bytes. Every content decodes; see [VnetHdr.Check].
func (h *VnetHdr) Decode(b []byte) {
	_ = b[Headroom-1]
	h.Flags, h.GSOType = b[0], b[1]
	h.HeaderBytes = binary.NativeEndian.Uint16(b[2:])
	h.SegmentBytes = binary.NativeEndian.Uint16(b[4:])
	h.ChecksumStart = binary.NativeEndian.Uint16(b[6:])
	h.ChecksumOffset = binary.NativeEndian.Uint16(b[8:])
}

// Check reports whether h can describe a packet of n bytes: what it points at lies inside, and a superpacket is one of
// the two kinds that a [Kernel] has asked for.
func (h VnetHdr) Check(n int) error {
	if h.Flags&VnetNeedsChecksum != 0 {
		if end := int(h.ChecksumStart) + int(h.ChecksumOffset) + 2; end > n {
			return fmt.Errorf("tun: vnet header: checksum ends at byte %d of a packet of %d", end, n)
		}
	}
	switch h.GSOType &^ VnetGSOECN {
	case VnetGSONone:
		return nil
	case VnetGSOTCPv4, VnetGSOTCPv6:
	default:
		return fmt.Errorf("tun: vnet header: segmentation type %#x is not TCP", h.GSOType)
	}
	if h.SegmentBytes == 0 {
		return fmt.Errorf("tun: vnet header: superpacket of %d bytes with segments of 0", n)
	}
	if int(h.HeaderBytes) > n {
		return fmt.Errorf("tun: vnet header: headers of %d bytes in a packet of %d", h.HeaderBytes, n)
	}
	return nil
}
