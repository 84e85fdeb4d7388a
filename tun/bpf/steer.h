// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

// What the programs of steering share: how a flow is known, what was decided about it, and the parsing of packets.
//
// An address is 16 bytes, IPv4 as ::ffff:a.b.c.d, which is how the kernel has it in IPv6 sockets too.

#pragma once

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
#define TCP_FLAGS 13           // offset of the flags, RFC 9293, section 3.1
#define FIN 0x01
#define SYN 0x02
#define RST 0x04
#define ACK 0x10

// Replaced when a program is loaded.
volatile const __u32 own_mark = 0x539;
volatile const __u32 own_mask = 0xfff;
volatile const __u32 deliver_mark = 0x111;
volatile const __u32 secret = 0; // bits outside of own_mask
volatile const __u64 netns_cookie = 0; // of the netns of ztun_device and ztun_lookup

// APPLICATION tells the sockets of applications that have one of ztun's marks from ztun's own. A socket keeps its mark when its program
// dissolves the connection, connect(AF_UNSPEC), for which it needs no privilege: the next connection is none that was decided about. Its program can
// read the mark, too, and with CAP_NET_RAW give it to others. So what begins a connection goes by the secret, which no application's
// socket has, and no packet where a program could look at it. Both are outside of own_mask, so that no rule looks at them.
#define APPLICATION 0x80000000

// Ways, as in tun.Way.
enum {
	TO_NETWORK = 1,
	TO_APPLICATION,
	TO_LISTENER,
	TO_LISTENER_INBOUND,
};

// A flow is who opened it, to whom, and where.
struct flow {
	__u32 src[4];
	__u32 dst[4];
	__be16 sport;
	__be16 dport;
	__u32 pad;
	__u64 netns;
};

struct decision {
	__u32 way;
	__u32 interface; // index of the one that TO_NETWORK leads to, or 0
	__u64 at;        // CLOCK_MONOTONIC, ns
};

// What ztun listens on for tunnels. Its mark any program can see, the port none can have beside it.
#define LISTENER_PORT 15008

// What was decided about flows that have not come to be yet. It is of the LRU kind so that no flood of them can keep others
// out; one that is pushed out fails.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow);
	__type(value, struct decision);
} flows SEC(".maps");

// Offsets are relative to the network header, which is right with and without a link-layer header.
static __always_inline bool load(struct __sk_buff *skb, __u32 off, void *to, __u32 len)
{
	return bpf_skb_load_bytes_relative(skb, off, to, len, BPF_HDR_START_NET) == 0;
}

enum what {
	OTHER,    // not TCP, or not seen to be
	FRAGMENT, // of TCP, without its header
	SEGMENT,
};

// parse reads who sends what to whom. Of IPv6, TCP behind extension headers is not looked for.
static __always_inline enum what parse(struct __sk_buff *skb, struct flow *f, __u8 *flags)
{
	__u32 tcp;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (!load(skb, 0, &ip, sizeof(ip)) || ip.protocol != IPPROTO_TCP)
			return OTHER;
		if (ip.frag_off & bpf_htons(FRAGMENT_OFFSET))
			return FRAGMENT;
		f->src[2] = f->dst[2] = bpf_htonl(0xffff);
		f->src[3] = ip.saddr;
		f->dst[3] = ip.daddr;
		tcp = ip.ihl * 4;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (!load(skb, 0, &ip, sizeof(ip)) || ip.nexthdr != IPPROTO_TCP)
			return OTHER;
		__builtin_memcpy(f->src, &ip.saddr, sizeof(f->src));
		__builtin_memcpy(f->dst, &ip.daddr, sizeof(f->dst));
		tcp = sizeof(ip);
	} else {
		return OTHER;
	}
	if (!load(skb, tcp, &f->sport, 4) || !load(skb, tcp + TCP_FLAGS, flags, 1))
		return OTHER;
	return SEGMENT;
}

// is_syn reports what a listener would take for the beginning of a connection.
static __always_inline bool is_syn(__u8 flags)
{
	return (flags & (SYN | ACK)) == SYN;
}

