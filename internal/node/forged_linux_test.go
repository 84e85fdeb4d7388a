package node

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// forgedSYN is an IPv4 packet from whoever: the kernel fills in the header's checksum (ip(7), IP_HDRINCL).
func forgedSYN(src, dst netip.AddrPort) []byte {
	b := make([]byte, 40)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_TCP
	copy(b[12:], src.Addr().AsSlice())
	copy(b[16:], dst.Addr().AsSlice())
	tcp := b[20:]
	binary.BigEndian.PutUint16(tcp, src.Port())
	binary.BigEndian.PutUint16(tcp[2:], dst.Port())
	tcp[12], tcp[13], tcp[14] = 5<<4, 2, 0xff
	sum := uint32(unix.IPPROTO_TCP + len(tcp))
	for i := 12; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	return b
}

// SYNs with forged addresses, which policy lets in as it does others, have a bounded number of records, and cost those that are open nothing.
func TestNetnsForgedSYNsAreBounded(t *testing.T) { eachOffload(t, checkForgedSYNsAreBounded) }

func checkForgedSYNsAreBounded(t *testing.T, b *bed) {
	const limit, count = 50, 2000
	b.write("node-b.yaml", "maxInFlightPerPod: 50\n"+b.read("node-b.yaml"))
	z := b.start(1)
	b.serve(b.pods[webB], 8080, echo)
	to := addrPort(b.pods[webB].Addr4, 8080)
	kept, err := b.dial(b.pods[plainB], to)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	dst := netip.MustParseAddrPort(to)
	most := 0
	err = b.pods[plainB].Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for i := range count {
			src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 99, byte(i >> 8), byte(i)}), 4242)
			if err := unix.Sendto(fd, forgedSYN(src, dst), 0, &unix.SockaddrInet4{Addr: dst.Addr().As4()}); err != nil {
				return fmt.Errorf("packet %d: %w", i, err)
			}
			if i%100 == 99 {
				most = max(most, z.node.records.Stats().Open)
				time.Sleep(time.Millisecond)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	evicted := func() uint64 { return z.node.listPods()[0].current().proxy.Evicted() }
	eventually(t, 5*time.Second, "the end of most of the attempts", func() bool { return evicted() >= count/2 })
	if n := max(most, z.node.records.Stats().Open); n > limit+2 { // the one that is kept, and the one that is being given up
		t.Errorf("%d records at once, want at most %d", n, limit+2)
	}
	if err := bounce(kept.(*net.TCPConn), "still here"); err != nil {
		t.Errorf("the connection that was open: %v", err)
	}
	if got, err := b.dial(b.pods[plainB], to); err != nil {
		t.Errorf("another connection: %v", err)
	} else {
		if err := bounce(got.(*net.TCPConn), "hello"); err != nil {
			t.Errorf("another connection: %v", err)
		}
		got.Close()
	}
	t.Logf("%d of %d attempts were given up, at most %d records at once", evicted(), count, most)
}
