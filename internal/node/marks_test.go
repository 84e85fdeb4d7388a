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
		if m.Own == 0 || m.Deliver == 0 || m.Own == m.Deliver || (m.Own|m.Deliver)&^uint32(tun.DefaultMarkMask) != 0 || m.OwnMask != tun.DefaultMarkMask ||
			m.Secret == 0 || m.Secret&(m.OwnMask|tun.ApplicationMark) != 0 {
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
	numbers := []uint64{0, 1, 1 << 32, 5<<32 | 5, 0xfffff000_fffff000, 7<<32 | 6, 0x80000fff, 0x8abcdfff} // none, one, the same, outside the mask; bits that are not the secret's
	m, err := loadMarks(t.TempDir(), func() (n uint64) {
		n, numbers = numbers[0], numbers[1:]
		return n
	})
	if want := (tun.Marks{Own: 6, Deliver: 7, OwnMask: tun.DefaultMarkMask, Secret: 0x0abcd000}); err != nil || m != want {
		t.Errorf("loadMarks = %+v, %v, want %+v", m, err, want)
	}
	dir := t.TempDir()
	// A file of an earlier version gets its secret, which stays.
	if err := os.WriteFile(filepath.Join(dir, "marks.json"), []byte(`{"Own":5,"OwnMask":4095,"Deliver":6}`), 0o600); err != nil {
		t.Fatal(err)
	}
	first, err := loadMarks(dir, rand.Uint64)
	if err != nil || first.Own != 5 || first.Deliver != 6 || first.Secret == 0 {
		t.Errorf("loadMarks without a secret = %+v, %v", first, err)
	}
	if again, err := loadMarks(dir, rand.Uint64); err != nil || again != first {
		t.Errorf("the next process has %+v, %v, want %+v", again, err, first)
	}
	if err := os.WriteFile(filepath.Join(dir, "marks.json"), []byte(`{"Own":5,"OwnMask":4095,"Deliver":5}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if m, err := loadMarks(dir, rand.Uint64); err == nil {
		t.Errorf("loadMarks of a damaged file = %+v, want an error", m)
	}
	if err := os.WriteFile(filepath.Join(dir, "marks.json"), []byte(`{"Own":5,"OwnMask":4095,"Deliver":6,"Secret":4095}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if m, err := loadMarks(dir, rand.Uint64); err == nil {
		t.Errorf("loadMarks of a secret that is in the mask = %+v, want an error", m)
	}
}
