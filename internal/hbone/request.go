package hbone

import (
	"net/netip"

	"ztun.dev/ztun/internal/workload"
)

// A Request is a CONNECT that has not been answered.
type Request struct {
	Authority string
	Headers   Headers
	Peer      workload.Identity // what the client's certificate proved; zero if it carries no identity of our trust domain
	Local     netip.AddrPort    // the address that the tunnel was made to
	Remote    netip.AddrPort    // the address that the tunnel came from

	answer answerer
}

// An answerer is the tunnel behind a Request.
type answerer interface {
	accept(h Headers, start func(Stream)) error
	reject(status int, h Headers)
}

// Accept answers 200 and calls start with the open stream, on the tunnel's loop, before anything of the stream is read.
// It returns loop.ErrReset, and start is not called, if the stream has ended meanwhile.
func (r *Request) Accept(h Headers, start func(Stream)) error { return r.answer.accept(h, start) }

// Reject answers with an error status (RFC 9110, section 15) and ends the stream. reason is sent along as x-ztun-reason.
func (r *Request) Reject(status int, reason string) { r.answer.reject(status, Headers{Reason: reason}) }
