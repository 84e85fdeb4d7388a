package tun

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A filter is a place for a program of tc, by which ztun's are known again.
type filter struct {
	name   string
	parent uint32 // ingress or egress
}

// ztun's filters.
var (
	ingressFilter = filter{"ztun_mark", netlink.HANDLE_MIN_INGRESS}   // of a captured interface
	guardFilter   = filter{"ztun_guard", netlink.HANDLE_MIN_EGRESS}   // of a captured interface
	deviceFilter  = filter{"ztun_device", netlink.HANDLE_MIN_INGRESS} // of the device
	egressFilter  = filter{"ztun_egress", netlink.HANDLE_MIN_EGRESS}  // of the device

	filters = []filter{guardFilter, deviceFilter, egressFilter, ingressFilter} // in the order in which they are removed
)

// attachFilter adds a filter to one interface, in front of those of others, or replaces the one of an earlier start.
func (s *setup) attachFilter(f filter, index int, prog *ebpf.Program, done *undo) error {
	name := s.linkName(index)
	if ok, err := s.hasClsact(index); err != nil {
		return err
	} else if !ok {
		if err := s.addClsact(index, done); err != nil {
			return err
		}
	}
	added := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index,
			Parent:    f.parent,
			Protocol:  unix.ETH_P_ALL,
			Priority:  0, // the kernel takes the one before the smallest in use
		},
		Fd:           prog.FD(),
		Name:         f.name,
		DirectAction: true,
	}
	old, err := s.filtersOf(f, index)
	if err != nil {
		return err
	}
	if len(old) > 0 {
		added.Priority, added.Handle = old[0].Priority, old[0].Handle
		if err := s.h.FilterReplace(added); err != nil {
			return fmt.Errorf("replace filter %s on %s: %w", f.name, name, err)
		}
		return nil // taken back with the rest of the earlier start
	}
	if err := s.h.FilterAdd(added); err != nil {
		return fmt.Errorf("filter %s on %s: %w", f.name, name, err)
	}
	done.add(func() error { return s.deleteFilter(f, index) })
	return nil
}

func (s *setup) deleteFilter(f filter, index int) error {
	ours, err := s.filtersOf(f, index)
	for _, o := range ours {
		if err := s.h.FilterDel(o); err != nil {
			return fmt.Errorf("delete filter %s on %s: %w", f.name, s.linkName(index), err)
		}
	}
	return err
}

// addClsact adds the qdisc below the filters. Adding any qdisc turns a queue length of 0, as veths in a pod have it, into
// 1000 (qdisc_create of net/sched/sch_api.c): that is put back.
func (s *setup) addClsact(index int, done *undo) error {
	before, err := s.h.LinkByIndex(index)
	if err != nil {
		return fmt.Errorf("interface %d: %w", index, err)
	}
	name := before.Attrs().Name
	qdisc := clsact(index)
	if err := s.h.QdiscAdd(qdisc); err != nil {
		return fmt.Errorf("clsact on %s: %w", name, err)
	}
	done.add(func() error { return s.h.QdiscDel(qdisc) })
	after, err := s.h.LinkByIndex(index)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	if length := before.Attrs().TxQLen; after.Attrs().TxQLen != length {
		if err := s.h.LinkSetTxQLen(after, length); err != nil {
			return fmt.Errorf("interface %s: txqueuelen %d: %w", name, length, err)
		}
	}
	return nil
}

// filtersOf lists what there is of f on one interface.
func (s *setup) filtersOf(f filter, index int) (list []*netlink.BpfFilter, err error) {
	if ok, err := s.hasClsact(index); !ok || err != nil {
		return nil, err
	}
	all, err := s.h.FilterList(linkAt(index), f.parent)
	if err != nil {
		return nil, fmt.Errorf("filters of %s: %w", s.linkName(index), err)
	}
	for _, other := range all {
		if b, ok := other.(*netlink.BpfFilter); ok && b.Name == f.name {
			list = append(list, b)
		}
	}
	return list, nil
}

// ourFilters lists all filters of ztun on one interface.
func (s *setup) ourFilters(index int) (list []*netlink.BpfFilter, err error) {
	for _, f := range filters {
		ours, err := s.filtersOf(f, index)
		if err != nil {
			return nil, err
		}
		list = append(list, ours...)
	}
	return list, nil
}

// removeFilters takes the given filters from every interface, and the qdisc below them where nobody else uses it and it was
// not there before.
func (s *setup) removeFilters(list ...filter) error {
	links, err := s.h.LinkList()
	if err != nil {
		return fmt.Errorf("links: %w", err)
	}
	var errs []error
	for _, link := range links {
		errs = append(errs, s.removeFiltersOf(link.Attrs().Index, link.Attrs().Name, list))
	}
	return errors.Join(errs...)
}

func (s *setup) removeFiltersOf(index int, name string, list []filter) error {
	found := false
	for _, f := range list {
		ours, err := s.filtersOf(f, index)
		if err != nil {
			return err
		}
		for _, o := range ours {
			found = true
			if err := s.h.FilterDel(o); err != nil {
				return fmt.Errorf("delete filter %s on %s: %w", f.name, name, err)
			}
		}
	}
	if !found || s.state != nil && slices.Contains(s.state.Clsact, name) {
		return nil
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		rest, err := s.h.FilterList(linkAt(index), parent)
		if err != nil || len(rest) > 0 {
			return err
		}
	}
	if err := s.h.QdiscDel(clsact(index)); err != nil {
		return fmt.Errorf("delete clsact on %s: %w", name, err)
	}
	return nil
}

func (s *setup) hasClsact(index int) (bool, error) {
	qdiscs, err := s.h.QdiscList(linkAt(index))
	if err != nil {
		return false, fmt.Errorf("qdiscs of %s: %w", s.linkName(index), err)
	}
	for _, q := range qdiscs {
		if q.Attrs().Parent == netlink.HANDLE_CLSACT && q.Attrs().LinkIndex == index {
			return true, nil
		}
	}
	return false, nil
}

func clsact(index int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}}
}

func linkAt(index int) netlink.Link {
	return &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
}
