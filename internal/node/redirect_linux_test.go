package node

import (
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// Which backend a pod gets follows from what is asked for and from what istio-cni has done in it; there is no other way.
func TestNetnsCaptureIsChosenForEachPod(t *testing.T) {
	b := newBed(t)
	istioCNI(t, b.pods[otherA])
	b.write("node-a.yaml", strings.Replace(b.read("node-a.yaml"), "capture: tun", "capture: auto", 1))
	cfg := b.load(0)
	if cfg.Capture != config.CaptureAuto {
		t.Fatalf("capture %v", cfg.Capture)
	}
	a := b.launch(0)
	b.start(1)
	a.log.await(t, "\tpod captured\t", a.done, `pod="shop/client"`, `capture="tun"`)
	a.log.await(t, "\tpod captured\t", a.done, `pod="shop/other"`, `capture="redirect"`)
	a.log.await(t, `capture="tun"`, a.done, `reason="nothing else captures the pod"`)
	a.log.await(t, `capture="redirect"`, a.done, `reason="istio-cni has redirected the pod: nftables table istio-ambient-`)
	// And both are what captures: the pod that may talk to the server does, the other does not.
	b.serve(b.pods[webB], 8080, who)
	if got, err := b.ask(b.pods[clientA], "10.96.0.10:80"); err != nil || !strings.Contains(got, b.pods[clientA].Addr4.String()) {
		t.Errorf("by tun: %q, %v", got, err)
	}
	if _, err := b.ask(b.pods[otherA], "10.96.0.10:80"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("by redirect: %v, want a reset", err)
	}
	b.stop(0)

	// Only that backend is used that is asked for.
	auto := b.read("node-a.yaml")
	for _, tt := range []struct {
		capture, served, pending string
		want                     []string
	}{
		{"tun", "client", "other", []string{"istio-cni", "ZTUN_CAPTURE=redirect"}},
		{"redirect", "other", "client", []string{"istio-cni", "ZTUN_CAPTURE=tun"}},
	} {
		unchanged(t, b.pods[:2], func() {
			b.write("node-a.yaml", strings.Replace(auto, "capture: auto", "capture: "+tt.capture, 1))
			a := b.launch(0)
			a.log.await(t, "\tpod captured\t", a.done, `pod="shop/`+tt.served+`"`, `capture="`+tt.capture+`"`)
			a.log.await(t, "\tpod not captured: it stays as it was found\t", a.done, append(tt.want, `pod="shop/`+tt.pending+`"`)...)
			b.stop(0)
		})
	}
}

// What istio-cni's rules leave alone.
func TestNetnsRedirectLeavesAlone(t *testing.T) {
	b := newBedOn(t, variant{capture: config.CaptureRedirect}, lab.Config{})
	a := b.start(0)
	b.serve(b.pods[clientA], 9091, who)
	client := b.pods[clientA]
	for _, to := range append(each(client, 9091), "127.0.0.1:9091", "[::1]:9091", "127.0.0.2:9091") {
		if _, err := b.ask(client, to); err != nil {
			t.Errorf("the pod itself, %s: %v", to, err)
		}
	}
	if n := a.node.records.Stats().Opened; n != 0 {
		t.Errorf("%d connections were captured", n)
	}
}

// A service that leads back to the pod that asks.
func TestNetnsServiceLeadsToItself(t *testing.T) { eachBackend(t, checkServiceLeadsToItself) }

func checkServiceLeadsToItself(t *testing.T, b *bed) {
	z := b.start(1)
	b.serve(b.pods[webB], 8080, who)
	for _, to := range []string{"10.96.0.10:80", "[fd96::10]:80"} {
		got, err := b.ask(b.pods[webB], to)
		if err != nil || netip.MustParseAddrPort(got).Addr().Unmap() != own(b.pods[webB], to) {
			t.Errorf("%s: %q, %v, want the pod's own address", to, got, err)
		}
	}
	awaitNoneOpen(t, z)
}

// Without the process istio-cni's rules lead to ports that nobody listens on.
func TestNetnsRedirectCrashLetsNothingOut(t *testing.T) {
	c := newCrashOf(t, variant{capture: config.CaptureRedirect})
	for _, a := range c.dieUnderLoad() {
		if !errors.Is(a.err, syscall.ECONNREFUSED) || a.took > 200*time.Millisecond {
			t.Errorf("%v after the death, %s: %v after %v, want it refused at once", a.after, a.to, a.err, a.took)
		}
	}
	for i, open := range c.open {
		open.SetDeadline(time.Now().Add(time.Second))
		if _, err := open.Write([]byte("x")); err == nil || isTimeout(err) {
			t.Errorf("connection %d from before the crash: %v, want its end", i, err)
		}
	}
	c.child = c.spawnReady(0)
	for _, to := range slices.Concat([]string{"10.96.0.10:80", "[fd96::10]:80"}, each(c.pods[webB], 8080)) {
		if err := c.attempt(to); err != nil {
			t.Errorf("after the restart, %s: %v", to, err)
		}
	}
	if err := c.sniffer.Close(); err != nil {
		t.Fatal(err)
	}
	if n := c.sniffer.Count(); n.ClearBytes != 0 || n.Hits[0] != 0 || n.Hits[1] != 0 || n.Dropped != 0 {
		t.Errorf("the wire carried %+v, want nothing clear", n)
	}
	c.child.stop(t)
}

// An orderly end leaves nothing behind but istio-cni's rules, which then refuse.
func TestNetnsRedirectStopLeavesThePodsAsTheyWere(t *testing.T) {
	b := newBedOn(t, variant{capture: config.CaptureRedirect}, lab.Config{})
	b.serve(b.pods[webB], 8080, echo)
	b.start(1)
	for range 2 {
		unchanged(t, b.pods[:2], func() {
			b.start(0)
			if err := b.pingPong(b.pods[clientA], "10.96.0.10:80"); err != nil {
				t.Error(err)
			}
			b.stop(0)
		})
		if _, err := b.dial(b.pods[clientA], addrPort(b.pods[webB].Addr4, 8080)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("without ztun: %v, want it refused", err)
		}
	}
}

// An application that asks before it reads: what it has sent before the upstream answered is not lost, and what comes in while
// the set-up waits does not end it.
func TestNetnsRedirectKeepsEarlyBytes(t *testing.T) {
	b := newBedOn(t, variant{capture: config.CaptureRedirect}, lab.Config{})
	b.start(0)
	b.start(1)
	text := strings.Repeat(rand.Text(), 1000)
	b.serve(b.pods[webB], 8080, func(c net.Conn) {
		if got, err := io.ReadAll(c); err == nil {
			c.Write(got)
		}
	})
	for _, to := range []string{"10.96.0.10:80", "[fd96::10]:80"} {
		c, err := b.dial(b.pods[clientA], to)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(5 * time.Second))
		io.WriteString(c, text)
		c.(*net.TCPConn).CloseWrite() // before there is a tunnel
		if got, err := io.ReadAll(c); err != nil || string(got) != text {
			t.Errorf("%s: %d bytes, %v, want %d", to, len(got), err, len(text))
		}
		c.Close()
	}
}
