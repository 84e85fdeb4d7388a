//go:build !race

package node

// bulkBytes is what a bulk transfer moves each way.
const bulkBytes = 100_000_000
