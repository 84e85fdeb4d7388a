package proxy

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// A chain is all of the way between two applications: the proxy of the one's pod, a tunnel with TLS, and the proxy of the other's.
type chain struct {
	*peer
	source *Proxy
}

func newChain(t *testing.T) *chain {
	t.Helper()
	m := newMesh()
	c := &chain{peer: newPeer(t, m, m.server.Identity())}
	var err error
	c.source, err = New(Config{
		Client: &workload.Client{Name: "server", Namespace: "default", ServiceAccount: "server"},
		Local:  func(a netip.Addr) bool { return a == m.server.Addresses[0] },
		Store:  c.store, Underlay: &fakeUnderlay{}, Tunnel: c.pool, DNS: echoDNS{}, Records: c.records, Connections: c.conns,
		Group: c.Group(), Rand: func() uint64 { return 7 }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// dial has the one application connect to the other.
func (c *chain) dial(t *testing.T) *fakeRequest {
	t.Helper()
	req := &fakeRequest{flow: stack.Flow{
		Proto: stack.TCP, Src: netip.MustParseAddrPort("10.244.1.7:40000"), Dst: netip.MustParseAddrPort("10.244.0.5:8080"),
	}}
	c.source.ServeTCP(t.Context(), req)
	c.Settle()
	return req
}

// pair is both applications.
func (c *chain) pair(t *testing.T) (client, server loop.Conn) {
	t.Helper()
	req := c.dial(t)
	if req.answer != "accepted" || len(c.net.far) == 0 {
		t.Fatalf("the SYN was answered by %q", req.answer)
	}
	return req.app, c.net.far[len(c.net.far)-1]
}

// send writes all of text.
func (c *chain) send(t *testing.T, to loop.Conn, text string) {
	t.Helper()
	for len(text) > 0 {
		n, err := to.TryWrite([]byte(text))
		if err != nil && err != loop.ErrAgain {
			t.Fatal(err)
		}
		text = text[n:]
		if c.Settle(); err == loop.ErrAgain && n == 0 {
			t.Fatal("it takes nothing")
		}
	}
}

// TestEnds: in whichever order the two applications end, each sees of the other what it would see on a wire.
func TestEnds(t *testing.T) {
	const reset = "loop: connection reset"
	big := strings.Repeat("0123456789", 20_000)
	fin := func(t *testing.T, c loop.Conn) {
		t.Helper()
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		name string
		do   func(t *testing.T, c *chain, client, server loop.Conn)
		// What each reads afterwards, and how that ends; "closed": it has closed itself.
		client, clientEnd string
		server, serverEnd string
	}{
		{"FP-05 DP-125 the client ends, and then the server answers", func(t *testing.T, c *chain, client, server loop.Conn) {
			c.send(t, client, "question")
			fin(t, client)
			c.Settle()
			c.send(t, server, "answer")
			fin(t, server)
		}, "answer", "EOF", "question", "EOF"},
		{"FP-05 DP-126 the server ends, and the client goes on", func(t *testing.T, c *chain, client, server loop.Conn) {
			fin(t, server)
			c.Settle()
			c.send(t, client, big)
			fin(t, client)
		}, "", "EOF", big, "EOF"},
		{"FP-05 both end at once", func(t *testing.T, c *chain, client, server loop.Conn) {
			client.TryWrite([]byte("from the client"))
			server.TryWrite([]byte("from the server"))
			fin(t, client)
			fin(t, server)
		}, "from the server", "EOF", "from the client", "EOF"},
		{"FP-05 the question and the end come at once", func(t *testing.T, c *chain, client, server loop.Conn) {
			client.TryWrite([]byte("x")) // printf x | nc
			fin(t, client)
			c.Settle()
			c.send(t, server, big)
			fin(t, server)
		}, big, "EOF", "x", "EOF"},
		{"FP-05 the server ends before anything was said", func(t *testing.T, c *chain, client, server loop.Conn) {
			fin(t, server)
			c.Settle()
			fin(t, client)
		}, "", "EOF", "", "EOF"},
		{"FP-05 DP-127 the client is reset", func(t *testing.T, c *chain, client, server loop.Conn) {
			client.Reset()
		}, "", "closed", "", reset},
		{"FP-05 DP-127 the server is reset", func(t *testing.T, c *chain, client, server loop.Conn) {
			server.Reset()
		}, "", reset, "", "closed"},
		{"FP-05 the client is reset in the midst of its bytes", func(t *testing.T, c *chain, client, server loop.Conn) {
			client.TryWrite([]byte(big))
			client.Reset()
		}, "", "closed", "", reset},
		{"FP-05 the client ends, then the server is reset", func(t *testing.T, c *chain, client, server loop.Conn) {
			c.send(t, client, "question")
			fin(t, client)
			c.Settle()
			all(server)
			server.Reset()
		}, "", reset, "", "closed"},
		{"FP-05 the server ends, then the client is reset", func(t *testing.T, c *chain, client, server loop.Conn) {
			fin(t, server)
			c.Settle()
			client.Reset()
		}, "", "closed", "", reset},
		{"FP-05 the client closes while the server sends", func(t *testing.T, c *chain, client, server loop.Conn) {
			server.TryWrite([]byte(big))
			c.Settle()
			client.Close() // with bytes unread: a reset, as TCP has it
		}, "", "closed", "", reset},
		{"FP-05 the client closes, then the server sends", func(t *testing.T, c *chain, client, server loop.Conn) {
			client.Close()
			c.Settle()
			if _, then := all(server); then != "EOF" {
				t.Errorf("the server reads %q first, want the end", then)
			}
			server.TryWrite([]byte("to nobody"))
			c.Settle()
			server.TryWrite([]byte("again")) // what it was sent it has in full; what it sends goes nowhere
			c.Settle()
			if _, err := server.TryWrite([]byte("and again")); err != loop.ErrReset {
				t.Errorf("the server writes to nobody: %v, want a reset", err)
			}
		}, "", "closed", "", reset},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := newChain(t)
			client, server := c.pair(t)
			tt.do(t, c, client, server)
			c.Settle()
			for _, side := range []struct {
				who, want, end string
				conn           loop.Conn
			}{{"client", tt.client, tt.clientEnd, client}, {"server", tt.server, tt.serverEnd, server}} {
				if side.end == "closed" {
					continue
				}
				got, then := "", ""
				for range 100 { // what does not fit into a pipe comes as it is read
					more, end := all(side.conn)
					got, then = got+more, end
					if c.Settle(); end != "" {
						break
					}
				}
				if got != side.want || then != side.end {
					t.Errorf("the %s reads %d bytes, then %q; want %d, then %q", side.who, len(got), then, len(side.want), side.end)
				}
			}
			client.Close()
			server.Close()
			c.Settle()
			if n := len(openConns(c.bench)); n != 0 {
				t.Errorf("%d connections are open in the end", n)
			}
			if st := c.pool.Stats(); st.Streams != 0 || st.Tunnels != 1 {
				t.Errorf("in the end the pool has %+v", st)
			}
		})
	}
}
