package stack

import (
	"context"
	"errors"
	"net/netip"
	"strconv"

	"ztun.dev/ztun/internal/loop"
)

// A Handler decides what becomes of the flows of one network namespace.
//
// Both methods are called by the task that reads the device and must not block: what can be decided or answered at once
// is, what has to wait (a dial, a certificate, a forwarded query) goes on in loop.Group.Go.
type Handler interface {
	ServeTCP(ctx context.Context, req TCPRequest)
	ServeUDP(ctx context.Context, conn UDPConn)
}

// A Flow is a 5-tuple seen on a device before any decision was made. Addresses are unmapped.
type Flow struct {
	Proto Proto
	Src   netip.AddrPort // who opened it
	Dst   netip.AddrPort // whom it was addressed to: a VIP, a workload, or any other address
}

func (f Flow) String() string {
	return f.Proto.String() + " " + f.Src.String() + " -> " + f.Dst.String()
}

// A Proto is an IP protocol number.
type Proto uint8

// The protocols that reach a Handler (IANA protocol numbers).
const (
	TCP Proto = 6
	UDP Proto = 17
)

func (p Proto) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return "proto " + strconv.Itoa(int(p))
}

// ErrUnsupported is returned by TCPRequest.HandBack where the flow cannot be given to the kernel.
var ErrUnsupported = errors.New("stack: not supported")

// ErrGone is returned by TCPRequest.Accept when the request has ended: a limit evicted it, the application gave up, or
// another verb was called before.
var ErrGone = errors.New("stack: the request has ended")

// A TCPRequest is a SYN that has not been answered. Exactly one verb is called; until then the request keeps the SYN's
// bytes. The ctx that came with it ends when a limit evicts the request or the application gives up. The verbs may be
// called from any goroutine.
//
// The redirect backend, whose kernel has accepted already, treats Unreachable and Drop as Reset and returns ErrUnsupported
// from HandBack.
type TCPRequest interface {
	Flow() Flow

	// Accept completes the handshake. It waits, by loop.Await on ctx, for the application's ACK, and returns the
	// connection with its application: LocalAddr is Flow().Dst, RemoteAddr is Flow().Src.
	Accept(ctx context.Context) (loop.Conn, error)

	// Reset answers the SYN with RST: the application sees "connection refused".
	Reset()

	// Unreachable answers the SYN with an ICMP destination unreachable message of this cause.
	Unreachable(cause Cause)

	// Drop gives no answer; the next SYN of the flow is a new request.
	Drop()

	// HandBack gives the flow to the kernel from its SYN on, or returns ErrUnsupported or another error than ErrGone, after which
	// another verb is due.
	HandBack() error
}

// A Cause says why a destination cannot be reached. The stack maps it to the ICMP (RFC 792) or ICMPv6 (RFC 4443, section
// 3.1) code of the flow's family.
type Cause uint8

// The causes that connect(2) distinguishes.
const (
	HostUnreachable    Cause = iota // "no route to host"
	NetworkUnreachable              // "network is unreachable"
	Prohibited                      // administratively prohibited
)

// A UDPConn is one datagram and the means to answer it. The stack keeps nothing of it: the next datagram of the same flow
// is another UDPConn.
type UDPConn interface {
	Flow() Flow

	// Payload is the datagram, borrowed: valid until ServeUDP returns.
	Payload() []byte

	// Reply sends a datagram from Flow().Dst to Flow().Src. It may be called from any goroutine, any number of times; p is
	// the caller's again when it returns.
	Reply(p []byte) error
}
