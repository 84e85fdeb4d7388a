package workload

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const everyKey = `
workloads:
- uid: cluster1//Pod/web/fe-1
  name: fe-1
  namespace: web
  workloadIps: ["10.0.0.1", "fd00::1", "::ffff:10.0.0.2"]
  serviceAccount: fe
  trustDomain: td
  network: net1
  node: node-a
  clusterId: c2
  protocol: HBONE
  networkMode: HostNetwork
  status: Unhealthy
  capacity: 0
  hostname: FE.example
  nativeTunnel: true
  applicationTunnel: {protocol: PROXY, port: 15088}
  locality: {region: r1, zone: z1, subzone: ""}
  waypoint: {destination: "web/waypoint.web.svc.cluster.local", hboneMtlsPort: 15008}
  networkGateway: {destination: "net2/192.0.2.10", hboneMtlsPort: 15009}
  authorizationPolicies: ["web/only-fe"]
  workloadName: fe
  workloadType: job
  canonicalName: fe
  canonicalRevision: v1
  services:
    "web/fe.web.svc.cluster.local": {80: 8080}
services:
- name: fe
  namespace: web
  hostname: FE.web.svc.cluster.local
  vips: ["/10.96.0.10", "net2/10.97.0.10"]
  cidrVips: [{network: "", cidr: "10.98.0.7/24"}]
  ports: {80: 8080}
  subjectAltNames: ["spiffe://cluster.local/ns/web/sa/fe"]
  waypoint: {destination: "/10.96.0.20", hboneMtlsPort: 15008}
  weightedWaypoints:
  - {destination: {destination: "web/wp1.web.svc.cluster.local", hboneMtlsPort: 15008}, weight: 90}
  loadBalancer: {routingPreferences: [Network, Region, Zone], mode: Failover, healthPolicy: AllowAll}
  ipFamilies: Dual
  canonical: true
  visibility: Namespace
policies:
- name: only-fe
  namespace: web
  scope: WorkloadSelector
  action: Deny
  dryRun: true
  rules:
  - - - principals: [!Exact td/ns/web/sa/fe, {Prefix: td/}, !Suffix /fe, !Presence []]
        notServiceAccounts: [{namespace: web, serviceAccount: fe}]
        destinationPorts: [8080]
    - - notSourceIps: ["10.9.1.1/16", "::ffff:10.8.0.0/112"]
`

func TestParseStaticReadsEveryKey(t *testing.T) {
	st, err := ParseStatic("mesh.yaml", []byte(everyKey))
	if err != nil {
		t.Fatal(err)
	}
	fe := ServiceKey{"web", "fe.web.svc.cluster.local"}
	addr := netip.MustParseAddr
	want := State{
		Workloads: []*Workload{{
			UID: "cluster1//Pod/web/fe-1", Name: "fe-1", Namespace: "web", ServiceAccount: "fe", TrustDomain: "td", Network: "net1",
			Node: "node-a", ClusterID: "c2", Addresses: []netip.Addr{addr("10.0.0.1"), addr("fd00::1"), addr("10.0.0.2")},
			Hostname: "fe.example", Protocol: ProtocolHBONE, NetworkMode: NetworkHost, Status: Unhealthy, Capacity: 0, NativeTunnel: true,
			AppTunnel: &AppTunnel{PROXY: true, Port: 15088}, Locality: Locality{Region: "r1", Zone: "z1"},
			Waypoint:              &GatewayAddress{Hostname: ServiceKey{"web", "waypoint.web.svc.cluster.local"}, Port: 15008},
			NetworkGateway:        &GatewayAddress{Address: NetworkAddr{"net2", addr("192.0.2.10")}, Port: 15009},
			AuthorizationPolicies: []string{"web/only-fe"}, WorkloadName: "fe", WorkloadType: TypeJob, CanonicalName: "fe", CanonicalRevision: "v1",
			Services: map[ServiceKey]PortMap{fe: {80: 8080}},
		}},
		Services: []*Service{{
			Name: "fe", Namespace: "web", Hostname: "fe.web.svc.cluster.local",
			VIPs:     []NetworkAddr{{"", addr("10.96.0.10")}, {"net2", addr("10.97.0.10")}},
			CIDRVIPs: []NetworkPrefix{{"", netip.MustParsePrefix("10.98.0.0/24")}}, Ports: PortMap{80: 8080},
			SubjectAltNames:   []Identity{{"cluster.local", "web", "fe"}},
			Waypoint:          &GatewayAddress{Address: NetworkAddr{"", addr("10.96.0.20")}, Port: 15008},
			WeightedWaypoints: []WeightedWaypoint{{GatewayAddress{Hostname: ServiceKey{"web", "wp1.web.svc.cluster.local"}, Port: 15008}, 90}},
			LoadBalancer:      LoadBalancer{[]Scope{ScopeNetwork, ScopeRegion, ScopeZone}, LBFailover, AllowAll},
			IPFamilies:        FamiliesDual, Canonical: true, Visibility: VisibleNamespace,
		}},
		Policies: []*Policy{{
			Name: "only-fe", Namespace: "web", Scope: ScopePolicyWorkload, Action: Deny, DryRun: true,
			Groups: []Group{{
				{{
					Principals:         []StringMatch{{MatchExact, "td/ns/web/sa/fe"}, {MatchPrefix, "td/"}, {MatchSuffix, "/fe"}, {MatchPresence, ""}},
					NotServiceAccounts: []ServiceAccount{{"web", "fe"}}, DestinationPorts: []uint16{8080},
				}},
				{{NotSourceIPs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("10.8.0.0/16")}}},
			}},
		}},
	}
	if diff := cmp.Diff(want, st, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}
}

