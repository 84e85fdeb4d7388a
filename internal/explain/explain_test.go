package explain

import (
	"fmt"
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
	from, _ := m.Find("shop/cart")
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
		{"shop/none:80", four, "shop/none has no address"},
		{"own.other.svc.cluster.local:80", four, "the state has no service own.other.svc.cluster.local that is visible to namespace shop"},
		{"web:http", four, `"web:http": "http" is not a port`},
		{"web", four, `"web" has no port`},
	} {
		got, err := m.Target(tt.text, from, tt.like)
		text := got.String()
		if err != nil {
			text = err.Error()
		}
		if text != tt.want {
			t.Errorf("Target(%q) is %q, want %q", tt.text, text, tt.want)
		}
	}
}

const names = `
workloads:
- {uid: k//Pod/shop/cart, name: cart, namespace: shop, protocol: HBONE, workloadIps: [10.1.0.1, "fd00::1"], services: {}}
- {uid: k//Pod/other/cart, name: cart, namespace: other, protocol: HBONE, workloadIps: [10.1.0.2], services: {}}
- {uid: k//Pod/shop/db-0, name: db-0, namespace: shop, protocol: HBONE, workloadIps: [10.1.1.1, "fd00::1:1"], services: {shop/db.shop.svc.cluster.local: {5432: 5432}, shop/one.shop.svc.cluster.local: {80: 80}}}
- {uid: k//Pod/shop/db-1, name: db-1, namespace: shop, protocol: HBONE, workloadIps: [10.1.1.2], services: {shop/db.shop.svc.cluster.local: {5432: 5432}}}
services:
- {name: web, namespace: shop, hostname: web.shop.svc.cluster.local, vips: [/10.96.0.10, "/fd96::10"], ports: {80: 8080}}
- {name: web, namespace: other, hostname: web.other.svc.cluster.local, vips: [/10.96.0.11], ports: {80: 8080}}
- {name: db, namespace: shop, hostname: db.shop.svc.cluster.local, vips: [], ports: {5432: 5432}}
- {name: one, namespace: shop, hostname: one.shop.svc.cluster.local, vips: [], ports: {80: 80}}
- {name: none, namespace: shop, hostname: none.shop.svc.cluster.local, vips: [], ports: {80: 80}}
- {name: far, namespace: shop, hostname: far.shop.svc.cluster.local, vips: [net2/10.96.0.12], ports: {80: 80}}
- {name: wild, namespace: shop, hostname: "*.example.com", vips: [/240.240.0.1], ports: {443: 443}}
- {name: api, namespace: a, hostname: api.example.net, vips: [/240.240.0.2], ports: {443: 443}}
- {name: api, namespace: z, hostname: api.example.net, vips: [/240.240.0.3], ports: {443: 443}}
- {name: left, namespace: shop, hostname: left.example.org, vips: [], ports: {443: 443}}
`

