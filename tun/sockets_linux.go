package tun

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Of include/uapi/linux/sock_diag.h and inet_diag.h.
const (
	sockDiagByFamily = 20
	sockDestroy      = 21

	inetDiagReqStorages = 2 // attributes of a request; in it a descriptor of a map
	skDiagReqMap        = 1

	inetDiagInfo     = 2 // of an answer
	inetDiagMark     = 15
	inetDiagStorages = 20
	skDiagStorage    = 1 // in it
	skDiagMapValue   = 3 // in that

	sizeofInetDiagReq = 56
	sizeofInetDiagMsg = 72

	tcpSynSent  = 2 // include/net/tcp_states.h
	tcpSynRecv  = 3
	tcpTimeWait = 6
	tcpClose    = 7
	tcpListen   = 10
	allStates   = 1<<12 - 1 // up to TCP_CLOSING

	noCookie = ^uint64(0) // any
)

// Offsets in struct tcp_info, include/uapi/linux/tcp.h.
const (
	tcpInfoRTT           = 68
	tcpInfoTotalRetrans  = 100
	tcpInfoBytesAcked    = 120
	tcpInfoBytesReceived = 128
	tcpInfoBytesSent     = 200 // Linux 4.19
	tcpInfoBytesRetrans  = 208
)

// inetDiagReq is the request for one socket, or for all of a family.
func inetDiagReq(family int, local, remote netip.AddrPort, cookie uint64) []byte {
	b := make([]byte, sizeofInetDiagReq)
	b[0], b[1] = uint8(family), unix.IPPROTO_TCP
	b[2] = 1 << (inetDiagInfo - 1)
	nl.NativeEndian().PutUint32(b[4:], allStates)
	binary.BigEndian.PutUint16(b[8:], local.Port())
	binary.BigEndian.PutUint16(b[10:], remote.Port())
	copy(b[12:28], local.Addr().AsSlice())
	copy(b[28:44], remote.Addr().AsSlice())
	nl.NativeEndian().PutUint32(b[48:], uint32(cookie))
	nl.NativeEndian().PutUint32(b[52:], uint32(cookie>>32))
	return b
}

// A diagSocket is an answer.
type diagSocket struct {
	local, remote netip.AddrPort
	cookie        uint64
	info          SocketInfo
	sent          uint64 // bytes of the application that were sent, each once
	stored        uint32 // the first word of the storage that was asked for; 0 where there is none
}

// parseDiagSocket reads an answer. Its addresses are IPv4 where both ends are, whatever the family of the socket.
func parseDiagSocket(b []byte) (d diagSocket, err error) {
	if len(b) < sizeofInetDiagMsg {
		return d, fmt.Errorf("answer of %d bytes, want %d at least", len(b), sizeofInetDiagMsg)
	}
	ne := nl.NativeEndian()
	addr := func(b []byte, family byte) netip.Addr {
		if family == unix.AF_INET {
			return netip.AddrFrom4([4]byte(b))
		}
		return netip.AddrFrom16([16]byte(b)).Unmap()
	}
	d.info.State = b[1]
	d.local = netip.AddrPortFrom(addr(b[8:], b[0]), binary.BigEndian.Uint16(b[4:]))
	d.remote = netip.AddrPortFrom(addr(b[24:], b[0]), binary.BigEndian.Uint16(b[6:]))
	d.cookie = uint64(ne.Uint32(b[44:])) | uint64(ne.Uint32(b[48:]))<<32
	attrs, err := nl.ParseRouteAttr(b[sizeofInetDiagMsg:])
	if err != nil {
		return d, err
	}
	for _, a := range attrs {
		v := a.Value
		switch {
		case a.Attr.Type&^unix.NLA_F_NESTED == inetDiagStorages:
			if d.stored, err = parseStorages(v); err != nil {
				return d, err
			}
		case a.Attr.Type == inetDiagInfo && len(v) >= tcpInfoBytesReceived+8:
			d.info.RTT = ne.Uint32(v[tcpInfoRTT:])
			d.info.Retransmits = ne.Uint32(v[tcpInfoTotalRetrans:])
			d.info.BytesAcked = ne.Uint64(v[tcpInfoBytesAcked:])
			d.info.BytesReceived = ne.Uint64(v[tcpInfoBytesReceived:])
			if len(v) >= tcpInfoBytesRetrans+8 {
				d.sent = ne.Uint64(v[tcpInfoBytesSent:]) - ne.Uint64(v[tcpInfoBytesRetrans:])
			}
		case a.Attr.Type == inetDiagMark && len(v) >= 4:
			d.info.Mark = ne.Uint32(v)
		}
	}
	return d, nil
}

// parseStorages reads the first word of the one storage that was asked for.
func parseStorages(b []byte) (word uint32, err error) {
	storages, err := nl.ParseRouteAttr(b)
	if err != nil {
		return 0, err
	}
	for _, s := range storages {
		if s.Attr.Type&^unix.NLA_F_NESTED != skDiagStorage {
			continue
		}
		parts, err := nl.ParseRouteAttr(s.Value)
		if err != nil {
			return 0, err
		}
		for _, p := range parts {
			if p.Attr.Type == skDiagMapValue && len(p.Value) >= 4 {
				word = nl.NativeEndian().Uint32(p.Value)
			}
		}
	}
	return word, nil
}

