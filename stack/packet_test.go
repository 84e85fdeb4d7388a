package stack

import (
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"ztun.dev/ztun/tun"
)

func sumOf(b []byte, initial uint16) uint16 { return checksum.Checksum(b, initial) }

// changed returns p with one byte replaced and, for IPv4, the header's sum made right again.
func changed(p []byte, at int, to byte) []byte {
	p = append([]byte(nil), p...)
	p[at] = to
	if p[0]>>4 == 4 && at < ipv4Len && at != 10 && at != 11 {
		p[10], p[11] = 0, 0
		n := min(max(int(p[0]&15)*4, ipv4Len), len(p))
		binary.BigEndian.PutUint16(p[10:], ^checksum.Checksum(p[:n], 0))
	}
	return p
}

func udpPacket(f Flow, data string) []byte {
	n := udpLen + len(data)
	buf, u := newPacket(UDP, f.Src.Addr(), f.Dst.Addr(), n)
	binary.BigEndian.PutUint16(u[0:], f.Src.Port())
	binary.BigEndian.PutUint16(u[2:], f.Dst.Port())
	binary.BigEndian.PutUint16(u[4:], uint16(n))
	copy(u[udpLen:], data)
	binary.BigEndian.PutUint16(u[6:], ^checksum.Checksum(u, pseudoSum(UDP, f.Src.Addr(), f.Dst.Addr(), n)))
	return buf[headroom:]
}

var (
	dns4 = Flow{UDP, ap("10.0.0.7:5353"), ap("10.96.0.10:53")}
	dns6 = Flow{UDP, ap("[2001:db8::7]:5353"), ap("[2001:db8::53]:53")}
)

func TestWrongPacketsAreDropped(t *testing.T) {
	s4, s6, u4, u6 := syn(flow4, 1), syn(flow6, 1), udpPacket(dns4, "query"), udpPacket(dns6, "query")
	address := func(p []byte, at int, a ...byte) []byte {
		p = append([]byte(nil), p...)
		copy(p[at:], a)
		return changed(p, at, a[0])
	}
	tests := []struct {
		name string
		p    []byte
		want DropReason
	}{
		{"one byte", []byte{0x45}, DropMalformed},
		{"version 5", changed(s4, 0, 0x55), DropMalformed},
		{"v4 header of 16 bytes", changed(s4, 0, 0x44), DropMalformed},
		{"v4 header longer than the packet", changed(s4, 0, 0x4f), DropMalformed},
		{"v4 longer than it is", changed(s4, 3, 41), DropMalformed},
		{"v4 shorter than its header", changed(s4, 3, 19), DropMalformed},
		{"v4 cut in the TCP header", changed(s4, 3, 39), DropMalformed},
		{"v4 header sum", changed(s4, 10, s4[10]^1), DropChecksum},
		{"TCP header of 16 bytes", changed(s4, 32, 0x40), DropMalformed},
		{"TCP header longer than the packet", changed(s4, 32, 0x60), DropMalformed},
		{"SYN and FIN", changed(s4, 33, flagSYN|flagFIN), DropMalformed},
		{"SYN and RST", changed(s4, 33, flagSYN|flagRST), DropMalformed},
		{"TCP sum", changed(s4, 36, s4[36]^1), DropChecksum},
		{"v6 cut", s6[:39], DropMalformed},
		{"v6 longer than it is", changed(s6, 5, 21), DropMalformed},
		{"v6 TCP sum", changed(s6, 56, s6[56]^1), DropChecksum},
		{"v6 hop-by-hop options", changed(s6, 6, 0), DropProtocol},
		{"ICMP", changed(s4, 9, protoICMP), DropProtocol},
		{"ICMPv6", changed(s6, 6, protoICMPv6), DropProtocol},
		{"from loopback", address(s4, 12, 127, 0, 0, 1), DropMartian},
		{"to loopback", address(s4, 16, 127, 0, 0, 1), DropMartian},
		{"from multicast", address(s4, 12, 224, 0, 0, 1), DropMartian},
		{"from broadcast", address(s4, 12, 255, 255, 255, 255), DropMartian},
		{"from nowhere", address(s4, 12, 0, 0, 0, 0), DropMartian},
		{"FP-16 to nowhere", address(s4, 16, 0, 0, 0, 0), DropMartian},
		{"FP-16 to multicast", address(s4, 16, 224, 0, 0, 1), DropMartian},
		{"FP-16 to broadcast", address(s4, 16, 255, 255, 255, 255), DropMartian},
		{"FP-16 v6 to multicast", address(s6, 24, 0xff, 0x02), DropMartian},
		{"FP-16 v6 to nowhere", address(s6, 24, make([]byte, 16)...), DropMartian},
		{"from a v4 address in v6", address(s6, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff), DropMartian},
		{"TCP fragment", changed(s4, 6, 0x20), DropFragment},
		{"UDP sum", changed(u4, 26, u4[26]^1), DropChecksum},
		{"v6 UDP without sum", changed(changed(u6, 46, 0), 47, 0), DropChecksum},
		{"UDP longer than its packet", changed(u4, 25, byte(len(u4)-ipv4Len+1)), DropMalformed},
		{"UDP of 7 bytes", changed(u4, 25, 7), DropMalformed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, nil)
			r.send(tt.p)
			var want [dropReasons]uint64
			want[tt.want] = 1
			if diff := cmp.Diff(want, r.s.Stats().Drops); diff != "" {
				t.Errorf("drops mismatch (-want +got), want one %v:\n%s", tt.want, diff)
			}
			if len(r.asked)+len(r.grams) != 0 {
				t.Error("the handler was called")
			}
		})
	}
}

