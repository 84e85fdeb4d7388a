package tun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	defaultTunPath = "/dev/net/tun"

	// aliasPrefix begins the alias of a device of ztun.
	aliasPrefix = "ztun "

	// txQueueLen is in packets. 5 000 connects at once lose nothing with it (measured); the default is 500.
	txQueueLen = 8192

	// addrGenNone is IN6_ADDR_GEN_MODE_NONE of include/uapi/linux/if_link.h: no link-local address, and so no multicast
	// chatter of the kernel into the device.
	addrGenNone = 1
)

// attach creates the device, or attaches to it when it exists, and returns its descriptor. The calling thread is in the
// netns. A device that is created is gone with the descriptor until it is made persistent.
func (s *setup) attach(exists bool) (fd int, err error) {
	path := s.cfg.tunPath
	if path == "" {
		path = defaultTunPath
	}
	fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return -1, fmt.Errorf("open %s: %w; load the tun module, or mount the device into the container", path, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return -1, fmt.Errorf("open %s: %w; run as root, and allow the device (c 10:200) to the container", path, err)
	case err != nil:
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	ifr, err := unix.NewIfreq(s.cfg.Name)
	if err != nil {
		return -1, fmt.Errorf("device %s: %w", s.cfg.Name, err)
	}
	flags := uint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if !exists {
		flags |= unix.IFF_TUN_EXCL
	}
	ifr.SetUint16(flags)
	switch err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); {
	case errors.Is(err, unix.EBUSY):
		return -1, s.busy()
	case errors.Is(err, unix.EPERM):
		return -1, fmt.Errorf("device %s: TUNSETIFF: %w; needs CAP_NET_ADMIN", s.cfg.Name, err)
	case err != nil:
		return -1, fmt.Errorf("device %s: TUNSETIFF: %w", s.cfg.Name, err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6); err != nil {
		return -1, fmt.Errorf("device %s: TUNSETOFFLOAD: %w", s.cfg.Name, err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, Headroom); err != nil {
		return -1, fmt.Errorf("device %s: TUNSETVNETHDRSZ: %w", s.cfg.Name, err)
	}
	return fd, nil
}

// openDevice makes the device, or adopts it, and makes it last.
func (s *setup) openDevice() error {
	adopted := s.link != nil
	fd, err := s.attach(adopted)
	if err != nil {
		return err
	}
	s.fd = fd
	s.undo.add(func() error { s.fd = -1; return unix.Close(fd) })
	if s.link, err = s.h.LinkByName(s.cfg.Name); err != nil {
		return fmt.Errorf("device %s: %w", s.cfg.Name, err)
	}
	if adopted {
		s.log.Info("device adopted", "device", s.cfg.Name, "alias", s.link.Attrs().Alias)
	}
	s.adopted = adopted
	return nil
}

// configureDevice gives the device its properties and brings it up.
func (s *setup) configureDevice() error {
	name := s.cfg.Name
	if s.has(unix.AF_INET6) {
		if err := s.h.LinkSetIP6AddrGenMode(s.link, addrGenNone); err != nil {
			return fmt.Errorf("device %s: addrgenmode none: %w", name, err)
		}
	}
	if err := s.h.LinkSetAlias(s.link, alias(&s.cfg)); err != nil {
		return fmt.Errorf("device %s: alias: %w", name, err)
	}
	if err := s.h.LinkSetTxQLen(s.link, txQueueLen); err != nil {
		return fmt.Errorf("device %s: txqueuelen %d: %w", name, txQueueLen, err)
	}
	if err := s.h.LinkSetMTU(s.link, s.mtu); err != nil {
		return fmt.Errorf("device %s: mtu %d: %w", name, s.mtu, err)
	}
	if err := unix.IoctlSetInt(s.fd, unix.TUNSETPERSIST, 1); err != nil {
		return fmt.Errorf("device %s: TUNSETPERSIST: %w", name, err)
	}
	if !s.adopted {
		fd := s.fd
		s.undo.add(func() error {
			if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 0); err != nil {
				return fmt.Errorf("device %s: TUNSETPERSIST 0: %w", name, err)
			}
			return nil
		})
	}
	if err := s.h.LinkSetUp(s.link); err != nil {
		return fmt.Errorf("device %s: up: %w", name, err)
	}
	return nil
}

func alias(cfg *Config) string {
	return fmt.Sprintf("%s%s %d", aliasPrefix, cfg.UID, cfg.Generation)
}

// findDevice returns the device of ztun, nil when there is none, or an error naming a foreign one.
func findDevice(h *netlink.Handle, name string) (netlink.Link, error) {
	link, err := h.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", name, err)
	}
	if a := link.Attrs(); !isTUN(link) || !strings.HasPrefix(a.Alias, aliasPrefix) {
		return nil, fmt.Errorf("device %s: exists and is not ztun's (%s, alias %q); rename or remove it", name, link.Type(), a.Alias)
	}
	return link, nil
}

