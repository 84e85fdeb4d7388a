package node

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"testing"
	"time"
)

// Half-closed connections outlive what connection tracking gives them, 60 s, because keepalive shows it that they live. Here the
// one has 4 s, and the other is sent each second instead of every 45.
func TestNetnsHalfClosedForLong(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("FP-06", func(t *testing.T) { checkHalfClosedForLong(t, b) }) })
}

func checkHalfClosedForLong(t *testing.T, b *bed) {
	for _, name := range []string{"node-a.yaml", "node-b.yaml"} {
		b.write(name, "keepaliveTime: 1s\nkeepaliveInterval: 1s\nkeepaliveRetries: 5\n"+b.read(name))
	}
	b.start(0)
	b.start(1)
	for _, h := range b.pods {
		err := h.Do(func() (err error) {
			for _, state := range []string{"close_wait", "fin_wait", "last_ack"} {
				err = errors.Join(err, os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_"+state, []byte("4"), 0o600))
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // nothing is tracked
			t.Fatal(err)
		}
	}
	var pairs [][2]io.ReadWriteCloser
	for _, w := range b.ways(8080) {
		client, server := b.connect(t, w)
		limit := time.Now().Add(30 * time.Second)
		client.SetDeadline(limit)
		server.SetDeadline(limit)
		io.WriteString(client, "question")
		client.CloseWrite()
		if got, err := io.ReadAll(server); err != nil || string(got) != "question" {
			t.Errorf("%s, %s: the server reads %q, %v", w.name, w.addr, got, err)
		}
		pairs = append(pairs, [2]io.ReadWriteCloser{client, server})
	}
	<-time.After(7 * time.Second) // what is measured
	for i, w := range b.ways(8080) {
		io.WriteString(pairs[i][1], "late answer")
		pairs[i][1].Close()
		if got, err := io.ReadAll(pairs[i][0]); err != nil || string(got) != "late answer" {
			t.Errorf("%s, %s: the client reads %q, %v", w.name, w.addr, got, err)
		}
	}
}
