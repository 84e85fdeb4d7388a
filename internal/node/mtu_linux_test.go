package node

import (
	"fmt"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// peerMSS is the size of the segments that the peer of a connection takes.
func peerMSS(t *testing.T, c net.Conn) int {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	var optErr error
	if err := raw.Control(func(fd uintptr) { info, optErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); err != nil || optErr != nil {
		t.Fatal(err, optErr)
	}
	return int(info.Snd_mss)
}

func TestNetnsTheDeviceFollowsTheMTU(t *testing.T) {
	b := newBed(t)
	a, z := b.start(0), b.start(1)
	pod := b.pods[clientA]
	b.serve(b.pods[webB], 8080, who)
	to := each(b.pods[webB], 8080)[0]
	const timestamps, headers = 12, 40
	for _, mtu := range []int{1400, 1500} {
		if err := pod.Command(t.Context(), "ip", "link", "set", "eth0", "mtu", fmt.Sprint(mtu)).Run(); err != nil {
			t.Fatal(err)
		}
		eventually(t, 10*time.Second, fmt.Sprintf("connections with MTU %d", mtu), func() bool {
			if got, err := a.node.pods[0].current().backend.(*tunBackend).device.MTU(); err != nil || got != mtu {
				return false
			}
			c, err := b.dial(pod, to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			return peerMSS(t, c) == mtu-headers-timestamps
		})
	}
	awaitNoneOpen(t, a, z)
}
