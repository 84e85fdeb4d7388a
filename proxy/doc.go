// Package proxy decides what happens to a flow and moves its bytes.
//
// A [Proxy] stands for one pod. It serves the flows of the pod's stack (ServeTCP, ServeUDP) and the streams that come to the
// pod's HBONE port (ServeConnect): [Classify] turns an outbound flow into a [Decision], policy decides about inbound ones, the
// upstream is connected first and the application answered only then. From there on a [Relay] moves the bytes, as a task on an
// event loop, and a connection record tells what became of it.
//
// [Connections] are those of all pods that are open: it closes the ones that a change of policy denies.
//
// The package knows neither gVisor nor the kernel: it sees connections as loop.Conns, and the pod's sockets through [Underlay].
package proxy