// Names mean what the DNS of the source's pod says.
func TestTargetIsWhatDNSSays(t *testing.T) {
	st, err := workload.ParseStatic("state", []byte(names))
	if err != nil {
		t.Fatal(err)
	}
	m := Mesh{State: workload.NewSnapshot(st)}
	preferred, noIPv6, remote := m, m, m
	preferred.PreferredNamespace, noIPv6.NoIPv6, remote.ClusterDomain = "z", true, "Cluster.Remote."
	for _, tt := range []struct {
		m          Mesh
		text, from string
		like       string
		want       string
	}{
		{m, "web:80", "shop/cart", "10.1.0.1", "10.96.0.10:80"},
		{m, "web:80", "other/cart", "10.1.0.2", "10.96.0.11:80"},
		{m, "web.shop:80", "other/cart", "10.1.0.2", "10.96.0.10:80"},
		{m, "Web.Shop.svc:80", "other/cart", "10.1.0.2", "10.96.0.10:80"},
		{m, "web.shop.svc.cluster.local:80", "other/cart", "10.1.0.2", "10.96.0.10:80"},
		{m, "web.shop.svc.cluster.local.:80", "other/cart", "10.1.0.2", "10.96.0.10:80"},
		{m, "web:80", "shop/cart", "fd00::1", "[fd96::10]:80"},
		{noIPv6, "web:80", "shop/cart", "fd00::1", "10.96.0.10:80"},
		{m, "web.other:80", "shop/cart", "fd00::1", "10.96.0.11:80"},
		{m, "a.b.example.com:443", "shop/cart", "10.1.0.1", "240.240.0.1:443"},
		{m, "example.com:443", "shop/cart", "10.1.0.1", "the state has no service example.com that is visible to namespace shop"},
		{m, "api.example.net:443", "shop/cart", "10.1.0.1", "240.240.0.2:443"},
		{preferred, "api.example.net:443", "shop/cart", "10.1.0.1", "240.240.0.3:443"},
		{m, "one:80", "shop/cart", "10.1.0.1", "10.1.1.1:80"},
		{m, "one:80", "shop/cart", "fd00::1", "[fd00::1:1]:80"},
		{m, "db:5432", "shop/cart", "10.1.0.1", "db.shop.svc.cluster.local is headless: ask for one of 10.1.1.1, 10.1.1.2"},
		{m, "none:80", "shop/cart", "10.1.0.1", `none.shop.svc.cluster.local has no address in network ""`},
		{m, "far:80", "shop/cart", "10.1.0.1", `far.shop.svc.cluster.local has no address in network ""`},
		{m, "left.example.org:443", "shop/cart", "10.1.0.1", "left.example.org has no address in the state: DNS asks a resolver for it"},
		{remote, "web.shop:80", "shop/cart", "10.1.0.1", "the state has no service web.shop that is visible to namespace shop"},
		{remote, "web.shop.svc.cluster.local:80", "shop/cart", "10.1.0.1", "10.96.0.10:80"},
	} {
		t.Run("FP-133/"+tt.text+" for "+tt.from+", "+tt.like, func(t *testing.T) {
			from, err := tt.m.Find(tt.from)
			if err != nil {
				t.Fatal(err)
			}
			got, err := tt.m.Target(tt.text, from, netip.MustParseAddr(tt.like))
			text := got.String()
			if err != nil {
				text = err.Error()
			}
			if text != tt.want {
				t.Errorf("%q, want %q", text, tt.want)
			}
		})
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

const outside = `
workloads:
- {uid: k//Pod/shop/cart, name: cart, namespace: shop, serviceAccount: cart, protocol: HBONE, workloadIps: [10.1.0.1], services: {}}
- {uid: k//Pod/shop/legacy, name: legacy, namespace: shop, serviceAccount: legacy, protocol: TCP, workloadIps: [10.1.0.9], services: {shop/mixed.shop.svc.cluster.local: {80: 80}}}
- {uid: k//Pod/shop/web, name: web, namespace: shop, serviceAccount: web, protocol: HBONE, workloadIps: [10.1.0.2], authorizationPolicies: [shop/legacy], services: {shop/web.shop.svc.cluster.local: {80: 8080}, shop/mixed.shop.svc.cluster.local: {80: 8080}}}
- {uid: k//Pod/shop/open, name: open, namespace: shop, serviceAccount: open, protocol: HBONE, workloadIps: [10.1.0.3], services: {}}
services:
- {name: web, namespace: shop, hostname: web.shop.svc.cluster.local, vips: [/10.96.0.10], ports: {80: 8080}, waypoint: {destination: /10.1.0.3, hboneMtlsPort: 15008}}
- {name: mixed, namespace: shop, hostname: mixed.shop.svc.cluster.local, vips: [/10.96.0.11], ports: {80: 8080}}
policies:
- {name: legacy, namespace: shop, scope: WorkloadSelector, action: Allow, dryRun: false, rules: [[[{principals: [!Exact cluster.local/ns/shop/sa/legacy]}]]]}
`

func outsideMesh(t *testing.T) Mesh {
	t.Helper()
	st, err := workload.ParseStatic("state", []byte(outside))
	if err != nil {
		t.Fatal(err)
	}
	return Mesh{State: workload.NewSnapshot(st)}
}

// A workload outside the mesh has no ztun in front of it: what it sends goes in plaintext, past waypoints, and what it gets nobody asks
// policy about.
func TestOutsideTheMesh(t *testing.T) {
	m := outsideMesh(t)
	const (
		denied   = "denied: allow policies exist, but none allowed"
		enforced = "the destination is not in the mesh: nobody enforces policy"
	)
	for _, tt := range []struct {
		name    string
		q       Question
		route   string
		outcome string // of policy; "": nothing is said
	}{
		{"from it to a workload", Question{From: "shop/legacy", To: "10.1.0.2:8080"}, "not captured", denied},
		{"from it to a workload without policies", Question{From: "shop/legacy", To: "10.1.0.3:80"}, "not captured", "allowed: no allow policies"},
		{"from it to a port of the proxy", Question{From: "shop/legacy", To: "10.1.0.3:15006"}, "not captured", "denied: attempted recursive call to ourselves"},
		{"from it to a service with a waypoint", Question{From: "shop/legacy", To: "10.96.0.10:80"}, "not captured", denied},
		{"from it to a service with different endpoints", Question{From: "shop/legacy", To: "10.96.0.11:80"}, "not captured", "not the same at each endpoint: --inbound says it of one"},
		{"from it to a port that the service does not have", Question{From: "shop/legacy", To: "10.96.0.10:81"}, "not captured", ""},
		{"from it to a stranger", Question{From: "shop/legacy", To: "192.0.2.1:80"}, "not captured", ""},
		{"from it to a resolver", Question{From: "shop/legacy", To: "192.0.2.1:53", UDP: true}, "not captured", ""},
		{"from it to itself", Question{From: "shop/legacy", To: "10.1.0.9:15001"}, "not captured", ""},
		{"from it, inbound", Question{From: "shop/legacy", To: "10.1.0.2:8080", Inbound: true}, "plaintext", denied},
		{"to it", Question{From: "shop/cart", To: "10.1.0.9:80"}, "passthrough", ""},
		{"to it, inbound", Question{From: "shop/cart", To: "10.1.0.9:80", Inbound: true}, "plaintext", enforced},
		{"to it from an address, inbound", Question{From: "192.0.2.1", To: "10.1.0.9:15008", Inbound: true, Plaintext: true}, "plaintext", enforced},
		{"within the mesh", Question{From: "shop/cart", To: "10.1.0.2:8080", Inbound: true}, "HBONE", denied},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := m.Ask(tt.q)
			if err != nil {
				t.Fatal(err)
			}
			got := r.Verdict
			if r.Allowed != nil {
				got = map[bool]string{true: "allowed: ", false: "denied: "}[*r.Allowed] + got
			}
			if r.Route != tt.route || got != tt.outcome || (r.Route == "not captured") != (r.Reason != "" && !r.Inbound) {
				t.Errorf("route %q, %q; want %q, %q:\n%s", r.Route, got, tt.route, tt.outcome, r.Text())
			}
		})
	}
}

