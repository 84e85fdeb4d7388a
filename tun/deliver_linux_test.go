package tun

import (
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
