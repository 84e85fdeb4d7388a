// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

// Steering. The SYN of each flow is decided about in user space, and written back to the device when the flow is to go on;
// what was decided stands in the map flows until the flow has come to be. From then on it stands in the application's own
// socket, as its mark, and the routing rules do the rest: there is no program and no state in the way of the bytes.
//
//	ztun_ingress  interface, in: all TCP but SYNs stays in the kernel, and so do SYNs to ztun's own listeners
//	ztun_guard    interface, out: TCP without ztun's own mark goes nowhere, and nobody but ztun begins a connection
//	ztun_device   device, in: the SYN that was written back takes the way that was decided
//	ztun_lookup   netns: hands the SYN to ztun's listener, whatever its destination
//	ztun_sockets  all sockets: marks those of the flows, and tells of the end of those that were handed back
//	ztun_enrol    once, in a netns: marks the connections that are older than the capture

#include "steer.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#define AF_INET 2
#define AF_INET6 10
#define SOL_SOCKET 1 // these four as on all architectures but alpha, mips, parisc and sparc
#define SO_MARK 36
#define ETIMEDOUT 110
#define ECONNREFUSED 111


volatile const bool remembers = false; // whether connect() looks for earlier decisions
// The cookies of the captured netns.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} captured SEC(".maps");

// ztun's listeners of a netns: 0 for IPv4, 1 for IPv6.
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} listeners SEC(".maps");

// What has to be known of a socket whose flow was handed back.
struct handed {
	__u32 way;
	__u32 fins; // FIN_RECEIVED, FIN_ACKED: counted by the kernel as a byte each
	// Of one that was begun without user space, whose SYN has the mark of applications: who it leads to, from which port.
	__u32 dst[4];
	__be16 sport;
	__be16 dport;
};

#define FIN_RECEIVED 1
#define FIN_ACKED 2

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct handed);
} handed_back SEC(".maps");

// A destination is where flows of a netns may go without being decided about one by one, and from which address.
struct destination {
	__u32 src[4];
	__u32 dst[4];
	__be16 port;
	__u16 pad;
	__u32 pad2;
	__u64 netns;
};

struct remembered {
	__u64 until;      // CLOCK_MONOTONIC, ns
	__u64 generation; // of the state that it was decided by
};

// It is of the LRU kind so that scans cost nothing but its own use.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct destination);
	__type(value, struct remembered);
} destinations SEC(".maps");

// The generation of the state: what was remembered of another is nothing.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} generation SEC(".maps");

enum {
	FAILED, // to come to be
	ENDED,
	BEGUN, // without user space
};

// An end is that of a flow that was handed back, or the beginning of one that user space has not seen.
struct end {
	struct flow flow;
	__u64 received; // bytes from src to dst
	__u64 sent;     // from dst to src
	__u32 what;
	__u32 err; // of the socket
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); // bytes: 13,000 ends
} ends SEC(".maps");

// Ends that found no room in the map ends.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} lost SEC(".maps");

static __always_inline bool put(const struct end *e)
{
	return bpf_ringbuf_output(&ends, (void *)e, sizeof(*e), 0) == 0;
}

static __always_inline void tell(const struct end *e)
{
	__u32 zero = 0;
	__u64 *n;

	if (put(e))
		return;
	n = bpf_map_lookup_elem(&lost, &zero);
	if (n)
		__sync_fetch_and_add(n, 1);
}

SEC("tc")
int ztun_ingress(struct __sk_buff *skb)
{
	return ingress(skb, own_mark);
}

