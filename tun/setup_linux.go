package tun

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A setup is one run of Open, Unenrol or Remove. All its methods run on a thread in the netns.
type setup struct {
	cfg  Config
	log  *slog.Logger
	h    *netlink.Handle
	proc *procfs
	undo undo

	// what was found
	link         netlink.Link // the device; nil until it exists
	loopback     int          // index
	linkNames    []string     // all but the device
	ifaces       []Interface  // captured
	ordered      bool         // the one with the default route is first
	addrs        []netip.Addr // of the pod
	families     []int        // AF_INET, AF_INET6: those that are captured
	src          map[int]netip.Addr
	mtu          int  // the largest of ifaces, then that of the device
	leftovers    bool // an earlier start has set up something
	clsactBefore []string

	// what was done
	fd       int
	adopted  bool
	state    *state
	before   []sysctl
	markedBy string
	watch    *Addresses
	diag     diag
	cookie   uint64
	steerer  netnsSteerer // nil without Config.Steering
	nft      *nftNetns    // the same, by nft
}

func (s *setup) has(family int) bool { return slices.Contains(s.families, family) }

// connect opens what every step needs.
func (s *setup) connect() (closeAll func(), err error) {
	if s.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if s.proc, err = openProcfs(); err != nil {
		s.h.Close()
		return nil, err
	}
	return func() { s.proc.close(); s.h.Close() }, nil
}

// run does all of Open. The order is such that at every moment packets go where they went before, or where they should,
// or nowhere.
func (s *setup) run(ctx context.Context) (err error) {
	closeAll, err := s.connect()
	if err != nil {
		return err
	}
	defer closeAll()
	defer func() {
		if err != nil {
			err = errors.Join(err, s.undo.run())
		}
	}()
	steps := []func() error{
		s.inspect, s.findCookie, s.openDevice, s.keepState, s.configureDevice, s.setSysctls, s.setMark, s.steer,
		s.eachFamily(s.setRoutes), s.enrolRunning, s.eachFamily(s.setRules), s.enrolRunning, s.setGuard, s.watchOlder,
		func() error { return s.selfCheck(ctx) }, s.watchAddresses, s.openDiag,
	}
	for _, step := range steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if !s.has(unix.AF_INET6) {
		s.log.Info("IPv6 is not captured: it is off in the netns, or in the configuration")
	}
	return nil
}

func (s *setup) eachFamily(f func(family int) error) func() error {
	return func() error {
		for _, family := range s.families {
			if err := f(family); err != nil {
				return err
			}
		}
		return nil
	}
}
