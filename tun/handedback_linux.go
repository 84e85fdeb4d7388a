package tun

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// A HandedBack is a connection of the pod that the kernel carries.
type HandedBack struct {
	Src, Dst netip.AddrPort // who opened it, to whom
	Inbound  bool           // somebody else opened it
	SocketInfo
}

// HandedBack lists the connections of the netns whose sockets have ztun's own mark, or are known otherwise: an earlier process has handed them back, or left them
// to the kernel when it captured the netns. It is to be called before this process has connections in the netns, which have the mark, too.
func (k *Kernel) HandedBack() (list []HandedBack, err error) {
	m := k.cfg.Marks
	err = k.cfg.Netns.Do(func() error {
		listeners, err := listeners()
		if err != nil {
			return err
		}
		carried, err := k.stored().carriedByKernel(m)
		if err != nil {
			return err
		}
		first, last := ephemeralPorts()
		return eachSocket(func(d *diagSocket) {
			if !carried(d) || d.info.Opening() {
				return
			}
			// Nothing says who opened a connection. The SYN of who did counts as an acknowledged byte, until its FIN may count as one, too. Else the port that the pod listens on
			// was connected to, and so was one that the kernel does not choose, should its listener be gone: it is the direction that
			// policy has a say in.
			port := d.local.Port()
			mark, inbound := listeners[port]
			if inbound && mark&m.OwnMask == m.Own {
				return // that listener is ztun's own
			}
			opened := (d.info.State == unix.BPF_TCP_ESTABLISHED || d.info.State == unix.BPF_TCP_CLOSE_WAIT) && d.info.BytesAcked > d.sent
			inbound = !opened && (inbound || port < first || port > last)
			h := HandedBack{Src: d.local, Dst: d.remote, SocketInfo: d.info}
			if inbound {
				h.Src, h.Dst, h.Inbound = d.remote, d.local, true
			}
			list = append(list, h)
		})
	})
	if err != nil {
		return nil, fmt.Errorf("tun: netns %s: connections that were handed back: %w", k.cfg.Netns, err)
	}
	return list, nil
}

// stored returns an empty storage where there is none.
func (k *Kernel) stored() *storage {
	if k.steerer == nil {
		return new(storage)
	}
	return k.steerer.stored()
}

// ephemeralPorts are those that the kernel chooses for connections from the netns of this thread; its default where it does not say.
func ephemeralPorts() (first, last uint16) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range") // of the netns of who reads
	if err == nil {
		if _, err = fmt.Sscan(string(text), &first, &last); err == nil {
			return first, last
		}
	}
	return 32768, 60999
}

// listeners are the ports that something in the netns of this thread listens on, with the marks of the sockets.
func listeners() (map[uint16]uint32, error) {
	ports := make(map[uint16]uint32)
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		body := inetDiagReq(family, netip.AddrPort{}, netip.AddrPort{}, 0)
		nl.NativeEndian().PutUint32(body[4:], 1<<tcpListen)
		req := nl.NewNetlinkRequest(sockDiagByFamily, unix.NLM_F_DUMP)
		req.AddRawData(body)
		answers, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
		if err != nil {
			return nil, err
		}
		for _, b := range answers {
			d, err := parseDiagSocket(b)
			if err != nil {
				return nil, err
			}
			ports[d.local.Port()] = d.info.Mark
		}
	}
	return ports, nil
}
