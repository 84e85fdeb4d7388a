// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

// Steering without a program of sockets, for where the root of cgroup v2 cannot be had. What was decided stands in a storage of the
// application's socket. The socket has no mark: all that it sends comes to the device, and is led on before it would be in user
// space. The socket of an inbound connection has the mark of its SYN, which is that of applications.
//
//	ztun_ingress  interface, in: all TCP but SYNs stays in the kernel, and so do SYNs to ztun's own listeners
//	ztun_device   device, in: the SYN that was written back takes the way that was decided
//	ztun_egress   device, out: segments of steered flows take their way, the rest goes to user space
//	ztun_guard    interface, out: TCP without ztun's own mark goes nowhere; what is of an application's socket is looked at again
//	ztun_older    device, out, beside steer.c where sockets cannot be iterated over: the connections that are older than the capture
//
// ztun_lookup and ztun_enrol are those of steer.c.

#include "steer.h"

volatile const __u32 device = 0; // index of the device

// What was decided about the connection of a socket. A SYN takes it back: a program may use the socket again.
struct steered {
	__u32 way; // or UNDECIDED
	__u32 interface;
};

#define UNDECIDED 0

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct steered);
} steered SEC(".maps");

// Connections that are older than the capture and that no mark tells, until one of their segments has put it into the storage of
// the socket. As the pod's sockets have them: src is its own end.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow);
	__type(value, __u32);
} older SEC(".maps");

static __always_inline int lead(struct __sk_buff *skb, __u32 way, __u32 interface)
{
	switch (way) {
	case TO_NETWORK:
		if (interface)
			return to_network(skb, interface);
		// The kernel forwards it, as if user space had written it to the device.
		if (to_network(skb, 0) != TC_ACT_UNSPEC)
			return TC_ACT_SHOT;
		return bpf_redirect(device, BPF_F_INGRESS);
	case TO_LISTENER:
		skb->mark = deliver_mark;
		return bpf_redirect(device, BPF_F_INGRESS);
	}
	return TC_ACT_SHOT;
}

static __always_inline struct steered *keep(struct bpf_sock *sk, __u32 way, __u32 interface)
{
	struct steered *s = bpf_sk_storage_get(&steered, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (s) {
		s->way = way;
		s->interface = interface;
	}
	return s;
}

// find returns what was decided about the connection of a segment that is no SYN, and keeps it in the socket. A RST is no answer to a decision: with
// it the socket may refuse one that was about an earlier connection of its.
static __always_inline struct steered *find(struct bpf_sock *sk, const struct flow *f, __u8 flags, bool decisions)
{
	struct steered *s = bpf_sk_storage_get(&steered, sk, NULL, 0);
	struct decision *d;

	if (s && s->way != UNDECIDED)
		return s;
	if (bpf_map_lookup_elem(&older, f)) {
		s = keep(sk, TO_NETWORK, 0);
		if (s)
			bpf_map_delete_elem(&older, f);
		return s;
	}
	if (!decisions || (flags & RST))
		return NULL;
	d = bpf_map_lookup_elem(&flows, f);
	if (!d || (d->way != TO_NETWORK && d->way != TO_LISTENER))
		return NULL;
	s = keep(sk, d->way, d->interface);
	// With SYN cookies the listener needs its decision for the ACK too: nobody has told of that yet.
	if (s && d->way == TO_NETWORK)
		bpf_map_delete_elem(&flows, f);
	return s;
}

static __always_inline int egress(struct __sk_buff *skb, bool decisions)
{
	struct flow f = {.netns = netns_cookie};
	struct bpf_sock *sk = full(skb);
	struct steered *s;
	__u8 flags = 0;

	if (!sk || parse(skb, &f, &flags) != SEGMENT)
		return TC_ACT_UNSPEC;
	if (is_syn(flags)) {
		s = bpf_sk_storage_get(&steered, sk, NULL, 0);
		if (s)
			s->way = UNDECIDED;
		bpf_map_delete_elem(&older, &f);
		return TC_ACT_UNSPEC;
	}
	s = find(sk, &f, flags, decisions);
	if (!s)
		return TC_ACT_UNSPEC; // user space refuses it
	return lead(skb, s->way, s->interface);
}

// ztun_ingress gives segments the mark of applications. By it goes the socket of a connection that came by a SYN cookie; it does not count
// for one that has its mark already.
SEC("tc")
int ztun_ingress(struct __sk_buff *skb)
{
	return ingress(skb, own_mark | APPLICATION);
}

SEC("tc")
int ztun_egress(struct __sk_buff *skb)
{
	return egress(skb, true);
}

SEC("tc")
int ztun_older(struct __sk_buff *skb)
{
	return egress(skb, false);
}

// ztun_device deals with what ztun has written to the device, and with what ztun_egress has put back into it. A SYN that nobody has
// decided about goes nowhere. A RST is ztun's refusal, which the guard has to let pass on its way to a client outside, unless it
// is one of an application's that is on its way already.
SEC("tc")
int ztun_device(struct __sk_buff *skb)
{
	struct flow f = {.netns = netns_cookie};
	struct decision *d;
	__u8 flags = 0;

	if (parse(skb, &f, &flags) != SEGMENT)
		return TC_ACT_UNSPEC;
	if (flags & RST) {
		if ((skb->mark & own_mask) != deliver_mark)
			skb->mark = own_mark;
		return TC_ACT_UNSPEC;
	}
	if (!is_syn(flags))
		return TC_ACT_UNSPEC;
	d = bpf_map_lookup_elem(&flows, &f);
	if (!d)
		return TC_ACT_SHOT;
	switch (d->way) {
	case TO_NETWORK:
		return to_network(skb, d->interface);
	case TO_LISTENER:
		skb->mark = deliver_mark;
		return TC_ACT_UNSPEC;
	case TO_LISTENER_INBOUND:
		skb->mark = own_mark;
		return TC_ACT_UNSPEC;
	case TO_APPLICATION: // whose socket gets this mark
		skb->mark = own_mark | APPLICATION;
		return TC_ACT_UNSPEC;
	}
	return TC_ACT_SHOT;
}

// application_guard looks at what an application's socket sends that has ztun's own mark, from an inbound connection or one that
// is older than the capture. When its program dissolves that connection, the next one begins with a SYN: this is led to the
// device, and from then on the storage says what becomes of the rest.
static __always_inline int application_guard(struct __sk_buff *skb, struct flow *f, __u8 flags)
{
	struct bpf_sock *sk = full(skb);
	struct steered *s;

	if (is_syn(flags)) {
		if (!sk || !keep(sk, UNDECIDED, 0))
			return TC_ACT_SHOT;
		skb->mark = 0;
		return bpf_redirect(device, 0);
	}
	if (!sk)
		return TC_ACT_UNSPEC; // the SYN-ACK of a decided connection, or the last words of one
	s = bpf_sk_storage_get(&steered, sk, NULL, 0);
	if (!s)
		return TC_ACT_UNSPEC;
	if (s->way == UNDECIDED) {
		s = find(sk, f, flags, true);
		if (!s)
			return TC_ACT_SHOT;
	}
	if (s->way == TO_NETWORK) {
		skb->mark = own_mark;
		return TC_ACT_UNSPEC;
	}
	return lead(skb, s->way, s->interface);
}

SEC("tc")
int ztun_guard(struct __sk_buff *skb)
{
	return guard(skb);
}

char _license[] SEC("license") = "GPL";
