package hbone

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// TestQueueModel: whatever is lent, kept and taken in whatever order comes out in the order it came in, and nothing of a lent
// buffer is used after keep.
func TestQueueModel(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		var q queue
		var model []byte
		next := byte(0)
		turn := make([]byte, 0, 256<<10)
		for range 200 {
			switch r.IntN(5) {
			case 0, 1:
				n := 1 + r.IntN([]int{6000, 200_000}[r.IntN(20)/19])
				if len(turn)+n > cap(turn) {
					continue
				}
				at := len(turn)
				for range n {
					turn = append(turn, next)
					next++
				}
				q.lend(turn[at:len(turn):len(turn)])
				model = append(model, turn[at:]...)
			case 2:
				q.keep()
				clear(turn)
				turn = turn[:0]
			case 3:
				p := make([]byte, r.IntN(30_000))
				n := q.read(p)
				if want := min(len(p), len(model)); n != want || !bytes.Equal(p[:n], model[:n]) {
					t.Fatalf("seed %d: read %d bytes, want %d, or they differ", seed, n, want)
				}
				model = model[n:]
			case 4:
				limit := r.IntN(9000)
				got := bytes.Join(q.peek(nil, limit), nil)
				if want := model[:min(limit, len(model))]; !bytes.Equal(got, want) {
					t.Fatalf("seed %d: peek of %d bytes differs", seed, limit)
				}
				n := r.IntN(len(got) + 1)
				q.drop(n)
				model = model[n:]
			}
			if q.empty() != (len(model) == 0) || q.size() != len(model) {
				t.Fatalf("seed %d: empty = %v, size %d with %d bytes", seed, q.empty(), q.size(), len(model))
			}
			mem := 0
			for _, p := range q.pieces[:q.own] {
				mem += cap(p)
			}
			if q.mem != mem {
				t.Fatalf("seed %d: %d bytes of memory of its own, counted %d", seed, mem, q.mem)
			}
		}
	}
}
