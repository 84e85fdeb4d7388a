package identity

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/workload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	cart   = workload.Identity{TrustDomain: "cluster.local", Namespace: "shop", ServiceAccount: "cart"}
	orders = workload.Identity{TrustDomain: "cluster.local", Namespace: "shop", ServiceAccount: "orders"}
	alien  = workload.Identity{TrustDomain: "elsewhere", Namespace: "shop", ServiceAccount: "cart"}
)

// A clock stands still until it is moved.
type clock struct{ atomic.Int64 }

func newClock() *clock {
	c := new(clock)
	c.Store(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano())
	return c
}

func (c *clock) now() time.Time       { return time.Unix(0, c.Load()).UTC() }
func (c *clock) move(d time.Duration) { c.Add(int64(d)) }

// A countingCA counts requests and can fail or wait.
type countingCA struct {
	CA
	calls atomic.Int32
	fail  atomic.Bool
	gate  chan struct{} // not nil: a request waits for it
}

func (c *countingCA) Sign(ctx context.Context, csr []byte) ([][]byte, error) {
	c.calls.Add(1)
	if c.gate != nil {
		<-c.gate
	}
	if c.fail.Load() {
		return nil, errors.New("the CA is out")
	}
	return c.CA.Sign(ctx, csr)
}

func newManager(t *testing.T, c *clock, authority CA) *Manager {
	t.Helper()
	m, err := New(Config{CA: authority, Now: c.now, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func newCA(t *testing.T, c *clock) *countingCA {
	t.Helper()
	authority, err := ca.New(c.now)
	if err != nil {
		t.Fatal(err)
	}
	return &countingCA{CA: authority}
}

func TestOneRequestServesEverybodyWhoWaits(t *testing.T) {
	c := newClock()
	authority := newCA(t, c)
	authority.gate = make(chan struct{})
	m := newManager(t, c, authority)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if cert, err := m.Certificate(t.Context(), cart); err != nil || cert.Identity != cart {
				t.Errorf("got %v, %v", cert, err)
			}
		})
	}
	close(authority.gate)
	wg.Wait()
	if n := authority.calls.Load(); n != 1 {
		t.Errorf("%d requests to the CA, want 1", n)
	}
}

