package replay

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ztun.dev/ztun/internal/workload"
)

func parsed(t *testing.T, b []byte) *packet {
	t.Helper()
	k := new(packet)
	if why := k.parse(b, len(b)); why != "" {
		t.Fatalf("%x: %s", b, why)
	}
	return k
}

// Fragments in any order give the packet; those that overlap, are too many or too late do not (FP-70).
func TestFragments(t *testing.T) {
	v4 := udpPacket(netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2"), bytes.Repeat([]byte("0123456789"), 300))
	v6 := udpPacket(netip.MustParseAddrPort("[fd00::1]:1"), netip.MustParseAddrPort("[fd00::2]:2"), bytes.Repeat([]byte("0123456789"), 300))
	for name, ip := range map[string][]byte{"IPv4": v4, "IPv6": v6} {
		t.Run("FP-70/"+name, func(t *testing.T) {
			for seed := range uint64(50) {
				r := rand.New(rand.NewPCG(seed, 2))
				pieces := cut(ip, 7, 8*(30+r.IntN(60)))
				r.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
				var d defragmenter
				for i, p := range pieces {
					whole, why := d.add(parsed(t, p), 0)
					if why != "" || (whole != nil) != (i == len(pieces)-1) {
						t.Fatalf("seed %d, piece %d of %d: %d bytes, %q", seed, i, len(pieces), len(whole), why)
					}
					if whole == nil {
						if _, why := d.add(parsed(t, p), 0); why != "fragment_again" {
							t.Fatalf("the same piece again: %q", why)
						}
						continue
					}
					got, want := parsed(t, whole), parsed(t, ip)
					if diff := cmp.Diff(string(want.captured()), string(got.captured())); diff != "" || got.src != want.src || got.checkSum() != sumRight {
						t.Fatalf("seed %d: %v, checksum %v (-want +got):\n%s", seed, got.src, got.checkSum(), diff)
					}
				}
				if d.held != 0 || len(d.open) != 0 {
					t.Fatalf("%d bytes of %d packets are held", d.held, len(d.open))
				}
			}
		})
	}
	for _, tt := range []struct {
		name string
		do   func(d *defragmenter) string
		want string
	}{
		{"FP-70/overlapping", func(d *defragmenter) string {
			p := cut(v6, 7, 800)
			d.add(parsed(t, p[0]), 0)
			_, why := d.add(parsed(t, cut(v6, 7, 792)[1]), 0)
			return why
		}, "fragment_overlap"},
		{"FP-70/not a multiple of 8", func(d *defragmenter) string {
			k := parsed(t, cut(v4, 7, 800)[0])
			k.b = k.b[:len(k.b)-1]
			k.length--
			_, why := d.add(k, 0)
			return why
		}, "fragment_malformed"},
		{"FP-70/beyond the largest packet", func(d *defragmenter) string {
			k := parsed(t, cut(v4, 7, 800)[1])
			k.offset = 65528
			_, why := d.add(k, 0)
			return why
		}, "fragment_malformed"},
		{"FP-70/cut off by the capture", func(d *defragmenter) string {
			k := parsed(t, cut(v4, 7, 800)[1])
			k.b = k.b[:40]
			_, why := d.add(k, 0)
			return why
		}, "fragment_cut_off"},
		{"FP-70/too much at a time", func(d *defragmenter) string {
			why := ""
			for id := uint32(0); why == "" && id < 1<<16; id++ {
				_, why = d.add(parsed(t, cut(v4, id, 2000)[0]), 0)
			}
			if d.held > maxFrags {
				return "too much is held"
			}
			return why
		}, "fragment_limit"},
		{"FP-70/too late", func(d *defragmenter) string {
			p := cut(v4, 7, 2000)
			d.add(parsed(t, p[0]), 0)
			if whole, why := d.add(parsed(t, p[1]), fragTime4); whole != nil || why != "" {
				return "after its time it is whole"
			}
			return "held"
		}, "held"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.do(new(defragmenter)); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

func TestDecap(t *testing.T) {
	in := tcpPacket(netip.MustParseAddrPort(client), netip.MustParseAddrPort(web), 1, 2, flagACK, 3, nil, []byte("hello"))
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	udp := func(port uint16, head, data []byte) []byte {
		return udpPacket(netip.AddrPortFrom(a, 5000), netip.AddrPortFrom(b, port), append(head, data...))
	}
	gre := func(flags byte, kind uint16, more int, data []byte) []byte {
		h := binary.BigEndian.AppendUint16([]byte{flags, 0}, kind)
		return ipPacket(a, b, protoGRE, append(append(h, make([]byte, more)...), data...))
	}
	for _, tt := range []struct {
		name string
		b    []byte
		want bool
	}{
		{"GRE", gre(0, etherIPv4, 0, in), true},
		{"GRE with checksum, key and sequence", gre(0xb0, etherIPv4, 12, in), true},
		{"GRE with Ethernet", gre(0x20, etherBridge, 4, ethernet(in)), true},
		{"GRE with something else", gre(0, 0x88be, 0, in), false},
		{"VXLAN", udp(portVXLAN, []byte{8, 0, 0, 0, 0, 0, 1, 0}, ethernet(in)), true},
		{"VXLAN on Linux's port, with VLAN", udp(portVXLANLinux, []byte{8, 0, 0, 0, 0, 0, 1, 0}, vlan(in, 5)), true},
		{"VXLAN without network", udp(portVXLAN, []byte{0, 0, 0, 0, 0, 0, 1, 0}, ethernet(in)), false},
		{"Geneve with options", udp(portGeneve, append([]byte{2, 0, 0x65, 0x58, 0, 0, 1, 0}, make([]byte, 8)...), ethernet(in)), true},
		{"Geneve with IP", udp(portGeneve, []byte{0, 0, 0x08, 0, 0, 0, 1, 0}, in), true},
		{"Geneve of another version", udp(portGeneve, []byte{0x40, 0, 0x08, 0, 0, 0, 1, 0}, in), false},
		{"UDP", udp(99, nil, in), false},
		{"nothing within", udp(portVXLAN, nil, nil), false},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			k := parsed(t, tt.b)
			at := inner(k)
			if (at > 0) != tt.want || tt.want && !bytes.Equal(k.b[at:], in) {
				t.Errorf("inner(%x) = %d, want the packet at %d", tt.b, at, len(tt.b)-len(in))
			}
		})
	}
}

// SACK blocks are in the netstack's numbers, and only of what it has sent and that is not acknowledged.
func TestSACKIsTranslated(t *testing.T) {
	f := &Flow{peerISN: 0xfffffff0, stackISN: 500, acked: 100, stackNext: 1000}
	block := func(list ...uint32) (b []byte) {
		for _, v := range list {
			b = binary.BigEndian.AppendUint32(b, f.peerISN+1+v)
		}
		return b
	}
	for _, tt := range []struct {
		name string
		in   []byte
		want [][2]uint32
	}{
		{"one", block(200, 300), [][2]uint32{{701, 801}}},
		{"three of four", block(200, 300, 400, 500, 600, 700, 800, 900), [][2]uint32{{701, 801}, {901, 1001}, {1101, 1201}}},
		{"acknowledged already", block(50, 90, 200, 300), [][2]uint32{{701, 801}}},
		{"not sent in this run", block(900, 1001), nil},
		{"the wrong way round", block(300, 200), nil},
		{"half a block", block(300), nil},
	} {
		if diff := cmp.Diff(tt.want, f.translateSACK(tt.in)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// Prefixes, lengths and checksums are kept.
func TestAnonymizer(t *testing.T) {
	a, same, other := NewAnonymizer([]byte("k")), NewAnonymizer([]byte("k")), NewAnonymizer([]byte("l"))
	r := rand.New(rand.NewPCG(3, 3))
	differs := 0
	for range 500 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], r.Uint32())
		x := netip.AddrFrom4(b)
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])^1<<r.IntN(32))
		y := netip.AddrFrom4(b)
		if keptBits(x) != keptBits(y) {
			continue
		}
		ax, ay := a.Addr(x), a.Addr(y)
		for bits := range 33 {
			p, _ := x.Prefix(bits)
			q, _ := ax.Prefix(bits)
			if p.Contains(y) != q.Contains(ay) {
				t.Fatalf("%v, %v become %v, %v: not the same with %d bits", x, y, ax, ay, bits)
			}
			if a.Prefix(p) != q {
				t.Fatalf("prefix %v becomes %v, want %v", p, a.Prefix(p), q)
			}
		}
		if same.Addr(x) != ax {
			t.Fatalf("%v is %v and %v with the same key", x, ax, same.Addr(x))
		}
		if other.Addr(x) != ax {
			differs++
		}
	}
	if differs < 400 {
		t.Errorf("another key changed %d of 500 addresses", differs)
	}
	for _, w := range []string{"web", "a-very-long-label-of-a-name-that-has-as-many-letters-as-it-may-063", "svc", ""} {
		if got := a.Word(w); len(got) != len(w) || (got == w) != (w == "svc" || w == "") {
			t.Errorf("Word(%q) = %q", w, got)
		}
	}
	if got := a.Text("shop/web.shop.svc.cluster.local"); got != a.Word("shop")+"/"+a.Word("web")+"."+a.Word("shop")+".svc.cluster.local" {
		t.Errorf("Text = %q", got)
	}
}

