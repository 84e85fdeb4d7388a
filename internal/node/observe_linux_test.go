package node

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// get reads a page of a node's admin server.
func (p *process) get(t *testing.T, method, site, path string) string {
	t.Helper()
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+p.node.admin.Addrs(site)[0].String()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("%s %s: status %d, %v:\n%s", method, path, resp.StatusCode, err, body)
	}
	return string(body)
}

func TestNetnsWhatTheAdminPortsShow(t *testing.T) {
	b := newBed(t)
	a := b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, who)
	if _, err := b.ask(b.pods[clientA], "10.96.0.10:80"); err != nil {
		t.Fatal(err)
	}
	awaitNoneOpen(t, a)
	if got := a.get(t, http.MethodGet, "readiness", "/healthz/ready"); !strings.HasPrefix(got, "ready") {
		t.Errorf("readiness: %q", got)
	}
	metrics := a.get(t, http.MethodGet, "metrics", "/metrics")
	for _, want := range []string{
		`istio_tcp_connections_opened_total{`, `destination_service="web.shop.svc.cluster.local"`, `source_principal="spiffe://cluster.local/ns/shop/sa/client"`,
		`ztun_pods{capture="` + b.capture.String() + `",state="serving"} 2`, `ztun_tunnels{direction="outbound"} 1`, `ztun_flows_in_flight 0`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	var dump struct {
		Workloads    []struct{ Name string }
		Certificates []struct{ Identity, State string }
	}
	text := a.get(t, http.MethodGet, "admin", "/config_dump")
	if err := json.Unmarshal([]byte(text), &dump); err != nil {
		t.Fatal(err)
	}
	if len(dump.Workloads) != 4 && len(dump.Workloads) != 3 {
		t.Errorf("%d workloads in the dump", len(dump.Workloads))
	}
	if len(dump.Certificates) == 0 || dump.Certificates[0].State != "Available" {
		t.Errorf("certificates in the dump: %+v", dump.Certificates)
	}
	if strings.Contains(text, "PRIVATE KEY") {
		t.Error("the dump has a private key")
	}
	a.get(t, http.MethodPost, "admin", "/quitquitquit")
	select {
	case <-a.done:
	case <-time.After(10 * time.Second):
		t.Error("/quitquitquit does not end the process")
	}
}