// A pod that this node serves is captured, also before the state says that it is in the mesh. Others do not send HBONE to it.
func TestServedBeforeTheStateSaysSo(t *testing.T) {
	m := outsideMesh(t)
	m.Served = func(w *workload.Workload) bool { return w.Name == "legacy" }
	m.State.Workload("k//Pod/shop/legacy").AuthorizationPolicies = []string{"shop/legacy"}
	const denied = "denied: allow policies exist, but none allowed"
	for _, tt := range []struct {
		name string
		q    Question
		want []string // at the beginning of a line
	}{
		{"what it sends", Question{From: "shop/legacy", To: "10.1.0.2:8080"}, []string{"transport   HBONE, ", "verdict     allowed: explicitly allowed by: shop/legacy"}},
		{"what it gets", Question{From: "shop/cart", To: "10.1.0.9:80"}, []string{"transport   passthrough to ", "verdict     " + denied}},
		{"what it gets, inbound", Question{From: "shop/cart", To: "10.1.0.9:80", Inbound: true}, []string{"transport   plaintext: the destination does not speak HBONE", "verdict     " + denied}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := m.Ask(tt.q)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range tt.want {
				if !strings.Contains(r.Text(), "\n"+want) {
					t.Errorf("no line %q in\n%s", want, r.Text())
				}
			}
		})
	}
}

