package tun

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The program is C, compiled by clang when it changes; the object is committed, so that building ztun needs no clang.
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel,bpfeb -no-global-types mark bpf/mark.c -- -O2 -Wall -Werror -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu

// filterName is the name of the tc filter, by which it is known again.
const filterName = "ztun_mark"

// How the ingress mark is set, see [Kernel.MarkedBy].
const (
	MarkedByBPF = "bpf"
	MarkedByNFT = "nft"
)

// setMark has the kernel mark what arrives for sockets of its own, see bpf/mark.c. Without it the answers to ztun's own
// connections would match the rule of inbound capture.
func (s *setup) setMark() error {
	refused := s.setBPFMark()
	if refused == nil {
		s.markedBy = MarkedByBPF
		return s.removeNFT()
	}
	if err := s.setNFTMark(); err != nil {
		return fmt.Errorf("ingress mark: bpf: %w; nft: %w", refused, err)
	}
	s.log.Warn("ingress mark set by nft because bpf was refused", "reason", refused)
	s.markedBy = MarkedByNFT
	return s.removeFilters()
}

func (s *setup) setBPFMark() error {
	if s.cfg.noBPF {
		return unix.EPERM
	}
	prog, err := loadMarkProgram(s.cfg.Marks)
	if err != nil {
		return err
	}
	defer prog.Close() // the filters hold it
	var done undo
	for _, i := range s.ifaces {
		if err := s.attachFilter(i, prog, &done); err != nil {
			return errors.Join(err, done.run())
		}
	}
	s.undo = append(s.undo, done...)
	return nil
}

func loadMarkProgram(m Marks) (*ebpf.Program, error) {
	// Kernels before 5.11 count programs and maps against RLIMIT_MEMLOCK; on others this does nothing.
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("memlock limit: %w", err)
	}
	spec, err := loadMark()
	if err != nil {
		return nil, fmt.Errorf("program %s: %w", filterName, err)
	}
	var variables markVariableSpecs
	if err := spec.Assign(&variables); err != nil {
		return nil, fmt.Errorf("program %s: %w", filterName, err)
	}
	if err := errors.Join(variables.OwnMark.Set(m.Own), variables.OwnMask.Set(m.OwnMask), variables.DeliverMark.Set(m.Deliver)); err != nil {
		return nil, fmt.Errorf("program %s: %w", filterName, err)
	}
	var programs markPrograms
	if err := spec.LoadAndAssign(&programs, nil); err != nil {
		return nil, fmt.Errorf("program %s: %w", filterName, err)
	}
	return programs.ZtunMark, nil
}

// attachFilter adds the filter to one interface, in front of those of others, or replaces the one of an earlier start.
func (s *setup) attachFilter(i Interface, prog *ebpf.Program, done *undo) error {
	if ok, err := s.hasClsact(i.Index); err != nil {
		return err
	} else if !ok {
		if err := s.addClsact(i, done); err != nil {
			return err
		}
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: i.Index,
			Parent:    netlink.HANDLE_MIN_INGRESS,
			Protocol:  unix.ETH_P_ALL,
			Priority:  0, // the kernel takes the one before the smallest in use
		},
		Fd:           prog.FD(),
		Name:         filterName,
		DirectAction: true,
	}
	old, err := s.filters(i.Index)
	if err != nil {
		return err
	}
	if len(old) > 0 {
		filter.Priority, filter.Handle = old[0].Priority, old[0].Handle
		if err := s.h.FilterReplace(filter); err != nil {
			return fmt.Errorf("replace filter %s on %s: %w", filterName, i.Name, err)
		}
		return nil // taken back with the rest of the earlier start
	}
	if err := s.h.FilterAdd(filter); err != nil {
		return fmt.Errorf("filter %s on %s: %w", filterName, i.Name, err)
	}
	done.add(func() error {
		added, err := s.filters(i.Index)
		for _, f := range added {
			err = errors.Join(err, s.h.FilterDel(f))
		}
		return err
	})
	return nil
}

// addClsact adds the qdisc below the filter. Adding any qdisc turns a queue length of 0, as veths in a pod have it, into
// 1000 (qdisc_create of net/sched/sch_api.c): that is put back.
func (s *setup) addClsact(i Interface, done *undo) error {
	before, err := s.h.LinkByIndex(i.Index)
	if err != nil {
		return fmt.Errorf("interface %s: %w", i.Name, err)
	}
	qdisc := clsact(i.Index)
	if err := s.h.QdiscAdd(qdisc); err != nil {
		return fmt.Errorf("clsact on %s: %w", i.Name, err)
	}
	done.add(func() error { return s.h.QdiscDel(qdisc) })
	after, err := s.h.LinkByIndex(i.Index)
	if err != nil {
		return fmt.Errorf("interface %s: %w", i.Name, err)
	}
	if length := before.Attrs().TxQLen; after.Attrs().TxQLen != length {
		if err := s.h.LinkSetTxQLen(after, length); err != nil {
			return fmt.Errorf("interface %s: txqueuelen %d: %w", i.Name, length, err)
		}
	}
	return nil
}

// filters lists the filters of ztun on one interface.
func (s *setup) filters(index int) (list []*netlink.BpfFilter, err error) {
	if ok, err := s.hasClsact(index); !ok || err != nil {
		return nil, err
	}
	all, err := s.h.FilterList(linkAt(index), netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return nil, fmt.Errorf("filters of %s: %w", s.linkName(index), err)
	}
	for _, f := range all {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Name == filterName {
			list = append(list, b)
		}
	}
	return list, nil
}

// removeFilters takes ztun's filters from every interface, and the qdisc below them where nobody else uses it and it was
// not there before.
func (s *setup) removeFilters() error {
	links, err := s.h.LinkList()
	if err != nil {
		return fmt.Errorf("links: %w", err)
	}
	var errs []error
	for _, link := range links {
		errs = append(errs, s.removeFilter(link.Attrs().Index, link.Attrs().Name))
	}
	return errors.Join(errs...)
}

func (s *setup) removeFilter(index int, name string) error {
	ours, err := s.filters(index)
	if err != nil || len(ours) == 0 {
		return err
	}
	for _, f := range ours {
		if err := s.h.FilterDel(f); err != nil {
			return fmt.Errorf("delete filter %s on %s: %w", filterName, name, err)
		}
	}
	if s.state != nil {
		if slices.Contains(s.state.Clsact, name) {
			return nil
		}
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