// socket_of returns the socket of f's destination for what comes from port. It has to be released.
static __always_inline struct bpf_sock *socket_of(struct __sk_buff *skb, const struct flow *f, __be16 port)
{
	struct bpf_sock_tuple tuple = {};

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		tuple.ipv4.saddr = f->src[3];
		tuple.ipv4.daddr = f->dst[3];
		tuple.ipv4.sport = port;
		tuple.ipv4.dport = f->dport;
		return bpf_sk_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	}
	__builtin_memcpy(tuple.ipv6.saddr, f->src, sizeof(f->src));
	__builtin_memcpy(tuple.ipv6.daddr, f->dst, sizeof(f->dst));
	tuple.ipv6.sport = port;
	tuple.ipv6.dport = f->dport;
	return bpf_sk_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
}

// listener returns the listening socket that f's destination has. No connection has the port 0, so that neither one of the
// same addresses nor its TIME_WAIT is found in its place. What is returned has to be released.
static __always_inline struct bpf_sock *listener(struct __sk_buff *skb, const struct flow *f)
{
	return socket_of(skb, f, 0);
}

// Deliveries come from ports that the kernel does not choose for clients, up to this one: lastDeliveryPort of internal/underlay.
#define LAST_DELIVERY 32767

// is_local_leg reports whether f is of a socket of the application whose other end is ztun: of a connection through the mesh, or of a delivery, which
// ztun made in the client's name from a port of its own choice. Its segments come by loopback: what comes by an interface is of
// another connection, or made up. Ports that clients have are not looked at.
static __always_inline bool is_local_leg(struct __sk_buff *skb, const struct flow *f)
{
	struct bpf_sock *sk;
	bool found;

	if (bpf_ntohs(f->sport) > LAST_DELIVERY)
		return false;
	sk = socket_of(skb, f, f->sport);
	if (!sk)
		return false;
	found = sk->state != BPF_TCP_LISTEN && (sk->mark & own_mask) == deliver_mark;
	bpf_sk_release(sk);
	return found;
}

// ingress marks what the kernel keeps: segments with mark. A SYN is kept only for a listener of ztun's, whatever other socket there is: it
// may begin another connection. All else belongs to a connection that was decided about, or to none.
static __always_inline int ingress(struct __sk_buff *skb, __u32 mark)
{
	struct flow f = {};
	struct bpf_sock *sk;
	__u8 flags = 0;

	switch (parse(skb, &f, &flags)) {
	case OTHER:
		return TC_ACT_UNSPEC;
	case FRAGMENT: // is nothing without the first, which has the header
		skb->mark = mark;
		return TC_ACT_UNSPEC;
	case SEGMENT:
		break;
	}
	if (!is_syn(flags)) {
		if (!is_local_leg(skb, &f))
			skb->mark = mark;
		return TC_ACT_UNSPEC;
	}
	sk = listener(skb, &f);
	if (!sk)
		return TC_ACT_UNSPEC;
	if (sk->state == BPF_TCP_LISTEN && (sk->mark & (own_mask | APPLICATION)) == own_mark && f.dport == bpf_htons(LISTENER_PORT))
		skb->mark = own_mark;
	bpf_sk_release(sk);
	return TC_ACT_UNSPEC;
}

// The address of kubelet's probes, 169.254.7.127 and fd16:9254:7127:1337:ffff:ffff:ffff:ffff.
#define PROBE4 bpf_htonl(0xa9fe077f)

static __always_inline bool is_probe6(const struct in6_addr *a)
{
	return a->in6_u.u6_addr32[0] == bpf_htonl(0xfd169254) && a->in6_u.u6_addr32[1] == bpf_htonl(0x71271337) &&
	       a->in6_u.u6_addr32[2] == 0xffffffff && a->in6_u.u6_addr32[3] == 0xffffffff;
}

// Extension headers that an IPv6 packet may have in front of TCP. A program without privilege can add a routing header.
#define MAX_EXTENSIONS 8

// is_tcp6 walks the headers. What is longer than it looks counts as TCP.
static __always_inline bool is_tcp6(struct __sk_buff *skb, __u8 next)
{
	__u32 off = sizeof(struct ipv6hdr);
	__u8 h[2];

#pragma unroll
	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		switch (next) {
		case IPPROTO_TCP:
			return true;
		case IPPROTO_HOPOPTS:
		case IPPROTO_ROUTING:
		case IPPROTO_DSTOPTS:
		case IPPROTO_FRAGMENT:
		case IPPROTO_AH:
			break;
		default:
			return false;
		}
		if (!load(skb, off, h, sizeof(h)))
			return true;
		if (next == IPPROTO_FRAGMENT)
			off += 8;
		else if (next == IPPROTO_AH)
			off += (h[1] + 2) * 4;
		else
			off += (h[1] + 1) * 8;
		next = h[0];
	}
	return true;
}