// Who can talk to a workload: identities of the mesh, and whoever has none.
func TestInboundMatrixOutsideTheMesh(t *testing.T) {
	m := outsideMesh(t)
	for name, want := range map[string][]string{
		"shop/web": {
			"spiffe://cluster.local/ns/shop/sa/cart 8080 false", "spiffe://cluster.local/ns/shop/sa/open 8080 false",
			"spiffe://cluster.local/ns/shop/sa/web 8080 false", " 8080 false",
		},
		"shop/legacy": {
			"spiffe://cluster.local/ns/shop/sa/cart 80 true", "spiffe://cluster.local/ns/shop/sa/open 80 true",
			"spiffe://cluster.local/ns/shop/sa/web 80 true", " 80 true",
		},
	} {
		to, err := m.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, g := range m.InboundMatrix(to) {
			got = append(got, fmt.Sprint(g.From, " ", g.Port, " ", g.Allowed))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	from, err := m.Find("shop/legacy")
	if err != nil {
		t.Fatal(err)
	}
	want := []Cell{
		{"shop/legacy", "10.96.0.11:80", "mixed.shop.svc.cluster.local", "not captured"},
		{"shop/legacy", "10.96.0.10:80", "web.shop.svc.cluster.local", "denied: allow policies exist, but none allowed"},
	}
	if diff := cmp.Diff(want, m.Matrix([]*workload.Workload{from})); diff != "" {
		t.Errorf("flows from it (-want +got):\n%s", diff)
	}
}

// What comes from and goes to the address of kubelet's probes is exempt, whatever policy says.
func TestProbes(t *testing.T) {
	m := outsideMesh(t)
	const passes = "not captured: kubelet's probe address, which is exempt: no policy is asked"
	for _, tt := range []struct {
		name string
		q    Question
		want string
	}{
		{"FP-78/a probe", Question{From: "169.254.7.127", To: "shop/web:8080", Inbound: true, Plaintext: true}, passes},
		{"FP-78/a probe, IPv6", Question{From: "fd16:9254:7127:1337:ffff:ffff:ffff:ffff", To: "shop/web:8080", Inbound: true}, passes},
		{"FP-78/to its address", Question{From: "shop/cart", To: "169.254.7.127:80"}, passes},
		{"FP-78/a question to its address", Question{From: "shop/cart", To: "169.254.7.127:53", UDP: true}, passes},
		{"FP-78/another address of the node", Question{From: "169.254.7.128", To: "shop/web:8080", Inbound: true, Plaintext: true}, "denied: allow policies exist, but none allowed"},
		{"FP-78/to a workload outside the mesh", Question{From: "169.254.7.127", To: "shop/legacy:80", Inbound: true}, "the destination is not in the mesh: nobody enforces policy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := m.Ask(tt.q)
			if err != nil || !strings.HasSuffix(r.Text(), tt.want+"\n") {
				t.Errorf("want %q, got %v\n%s", tt.want, err, r.Text())
			}
		})
	}
}

// Addresses that no flow to ztun has: what stays in the pod, and what no connection can have.
func TestAddressesThatNeverCome(t *testing.T) {
	m := mesh(t)
	const (
		stays     = "transport   not captured: what a pod sends to itself stays in its kernel"
		multicast = "refused     no TCP connection has a multicast or broadcast address"
		linkLocal = "refused     TCP to and from link-local IPv6 addresses is refused: a flow does not say of which interface they are"
		own       = "refused     attempted recursive call to ourselves"
	)
	for _, tt := range []struct {
		name, to, want string
	}{
		{"FP-78/its own address", "10.1.0.1:80", stays},
		{"FP-78/its own address, IPv6", "[fd00::1]:80", stays},
		{"FP-78/loopback", "127.0.0.9:80", stays},
		{"FP-78/loopback, IPv6", "[::1]:80", stays},
		{"FP-78/a resolver at a loopback address", "127.0.0.53:53", stays},
		{"FP-78/no address", "0.0.0.0:80", stays},
		{"FP-78/no address, IPv6", "[::]:80", stays},
		{"FP-78/a port of the proxy", "0.0.0.0:15001", own},
		{"FP-75/multicast", "224.0.0.1:80", multicast},
		{"FP-75/multicast, IPv6", "[ff02::1%eth0]:80", multicast},
		{"FP-75/broadcast", "255.255.255.255:80", multicast},
		{"FP-75/link-local", "[fe80::1]:80", linkLocal},
		{"FP-75/link-local of an interface", "[fe80::1%eth0]:80", linkLocal},
		{"FP-75/link-local, IPv4", "169.254.169.254:80", "transport   passthrough to 169.254.169.254:80, as it is"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := m.Ask(Question{From: "shop/cart", To: tt.to})
			if err != nil || !strings.Contains(r.Text(), tt.want+"\n") {
				t.Errorf("want %q, got %v\n%s", tt.want, err, r.Text())
			}
		})
	}
	for _, tt := range []struct{ name, from, want string }{
		{"FP-78/inbound, from itself", "shop/cart", stays},
		{"FP-78/inbound, from its other address", "fd00::1", stays},
		{"FP-78/inbound, from loopback", "127.0.0.1", stays},
		{"FP-78/inbound, from another", "shop/gw", "verdict     allowed: no allow policies"},
		{"FP-75/inbound, from a link-local address", "fe80::9", "verdict     denied: TCP to and from link-local IPv6 addresses is refused: a flow does not say of which interface they are"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := m.Ask(Question{From: tt.from, To: "10.1.0.1:80", Inbound: true})
			if err != nil || !strings.Contains(r.Text(), tt.want+"\n") {
				t.Errorf("want %q, got %v\n%s", tt.want, err, r.Text())
			}
		})
	}
}
