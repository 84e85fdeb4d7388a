package tun

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVnetHdrCheck(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		h    VnetHdr
		n    int
		ok   bool
	}{
		{"a complete packet", VnetHdr{}, 40, true},
		{"a SYN that lacks its checksum", VnetHdr{Flags: VnetNeedsChecksum, ChecksumStart: 20, ChecksumOffset: 16}, 40, true},
		{"checksum past the end", VnetHdr{Flags: VnetNeedsChecksum, ChecksumStart: 20, ChecksumOffset: 16}, 37, false},
		{"sums do not overflow", VnetHdr{Flags: VnetNeedsChecksum, ChecksumStart: 65535, ChecksumOffset: 65535}, 1500, false},
		{"IPv4 superpacket", VnetHdr{GSOType: VnetGSOTCPv4, HeaderBytes: 52, SegmentBytes: 1448}, 3000, true},
		{"IPv6 superpacket with ECN", VnetHdr{GSOType: VnetGSOTCPv6 | VnetGSOECN, HeaderBytes: 72, SegmentBytes: 1428}, 3000, true},
		{"UDP superpacket, not asked for", VnetHdr{GSOType: 3, HeaderBytes: 28, SegmentBytes: 100}, 3000, false},
		{"segments of nothing", VnetHdr{GSOType: VnetGSOTCPv4, HeaderBytes: 52}, 3000, false},
		{"headers longer than the packet", VnetHdr{GSOType: VnetGSOTCPv4, HeaderBytes: 52, SegmentBytes: 1448}, 51, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if err := tt.h.Check(tt.n); (err == nil) != tt.ok {
				t.Errorf("%+v.Check(%d) = %v, want ok %v", tt.h, tt.n, err, tt.ok)
			}
		})
	}
}

func FuzzVnetHdr(f *testing.F) {
	f.Add([]byte{1, 1, 52, 0, 0xa8, 5, 20, 0, 16, 0}, 3000)
	f.Add(make([]byte, Headroom), 0)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		if len(b) < Headroom || n < 0 || n > MaxPacket {
			return
		}
		var h, again VnetHdr
		h.Decode(b)
		out := make([]byte, Headroom)
		h.Encode(out)
		if !bytes.Equal(out, b[:Headroom]) {
			t.Errorf("Encode(Decode(%x)) = %x", b[:Headroom], out)
		}
		again.Decode(out)
		if diff := cmp.Diff(h, again); diff != "" {
			t.Errorf("Decode(Encode(h)) (-want +got):\n%s", diff)
		}
		if h.Check(n) == nil && h.Flags&VnetNeedsChecksum != 0 {
			pkt := make([]byte, n) // what Check accepts can be indexed
			_ = pkt[int(h.ChecksumStart)+int(h.ChecksumOffset)+1]
		}
	})
}
