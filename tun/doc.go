// Package tun makes layer-3 devices: the packets of one network namespace, on a descriptor or in memory.
//
// [Open] creates a persistent kernel TUN in the network namespace of a pod and everything that leads the pod's TCP and
// DNS into it: sysctls, routes, rules and the mark that keeps ztun's own sockets out. [Pipe] makes a pair of devices
// in memory with the same packet form. Both are a [Device].
//
// The capture fails closed: the device, the rules and an unreachable route behind the TUN route outlive the process, so
// that a pod whose proxy died gets "no route to host" and never sends in clear. [Kernel.Close] therefore only lets go of
// the descriptor; [Kernel.Unenrol] takes everything away again, and so does [Remove] when the process that made it is dead.
// A later Open adopts what a dead process left.
//
// The package moves packets and looks into none. What is done with them is the business of package stack; sockets that
// stay out of the capture, which carry [Marks.Own], are made by internal/underlay through [Netns.Socket].
package tun