// application_guard looks at what has ztun's own mark without the secret: it is of an application's socket whose connection the kernel carries. A SYN
// passes only if begin has noted its destination and ports. Any other is of a socket whose connection was dissolved while ztun_sockets
// was not there to take the mark away, or to which its program has given the mark.
static __always_inline int application_guard(struct __sk_buff *skb, struct flow *f, __u8 flags)
{
	struct bpf_sock *sk;
	struct handed *h;

	if (!is_syn(flags))
		return TC_ACT_UNSPEC;
	sk = full(skb);
	if (!sk)
		return TC_ACT_SHOT;
	h = bpf_sk_storage_get(&handed_back, sk, NULL, 0);
	if (!h || h->sport != f->sport || h->dport != f->dport || h->dst[0] != f->dst[0] || h->dst[1] != f->dst[1] || h->dst[2] != f->dst[2] ||
	    h->dst[3] != f->dst[3])
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

SEC("tc")
int ztun_guard(struct __sk_buff *skb)
{
	return guard(skb);
}

// ztun_device deals with what ztun has written to the device. A SYN that nobody has decided about goes nowhere. A RST is
// ztun's refusal, which the guard has to let pass on its way to a client outside.
SEC("tc")
int ztun_device(struct __sk_buff *skb)
{
	struct flow f = {.netns = netns_cookie};
	struct decision *d;
	struct bpf_sock *sk;
	__u8 flags = 0;

	if (parse(skb, &f, &flags) != SEGMENT)
		return TC_ACT_UNSPEC;
	if (flags & RST) {
		skb->mark = own_mark;
		return TC_ACT_UNSPEC;
	}
	if (!is_syn(flags))
		return TC_ACT_UNSPEC; // of the netstack: DNS over TCP
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
	case TO_APPLICATION:
		skb->mark = own_mark;
		sk = listener(skb, &f);
		if (sk) {
			bpf_sk_release(sk);
		} else { // the kernel will refuse it, and tells nobody
			struct end e = {.flow = f, .err = ECONNREFUSED};

			if (!bpf_map_delete_elem(&flows, &f))
				tell(&e);
		}
		return TC_ACT_UNSPEC;
	}
	return TC_ACT_SHOT;
}

// WORD reads one word of a context. Two at once the verifier refuses, and one at an offset that depends on the family, which
// clang would make of the last loads of both branches without END_OF_IPV4.
#define WORD(x) (*(volatile __u32 *)&(x))
#define END_OF_IPV4 asm volatile("# IPv4" ::: "memory")

SEC("sk_lookup")
int ztun_lookup(struct bpf_sk_lookup *ctx)
{
	struct flow f = {.netns = netns_cookie};
	struct decision *d;
	struct bpf_sock *sk;
	__u32 index = 0;
	long err;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	if (ctx->family == AF_INET) {
		f.src[2] = f.dst[2] = bpf_htonl(0xffff);
		f.src[3] = WORD(ctx->remote_ip4);
		f.dst[3] = WORD(ctx->local_ip4);
		END_OF_IPV4;
	} else {
		index = 1;
		f.src[0] = WORD(ctx->remote_ip6[0]);
		f.src[1] = WORD(ctx->remote_ip6[1]);
		f.src[2] = WORD(ctx->remote_ip6[2]);
		f.src[3] = WORD(ctx->remote_ip6[3]);
		f.dst[0] = WORD(ctx->local_ip6[0]);
		f.dst[1] = WORD(ctx->local_ip6[1]);
		f.dst[2] = WORD(ctx->local_ip6[2]);
		f.dst[3] = WORD(ctx->local_ip6[3]);
	}
	f.sport = (__be16)ctx->remote_port;
	f.dport = bpf_htons((__u16)ctx->local_port);
	d = bpf_map_lookup_elem(&flows, &f);
	if (!d || (d->way != TO_LISTENER && d->way != TO_LISTENER_INBOUND))
		return SK_PASS;
	sk = bpf_map_lookup_elem(&listeners, &index);
	if (!sk)
		return SK_DROP;
	err = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	return err ? SK_DROP : SK_PASS;
}

// What is read of a socket where the kernel has BTF, relocated when the program is loaded.
struct sock_common {
	volatile unsigned char skc_state;
	unsigned long skc_flags;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	int sk_err;
	unsigned int sk_mark;
} __attribute__((preserve_access_index));

struct inet_sock {
	struct sock sk;
} __attribute__((preserve_access_index));