// hides_syn reports whether what parse has not seen to be TCP may be the beginning of a connection, behind extension headers.
static __always_inline bool hides_syn(struct __sk_buff *skb)
{
	struct ipv6hdr ip;

	return skb->protocol == bpf_htons(ETH_P_IPV6) && load(skb, 0, &ip, sizeof(ip)) && is_tcp6(skb, ip.nexthdr);
}

// full returns the socket of an application that sends a packet. What has none is forwarded, or of a connection that is not yet or
// not any more.
static __always_inline struct bpf_sock *full(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	return sk ? bpf_sk_fullsock(sk) : NULL;
}

// unmarked_guard lets no TCP out that nobody has decided about. Such TCP is not led to the device when its socket is bound to the
// interface: no route counts then.
static __always_inline int unmarked_guard(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (!load(skb, 0, &ip, sizeof(ip)) || ip.protocol != IPPROTO_TCP || ip.saddr == PROBE4 || ip.daddr == PROBE4)
			return TC_ACT_UNSPEC;
		return TC_ACT_SHOT;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (!load(skb, 0, &ip, sizeof(ip)) || is_probe6(&ip.saddr) || is_probe6(&ip.daddr) || !is_tcp6(skb, ip.nexthdr))
			return TC_ACT_UNSPEC;
		return TC_ACT_SHOT;
	}
	return TC_ACT_UNSPEC;
}

// application_guard is of each backend: it looks at a segment that has ztun's own mark without the secret.
static __always_inline int application_guard(struct __sk_buff *skb, struct flow *f, __u8 flags);

// guard looks at all that leaves by an interface.
static __always_inline int guard(struct __sk_buff *skb)
{
	struct flow f = {.netns = netns_cookie};
	__u8 flags = 0;

	if (skb->mark == (own_mark | secret)) {
		skb->mark = own_mark; // who listens on the interface is not to see it
		return TC_ACT_UNSPEC;
	}
	if ((skb->mark & own_mask) != own_mark)
		return unmarked_guard(skb);
	switch (parse(skb, &f, &flags)) {
	case SEGMENT:
		return application_guard(skb, &f, flags);
	case FRAGMENT:
		return TC_ACT_UNSPEC;
	default:
		return hides_syn(skb) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
	}
}

// to_network sends a SYN out as if the device had not been in its way. Where the interface is not known, the kernel forwards
// it, for which it counts a hop: that is given back before.
static __always_inline int to_network(struct __sk_buff *skb, __u32 interface)
{
	skb->mark = own_mark | secret; // both ways look for the route with it
	if (interface) {
		if (bpf_skb_change_head(skb, ETH_HLEN, 0)) // a packet of the device has no link-layer header, and no room for one
			return TC_ACT_SHOT;
		return bpf_redirect_neigh(interface, NULL, 0, 0);
	}
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct ttl {
			__u8 ttl, protocol;
		} old, new;

		if (!load(skb, offsetof(struct iphdr, ttl), &old, sizeof(old)))
			return TC_ACT_SHOT;
		if (old.ttl == 255)
			return TC_ACT_UNSPEC;
		new = old;
		new.ttl++;
		if (bpf_l3_csum_replace(skb, offsetof(struct iphdr, check), *(__u16 *)&old, *(__u16 *)&new, 2) ||
		    bpf_skb_store_bytes(skb, offsetof(struct iphdr, ttl), &new, sizeof(new), 0))
			return TC_ACT_SHOT;
	} else {
		__u8 hops;

		if (!load(skb, offsetof(struct ipv6hdr, hop_limit), &hops, 1))
			return TC_ACT_SHOT;
		if (hops == 255)
			return TC_ACT_UNSPEC;
		hops++;
		if (bpf_skb_store_bytes(skb, offsetof(struct ipv6hdr, hop_limit), &hops, 1, 0))
			return TC_ACT_SHOT;
	}
	return TC_ACT_UNSPEC;
}
