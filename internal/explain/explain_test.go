package explain

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/workload"
)

const state = `
workloads:
- {uid: k//Pod/shop/cart, name: cart, namespace: shop, serviceAccount: cart, protocol: HBONE, workloadIps: [10.1.0.1, "fd00::1"], services: {}}
- {uid: k//Pod/shop/twin, name: twin, namespace: shop, protocol: HBONE, workloadIps: [10.1.0.5], services: {}}
- {uid: k2//Pod/shop/twin, name: twin, namespace: shop, protocol: HBONE, workloadIps: [10.1.0.6], services: {}}
- {uid: k//Pod/shop/gw, name: gw, namespace: shop, serviceAccount: gw, protocol: HBONE, workloadIps: [10.1.0.7], services: {}}
- {uid: k//Pod/shop/none, name: none, namespace: shop, protocol: HBONE, workloadIps: [], services: {}}
- uid: far//Pod/shop/web
  name: web
  namespace: shop
  serviceAccount: web
  protocol: HBONE
  network: net2
  networkGateway: {destination: /10.1.0.7, hboneMtlsPort: 15009}
  workloadIps: []
  services: {shop/web.shop.svc.cluster.local: {80: 8080}}
services:
- {name: web, namespace: shop, hostname: web.shop.svc.cluster.local, vips: [/10.96.0.10, "/fd96::10"], ports: {80: 8080}, subjectAltNames: ["spiffe://cluster.local/ns/shop/sa/web"]}
- {name: own, namespace: other, hostname: own.other.svc.cluster.local, vips: [/10.96.0.11], ports: {80: 8080}, visibility: Namespace}
`

func mesh(t *testing.T) Mesh {
	t.Helper()
	st, err := workload.ParseStatic("state", []byte(state))
	if err != nil {
		t.Fatal(err)
	}
	return Mesh{State: workload.NewSnapshot(st)}
}

func TestFind(t *testing.T) {
	m := mesh(t)
	for text, want := range map[string]string{
		"shop/cart": "k//Pod/shop/cart", "10.1.0.1": "k//Pod/shop/cart", "fd00::1": "k//Pod/shop/cart", "::ffff:10.1.0.1": "k//Pod/shop/cart", "k2//Pod/shop/twin": "k2//Pod/shop/twin",
		"shop/twin": "2 workloads are called shop/twin: say which by its uid: k//Pod/shop/twin, k2//Pod/shop/twin",
		"cart":      `"cart" is no workload`, "shop/x": "the state has no workload shop/x", "10.9.9.9": `no workload has the address 10.9.9.9 in network ""`,
	} {
		w, err := m.Find(text)
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			got = w.UID
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("Find(%q) is %q, want %q", text, got, want)
		}
	}
}

func TestTarget(t *testing.T) {
	m := mesh(t)
	four, six := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")
	for _, tt := range []struct {
		text string
		like netip.Addr
		want string
	}{
		{"192.0.2.1:80", four, "192.0.2.1:80"},
		{"[::ffff:192.0.2.1]:80", six, "192.0.2.1:80"},
		{"WEB.shop.svc.cluster.local:80", four, "10.96.0.10:80"},
		{"web.shop.svc.cluster.local:80", six, "[fd96::10]:80"},
		{"shop/gw:15009", six, "10.1.0.7:15009"},
		{"shop/none:80", four, `shop/none has no address in network ""`},
		{"own.other.svc.cluster.local:80", four, "the state has no service own.other.svc.cluster.local that is visible to namespace shop"},
		{"web:http", four, `"web:http": "http" is not a port`},
		{"web", four, `"web" has no port`},
	} {
		got, err := m.Target(tt.text, "shop", tt.like)
		text := got.String()
		if err != nil {
			text = err.Error()
		}
		if text != tt.want {
			t.Errorf("Target(%q) is %q, want %q", tt.text, text, tt.want)
		}
	}
}

