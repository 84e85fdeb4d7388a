package node

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// A fast sender and a slow reader: what waits in the nodes is bounded for the one connection, the sender is made to wait, and all
// of it arrives.
func TestNetnsSlowReader(t *testing.T) { eachBackend(t, checkSlowReader) }

func checkSlowReader(t *testing.T, b *bed) {
	const (
		mib    = 1 << 20
		window = 4 * mib             // HTTP2_STREAM_WINDOW_SIZE
		hand   = mib / 4             // what the tunnel and the relay have in hand: buffers of up to 64 KiB
		flow   = window + mib + hand // what one node may hold of it: with the netstack's buffer
		kernel = 6*mib + 2*4*mib     // the largest buffers that two sockets of a kernel have by default, and those of the tunnel's
		most   = 2*flow + 2*kernel   // that the sender may get rid of
	)
	a, z := b.start(0), b.start(1)
	for _, tt := range []struct {
		name string
		down bool
	}{{"FP-09 the client sends", false}, {"FP-09 the server sends", true}} {
		t.Run(tt.name, func(t *testing.T) {
			client, server := b.connect(t, b.ways(8080)[0])
			from, to := client, server
			if tt.down {
				from, to = server, client
			}
			limit := time.Now().Add(60 * time.Second)
			to.SetDeadline(limit)
			from.SetDeadline(time.Time{})

			var sent atomic.Int64
			sum := sha256.New()
			done := make(chan error, 1)
			go func() {
				random := rand.NewChaCha8([32]byte{9})
				p := make([]byte, 64<<10)
				for {
					random.Read(p)
					n, err := from.Write(p)
					sum.Write(p[:n])
					sent.Add(int64(n))
					if errors.Is(err, os.ErrDeadlineExceeded) {
						done <- from.CloseWrite()
						return
					}
					if err != nil {
						done <- err
						return
					}
				}
			}()
			got, held := sha256.New(), int64(0)
			read, at := int64(0), []int64{}
			for range 40 { // 10 kB/s for 4 s
				n, err := io.CopyN(got, to, 1000)
				if read += n; err != nil {
					t.Fatal(err)
				}
				at = append(at, sent.Load())
				for _, p := range []*process{a, z} {
					held = max(held, p.node.budget.Held())
				}
				time.Sleep(100 * time.Millisecond)
			}
			if held > flow {
				t.Errorf("a node held up to %d bytes of one connection, want at most %d", held, flow)
			}
			if held < mib {
				t.Errorf("the nodes held up to %d bytes only: the test is to be about more", held)
			}
			if n := sent.Load(); n > most {
				t.Errorf("the sender got rid of %d bytes, want at most %d", n, most)
			}
			if grew := at[39] - at[20]; grew > mib {
				t.Errorf("the sender is not made to wait: %d bytes in the last 2 s, of which 20 kB were read", grew)
			}
			from.SetWriteDeadline(time.Now()) // it has sent enough
			n, err := io.Copy(got, struct{ io.Reader }{to})
			if read += n; err != nil {
				t.Fatalf("after %d bytes: %v", read, err)
			}
			if err := <-done; err != nil {
				t.Errorf("the sender: %v", err)
			}
			if read != sent.Load() || !bytes.Equal(sum.Sum(nil), got.Sum(nil)) {
				t.Errorf("%d bytes of %d arrived, or they differ", read, sent.Load())
			}
			for _, c := range []net.Conn{client, server} {
				c.Close()
			}
			eventually(t, 10*time.Second, "nothing is held", func() bool { return a.node.budget.Held()+z.node.budget.Held() == 0 })
		})
	}
	awaitNoneOpen(t, a, z)
}
