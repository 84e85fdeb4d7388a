package node

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"ztun.dev/ztun/tun"
)

// Who may set a mark and knows it could leave the mesh: no two nodes have the same, but a node's outlive its process.
func TestMarksAreDrawnOncePerNode(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)).Uint64
	seen := make(map[tun.Marks]bool)
	for range 100 {
		dir := t.TempDir()
		m, err := loadMarks(dir, random)
		if err != nil {
			t.Fatal(err)
		}
		if m.Own == 0 || m.Deliver == 0 || m.Own == m.Deliver || (m.Own|m.Deliver)&^uint32(tun.DefaultMarkMask) != 0 || m.OwnMask != tun.DefaultMarkMask {
			t.Errorf("marks %+v", m)
		}
		if seen[m] {
			t.Errorf("marks %+v of two nodes", m)
		}
		seen[m] = true
		if again, err := loadMarks(dir, random); err != nil || again != m {
			t.Errorf("the next process has %+v, %v, want %+v", again, err, m)
		}
	}
}

func TestMarksThatAreNone(t *testing.T) {
	numbers := []uint64{0, 1, 1 << 32, 5<<32 | 5, 0xfffff000_fffff000, 7<<32 | 6} // none, one, the same, outside the mask
	m, err := loadMarks(t.TempDir(), func() (n uint64) {
		n, numbers = numbers[0], numbers[1:]
		return n
	})
	if want := (tun.Marks{Own: 6, Deliver: 7, OwnMask: tun.DefaultMarkMask}); err != nil || m != want {
		t.Errorf("loadMarks = %+v, %v, want %+v", m, err, want)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "marks.json"), []byte(`{"Own":5,"OwnMask":4095,"Deliver":5}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if m, err := loadMarks(dir, rand.Uint64); err == nil {
		t.Errorf("loadMarks of a damaged file = %+v, want an error", m)
	}
}