struct inet_connection_sock {
	struct inet_sock icsk_inet;
} __attribute__((preserve_access_index));

struct tcp_sock {
	struct inet_connection_sock inet_conn;
} __attribute__((preserve_access_index));

#define SOCK_DONE 1 // of enum sock_flags: the peer's FIN was received

static __always_inline void socket_flow(struct bpf_sock_ops *ctx, struct flow *f, bool opener)
{
	__u32 local[4] = {}, remote[4] = {};
	__be16 lport = bpf_htons((__u16)ctx->local_port), rport = bpf_htons((__u16)bpf_ntohl(ctx->remote_port));

	if (ctx->family == AF_INET) {
		local[2] = remote[2] = bpf_htonl(0xffff);
		local[3] = WORD(ctx->local_ip4);
		remote[3] = WORD(ctx->remote_ip4);
		END_OF_IPV4;
	} else {
		local[0] = WORD(ctx->local_ip6[0]);
		local[1] = WORD(ctx->local_ip6[1]);
		local[2] = WORD(ctx->local_ip6[2]);
		local[3] = WORD(ctx->local_ip6[3]);
		remote[0] = WORD(ctx->remote_ip6[0]);
		remote[1] = WORD(ctx->remote_ip6[1]);
		remote[2] = WORD(ctx->remote_ip6[2]);
		remote[3] = WORD(ctx->remote_ip6[3]);
	}
	__builtin_memcpy(f->src, opener ? local : remote, sizeof(f->src));
	__builtin_memcpy(f->dst, opener ? remote : local, sizeof(f->dst));
	f->sport = opener ? lport : rport;
	f->dport = opener ? rport : lport;
	f->netns = bpf_get_netns_cookie(ctx);
}

// mark changes the part of a socket's mark that is ztun's. Its cached route is dropped with that.
static __always_inline void mark(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u32 to)
{
	__u32 m = (sk->mark & ~(own_mask | APPLICATION)) | to;

	bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &m, sizeof(m));
}

static __always_inline void watch(struct bpf_sock_ops *ctx, bool on)
{
	int flags = ctx->bpf_sock_ops_cb_flags;

	if (on)
		flags |= BPF_SOCK_OPS_STATE_CB_FLAG;
	else
		flags &= ~BPF_SOCK_OPS_STATE_CB_FLAG;
	bpf_sock_ops_cb_flags_set(ctx, flags);
}

