package node

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
)

// An application tunnel is reached on the loopback addresses of the pod, which no peer gets to, and hears who connects.
func TestNetnsApplicationTunnel(t *testing.T) { eachBackend(t, checkApplicationTunnel) }

func checkApplicationTunnel(t *testing.T, b *bed) {
	b.write("mesh.yaml", strings.Replace(b.read("mesh.yaml"), "node: node-b\n", "node: node-b\n  applicationTunnel: {protocol: PROXY, port: 15088}\n", 1))
	b.start(0)
	b.start(1)
	for i, to := range each(b.pods[webB], 8080) {
		l, err := b.pods[webB].Listen("tcp", []string{"127.0.0.1:15088", "[::1]:15088"}[i])
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan string, 1)
		go func() {
			defer close(got)
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			if !c.RemoteAddr().(*net.TCPAddr).IP.IsLoopback() {
				t.Errorf("%s: the connection is from %v", to, c.RemoteAddr())
			}
			text, err := io.ReadAll(c)
			if err == nil {
				got <- string(text)
			}
		}()
		c, err := b.dial(b.pods[clientA], to)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "request")
		c.(*net.TCPConn).CloseWrite()
		text := <-got
		c.Close()
		l.Close()
		const fixed = 16
		src, dst := own(b.pods[clientA], to), netip.MustParseAddrPort(to)
		want := append(append(append([]byte{}, src.AsSlice()...), dst.Addr().AsSlice()...), 0, 0)
		want = binary.BigEndian.AppendUint16(want, dst.Port())
		const id = "spiffe://cluster.local/ns/shop/sa/client"
		if len(text) < fixed+len(want) || text[:13] != "\r\n\r\n\x00\r\nQUIT\n\x21" || !strings.HasSuffix(text, "\xd0\x00"+string(rune(len(id)))+id+"request") {
			t.Fatalf("%s: the application got %q", to, text)
		}
		said := []byte(text[fixed : fixed+len(want)])
		copy(said[len(want)-4:], []byte{0, 0}) // the port of the tunnel
		if !bytes.Equal(said, want) {
			t.Errorf("%s: addresses % x, want % x", to, said, want)
		}
	}
}
