package node

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/replay"
)

// The trailers of a capture say which limit ended it, and how far it came until then.
func TestCaptureSaysWhichLimitEndedIt(t *testing.T) {
	const packets, packet = 10, 100
	for _, tt := range []struct {
		name           string
		bytes, packets int64
		want           map[string]string
	}{
		{"bytes", 600, 1 << 40, map[string]string{trailerCaptured: "4", trailerLimit: "bytes", trailerSeconds: "0.400"}},
		{"packets", 1 << 20, 3, map[string]string{trailerCaptured: "3", trailerLimit: "packets", trailerSeconds: "0.300"}},
		{"time", 1 << 20, 1 << 40, map[string]string{trailerCaptured: "10"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			began := time.Now().Add(-time.Minute)
			c := &capture{began: began, queue: make(chan captured, packets), req: captureRequest{pod: true, bytes: tt.bytes, packets: tt.packets, snap: 1 << 18}}
			for i := range packets {
				c.queue <- captured{at: began.Add(time.Duration(i+1) * 100 * time.Millisecond), dir: replay.DirOutbound, data: make([]byte, packet), length: packet}
			}
			ctx, cancel := context.WithDeadline(t.Context(), began) // what waits is written all the same
			defer cancel()
			w := httptest.NewRecorder()
			if err := c.run(ctx, w); err != nil {
				t.Fatal(err)
			}
			c.trailers(w.Header())
			got := make(map[string]string)
			for _, name := range []string{trailerCaptured, trailerLimit, trailerSeconds} {
				if v := w.Header().Get(name); v != "" {
					got[name] = v
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
