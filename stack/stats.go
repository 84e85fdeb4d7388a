package stack

import (
	"strconv"
	"sync/atomic"
)

// A DropReason says why a packet or a SYN went no further.
type DropReason uint8

// The reasons. Those from Evicted on concern attempts, the others packets.
const (
	DropMalformed DropReason = iota // cannot be parsed, or contradicts itself
	DropChecksum                    // wrong sum
	DropMartian                     // an address that no packet may carry there: loopback, unspecified, multicast source, with TCP any multicast
	DropProtocol                    // neither TCP nor UDP, or an IPv6 extension header
	DropFragment                    // a fragment of anything but UDP
	DropTooLong                     // longer than an IP packet can be
	DropWrite                       // the device did not take it: its queue was full, or an error
	DropEvicted                     // an attempt, given up for a newer one at Config.MaxInFlight
	DropLimit                       // a SYN, at the limit of the process
	DropAged                        // an attempt without answer, or in a handshake, for 75 s

	dropReasons
)

func (d DropReason) String() string {
	names := [dropReasons]string{
		"malformed", "checksum", "martian", "protocol", "fragment", "too_long", "write", "evicted", "limit", "aged",
	}
	if d < dropReasons {
		return names[d]
	}
	return "reason " + strconv.Itoa(int(d))
}

// Stats are the counters of one Stack since New, except InFlight.
type Stats struct {
	RxPackets, RxBytes uint64 // read from the device; superpackets count once
	TxPackets, TxBytes uint64 // written to it

	Requests   uint64              // SYNs that became a TCPRequest
	Duplicates uint64              // SYNs of a flow whose request has no answer yet
	GaveUp     uint64              // requests that the application ended: by RST, or by a SYN with another sequence number
	Accepted   uint64              // handshakes completed
	HandedBack uint64              // flows given back to the kernel
	Datagrams  uint64              // datagrams given to the Handler
	Strays     uint64              // segments without a connection
	InFlight   int                 // requests without an answer or in a handshake, now
	Drops      [dropReasons]uint64 // by DropReason
}

type counters struct {
	rxPackets, rxBytes, txPackets, txBytes                                          atomic.Uint64
	requests, duplicates, gaveUp, accepted, handedBack, datagrams, strays, inFlight atomic.Uint64
	drops                                                                           [dropReasons]atomic.Uint64
}

func (c *counters) drop(why DropReason) { c.drops[why].Add(1) }

// Stats returns the counters; safe from any goroutine.
func (s *Stack) Stats() Stats {
	c := &s.count
	st := Stats{
		RxPackets: c.rxPackets.Load(), RxBytes: c.rxBytes.Load(),
		TxPackets: c.txPackets.Load(), TxBytes: c.txBytes.Load(),
		Requests: c.requests.Load(), Duplicates: c.duplicates.Load(), GaveUp: c.gaveUp.Load(), Accepted: c.accepted.Load(), HandedBack: c.handedBack.Load(),
		Datagrams: c.datagrams.Load(), Strays: c.strays.Load(), InFlight: int(c.inFlight.Load()),
	}
	for i := range st.Drops {
		st.Drops[i] = c.drops[i].Load()
	}
	return st
}
