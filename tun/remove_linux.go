package tun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Unenrol ends the capture: everything is taken back in the reverse order, the sysctls get their earlier values, and the
// device is deleted and closed. The application's traffic flows as if ztun had never been. It is not interrupted by ctx
// once it has begun. After an error it may be called again, until Close.
func (k *Kernel) Unenrol(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if k.isClosed() {
		return os.ErrClosed
	}
	s := &setup{cfg: k.cfg, log: k.cfg.Log, fd: -1, state: k.state}
	err := k.cfg.Netns.Do(func() error {
		closeAll, err := s.connect()
		if err != nil {
			return err
		}
		defer closeAll()
		if s.link, err = findDevice(s.h, k.cfg.Name); err != nil {
			return err
		}
		if s.link != nil && s.link.Attrs().Index != k.index {
			return fmt.Errorf("device %s: is another one by now; use Remove", k.cfg.Name)
		}
		return s.remove()
	})
	if err != nil {
		return fmt.Errorf("tun: netns %s: unenrol: %w", k.cfg.Netns, err)
	}
	return k.Close()
}

// Remove takes away what a dead process has left in cfg.Netns, as [Kernel.Unenrol] does for a living one. It needs Netns,
// Name and StateDir of cfg only. It does nothing where there is nothing, and refuses to disturb a living process, which it
// names. Without the file of the earlier values sysctls stay as they are.
func Remove(ctx context.Context, cfg Config) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if cfg.UID == "" {
		cfg.UID = "-"
	}
	if cfg.Marks == (Marks{}) {
		cfg.Marks = Marks{Own: 1, Deliver: 2} // not used
	}
	cfg.Steering = nil
	if err := cfg.complete(); err != nil {
		return err
	}
	s := &setup{cfg: cfg, log: cfg.Log, fd: -1}
	if err := cfg.Netns.Do(s.removeLeftovers); err != nil {
		return fmt.Errorf("tun: netns %s: remove: %w", cfg.Netns, err)
	}
	return nil
}

func (s *setup) removeLeftovers() (err error) {
	closeAll, err := s.connect()
	if err != nil {
		return err
	}
	defer closeAll()
	if s.link, err = findDevice(s.h, s.cfg.Name); err != nil {
		// Not ours, and so none of our business. What is ours is taken away beside it.
		s.log.Warn("device left alone", "reason", err)
	}
	if s.link != nil {
		fd, err := s.attach(true) // proves that the owner is dead, and keeps others out meanwhile
		if err != nil {
			return err
		}
		defer unix.Close(fd)
	}
	path := statePath(&s.cfg)
	if s.state, err = loadState(path); err != nil {
		return err
	}
	if s.state != nil && s.link == nil {
		// Without the device, are these values of this netns? See keepState.
		if s.leftovers, err = s.hasOurRules(); err != nil {
			return err
		}
		if !s.leftovers {
			return removeState(path)
		}
	}
	return s.remove()
}

// cutDelivered ends the application's sockets whose other end is a socket of ztun's, where flows were steered: without the rules
// what they send next would go to the network, in clear.
func (s *setup) cutDelivered() error {
	delivered, err := s.delivered()
	if err != nil || delivered == nil {
		return err
	}
	var cut []diagSocket
	if err := eachSocket(func(d *diagSocket) {
		if delivered(d) {
			cut = append(cut, *d)
		}
	}); err != nil {
		return fmt.Errorf("sockets: %w", err)
	}
	for _, d := range cut {
		if err := diag(nil).destroy(&d); errors.Is(err, unix.EOPNOTSUPP) {
			s.log.Warn("connections that ztun carried are left to the network: the kernel cannot end them", "sockets", len(cut))
			break
		} else if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("end socket from %s to %s: %w", d.local, d.remote, err)
		}
	}
	return nil
}

// delivered returns what tells them: their mark, with tc what they store, or with nft that their flow is in a set. nil means that no flow was steered.
func (s *setup) delivered() (func(*diagSocket) bool, error) {
	if s.link == nil {
		return nil, nil
	}
	ours, err := s.filtersOf(deviceFilter, s.link.Attrs().Index)
	if err != nil {
		return nil, err
	}
	left, err := s.leftStorage()
	if err != nil {
		return nil, err
	}
	ways, err := left.ways()
	if err = errors.Join(err, left.close()); err != nil {
		return nil, err
	}
	carried := nftCarried()
	if len(ours) == 0 && len(carried) == 0 {
		return nil, nil
	}
	rules, err := s.h.RuleList(unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	at := slices.IndexFunc(rules, func(r netlink.Rule) bool {
		return r.Protocol == protocol && r.Priority == prefDelivery && r.Mask != nil
	})
	return func(d *diagSocket) bool {
		return at >= 0 && d.info.Mark&*rules[at].Mask == rules[at].Mark || ways[socketAddrs{d.local, d.remote}] == ToListener || carried[keyOf(0, d.local, d.remote)]
	}, nil
}

func (s *setup) hasOurRules() (bool, error) {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := s.h.RuleList(family)
		if err != nil {
			return false, fmt.Errorf("rules: %w", err)
		}
		if slices.ContainsFunc(rules, func(r netlink.Rule) bool { return r.Protocol == protocol }) {
			return true, nil
		}
	}
	return false, nil
}

// remove takes everything of ztun's away, in the reverse order of run. It goes by what is there, not by what was done, so
// that it works for any start, however far that came.
func (s *setup) remove() error {
	if err := s.cutDelivered(); err != nil {
		return err
	}
	// Before the rules: without them nothing gives the application's connections the mark that it asks for.
	if err := s.removeFilters(guardFilter); err != nil {
		return err
	}
	families := []int{unix.AF_INET, unix.AF_INET6}
	for _, family := range families {
		if err := s.removeRules(family); err != nil {
			return err
		}
	}
	var errs []error
	for _, family := range families {
		errs = append(errs, s.removeRoutes(family))
	}
	errs = append(errs, s.removeFilters(filters...), s.removeNFT())
	if s.state != nil {
		errs = append(errs, s.proc.restore(s.state.Sysctls))
	} else if s.link != nil {
		s.log.Warn("sysctls stay as they are: the earlier values are not known")
	}
	if err := errors.Join(errs...); err != nil {
		return err // the device stays: it is what tells a later Remove that there is something left
	}
	if s.link != nil {
		if err := s.h.LinkDel(s.link); err != nil {
			return fmt.Errorf("delete device %s: %w", s.cfg.Name, err)
		}
	}
	return removeState(statePath(&s.cfg))
}