static __always_inline void hand_back(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u32 way)
{
	struct handed *h = bpf_sk_storage_get(&handed_back, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (h) {
		h->way = way;
		h->fins = 0; // of an earlier connection of the socket
		h->sport = 0;
		watch(ctx, true);
	}
	mark(ctx, sk, own_mark | APPLICATION);
}

// begin hands a connection back before its SYN, if its destination is remembered; false: it is to be decided about. It is, too, if it
// could not be told of.
static __always_inline bool begin(struct bpf_sock_ops *ctx, struct bpf_sock *sk)
{
	struct destination to = {};
	struct end e = {.what = BEGUN};
	struct remembered *r;
	struct handed *h;
	__u32 zero = 0;
	__u64 *now;

	if (sk->bound_dev_if) // it goes where that leads
		return false;
	socket_flow(ctx, &e.flow, true);
	__builtin_memcpy(to.src, e.flow.src, sizeof(to.src));
	__builtin_memcpy(to.dst, e.flow.dst, sizeof(to.dst));
	to.port = e.flow.dport;
	to.netns = e.flow.netns;
	r = bpf_map_lookup_elem(&destinations, &to);
	now = bpf_map_lookup_elem(&generation, &zero);
	if (!r || !now || r->generation != *now || r->until < bpf_ktime_get_ns())
		return false;
	h = bpf_sk_storage_get(&handed_back, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!h)
		return false; // the guard would not let its SYN pass
	if (!put(&e)) {
		bpf_sk_storage_delete(&handed_back, sk);
		return false;
	}
	hand_back(ctx, sk, TO_NETWORK);
	__builtin_memcpy(h->dst, e.flow.dst, sizeof(h->dst));
	h->sport = e.flow.sport;
	h->dport = e.flow.dport;
	return true;
}

static __always_inline __u64 without_fin(__u64 bytes, bool fin, __u64 syn)
{
	bytes = bytes > syn ? bytes - syn : 0;
	return fin && bytes > 0 ? bytes - 1 : bytes;
}

// ended tells of the end of a socket, which was in the state old until now.
static __always_inline void ended(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u32 old, bool btf)
{
	struct handed *h = bpf_sk_storage_get(&handed_back, sk, NULL, 0);
	__u64 acked = ctx->bytes_acked, received = ctx->bytes_received;
	struct end e = {};
	__u32 fins;

	if (btf) {
		struct tcp_sock *tp = bpf_skc_to_tcp_sock(sk);

		if (tp)
			e.err = tp->inet_conn.icsk_inet.sk.sk_err;
		if (tp && h && old == BPF_TCP_FIN_WAIT2 && (tp->inet_conn.icsk_inet.sk.__sk_common.skc_flags & (1 << SOCK_DONE)))
			h->fins |= FIN_RECEIVED;
	} else if (h && old == BPF_TCP_FIN_WAIT2) {
		h->fins |= FIN_RECEIVED; // as a rule
	}
	if (old == BPF_TCP_SYN_SENT) {
		struct decision *d;

		socket_flow(ctx, &e.flow, true);
		if (h) { // begun without user space
			if (!btf)
				e.err = ctx->total_retrans ? ETIMEDOUT : ECONNREFUSED;
			tell(&e);
			return;
		}
		d = bpf_map_lookup_elem(&flows, &e.flow);
		if (!d || (d->way != TO_NETWORK && d->way != TO_LISTENER))
			return;
		if (!btf) // the likeliest: what is refused ends at once
			e.err = ctx->total_retrans ? ETIMEDOUT : ECONNREFUSED;
		if (d->way == TO_LISTENER) {
			bpf_map_delete_elem(&flows, &e.flow);
			return;
		}
		if (!bpf_map_delete_elem(&flows, &e.flow))
			tell(&e);
		return;
	}
	if (!h)
		return;
	fins = h->fins;
	if (old == BPF_TCP_LAST_ACK || old == BPF_TCP_CLOSING)
		fins |= FIN_ACKED;
	e.what = ENDED;
	if (h->way == TO_NETWORK) {
		socket_flow(ctx, &e.flow, true);
		e.received = without_fin(acked, fins & FIN_ACKED, 1); // an opener's SYN counts too
		e.sent = without_fin(received, fins & FIN_RECEIVED, 0);
	} else {
		socket_flow(ctx, &e.flow, false);
		e.received = without_fin(received, fins & FIN_RECEIVED, 0);
		e.sent = without_fin(acked, fins & FIN_ACKED, 0);
	}
	if (e.err && (old == BPF_TCP_LAST_ACK || old == BPF_TCP_CLOSING)) { // reset or timed out: the FIN was not acknowledged
		if (h->way == TO_NETWORK)
			e.received += 1;
		else
			e.sent += 1;
	}
	tell(&e);
}

static __always_inline int sockets(struct bpf_sock_ops *ctx, bool btf)
{
	struct flow f = {};
	struct decision *d;
	struct bpf_sock *sk = ctx->sk;
	__u64 cookie;
	__u32 m;

	if (!sk)
		return 1;
	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB: // before the SYN: should the flow be handed back and fail, nothing else tells of it
		cookie = bpf_get_netns_cookie(ctx);
		if (!bpf_map_lookup_elem(&captured, &cookie))
			return 1;
		m = sk->mark & own_mask;
		// ztun's own. With the delivery mark none leaves the pod.
		if (sk->mark == (own_mark | secret) || (sk->mark & (own_mask | APPLICATION)) == deliver_mark)
			return 1;
		if ((sk->mark & APPLICATION) || m == own_mark)
			mark(ctx, sk, 0); // the kernel looks for the route after this
		bpf_sk_storage_delete(&handed_back, sk); // of an earlier connection of the socket
		if (!remembers || !begin(ctx, sk))
			watch(ctx, true);
		return 1;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB: // before the ACK, which takes the decided way already
		cookie = bpf_get_netns_cookie(ctx);
		if (!bpf_map_lookup_elem(&captured, &cookie))
			return 1;
		socket_flow(ctx, &f, true);
		d = bpf_map_lookup_elem(&flows, &f);
		if (d && d->way == TO_NETWORK) {
			hand_back(ctx, sk, TO_NETWORK);
			bpf_map_delete_elem(&flows, &f);
			return 1;
		}
		if (remembers && bpf_sk_storage_get(&handed_back, sk, NULL, 0)) // begun without user space
			return 1;
		watch(ctx, false);
		// The listener's side forgets the decision: with SYN cookies it needs it for the ACK too.
		if (d && d->way == TO_LISTENER)
			mark(ctx, sk, deliver_mark | APPLICATION);
		return 1;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		cookie = bpf_get_netns_cookie(ctx);
		if (!bpf_map_lookup_elem(&captured, &cookie))
			return 1;
		m = sk->mark & own_mask;
		if (m == own_mark || m == deliver_mark) // of its SYN; ztun's own do not connect again
			mark(ctx, sk, m | APPLICATION);
		socket_flow(ctx, &f, false);
		d = bpf_map_lookup_elem(&flows, &f);
		if (!d)
			return 1;
		if (d->way == TO_APPLICATION && (sk->mark & own_mask) != deliver_mark) {
			hand_back(ctx, sk, TO_APPLICATION);
			bpf_map_delete_elem(&flows, &f);
		} else if (d->way == TO_LISTENER || d->way == TO_LISTENER_INBOUND) {
			bpf_map_delete_elem(&flows, &f);
		}
		return 1;
	case BPF_SOCK_OPS_STATE_CB: {
		__u32 old = ctx->args[0], now = ctx->args[1];
		struct handed *h;

		if (now == BPF_TCP_CLOSE) {
			ended(ctx, sk, old, btf);
			return 1;
		}
		h = bpf_sk_storage_get(&handed_back, sk, NULL, 0);
		if (!h)
			return 1;
		if (now == BPF_TCP_CLOSE_WAIT || now == BPF_TCP_CLOSING)
			h->fins |= FIN_RECEIVED;
		else if (now == BPF_TCP_FIN_WAIT2)
			h->fins |= FIN_ACKED;
		return 1;
	}
	}
	return 1;
}

