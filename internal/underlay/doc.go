// Package underlay makes the kernel sockets of a pod: marked ones that are not captured, delivery to the application from the
// client's address, the listener of HBONE, and exchanges with resolvers.
//
// A socket is created in the pod's network namespace and used from anywhere; on an event loop it is a [Conn]. Waiting, for a
// connection or an answer, goes through loop.Await. The package decides nothing about where to connect.
package underlay
