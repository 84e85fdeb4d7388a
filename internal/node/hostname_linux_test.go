package node

import (
	"strings"
	"testing"
)

// An endpoint that has only a hostname is resolved by the process's own resolver, from its own namespace, and reached from the pod's.
func TestNetnsHostnameOfAnEndpoint(t *testing.T) { eachBackend(t, checkHostname) }

func checkHostname(t *testing.T, b *bed) {
	wire := b.Wire().Host
	b.serveDNS(wire, "db.example.", b.Wire().Addr4, b.Wire().Addr6)
	b.serve(wire, 5432, who)
	state := b.read("mesh.yaml")
	state = strings.Replace(state, "services:\n- {name: web,", `- {uid: e/shop/db, name: db, namespace: shop, protocol: TCP, workloadIps: [], hostname: db.example, services: {shop/db.shop.svc.cluster.local: {5432: 5432}}}
- {uid: e/shop/nowhere, name: nowhere, namespace: shop, protocol: TCP, workloadIps: [], hostname: nowhere.example, services: {shop/nowhere.shop.svc.cluster.local: {5432: 5432}}}
services:
- {name: db, namespace: shop, hostname: db.shop.svc.cluster.local, vips: [/10.96.0.15, "/fd96::15"], ports: {5432: 5432}}
- {name: nowhere, namespace: shop, hostname: nowhere.shop.svc.cluster.local, vips: [/10.96.0.16], ports: {5432: 5432}}
- {name: web,`, 1)
	b.write("mesh.yaml", state)
	c := b.spawnReady(0)
	client := b.pods[clientA]
	for to, want := range map[string]string{"10.96.0.15:5432": client.Addr4.String() + ":", "[fd96::15]:5432": "[" + client.Addr6.String() + "]:"} {
		for range 2 {
			got, err := b.ask(client, to)
			if err != nil || !strings.HasPrefix(strings.ReplaceAll(got, "::ffff:", ""), want) && !strings.HasPrefix(got, "[::ffff:"+strings.TrimSuffix(want, ":")+"]:") {
				t.Errorf("FP-116 %s: answered as %q, %v; want one of %s", to, got, err, want)
			}
		}
	}
	if err := b.refusal(client, "10.96.0.16:5432"); err == nil {
		t.Error("an endpoint whose name nobody knows is connected")
	}
	c.out.await(t, "\tconnection failed\t", c.cmd.Done(), `error="no ip addresses were resolved for workload: e/shop/nowhere"`)
	c.out.await(t, "\tconnection complete\t", c.cmd.Done(), `dst.addr=`+b.Wire().Addr4.String()+`:5432 dst.service="db.shop.svc.cluster.local" dst.workload="db"`)
	c.stop(t)
}
