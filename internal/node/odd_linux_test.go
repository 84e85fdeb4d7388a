package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/lab"
)

// errnoOf connects and returns the error number, 0 for a connection, and ETIMEDOUT for no answer within a while.
func errnoOf(h *lab.Host, to string) syscall.Errno {
	ctx, cancel := context.WithTimeout(context.Background(), 9*time.Second)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", to)
	if err == nil {
		// By redirect the kernel answers: what it has to say comes then.
		c.SetDeadline(time.Now().Add(9 * time.Second))
		_, err = c.Read(make([]byte, 1))
		c.Close()
		if errors.Is(err, io.EOF) {
			return 0
		}
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	return unix.ETIMEDOUT
}

// What no server can be at is refused as without ztun, and does no harm.
func TestNetnsOddAddresses(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("FP-16", func(t *testing.T) { checkOddAddresses(t, b) }) })
}

func checkOddAddresses(t *testing.T, b *bed) {
	client, web, plain := b.pods[clientA], b.pods[webB], b.pods[plainB]
	linkLocal, err := linkLocalOf(client, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	const port = 9 // nobody listens there
	targets := []string{
		"0.0.0.0:9", "[::]:9", "127.0.0.1:9", "127.255.255.254:9", "[::1]:9", "[::ffff:127.0.0.1]:9",
		addrPort(client.Addr4, port), addrPort(client.Addr6, port), addrPort(linkLocal.WithZone("eth0"), port), addrPort(linkLocal, port),
		addrPort(client.Addr4, 0), addrPort(client.Addr6, 0), addrPort(plain.Addr4, 0), addrPort(plain.Addr6, 0), addrPort(web.Addr4, 0), addrPort(web.Addr6, 0),
		addrPort(client.Addr4, outboundPort), addrPort(client.Addr6, inboundPort),
		"255.255.255.255:9", addrPort(broadcastOf(t, client), port),
		"224.0.0.1:9", "239.255.255.250:9", "[ff01::1]:9", "[ff02::1%eth0]:9", "[ff05::2]:9", "[ff0e::1]:9",
		"[::ffff:224.0.0.1]:9", "240.0.0.1:9", // of the last one the node says, not often, that there is no route
	}
	measure := func() map[string]syscall.Errno {
		type result struct {
			to    string
			errno syscall.Errno
		}
		results := make(chan result, len(targets))
		for _, to := range targets {
			go func() { results <- result{to, errnoOf(client, to)} }()
		}
		m := make(map[string]syscall.Errno)
		for range targets {
			r := <-results
			m[r.to] = r.errno
		}
		return m
	}
	if b.capture == config.CaptureRedirect {
		// Without ztun istio-cni's rules lead to nobody: what the kernel says is what it says in the other pod.
		client = b.pods[plainB]
	}
	before := measure()
	client = b.pods[clientA]
	a, z := b.start(0), b.start(1)
	for to, got := range measure() {
		want := before[to]
		if own, err := netip.ParseAddrPort(to); b.capture == config.CaptureRedirect && err == nil && (own.Addr() == client.Addr4 || own.Addr() == client.Addr6) {
			want = got // of another pod it is another question
			if got == 0 || got == unix.ETIMEDOUT {
				t.Errorf("%s: %v, want a refusal", to, got)
			}
		}
		if got != want && (b.capture != config.CaptureRedirect || got != unix.ECONNRESET) {
			t.Errorf("%s: %v, without ztun %v", to, got, want)
		}
	}
	// Services have addresses that only ztun knows.
	for _, to := range []string{"10.96.0.10:0", "[fd96::10]:0"} {
		if err := b.refusal(client, to); !errors.Is(err, b.seen(unix.ECONNREFUSED)) {
			t.Errorf("%s: %v, want it refused", to, err)
		}
	}
	awaitNoneOpen(t, a, z)
	b.serve(web, 8080, who)
	if got, err := b.ask(client, "10.96.0.10:80"); err != nil || got == "" {
		t.Errorf("afterwards the service answers %q, %v", got, err)
	}
}

// Nobody outside gets through the proxy's own ports: neither to the proxy nor to what listens there.
func TestNetnsPortsOfTheProxy(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("DP-115", func(t *testing.T) { checkPortsOfTheProxy(t, b) }) })
}

