package tun

import (
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
)

// deviceMTU returns the MTU of the device when the largest of the captured interfaces is largest.
func deviceMTU(cfg *Config, largest int, ipv6 bool) int {
	if cfg.MTU != 0 {
		return cfg.MTU
	}
	if ipv6 {
		largest = max(largest, minMTU) // with less the device would have no IPv6
	}
	return min(largest, MaxPacket)
}

// SyncMTU gives the device the MTU that the captured interfaces call for now, see [Config], and returns it. What waits at
// [Kernel.Events] is taken.
func (k *Kernel) SyncMTU() (mtu int, err error) {
	if mtu, err = k.addrs.syncMTU(k); err != nil {
		return 0, fmt.Errorf("tun: device %s: %w", k.cfg.Name, err)
	}
	return mtu, nil
}

func (w *Addresses) syncMTU(k *Kernel) (mtu int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.h == nil {
		return 0, os.ErrClosed
	}
	_ = w.refresh() // stale still
	largest := 0
	for _, i := range k.ifaces {
		link, err := w.h.LinkByIndex(i.Index)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("interface %s: %w", i.Name, err)
		}
		largest = max(largest, link.Attrs().MTU)
	}
	device, err := w.h.LinkByIndex(k.index)
	if err != nil {
		return 0, err
	}
	mtu = device.Attrs().MTU
	want := deviceMTU(&k.cfg, largest, k.HasIPv6())
	if largest == 0 || mtu == want {
		return mtu, nil
	}
	if err := w.h.LinkSetMTU(device, want); err != nil {
		return 0, fmt.Errorf("mtu %d: %w", want, err)
	}
	return want, nil
}

// descriptor is that of the events.
func (w *Addresses) descriptor() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.h == nil {
		return -1
	}
	return w.events
}