func TestParseStaticNamesEveryMistakeWithItsLine(t *testing.T) {
	tests := []struct{ name, in, want string }{
		{"CP-68 workload without services", "workloads:\n- {namespace: a, workloadIps: []}", "mesh.yaml:2: workloads[0].services: is missing"},
		{"CP-68 policy without dryRun", "policies:\n- {name: a, namespace: b, scope: Global, action: Allow, rules: []}", "mesh.yaml:2: policies[0].dryRun: is missing"},
		{
			"CP-70 typo in a match", "policies:\n- name: a\n  namespace: b\n  scope: Global\n  action: Deny\n  dryRun: false\n  rules:\n  - - - notDestinationPort: [80]",
			"mesh.yaml:8: policies[0].rules[0][0][0].notDestinationPort: unknown key; did you mean notDestinationPorts?",
		},
		{"unknown top-level key", "workload: []", "mesh.yaml:1: workload: unknown key; did you mean workloads?"},
		{"not YAML", "a: [", "mesh.yaml:1: did not find expected node content"},
		{"empty", "", "mesh.yaml:1: the file is empty"},
		{"a packet capture", "\xd4\xc3\xb2\xa1\x02\x00", "mesh.yaml:1: this is no text in UTF-8; want a YAML file"},
		{"Latin-1", "workloads:\n- {name: caf\xe9}\n", "mesh.yaml:2: this is no text in UTF-8; want a YAML file"},
		{"two documents", "{}\n---\n{}", "more than one YAML document"},
		{"a list at the top", "[]", "want a mapping, have a list"},
		{"bad address", "workloads:\n- {namespace: a, services: {}, workloadIps: [10.0.0.300]}", "mesh.yaml:2: workloads[0].workloadIps[0]: want an IP address, have \"10.0.0.300\""},
		{"port too large", "services:\n- {name: a, namespace: b, hostname: c, vips: [], ports: {80: 65616}}", "services[0].ports.80: want a port from 0 to 65535, have \"65616\""},
		{"enum", "workloads:\n- {namespace: a, services: {}, workloadIps: [], protocol: HBON}", "protocol: want one of TCP, HBONE, have \"HBON\""},
		{"VIP without network", "services:\n- {name: a, namespace: b, hostname: c, vips: [10.0.0.1], ports: {}}", "vips[0]: want an address as <network>/<ip>"},
		{"unknown service", "workloads:\n- {namespace: a, workloadIps: [], services: {a/b: {}}}", "there is no service a/b in this file"},
		{"unknown policy", "workloads:\n- {namespace: a, workloadIps: [], services: {}, authorizationPolicies: [a/p]}", "there is no policy a/p in this file"},
		{"key twice", "workloads: []\nworkloads: []", "workloads: is given twice"},
		{"same uid", "workloads:\n- {uid: u, namespace: a, workloadIps: [], services: {}}\n- {uid: u, namespace: a, workloadIps: [], services: {}}", "mesh.yaml:3: workloads[1]: workload u is defined twice"},
		{"string match without kind", "policies:\n- {name: a, namespace: b, scope: Global, action: Deny, dryRun: false, rules: [[[{principals: [x]}]]]}", "want !Exact, !Prefix, !Suffix or !Presence"},
		{"empty match", "policies:\n- {name: a, namespace: b, scope: Global, action: Deny, dryRun: false, rules: [[[{}]]]}", "a match without a condition never matches"},
		{"SAN", "services:\n- {name: a, namespace: b, hostname: c, vips: [], ports: {}, subjectAltNames: [x]}", "subjectAltNames[0]: want spiffe://"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ParseStatic("mesh.yaml", []byte(tt.in))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("ParseStatic(%q) = %v\nwant an error with %q", tt.in, err, tt.want)
			}
		})
	}
}

func FuzzParseStatic(f *testing.F) {
	f.Add([]byte(everyKey))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		st, err := ParseStatic("f", data)
		if err == nil {
			NewSnapshot(st)
		}
	})
}
