//go:build race

package node

// The race detector makes everything five times slower, and set-ups ten times.
const (
	bulkBytes  = 20_000_000 // of a bulk transfer, each way
	floodBurst = 10         // connects of a flood, each 10 ms
	slower     = 5          // times, that limits of time are longer
)