func TestChecksumLeftToUs(t *testing.T) {
	bad := changed(syn(flow4, 1), 36, 0x55)
	tests := []struct {
		name string
		h    tun.VnetHdr
		want int // requests
	}{
		{"complete and wrong", tun.VnetHdr{}, 0},
		{"partial", tun.VnetHdr{Flags: tun.VnetNeedsChecksum, ChecksumStart: 20, ChecksumOffset: 16}, 1},
		{"verified by the kernel", tun.VnetHdr{Flags: tun.VnetChecksumValid}, 1},
		{"partial, outside of the packet", tun.VnetHdr{Flags: tun.VnetNeedsChecksum, ChecksumStart: 60}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, nil)
			r.sendVnet(tt.h, bad)
			if len(r.asked) != tt.want {
				t.Errorf("%d requests, want %d", len(r.asked), tt.want)
			}
		})
	}
}

func TestDatagrams(t *testing.T) {
	for _, f := range []Flow{dns4, dns6} {
		t.Run(f.Src.Addr().String(), func(t *testing.T) {
			r := newRig(t, nil)
			r.send(append(udpPacket(f, "query"), "padding"...))
			if len(r.grams) != 1 || r.grams[0].Flow != f || r.grams[0].Payload != "query" {
				t.Fatalf("the handler got %+v, want %q on %v", r.grams, "query", f)
			}
			if err := r.grams[0].conn.Reply([]byte("answer")); err != nil {
				t.Fatal(err)
			}
			want := udpPacket(Flow{UDP, f.Dst, f.Src}, "answer")
			if diff := cmp.Diff(want, r.one()); diff != "" {
				t.Errorf("reply mismatch (-want +got):\n%s", diff)
			}
			if err := r.grams[0].conn.Reply(make([]byte, 70000)); err == nil {
				t.Error("a reply of 70000 bytes was sent")
			}
		})
	}
}

func TestFragmentsOfADatagram(t *testing.T) {
	data := string(make([]byte, 2000))
	whole := udpPacket(dns4, data)
	fragment := func(from, to int, more bool) []byte {
		buf, b := newPacket(UDP, dns4.Src.Addr(), dns4.Dst.Addr(), to-from)
		copy(b, whole[ipv4Len+from:ipv4Len+to])
		p := buf[headroom:]
		flags := uint16(from / 8)
		if more {
			flags |= 0x2000
		}
		binary.BigEndian.PutUint16(p[4:], 4711)
		binary.BigEndian.PutUint16(p[6:], flags)
		return changed(p, 8, ttl)
	}
	t.Run("are put together", func(t *testing.T) {
		r := newRig(t, nil)
		r.send(fragment(1480, 2008, false))
		r.send(fragment(0, 1480, true))
		if len(r.grams) != 1 || r.grams[0].Flow != dns4 || r.grams[0].Payload != data {
			t.Fatalf("the handler got %d datagrams, want the one of 2000 bytes", len(r.grams))
		}
	})
	t.Run("with a wrong sum are dropped", func(t *testing.T) {
		r := newRig(t, nil)
		p := fragment(0, 1480, true)
		p[100] ^= 1
		r.send(p)
		r.send(fragment(1480, 2008, false))
		if n := r.s.Stats().Drops[DropChecksum]; len(r.grams) != 0 || n != 1 {
			t.Errorf("%d datagrams, %d dropped, want 0 and 1", len(r.grams), n)
		}
	})
}

func TestParseDoesNotAllocate(t *testing.T) {
	var p packet
	for _, b := range [][]byte{syn(flow4, 1), syn(flow6, 1), udpPacket(dns6, "query")} {
		if n := testing.AllocsPerRun(100, func() { p.parse(b, len(b)); p.sumIsRight(b) }); n != 0 {
			t.Errorf("parse of %x allocates %v times, want 0", b[:1], n)
		}
	}
}
