package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/admin"
)

var connsSample = []admin.Connection{
	{ID: 1, Direction: "outbound", State: "open", Pod: "shop/cart", Src: "10.1.0.1:40000", Dst: "10.1.0.2:15008", OriginalDst: "10.96.0.10:80", Service: "web.shop.svc.cluster.local", SrcIdentity: "spiffe://td/ns/shop/sa/cart", DstIdentity: "spiffe://td/ns/shop/sa/web", Tunnel: "10.1.0.1:50000", AgeSeconds: 3700, IdleSeconds: 0.02, Received: 11, Sent: 22, SetUp: map[string]float64{"classify": 0.000_004, "connect": 0.001, "tls": 0.003}},
	{ID: 2, Direction: "inbound", State: "half-closed-local", Pod: "shop/web", Src: "10.1.0.9:40000", Dst: "10.1.0.2:8080", OriginalDst: "10.1.0.2:8080", DstWorkload: "shop/web", Policy: "shop/allow", Carried: "kernel", AgeSeconds: 1200, IdleSeconds: 900, Received: 1 << 20},
	{ID: 3, Direction: "outbound", State: "half-closed-remote", Pod: "shop/cart", Src: "10.1.0.1:40001", Dst: "192.0.2.1:443", OriginalDst: "192.0.2.1:443", SrcWorkload: "shop/cart", AgeSeconds: 90, IdleSeconds: 60},
}

func askConns(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/debug/conns":
			_ = json.NewEncoder(w).Encode(connsSample)
		case "/debug/pods": // without the one of a connection that outlives its pod
			_, _ = io.WriteString(w, `{"1": {"state": "Up", "info": {"name": "cart", "namespace": "shop"}}, "2": {"state": "Up", "info": {"name": "idle", "namespace": "shop"}}}`)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer s.Close()
	var stdout, stderr bytes.Buffer
	code = run(t.Context(), append([]string{"conns", "--admin", strings.TrimPrefix(s.URL, "http://")}, args...), nil, &stdout, &stderr)
	return code, stdout.String(), stderr.String()
}

func TestConnsAsATable(t *testing.T) {
	code, out, errs := askConns(t)
	const want = `ID  DIRECTION  STATE               AGE     IDLE   SRC             DST            SERVICE                     FROM                         TO                          RECEIVED  SENT  BUFFERED  SETUP  TUNNEL          CARRIED  POLICY
1   outbound   open                1h1m40s  20ms   10.1.0.1:40000  10.96.0.10:80  web.shop.svc.cluster.local  spiffe://td/ns/shop/sa/cart  spiffe://td/ns/shop/sa/web  11        22    0         4ms    10.1.0.1:50000  -        -
2   inbound    half-closed-local   20m0s   15m0s  10.1.0.9:40000  10.1.0.2:8080  -                           -                            (shop/web)                  1048576   0     0         0s     -               kernel   shop/allow
3   outbound   half-closed-remote  1m30s   1m0s   10.1.0.1:40001  192.0.2.1:443  -                           (shop/cart)                  -                           0         0     0         0s     -               -        -
`
	if code != 0 || strings.Join(strings.Fields(out), " ") != strings.Join(strings.Fields(want), " ") {
		t.Errorf("code %d, %s\n%s\nwant\n%s", code, errs, out, want)
	}
}

func TestConnsAreChosenAndSorted(t *testing.T) {
	for _, tt := range []struct {
		args string
		want []uint64
	}{
		{"", []uint64{1, 2, 3}},
		{"--pod shop/cart", []uint64{1, 3}},
		{"--pod shop/cart --state draining", nil},
		{"--pod shop/idle", nil},
		{"--pod shop/web", []uint64{2}},
		{"--state half-closed", []uint64{2, 3}},
		{"--state half-closed-remote", []uint64{3}},
		{"--state draining", nil},
		{"--idle-over 10m", []uint64{2}},
		{"--idle-over 30s --state half-closed", []uint64{2, 3}},
		{"--sort age", []uint64{1, 2, 3}},
		{"--sort idle", []uint64{2, 3, 1}},
		{"--sort bytes", []uint64{2, 1, 3}},
		{"--sort setup", []uint64{1, 2, 3}},
	} {
		t.Run(tt.args, func(t *testing.T) {
			code, out, errs := askConns(t, append(strings.Fields(tt.args), "-o", "json")...)
			var list []admin.Connection
			d := json.NewDecoder(strings.NewReader(out))
			if err := d.Decode(&list); code != 0 || err != nil || list == nil {
				t.Fatalf("code %d, %v: %s%s", code, err, out, errs)
			}
			if _, err := d.Token(); err != io.EOF {
				t.Errorf("more than one value: %s", out)
			}
			var got []uint64
			for _, c := range list {
				got = append(got, c.ID)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestConnsRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"--state half-open": `ztun conns: --state: "half-open" is none of connecting, open`,
		"--sort name":       `ztun conns: --sort: "name" is none of`,
		"--idle-over -1s":   `ztun conns: --idle-over: -1s is negative`,
		"--pod shop/nope":   `ztun conns: --pod shop/nope: this node serves no such pod`,
		"--pod cart":        `ztun conns: --pod cart: this node serves no such pod`,
		"now":               `ztun conns: unexpected argument "now"`,
	} {
		if code, out, errs := askConns(t, strings.Fields(args)...); code != exitUsage || out != "" || !strings.HasPrefix(errs, want) {
			t.Errorf("%s: code %d, %q, %q; want 2 and %q", args, code, out, errs, want)
		}
	}
	var stderr bytes.Buffer
	if code := run(t.Context(), []string{"conns", "--admin", "127.0.0.1:1"}, nil, io.Discard, &stderr); code != exitFailure || !strings.Contains(stderr.String(), "ztun conns: 127.0.0.1:1: connection refused; is a ztun running there? --admin says where one is\n") {
		t.Errorf("nobody there: code %d, %s", code, stderr.String())
	}
}
