package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"syscall"
	"testing"

	"ztun.dev/ztun/internal/authz"
	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/stack"
)

func TestErrorsAreCountedByFlagAndReason(t *testing.T) {
	open := func(p hbone.Phase, err error) error {
		return fmt.Errorf("outer: %w", &hbone.OpenError{Phase: p, Err: err})
	}
	tests := []struct {
		err    error
		flag   telemetry.Flag
		reason telemetry.Reason
	}{
		{nil, telemetry.FlagNone, telemetry.ReasonOther},
		{DrainError(), telemetry.FlagNone, telemetry.ReasonOther},
		{&PolicyError{}, telemetry.FlagDeny, telemetry.ReasonPolicy},
		{&NoEndpointError{}, telemetry.FlagConnect, telemetry.ReasonNoEndpoint},
		{reject(400, "x"), telemetry.FlagConnect, telemetry.ReasonBadRequest},
		{errSelfCall, telemetry.FlagConnect, telemetry.ReasonSelfCall},
		{fmt.Errorf("x: %w", syscall.ECONNREFUSED), telemetry.FlagConnect, telemetry.ReasonRefused},
		{syscall.EHOSTUNREACH, telemetry.FlagConnect, telemetry.ReasonNoRoute},
		{fmt.Errorf("x: %w", syscall.EMFILE), telemetry.FlagConnect, telemetry.ReasonLimit},
		{context.DeadlineExceeded, telemetry.FlagConnect, telemetry.ReasonTimeout},
		{stack.ErrGone, telemetry.FlagNone, telemetry.ReasonOther},
		{errTunnelLost, telemetry.FlagReset, telemetry.ReasonReset},
		{open(hbone.PhaseConnect, context.DeadlineExceeded), telemetry.FlagNetworkPolicy, telemetry.ReasonTimeout},
		{open(hbone.PhaseConnect, syscall.ETIMEDOUT), telemetry.FlagNetworkPolicy, telemetry.ReasonTimeout},
		{open(hbone.PhaseConnect, syscall.ECONNREFUSED), telemetry.FlagConnect, telemetry.ReasonRefused},
		{open(hbone.PhaseHandshake, &hbone.CertificateError{Err: errors.New("signing gRPC error")}), telemetry.FlagIdentity, telemetry.ReasonIdentity},
		{noRoute(telemetry.ReasonWaypoint, "x"), telemetry.FlagConnect, telemetry.ReasonWaypoint},
		{open(hbone.PhaseHandshake, hbone.ErrUnknownPeer), telemetry.FlagTLSFailure, telemetry.ReasonTLS},
		{open(hbone.PhaseHandshake, context.DeadlineExceeded), telemetry.FlagHandshake, telemetry.ReasonTimeout},
		{open(hbone.PhaseHTTP2, context.DeadlineExceeded), telemetry.FlagHandshake, telemetry.ReasonTimeout},
		{open(hbone.PhaseHTTP2, io.ErrUnexpectedEOF), telemetry.FlagHandshake, telemetry.ReasonReset},
		{open(hbone.PhaseResponse, io.ErrUnexpectedEOF), telemetry.FlagHandshake, telemetry.ReasonReset},
		{open(hbone.PhaseResponse, context.DeadlineExceeded), telemetry.FlagHandshake, telemetry.ReasonTimeout},
		{open(hbone.PhaseResponse, &hbone.StatusError{Code: 401}), telemetry.FlagConnect, telemetry.ReasonPolicy},
		{open(hbone.PhaseResponse, &hbone.StatusError{Code: 503}), telemetry.FlagConnect, telemetry.ReasonRefused},
		{errors.New("anything"), telemetry.FlagConnect, telemetry.ReasonOther},
	}
	for _, tt := range tests {
		if flag, reason := ClassifyError(tt.err); flag != tt.flag || reason != tt.reason {
			t.Errorf("%v counts as %v, %s; want %v, %s", tt.err, flag, reason, tt.flag, tt.reason)
		}
	}
}

func TestErrorTextsAreThoseOfZtunnel(t *testing.T) {
	open := func(p hbone.Phase, err error) error {
		return &hbone.OpenError{Phase: p, NextHop: netip.MustParseAddrPort("10.0.0.1:15008"), Err: err}
	}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{errSelfCall, "attempted recursive call to ourselves"},
		{&NoEndpointError{netip.MustParseAddrPort("10.96.0.1:80")}, "no healthy upstream: 10.96.0.1:80"},
		{fmt.Errorf("underlay: connect 192.0.2.1:80: %w", syscall.ECONNREFUSED), "io error: Connection refused (os error 111)"},
		{fmt.Errorf("underlay: connect 192.0.2.1:80: %w", context.DeadlineExceeded), "io error: deadline has elapsed"},
		{&connectError{fmt.Errorf("underlay: deliver: %w", syscall.ECONNREFUSED)}, "connection failed: Connection refused (os error 111)"},
		{&connectError{context.DeadlineExceeded}, "connection failed: deadline has elapsed"},
		{open(hbone.PhaseConnect, syscall.EHOSTUNREACH), "io error: No route to host (os error 113)"},
		{open(hbone.PhaseConnect, syscall.ETIMEDOUT), "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: Connection timed out (os error 110)"},
		{open(hbone.PhaseConnect, context.DeadlineExceeded), "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed"},
		{open(hbone.PhaseHandshake, &hbone.CertificateError{Err: errors.New("signing gRPC error (Unavailable): no CA")}), "identity error: signing gRPC error (Unavailable): no CA"},
		{open(hbone.PhaseHandshake, hbone.ErrUnknownPeer), "hbone: handshake 10.0.0.1:15008: peer did not present an accepted identity"},
		{open(hbone.PhaseHandshake, context.DeadlineExceeded), "http2 handshake failed: deadline has elapsed"},
		{open(hbone.PhaseHTTP2, fmt.Errorf("tunnel lost: %w", syscall.ECONNRESET)), "http2 handshake failed: Connection reset by peer (os error 104)"},
		{open(hbone.PhaseResponse, fmt.Errorf("tunnel lost: %w", io.ErrUnexpectedEOF)), "h2 failed: tunnel lost: unexpected EOF"},
		{open(hbone.PhaseResponse, context.DeadlineExceeded), "h2 failed: deadline has elapsed"},
		{open(hbone.PhaseResponse, &hbone.StatusError{Code: 503}), "http status: 503 Service Unavailable"},
		{open(hbone.PhaseResponse, &hbone.StatusError{Code: 401, Reason: "why"}), "http status: 401 Unauthorized: why"},
		{&PolicyError{Verdict: authz.Verdict{Reason: authz.DenyMatched, Policy: "a/b"}}, "connection closed due to policy rejection: explicitly denied by: a/b"},
		{&PolicyError{Verdict: authz.Verdict{Reason: authz.NoAllowMatched}}, "connection closed due to policy rejection: allow policies exist, but none allowed"},
		{&PolicyError{Change: true}, "connection closed due to policy change"},
		{DrainError(), "connection closed due to connection drain"},
		{&brokenError{"send", syscall.ECONNABORTED}, "send: Software caused connection abort (os error 103)"},
		{&brokenError{"while closing connection: receive", errors.New("x")}, "while closing connection: receive: x"},
	} {
		if got := ErrorText(tt.err); got != tt.want {
			t.Errorf("%v is told as %q, want %q", tt.err, got, tt.want)
		}
	}
}
