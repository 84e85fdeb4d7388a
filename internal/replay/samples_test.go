package replay

import (
	"encoding/binary"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the sample captures anew")

const samples = "../../testdata/replay"

// The parties of the samples; their mesh is testdata/replay/mesh.yaml.
const (
	client   = "10.244.1.10:40000"
	client6  = "[fd00:1::10]:40000"
	intruder = "10.244.1.66:41000"
	web      = "10.96.0.10:80"
	web6     = "[fd00:96::10]:80"
	webPod   = "10.244.2.20:8080"
	outside  = "192.0.2.80:443"
	resolver = "10.96.0.53:53"
	asking   = "10.244.1.10:50053"
	webName  = "web.shop.svc.cluster.local"
	typeA    = 1
	typeAAAA = 28
)

// sampleFiles are the captures of testdata/replay, by name.
func sampleFiles() map[string][]byte {
	return map[string][]byte{
		"mesh-http.pcap":      pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, meshHTTP()),
		"dns.pcap":            pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, dns()),
		"denied.pcap":         pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, denied()),
		"ipv6.pcap":           pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, ipv6()),
		"disorder.pcap":       pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, disorder()),
		"retransmission.pcap": pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, retransmission()),
		"vlan.pcap":           pcapFile(binary.LittleEndian, false, LinkEthernet, func(ip []byte) []byte { return vlan(ip, 7, 42) }, meshHTTP()),
		"vxlan.pcap":          pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, tunnelled(meshHTTP())),
		"cooked-v1.pcap":      pcapFile(binary.LittleEndian, false, LinkSLL, cooked1, meshHTTP()),
		"cooked-v2.pcap":      pcapFile(binary.LittleEndian, false, LinkSLL2, cooked2, meshHTTP()),
		"nanoseconds.pcap":    pcapFile(binary.BigEndian, true, LinkRaw, nil, meshHTTP()),
		"interfaces.pcapng":   interfaces(),
		"unsupported.pcapng":  unsupported(),
		"truncated.pcap":      truncated(),
		"compressed.pcap.gz":  zipped(pcapFile(binary.LittleEndian, false, LinkNull, null, meshHTTP())),
		"midstream.pcap":      pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, midstream()),
		"one-sided.pcap":      pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, oneSided()),
		"refused.pcap":        pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, refusedByPeer()),
		"trouble.pcap":        pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, trouble()),
		"clock.pcap":          pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, clock()),
		"inbound.pcap":        pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, inboundPlain()),
	}
}

func meshHTTP() []frame {
	t := new(talk)
	t.http(client, web, 1000)
	t.now += 10 * time.Millisecond
	t.http("10.244.1.10:40001", "10.244.2.30:8080", 2000) // a workload outside the mesh
	t.http("10.244.1.10:40002", outside, 3000)
	return t.frames
}

// tunnelled has frames as VXLAN carries them between two nodes.
func tunnelled(frames []frame) (out []frame) {
	a, b := netip.MustParseAddrPort("192.0.2.1:5000"), netip.MustParseAddrPort("192.0.2.2:4789")
	for _, f := range frames {
		out = append(out, frame{at: f.at, ip: udpPacket(a, b, append([]byte{8, 0, 0, 0, 0, 0, 1, 0}, ethernet(f.ip)...))})
	}
	return out
}

func dns() []frame {
	t := new(talk)
	ask, server := netip.MustParseAddrPort(asking), netip.MustParseAddrPort(resolver)
	t.add(udpPacket(ask, server, dnsMessage(1, webName, typeA)))
	t.add(udpPacket(server, ask, dnsMessage(1, webName, typeA, "10.96.0.10")))
	t.add(udpPacket(ask, server, dnsMessage(2, webName, typeAAAA)))
	t.add(udpPacket(ask, server, dnsMessage(3, "www.example.com", typeA)))
	t.now += 20 * time.Millisecond
	t.add(udpPacket(server, ask, dnsMessage(3, "www.example.com", typeA, "192.0.2.80")))
	t.add(udpPacket(ask, server, dnsMessage(4, "unanswered.example.com", typeA)))

	c := t.call("10.244.1.10:50054", resolver, 5000, 6000)
	c.open()
	for id, name := range []string{webName, "tcp.example.com"} {
		question, answer := dnsMessage(uint16(100+id), name, typeA), dnsMessage(uint16(100+id), name, typeA, "192.0.2.81")
		c.ask(string(binary.BigEndian.AppendUint16(nil, uint16(len(question))))+string(question),
			string(binary.BigEndian.AppendUint16(nil, uint16(len(answer))))+string(answer))
	}
	c.close()
	t.now += 15 * time.Second // the question that nobody has answered is given up
	t.http(client, web, 7000)
	return t.frames
}

