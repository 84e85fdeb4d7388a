//go:build !race

package node

const (
	bulkBytes  = 100_000_000 // of a bulk transfer, each way
	floodBurst = 40          // connects of a flood, each 10 ms
	slower     = 1           // times, that limits of time are longer
)
