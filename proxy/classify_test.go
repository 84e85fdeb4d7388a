package proxy

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"

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
		{open(hbone.PhaseHandshake, hbone.ErrUnknownPeer), telemetry.FlagTLSFailure, telemetry.ReasonTLS},
		{open(hbone.PhaseHandshake, context.DeadlineExceeded), telemetry.FlagHandshake, telemetry.ReasonTimeout},
		{open(hbone.PhaseResponse, &hbone.StatusError{Code: 401}), telemetry.FlagDeny, telemetry.ReasonPolicy},
		{open(hbone.PhaseResponse, &hbone.StatusError{Code: 503}), telemetry.FlagConnect, telemetry.ReasonRefused},
		{errors.New("anything"), telemetry.FlagConnect, telemetry.ReasonOther},
	}
	for _, tt := range tests {
		if flag, reason := ClassifyError(tt.err); flag != tt.flag || reason != tt.reason {
			t.Errorf("%v counts as %v, %s; want %v, %s", tt.err, flag, reason, tt.flag, tt.reason)
		}
	}
}
