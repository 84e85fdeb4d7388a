// Package stack turns the packets of one network namespace into flows.
//
// A [Stack] runs a gVisor netstack on a [tun.Device]. It accepts packets for any destination address, and for each new
// conversation calls a [Handler] once: with a [TCPRequest], whose SYN has not been answered, or with a [UDPConn], which
// holds one datagram.
//
// A packet goes this way: the reader, a task of a loop, takes it from the device and checks it (reader.go, packet.go). A
// SYN goes to the stack's own table of unanswered SYNs (request.go), which no packet passes before the Handler has decided;
// only Accept gives it to the netstack, which then performs the handshake. Every other TCP segment goes to the netstack at
// once, and a UDP datagram to the Handler. What the netstack sends leaves through the link endpoint (link.go), one
// superpacket for each system call.
//
// The stack makes no decisions and knows nothing of workloads or policy. A Handler that is slow to answer holds one
// in-flight slot ([Config.MaxInFlight]) and delays nobody else. A Stack owns its device: the end of Run closes both.
//
// Established connections are [loop.Conn]s on raw netstack endpoints (conn.go): no goroutine, no buffer of their own.
// Stacks share nothing but the counter of [Limits].
package stack
