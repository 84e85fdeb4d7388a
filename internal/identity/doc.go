// Package identity keeps certificates for the identities of the workloads that this node serves.
//
// A [Manager] asks a [CA] for a certificate per identity, shares it among everybody who needs it, and renews it at half of
// its life. [Manager.Client] and [Manager.Server] turn it into the TLS configurations of the two ends of HBONE: TLS 1.3,
// certificates on both sides, peers identified by their SPIFFE names and never by a host name.
//
// Keys live in memory only. The package does not know what the connections are for.
package identity
