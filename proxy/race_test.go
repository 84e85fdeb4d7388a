//go:build race

package proxy

// cutConns are the open connections of a change of policy: the race detector makes everything ten times slower.
const cutConns = 20_000
