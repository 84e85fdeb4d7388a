// Package workload is the mesh as this node sees it: workloads, services and policies, and the identities of workloads.
//
// The state is one immutable [Snapshot] behind one pointer ([Store]): readers take it once per flow and need no lock;
// writers build the next one and swap. [ParseStatic] reads the state from a file.
//
// The package holds and finds; it decides nothing. Routing is proxy's, the evaluation of policies authz's, names dnsproxy's.
package workload
