package proxy

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/identity"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// labels are those of the only series of a metric.
func (b *bench) labels(t *testing.T, metric string) map[string]string {
	t.Helper()
	families, err := b.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != metric {
			continue
		}
		if n := len(f.GetMetric()); n != 1 {
			t.Fatalf("%s has %d series, want one", metric, n)
		}
		got := make(map[string]string)
		for _, l := range f.GetMetric()[0].GetLabel() {
			got[l.GetName()] = l.GetValue()
		}
		return got
	}
	t.Fatalf("no %s", metric)
	return nil
}

// Of a workload outside HBONE nobody proves who it is: metrics name it, the log does not.
func TestPlaintextProvesNobody(t *testing.T) {
	t.Run("DP-4", func(t *testing.T) {
		m := newMesh()
		m.server.Protocol = workload.ProtocolTCP
		b := newBench(t, m)
		req := request("10.244.1.7:8080")
		b.ServeTCP(t.Context(), req)
		b.Settle()
		req.app.Reset()
		b.Settle()
		l := b.labels(t, "istio_tcp_connections_closed_total")
		got := []string{l["source_principal"], l["destination_principal"], l["connection_security_policy"]}
		if diff := cmp.Diff([]string{"unknown", "spiffe://cluster.local/ns/default/sa/server", "unknown"}, got); diff != "" {
			t.Errorf("principals and security (-want +got):\n%s", diff)
		}
		if line := b.lines(t); strings.Contains(line, "identity=") || !strings.Contains(line, `dst.workload="server"`) {
			t.Errorf("access log %q names an identity, or no workload", line)
		}
	})
}

// breakable is a Dialer whose connections the test can reset.
type breakable struct {
	server *hbone.Server
	ends   []loop.Conn
}

func (d *breakable) Dial(_ context.Context, dst netip.AddrPort) (loop.Conn, error) {
	near, far := loop.PipeAddrs(netip.MustParseAddrPort("10.244.9.9:41000"), dst)
	d.ends = append(d.ends, far)
	d.server.Serve(far)
	return near, nil
}

// A tunnel that nobody uses and whose peer resets it is no news.
func TestIdleTunnelThatIsResetIsNoNoise(t *testing.T) {
	t.Run("FP-131", func(t *testing.T) {
		var log bytes.Buffer
		told := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		m := newMesh()
		b := newBench(t, m)
		now := b.Group().Now
		authority, err := ca.New(now)
		if err != nil {
			t.Fatal(err)
		}
		manager, err := identity.New(identity.Config{CA: authority, Now: now, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		defer manager.Close()
		d := new(breakable)
		if d.server, err = hbone.NewServer(hbone.ServerConfig{Group: b.Group(), TLS: manager.Server(m.client.Identity()), Handler: b.Proxy, Refused: b.Refused, Log: told}); err != nil {
			t.Fatal(err)
		}
		pool, err := hbone.NewPool(hbone.PoolConfig{Group: b.Group(), Dialer: d, TLS: manager.Client(somebody), Log: told})
		if err != nil {
			t.Fatal(err)
		}
		b.Group().Go(t.Context(), func(ctx context.Context) {
			s, err := pool.Open(ctx, hbone.Target{NextHop: netip.MustParseAddrPort(podAddr), Authority: "10.244.0.5:8080", Accept: []workload.Identity{m.client.Identity()}})
			if err != nil {
				t.Error(err)
				return
			}
			s.Ref().Post(func() { s.Reset() })
		})
		b.Settle()
		if st := pool.Stats(); st.Tunnels != 1 || st.Streams != 0 {
			t.Fatalf("the pool has %+v, want an idle tunnel", st)
		}
		d.ends[0].Reset()
		b.Settle()
		defer func() { // the server does not hear of what was done to its own end
			b.Group().Go(context.Background(), func(ctx context.Context) {
				ctx, cancel := b.Group().WithTimeout(ctx, time.Second)
				defer cancel()
				_ = d.server.Close(ctx)
			})
			b.Advance(3 * time.Second)
		}()
		if st := pool.Stats(); st.Tunnels != 0 {
			t.Errorf("the pool has %+v after the reset", st)
		}
		for line := range strings.Lines(log.String()) {
			if !strings.Contains(line, "level=DEBUG") {
				t.Errorf("a line above debug: %s", line)
			}
		}
		if log.Len() == 0 {
			t.Error("not even at debug is anything said")
		}
		if lines := b.lines(t); strings.Count(lines, "\n") != 1 || strings.Contains(lines, "error=") {
			t.Errorf("access log, want the line of the stream:\n%s", lines)
		}
	})
}
