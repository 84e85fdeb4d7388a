package node

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// page reads a page of a process in a node's namespace, on one of its usual ports.
func page(ctx context.Context, h *lab.Host, port int, path string) (status int, body string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return 0, "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return 0, "", err
	}
	req.Close = true
	if err := req.Write(c); err != nil {
		return 0, "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// A process that has no descriptors left for connections keeps what it has, stays ready, and goes on by itself.
func TestNetnsDescriptorLimit(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("FP-19", func(t *testing.T) { checkDescriptorLimit(t, b) }) })
}

func checkDescriptorLimit(t *testing.T, b *bed) {
	const limit = 256
	a := b.spawnReady(0, fmt.Sprintf("%s=%d", childFiles, limit))
	b.start(1)
	plain := b.pods[plainB]
	b.serve(plain, 8080, echo)
	b.serve(b.pods[webB], 8080, echo)
	var open []net.Conn
	closeAll := func() {
		for _, c := range open {
			c.Close()
		}
		open = nil
	}
	t.Cleanup(closeAll)
	// Connections past the mesh cost the process a socket, or two; where the kernel carries them, none, and those of the mesh one.
	fill, other := addrPort(plain.Addr4, 8080), addrPort(plain.Addr6, 8080)
	if b.handsBack() {
		fill, other = "10.96.0.10:80", "[fd96::10]:80"
	}
	// try opens a connection and uses it.
	try := func(to string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		c, err := b.pods[clientA].Dial(ctx, "tcp", to)
		if err != nil {
			return err
		}
		c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := io.WriteString(c, "x"); err != nil {
			c.Close()
			return err
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			c.Close()
			return err
		}
		open = append(open, c)
		return nil
	}
	ready := func(when string) {
		t.Helper()
		if status, body, err := page(t.Context(), b.Node(0), 15021, "/healthz/ready"); err != nil || status != http.StatusOK {
			t.Errorf("%s: readiness is %d %q, %v", when, status, body, err)
		}
	}
	for round := range 2 {
		var err error
		for err == nil && len(open) < limit {
			err = try(fill)
		}
		if n := len(open); err == nil || n < limit/4 {
			t.Fatalf("round %d: %d connections, then %v; want many, and an end of them", round, n, err)
		}
		t.Logf("round %d: %d connections, then %v", round, len(open), err)
		for range 5 {
			if try(other) == nil {
				t.Error("a connection was opened at the limit")
			}
		}
		if b.handsBack() {
			if err := try(addrPort(plain.Addr4, 8080)); err != nil {
				t.Errorf("a connection that needs no descriptor, at the limit: %v", err)
			}
		} else if err := try("10.96.0.10:80"); round == 0 && err == nil {
			t.Error("a tunnel was made at the limit")
		} else if round == 1 && b.capture == config.CaptureTUN && err != nil { // that tunnel is there now
			t.Errorf("a connection that needs no descriptor, at the limit: %v", err)
		}
		ready("at the limit")
		if _, metrics, err := page(t.Context(), b.Node(0), 15020, "/metrics"); err != nil || !strings.Contains(metrics, `ztun_flows_refused_total{reason="descriptor_limit"}`) ||
			!strings.Contains(metrics, fmt.Sprintf("process_max_fds %d", limit)) {
			t.Errorf("metrics at the limit: %v, or they lack what is refused", err)
		}
		for _, c := range open { // those that are open go on
			if err := bounce(c, "still here"); err != nil {
				t.Errorf("an open connection at the limit: %v", err)
			}
		}
		closeAll()
		eventually(t, 20*time.Second, "a new connection after the limit", func() bool { return try(other) == nil && try("10.96.0.10:80") == nil })
		ready("afterwards")
		closeAll()
	}
	const line = "descriptor limit reached"
	if n := strings.Count(a.log.String(), line); n != 1 {
		t.Errorf("%d lines about the limit, want one a minute:\n%s", n, a.log)
	}
	a.log.await(t, line, a.cmd.Done(), fmt.Sprint("limit=", limit), "reserved=32", "ulimit -n")
	a.stop(t)
}
