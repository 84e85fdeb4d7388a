package tun

import (
	"testing"

	"github.com/cilium/ebpf"
)

// The kernel takes 64 programs in a netns. One that it does not take is an error, and leaves nothing that is closed later.
func TestNetnsLookupThatIsNotTaken(t *testing.T) {
	t.Parallel()
	l := newLab(t, false)
	spec, err := loadSteer()
	must(t, err)
	var loaded struct {
		Lookup *ebpf.Program `ebpf:"ztun_lookup"`
	}
	must(t, spec.LoadAndAssign(&loaded, nil))
	defer loaded.Lookup.Close()
	must(t, l.pod.Do(func() error {
		for n := range 65 {
			taken := new(listenerLookup)
			err := taken.attachLookup(loaded.Lookup)
			t.Cleanup(func() { must(t, taken.close()) })
			if err != nil {
				if n < 64 {
					return err
				}
				return nil
			}
		}
		t.Error("65 programs were taken, want the last refused")
		return nil
	}))
}
