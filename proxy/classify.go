package proxy

import (
	"context"
	"errors"
	"syscall"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/stack"
)

// ClassifyError says how a connection that ended so is counted: by the response flag of ztunnel's metrics, and by a reason from a
// closed set.
func ClassifyError(err error) (telemetry.Flag, telemetry.Reason) {
	if err == nil || errors.Is(err, errDrained) {
		return telemetry.FlagNone, telemetry.ReasonOther
	}
	if told, ok := errors.AsType[interface {
		error
		Telemetry() (telemetry.Flag, telemetry.Reason)
	}](err); ok {
		return told.Telemetry()
	}
	if _, ok := errors.AsType[*hbone.HandshakeError](err); ok {
		return telemetry.FlagTLSFailure, telemetry.ReasonTLS
	}
	if open, ok := errors.AsType[*hbone.OpenError](err); ok {
		return classifyOpen(open)
	}
	switch {
	case errors.Is(err, errSelfCall):
		return telemetry.FlagConnect, telemetry.ReasonSelfCall
	case errors.Is(err, errTunnelLost):
		return telemetry.FlagReset, telemetry.ReasonReset
	case errors.Is(err, stack.ErrGone), errors.Is(err, context.Canceled), errors.Is(err, loop.ErrStopped):
		return telemetry.FlagNone, telemetry.ReasonOther // the application, or we, gave up
	}
	return telemetry.FlagConnect, connectReason(err)
}

// connectReason is that of a failed connect(2).
func connectReason(err error) telemetry.Reason {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return telemetry.ReasonTimeout
	case errors.Is(err, syscall.ECONNREFUSED):
		return telemetry.ReasonRefused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return telemetry.ReasonNoRoute
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return telemetry.ReasonLimit
	}
	return telemetry.ReasonOther
}

func classifyOpen(e *hbone.OpenError) (telemetry.Flag, telemetry.Reason) {
	if _, ok := errors.AsType[*hbone.CertificateError](e); ok {
		return telemetry.FlagIdentity, telemetry.ReasonIdentity
	}
	if status, ok := errors.AsType[*hbone.StatusError](e); ok {
		switch status.Code {
		case 401, 403:
			return telemetry.FlagConnect, telemetry.ReasonPolicy // DENY is the peer's to count
		case 400:
			return telemetry.FlagConnect, telemetry.ReasonBadRequest
		}
		return telemetry.FlagConnect, telemetry.ReasonRefused
	}
	timeout := errors.Is(e, context.DeadlineExceeded)
	switch {
	case e.Unanswered():
		return telemetry.FlagNetworkPolicy, telemetry.ReasonTimeout
	case e.Phase == hbone.PhaseConnect:
		return telemetry.FlagConnect, connectReason(e)
	case timeout:
		return telemetry.FlagHandshake, telemetry.ReasonTimeout
	case e.Phase == hbone.PhaseHandshake:
		return telemetry.FlagTLSFailure, telemetry.ReasonTLS
	}
	return telemetry.FlagHandshake, telemetry.ReasonReset
}

// Telemetry tells how a denial is counted.
func (e *PolicyError) Telemetry() (telemetry.Flag, telemetry.Reason) {
	return telemetry.FlagDeny, telemetry.ReasonPolicy
}

// Telemetry tells how a flow without an endpoint is counted.
func (e *NoEndpointError) Telemetry() (telemetry.Flag, telemetry.Reason) {
	return telemetry.FlagConnect, telemetry.ReasonNoEndpoint
}

// Telemetry tells how a flow without a way is counted.
func (e *routeError) Telemetry() (telemetry.Flag, telemetry.Reason) {
	return telemetry.FlagConnect, e.reason
}

// Telemetry tells how a CONNECT that makes no sense is counted.
func (r *rejection) Telemetry() (telemetry.Flag, telemetry.Reason) {
	return telemetry.FlagConnect, telemetry.ReasonBadRequest
}

// errDrained is the end of connections that the end of the process cuts.
var errDrained = errors.New("connection closed due to connection drain")

// DrainError is the cause with which connections are closed when the process ends.
func DrainError() error { return errDrained }
