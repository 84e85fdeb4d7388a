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

// SyncMTU gives the device the MTU that the captured interfaces call for now, see [Config], and returns it.
func (k *Kernel) SyncMTU() (mtu int, err error) {
	if k.isClosed() {
		return 0, os.ErrClosed
	}
	err = k.cfg.Netns.Do(func() error {
		largest := 0
		for _, i := range k.ifaces {
			link, err := netlink.LinkByIndex(i.Index)
			if errors.As(err, new(netlink.LinkNotFoundError)) {
				continue
			}
			if err != nil {
				return fmt.Errorf("tun: interface %s: %w", i.Name, err)
			}
			largest = max(largest, link.Attrs().MTU)
		}
		device, err := netlink.LinkByIndex(k.index)
		if err != nil {
			return fmt.Errorf("tun: device %s: %w", k.cfg.Name, err)
		}
		mtu = device.Attrs().MTU
		want := deviceMTU(&k.cfg, largest, k.HasIPv6())
		if largest == 0 || mtu == want {
			return nil
		}
		if err := netlink.LinkSetMTU(device, want); err != nil {
			return fmt.Errorf("tun: device %s: mtu %d: %w", k.cfg.Name, want, err)
		}
		mtu = want
		return nil
	})
	return mtu, err
}
