//go:build !race

package proxy

// cutConns are the open connections of a change of policy.
const cutConns = 100_000
