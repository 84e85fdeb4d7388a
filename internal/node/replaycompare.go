package node

import (
	"maps"
	"slices"
)

// A comparison pairs the records of two runs of the same packets by the packet with which they began: their ids differ where the
// runs do not serve the same pods. A packet begins one flow, or is one question, at most; the questions of a flow are paired in their
// order. What only one of the runs has is told as soon as the other has nothing open that began with its packet, so that no more
// waits than is open.
type comparison struct {
	differ  func(a, b ReplayRecord) error
	open    [2]func(packet uint64) bool // whether a run has yet to tell of something that began with a packet
	waiting map[uint64]*compared        // by packet
	fresh   []uint64                    // packets of records that came since settle
}

// A compared is what the two runs have told of a packet and that has not been paired.
type compared struct {
	flows     [2]ReplayRecord
	questions [2][]ReplayRecord
}

func newComparison(differ func(a, b ReplayRecord) error) *comparison {
	return &comparison{differ: differ, waiting: make(map[uint64]*compared)}
}

// take keeps a record of one of the runs until settle.
func (c *comparison) take(side int, r ReplayRecord) {
	packet := r.packet()
	x := c.waiting[packet]
	if x == nil {
		x = new(compared)
		c.waiting[packet] = x
	}
	if _, ok := r.(*ReplayAnswer); ok {
		x.questions[side] = append(x.questions[side], r)
	} else {
		x.flows[side] = r
	}
	c.fresh = append(c.fresh, packet)
}

// settle compares what can be compared, once both runs have played the same packets.
func (c *comparison) settle() error {
	slices.Sort(c.fresh)
	for _, packet := range slices.Compact(c.fresh) {
		if err := c.look(packet); err != nil {
			return err
		}
	}
	c.fresh = c.fresh[:0]
	return nil
}

func (c *comparison) look(packet uint64) error {
	x := c.waiting[packet]
	over := !c.open[0](packet) && !c.open[1](packet)
	for len(x.questions[0]) > 0 && len(x.questions[1]) > 0 || over && len(x.questions[0])+len(x.questions[1]) > 0 {
		var pair [2]ReplayRecord
		for side, list := range x.questions {
			if len(list) > 0 {
				pair[side], x.questions[side] = list[0], list[1:]
			}
		}
		if err := c.compare(pair[0], pair[1]); err != nil {
			return err
		}
	}
	if !over {
		return nil
	}
	delete(c.waiting, packet)
	return c.compare(x.flows[0], x.flows[1])
}

// compare tells of two records that are not alike, or of one that is alone; both may be nil.
func (c *comparison) compare(a, b ReplayRecord) error {
	switch {
	case a == nil && b == nil, a != nil && b != nil && a.outcome() == b.outcome():
		return nil
	}
	return c.differ(a, b)
}

// end compares the rest, once both runs have ended.
func (c *comparison) end() error {
	c.open = [2]func(uint64) bool{func(uint64) bool { return false }, func(uint64) bool { return false }}
	c.fresh = slices.Collect(maps.Keys(c.waiting))
	return c.settle()
}
