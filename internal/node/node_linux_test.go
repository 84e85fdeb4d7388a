package node

import (
	"net/netip"
	"testing"
)

func TestNetnsOutboundReachesTheOtherNode(t *testing.T) {
	eachBackend(t, checkOutboundReachesTheOtherNode)
}

func checkOutboundReachesTheOtherNode(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	web := b.pods[webB]
	b.serve(web, 8080, who)
	for _, to := range []string{"10.96.0.10:80", "[fd96::10]:80", addrPort(web.Addr4, 8080), addrPort(web.Addr6, 8080)} {
		got, err := b.ask(b.pods[clientA], to)
		if err != nil {
			t.Errorf("%s: %v", to, err)
			continue
		}
		want := b.pods[clientA].Addr4
		if netip.MustParseAddrPort(to).Addr().Is6() {
			want = b.pods[clientA].Addr6
		}
		if seen := netip.MustParseAddrPort(got).Addr().Unmap(); seen != want {
			t.Errorf("%s: the server saw %v, want the client's own %v", to, seen, want)
		}
	}
	const src, dst = `src.identity="spiffe://cluster.local/ns/shop/sa/client"`, `dst.identity="spiffe://cluster.local/ns/shop/sa/web"`
	a.out.await(t, `direction="outbound"`, a.done, src, dst, `dst.service="web.shop.svc.cluster.local"`)
	z.out.await(t, `direction="inbound"`, z.done, src, dst)
}