func TestRenewalAtHalfLifeAndNeverExpired(t *testing.T) {
	c := newClock()
	authority := newCA(t, c)
	m := newManager(t, c, authority)
	first, err := m.Certificate(t.Context(), cart)
	if err != nil {
		t.Fatal(err)
	}
	c.move(11 * time.Hour)
	if again, _ := m.Certificate(t.Context(), cart); again != first || authority.calls.Load() != 1 {
		t.Errorf("renewed before half of its life (%d requests)", authority.calls.Load())
	}
	authority.fail.Store(true)
	c.move(2 * time.Hour) // past half: asked for in the background, the old one is still good
	if again, err := m.Certificate(t.Context(), cart); again != first || err != nil {
		t.Errorf("while a renewal fails: got %v, %v, want the old certificate", again, err)
	}
	m.Close()
	if n := authority.calls.Load(); n != 2 {
		t.Errorf("%d requests to the CA, want 2", n)
	}
	c.move(12 * time.Hour) // expired
	if cert, err := m.Certificate(t.Context(), cart); err == nil {
		t.Errorf("an expired certificate is handed out: %v", cert.TLS.Leaf.NotAfter)
	} else if !strings.Contains(err.Error(), "the CA is out") {
		t.Errorf("the error hides the cause: %v", err)
	}
	authority.fail.Store(false)
	if cert, err := m.Certificate(t.Context(), cart); err != nil || cert == first {
		t.Errorf("after the outage: %v, %v", cert, err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	c := newClock()
	authority := newCA(t, c)
	authority.gate = make(chan struct{})
	m := newManager(t, c, authority)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	if _, err := m.Certificate(ctx, cart); !errors.Is(err, why) {
		t.Errorf("got %v, want %v", err, why)
	}
	close(authority.gate)
}

// handshake runs one TLS handshake over loopback; it returns the errors of both ends, the client's after the server's verdict.
func handshake(t *testing.T, client, server *tls.Config) (clientErr, serverErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error)
	go func() {
		c, err := l.Accept()
		if err == nil {
			s := tls.Server(c, server)
			if err = s.Handshake(); err == nil {
				_, err = s.Write([]byte{1})
			}
			c.Close()
		}
		done <- err
	}()
	c, err := tls.Dial("tcp", l.Addr().String(), client)
	if err == nil {
		_, err = c.Read(make([]byte, 1))
		c.Close()
	}
	return err, <-done
}

func TestPeersAreKnownByTheirNames(t *testing.T) {
	c := newClock()
	shared := newCA(t, c)
	ours := newManager(t, c, shared)
	strangers := newManager(t, c, newCA(t, c))
	tests := []struct {
		name                   string
		client, server         *Manager
		clientID, serverID     workload.Identity
		accept                 []workload.Identity
		clientWant, serverWant string // parts of the errors; "": none
	}{
		{"the expected identity", ours, ours, cart, orders, []workload.Identity{alien, orders}, "", ""},
		{"another identity", ours, ours, cart, orders, []workload.Identity{cart}, "did not present the expected SAN (" + cart.String() + "), got " + orders.String(), "bad certificate"},
		{"nobody is accepted", ours, ours, cart, orders, nil, "expected SAN (none)", "bad certificate"},
		{"the server of another CA", ours, strangers, cart, orders, []workload.Identity{orders}, "unknown authority", "bad certificate"},
		{"the client of another CA", strangers, ours, cart, orders, []workload.Identity{orders}, "unknown authority", "bad certificate"},
		{"a client of another trust domain", ours, ours, alien, orders, []workload.Identity{orders}, "bad certificate", "expected trustdomain (cluster.local), got " + alien.String()},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cc, err := tt.client.Client(tt.clientID)(t.Context(), tt.accept)
			if err != nil {
				t.Fatal(err)
			}
			sc, err := tt.server.Server(tt.serverID)(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			clientErr, serverErr := handshake(t, cc, sc)
			if !matches(clientErr, tt.clientWant) {
				t.Errorf("client: %v, want %q", clientErr, tt.clientWant)
			}
			if !matches(serverErr, tt.serverWant) {
				t.Errorf("server: %v, want %q", serverErr, tt.serverWant)
			}
		})
	}
}

func matches(err error, want string) bool {
	if want == "" {
		return err == nil
	}
	return err != nil && strings.Contains(err.Error(), want)
}

func TestAnswersOfTheCAAreChecked(t *testing.T) {
	c := newClock()
	good := newCA(t, c)
	tests := []struct {
		name string
		mend func(chain [][]byte) [][]byte
		want string
	}{
		{"empty", func([][]byte) [][]byte { return nil }, "0 certificates"},
		{"no root", func(ch [][]byte) [][]byte { return ch[:1] }, "1 certificates"},
		{"rubbish", func(ch [][]byte) [][]byte { return [][]byte{[]byte("x"), ch[1]} }, "no PEM certificate"},
		{"root of another", func(ch [][]byte) [][]byte {
			other, _ := newCA(t, c).Sign(context.Background(), testCSR(t))
			return [][]byte{ch[0], other[1]}
		}, "unknown authority"},
		{"somebody else's certificate", func(ch [][]byte) [][]byte {
			other, _ := good.CA.Sign(context.Background(), testCSR(t))
			return other
		}, "no certificate has the public key"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := newManager(t, c, caFunc(func(ctx context.Context, csr []byte) ([][]byte, error) {
				chain, err := good.CA.Sign(ctx, csr)
				return tt.mend(chain), err
			}))
			if _, err := m.Certificate(t.Context(), cart); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

type caFunc func(context.Context, []byte) ([][]byte, error)

func (f caFunc) Sign(ctx context.Context, csr []byte) ([][]byte, error) { return f(ctx, csr) }

// testCSR is what some other manager would send.
func testCSR(t *testing.T) []byte {
	t.Helper()
	var got []byte
	m := newManager(t, newClock(), caFunc(func(_ context.Context, csr []byte) ([][]byte, error) {
		got = csr
		return nil, errors.New("seen")
	}))
	m.Certificate(t.Context(), cart)
	return got
}
