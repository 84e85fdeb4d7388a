//go:build race

package node

// bulkBytes is what a bulk transfer moves each way: less with the race detector, which makes it five times slower.
const bulkBytes = 20_000_000