// Kubelet's probes stay such, nothing else becomes one, and prefixes that they are in are kept as others are.
func TestAnonymizerKeepsProbes(t *testing.T) {
	for _, probe := range probes {
		for key := range byte(20) {
			a := NewAnonymizer([]byte{key})
			if got := a.Addr(probe); got != probe {
				t.Errorf("key %d: %v becomes %v", key, probe, got)
			}
			for bit := keptBits(probe); bit < probe.BitLen(); bit++ {
				b := probe.AsSlice()
				b[bit/8] ^= 1 << (7 - bit%8)
				near, _ := netip.AddrFromSlice(b)
				p, _ := probe.Prefix(bit)
				q, _ := probe.Prefix(bit + 1)
				if got := a.Addr(near); !p.Contains(got) || q.Contains(got) || a.Prefix(p) != p {
					t.Errorf("key %d: %v becomes %v, which has not %d bits in common with %v; prefix %v becomes %v", key, near, got, bit, probe, p, a.Prefix(p))
				}
			}
		}
	}
}

// What differs in case only stays different, and its case is not told; names of networks are replaced as others are.
func TestAnonymizedState(t *testing.T) {
	const upper, lower = "Kubernetes//Pod/Shop/Web", "kubernetes//Pod/Shop/Web"
	key := workload.ServiceKey{Namespace: "shop", Hostname: "web.shop.svc.cluster.local"}
	addr := netip.MustParseAddr("10.0.0.1")
	st := workload.State{
		Workloads: []*workload.Workload{
			{UID: upper, Name: "Web", Namespace: "shop", Network: "Blue", ClusterID: "Kubernetes", Addresses: []netip.Addr{addr}, Services: map[workload.ServiceKey]workload.PortMap{key: nil}},
			{
				UID: lower, Name: "web", Namespace: "shop", Network: "blue", Hostname: "WWW.Shop.SVC.cluster.local", AuthorizationPolicies: []string{"shop/only-Web"},
				Waypoint: &workload.GatewayAddress{Address: workload.NetworkAddr{Network: "Blue", Addr: addr}, Port: 15008},
			},
		},
		Services: []*workload.Service{{
			Name: "web", Namespace: "shop", Hostname: key.Hostname, VIPs: []workload.NetworkAddr{{Network: "blue", Addr: addr}},
			CIDRVIPs: []workload.NetworkPrefix{{Network: "Blue", Prefix: netip.MustParsePrefix("10.1.0.0/16")}},
		}},
		Policies: []*workload.Policy{{Name: "only-Web", Namespace: "shop"}},
	}
	a := NewAnonymizer([]byte("k"))
	got := a.State(st)
	one, two, web := got.Workloads[0], got.Workloads[1], got.Services[0]
	if one.UID == two.UID || one.Name == two.Name || one.Network == two.Network {
		t.Errorf("%+v and %+v are alike", one, two)
	}
	if one.Network != two.Waypoint.Address.Network || one.Network != web.CIDRVIPs[0].Network || two.Network != web.VIPs[0].Network || one.Network != a.Text("Blue") {
		t.Errorf("networks %q and %q; waypoint %+v, service %+v", one.Network, two.Network, two.Waypoint, web)
	}
	if p := got.Policies[0]; two.AuthorizationPolicies[0] != p.Key() {
		t.Errorf("policy %s is selected by %s", p.Key(), two.AuthorizationPolicies)
	}
	if _, ok := one.Services[web.Key()]; !ok || two.Hostname != a.Text("www.shop.svc.cluster.local") {
		t.Errorf("services %v, want %v; hostname %s", one.Services, web.Key(), two.Hostname)
	}
	text, err := json.Marshal(workload.NewDump(workload.NewSnapshot(got)))
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"Kubernetes", "ubernetes//", "Pod", "shop", "Shop", "web", "Web", "blue", "Blue", "www", "10.0.0.1", "10.1."} {
		if bytes.Contains(text, []byte(secret)) {
			t.Errorf("%s has %q", text, secret)
		}
	}
	for _, w := range got.Workloads {
		for _, s := range []string{w.UID, w.Name, w.Namespace, w.Network, w.ClusterID, w.Hostname} {
			if s != strings.ToLower(s) {
				t.Errorf("%q tells case", s)
			}
		}
	}
}

