package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/lab"
)

func TestNetnsPassthroughKeepsTheAddress(t *testing.T) {
	eachBackend(t, checkPassthroughKeepsTheAddress)
}

func checkPassthroughKeepsTheAddress(t *testing.T, b *bed) {
	a := b.start(0)
	b.start(1)
	for _, h := range []*lab.Host{b.pods[plainB], b.Wire().Host, b.pods[webB]} {
		b.serve(h, 8080, who)
	}
	for _, tt := range []struct {
		name     string
		from, to *lab.Host
	}{
		{"to a pod without ztun", b.pods[clientA], b.pods[plainB]},
		{"to a host outside", b.pods[clientA], b.Wire().Host},
		{"from a pod without ztun", b.pods[plainB], b.pods[webB]},
		{"from a host outside", b.Wire().Host, b.pods[webB]},
	} {
		for _, to := range each(tt.to, 8080) {
			got, err := b.ask(tt.from, to)
			if err != nil {
				t.Errorf("%s, %s: %v", tt.name, to, err)
				continue
			}
			if seen := netip.MustParseAddrPort(got).Addr().Unmap(); seen != own(tt.from, to) {
				t.Errorf("%s, %s: the server saw %v, want the client's own %v", tt.name, to, seen, own(tt.from, to))
			}
		}
	}
	line := a.out.await(t, "dst.addr="+addrPort(b.pods[plainB].Addr4, 8080), a.done, `direction="outbound"`)
	if strings.Contains(line, "identity=\"spiffe://cluster.local/ns/shop/sa/web\"") || strings.Contains(line, "hbone_addr") {
		t.Errorf("passthrough is logged as %s", line)
	}
}

func TestNetnsPlaintextDeniedByPolicy(t *testing.T) { eachBackend(t, checkPlaintextDeniedByPolicy) }

func checkPlaintextDeniedByPolicy(t *testing.T, b *bed) {
	z := b.start(1)
	b.serve(b.pods[webB], 9090, func(net.Conn) { t.Error("the server has seen a connection") })
	for _, to := range each(b.pods[webB], 9090) {
		start := time.Now()
		err := b.refusal(b.pods[plainB], to)
		if !errors.Is(err, b.seen(syscall.ECONNREFUSED)) || time.Since(start) > time.Second {
			t.Errorf("%s: %v after %v, want it refused at once", to, err, time.Since(start))
		}
		z.out.await(t, `direction="inbound"`, z.done, "dst.addr="+to, "error\taccess", `error="connection closed due to policy rejection: explicitly denied by: shop/no-9090"`)
	}
}

// A probe of the kubelet has an address of its own, and no policy is asked about it.
func TestNetnsProbes(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("DP-116", func(t *testing.T) { checkProbes(t, b) }) })
}

func checkProbes(t *testing.T, b *bed) {
	z := b.start(1)
	web := b.pods[webB]
	b.setState(z.node, "[shop/no-other, shop/no-9090]", "[shop/strict]", "policies:\n",
		"policies:\n- {name: strict, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{notPrincipals: [!Presence ]}]]]}\n")
	probe := []string{probeAddress4, probeAddress6}
	if err := b.Wire().Do(func() error { return addAddresses("br0", probe) }); err != nil {
		t.Fatal(err)
	}
	b.serve(web, 8080, who)
	for i, to := range each(web, 8080) {
		if err := web.Do(func() error { return routeOnLink("eth0", probe[i]) }); err != nil {
			t.Fatal(err)
		}
		got, err := b.askFrom(b.Wire().Host, probe[i], to)
		if err != nil || netip.MustParseAddrPort(got).Addr().Unmap() != netip.MustParseAddr(probe[i]) {
			t.Errorf("a probe of %s: %q, %v", to, got, err)
		}
	}
	if s := z.node.records.Stats(); s.Opened+s.Failed != 0 {
		t.Errorf("probes are recorded: %+v", s)
	}
	for _, to := range each(web, 8080) { // and the policy is in force
		if err := b.refusal(b.Wire().Host, to); !errors.Is(err, b.seen(syscall.ECONNREFUSED)) {
			t.Errorf("another address of the same host, to %s: %v, want it refused", to, err)
		}
		z.out.await(t, "explicitly denied by: shop/strict", z.done, "dst.addr="+to)
	}
}

// What ztun does not capture is as if it were not there.
func TestNetnsOtherProtocolsAreUntouched(t *testing.T) {
	eachBackend(t, checkOtherProtocolsAreUntouched)
}

func checkOtherProtocolsAreUntouched(t *testing.T, b *bed) {
	b.start(0)
	b.start(1)
	for _, tt := range []struct{ from, to *lab.Host }{
		{b.pods[clientA], b.pods[webB]},
		{b.pods[plainB], b.pods[webB]},
		{b.pods[webB], b.pods[plainB]},
	} {
		echo, err := tt.to.ListenPacket("udp", "[::]:7")
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			buf := make([]byte, 100)
			for {
				n, from, err := echo.ReadFrom(buf)
				if err != nil {
					return
				}
				echo.WriteTo(fmt.Append(nil, from.(*net.UDPAddr).AddrPort().Addr().Unmap(), " ", string(buf[:n])), from)
			}
		}()
		for _, to := range each(tt.to, 7) {
			c, err := tt.from.Dial(t.Context(), "udp", to)
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(5 * time.Second))
			buf := make([]byte, 100)
			n := 0
			if _, err = c.Write([]byte("hello")); err == nil {
				n, err = c.Read(buf)
			}
			if want := own(tt.from, to).String() + " hello"; err != nil || string(buf[:n]) != want {
				t.Errorf("UDP %s to %s: %q, %v, want %q", tt.from.Name, to, buf[:n], err, want)
			}
			c.Close()
			ip := netip.MustParseAddrPort(to).Addr().String()
			if out, err := tt.from.Command(t.Context(), "ping", "-c1", "-W5", ip).Output(); err != nil {
				t.Errorf("ping %s to %s: %v: %s", tt.from.Name, ip, err, out)
			}
		}
		echo.Close()
		<-ended
	}
}

func addAddresses(link string, addrs []string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	for _, text := range addrs {
		a := netip.MustParseAddr(text)
		addr := &netlink.Addr{IPNet: prefixOf(a)}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(l, addr); err != nil {
			return err
		}
	}
	return nil
}

func routeOnLink(link, to string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: prefixOf(netip.MustParseAddr(to)), Scope: netlink.SCOPE_LINK})
}

func prefixOf(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// With ENABLE_ORIG_SRC=false the pod itself is its applications' client, however a connection has come.
func TestNetnsOwnSource(t *testing.T) { eachBackend(t, checkOwnSource) }

func checkOwnSource(t *testing.T, b *bed) {
	b.write("node-b.yaml", "enableOrigSrc: false\n"+b.read("node-b.yaml"))
	b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, who)
	for _, from := range []*lab.Host{b.pods[clientA], b.pods[plainB]} {
		for _, to := range each(b.pods[webB], 8080) {
			got, err := b.ask(from, to)
			if err != nil {
				t.Errorf("from %s to %s: %v", from.Name, to, err)
				continue
			}
			if seen, want := netip.MustParseAddrPort(got).Addr().Unmap(), netip.MustParseAddrPort(to).Addr(); seen != want {
				t.Errorf("from %s to %s: the server saw %v, want %v", from.Name, to, seen, want)
			}
		}
	}
}
