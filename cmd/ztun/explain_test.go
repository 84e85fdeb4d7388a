package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
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
