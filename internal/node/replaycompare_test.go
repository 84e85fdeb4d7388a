package node

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Records wait while the other run has open what began with their packet, and no longer.
func TestComparisonPairsByPacket(t *testing.T) {
	flow := func(packet, id uint64, class string) *ReplayFlow {
		return &ReplayFlow{ID: id, Class: class, began: packet}
	}
	question := func(packet, id uint64, proto, rcode string) *ReplayAnswer {
		return &ReplayAnswer{ID: id, Proto: proto, Rcode: rcode, By: "mesh", began: packet}
	}
	type record struct {
		side int
		r    ReplayRecord
	}
	for _, tt := range []struct {
		name    string
		records []record
		open    [2][]uint64
		want    []string
		waiting int
	}{
		{"alike under other ids", []record{{0, flow(7, 3, "mesh")}, {1, flow(7, 1, "mesh")}}, [2][]uint64{}, nil, 0},
		{"not alike", []record{{0, flow(7, 3, "mesh")}, {1, flow(7, 1, "dropped")}}, [2][]uint64{}, []string{"3 mesh, 1 dropped"}, 0},
		{"the same id, another packet", []record{{0, flow(7, 1, "mesh")}, {1, flow(9, 1, "mesh")}}, [2][]uint64{}, []string{"1 mesh, nothing", "nothing, 1 mesh"}, 0},
		{"the other is open", []record{{0, flow(7, 3, "mesh")}}, [2][]uint64{1: {7}}, nil, 1},
		{"another is open", []record{{0, flow(7, 3, "mesh")}}, [2][]uint64{1: {8}}, []string{"3 mesh, nothing"}, 0},
		{"questions of a flow in their order", []record{
			{0, question(7, 3, "tcp", "NOERROR")}, {0, question(7, 3, "tcp", "NXDOMAIN")}, {1, question(7, 1, "tcp", "NOERROR")}, {1, question(7, 1, "tcp", "SERVFAIL")},
		}, [2][]uint64{{7}, {7}}, []string{"NXDOMAIN, by mesh, SERVFAIL, by mesh"}, 1},
		{"a question that only one has", []record{
			{0, question(7, 3, "tcp", "NOERROR")}, {0, flow(7, 3, "dns")}, {1, flow(7, 1, "dns")},
		}, [2][]uint64{}, []string{"NOERROR, by mesh, nothing"}, 0},
	} {
		t.Run("T2/"+tt.name, func(t *testing.T) {
			var got []string
			text := func(r ReplayRecord) string {
				if f, ok := r.(*ReplayFlow); ok {
					return fmt.Sprint(f.ID, " ", Outcome(f))
				}
				return Outcome(r)
			}
			c := newComparison(func(a, b ReplayRecord) error {
				got = append(got, text(a)+", "+text(b))
				return nil
			})
			for side := range c.open {
				c.open[side] = func(packet uint64) bool { return slices.Contains(tt.open[side], packet) }
			}
			for _, x := range tt.records {
				c.take(x.side, x.r)
			}
			if err := c.settle(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || len(c.waiting) != tt.waiting {
				t.Errorf("%d wait, want %d (-want +got):\n%s", len(c.waiting), tt.waiting, diff)
			}
			if err := c.end(); err != nil || len(c.waiting) > 0 {
				t.Errorf("at the end %d wait, %v", len(c.waiting), err)
			}
		})
	}
}
