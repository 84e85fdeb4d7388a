package proxy

import (
	"errors"
	"testing"

	"ztun.dev/ztun/internal/loop"
)

// TestRelayHoldsLittle: of a sender that is faster than its reader a relay holds one read, which is counted, and less where memory
// is full; the sender waits.
func TestRelayHoldsLittle(t *testing.T) {
	const limit = 1 << 20
	for _, tt := range []struct {
		name string
		hog  int // held by others
		most int
	}{
		{"FP-09 a fast sender and a slow reader", 0, 128 << 10},
		{"FP-09 while memory is full", limit, readAhead},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, newMesh())
			budget := loop.NewBudget(limit)
			b.cfg.Budget = budget
			hog := loop.NewAccount(budget)
			hog.Set(tt.hog)
			req := request("1.2.3.4:80")
			b.ServeTCP(t.Context(), req)
			b.Settle()
			server := b.net.far[0]
			sent := 0
			push := func() {
				for {
					n, err := req.app.TryWrite(make([]byte, 50_000))
					if sent += n; errors.Is(err, loop.ErrAgain) {
						return
					} else if err != nil {
						t.Fatal(err)
					}
					b.Settle()
				}
			}
			push()
			// A pipe takes 256 KiB on either side of the relay.
			held := budget.Held() - int64(tt.hog)
			if held <= 0 || held > int64(tt.most) {
				t.Errorf("the relay holds %d bytes, want up to %d", held, tt.most)
			}
			if most := 512<<10 + tt.most; sent > most {
				t.Errorf("the sender got rid of %d bytes, want at most %d", sent, most)
			}
			for got, want := 0, 3*sent; got < want; {
				n, err := server.TryRead(make([]byte, 10_000))
				if err != nil && !errors.Is(err, loop.ErrAgain) {
					t.Fatal(err)
				}
				got += n
				b.Settle()
				push()
			}
			req.app.Reset()
			b.Settle()
			if held := budget.Held() - int64(tt.hog); held != 0 {
				t.Errorf("after the end %d bytes are counted", held)
			}
		})
	}
}