func denied() []frame {
	t := new(talk)
	t.http(intruder, web, 1000)
	t.http("10.9.9.9:33000", "10.244.2.20:8080", 2000) // plaintext, from nobody
	return t.frames
}

func ipv6() []frame {
	t := new(talk)
	t.http(client6, web6, 1000)
	t.http("[fd00:1::10]:40001", "[2001:db8::1]:443", 2000)
	return t.frames
}

func disorder() []frame {
	t := new(talk)
	c := t.call(client, web, 0xfffffff0, 0xffffff00) // both numbers wrap
	c.open()
	a, b := &c.a, &c.b
	parts := []string{"POST / HTTP/1.1\r\n", "Host: web\r\n", "Content-Length: 5\r\n\r\n", "12345"}
	starts := make([]uint32, len(parts))
	for i, p := range parts {
		starts[i] = a.seq
		a.seq += uint32(len(p))
	}
	for _, i := range []int{1, 3, 2, 0} { // 2 and 0 close the holes
		t.add(c.segment(a, b, flagACK|flagPSH, starts[i], b.seq, nil, []byte(parts[i])))
	}
	t.add(c.segment(a, b, flagACK|flagPSH, starts[1], b.seq, nil, []byte("HOST: ???\r\nCont"))) // overlaps what is there
	c.send(b, a, flagACK, "")
	answer := httpResponse
	seq := b.seq
	t.add(c.segment(b, a, flagACK|flagPSH, seq+20, a.seq, nil, []byte(answer[20:]))) // the end first
	t.add(c.segment(a, b, flagACK, a.seq, seq, sackBlock(seq+20, seq+uint32(len(answer))), nil))
	t.add(c.segment(b, a, flagACK|flagPSH, seq, a.seq, nil, []byte(answer[:20])))
	b.seq += uint32(len(answer))
	c.send(a, b, flagACK, "")
	c.close()

	// A question in pieces, and an answer in pieces that come in another order.
	ask, server := netip.MustParseAddrPort(asking), netip.MustParseAddrPort(resolver)
	for _, p := range cut(udpPacket(ask, server, dnsMessage(9, webName, typeA)), 77, 24) {
		t.add(p)
	}
	t.add(udpPacket(ask, server, dnsMessage(10, "big.example.com", typeA)))
	pieces := cut(udpPacket(server, ask, dnsMessage(10, "big.example.com", typeA, "192.0.2.1", "192.0.2.2", "192.0.2.3")), 78, 32)
	for _, p := range slices.Backward(pieces) {
		t.add(p)
	}
	return t.frames
}

func sackBlock(left, right uint32) []byte {
	b := binary.BigEndian.AppendUint32([]byte{optNop, optNop, optSACK, 10}, left)
	return binary.BigEndian.AppendUint32(b, right)
}

func retransmission() []frame {
	t := new(talk)
	c := t.call(client, web, 1000, 2000)
	a, b := &c.a, &c.b
	syn := c.segment(a, b, flagSYN, a.seq, 0, nil, nil)
	t.add(syn)
	t.now += time.Second
	t.add(syn)
	a.seq++
	c.send(b, a, flagSYN|flagACK, "")
	c.send(a, b, flagACK, "")
	request := c.segment(a, b, flagACK|flagPSH, a.seq, b.seq, nil, []byte(httpRequest))
	t.add(request)
	t.now += 200 * time.Millisecond
	t.add(request)
	a.seq += uint32(len(httpRequest))
	c.send(b, a, flagACK, "")
	answer := c.segment(b, a, flagACK|flagPSH, b.seq, a.seq, nil, []byte(httpResponse))
	t.add(answer)
	t.now += 200 * time.Millisecond
	t.add(answer)
	b.seq += uint32(len(httpResponse))
	c.send(a, b, flagACK, "")
	c.close()
	return t.frames
}

