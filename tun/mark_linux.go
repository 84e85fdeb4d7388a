package tun

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// The program is C, compiled by clang when it changes; the object is committed, so that building ztun needs no clang.
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel,bpfeb -no-global-types mark bpf/mark.c -- -O2 -Wall -Werror -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu

// How the ingress mark is set, see [Kernel.MarkedBy].
const (
	MarkedByBPF = "bpf"
	MarkedByNFT = "nft"
)

// setMark has the kernel mark what arrives for sockets of its own, see bpf/mark.c. Without it the answers to ztun's own
// connections would match the rule of inbound capture.
func (s *setup) setMark() error {
	if s.cfg.Steering != nil {
		return s.cfg.Steering.backend.mark(s)
	}
	// Of an earlier start that steered: the netstack's segments have no mark.
	if err := s.removeFilters(guardFilter, deviceFilter, egressFilter); err != nil {
		return err
	}
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
	return s.removeFilters(ingressFilter)
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
		if err := s.attachFilter(ingressFilter, i.Index, prog, &done); err != nil {
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
		return nil, fmt.Errorf("program %s: %w", ingressFilter.name, err)
	}
	var variables markVariableSpecs
	if err := spec.Assign(&variables); err != nil {
		return nil, fmt.Errorf("program %s: %w", ingressFilter.name, err)
	}
	if err := errors.Join(variables.OwnMark.Set(m.Own), variables.OwnMask.Set(m.OwnMask), variables.DeliverMark.Set(m.Deliver)); err != nil {
		return nil, fmt.Errorf("program %s: %w", ingressFilter.name, err)
	}
	var programs markPrograms
	if err := spec.LoadAndAssign(&programs, nil); err != nil {
		return nil, fmt.Errorf("program %s: %w", ingressFilter.name, err)
	}
	return programs.ZtunMark, nil
}
