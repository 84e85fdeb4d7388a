// Command benchnet measures what a user of ztun feels, against the same traffic without it, in network namespaces of one machine.
//
// One round takes each measurement on each path, one after the other: direct, two yardsticks (a plain relay, and a pair of relays
// with mutual TLS between them), then through ztun as outbound passthrough, inbound plaintext and mesh. A ratio compares with
// direct of the same round; what is printed are medians over the rounds. How to read them: docs/performance.md.
//
// The load comes from this binary, which it starts in the namespaces under the name of a tool (see tools). Its tools make system
// calls directly and allocate nothing for a connection, so that it is not them that are measured.
package main