func interfaces() []byte {
	f := new(ngFile)
	frames := meshHTTP()
	f.section(binary.LittleEndian)
	f.iface(LinkEthernet, "eth0", 6)
	f.iface(LinkRaw, "tun0", 9)
	f.block(0x0bad, []byte("what nobody knows   ")) // passed over
	for i, p := range frames[:len(frames)/2] {
		at := epoch.Add(p.at)
		if i%2 == 0 {
			f.packet(0, uint64(at.UnixMicro()), ethernet(p.ip))
		} else {
			f.packet(1, uint64(at.UnixNano()), p.ip)
		}
	}
	f.section(binary.BigEndian)
	f.iface(LinkSLL2, "any", 0x80|20) // units of 2^-20 s
	for _, p := range frames[len(frames)/2:] {
		at := epoch.Add(p.at)
		f.packet(0, uint64(at.Unix())<<20|uint64(at.Nanosecond())<<20/1e9, cooked2(p.ip))
	}
	return f.b
}

func unsupported() []byte {
	f := new(ngFile)
	f.section(binary.LittleEndian)
	f.iface(105, "wlan0", 9) // IEEE 802.11
	f.iface(LinkRaw, "tun0", 9)
	for i, p := range meshHTTP() {
		f.packet(uint32(i%10/9), uint64(epoch.Add(p.at).UnixNano()), p.ip)
		f.packet(1, uint64(epoch.Add(p.at).UnixNano()), p.ip)
	}
	return f.b
}

func truncated() []byte {
	b := pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, meshHTTP())
	return b[:len(b)-30]
}

func midstream() []frame {
	t := new(talk)
	c := t.call(client, web, 1000, 2000)
	c.a.seq, c.b.seq = 5000, 9000
	c.ask(httpRequest, httpResponse)
	c.close()
	d := t.call("10.244.1.10:40009", "10.244.2.20:15008", 100, 200) // between nodes
	d.open()
	return t.frames
}

// oneSided has what the client sends only.
func oneSided() (out []frame) {
	for _, f := range meshHTTP() {
		var k packet
		if k.parse(f.ip, len(f.ip)) == "" && k.src.Addr() == netip.MustParseAddrPort(client).Addr() {
			out = append(out, f)
		}
	}
	return out
}

func refusedByPeer() []frame {
	t := new(talk)
	c := t.call(client, web, 1000, 2000)
	c.send(&c.a, &c.b, flagSYN, "")
	c.send(&c.b, &c.a, flagRST|flagACK, "")
	d := t.call("10.244.1.10:40001", outside, 3000, 4000)
	syn := d.segment(&d.a, &d.b, flagSYN, d.a.seq, 0, nil, nil)
	t.add(syn)
	unreachable := append([]byte{3, 1, 0, 0, 0, 0, 0, 0}, syn[:28]...)
	binary.BigEndian.PutUint16(unreachable[2:], ^fold(sum16(unreachable, 0)))
	t.add(ipPacket(netip.MustParseAddr("10.244.1.1"), netip.MustParseAddrPort(client).Addr(), protoICMP, unreachable))
	e := t.call("10.244.1.10:40002", outside, 5000, 6000)
	e.send(&e.a, &e.b, flagSYN, "")
	f := t.call("10.244.1.10:40003", web, 7000, 8000)
	f.open()
	f.send(&f.a, &f.b, flagACK|flagPSH, httpRequest)
	f.send(&f.b, &f.a, flagRST|flagACK, "")
	t.now += 20 * time.Second
	t.http("10.244.1.10:40004", web, 9000)
	return t.frames
}

func inboundPlain() []frame {
	t := new(talk)
	t.http("10.9.9.9:33000", "10.244.1.10:9090", 1000) // the client has no policies
	return t.frames
}

