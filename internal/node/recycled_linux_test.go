package node

import (
	"bufio"
	"context"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/lab"
)

// tunnelPorts are the ports of the peers that the namespace of the thread has tunnels with.
func tunnelPorts() (ports []uint16, err error) {
	f, err := os.Open("/proc/thread-self/net/tcp6")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text()) // number, local address:port, remote, state (01 is ESTABLISHED)
		if len(fields) < 4 || fields[3] != "01" || !strings.HasSuffix(fields[1], ":3AA0") {
			continue
		}
		_, hex, _ := strings.Cut(fields[2], ":")
		port, err := strconv.ParseUint(hex, 16, 16)
		if err != nil {
			return nil, err
		}
		ports = append(ports, uint16(port))
	}
	return ports, lines.Err()
}

// forgetTunnels makes a host drop, both ways, what belongs to the tunnels that it has now, as if it had gone and another had come.
func forgetTunnels(h *lab.Host) error {
	return h.Do(func() error {
		ports, err := tunnelPorts()
		if err != nil {
			return err
		}
		c, err := nftables.New()
		if err != nil {
			return err
		}
		const source, destination = 0, 2
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "gone"})
		for _, dir := range []struct {
			name   string
			hook   *nftables.ChainHook
			theirs uint32
		}{
			{"input", nftables.ChainHookInput, source},
			{"output", nftables.ChainHookOutput, destination},
		} {
			chain := c.AddChain(&nftables.Chain{Name: dir.name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: dir.hook, Priority: nftables.ChainPriorityFilter})
			for _, port := range ports {
				c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: slices.Concat(
					protocol(unix.IPPROTO_TCP), transportPort(destination-dir.theirs, hbonePort, expr.CmpOpEq), transportPort(dir.theirs, port, expr.CmpOpEq),
					[]expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}},
				)})
			}
		}
		return c.Flush()
	})
}

// A pod that has gone, and whose address another pod has, costs the next connection a moment at most.
func TestNetnsRecycledAddress(t *testing.T) {
	t.Run("FP-07 the state says so", func(t *testing.T) { checkRecycledAddress(t, newBed(t), "heir") })
	t.Run("FP-07 the state does not say so", func(t *testing.T) { checkRecycledAddress(t, newBed(t), "web") })
}

func checkRecycledAddress(t *testing.T, b *bed, heir string) {
	a := b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, who)
	targets := []string{"10.96.0.10:80", "[fd96::10]:80"}
	ask := func(to string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
		defer cancel()
		c, err := b.pods[clientA].Dial(ctx, "tcp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		_, err = io.ReadAll(c)
		return err
	}
	for _, to := range targets {
		if err := ask(to); err != nil {
			t.Fatal(err)
		}
	}
	pool := a.node.pods[0].current().pool
	if st := pool.Stats(); st.Tunnels != len(targets) {
		t.Fatalf("%+v, want a tunnel of each family", st)
	}
	if err := forgetTunnels(b.pods[webB]); err != nil {
		t.Fatal(err)
	}
	b.stop(1)
	const workload = "uid: c//Pod/shop/web\n  name: web\n  namespace: shop\n  serviceAccount: web\n"
	b.write("mesh.yaml", strings.Replace(b.read("mesh.yaml"), workload, strings.ReplaceAll(workload, "web\n", heir+"\n"), 1))
	b.write("node-b.yaml", strings.Replace(b.read("node-b.yaml"), "name: web, namespace: shop, serviceAccount: web", "name: "+heir+", namespace: shop, serviceAccount: "+heir, 1))
	b.launch(1)
	if heir != "web" {
		b.setState(a.node)
		eventually(t, 5*time.Second, "the end of the tunnels to the pod that has gone", func() bool { return pool.Stats().Keys == 0 })
	}
	var all sync.WaitGroup
	for _, to := range targets {
		all.Go(func() {
			if err := ask(to); err != nil {
				t.Errorf("%s: %v", to, err)
			}
		})
	}
	all.Wait()
	if heir != "web" {
		a.out.await(t, `dst.identity="spiffe://cluster.local/ns/shop/sa/`+heir+`"`, a.done, `direction="outbound"`)
	}
	awaitNoneOpen(t, a)
}