// That the kernel carries a flow is told of an anonymized capture as well, and nothing else that its comments say.
func TestAnonymizedNotes(t *testing.T) {
	var in, out bytes.Buffer
	w := NewWriter(&in, "test", 0, "pod")
	for _, comment := range []string{"flow 1 outbound secret -> secret", "flow 1 outbound secret -> secret; " + CarriedNote} {
		if err := w.Packet(0, epoch, DirInbound, meshHTTP()[0].ip, 60, comment); err != nil {
			t.Fatal(err)
		}
	}
	source := func(b *bytes.Buffer) *Source {
		s, err := NewSource(SourceConfig{Paths: []string{"-"}, Stdin: b})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if left, err := NewAnonymizer([]byte("k")).Capture(source(&in), NewWriter(&out, "test", 0, "pod")); left > 0 || err != nil {
		t.Fatalf("%d packets left out, %v", left, err)
	}
	if bytes.Contains(out.Bytes(), []byte("secret")) {
		t.Error("a comment is in the anonymized capture")
	}
	var got []bool
	for s, p := source(&out), new(Packet); s.Next(p) == nil; {
		got = append(got, p.Carried)
	}
	if diff := cmp.Diff([]bool{false, true}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// What may be anything does not stay: addresses beside those of the IP header, options, payload of whatever kind, and checksums of it.
func TestAnonymizedPackets(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.0.0.1:1000"), netip.MustParseAddrPort("10.0.0.2:2000")
	a6, b6 := netip.MustParseAddrPort("[fd00::1]:1000"), netip.MustParseAddrPort("[fd00::2]:2000")
	const secret = "SECRETSECRETSECRET"
	icmp := func(kind, code byte, rest string) []byte {
		m := append([]byte{kind, code, 0, 0}, rest...)
		binary.BigEndian.PutUint16(m[2:], ^fold(sum16(m, 0)))
		return ipPacket(a.Addr(), b.Addr(), protoICMP, m)
	}
	icmp6 := func(kind byte, rest string) []byte {
		m := append([]byte{kind, 0, 0, 0}, rest...)
		binary.BigEndian.PutUint16(m[2:], transportSum(a6.Addr(), b6.Addr(), protoICMPv6, m))
		return ipPacket(a6.Addr(), b6.Addr(), protoICMPv6, m)
	}
	tcp := func(options ...byte) []byte { return tcpPacket(a, b, 1, 2, flagACK, 3, options, nil) }
	syn := []byte{optMSS, 4, 5, 0xb4, optSACKOK, 2, optStamps, 10, 0, 0, 0, 1, 0, 0, 0, 2, optNop, optScale, 3, 7}
	sack := []byte{optNop, optNop, optSACK, 10, 0, 0, 0, 1, 0, 0, 0, 9}
	addAddr := []byte{30, 8, 0x30, 1, 'S', 'E', 'C', 'R'}
	quote := string(tcp()[:ipv4Len+8])
	for _, tt := range []struct {
		name string
		ip   []byte
		wire int
		want []byte // from the transport header on, but for its checksum; nil: zeros
	}{
		{"an ICMP redirect", icmp(5, 1, "SECR"+quote), 0, append([]byte{5, 1}, make([]byte, 6+len(quote))...)},
		{"an ICMPv6 redirect", icmp6(137, "SECR"+secret), 0, append([]byte{137, 0}, make([]byte, 6+len(secret))...)},
		{"an unreachable destination, but for its quote", icmp(3, 4, "SECR"), 0, []byte{3, 4, 0, 0, 0, 0, 0, 0}},
		{"the numbers of an echo stay", icmp(8, 0, "\x00\x07\x00\x01"+secret), 0, append([]byte{8, 0, 0, 0, 0, 7, 0, 1}, make([]byte, len(secret))...)},
		{"the numbers of an echo over IPv6 stay", icmp6(129, "\x00\x07\x00\x01"+secret), 0, append([]byte{129, 0, 0, 0, 0, 7, 0, 1}, make([]byte, len(secret))...)},
		{"the first fragment of a redirect", cut(icmp(5, 1, secret), 7, 16)[0], 0, append([]byte{5, 1}, make([]byte, 14)...)},
		{"a later fragment of an echo", cut(icmp(8, 0, "\x00\x07\x00\x01"+secret), 7, 8)[1], 0, nil},
		{"a later fragment of ICMPv6", cut(icmp6(128, "\x00\x07\x00\x01"+secret), 7, 8)[1], 0, nil},
		{"the first fragment of what is neither TCP nor UDP", cut(ipPacket(a.Addr(), b.Addr(), 50, []byte(secret)), 7, 16)[0], 0, nil},
		{"options of TCP that matter stay", tcp(syn...), 0, tcp(syn...)[ipv4Len:]},
		{"selective acknowledgements stay", tcp(sack...), 0, tcp(sack...)[ipv4Len:]},
		{"an address of Multipath TCP", tcp(addAddr...), 0, tcp(bytes.Repeat([]byte{optNop}, 8)...)[ipv4Len:]},
		{"what is behind the end of options", tcp(optEnd, 'S', 'E', 'C', 'R', 'E', 'T', 'S'), 0, tcp(make([]byte, 8)...)[ipv4Len:]},
		{"an option that is too long", tcp(30, 40, 'S', 'E', 'C', 'R', 'E', 'T'), 0, tcp(make([]byte, 8)...)[ipv4Len:]},
		{"a window scale that is none", tcp(optScale, 8, 'S', 'E', 'C', 'R', 'E', 'T'), 0, tcp(bytes.Repeat([]byte{optNop}, 8)...)[ipv4Len:]},
		{"a segment that is cut off", tcpPacket(a, b, 1, 2, flagACK, 3, nil, []byte(secret)), 100, append(tcp()[ipv4Len:], make([]byte, len(secret))...)},
	} {
		t.Run("T2/"+tt.name, func(t *testing.T) {
			got := bytes.Clone(tt.ip)
			wire := max(tt.wire, len(got))
			if got[0]>>4 == 4 {
				setLength(got, false, wire)
			}
			if !NewAnonymizer([]byte("k")).Packet(got, wire) {
				t.Fatal("left out")
			}
			k := new(packet)
			if why := k.parse(got, wire); why != "" {
				t.Fatal(why)
			}
			body, want := k.b[k.transport:], tt.want
			if want == nil {
				want = make([]byte, len(body))
			}
			sum := 0
			switch {
			case k.offset > 0:
			case k.proto == protoTCP:
				sum = 16
			case k.proto == protoICMP, k.proto == protoICMPv6:
				sum = 2
			}
			if whole := !k.fragment && wire == len(got); sum > 0 && (body[sum] != 0 || body[sum+1] != 0) != whole {
				t.Errorf("checksum % x", body[sum:sum+2])
			}
			if sum > 0 {
				copy(body[sum:], want[sum:sum+2])
			}
			if diff := cmp.Diff(want, body); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// FuzzAnonymize replaces what is in any packet: it stays as long, can be read as before, and its checksum is right.
func FuzzAnonymize(f *testing.F) {
	for _, frames := range [][]frame{meshHTTP(), dns(), disorder(), ipv6(), refusedByPeer()} {
		for _, p := range frames {
			f.Add(p.ip)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		b = bytes.Clone(b)
		var before, after packet
		readable := before.parse(bytes.Clone(b), len(b)) == ""
		kept := NewAnonymizer([]byte("k")).Packet(b, len(b))
		if !kept {
			return
		}
		if why := after.parse(b, len(b)); !readable || why != "" {
			t.Fatalf("%x: readable %v before, %q after", b, readable, why)
		}
		if before.length != after.length || before.proto != after.proto || before.src.Port() != after.src.Port() || before.seq != after.seq {
			t.Fatalf("%+v became %+v", before, after)
		}
		if s := after.checkSum(); s == sumWrong || s == sumPartial && before.checkSum() != sumPartial {
			t.Fatalf("checksum %v of %x", s, b)
		}
	})
}

// A packet may say that it was longer than what was captured of it, and costs nothing: what is held of all flows is bounded together,
// whatever it waits for.
func TestWhatIsHeldOfFlowsIsBounded(t *testing.T) {
	for _, tt := range []struct {
		name string
		flow func() *Flow
		add  func(f *Flow, i int)
	}{
		{"T3/for a peer", func() *Flow { return &Flow{} }, func(f *Flow, _ int) { f.deliver([]byte("hello"), maxEarly/4) }},
		{"T3/for questions", func() *Flow { return &Flow{stream: new(stream)} }, func(f *Flow, _ int) { f.deliver([]byte("\xff\xff"), 0xffff) }},
		{"T3/for the application", func() *Flow { return &Flow{} }, func(f *Flow, _ int) {
			if f.room() > maxEarly/4 { // as peer.send has it
				f.written += maxEarly / 4
				f.weigh()
			}
		}},
		{"T3/for a packet before", func() *Flow { return &Flow{} }, func(f *Flow, i int) {
			if f.room() > 1400+pieceBytes { // as Player.fromPeer has it
				f.down.add(int64(1+2000*i), make([]byte, 1400), 1400, f.deliver)
				f.weigh()
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			held := 0
			var flows []*Flow
			for range 1000 {
				f := tt.flow()
				f.held, f.down.fin, f.up.fin = &held, noFIN, noFIN
				for i := range 64 {
					tt.add(f, i)
				}
				flows = append(flows, f)
			}
			if held > maxHeldAll+maxHeldAll/8 || held < maxHeldAll/2 {
				t.Errorf("all have %d bytes, want about %d", held, maxHeldAll)
			}
			for _, f := range flows {
				f.unweigh()
				f.weigh() // what still comes of it counts nothing
			}
			if held != 0 {
				t.Errorf("at the end of all flows %d bytes are counted", held)
			}
		})
	}
}
