package node

import (
	"net/netip"
	"testing"

	"ztun.dev/ztun/internal/explain"
	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/proxy"
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

// Replay and explain answer by the same code: each flow of a pod gets the same from both.
func TestReplaySaysWhatExplainSays(t *testing.T) {
	admitted, err := workload.ParseStatic("state", []byte(admitState))
	if err != nil {
		t.Fatal(err)
	}
	for name, st := range map[string]workload.State{"sample": replayState(t), "admitted": admitted} {
		m := explain.Mesh{State: workload.NewSnapshot(st)}
		hosts := []string{"192.0.2.1", "2001:db8::1", "127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "ff02::1", "fe80::1", "169.254.7.127", "169.254.169.254"}
		for _, w := range st.Workloads {
			for _, a := range w.Addresses {
				hosts = append(hosts, a.String())
			}
		}
		for _, v := range st.Services {
			for _, vip := range v.VIPs {
				hosts = append(hosts, vip.Addr.String())
			}
		}
		var flows [][2]string
		want := make(map[string]string)
		for _, w := range st.Workloads {
			for _, src := range w.Addresses {
				for _, host := range hosts {
					dst := netip.MustParseAddr(host)
					for _, port := range []uint16{80, 8080, 15006} {
						if w.Protocol != workload.ProtocolHBONE || dst.Is4() != src.Is4() {
							continue
						}
						if port == 15006 && proxy.StaysInPod(w.Addresses, dst) {
							continue // whether ztun listens there, and refuses it, depends on how the node captures
						}
						to := netip.AddrPortFrom(dst, port)
						from := netip.AddrPortFrom(src, uint16(20000+len(flows))).String()
						flows = append(flows, [2]string{from, to.String()})
						r := m.Outbound(w, to)
						want[from] = explained(&r)
					}
				}
			}
		}
		got := replayFlows(t, st, synCapture(t, flows), func(c *ReplayConfig) { c.Peer = replay.PeerAccept })
		for _, f := range flows {
			if said := replayed(got[f[0]]); said != want[f[0]] {
				t.Errorf("%s: %s to %s: replay says %q, explain %q", name, f[0], f[1], said, want[f[0]])
			}
		}
		if len(flows) < 50 {
			t.Errorf("%s: %d flows", name, len(flows))
		}
	}
}

func explained(r *explain.Report) string {
	switch {
	case r.Route == "not captured":
		return r.Route
	case r.Error != "":
		return "refused"
	case r.Allowed != nil && !*r.Allowed:
		return "denied"
	}
	return r.Route + " " + r.NextHop + " " + r.Authority
}

func replayed(f *ReplayFlow) string {
	switch {
	case f == nil:
		return "not captured"
	case f.Policy != nil && !f.Policy.Allowed, f.Class == "mesh" && f.Answer == "reset":
		return "denied"
	case f.Class == "dropped":
		return "refused"
	}
	o := f.Opened[len(f.Opened)-1]
	return map[string]string{"dial": "passthrough", "connect": "HBONE"}[o.Kind] + " " + o.NextHop + " " + o.Authority
}
