package node

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// A program can read the marks of its sockets: none has the secret, whoever its other end is, and whatever address that comes from.
func TestNetnsApplicationsDoNotSeeTheSecret(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) {
		text := b.read("node-b.yaml")
		for _, more := range []string{"", "enableOrigSrc: false\n"} {
			b.write("node-b.yaml", more+text)
			nodes := []*process{b.start(0), b.start(1)}
			for _, w := range b.ways(8080) {
				client, server := b.connect(t, w)
				for what, c := range map[string]*net.TCPConn{"client": client, "server": server} {
					m := markOf(t, c)
					for _, p := range nodes {
						if seen := m & p.node.marks.Secret; seen != 0 {
							t.Errorf("%s: the %s's socket has the mark %#x, with %#x of the secret", w.name, what, m, seen)
						}
					}
				}
				client.Close()
				server.Close()
			}
			b.stop(0)
			b.stop(1)
		}
	})
}

func markOf(t *testing.T, c *net.TCPConn) uint32 {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var mark int
	if err := raw.Control(func(fd uintptr) { mark, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return uint32(mark)
}
