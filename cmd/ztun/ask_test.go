package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
)

// Where nothing answers, or something else than a ztun, the error names the address and what to do, not a URL or a call.
func TestAskWhoIsNotThere(t *testing.T) {
	serve := func(h http.HandlerFunc) string {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	nobody := l.Addr().String()
	page := serve(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, "<html>") })
	missing := serve(http.NotFound)
	silent := serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	explain := []string{"explain", "--from", "a/b", "--to", "192.0.2.1:80"}
	for _, tt := range []struct {
		name string
		args []string
		addr string
		want string
		code int
	}{
		{"conns, refused", []string{"conns"}, nobody, "ztun conns: " + nobody + ": connection refused; is a ztun running there? --admin says where one is\n", exitFailure},
		{"conns, another server", []string{"conns"}, missing, "ztun conns: " + missing + ": /debug/conns: 404 Not Found; is a ztun running there? --admin says where one is\n", exitFailure},
		{"conns, a page", []string{"conns"}, page, "ztun conns: what answers at " + page + " is no ztun: /debug/conns is no JSON of ours; --admin says where one is\n", exitFailure},
		{"conns, no answer", []string{"conns"}, silent, "ztun conns: " + silent + ": EOF; is a ztun running there? --admin says where one is\n", exitFailure},
		{"explain, refused", explain, nobody, "ztun explain: " + nobody + ": connection refused; is a ztun running there? --admin says where one is, --state takes a file instead\n", exitFailure},
		{"explain, a page", explain, page, "ztun explain: what answers at " + page + " is no ztun: /debug/explain is no JSON of ours; --admin says where one is\n", exitFailure},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out, errs bytes.Buffer
			code := run(t.Context(), append(tt.args, "--admin", tt.addr), nil, &out, &errs)
			if code != tt.code || errs.String() != tt.want {
				t.Errorf("exit code %d, want %d; stderr\n%swant\n%s", code, tt.code, &errs, tt.want)
			}
		})
	}
}
