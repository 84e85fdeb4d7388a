// Package dnsproxy answers the questions of pods: names of the mesh from its state, everything else by forwarding.
//
// [Server.ServeDNS] takes one message and gives one back, over UDP and TCP alike. A and AAAA of a service that the client sees are answered
// from the current snapshot, without I/O. Other questions go, byte for byte but for their id, through an [Upstream] to the
// resolver that the application addressed, and its answer comes back as it is but for the flags that depend on who
// answers: RA is always set, because resolvers take an empty answer without it for a broken server and ask again.
//
// The package opens no socket, keeps no connection and no cache. Reading messages from the network and limiting their number is the
// caller's business.
package dnsproxy
