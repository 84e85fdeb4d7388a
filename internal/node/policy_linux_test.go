package node

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"ztun.dev/ztun/internal/workload"
)

// setState gives a running node another state: that of the file with old replaced by new, which are taken in pairs.
func (b *bed) setState(n *Node, oldnew ...string) {
	b.t.Helper()
	text := b.read("mesh.yaml")
	for i := 0; i < len(oldnew); i += 2 {
		if !strings.Contains(text, oldnew[i]) {
			b.t.Fatalf("no %q in\n%s", oldnew[i], text)
		}
	}
	st, err := workload.ParseStatic("mesh.yaml", []byte(strings.NewReplacer(oldnew...).Replace(text)))
	if err != nil {
		b.t.Fatal(err)
	}
	n.store.Replace(st)
}

// A change of policy closes the open connections that it denies and no others, also while the node ends.
func TestNetnsChangeOfPolicy(t *testing.T) { eachBackend(t, checkChangeOfPolicy) }

func checkChangeOfPolicy(t *testing.T, b *bed) {
	b.start(0)
	z := b.start(1)
	var mesh, plain [][2]net.Conn
	for _, w := range b.ways(8080) {
		if w.to != b.pods[webB] {
			continue
		}
		client, server := b.connect(t, w)
		pair := [2]net.Conn{client, server}
		if w.name == "mesh" {
			mesh = append(mesh, pair)
		} else {
			plain = append(plain, pair)
		}
	}
	works := func(pair [2]net.Conn) error {
		for i, from := range pair {
			p := make([]byte, 8)
			if _, err := from.Write([]byte("x")); err != nil {
				return err
			}
			if _, err := pair[1-i].Read(p); err != nil {
				return err
			}
		}
		return nil
	}
	reset := func(t *testing.T, pairs [][2]net.Conn) {
		t.Helper()
		for _, pair := range pairs {
			for _, end := range pair {
				// What the kernel carries it ends at the pod's socket, whose application is told so.
				if _, err := end.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) && (!b.handsBack() || !errors.Is(err, syscall.ECONNABORTED)) {
					t.Errorf("%v reads %v, want a reset", end.LocalAddr(), err)
				}
			}
		}
	}
	for _, pair := range append(mesh, plain...) {
		if err := works(pair); err != nil {
			t.Fatal(err)
		}
	}
	const list, policies = "[shop/no-other, shop/no-9090]", "policies:\n"
	const strict = policies + "- {name: strict, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{notPrincipals: [!Presence ]}]]]}\n"
	const noClient = "- {name: no-client, namespace: shop, scope: Namespace, action: Deny, dryRun: false, rules: [[[{principals: [!Exact cluster.local/ns/shop/sa/client]}]]]}\n"

	b.setState(z.node, policies, strict) // known, and not listed yet
	for _, pair := range append(mesh, plain...) {
		if err := works(pair); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("FP-20 CP-91 a policy is listed", func(t *testing.T) {
		b.setState(z.node, policies, strict, list, "[shop/no-other, shop/no-9090, shop/strict]")
		reset(t, plain)
		for _, pair := range mesh {
			if err := works(pair); err != nil {
				t.Errorf("a connection that is not denied: %v", err)
			}
		}
		z.out.await(t, `error="connection closed due to policy change"`, z.done, "src.addr="+plain[0][0].LocalAddr().String(), `direction="inbound"`)
	})
	t.Run("DP-139 while the node ends", func(t *testing.T) {
		z.stop()
		z.log.await(t, "\tending\t", z.done)
		b.setState(z.node, policies, strict+noClient)
		reset(t, mesh)
		z.out.await(t, `error="connection closed due to policy change"`, z.done, `src.identity="spiffe://cluster.local/ns/shop/sa/client"`)
		b.stop(1)
		if strings.Contains(z.out.String(), "connection drain") {
			t.Errorf("the connections went on until the drain cut them:\n%s", z.out)
		}
	})
}
