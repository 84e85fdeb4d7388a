package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
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
	dump = []byte("<html>")
	if code, _, errs := ask("--matrix"); code != 2 || !strings.Contains(errs, "/config_dump") {
		t.Errorf("an answer that is no dump: %d, %s", code, errs)
	}
}
