package underlay

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
)

// What is said to be readable is read without a gap: past urgent bytes, up to the FIN, and with a reset behind it.
func TestNetnsReadable(t *testing.T) {
	u := newUnderlay(t)
	open := pairs(t, u)
	// drain reads what is promised, piece by piece, then asks a read once, until there is an end.
	drain := func(t *testing.T, c *Conn) (got []byte, promised int, end error) {
		t.Helper()
		limit := time.Now().Add(10 * time.Second)
		p := make([]byte, 1000)
		for time.Now().Before(limit) {
			left := c.Readable()
			promised += left
			for left > 0 {
				n, err := c.TryRead(p[:min(left, len(p))])
				if err != nil || n == 0 {
					t.Fatalf("of the bytes that are readable %d are not: %d, %v", left, n, err)
				}
				got = append(got, p[:n]...)
				left -= n
			}
			n, err := c.TryRead(p[:1])
			if got = append(got, p[:n]...); err != nil && err != loop.ErrAgain {
				return got, promised, err
			}
		}
		t.Fatal("no end after 10 s")
		return nil, 0, nil
	}
	t.Run("urgent bytes and a FIN", func(t *testing.T) {
		client, server := open(t)
		defer server.Close()
		var want []byte
		w, sent := u.cfg.Group.Blocking(t.Context(), client), make(chan error, 1)
		defer w.Close()
		parts := make([][]byte, 200)
		for i := range parts {
			parts[i] = bytes.Repeat([]byte{byte('a' + i%26)}, 1+rand.IntN(100_000))
			want = append(want, parts[i]...)
		}
		go func() {
			for i, p := range parts {
				if _, err := w.Write(p); err != nil {
					sent <- err
					return
				}
				if i%8 == 0 {
					if err := unix.Sendmsg(client.fd, []byte("!"), nil, nil, unix.MSG_OOB); err != nil && err != unix.EAGAIN {
						sent <- err
						return
					}
				}
			}
			sent <- w.CloseWrite()
		}()
		got, promised, err := drain(t, server)
		if err != io.EOF {
			t.Errorf("the end: %v, want EOF", err)
		}
		if err := <-sent; err != nil {
			t.Error(err)
		}
		// Where two urgent bytes are under way the kernel leaves the first in the stream.
		if kept := len(got) - len(want); kept < 0 || bytes.Count(got, []byte("!")) != kept || !bytes.Equal(bytes.ReplaceAll(got, []byte("!"), nil), want) {
			t.Errorf("%d bytes arrived, or others than the %d that were sent", len(got), len(want))
		}
		if promised < len(want)/2 {
			t.Errorf("%d of %d bytes were promised: hardly anything was tested", promised, len(want))
		}
	})
	t.Run("a reset behind the bytes", func(t *testing.T) {
		client, server := open(t)
		defer server.Close()
		if n, err := client.TryWrite(make([]byte, 5000)); n != 5000 || err != nil {
			t.Fatal(n, err)
		}
		client.Reset()
		if got, promised, err := drain(t, server); len(got) != 5000 || promised == 0 || !errors.Is(err, loop.ErrReset) {
			t.Errorf("%d bytes of 5000, of which %d promised, then %v", len(got), promised, err)
		}
	})
	t.Run("closed", func(t *testing.T) {
		client, server := open(t)
		client.Close()
		server.Close()
		if n := server.Readable(); n != 0 {
			t.Errorf("%d bytes are readable of a closed socket", n)
		}
	})
}