func checkPortsOfTheProxy(t *testing.T, b *bed) {
	z := b.start(1)
	web, outside := b.pods[webB], b.pods[plainB]
	if b.capture == config.CaptureTUN && !b.handsBack() { // otherwise ztun listens there
		b.serve(web, outboundPort, who)
		b.serve(web, inboundPort, who)
	}
	for _, to := range []netip.Addr{web.Addr4, web.Addr6} {
		for _, port := range []uint16{outboundPort, inboundPort, 15080} {
			if err := b.refusal(outside, addrPort(to, port)); !errors.Is(err, b.seen(unix.ECONNREFUSED)) {
				t.Errorf("%s: %v, want it refused", addrPort(to, port), err)
			}
		}
		c, err := b.dial(outside, addrPort(to, hbone.Port))
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(9 * time.Second))
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n") // it may be closed at the first byte
		if got, err := io.ReadAll(c); len(got) != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("clear text to %s is answered by %q, %v; want it closed", addrPort(to, hbone.Port), got, err)
		}
		c.Close()
	}
	z.out.await(t, `error="attempted recursive call to ourselves"`, z.done, `direction="inbound"`)
	awaitNoneOpen(t, z)
}

// linkLocalOf is the link-local address of an interface of a host.
func linkLocalOf(h *lab.Host, name string) (found netip.Addr, err error) {
	err = h.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		list, err := netlink.AddrList(l, unix.AF_INET6)
		if err != nil {
			return err
		}
		for _, a := range list {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && ip.IsLinkLocalUnicast() {
				found = ip
				return nil
			}
		}
		return fmt.Errorf("%s of %s has no link-local address", name, h.Name)
	})
	return found, err
}

// broadcastOf is the broadcast address of the pod's network.
func broadcastOf(t *testing.T, h *lab.Host) (a netip.Addr) {
	t.Helper()
	err := h.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		list, err := netlink.AddrList(l, unix.AF_INET)
		if err != nil || len(list) == 0 {
			return errors.Join(err, errors.New("no address"))
		}
		ones, _ := list[0].Mask.Size()
		ip := h.Addr4.As4()
		for i := ones; i < 32; i++ {
			ip[i/8] |= 0x80 >> (i % 8)
		}
		a = netip.AddrFrom4(ip)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// Nobody reaches the proxy's own ports through it, and who tries often does not fill the log.
func TestNetnsRefusesItself(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("FP-102", func(t *testing.T) { checkRefusesItself(t, b) }) })
}

func checkRefusesItself(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	web := b.pods[webB]
	try := func(from *lab.Host, to string) {
		t.Helper()
		for range 3 {
			start := time.Now()
			if err := b.refusal(from, to); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.ECONNREFUSED) || time.Since(start) > 2*time.Second {
				t.Errorf("%s, to %s: %v after %v, want it refused at once", from.Name, to, err, time.Since(start))
			}
		}
	}
	for _, port := range []uint16{outboundPort, inboundPort} {
		for i, to := range each(web, port) {
			try(b.pods[plainB], to)                                                                                 // in clear
			try(b.pods[clientA], to)                                                                                // by a tunnel
			try(web, to)                                                                                            // by itself
			try(web, addrPort([]netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}[i], port)) // and by loopback
		}
	}
	awaitNoneOpen(t, a, z)
	lines, want := strings.Count(z.out.String(), "attempted recursive call to ourselves"), 1
	if lines != want {
		t.Errorf("%d lines of the access log, want %d:\n%s", lines, want, z.out)
	}
	if n := z.node.records.Stats().Failed; n < 24 {
		t.Errorf("%d failures are counted, want those in clear and by tunnels, 24 at least", n)
	}
}

// A server that speaks first is heard by a client that says nothing.
func TestNetnsServerSpeaksFirst(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("FP-14", func(t *testing.T) { checkServerSpeaksFirst(t, b) }) })
}

func checkServerSpeaksFirst(t *testing.T, b *bed) {
	b.start(0)
	b.start(1)
	const greeting, answer = "220 mail.shop ESMTP\r\n", "QUIT\r\n"
	for _, w := range b.ways(25) {
		client, server := b.connect(t, w)
		io.WriteString(server, greeting)
		got := make([]byte, len(greeting))
		if _, err := io.ReadFull(client, got); err != nil || string(got) != greeting {
			t.Errorf("%s, %s: the client that says nothing reads %q, %v", w.name, w.addr, got, err)
		}
		io.WriteString(client, answer)
		if _, err := io.ReadFull(server, got[:len(answer)]); err != nil {
			t.Errorf("%s, %s: the server reads %v", w.name, w.addr, err)
		}
	}
}
