package tun

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// A client comes from the port that ztun has delivered a connection of the same client from. The application's end of that
// must not take the client's SYN away from the device.
func TestNetnsClientOnAPortOfADelivery(t *testing.T) {
	t.Parallel()
	for _, noBPF := range []bool{false, true} {
		for _, to := range []netip.Addr{pod4, pod6} {
			t.Run(fmt.Sprintf("nft=%v/%s", noBPF, to), func(t *testing.T) {
				t.Parallel()
				l := newLab(t, true)
				cfg := testConfig(l.pod)
				cfg.noBPF = noBPF
				k := open(t, cfg)
				const port = 5000
				sockaddr := func(a netip.Addr, port int) unix.Sockaddr {
					if a.Is4() {
						return &unix.SockaddrInet4{Port: port, Addr: a.As4()}
					}
					return &unix.SockaddrInet6{Port: port, Addr: a.As16()}
				}
				socket := func(ns *Netns) int {
					fd, err := ns.Socket(familyOf(to), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
					must(t, err)
					t.Cleanup(func() { _ = unix.Close(fd) })
					return fd
				}
				client := remote4
				if to.Is6() {
					client = remote6
				}

				app := socket(l.pod)
				must(t, unix.Bind(app, sockaddr(to, 8080)))
				must(t, unix.Listen(app, 8))
				delivery := socket(l.pod)
				if to.Is4() {
					must(t, unix.SetsockoptInt(delivery, unix.SOL_IP, unix.IP_TRANSPARENT, 1))
				} else {
					must(t, unix.SetsockoptInt(delivery, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1))
				}
				must(t, unix.SetsockoptInt(delivery, unix.SOL_SOCKET, unix.SO_MARK, testDeliver))
				must(t, unix.Bind(delivery, sockaddr(client, port)))
				if err := unix.Connect(delivery, sockaddr(to, 8080)); err != unix.EINPROGRESS {
					t.Fatalf("delivery: %v", err)
				}
				if n, err := unix.Poll([]unix.PollFd{{Fd: int32(delivery), Events: unix.POLLOUT}}, 3000); n != 1 || err != nil {
					t.Fatalf("delivery: no answer: %d, %v", n, err)
				}
				accepted, _, err := unix.Accept(app)
				must(t, err)
				defer unix.Close(accepted)
				if mark, err := unix.GetsockoptInt(accepted, unix.SOL_SOCKET, unix.SO_MARK); mark != testDeliver || err != nil {
					t.Fatalf("mark of the application's socket %#x, %v, want that of deliveries", mark, err)
				}
				if packets, _ := readAll(t, k, 8, Headroom); len(packets) > 0 {
					t.Fatalf("%d packets of the delivery on the device, want none", len(packets))
				}

				same := socket(l.remote)
				must(t, unix.Bind(same, sockaddr(client, port)))
				if err := unix.Connect(same, sockaddr(to, 8080)); err != unix.EINPROGRESS {
					t.Fatalf("client: %v", err)
				}
				waitFor(t, "the client's SYN on the device", func() bool {
					packets, _ := readAll(t, k, 8, Headroom)
					return len(packets) > 0
				})
			})
		}
	}
}

// What comes by the interface for the application's end of a delivery is not of ztun's end, and the kernel does not get it.
func TestNetnsSteerWireDoesNotReachADelivery(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{SteerBySockops, SteerByTC} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			l := newSteeredLab(t, mode, always(refuse))
			from, to := netip.AddrPortFrom(remote4, 5000), netip.AddrPortFrom(pod4, 8080)
			app := listenerOf(t, l.pod, to, 0)
			delivery := startDial(t, l.pod, netip.AddrPort{}, to, func(fd int) error {
				return errors.Join(unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1),
					unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, testDeliver), unix.Bind(fd, sockaddrOf(from)))
			})
			must(t, delivery.wait(t, 3000))
			accepted, _ := accept(t, app)
			send(t, delivery.fd, accepted, "by ztun")

			raw, err := l.remote.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
			must(t, err)
			closeAtEnd(t, raw)
			segment := make([]byte, 40)
			segment[0], segment[8], segment[9] = 4<<4|5, 64, unix.IPPROTO_TCP
			copy(segment[12:], from.Addr().AsSlice())
			copy(segment[16:], to.Addr().AsSlice())
			binary.BigEndian.PutUint16(segment[20:], from.Port())
			binary.BigEndian.PutUint16(segment[22:], to.Port())
			segment[32], segment[33] = 5<<4, 1<<4 // an ACK
			before := l.agent.other.Load()
			must(t, unix.Sendto(raw, segment, 0, sockaddrOf(to)))
			waitFor(t, "the segment on the device", func() bool { return l.agent.other.Load() > before })
			send(t, accepted, delivery.fd, "and back")
		})
	}
}
