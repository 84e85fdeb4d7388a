package node

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"ztun.dev/ztun/internal/admin"
)

// What "ztun conns" shows of a connection, through kernels: both legs, the tunnel, what the set-up took.
func TestNetnsOpenConnectionsAreListed(t *testing.T) { eachBackend(t, checkOpenConnections) }

func checkOpenConnections(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	goOn := make(chan struct{})
	b.serve(b.pods[webB], 8080, func(c net.Conn) {
		io.Copy(io.Discard, c) // to the client's end
		<-goOn
	})
	c, err := b.dial(b.pods[clientA], "10.96.0.10:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	defer close(goOn)
	if _, err := c.Write([]byte("some bytes")); err != nil {
		t.Fatal(err)
	}
	only := func(p *process) (x admin.Connection) {
		t.Helper()
		var list []admin.Connection
		if err := json.Unmarshal([]byte(p.get(t, http.MethodGet, "admin", "/debug/conns")), &list); err != nil {
			t.Fatal(err)
		}
		if len(list) != 1 {
			t.Fatalf("%d connections are listed, want one: %+v", len(list), list)
		}
		return list[0]
	}
	eventually(t, 5*time.Second, "the bytes", func() bool { return only(a).Received == 10 && only(z).Received == 10 })
	from, to := only(a), only(z)
	if from.State != "open" || to.State != "open" || from.Pod != "shop/client" || to.Pod != "shop/web" {
		t.Errorf("states %s and %s of pods %s and %s", from.State, to.State, from.Pod, to.Pod)
	}
	if from.Tunnel == "" || from.Tunnel != to.Src || from.TraceID == "" || from.TraceID != to.TraceID {
		t.Errorf("tunnel %q, seen from %q; traces %q and %q", from.Tunnel, to.Src, from.TraceID, to.TraceID)
	}
	for _, step := range []string{"classify", "connect", "tls", "response"} {
		if s := from.SetUp[step]; s <= 0 || s > 5 {
			t.Errorf("FP-139 %s took %v s: %v", step, s, from.SetUp)
		}
	}
	for _, step := range []string{"policy", "connect"} {
		if s := to.SetUp[step]; s <= 0 || s > 5 {
			t.Errorf("FP-139 %s took %v s at the destination: %v", step, s, to.SetUp)
		}
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "the client's end", func() bool {
		return only(a).State == "half-closed-local" && only(z).State == "half-closed-remote"
	})
}
