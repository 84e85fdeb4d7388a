package hbone

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"syscall"
)

// ErrUnknownPeer is wrapped by an error of Pool.Open when the peer proved none of the accepted identities.
var ErrUnknownPeer = errors.New("peer did not present an accepted identity")

// A Phase is a step of opening a stream. Each has its own time limit, but that PhaseHandshake and PhaseHTTP2 have one together.
type Phase uint8

// The phases of Pool.Open, in order.
const (
	PhaseConnect   Phase = iota // TCP connection to the next hop
	PhaseHandshake              // certificate and TLS handshake
	PhaseHTTP2                  // waiting for the peer to speak HTTP/2
	PhaseResponse               // CONNECT sent, waiting for its response
)

func (p Phase) String() string {
	switch p {
	case PhaseConnect:
		return "connect"
	case PhaseHandshake:
		return "handshake"
	case PhaseHTTP2:
		return "HTTP/2 handshake"
	}
	return "response"
}

// An OpenError is the failure of Pool.Open.
type OpenError struct {
	Phase   Phase
	NextHop netip.AddrPort
	Err     error // context.DeadlineExceeded when the phase's limit passed; the dialer's error as it came
}

// phaseOf is the phase in which a request failed: settled says whether the peer spoke HTTP/2 by then. With TLS 1.3 it tells only after the
// handshake that it refuses our certificate.
func phaseOf(err error, settled bool) Phase {
	if settled {
		return PhaseResponse
	}
	if alert, ok := errors.AsType[*net.OpError](err); ok && alert.Op == "remote error" { // crypto/tls has no type for it
		return PhaseHandshake
	}
	return PhaseHTTP2
}

// Error implements error. Of a connection attempt without an answer it says in ztunnel's words what the reason may be.
func (e *OpenError) Error() string {
	s := fmt.Sprintf("hbone: %s %s: %v", e.Phase, e.NextHop, e.Err)
	if e.Unanswered() {
		s = fmt.Sprintf("connection timed out, maybe a NetworkPolicy is blocking HBONE port %d: %s", Port, s)
	}
	return s
}

// Unanswered reports that the next hop did not answer the attempt to connect within our limit, or the kernel's.
func (e *OpenError) Unanswered() bool {
	return e.Phase == PhaseConnect && (errors.Is(e.Err, context.DeadlineExceeded) || errors.Is(e.Err, syscall.ETIMEDOUT))
}

// Unwrap returns the cause.
func (e *OpenError) Unwrap() error { return e.Err }

// A RequestError is a request that no Handler hears of, because it is not one that could be served.
type RequestError struct{ Reason string }

func (e *RequestError) Error() string { return e.Reason }

// A HandshakeError is a connection to a Server that did not become a tunnel.
type HandshakeError struct{ Err error }

func (e *HandshakeError) Error() string { return "tls handshake error: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *HandshakeError) Unwrap() error { return e.Err }

// A CertificateError tells that there is no certificate to show to the peer. It is the Err of an OpenError of PhaseHandshake.
type CertificateError struct{ Err error }

func (e *CertificateError) Error() string { return "identity error: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *CertificateError) Unwrap() error { return e.Err }

// A StatusError is a CONNECT that was answered with another status than 200. It is the Err of an OpenError of PhaseResponse.
type StatusError struct {
	Code   int
	Reason string // the peer's x-ztun-reason, if it sent one
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("http status: %d %s", e.Code, http.StatusText(e.Code))
	if e.Reason != "" {
		s += ": " + e.Reason
	}
	return s
}
