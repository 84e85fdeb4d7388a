// Package replay plays a packet capture to a netstack as if it were live traffic.
//
// A [Source] reads captures: pcap and pcapng, plain or compressed, from files, directories or standard input. A [Player] takes its
// packets one after the other, sets the clock of a [loop.Manual] by them, and gives those that applications of local pods sent, or
// that reached them, to a [Device], which is the tun.Device of the netstack. The netstack chooses sequence numbers of its own, so
// the Player rewrites what the recorded application acknowledges. What would be at the other end, sockets and tunnels, is
// played in memory by the [Underlay] and the [Tunnel]: by what the capture has of the other direction, or by a simple peer.
//
// The package decides nothing: the flows that it finds are told to [Events] and filled in by whoever knows the decisions.
package replay
