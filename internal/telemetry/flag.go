package telemetry

import (
	"errors"
	"slices"
)

// A Flag is the value of the label response_flags: how a connection ended, in ztunnel's words.
type Flag uint8

// The flags.
const (
	FlagNone Flag = iota // by itself, or by the end of this process
	FlagDeny
	FlagConnect // it could not be opened, and everything without a flag of its own
	FlagTLSFailure
	FlagHandshake
	FlagNetworkPolicy // no answer on port 15008
	FlagIdentity      // no certificate for the workload
	FlagRevoked
	FlagReset // it broke after it was established; not counted as failed
	flagCount
)

var flagNames = [flagCount]string{
	"-", "DENY", "CONNECT", "TLS_FAILURE", "H2_HANDSHAKE_FAILURE", "NETWORK_POLICY", "IDENTITY_ERROR", "CERT_REVOKED", "STREAM_RESET",
}

func (f Flag) String() string {
	if f < flagCount {
		return flagNames[f]
	}
	return flagNames[FlagConnect]
}

// failed reports whether the connection counts as failed: it was never established.
func (f Flag) failed() bool { return f != FlagNone && f != FlagReset }

// A Reason is why a flow or a connection failed: a label value. Others than those below are counted as other.
type Reason string

// The reasons.
const (
	ReasonOther           Reason = "other"
	ReasonSelfCall        Reason = "self_call"
	ReasonUnknownWorkload Reason = "unknown_workload"
	ReasonNoEndpoint      Reason = "no_endpoint"
	ReasonNoRoute         Reason = "no_route"
	ReasonWaypoint        Reason = "waypoint"
	ReasonGateway         Reason = "gateway"
	ReasonDNS             Reason = "dns"
	ReasonBadRequest      Reason = "bad_request"
	ReasonTLS             Reason = "tls"
	ReasonTimeout         Reason = "timeout"
	ReasonRefused         Reason = "refused"
	ReasonIdentity        Reason = "identity"
	ReasonPolicy          Reason = "policy"
	ReasonLimit           Reason = "limit"
	ReasonReset           Reason = "reset"
)

var reasons = []Reason{
	ReasonOther, ReasonSelfCall, ReasonUnknownWorkload, ReasonNoEndpoint, ReasonNoRoute, ReasonWaypoint, ReasonGateway, ReasonDNS, ReasonBadRequest,
	ReasonTLS, ReasonTimeout, ReasonRefused, ReasonIdentity, ReasonPolicy, ReasonLimit, ReasonReset,
}

// Reasons are all of them.
func Reasons() []Reason { return slices.Clone(reasons) }

// known keeps the set of label values closed.
func (r Reason) known() Reason {
	if slices.Contains(reasons, r) {
		return r
	}
	return ReasonOther
}

// classify is how an error counts that Config.Classify does not know, or where there is none: an error may say it itself.
func classify(err error) (Flag, Reason) {
	if err == nil {
		return FlagNone, ""
	}
	var own interface{ Telemetry() (Flag, Reason) }
	if errors.As(err, &own) {
		return own.Telemetry()
	}
	return FlagConnect, ReasonOther
}