// A diag is a socket by which one asks about those of a netns, and ends them: made anew for each question, and with a thread that changes its
// netns, it is four fifths of the time (measured).
type diag map[int]*nl.SocketHandle

// openDiag opens one in the netns of this thread.
func openDiag() (diag, error) {
	s, err := nl.Subscribe(unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, fmt.Errorf("sock_diag: %w", err)
	}
	return diag{unix.NETLINK_INET_DIAG: {Socket: s}}, nil
}

// openDiag is the step of Open that makes the one of the pod.
func (s *setup) openDiag() (err error) {
	if s.diag, err = openDiag(); err != nil {
		return err
	}
	s.undo.add(s.diag.close)
	return nil
}

func (g diag) close() error {
	for _, h := range g {
		h.Close()
	}
	return nil
}

// find asks for one socket. A listener that the kernel would name in its place does not count.
func (g diag) find(local, remote netip.AddrPort) (d diagSocket, err error) {
	req := nl.NewNetlinkRequest(sockDiagByFamily, 0)
	req.Sockets = g
	req.AddRawData(inetDiagReq(familyOf(local.Addr()), local, remote, noCookie))
	answers, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	switch {
	case errors.Is(err, unix.ENOENT), err == nil && len(answers) == 0:
		return d, os.ErrNotExist
	case err != nil:
		return d, err
	}
	if d, err = parseDiagSocket(answers[0]); err != nil {
		return d, err
	}
	if d.info.State == tcpListen || d.local != local || d.remote != remote {
		return d, os.ErrNotExist
	}
	return d, nil
}

// eachSocket calls f for all TCP sockets of the netns of this thread that are connected, or about to be.
func eachSocket(f func(d *diagSocket)) error { return eachSocketStoring(nil, f) }

// eachSocketStoring is eachSocket with what the sockets store in a map of kind BPF_MAP_TYPE_SK_STORAGE (Linux 5.6).
func eachSocketStoring(storage *ebpf.Map, f func(d *diagSocket)) error {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(sockDiagByFamily, unix.NLM_F_DUMP)
		body := inetDiagReq(family, netip.AddrPort{}, netip.AddrPort{}, 0)
		if storage != nil {
			attr := nl.NewRtAttr(inetDiagReqStorages|unix.NLA_F_NESTED, nil)
			attr.AddRtAttr(skDiagReqMap, nl.Uint32Attr(uint32(storage.FD())))
			body = append(body, attr.Serialize()...)
		}
		req.AddRawData(body)
		answers, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
		if err != nil {
			return err
		}
		for _, b := range answers {
			d, err := parseDiagSocket(b)
			if err != nil {
				return err
			}
			if d.info.State != tcpListen {
				f(&d)
			}
		}
	}
	return nil
}

// destroy ends a socket: its program gets ECONNABORTED, its peer a RST.
func (g diag) destroy(d *diagSocket) error {
	req := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
	req.Sockets = g
	req.AddRawData(inetDiagReq(familyOf(d.local.Addr()), d.local, d.remote, d.cookie))
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	if errors.Is(err, unix.ENOENT) {
		return os.ErrNotExist
	}
	return err
}

// SocketOf returns what the kernel knows of the pod's TCP socket from local to remote, or os.ErrNotExist.
func (k *Kernel) SocketOf(local, remote netip.AddrPort) (SocketInfo, error) {
	d, err := k.diag.find(local, remote)
	if err != nil {
		return SocketInfo{}, k.socketError(local, remote, err)
	}
	return d.info, nil
}

// Sockets calls f for all TCP sockets of the netns but those that listen, ztun's own included. TIME_WAIT has no numbers.
func (k *Kernel) Sockets(f func(local, remote netip.AddrPort, i SocketInfo)) error {
	err := k.cfg.Netns.Do(func() error {
		return eachSocket(func(d *diagSocket) { f(d.local, d.remote, d.info) })
	})
	if err != nil {
		return fmt.Errorf("tun: netns %s: sockets: %w", k.cfg.Netns, err)
	}
	return nil
}

// DestroySocket ends the pod's TCP socket from local to remote: its program gets ECONNABORTED, its peer a RST. It returns
// os.ErrNotExist where there is none, and needs CONFIG_INET_DIAG_DESTROY of the kernel.
func (k *Kernel) DestroySocket(local, remote netip.AddrPort) error {
	d, err := k.diag.find(local, remote) // which tells it from a listener, that would be taken for it
	if err == nil {
		err = k.diag.destroy(&d)
	}
	if err != nil {
		return k.socketError(local, remote, err)
	}
	return nil
}

func (k *Kernel) socketError(local, remote netip.AddrPort, err error) error {
	return fmt.Errorf("tun: netns %s: socket from %s to %s: %w", k.cfg.Netns, local, remote, err)
}