SEC("sockops")
int ztun_sockets(struct bpf_sock_ops *ctx)
{
	return sockets(ctx, true);
}

// ztun_sockets_old is the same for kernels without BTF, where the error of a socket cannot be read.
SEC("sockops")
int ztun_sockets_old(struct bpf_sock_ops *ctx)
{
	return sockets(ctx, false);
}

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
	unsigned int uid;
} __attribute__((preserve_access_index));

// ztun_enrol leaves the connections of a netns to the kernel. One that is only being opened is not one yet: its next SYN has
// to be decided about.
SEC("iter/tcp")
int ztun_enrol(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct tcp_sock *tp;
	__u32 m;

	if (!sk)
		return 0;
	switch (sk->skc_state) {
	case BPF_TCP_ESTABLISHED:
	case BPF_TCP_FIN_WAIT1:
	case BPF_TCP_FIN_WAIT2:
	case BPF_TCP_CLOSE_WAIT:
	case BPF_TCP_LAST_ACK:
	case BPF_TCP_CLOSING:
		break;
	default:
		return 0;
	}
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		return 0;
	m = (tp->inet_conn.icsk_inet.sk.sk_mark & ~own_mask) | own_mark | APPLICATION;
	bpf_setsockopt(tp, SOL_SOCKET, SO_MARK, &m, sizeof(m));
	return 0;
}

// The kernel lets only programs under the GPL look into a socket, and iterate over them.
char _license[] SEC("license") = "GPL";
