package hbone

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestServerRefused: what leads to no request is told, once, with both addresses.
func TestServerRefused(t *testing.T) {
	type refusal struct {
		local, remote netip.AddrPort
		err           error
	}
	var got []refusal
	take := func(t *testing.T, want string) {
		t.Helper()
		defer func() { got = nil }()
		if want == "" {
			if len(got) != 0 {
				t.Errorf("told %v, want nothing", got)
			}
			return
		}
		if len(got) != 1 {
			t.Fatalf("told %v, want one refusal", got)
		}
		if r := got[0]; r.local != serverAddr || r.remote != clientAddr || !strings.Contains(r.err.Error(), want) {
			t.Errorf("told %v from %v to %v, want %q from %v to %v", r.err, r.remote, r.local, want, clientAddr, serverAddr)
		}
	}
	start := func(t *testing.T) *mesh {
		return newMesh(t, meshConfig{server: ServerConfig{Refused: func(local, remote netip.AddrPort, err error) {
			got = append(got, refusal{local, remote, err})
		}}})
	}
	for _, first := range []string{"GET / HTTP/1.1\r\n\r\n", "x"} {
		t.Run(fmt.Sprintf("DP-95 clear text %q", first), func(t *testing.T) {
			ms := start(t)
			c := ms.arrive(clientAddr, []byte(first))
			if !closed(c) {
				t.Error("not closed at once")
			}
			take(t, "tls handshake error: the peer does not speak TLS")
		})
	}
	t.Run("DP-95 no certificate", func(t *testing.T) {
		ms := start(t)
		cfg := newPKI(t).clientTLS(client1.String())
		cfg.Certificates = nil
		ms.pool.cfg.TLS = clientFrom(cfg)
		if _, err := ms.open(); err == nil {
			t.Error("opened")
		}
		take(t, "tls handshake error: ")
	})
	t.Run("a handshake that is not finished", func(t *testing.T) {
		ms := start(t)
		ms.arrive(clientAddr, clientHello(t))
		ms.m.Advance(time.Minute)
		take(t, "tls handshake error: ")
	})
	t.Run("nothing but a connection", func(t *testing.T) {
		ms := start(t)
		_ = ms.arrive(clientAddr, nil).Reset()
		ms.arrive(clientAddr, nil)
		ms.m.Advance(time.Minute)
		take(t, "")
	})
	for _, tt := range []struct {
		name   string
		fields []string
		want   string
	}{
		{"DP-84 another method", []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", "10.0.1.5:80"}, "expected method CONNECT, got GET"},
		{"a method without end", []string{":method", strings.Repeat("M", 10_000), ":scheme", "https", ":path", "/", ":authority", "10.0.1.5:80"}, "got " + strings.Repeat("M", 32)},
		{"DP-85 no authority", []string{":method", "CONNECT"}, "no valid authority pseudo header: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ms := start(t)
			keep := ms.mustOpen()
			keep.Ref().Post(func() {
				e := keep.(*stream).t.eng
				for i := 0; i < len(tt.fields); i += 2 {
					e.field(tt.fields[i], tt.fields[i+1])
				}
				e.writeBlock(e.nextID, true)
				e.nextID += 2
				keep.(*stream).t.kick()
			})
			ms.m.Settle()
			take(t, tt.want)
			_, err := ms.open()
			if err != nil {
				t.Errorf("the tunnel serves no more: %v", err)
			}
		})
	}
}
