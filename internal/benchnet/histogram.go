package main

import (
	"math/bits"
	"time"
)

const (
	subBits = 6 // 64 buckets for each power of two: values are exact to 1.6 %
	sub     = 1 << subBits
)

// A histogram counts durations and allocates nothing. The zero value is empty.
type histogram struct {
	buckets [(64 - subBits) * sub]uint64
	total   uint64
}

func (h *histogram) add(d time.Duration) {
	h.buckets[bucket(uint64(max(d, 0)))]++
	h.total++
}

// bucket: values below 64 have one each; above, the six bits behind the leading one tell them apart.
func bucket(v uint64) int {
	if v < sub {
		return int(v)
	}
	e := bits.Len64(v) - 1 - subBits
	return e*sub + int(v>>e)
}

// low is the least value of a bucket.
func low(b int) float64 {
	if b < sub {
		return float64(b)
	}
	e := b/sub - 1
	return float64(uint64(b-e*sub) << e)
}

// quantile returns the value in nanoseconds that q of all do not exceed, as the middle of its bucket.
func (h *histogram) quantile(q float64) float64 {
	rank := uint64(q * float64(h.total))
	var seen uint64
	for b, n := range h.buckets {
		if seen += n; n > 0 && seen > rank || seen == h.total && n > 0 {
			return (low(b) + low(b+1)) / 2
		}
	}
	return 0
}
