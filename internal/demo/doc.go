// Package demo shows ztun at work, in seconds, on a network that it makes itself and takes down again: two nodes, each with a
// ztun process of its own, two pods each, and programs in the pods that know nothing of ztun.
//
// [Run] prints what it measured and what was expected: a request by service name, the client address that the server saw, the
// identities of both ends, a flow that policy denies, the bytes that could be read on the wire between the nodes, and
// throughput; the last two beside the same network without ztun. Nothing is printed as a fact that was not observed. A fact that
// does not hold makes Run return an error.
//
// [ServerMain] and [ClientMain] are the small programs that run in the pods, by way of hidden subcommands of the binary.
package demo
