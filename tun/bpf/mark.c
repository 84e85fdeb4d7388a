// SPDX-License-Identifier: Apache-2.0

// The ingress mark. TCP that arrives on a captured interface and belongs to a socket of the kernel gets the mark of
// ztun's own sockets, so that the routing rules leave it to the kernel: the replies to ztun's own connections, the
// connections of its HBONE listener, flows that were given back to the kernel, and connections that are older than the
// capture. A listening socket counts only when it carries the mark itself: the SYN to an application's listener is what
// has to be captured. A handshake under way is found as its listener, a TIME_WAIT socket is not found at all.
//
// A socket with the mark of delivered connections does not count: it is the application's end of a connection that ztun
// made in the client's name from a port of its own choice. Its packets come by loopback. What comes on an interface for it
// is of another connection, for which the client has chosen the same port.
//
// Every outcome returns TC_ACT_UNSPEC, so that filters of others behind this one still run.

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define FRAGMENT_OFFSET 0x1fff // RFC 791, section 3.1

volatile const __u32 own_mark = 0x539; // replaced when the program is loaded
volatile const __u32 own_mask = 0xfff;
volatile const __u32 deliver_mark = 0x111;

// Offsets are relative to the network header, which is right with and without a link-layer header.
static __always_inline bool load(struct __sk_buff *skb, __u32 off, void *to, __u32 len)
{
	return bpf_skb_load_bytes_relative(skb, off, to, len, BPF_HDR_START_NET) == 0;
}

SEC("tc")
int ztun_mark(struct __sk_buff *skb)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	__u32 size, mark;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (!load(skb, 0, &ip, sizeof(ip)) || ip.protocol != IPPROTO_TCP ||
		    (ip.frag_off & bpf_htons(FRAGMENT_OFFSET)))
			return TC_ACT_UNSPEC;
		tuple.ipv4.saddr = ip.saddr;
		tuple.ipv4.daddr = ip.daddr;
		// The ports, source first, are the first four bytes of the TCP header and adjoin in the tuple.
		if (!load(skb, ip.ihl * 4, &tuple.ipv4.sport, 4))
			return TC_ACT_UNSPEC;
		size = sizeof(tuple.ipv4);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		// TCP behind extension headers is not looked for: it is captured.
		if (!load(skb, 0, &ip, sizeof(ip)) || ip.nexthdr != IPPROTO_TCP)
			return TC_ACT_UNSPEC;
		__builtin_memcpy(tuple.ipv6.saddr, &ip.saddr, sizeof(ip.saddr));
		__builtin_memcpy(tuple.ipv6.daddr, &ip.daddr, sizeof(ip.daddr));
		if (!load(skb, sizeof(ip), &tuple.ipv6.sport, 4))
			return TC_ACT_UNSPEC;
		size = sizeof(tuple.ipv6);
	} else {
		return TC_ACT_UNSPEC;
	}

	sk = bpf_sk_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return TC_ACT_UNSPEC;
	mark = sk->mark & own_mask;
	if (mark == own_mark || (sk->state != BPF_TCP_LISTEN && mark != deliver_mark))
		skb->mark = own_mark;
	bpf_sk_release(sk);
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Apache-2.0";
