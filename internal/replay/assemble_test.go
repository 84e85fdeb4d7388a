package replay

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRelative(t *testing.T) {
	for _, tt := range []struct {
		seq, first uint32
		reference  int64
		want       int64
	}{
		{1000, 1000, 0, 0},
		{1100, 1000, 50, 100},
		{900, 1000, 50, -100},
		{5, 0xfffffff0, 0, 21},                         // the number wraps
		{0xfffffff0, 5, 0, -21},                        //
		{1000, 1000, 1 << 32, 1 << 32},                 // a stream of 4 GiB
		{2000, 1000, 3<<32 + 500, 3<<32 + 1000},        //
		{0xffffffff, 0, 1<<33 - 100, 1<<33 - 1},        //
		{10, 0, 1<<33 + 5, 1<<33 + 10},                 //
		{0x7fffffff, 0, 0, 0x7fffffff},                 // as far as can be told
		{0x80000001, 0, 0, -0x7fffffff},                //
		{1000 + 1<<30, 1000, 1<<40 + 7, 1<<40 + 1<<30}, //
	} {
		if got := relative(tt.seq, tt.first, tt.reference); got != tt.want {
			t.Errorf("relative(%d, %d, %d) = %d, want %d", tt.seq, tt.first, tt.reference, got, tt.want)
		}
	}
}

// A stream cut into segments that come in any order, again and overlapping, is put together; a model has all bytes at their places.
func TestAssemblerFindsTheStream(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		stream := make([]byte, 1+r.IntN(3000))
		for i := range stream {
			stream[i] = byte(r.Uint32())
		}
		a := assembler{fin: noFIN}
		var got []byte
		deliver := func(data []byte, zeros int) { got = appendZeros(append(got, data...), zeros) }
		have := make([]bool, len(stream)) // the model
		for range 400 {
			from := r.IntN(len(stream))
			n := 1 + r.IntN(min(200, len(stream)-from))
			a.add(int64(from), stream[from:from+n], n, deliver)
			for i := from; i < from+n; i++ {
				have[i] = true
			}
			want := 0
			for want < len(have) && have[want] {
				want++
			}
			if len(a.pieces) == maxPieces { // then it may have dropped some
				break
			}
			if !bytes.Equal(got, stream[:want]) || a.next != int64(want) {
				t.Fatalf("seed %d: %d bytes, next %d, want %d", seed, len(got), a.next, want)
			}
		}
	}
}

func TestAssemblerFillsWhatTheCaptureLost(t *testing.T) {
	var log []string
	deliver := func(data []byte, zeros int) { log = append(log, fmt.Sprintf("%s+%d", data, zeros)) }
	a := assembler{fin: noFIN}
	a.add(0, []byte("ab"), 2, deliver)
	a.add(6, []byte("gh"), 2, deliver)
	if at, n := a.proven(2, deliver); n != 0 {
		t.Errorf("nothing is missing: %d bytes at %d", n, at)
	}
	if at, n := a.proven(8, deliver); at != 2 || n != 4 { // up to what is there
		t.Errorf("proven(8) = %d, %d, want 2, 4", at, n)
	}
	a.add(8, []byte("i"), 4, deliver) // a packet that was cut off
	a.fin = 13
	if at, n := a.proven(14, deliver); at != 12 || n != 1 { // the FIN is no byte
		t.Errorf("proven(14) = %d, %d, want 12, 1", at, n)
	}
	if at, n := a.proven(15+maxLoss, deliver); n != 0 || at != 13 {
		t.Errorf("after the FIN: %d bytes at %d", n, at)
	}
	b := assembler{fin: noFIN}
	if _, n := b.proven(maxLoss+1, deliver); n != 0 {
		t.Errorf("a hole of more than %d bytes was filled by %d", maxLoss, n)
	}
	if diff := cmp.Diff([]string{"ab+0", "+4", "gh+0", "i+0", "+3", "+1"}, log); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if a.lost != 5 || !a.ended() {
		t.Errorf("lost %d, ended %v, want 5, true", a.lost, a.ended())
	}
}

func TestAssemblerIsBounded(t *testing.T) {
	a := assembler{fin: noFIN}
	deliver := func([]byte, int) { t.Error("nothing is in order") }
	for i := range 2 * maxPieces {
		a.add(int64(10+2*i), []byte{1}, 1, deliver)
	}
	b := assembler{fin: noFIN}
	for i := range 100 {
		b.add(int64(10+(64<<10)*i), make([]byte, 60<<10), 60<<10, deliver)
	}
	if len(a.pieces) != maxPieces || b.held > maxHeld {
		t.Errorf("%d pieces, %d bytes held, want at most %d and %d", len(a.pieces), b.held, maxPieces, maxHeld)
	}
}
