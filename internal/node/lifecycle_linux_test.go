package node

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

func TestNetnsSecondStartIsRefused(t *testing.T) { eachBackend(t, checkSecondStartIsRefused) }

func checkSecondStartIsRefused(t *testing.T, b *bed) {
	a := b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, echo)
	open, err := b.dial(b.pods[clientA], "10.96.0.10:80")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	other := b.rewrite(0, "other-directory", "node-a/ztun.sock", "elsewhere/ztun.sock")
	want := []string{fmt.Sprintf("pid %d ", os.Getpid()), "stop it first"}
	if b.capture == config.CaptureRedirect { // a port does not tell who holds it
		want = []string{":15008", "stop the process that holds the port", "ss -ltnp"}
	}
	unchanged(t, b.pods[:2], func() {
		for _, file := range []string{b.file(0), other} {
			line, code := b.spawnFile(0, file).failure(t)
			for _, w := range want {
				if code != childFailed || !strings.Contains(line, w) {
					t.Errorf("the second start says %q, exit code %d, want %q in it and code %d", line, code, w, childFailed)
				}
			}
		}
	})
	for _, to := range []string{"10.96.0.10:80", "[fd96::10]:80"} {
		if err := b.pingPong(b.pods[clientA], to); err != nil {
			t.Errorf("after the second start, %s: %v", to, err)
		}
	}
	if err := bounce(open, "still here"); err != nil {
		t.Errorf("a connection from before the second start: %v", err)
	}
	if !ended(a) {
		return
	}
	t.Error("the first process has ended")
}

func ended(p *process) bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func TestNetnsStopLeavesThePodsAsTheyWere(t *testing.T) {
	b := newBed(t)
	b.start(1)
	b.serve(b.pods[webB], 8080, echo)
	for range 2 {
		unchanged(t, b.pods[:2], func() {
			before := dump(t, b.pods[clientA])
			b.start(0)
			if after := dump(t, b.pods[clientA]); slices.Equal(before, after) {
				t.Error("the dump does not see that the pod is captured")
			}
			if err := b.pingPong(b.pods[clientA], "10.96.0.10:80"); err != nil {
				t.Error(err)
			}
			b.stop(0)
		})
		// Now the pod reaches the other as if there were no mesh.
		if err := b.pingPong(b.pods[clientA], addrPort(b.pods[webB].Addr4, 8080)); err != nil {
			t.Errorf("without ztun: %v", err)
		}
	}
}

// An orderly end lets connections finish for a while; what does not is reset, not ended.
func TestNetnsStopDrains(t *testing.T) { eachBackend(t, checkStopDrains) }

func checkStopDrains(t *testing.T, b *bed) {
	b.start(0)
	z := b.start(1)
	ways := b.ways(8080)[:2] // the mesh's
	short, shortServer := b.connect(t, ways[0])
	long, longServer := b.connect(t, ways[1])
	for _, c := range []net.Conn{short, shortServer, long, longServer} {
		c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	var sending sync.WaitGroup
	sending.Go(func() { io.Copy(struct{ io.Writer }{longServer}, zeros{}) })
	if _, err := io.CopyN(io.Discard, long, 1_000_000); err != nil {
		t.Fatal(err)
	}
	b.serve(b.pods[plainB], 8080, echo)
	z.stop()
	z.log.await(t, "\tending\t", z.done)
	t.Run("DP-133 nothing new", func(t *testing.T) {
		web, plain := b.pods[webB], b.pods[plainB]
		for _, try := range []struct {
			name string
			from *lab.Host
			to   string
			want syscall.Errno
		}{
			{"mesh", b.pods[clientA], addrPort(web.Addr4, 8080), b.seen(syscall.ECONNREFUSED)},
			{"plaintext in", plain, addrPort(web.Addr4, 8080), b.seen(syscall.ECONNREFUSED)},
			{"passthrough out", web, addrPort(plain.Addr4, 8080), b.seen(syscall.ECONNREFUSED)},
		} {
			if err := b.refusal(try.from, try.to); !errors.Is(err, try.want) {
				t.Errorf("%s: %v, want %v", try.name, err, try.want)
			}
		}
	})
	t.Run("DP-131 an open connection goes on", func(t *testing.T) {
		shortServer.Write([]byte("the rest"))
		shortServer.Close()
		short.CloseWrite()
		if got, err := io.ReadAll(short); err != nil || string(got) != "the rest" {
			t.Errorf("a connection that ends while the node ends: %q, %v", got, err)
		}
	})
	t.Run("DP-132 until the deadline", func(t *testing.T) {
		deadline := z.node.cfg.TerminationDeadline
		start := time.Now()
		if n, err := io.Copy(io.Discard, long); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a connection that goes on: %d bytes, then %v, want a reset", n, err)
		}
		if took := time.Since(start); took < deadline/2 || took > 2*deadline {
			t.Errorf("a connection that goes on was cut after %v, want about %v", took, deadline)
		}
		longServer.Close()
		sending.Wait()
		<-z.done
		z.out.await(t, `direction="inbound"`, z.done, `error="connection closed due to connection drain"`)
		z.log.await(t, "\tdrain duration expired with pending connections, forcefully shutting down\t", z.done, "connections=1")
	})
	b.stop(1)
}