// trouble is what a TCP has to bear (FP-76), each on a connection of its own.
func trouble() []frame {
	t := new(talk)
	at := func(c *call, from, to *side, offset uint32, data string) {
		t.add(c.segment(from, to, flagACK|flagPSH, from.seq+offset, to.seq, nil, []byte(data)))
	}
	end := func(c *call, sent uint32) {
		c.a.seq += sent
		c.send(&c.b, &c.a, flagACK, "")
		c.close()
	}
	c := t.call("10.244.1.10:42001", web, 1000, 2000) // overlapping: the first bytes count
	c.open()
	at(c, &c.a, &c.b, 0, "abcdef")
	at(c, &c.a, &c.b, 4, "EFGHIJ")
	at(c, &c.a, &c.b, 12, "mnop")
	at(c, &c.a, &c.b, 10, "KLMN")
	at(c, &c.a, &c.b, 0, "ABCDEFghijklmnop") // all of it again
	end(c, 16)

	c = t.call("10.244.1.10:42002", web, 1000, 2000) // duplicates, and data before the last ACK of the handshake
	c.send(&c.a, &c.b, flagSYN, "")
	t.frames = append(t.frames, t.frames[len(t.frames)-1])
	c.send(&c.b, &c.a, flagSYN|flagACK, "")
	at(c, &c.a, &c.b, 0, "first")
	t.add(c.segment(&c.a, &c.b, flagACK, c.a.seq, c.b.seq, nil, nil))
	at(c, &c.a, &c.b, 0, "first")
	at(c, &c.a, &c.b, 5, "second")
	end(c, 11)

	c = t.call("10.244.1.10:42003", web, 1000, 2000) // resets that are not at the place: RFC 5961, section 3.2
	c.open()
	at(c, &c.a, &c.b, 0, "alive")
	t.add(c.segment(&c.a, &c.b, flagRST, c.a.seq+0x40000000, 0, nil, nil))
	t.add(c.segment(&c.a, &c.b, flagRST, c.a.seq+9, 0, nil, nil))
	at(c, &c.a, &c.b, 5, " still")
	end(c, 11)

	c = t.call("10.244.1.10:42004", web, 1000, 2000) // one that is
	c.open()
	at(c, &c.a, &c.b, 0, "going")
	t.add(c.segment(&c.a, &c.b, flagRST, c.a.seq+5, 0, nil, nil))

	c = t.call("10.244.1.10:42005", web, 1000, 2000) // the same ports again, without an end
	c.open()
	at(c, &c.a, &c.b, 0, "old")
	c = t.call("10.244.1.10:42005", web, 70000, 80000)
	c.open()
	at(c, &c.a, &c.b, 0, "new")
	end(c, 3)

	c = t.call("10.244.1.10:42006", web, 1000, 2000) // bytes that the capture has lost, and the peer had
	c.open()
	at(c, &c.a, &c.b, 6, "behind a hole")
	c.a.seq += 19
	c.send(&c.b, &c.a, flagACK, "")
	c.close()

	c = t.call("10.244.1.10:42007", web, 1000, 2000) // three holes of each side, and one acknowledgement for all of them
	c.open()
	for _, offset := range []uint32{2, 6, 10} {
		at(c, &c.a, &c.b, offset, "ab")
		at(c, &c.b, &c.a, offset, "cd")
	}
	c.a.seq += 14
	c.b.seq += 14
	c.send(&c.b, &c.a, flagACK, "")
	c.send(&c.a, &c.b, flagACK, "")
	c.close()
	return t.frames
}

// clock has packets whose times go back, and a gap of a year.
func clock() []frame {
	t := new(talk)
	t.http(client, web, 1000)
	for i := range t.frames {
		if i%3 == 1 {
			t.frames[i].at -= 100 * time.Millisecond
		}
	}
	t.now += 365 * 24 * time.Hour
	t.http("10.244.1.10:40001", web, 3000)
	return t.frames
}

// The sample captures are as they are made here: run with -update to write them.
func TestSamplesAreAsTheyAreMade(t *testing.T) {
	made := sampleFiles()
	for name, want := range made {
		path := filepath.Join(samples, name)
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-made +there):\n%s", name, diff)
		}
	}
}