func isTUN(link netlink.Link) bool {
	t, ok := link.(*netlink.Tuntap)
	return ok && t.Mode == netlink.TUNTAP_MODE_TUN
}

// MTU implements [Device].
func (k *Kernel) MTU() (mtu int, err error) {
	if k.isClosed() {
		return 0, os.ErrClosed
	}
	err = k.cfg.Netns.Do(func() error {
		link, err := netlink.LinkByIndex(k.index)
		if err != nil {
			return fmt.Errorf("tun: device %s: %w", k.cfg.Name, err)
		}
		mtu = link.Attrs().MTU
		return nil
	})
	return mtu, err
}

// Read implements [Device]: one read(2) for each packet. A packet longer than its buffer is dropped and counted; with
// [Headroom] and [MaxPacket] bytes in each buffer there is none.
func (k *Kernel) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	if offset < Headroom {
		return 0, errOffset
	}
	k.mu.RLock() // Close waits for it: the descriptor must not become another's meanwhile
	defer k.mu.RUnlock()
	if k.fd < 0 {
		return 0, os.ErrClosed
	}
	n := 0
	for n < len(bufs) && n < len(sizes) {
		b := bufs[n][offset-Headroom:]
		got, err := unix.Read(k.fd, b)
		switch {
		case err == nil && got > Headroom:
			if got == len(b) && isCut(b[Headroom:]) {
				k.tooLong.Add(1)
				continue
			}
			sizes[n] = got - Headroom
			n++
		case err == nil, errors.Is(err, unix.EINTR):
		case n > 0:
			return n, nil
		case errors.Is(err, unix.EAGAIN):
			return 0, ErrAgain
		default:
			return 0, fmt.Errorf("tun: device %s: read: %w", k.cfg.Name, err)
		}
	}
	return n, nil
}

// isCut reports whether pkt, which fills its buffer, is the beginning of a longer packet: the kernel returns as much as
// fits and says no more about it.
func isCut(pkt []byte) bool {
	switch {
	case len(pkt) >= 20 && pkt[0]>>4 == 4:
		return int(pkt[2])<<8|int(pkt[3]) > len(pkt)
	case len(pkt) >= 40 && pkt[0]>>4 == 6:
		return 40+(int(pkt[4])<<8|int(pkt[5])) > len(pkt)
	}
	return true // not even an IP header fits
}

// Write implements [Device]: one write(2) for each packet.
func (k *Kernel) Write(bufs [][]byte, offset int) (int, error) {
	if offset < Headroom {
		return 0, errOffset
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.fd < 0 {
		return 0, os.ErrClosed
	}
	for n := 0; n < len(bufs); {
		_, err := unix.Write(k.fd, bufs[n][offset-Headroom:])
		switch {
		case err == nil:
			n++
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS):
			k.full.Add(1)
			n++
		default:
			return n, fmt.Errorf("tun: device %s: write: %w", k.cfg.Name, err)
		}
	}
	return len(bufs), nil
}

// A pollfd wait of this many rounds of this many milliseconds is left to the kernel to notice the carrier of an adopted
// device: linkwatch handles such events at most once a second.
const (
	carrierRounds = 300
	carrierWaitMS = 10
)

// awaitCarrier waits until the routes of a device without reader are in use again. Asking for the link makes newer
// kernels (6.8) do the outstanding work at once.
func (s *setup) awaitCarrier(ctx context.Context) error {
	for range carrierRounds {
		link, err := s.h.LinkByIndex(s.link.Attrs().Index)
		if err != nil {
			return fmt.Errorf("device %s: %w", s.cfg.Name, err)
		}
		down, err := s.routesDown()
		if err != nil {
			return err
		}
		if link.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 && !down {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := unix.Poll(nil, carrierWaitMS); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("device %s: %w", s.cfg.Name, err)
		}
	}
	return fmt.Errorf("device %s: no carrier after %d ms although it is attached", s.cfg.Name, carrierRounds*carrierWaitMS)
}

// devNetns returns the namespace of the device behind a TUN descriptor.
func devNetns(fd int) (dev, ino uint64, err error) {
	ns, err := unix.IoctlRetInt(fd, unix.TUNGETDEVNETNS) // Linux 5.2
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(ns)
	var stat unix.Stat_t
	if err := unix.Fstat(ns, &stat); err != nil {
		return 0, 0, err
	}
	return stat.Dev, stat.Ino, nil
}
