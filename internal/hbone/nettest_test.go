//go:build linux

package hbone

import (
	"context"
	"net"
	"testing"

	"golang.org/x/net/nettest"
)

// TestStreamIsNetConn runs all of nettest over blocking views of both ends of a stream. A net.Conn has no half-close and no reset:
// TestTunnelEnds and TestStreamResetRead have them.
func TestStreamIsNetConn(t *testing.T) {
	accepted := make(chan Stream, 1)
	tm := newThreadMesh(t, handlerFunc(func(_ context.Context, r *Request) {
		_ = r.Accept(Headers{}, func(s Stream) { accepted <- s })
	}))
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		a := tm.open(t)
		b := <-accepted
		ctx := context.Background()
		c1, c2 = a.Ref().Blocking(ctx, a), b.Ref().Blocking(ctx, b)
		return c1, c2, func() { _ = c1.Close(); _ = c2.Close() }, nil
	})
}
