// Package hbone carries byte streams over HTTP/2 CONNECT over mutual TLS (HBONE, port 15008).
//
// [Engine] is the protocol as a state machine without I/O: it is fed the bytes that arrived and yields events and bytes to
// send. A tunnel drives one engine over one TLS connection as a [loop.Task]; its [Stream]s are loop.Conns whose relays are
// children of that task. A [Pool] opens tunnels and streams for one source identity; a [Server] serves the tunnels that
// peers open and gives each CONNECT to a [Handler].
//
// The package alone knows HTTP/2 and the record layer of TLS. It decides nothing about destinations or policy, and of
// certificates it knows only the functions in its Configs that return a *tls.Config.
package hbone

import (
	"context"
	"crypto/tls"
	"net/netip"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// Port is where HBONE is served on every pod (Istio's fixed port).
const Port = 15008

// Headers are the header fields of a CONNECT and of its response beside the pseudo-header fields. Empty fields are not
// sent, with the exception of Baggage, which requests always carry.
type Headers struct {
	Baggage          string
	Forwarded        string
	Traceparent      string
	ForwardedNetwork string // x-forwarded-network: where a request comes from that crosses a gateway
	CrossNetwork     bool   // there is one, although it may be empty
	Reason           string // x-ztun-reason, of an error response: why, for people and machines; peers may ignore it
}

// A Target says where a stream goes: to the peer at NextHop, which has to prove one of the identities in Accept, and from
// there to Authority.
type Target struct {
	NextHop   netip.AddrPort      // the address to connect to
	Authority string              // the value of :authority
	Accept    []workload.Identity // the peer must present one of them; none matches nobody
	PeerUID   string              // uid of the workload at NextHop, so that a recycled address never meets an old tunnel
	Headers   Headers
}

// A Stream is one CONNECT that was answered with 200: a loop.Conn whose calls belong on the loop of its tunnel.
// Reset sends RST_STREAM(CANCEL). A received RST_STREAM reads as loop.ErrReset: at once, or, with the code NO_ERROR, after what
// came before it. If END_STREAM came before it, it only says that the peer wants nothing more, as an RST after a FIN does: what
// was received stays readable, and io.EOF follows. A lost tunnel is a reset for a stream whose END_STREAM has not arrived; one
// that was received in full stays readable until it is closed. LocalAddr and RemoteAddr are those of the tunnel.
type Stream interface {
	loop.Conn

	// Ref is that of the tunnel. A relay becomes a child of it: Ref().Post(func() { Ref().Child(…) }).
	Ref() *loop.Ref

	// Peer is the identity that the other side of the tunnel proved.
	Peer() workload.Identity

	// Broken is why a Stream that reads as reset has ended, if neither side meant it to: by RST_STREAM with another code than
	// NO_ERROR and CANCEL, or because the tunnel was lost. It is nil otherwise, and after Reset or Close.
	Broken() error

	// Response is what the other side sent with the 200; of an accepted request, what this side sent.
	Response() Headers
}

// Times are when a tunnel was made: when its dial began, when there was a TCP connection, and when the peer had proved who it is. They are
// zero for tunnels that others have made.
type Times struct{ Dialled, Connected, Secured time.Time }

// A Dialer opens the TCP connections of tunnels: marked sockets of the source's network namespace. It may return a Stream as
// well: the tunnel is then a child of the one that carries it (double HBONE).
type Dialer interface {
	Dial(ctx context.Context, dst netip.AddrPort) (loop.Conn, error)
}

// A ClientTLS returns the configuration of one client handshake: the source's certificate, the roots, and a verification
// that accepts exactly the given identities. It may wait for a certificate.
type ClientTLS func(ctx context.Context, accept []workload.Identity) (*tls.Config, error)

// A ServerTLS returns the configuration of one server handshake. It may wait for a certificate.
type ServerTLS func(ctx context.Context) (*tls.Config, error)

// A Handler decides about a CONNECT. It is called in a set-up, of loop.Group.Go, and may wait; ctx ends when the stream
// or its tunnel does. It calls Accept or Reject exactly once.
type Handler interface {
	ServeConnect(ctx context.Context, r *Request)
}
