package node

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// Flags of a TCP header, RFC 9293, section 3.1.
const (
	flagSYN = 0x02
	flagRST = 0x04
	flagACK = 0x10
)

// forgedSYN is that of whoever.
func forgedSYN(src, dst netip.AddrPort) []byte { return forgedSegment(src, dst, flagSYN, 0, 0) }

// forgedSegment is an IPv4 packet from whoever: the kernel fills in the header's checksum (ip(7), IP_HDRINCL).
func forgedSegment(src, dst netip.AddrPort, flags byte, seq, ack uint32) []byte {
	b := make([]byte, 40)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_TCP
	copy(b[12:], src.Addr().AsSlice())
	copy(b[16:], dst.Addr().AsSlice())
	tcp := b[20:]
	binary.BigEndian.PutUint16(tcp, src.Port())
	binary.BigEndian.PutUint16(tcp[2:], dst.Port())
	binary.BigEndian.PutUint32(tcp[4:], seq)
	binary.BigEndian.PutUint32(tcp[8:], ack)
	tcp[12], tcp[13], tcp[14] = 5<<4, flags, 0xff
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

// A rawTCP sends and receives the TCP segments of a host by hand.
type rawTCP struct{ out, in int }

func (b *bed) rawTCP(h *lab.Host) (r rawTCP) {
	b.t.Helper()
	err := h.Do(func() (err error) {
		if r.out, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
			return err
		}
		r.in, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return err
	})
	if err == nil {
		err = unix.SetsockoptTimeval(r.in, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { unix.Close(r.out); unix.Close(r.in) })
	return r
}

func (r rawTCP) send(t *testing.T, dst netip.AddrPort, packet []byte) {
	t.Helper()
	if err := unix.Sendto(r.out, packet, 0, &unix.SockaddrInet4{Addr: dst.Addr().As4()}); err != nil {
		t.Fatal(err)
	}
}

// synAck returns the sequence number of the SYN-ACK that comes from src to dst.
func (r rawTCP) synAck(t *testing.T, src, dst netip.AddrPort) uint32 {
	t.Helper()
	for b := make([]byte, 2048); ; {
		n, err := unix.Read(r.in, b)
		if err != nil {
			t.Fatalf("no SYN-ACK: %v", err)
		}
		tcp := b[int(b[0]&15)*4 : n]
		if binary.BigEndian.Uint16(tcp) == src.Port() && binary.BigEndian.Uint16(tcp[2:]) == dst.Port() && tcp[13] == flagSYN|flagACK {
			return binary.BigEndian.Uint32(tcp[4:])
		}
	}
}

// A SYN was allowed and answered by a SYN cookie, of which the pod's kernel remembers nothing; then policy denies, and long after that the
// client sends its ACK.
func TestNetnsPolicyReachesConnectionsOfSYNCookies(t *testing.T) {
	onOffloads(t, checkPolicyReachesConnectionsOfSYNCookies, config.OffloadSockops, config.OffloadTC)
}

func checkPolicyReachesConnectionsOfSYNCookies(t *testing.T, b *bed) {
	z := b.start(1)
	web, client := b.pods[webB], b.pods[plainB]
	if err := web.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_syncookies", []byte("2"), 0) }); err != nil { // always
		t.Fatal(err)
	}
	came, ended := make(chan struct{}, 1), make(chan error, 1)
	b.serve(web, 8080, func(c net.Conn) {
		_ = c.(*net.TCPConn).SetKeepAlive(false) // the client's kernel, which knows nothing of it, would answer by a reset
		came <- struct{}{}
		_, err := c.Read(make([]byte, 1))
		ended <- err
	})
	raw := b.rawTCP(client)
	src, dst := netip.AddrPortFrom(client.Addr4, 4242), netip.AddrPortFrom(web.Addr4, 8080)
	raw.send(t, dst, forgedSegment(src, dst, flagSYN, 1000, 0))
	cookie := raw.synAck(t, dst, src)
	const policies = "policies:\n"
	const strict = policies + "- {name: strict, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{notPrincipals: [!Presence ]}]]]}\n"
	b.setState(z.node, policies, strict, "[shop/no-other, shop/no-9090]", "[shop/no-other, shop/no-9090, shop/strict]")
	z.out.await(t, `error="connection closed due to policy change"`, z.done, "src.addr="+src.String())
	select {
	case <-came:
		t.Fatal("the connection came to be without its ACK: no cookie was sent")
	default:
	}
	time.Sleep(4 * time.Second) // the client waits longer than anybody looks for what is to be cut
	raw.send(t, dst, forgedSegment(src, dst, flagACK, 1001, cookie+1))
	select {
	case <-came:
	case <-time.After(5 * time.Second):
		t.Fatal("the connection does not come to be: there is nothing to test")
	}
	select {
	case err := <-ended:
		if !errors.Is(err, syscall.ECONNABORTED) {
			t.Errorf("the application's connection ends with %v", err)
		}
	case <-time.After(2*lookEvery + 5*time.Second):
		t.Error("policy does not reach the connection")
		raw.send(t, dst, forgedSegment(src, dst, flagRST, 1001, 0))
	}
}
