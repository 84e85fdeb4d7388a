package node

import (
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The state file is read again when its reader is asked to: open connections that it denies are closed. A file that is not valid
// changes nothing, and one line says why.
func TestNetnsStateIsReadAgain(t *testing.T) {
	b := newBed(t)
	reload := make(chan os.Signal, 1)
	b.options.Reload = reload
	z := b.start(1)
	b.options.Reload = nil
	b.start(0)
	w := b.ways(8080)[0]
	client, _ := b.connect(t, w)

	text := b.read("mesh.yaml")
	again := func(text, want string) {
		t.Helper()
		if err := os.WriteFile(z.node.cfg.LocalXDSPath, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		reload <- syscall.SIGHUP
		z.log.await(t, want, z.done)
	}
	before := z.node.store.Snapshot()
	again(strings.Replace(text, "policies:", "polices:", 1), "the state stays as it was")
	if z.node.store.Snapshot() != before {
		t.Error("a state that is not valid was taken")
	}
	again(text+"- {name: no-client, namespace: shop, scope: Namespace, action: Deny, dryRun: false, rules: [[[{principals: [!Exact cluster.local/ns/shop/sa/client]}]]]}\n", "the state was read again")
	client.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := client.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("a connection that the new state denies: %v, want it closed", err)
	}
	metrics := z.get(t, http.MethodGet, "metrics", "/metrics")
	for _, result := range []string{"taken", "refused"} {
		if line := `ztun_state_reloads_total{result="` + result + `"} 1`; !strings.Contains(metrics, line) {
			t.Errorf("no %s in\n%s", line, metrics)
		}
	}
}
