package node

import (
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// get reads a page of a node's admin server.
func (p *process) get(t *testing.T, method, site, path string) string {
	t.Helper()
	status, body := p.ask(t, method, site, path)
	if status != http.StatusOK {
		t.Errorf("%s %s: status %d:\n%s", method, path, status, body)
	}
	return body
}

// page reads one, whatever its status.
func (p *process) page(t *testing.T, site, path string) string {
	t.Helper()
	_, body := p.ask(t, http.MethodGet, site, path)
	return body
}

func (p *process) ask(t *testing.T, method, site, path string) (status int, page string) {
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
	if err != nil {
		t.Errorf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, string(body)
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
	explained := a.get(t, http.MethodGet, "admin", "/debug/explain?from=shop/client&to=10.96.0.10:80")
	for _, want := range []string{`"service":"web.shop.svc.cluster.local"`, `"route":"HBONE"`, `"nextHop":"` + addrPort(b.pods[webB].Addr4, 15008) + `"`, `"allowed":true`} {
		if !strings.Contains(explained, want) {
			t.Errorf("/debug/explain lacks %s: %s", want, explained)
		}
	}
	a.get(t, http.MethodPost, "admin", "/quitquitquit")
	select {
	case <-a.done:
	case <-time.After(10 * time.Second):
		t.Error("/quitquitquit does not end the process")
	}
}

// Both nodes count a connection, and both say what its own application sent.
func TestNetnsAccounting(t *testing.T) { eachBackend(t, checkAccounting) }

func checkAccounting(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	count := func(p *process, metric string) float64 {
		sum := 0.0
		for line := range strings.Lines(p.get(t, http.MethodGet, "metrics", "/metrics")) {
			if name, value, ok := strings.Cut(line, "} "); ok && strings.HasPrefix(name, metric+"{") {
				n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
				if err != nil {
					t.Errorf("%s: %v", line, err)
				}
				sum += n
			}
		}
		return sum
	}
	client, server := b.connect(t, b.ways(8080)[0])
	t.Run("DP-130 while it is open", func(t *testing.T) {
		for name, p := range map[string]*process{"source": a, "destination": z} {
			if opened, closed := count(p, "istio_tcp_connections_opened_total"), count(p, "istio_tcp_connections_closed_total"); opened != 1 || closed != 0 {
				t.Errorf("%s: opened %v, closed %v; want 1 and 0", name, opened, closed)
			}
		}
	})
	t.Run("the dump has it on both sides", func(t *testing.T) {
		type conn struct{ Src, OriginalDst, ActualDst, Protocol string }
		connections := func(p *process, pod string) (in, out []conn) {
			var dump struct {
				WorkloadState map[string]struct {
					Connections struct{ Inbound, Outbound []conn }
				}
			}
			if err := json.Unmarshal([]byte(p.get(t, http.MethodGet, "admin", "/config_dump")), &dump); err != nil {
				t.Fatal(err)
			}
			c := dump.WorkloadState["shop."+pod].Connections
			return c.Inbound, c.Outbound
		}
		local, to := client.LocalAddr().String(), b.ways(8080)[0].addr
		web := b.pods[webB].Addr4
		in, out := connections(a, "client")
		if want := (conn{local, to, addrPort(web, 15008), "HBONE"}); len(in) != 0 || len(out) != 1 || out[0] != want {
			t.Errorf("source: inbound %v, outbound %v; want %v", in, out, want)
		}
		in, out = connections(z, "web")
		if len(in) != 1 || len(out) != 0 || in[0].ActualDst != addrPort(web, 8080) || in[0].Protocol != "HBONE" || in[0].OriginalDst != "" ||
			!strings.HasPrefix(in[0].Src, b.pods[clientA].Addr4.String()+":") {
			t.Errorf("destination: inbound %v, outbound %v", in, out)
		}
	})
	t.Run("DP-123 at its end", func(t *testing.T) {
		io.WriteString(client, "hello world")
		client.CloseWrite()
		if got, err := io.ReadAll(server); string(got) != "hello world" || err != nil {
			t.Errorf("the server got %q, %v", got, err)
		}
		io.WriteString(server, "hello worldhello world")
		server.Close()
		if got, err := io.ReadAll(client); len(got) != 22 || err != nil {
			t.Errorf("the client got %q, %v", got, err)
		}
		client.Close()
		awaitNoneOpen(t, a, z)
		for name, p := range map[string]*process{"source": a, "destination": z} {
			for metric, want := range map[string]float64{
				"istio_tcp_connections_opened_total": 1, "istio_tcp_connections_closed_total": 1, "istio_tcp_connections_failed_total": 0,
				"istio_tcp_received_bytes_total": 11, "istio_tcp_sent_bytes_total": 22,
			} {
				if got := count(p, metric); got != want {
					t.Errorf("%s: %s is %v, want %v", name, metric, got, want)
				}
			}
		}
		a.out.await(t, "bytes_sent=11 bytes_recv=22", a.done, `direction="outbound"`)
		z.out.await(t, "bytes_sent=22 bytes_recv=11", z.done, `direction="inbound"`)
	})
}
