package tun

import (
	"fmt"
	"log/slog"
	"net/netip"
	"time"
)

// Backends of a [Steering].
const (
	SteerBySockops = "sockops" // BPF: the decision stands in the application's socket, as its mark
	SteerByTC      = "tc"      // BPF without a program of sockets: it stands in a storage of the socket, for programs of tc
	SteerByNFT     = "nft"     // no BPF: it stands in sets of nftables
)

// SteeringConfig says how flows are led past user space.
type SteeringConfig struct {
	// Mode is the backend, ZTUN_OFFLOAD: "auto" takes the first that works of "sockops" and "tc", never "nft". One that is named and does
	// not work is an error, of NewSteering or, where only the netns can tell, of Open.
	Mode string

	Marks Marks // those of the Config of each netns

	// Log receives what an operator may have to know; nil means nothing is logged.
	Log *slog.Logger

	// Ended is told of each flow that was handed back to the kernel, once: when it has ended, or when it is known not to come
	// to be. It is called by the goroutine of Run and must not block. nil means that nobody asks.
	Ended func(EndedFlow)

	// Remember is how long Kernel.Remember holds; 0 means that nothing is remembered. It takes "sockops".
	Remember time.Duration

	// Begun is told of each flow that went to the network without Kernel.Steer: only Netns, Src and Dst are set. Ended is told of the
	// same flow later. It is called as Ended is; nil means that nobody asks.
	Begun func(EndedFlow)

	noBTF bool // as if the kernel had no BTF
	noBPF bool // as if it refused all programs

	noCgroup bool // as if the root of cgroup v2 were not to be had
}

// An EndedFlow is a flow that was handed back to the kernel, by [Kernel.Steer] with ToNetwork or ToApplication, and is over.
// Connections that are older than the Kernel are told of too, those that an earlier process has handed back and those that were there
// before the capture: both ways, as nothing says who has opened them, and without Err.
type EndedFlow struct {
	Netns       uint64         // its cookie, see [Kernel.Cookie]
	Src, Dst    netip.AddrPort // as in the SYN: who opened it, to whom
	Established bool

	// Received and Sent are bytes of the applications: from Src to Dst, as far as Src's or Dst's kernel knows them to have
	// arrived, and from Dst to Src.
	Received, Sent uint64

	// Err says why it never came to be, or broke: the syscall.Errno of the pod's socket. nil means that it ended as it should.
	Err error
}

// A Way is where a SYN that was decided about goes on to.
type Way uint8

const (
	ToNetwork         Way = iota + 1 // outbound: leaves by the interface; the application's socket gets ztun's own mark
	ToApplication                    // inbound: is delivered to the application's listener
	ToListener                       // outbound: is accepted by ztun's listener in place of its destination
	ToListenerInbound                // inbound: is accepted by ztun's listener in the application's place
)

// String returns the way in words.
func (w Way) String() string {
	switch w {
	case ToNetwork:
		return "to the network"
	case ToApplication:
		return "to the application"
	case ToListener:
		return "to ztun's listener"
	case ToListenerInbound:
		return "to ztun's listener, inbound"
	}
	return fmt.Sprintf("Way(%d)", uint8(w))
}

// A SocketInfo is what the kernel knows of a TCP socket.
type SocketInfo struct {
	State         uint8  // TCP_ESTABLISHED (1) and so on, include/net/tcp_states.h
	Mark          uint32 // 0 where this process may not see it
	BytesAcked    uint64 // what the peer has acknowledged; the SYN of a socket that connected, and a FIN, count as one byte
	BytesReceived uint64 // a FIN counts as one byte
	Retransmits   uint32 // segments, in all
	RTT           uint32 // smoothed, in microseconds
}

// Opening reports whether the socket's SYN, or its answer to one, was not answered yet.
func (i SocketInfo) Opening() bool {
	const synSent, synRecv, newSynRecv = 2, 3, 12 // include/net/tcp_states.h
	return i.State == synSent || i.State == synRecv || i.State == newSynRecv
}
