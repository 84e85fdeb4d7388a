package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ztun.dev/ztun/internal/explain"
	"ztun.dev/ztun/internal/workload"
)

// A running ztun is asked for its dump; the answer here is one that a real one has given.
func TestExplainAsksARunningZtun(t *testing.T) {
	dump, err := os.ReadFile("../../internal/admin/testdata/config_dump.json")
	if err != nil {
		t.Fatal(err)
	}
	asked := ""
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.Method + " " + r.URL.Path
		if asked != "GET /config_dump" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		_, _ = w.Write(dump)
	}))
	defer s.Close()
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	ask := func(args ...string) (code int, out, errs string) {
		var stdout, stderr bytes.Buffer
		code = run(t.Context(), append([]string{"explain", "--admin", strings.TrimPrefix(s.URL, "http://")}, args...), nil, &stdout, &stderr)
		return code, stdout.String(), stderr.String()
	}
	code, out, errs := ask("--network", "net1", "--matrix")
	if code != 0 || asked != "GET /config_dump" || !strings.Contains(out, "cart.shop.svc.cluster.local") {
		t.Errorf("%q ends with %d: %s%s", asked, code, out, errs)
	}
	if code, out, errs := ask("--from", "shop/nobody", "--to", "192.0.2.1:80"); code != 2 || asked != "GET /config_dump" || !strings.Contains(errs, "--from: the state has no workload shop/nobody") {
		t.Errorf("without /debug/explain, after %q: %d: %s%s", asked, code, out, errs)
	}
	dump = []byte("<html>")
	if code, _, errs := ask("--matrix"); code != 2 || !strings.Contains(errs, "/config_dump") {
		t.Errorf("an answer that is no dump: %d, %s", code, errs)
	}
}

// One question is answered by the running ztun itself, by the state that it has; there it is not known what --network says.
func TestExplainHasARunningZtunAnswer(t *testing.T) {
	st, err := workload.ParseStatic("state", []byte("workloads: [{uid: k//Pod/shop/cart, name: cart, namespace: shop, protocol: HBONE, workloadIps: [10.1.0.1], services: {}}]"))
	if err != nil {
		t.Fatal(err)
	}
	m := explain.Mesh{State: workload.NewSnapshot(st)}
	var asked []explain.Question
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/debug/explain" {
			t.Errorf("%s is asked for", r.URL.Path)
		}
		q := explain.ParseQuery(r.URL.Query())
		asked = append(asked, q)
		report, err := m.Ask(q)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_ = json.NewEncoder(w).Encode(report)
	}))
	defer s.Close()
	for _, tt := range []struct {
		args     []string
		code     int
		want     string
		question explain.Question
	}{
		{[]string{"--from", "shop/cart", "--to", "192.0.2.1:80"}, 0, "transport   passthrough to 192.0.2.1:80, as it is\n", explain.Question{From: "shop/cart", To: "192.0.2.1:80"}},
		{[]string{"--from", "shop/cart", "--to", "192.0.2.1:53", "--udp", "-o", "json"}, 0, `"route": "DNS"`, explain.Question{From: "shop/cart", To: "192.0.2.1:53", UDP: true}},
		{
			[]string{"--from", "192.0.2.9", "--to", "shop/cart:80", "--inbound", "--plaintext"},
			0, "verdict     allowed: no allow policies\n",
			explain.Question{From: "192.0.2.9", To: "shop/cart:80", Inbound: true, Plaintext: true},
		},
		{[]string{"--from", "shop/x", "--to", "192.0.2.1:80"}, 2, "ztun explain: --from: the state has no workload shop/x\n", explain.Question{From: "shop/x", To: "192.0.2.1:80"}},
	} {
		asked = nil
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), append([]string{"explain", "--admin", strings.TrimPrefix(s.URL, "http://")}, tt.args...), nil, &stdout, &stderr)
		if code != tt.code || !strings.Contains(stdout.String()+stderr.String(), tt.want) {
			t.Errorf("%q ends with %d: %s%s, want %d and %q", tt.args, code, &stdout, &stderr, tt.code, tt.want)
		}
		if len(asked) != 1 || asked[0] != tt.question {
			t.Errorf("%q asks %+v, want %+v", tt.args, asked, tt.question)
		}
	}
}

// The tables of a running ztun know which pods it serves, also those that are not in the mesh by the state. One that is pending it does not.
func TestExplainTablesOfServedPods(t *testing.T) {
	const dump = `{"staticConfig": {}, "config": {"settings": []}, "policies": [],
		"services": [{"name": "web", "namespace": "shop", "hostname": "web.shop.svc.cluster.local", "vips": ["/10.96.0.10"], "ports": {"80": 8080}}],
		"workloads": [
			{"uid": "a", "name": "served", "namespace": "shop", "serviceAccount": "served", "workloadIps": ["10.1.0.1"], "authorizationPolicies": ["shop/missing"]},
			{"uid": "b", "name": "pending", "namespace": "shop", "serviceAccount": "pending", "workloadIps": ["10.1.0.2"]},
			{"uid": "c", "name": "other", "namespace": "shop", "serviceAccount": "other", "workloadIps": ["10.1.0.3"]}],
		"workloadState": {
			"1": {"state": "Up", "info": {"name": "served", "namespace": "shop", "serviceAccount": "served"}, "connections": {}},
			"2": {"state": "Pending", "info": {"name": "pending", "namespace": "shop", "serviceAccount": "pending"}}}}`
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/config_dump" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		_, _ = w.Write([]byte(dump))
	}))
	defer s.Close()
	file := filepath.Join(t.TempDir(), "dump.json")
	if err := os.WriteFile(file, []byte(dump), 0o600); err != nil {
		t.Fatal(err)
	}
	const outside = "allow     the destination is not in the mesh: nobody enforces policy\n"
	for _, tt := range []struct {
		name string
		args []string
		want []string
		not  string
	}{
		{"what they send", []string{"--matrix"}, []string{"\nshop/served  10.96.0.10:80  web.shop.svc.cluster.local  refused: "}, "shop/pending"},
		{"what one gets", []string{"--inbound", "--matrix", "--to", "shop/served:80"}, []string{"\nspiffe://cluster.local/ns/shop/sa/served  80    deny ", "\n(plaintext)                               80    deny "}, outside},
		{"what one gets that is pending", []string{"--inbound", "--matrix", "--to", "shop/pending:80"}, []string{"\n(plaintext)                               80    " + outside}, "deny"},
		{"one flow, by another network", []string{"--network", "", "--inbound", "--from", "shop/other", "--to", "shop/served:80"}, []string{"\nverdict     denied: "}, "nobody enforces"},
	} {
		for flag, value := range map[string]string{"--admin": strings.TrimPrefix(s.URL, "http://"), "--state": file} {
			t.Run(tt.name+" "+flag, func(t *testing.T) {
				var stdout, stderr bytes.Buffer
				if code := run(t.Context(), append([]string{"explain", flag, value}, tt.args...), nil, &stdout, &stderr); code != 0 {
					t.Fatalf("ends with %d: %s", code, &stderr)
				}
				for _, want := range tt.want {
					if !strings.Contains(stdout.String(), want) {
						t.Errorf("no %q in\n%s", want, &stdout)
					}
				}
				if strings.Contains(stdout.String(), tt.not) {
					t.Errorf("%q in\n%s", tt.not, &stdout)
				}
			})
		}
	}
}