func TestAnotherNetwork(t *testing.T) {
	m := mesh(t)
	from, _ := m.Find("shop/cart")
	r := m.Outbound(from, netip.MustParseAddrPort("10.96.0.10:80"))
	want := `flow        shop/cart (10.1.0.1) -> 10.96.0.10:80
destination service web.shop.svc.cluster.local, VIP match, network ""
gateway     /10.1.0.7, to another network
candidates  1 endpoint
            + shop/web port 8080
chosen      shop/gw 10.1.0.7
transport   double HBONE, no waypoint, next hop 10.1.0.7:15009, authority web.shop.svc.cluster.local:80
identity    expects spiffe://cluster.local/ns/shop/sa/gw
            beyond the gateway spiffe://cluster.local/ns/shop/sa/web
verdict     the gateway of the other network picks the destination, whose node decides
`
	if diff := cmp.Diff(want, r.Text()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
	if got := r.Outcome(); got != "double HBONE" {
		t.Errorf("outcome %q", got)
	}
	m.State.ServiceNamed("web.shop.svc.cluster.local", "shop").SubjectAltNames = nil
	r = m.Outbound(from, netip.MustParseAddrPort("10.96.0.10:80"))
	if text := r.Text(); !strings.Contains(text, "\n            beyond the gateway nobody: the service names no identity, so that every peer is refused\n") {
		t.Errorf("of a service without identities it says\n%s", text)
	}
}

func TestMatrixLeavesOutWhatIsHidden(t *testing.T) {
	m := mesh(t)
	from, _ := m.Find("shop/cart")
	var got []string
	for _, c := range m.Matrix([]*workload.Workload{from}) {
		got = append(got, c.To)
	}
	if diff := cmp.Diff([]string{"10.96.0.10:80", "[fd96::10]:80"}, got); diff != "" {
		t.Errorf("destinations (-want +got):\n%s", diff)
	}
}

const policies = `
workloads:
- {uid: k//Pod/shop/cart, name: cart, namespace: shop, serviceAccount: cart, protocol: HBONE, workloadIps: [10.1.0.1, "fd00::1"], services: {}}
- uid: k//Pod/shop/web
  name: web
  namespace: shop
  serviceAccount: web
  protocol: HBONE
  workloadIps: [10.1.0.2, "fd00::2"]
  authorizationPolicies: [shop/no-v6, shop/no-15088]
  services: {}
- uid: k//Pod/shop/tunnel
  name: tunnel
  namespace: shop
  serviceAccount: tunnel
  protocol: HBONE
  workloadIps: [10.1.0.3]
  applicationTunnel: {protocol: PROXY, port: 15088}
  authorizationPolicies: [shop/no-15088]
  services: {}
policies:
- {name: no-v6, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{sourceIps: ["fd00::/64"], destinationIps: ["fd00::2/128"]}]]]}
- {name: no-15088, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{destinationPorts: [15088]}]]]}
`

// Policy is asked about what it is asked about at the destination: addresses of the family that the connection has, and the port of the
// application behind its tunnel. What leads to the proxy itself is refused there.
func TestPolicyIsAskedAsTheDestinationDoes(t *testing.T) {
	st, err := workload.ParseStatic("state", []byte(policies))
	if err != nil {
		t.Fatal(err)
	}
	m := Mesh{State: workload.NewSnapshot(st)}
	for _, tt := range []struct {
		name string
		q    Question
		to   string
		want string
	}{
		{"IPv4", Question{From: "shop/cart", To: "10.1.0.2:80"}, "10.1.0.2:80", "no allow policies"},
		{"IPv6", Question{From: "shop/cart", To: "[fd00::2]:80"}, "[fd00::2]:80", "explicitly denied by: shop/no-v6"},
		{"inbound, IPv4", Question{From: "shop/cart", To: "10.1.0.2:80", Inbound: true}, "10.1.0.2:80", "no allow policies"},
		{"inbound, IPv6", Question{From: "shop/cart", To: "[fd00::2]:80", Inbound: true}, "[fd00::2]:80", "explicitly denied by: shop/no-v6"},
		{"inbound, from an address", Question{From: "fd00::9", To: "shop/web:80", Inbound: true}, "[fd00::2]:80", "explicitly denied by: shop/no-v6"},
		{"an application tunnel", Question{From: "shop/cart", To: "10.1.0.3:80"}, "10.1.0.3:80", "explicitly denied by: shop/no-15088"},
		{"inbound, an application tunnel", Question{From: "shop/cart", To: "10.1.0.3:80", Inbound: true}, "10.1.0.3:80", "explicitly denied by: shop/no-15088"},
		{"inbound, past the tunnel", Question{From: "shop/cart", To: "10.1.0.3:80", Inbound: true, Plaintext: true}, "10.1.0.3:80", "no allow policies"},
		{"a port of the proxy", Question{From: "shop/cart", To: "10.1.0.2:15006"}, "10.1.0.2:15006", "attempted recursive call to ourselves"},
		{"inbound, a port of the proxy", Question{From: "shop/cart", To: "10.1.0.2:15006", Inbound: true}, "10.1.0.2:15006", "attempted recursive call to ourselves"},
		{"inbound, a port of the proxy, in plaintext", Question{From: "192.0.2.1", To: "10.1.0.2:15001", Inbound: true, Plaintext: true}, "10.1.0.2:15001", "attempted recursive call to ourselves"},
	} {
		r, err := m.Ask(tt.q)
		if err != nil || r.Allowed == nil {
			t.Errorf("%s: %v: %+v", tt.name, err, r)
			continue
		}
		if r.To != tt.to || r.Verdict != tt.want || *r.Allowed != (tt.want == "no allow policies") {
			t.Errorf("%s: to %s it is %q, allowed %v; want to %s and %q", tt.name, r.To, r.Verdict, *r.Allowed, tt.to, tt.want)
		}
	}
}
