// Package lab builds whole networks to try things on: nodes with pods, one flat layer-2 network between them, and a wire on
// which every packet between nodes can be looked at. It serves the demonstration, benchmarks and tests.
//
// [New] makes one network namespace for each node and pod and one for the wire, all anonymous: they are held by descriptors of
// this process only, so that nothing is left of them even after kill -9. A pod's eth0 is a veth into its node's namespace, onto
// a bridge there; the node's uplink is a veth onto the bridge in the namespace of the wire:
//
//	pod eth0 ──┐                                           ┌── eth0 pod
//	pod eth0 ──┤ br0 node-a up0 ──┤ br0 wire ├── up0 node-b br0 ├── eth0 pod
//
// A [Host] is one of these namespaces. Its methods open sockets and start programs inside it. [Wire.Sniff] counts what crosses
// the wire and how much of it could be read there.
//
// The package never changes the network namespace of its own process. It works on Linux and needs CAP_SYS_ADMIN and
// CAP_NET_ADMIN.
package lab
