package node

import (
	"testing"

	"ztun.dev/ztun/internal/explain"
	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/workload"
)

// admitState has destinations whose policy looks at what a CONNECT becomes on their node.
const admitState = `
workloads:
- {uid: k//Pod/shop/client, name: client, namespace: shop, serviceAccount: client, protocol: HBONE, workloadIps: [10.244.1.10, "fd00:1::9"], services: {}}
- uid: k//Pod/shop/tunnel
  name: tunnel
  namespace: shop
  serviceAccount: tunnel
  protocol: HBONE
  workloadIps: [10.244.2.20]
  applicationTunnel: {protocol: NONE, port: 9999}
  authorizationPolicies: [shop/only-9999]
  services: {}
- uid: k//Pod/shop/six
  name: six
  namespace: shop
  serviceAccount: six
  protocol: HBONE
  workloadIps: ["fd00:2::21"]
  authorizationPolicies: [shop/only-the-client]
  services: {shop/six.shop.svc.cluster.local: {80: 8080}}
services:
- {name: six, namespace: shop, hostname: six.shop.svc.cluster.local, vips: [/10.96.0.21], ports: {80: 8080}}
policies:
- {name: only-9999, namespace: shop, scope: WorkloadSelector, action: Allow, dryRun: false, rules: [[[{destinationPorts: [9999]}]]]}
- {name: only-the-client, namespace: shop, scope: WorkloadSelector, action: Allow, dryRun: false, rules: [[[{sourceIps: ["fd00:1::9/128"]}]]]}
`

// The node of the destination decides by what reaches it: the port of the application behind its tunnel, and the address that the
// tunnel comes from. A replay says what explain says.
func TestReplayAsksPolicyAsTheDestinationDoes(t *testing.T) {
	st, err := workload.ParseStatic("state", []byte(admitState))
	if err != nil {
		t.Fatal(err)
	}
	m := explain.Mesh{State: workload.NewSnapshot(st)}
	const client = "10.244.1.10:1001"
	for _, tt := range []struct {
		name, to string
		class    string
		allowed  bool
		verdict  string // of policy; "": it is not asked
		why      string // of the refusal
	}{
		{"T1/an application tunnel", "10.244.2.20:8080", "mesh", true, "explicitly allowed by: shop/only-9999", ""},
		{
			"T1/a port of the proxy", "10.244.2.20:15006", "mesh", false, "",
			"hbone: response 10.244.2.20:15008: http status: 503 Service Unavailable: attempted recursive call to ourselves",
		},
		{"T1/a tunnel of the other family", "10.96.0.21:80", "mesh", true, "explicitly allowed by: shop/only-the-client", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := replayFlows(t, st, synCapture(t, [][2]string{{client, tt.to}}), func(c *ReplayConfig) { c.Peer = replay.PeerAccept })[client]
			verdict := ""
			if f.Policy != nil {
				verdict = f.Policy.Verdict
			}
			if f.Class != tt.class || verdict != tt.verdict || f.Error != tt.why || (f.Answer == "accepted") != tt.allowed {
				t.Errorf("want %s, %q, %q, accepted: %v; got\n%s", tt.class, tt.verdict, tt.why, tt.allowed, f.Text())
			}
			r, err := m.Ask(explain.Question{From: "shop/client", To: tt.to})
			if err != nil || r.Allowed == nil || *r.Allowed != tt.allowed {
				t.Errorf("explain says %v\n%s", err, r.Text())
			}
		})
	}
}
