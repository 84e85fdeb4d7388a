package node

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/workload"
)

const replaySamples = "../../testdata/replay"

func replayState(t testing.TB) workload.State {
	t.Helper()
	name := filepath.Join(replaySamples, "mesh.yaml")
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	st, err := workload.ParseStatic(name, data)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// replayBytes plays a capture and returns its records as JSON lines, and the report.
func replayBytes(t testing.TB, st workload.State, capture []byte, change func(*ReplayConfig)) (string, *ReplayReport) {
	t.Helper()
	source, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: bytes.NewReader(capture)})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	cfg := ReplayConfig{State: st, Source: source, Emit: func(r ReplayRecord) error {
		if r.Text() == "" {
			t.Errorf("record %d has no text", r.Number())
		}
		if f, ok := r.(*ReplayFlow); ok && f.Error == "" && (f.Close == "" || slices.Contains([]string{"refused", "broken", "no answer", "denied"}, f.Close)) {
			t.Errorf("flow %d is %s, and nothing says why:\n%s", f.ID, f.Close, f.Text())
		}
		return enc.Encode(r)
	}}
	if change != nil {
		change(&cfg)
	}
	report, err := Replay(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return out.String(), report
}

func replaySamplesOf(t testing.TB) map[string][]byte {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(replaySamples, "*.pcap*"))
	if err != nil || len(names) < 15 {
		t.Fatalf("samples %v, %v", names, err)
	}
	files := make(map[string][]byte)
	for _, name := range names {
		if files[filepath.Base(name)], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// Two runs say the same, byte for byte, also on one processor.
func TestReplayIsDeterministic(t *testing.T) {
	st := replayState(t)
	for name, b := range replaySamplesOf(t) {
		t.Run("T1/"+name, func(t *testing.T) {
			first, _ := replayBytes(t, st, b, nil)
			again, _ := replayBytes(t, st, b, nil)
			if diff := cmp.Diff(first, again); diff != "" {
				t.Errorf("second run (-first +second):\n%s", diff)
			}
			before := runtime.GOMAXPROCS(1)
			alone, _ := replayBytes(t, st, b, nil)
			runtime.GOMAXPROCS(before)
			if diff := cmp.Diff(first, alone); diff != "" {
				t.Errorf("with one processor (-several +one):\n%s", diff)
			}
		})
	}
}

// What comes in with the packets of a capture damaged in any way: an end, and no error but of the input.
func TestReplayOfDamagedCaptures(t *testing.T) {
	st := replayState(t)
	files := replaySamplesOf(t)
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	r := rand.New(rand.NewPCG(7, 70))
	other := replayState(t)
	other.Workloads[1].Protocol = workload.ProtocolTCP // the intruder leaves the mesh
	before := fromSystem()
	for i := range 200 {
		b := damaged(r, files[names[i%len(names)]])
		t.Run(fmt.Sprintf("T3/%d", i), func(t *testing.T) {
			replayBytes(t, st, b, func(c *ReplayConfig) {
				c.Peer = replay.Peer(i % 5)
				c.Checksums = replay.Checksums(i % 2) // auto or off
				c.Decap = i%3 == 0
				if i%4 == 1 {
					c.Compare, c.Differ = &other, func(ReplayRecord, ReplayRecord) error { return nil }
				}
			})
		})
	}
	if slower == 1 {
		if after := fromSystem(); after > before+200<<20 {
			t.Errorf("damaged captures took %d MiB of memory", (after-before)>>20)
		}
	}
}

// A connection that is over here goes on in the capture, minutes later: that is no other one.
func TestReplayOfWhatGoesOn(t *testing.T) {
	paused := func() *longCapture {
		c := newLongCapture(t, "mesh-http.pcap", 10, 1, 0)
		c.next() // as it is read
		file, rest := slices.Clone(c.header), c.buf
		add := func(r []byte, pause uint32, who byte) {
			r = slices.Clone(r)
			binary.LittleEndian.PutUint32(r, binary.LittleEndian.Uint32(r)+pause)
			for _, at := range []int{12, 16} {
				if addr := r[pcapRecordBytes+etherBytes+at:]; bytes.Equal(addr[:4], []byte{10, 244, 1, 10}) {
					addr[3] = who
				}
			}
			file = append(file, r...)
		}
		for i, r := range c.records {
			switch {
			case i < 4:
				add(rest[:len(r)], 0, 66) // the intruder, to its request
			case i == 4:
				add(rest[:len(r)], 300, 99) // somebody else
				fallthrough
			default:
				add(rest[:len(r)], 600, 66)
			}
			rest = rest[len(r):]
		}
		c.buf, c.left = file, 0
		return c
	}
	intruder := func(c *ReplayConfig) { c.Local = []netip.Addr{netip.MustParseAddr("10.244.1.66")} }
	t.Run("T3", func(t *testing.T) {
		var got []string
		report := playLong(t, paused(), func(c *ReplayConfig) {
			intruder(c)
			c.Emit = func(r ReplayRecord) error { got = append(got, Outcome(r)); return nil }
		})
		if want := []string{"dropped, denied: allow policies exist, but none allowed"}; !slices.Equal(got, want) || report.Packets.NotPlayed["after_the_end"] == 0 {
			t.Errorf("flows %q, want %q; not played: %s", got, want, report.Packets.Unused())
		}
	})
	t.Run("T2", func(t *testing.T) {
		other := replayState(t)
		other.Policies = nil
		for _, w := range other.Workloads {
			w.AuthorizationPolicies = nil
		}
		var got []string
		playLong(t, paused(), func(c *ReplayConfig) {
			intruder(c)
			c.Compare = &other
			c.Differ = func(a, b ReplayRecord) error { got = append(got, Outcome(a)+" / "+Outcome(b)); return nil }
		})
		if len(got) != 1 || !strings.HasPrefix(got[0], "dropped, denied") || !strings.Contains(got[0], " / mesh by ") {
			t.Errorf("differences %q, want one", got)
		}
	})
}

// Captures of what segmentation offload has not cut yet: packets longer than any MTU, whose IP header says no length.
func TestReplayOfSegmentationOffload(t *testing.T) {
	for _, extra := range []int{9000, 60000} {
		t.Run(fmt.Sprintf("T1/%d bytes", extra), func(t *testing.T) {
			c := newLongCapture(t, "mesh-http.pcap", 10, 1, extra)
			for _, i := range []int{3, 5} { // request and answer
				ip := c.records[i][pcapRecordBytes+etherBytes:]
				ip[2], ip[3] = 0, 0
			}
			var got *ReplayFlow
			report := playLong(t, c, func(cfg *ReplayConfig) {
				cfg.Emit = func(r ReplayRecord) error { got = r.(*ReplayFlow); return nil }
			})
			if want := uint64(extra); got.Class != "mesh" || got.Close != "ended" || got.Sent != 53+want || got.Received != 63+want || report.Packets.Unused() != "" {
				t.Errorf("%s\nnot played: %s; want %d bytes and %d", got.Text(), report.Packets.Unused(), 53+want, 63+want)
			}
		})
	}
}

// damaged changes some bytes, lengths, or the end of a capture.
func damaged(r *rand.Rand, b []byte) []byte {
	b = bytes.Clone(b)
	for range 1 + r.IntN(12) {
		at := r.IntN(len(b))
		switch r.IntN(6) {
		case 0:
			b[at] ^= 1 << r.IntN(8)
		case 1:
			b[at] = 0xff
		case 2:
			b[at] = 0
		case 3:
			b[at] = byte(r.Uint32())
		case 4: // a word of a length or count
			at &^= 3
			for j := at; j < min(at+4, len(b)); j++ {
				b[j] = byte(r.Uint32() & r.Uint32())
			}
		case 5: // a piece twice
			n := min(64, len(b)-at)
			b = slices.Insert(b, at, slices.Clone(b[at:at+n])...)
		}
	}
	if r.IntN(4) == 0 {
		b = b[:r.IntN(len(b))]
	}
	return b
}

// FuzzReplay plays any bytes.
func FuzzReplay(f *testing.F) {
	st := replayState(f)
	for _, b := range replaySamplesOf(f) {
		f.Add(b, byte(0))
	}
	f.Fuzz(func(t *testing.T, b []byte, how byte) {
		replayBytes(t, st, b, func(c *ReplayConfig) {
			c.Peer, c.Checksums, c.Decap = replay.Peer(how%5), replay.Checksums(how>>3%3), how&0x80 != 0
		})
	})
}

// echoed plays a capture to an echo, and returns what the netstack sent to each port of the client, in the order of the bytes.
func echoed(t *testing.T, capture []byte) map[uint16]string {
	t.Helper()
	var file bytes.Buffer
	replayBytes(t, replayState(t), capture, func(c *ReplayConfig) {
		c.Peer, c.Played = replay.PeerEcho, replay.NewWriter(&file, "test", 0, "pod")
	})
	source, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: &file})
	if err != nil {
		t.Fatal(err)
	}
	first, got := make(map[uint16]uint32), make(map[uint16]string)
	var p replay.Packet
	for source.Next(&p) == nil {
		ip := p.Data
		tcp := ip[int(ip[0]&15)*4:]
		if binary.BigEndian.Uint16(tcp) != 80 {
			continue
		}
		port, seq, data := binary.BigEndian.Uint16(tcp[2:]), binary.BigEndian.Uint32(tcp[4:]), string(tcp[int(tcp[12]>>4)*4:])
		if tcp[13]&2 != 0 { // SYN
			first[port], got[port] = seq+1, ""
		} else if at := int(seq - first[port]); at == len(got[port]) {
			got[port] += data
		}
	}
	if problems := source.Problems(); problems != nil {
		t.Error(problems)
	}
	return got
}

// A packet with a time of the future, or a clock that was set back, does not stop the clock for the rest.
func TestReplayOfAClockThatIsSet(t *testing.T) {
	const who, other = "10.244.1.10:40000", "10.244.1.10:40001"
	for name, ahead := range map[string]time.Duration{"two minutes": 2 * time.Minute, "an hour": time.Hour, "ten years": 10 * 365 * 24 * time.Hour} {
		t.Run("T3/"+name, func(t *testing.T) {
			c := newCraftedCapture(t, time.Second)
			c.segment(other, "192.0.2.80:80", tcpSYN, 1000, 0, nil, 0)
			c.at = c.at.Add(ahead)
			c.segment("192.0.2.80:80", other, tcpSYN|tcpACK, 5000, 1001, nil, 0)
			c.at = c.at.Add(-ahead - 2*time.Second)
			c.segment(who, "192.0.2.80:80", tcpSYN, 1000, 0, nil, 0) // nobody answers
			for range 200 {
				c.segment(other, "192.0.2.80:80", tcpACK, 1001, 5001, nil, 0)
			}
			file := c.end()
			f := replayFlows(t, replayState(t), file, nil)[who]
			_, report := replayBytes(t, replayState(t), file, nil)
			if f.Close != "no answer" || f.Start != "2026-03-01T12:00:00.000000000Z" || !strings.HasPrefix(f.End, "2026-03-01T12:0") {
				t.Errorf("%s\nstart %s, end %s", f.Text(), f.Start, f.End)
			}
			if report.Packets.Backwards != 1 || !strings.Contains(report.Packets.Doubts(), "1 earlier than the one before") {
				t.Errorf("%+v", report.Packets)
			}
		})
	}
}

// Segments in any order, again, overlapping, and resets that are and are not at their place.
func TestReplayOfTrouble(t *testing.T) {
	b := replaySamplesOf(t)["trouble.pcap"]
	got := echoed(t, b)
	for _, tt := range []struct {
		name string
		port uint16
		want string
	}{
		{"FP-76/of overlapping segments the first bytes count", 42001, "abcdefGHIJKLMNop"},
		{"FP-76/duplicates, and data before the last ACK of the handshake", 42002, "firstsecond"},
		{"FP-76/resets in and out of the window that are not at their place", 42003, "alive still"},
		{"FP-76/a reset at its place", 42004, "going"},
		{"FP-76/ports that are used again", 42005, "new"},
		{"FP-76/a hole of the capture", 42006, "\x00\x00\x00\x00\x00\x00behind a hole"},
		{"FP-76/several holes of the capture", 42007, "\x00\x00ab\x00\x00ab\x00\x00ab\x00\x00"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got[tt.port] != tt.want {
				t.Errorf("the application got back %q, want %q", got[tt.port], tt.want)
			}
		})
	}
}

// What is not there from its beginning is told as such, and nothing is decided about it.
func TestReplayFromTheMiddle(t *testing.T) {
	t.Run("FP-77", func(t *testing.T) {
		out, report := replayBytes(t, replayState(t), replaySamplesOf(t)["midstream.pcap"], nil)
		var f ReplayFlow
		if err := json.NewDecoder(bytes.NewReader([]byte(out))).Decode(&f); err != nil {
			t.Fatal(err)
		}
		want := ReplayFlow{
			Type: "flow", ID: 1, Start: "2026-03-01T12:00:00.000000000Z", End: "2026-03-01T12:00:00.003000000Z", Direction: "outbound",
			Src: "10.244.1.10:40000", Dst: "10.96.0.10:80", Class: "midstream", Close: "its beginning is not in the capture: nothing was decided",
			Recorded: ReplayCounts{Sent: replay.Count{Packets: 4, Bytes: 53}, Received: replay.Count{Packets: 3, Bytes: 63}},
		}
		if diff := cmp.Diff(want, f, cmpopts.IgnoreUnexported(f)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if n := report.Stack["received"]; n != 0 {
			t.Errorf("the netstack got %d packets, want none", n)
		}
	})
}

// Whoever is at the other end: what becomes of a conversation.
func TestReplayPeers(t *testing.T) {
	for _, tt := range []struct {
		name                string
		peer                replay.Peer
		answer, close       string
		sent, received      uint64
		resolved, forwarded string
	}{
		{"recorded", replay.PeerRecorded, "accepted", "ended", 53, 63, "NOERROR", "NOERROR"},
		{"none", replay.PeerNone, "", "the capture ends", 0, 0, "NOERROR", "SERVFAIL"},
		{"accept", replay.PeerAccept, "accepted", "ended", 53, 0, "NOERROR", "SERVFAIL"},
		{"echo", replay.PeerEcho, "accepted", "ended", 53, 53, "NOERROR", "SERVFAIL"},
		{"file", replay.PeerFile, "accepted", "ended", 53, 7, "NOERROR", "SERVFAIL"},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			change := func(c *ReplayConfig) { c.Peer, c.Replies = tt.peer, []byte("replies") }
			out, _ := replayBytes(t, replayState(t), replaySamplesOf(t)["ipv6.pcap"], change)
			dec := json.NewDecoder(bytes.NewReader([]byte(out)))
			for range 2 {
				var f ReplayFlow
				if err := dec.Decode(&f); err != nil {
					t.Fatal(err)
				}
				if f.Answer != tt.answer || f.Close != tt.close || f.Sent != tt.sent || f.Received != tt.received {
					t.Errorf("flow %+v, want %+v", f, tt)
				}
			}
			out, _ = replayBytes(t, replayState(t), replaySamplesOf(t)["dns.pcap"], change)
			var first, third ReplayAnswer
			for line := range strings.SplitSeq(strings.TrimSpace(out), "\n") {
				var a ReplayAnswer
				if err := json.Unmarshal([]byte(line), &a); err != nil {
					t.Fatal(err)
				}
				switch {
				case a.Type == "dns" && a.ID == 1:
					first = a
				case a.Type == "dns" && a.ID == 3:
					third = a
				}
			}
			if first.Rcode != tt.resolved || first.By != "mesh" || third.Rcode != tt.forwarded || third.By != "resolver" {
				t.Errorf("answers %+v and %+v, want %+v", first, third, tt)
			}
		})
	}
}

// Which pods are served: those that were named, or all of the state.
func TestReplayLocal(t *testing.T) {
	capture := replaySamplesOf(t)["denied.pcap"]
	for _, tt := range []struct {
		name  string
		local []netip.Addr
		want  map[string]int
	}{
		{"all", nil, map[string]int{"dropped": 2}},
		{"the source of one flow", []netip.Addr{netip.MustParseAddr("10.244.1.66")}, map[string]int{"dropped": 1}},
		{"the destination of the other", []netip.Addr{netip.MustParseAddr("10.244.2.20")}, map[string]int{"dropped": 1}},
		{"neither", []netip.Addr{netip.MustParseAddr("10.244.1.10")}, map[string]int{}},
		{"a stranger to the state", []netip.Addr{netip.MustParseAddr("10.9.9.9")}, map[string]int{"dropped": 1}},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			_, report := replayBytes(t, replayState(t), capture, func(c *ReplayConfig) { c.Local = tt.local })
			if diff := cmp.Diff(tt.want, report.Records); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Wrong checksums are those of a network card while most of a sender's are, and damage otherwise.
func TestReplayChecksums(t *testing.T) {
	capture := replaySamplesOf(t)["mesh-http.pcap"]
	const at, record = 24, 16 + 14 + 20 // file header; record header, Ethernet, IP
	broken := func(which func(i int, fromClient bool) bool) []byte {
		b := bytes.Clone(capture)
		for i, n := 0, at; n < len(b); i++ {
			tcp := b[n+record:]
			if which(i, binary.BigEndian.Uint16(tcp) >= 40000) {
				tcp[16] ^= 0x55
			}
			n += 16 + int(binary.LittleEndian.Uint32(b[n+8:]))
		}
		return b
	}
	all := broken(func(_ int, fromClient bool) bool { return fromClient })
	one := broken(func(i int, _ bool) bool { return i == 3 }) // the first request
	for _, tt := range []struct {
		name    string
		how     replay.Checksums
		b       []byte
		dropped uint64
		taken   uint64
		first   uint64 // bytes of the first flow
	}{
		{"auto, all of the sender's", replay.ChecksumsAuto, all, 0, 18, 53},
		{"auto, one", replay.ChecksumsAuto, one, 1, 0, 53}, // the peer had it: zeros
		{"off", replay.ChecksumsOff, one, 0, 0, 53},
		{"strict", replay.ChecksumsStrict, one, 1, 0, 53},
		{"strict, all of the sender's", replay.ChecksumsStrict, all, 18, 0, 0},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			out, report := replayBytes(t, replayState(t), tt.b, func(c *ReplayConfig) { c.Checksums = tt.how })
			var f ReplayFlow
			if err := json.NewDecoder(strings.NewReader(out)).Decode(&f); err != nil {
				t.Fatal(err)
			}
			if f.Sent != tt.first || report.Packets.NotPlayed["checksum"] != tt.dropped || report.Packets.Checksums != tt.taken {
				t.Errorf("flow %+v\nreport %+v, want %d bytes, %d dropped, %d taken", f, report, tt.first, tt.dropped, tt.taken)
			}
		})
	}
}

// A small file that unpacks to a large one is played as it comes.
func TestReplayOfGzipBomb(t *testing.T) {
	t.Run("T3", func(t *testing.T) {
		var bomb bytes.Buffer
		z := gzip.NewWriter(&bomb)
		header := replaySamplesOf(t)["mesh-http.pcap"][:24]
		if _, err := z.Write(header); err != nil {
			t.Fatal(err)
		}
		zeros := make([]byte, 1<<20) // packets without a byte, of 1970
		for range 64 {
			if _, err := z.Write(zeros); err != nil {
				t.Fatal(err)
			}
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, report := replayBytes(t, replayState(t), bomb.Bytes(), nil)
		runtime.ReadMemStats(&after)
		if want := uint64(64 << 20 / 16); report.Packets.Packets != want || report.Packets.NotPlayed["not_ip"] != want {
			t.Errorf("%+v, want %d packets", report.Packets, want)
		}
		if grown := int64(after.Sys - before.Sys); grown > 32<<20 {
			t.Errorf("a bomb of %d bytes took %d MiB of memory", bomb.Len(), grown>>20)
		}
	})
}

// synCapture is a capture of SYNs, a millisecond apart. Their checksums are left out.
func synCapture(t testing.TB, flows [][2]string) []byte {
	t.Helper()
	var file bytes.Buffer
	w := replay.NewWriter(&file, "test", 0, "pod")
	for i, f := range flows {
		b := synPacket(f[0], f[1])
		if err := w.Packet(0, time.Unix(1_772_366_400, int64(i)*1e6), replay.DirUnknown, b, len(b), ""); err != nil {
			t.Fatal(err)
		}
	}
	return file.Bytes()
}

// answeredBy adds a packet to a capture of one SYN: an answer of its destination without data.
func answeredBy(t testing.TB, syn []byte, from, to string, flags byte) []byte {
	t.Helper()
	b := synPacket(from, to)
	binary.BigEndian.PutUint32(b[28:], 1001)
	b[33] = flags
	file := bytes.NewBuffer(bytes.Clone(syn))
	w := replay.NewWriter(file, "test", 0, "pod") // a section of its own
	if err := w.Packet(0, time.Unix(1_772_366_400, 5e6), replay.DirUnknown, b, len(b), ""); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

func synPacket(from, to string) []byte {
	src, dst := netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	b := []byte{0: 4<<4 | 5, 3: 40, 8: 64, 9: 6, 39: 0}
	addrs := 12
	if src.Addr().Is6() {
		b = []byte{0: 6 << 4, 5: 20, 6: 6, 7: 64, 59: 0}
		addrs = 8
	}
	copy(b[addrs:], append(src.Addr().AsSlice(), dst.Addr().AsSlice()...))
	t := b[len(b)-20:]
	binary.BigEndian.PutUint16(t, src.Port())
	binary.BigEndian.PutUint16(t[2:], dst.Port())
	binary.BigEndian.PutUint32(t[4:], 1000)
	t[12], t[13], t[14] = 5<<4, 2, 0xff // the header's length, SYN, window
	return b
}

// replayFlows plays a capture and returns its flows by who opened them.
func replayFlows(t testing.TB, st workload.State, capture []byte, change func(*ReplayConfig)) map[string]*ReplayFlow {
	t.Helper()
	flows := make(map[string]*ReplayFlow)
	replayBytes(t, st, capture, func(c *ReplayConfig) {
		c.Checksums = replay.ChecksumsOff
		emit := c.Emit
		c.Emit = func(r ReplayRecord) error {
			if f, ok := r.(*ReplayFlow); ok {
				flows[f.Src] = f
			}
			return emit(r)
		}
		if change != nil {
			change(c)
		}
	})
	return flows
}

// Every flow has its reason, also where the access log of a live node says it once a minute, or a limit refuses.
func TestReplayTellsEveryReason(t *testing.T) {
	const (
		questions = 512 // of a pod, and connections for them
		multicast = "no TCP connection has a multicast or broadcast address"
		linkLocal = "TCP to and from link-local IPv6 addresses is refused: a flow does not say of which interface they are"
	)
	var asking [][2]string
	for i := range questions + 2 {
		asking = append(asking, [2]string{fmt.Sprintf("10.244.1.10:%d", 1024+i), "10.96.0.53:53"})
	}
	for _, tt := range []struct {
		name  string
		flows [][2]string
		want  map[string]string
	}{
		{"FP-102/flows to the proxy itself within a minute", [][2]string{{"10.9.9.9:1001", "10.244.1.10:15006"}, {"10.9.9.9:1002", "10.244.1.10:15006"}}, map[string]string{
			"10.9.9.9:1001": "dropped, reset, refused: attempted recursive call to ourselves", "10.9.9.9:1002": "dropped, reset, refused: attempted recursive call to ourselves",
		}},
		{"addresses that no connection can have", [][2]string{{"10.244.1.10:1001", "224.0.0.1:80"}, {"10.244.1.10:1002", "255.255.255.255:80"}, {"[fd00:1::10]:1003", "[ff02::1]:80"}}, map[string]string{
			"10.244.1.10:1001": "dropped, , refused: " + multicast, "10.244.1.10:1002": "dropped, , refused: " + multicast,
			"[fd00:1::10]:1003": "dropped, , refused: " + multicast,
		}},
		{"FP-75/link-local addresses", [][2]string{{"[fd00:1::10]:1001", "[fe80::1]:80"}, {"[fe80::1]:1002", "[fd00:1::10]:80"}, {"[fd00:1::10]:1003", "[fe80::1]:53"}, {"10.244.1.10:1004", "169.254.169.254:80"}}, map[string]string{
			"[fd00:1::10]:1001": "dropped, unreachable, refused: " + linkLocal, "[fe80::1]:1002": "dropped, unreachable, refused: " + linkLocal,
			"[fd00:1::10]:1003": "dropped, unreachable, refused: " + linkLocal, "10.244.1.10:1004": "passthrough, , the capture ends: ",
		}},
		{"more connections for questions than there can be", asking, map[string]string{
			"10.244.1.10:1535": "dns, accepted, the capture ends: ", "10.244.1.10:1536": "dropped, reset, refused: a limit of connections for questions was reached",
		}},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			flows := replayFlows(t, replayState(t), synCapture(t, tt.flows), nil)
			for src, want := range tt.want {
				f := flows[src]
				if f == nil {
					t.Fatalf("no flow from %s", src)
				}
				if got := f.Class + ", " + f.Answer + ", " + f.Close + ": " + f.Error; got != want {
					t.Errorf("from %s: %q, want %q", src, got, want)
				}
			}
		})
	}
}

// What a pod sends to itself is in captures of all its interfaces, and stays in its kernel; kubelet's probes are exempt. Nothing is decided
// about either.
func TestReplayOfWhatIsNotCaptured(t *testing.T) {
	const own, probe = "stays_in_the_pod 1", "kubelet_probe 1"
	for _, f := range [][3]string{
		{"10.244.1.10:1001", "10.244.1.10:80", own},
		{"10.244.1.10:1001", "10.244.1.10:15006", own},
		{"10.244.1.10:1001", "10.244.1.10:53", own},
		{"10.244.1.10:1001", "127.0.0.1:80", own},
		{"127.0.0.1:1001", "10.244.1.10:80", own},
		{"10.244.1.10:1001", "0.0.0.0:80", own},
		{"[fd00:1::10]:1001", "[fd00:1::10]:80", own},
		{"[fd00:1::10]:1001", "[::1]:80", own},
		{"[fd00:1::10]:1001", "[::]:80", own},
		{"169.254.7.127:1001", "10.244.2.20:8080", probe},
		{"10.244.2.20:8080", "169.254.7.127:1001", probe},
		{"[fd16:9254:7127:1337:ffff:ffff:ffff:ffff]:1001", "[fd00:2::20]:8080", probe},
	} {
		t.Run("FP-78/"+f[0]+" to "+f[1], func(t *testing.T) {
			st, capture := replayState(t), synCapture(t, [][2]string{{f[0], f[1]}})
			out, report := replayBytes(t, st, capture, func(c *ReplayConfig) { c.Checksums = replay.ChecksumsOff })
			if out != "" || report.Packets.Unused() != f[2] {
				t.Errorf("not played: %q, want %q; records:\n%s", report.Packets.Unused(), f[2], out)
			}
			a := replay.NewAnonymizer([]byte("a seed"))
			source, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: bytes.NewReader(capture)})
			if err != nil {
				t.Fatal(err)
			}
			var anonymous bytes.Buffer
			if left, err := a.Capture(source, replay.NewWriter(&anonymous, "test", 0, "pod")); left > 0 || err != nil {
				t.Fatalf("anonymized: %d left out, %v", left, err)
			}
			if out, report = replayBytes(t, a.State(st), anonymous.Bytes(), nil); out != "" || report.Packets.Unused() != f[2] {
				t.Errorf("anonymized, not played: %q, want %q; records:\n%s", report.Packets.Unused(), f[2], out)
			}
		})
	}
}

// An endpoint that has only a hostname: nobody is asked, and the flow is decided about as far as it can be.
func TestReplayOfHostnames(t *testing.T) {
	st := replayState(t)
	key := func(name string) workload.ServiceKey {
		return workload.ServiceKey{Namespace: "shop", Hostname: name + ".shop.svc.cluster.local"}
	}
	add := func(name, vip string, p workload.Protocol, policies ...string) {
		st.Workloads = append(st.Workloads, &workload.Workload{
			UID: "e/shop/" + name, Name: name, Namespace: "shop", ServiceAccount: name, TrustDomain: "cluster.local", Hostname: name + ".example", Protocol: p, Capacity: 1,
			AuthorizationPolicies: policies, Services: map[workload.ServiceKey]workload.PortMap{key(name): {5432: 5432}},
		})
		st.Services = append(st.Services, &workload.Service{
			Name: name, Namespace: "shop", Hostname: key(name).Hostname, VIPs: []workload.NetworkAddr{{Addr: netip.MustParseAddr(vip)}}, Ports: workload.PortMap{5432: 5432},
		})
	}
	add("db", "10.96.0.15", workload.ProtocolTCP)
	add("vm", "10.96.0.16", workload.ProtocolHBONE)
	add("closed", "10.96.0.17", workload.ProtocolHBONE, "shop/nobody")
	st.Policies = append(st.Policies, &workload.Policy{Name: "nobody", Namespace: "shop", Scope: workload.ScopePolicyWorkload, Groups: []workload.Group{{{{Namespaces: []workload.StringMatch{{Value: "none"}}}}}}})
	const rst, client = 4 | 16, "10.244.1.10:1001"
	for _, tt := range []struct {
		name, to string
		peer     replay.Peer
		rst      bool
		want     ReplayFlow
	}{
		{"T1/outside the mesh", "10.96.0.15:5432", replay.PeerEcho, false, ReplayFlow{Class: "passthrough", Answer: "accepted", Opened: []ReplayConnect{{Kind: "dial", NextHop: "db.example:5432"}}}},
		{"T1/in the mesh", "10.96.0.16:5432", replay.PeerEcho, false, ReplayFlow{Class: "mesh", Answer: "accepted", Opened: []ReplayConnect{{Kind: "connect", NextHop: "vm.example:15008", Authority: "vm.example:5432"}}}},
		{"T1/refused by the recorded peer", "10.96.0.16:5432", replay.PeerRecorded, true, ReplayFlow{
			Class: "mesh", Answer: "reset", Opened: []ReplayConnect{{Kind: "connect", NextHop: "vm.example:15008", Authority: "vm.example:5432"}},
			Error: "the recorded peer: connection refused; by vm.example:15008 or by the application behind it, the capture does not say",
		}},
		{"T1/denied", "10.96.0.17:5432", replay.PeerEcho, false, ReplayFlow{Class: "dropped", Answer: "reset", Opened: []ReplayConnect{{Kind: "connect", NextHop: "closed.example:15008", Authority: "closed.example:5432"}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			capture := synCapture(t, [][2]string{{client, tt.to}})
			if tt.rst {
				capture = answeredBy(t, capture, tt.to, client, rst)
			}
			f := replayFlows(t, st, capture, func(c *ReplayConfig) { c.Peer = tt.peer })[client]
			got := ReplayFlow{Class: f.Class, Answer: f.Answer, Error: f.Error}
			for _, o := range f.Opened {
				got.Opened = append(got.Opened, ReplayConnect{Kind: o.Kind, NextHop: o.NextHop, Authority: o.Authority})
			}
			if tt.want.Error == "" {
				got.Error = ""
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.IgnoreUnexported(got)); diff != "" {
				t.Errorf("(-want +got):\n%s\n%s", diff, f.Text())
			}
			if len(f.Warnings) != 1 || !strings.Contains(f.Warnings[0], ".example is looked up for each connection") || strings.Contains(f.Text(), "0.0.0.") {
				t.Errorf("the flow is told as\n%s", f.Text())
			}
		})
	}
}

// An address that ends like one that stands for a hostname is another one.
func TestReplayNamesInText(t *testing.T) {
	var n replayNames
	for _, name := range []string{"db.example", "vm.example"} {
		if _, err := n.Resolve(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	note := &flowNote{looked: []netip.Addr{netip.MustParseAddr("0.0.0.1"), netip.MustParseAddr("0.0.0.2")}}
	for _, tt := range []struct{ text, want string }{
		{"", ""},
		{"0.0.0.1:5432", "db.example:5432"},
		{"10.0.0.1:5432", "10.0.0.1:5432"},
		{"1.0.0.0.1:5432", "1.0.0.0.1:5432"},
		{"10.0.0.1:15008, 0.0.0.1:15008, 110.0.0.2:1, 0.0.0.2:1", "10.0.0.1:15008, db.example:15008, 110.0.0.2:1, vm.example:1"},
		{"hbone: connect 0.0.0.2:15008: refused by 20.0.0.2:80", "hbone: connect vm.example:15008: refused by 20.0.0.2:80"},
	} {
		if got := n.told(note, tt.text); got != tt.want {
			t.Errorf("told(%q) = %q, want %q", tt.text, got, tt.want)
		}
	}
}

// A capture of a node that gives flows to the kernel has their SYNs only, twice: as they came and, with a note, as they went on. What was
// decided is told, and nothing is made up of the rest.
func TestReplayOfWhatTheKernelCarries(t *testing.T) {
	const stranger, client, intruder = "10.9.9.9:1001", "10.244.1.10:1001", "10.244.1.66:1001"
	const rst = 4 | 16
	const carried = "the kernel carries it: the capture has its SYN only"
	for _, tt := range []struct {
		name, src, dst string
		notes          []bool // of the flow's SYNs
		rst            bool   // and then one of its destination
		peer           replay.Peer
		want           ReplayFlow
	}{
		{"outside the mesh", client, "192.0.2.80:443", []bool{false, true}, false, replay.PeerRecorded, ReplayFlow{Class: "passthrough", Answer: "not captured", Kernel: true, Close: carried}},
		{"in the mesh", client, "10.96.0.10:80", []bool{false, true}, false, replay.PeerRecorded, ReplayFlow{Class: "mesh", Answer: "not captured", Kernel: true, Close: carried}},
		{"inbound", stranger, "10.244.1.10:9090", []bool{false, true}, false, replay.PeerRecorded, ReplayFlow{Class: "inbound", Answer: "not captured", Kernel: true, Close: carried}},
		{"questions", client, "10.96.0.53:53", []bool{false, true}, false, replay.PeerRecorded, ReplayFlow{Class: "dns", Answer: "not captured", Kernel: true, Close: carried}},
		{"the SYN again", client, "10.96.0.10:80", []bool{false, false, true, false, true}, false, replay.PeerRecorded, ReplayFlow{Class: "mesh", Answer: "not captured", Kernel: true, Close: carried}},
		{"without the first", client, "10.96.0.10:80", []bool{true}, false, replay.PeerRecorded, ReplayFlow{Class: "mesh", Answer: "not captured", Kernel: true, Close: carried}},
		{"to an echo", client, "10.96.0.10:80", []bool{false, true}, false, replay.PeerEcho, ReplayFlow{Class: "mesh", Answer: "not captured", Kernel: true, Close: carried}},
		{"denied here, but not when it was captured", intruder, "10.96.0.10:80", []bool{false, true}, false, replay.PeerRecorded, ReplayFlow{Class: "dropped", Answer: "reset", Close: "denied"}},
		{"denied", intruder, "10.96.0.10:80", []bool{false}, true, replay.PeerRecorded, ReplayFlow{Class: "dropped", Answer: "reset", Close: "denied"}},
		{"refused by the peer", client, "10.96.0.10:80", []bool{false}, true, replay.PeerRecorded, ReplayFlow{Class: "mesh", Answer: "reset", Close: "refused"}},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			var file bytes.Buffer
			w := replay.NewWriter(&file, "test", 0, "pod")
			for i, noted := range tt.notes {
				comment := "flow 7 outbound unknown -> unknown"
				if noted {
					comment += "; " + replay.CarriedNote
				}
				if err := w.Packet(0, time.Unix(1_772_366_400, int64(i)*1e6), replay.DirUnknown, synPacket(tt.src, tt.dst), 40, comment); err != nil {
					t.Fatal(err)
				}
			}
			capture := file.Bytes()
			if tt.rst {
				capture = answeredBy(t, capture, tt.dst, tt.src, rst)
			}
			var again, small bytes.Buffer
			records := 0
			play := func(capture []byte, out *bytes.Buffer) *ReplayFlow {
				records = 0
				return replayFlows(t, replayState(t), capture, func(c *ReplayConfig) {
					emit := c.Emit
					c.Peer, c.Recorded = tt.peer, replay.NewWriter(out, "test", 0, "pod")
					c.Emit = func(r ReplayRecord) error { records++; return emit(r) }
				})[tt.src]
			}
			for _, f := range []*ReplayFlow{play(capture, &small), play(small.Bytes(), &again)} { // also as it is written once more
				got := ReplayFlow{Class: f.Class, Answer: f.Answer, Kernel: f.Kernel, Close: f.Close}
				if diff := cmp.Diff(tt.want, got, cmpopts.IgnoreUnexported(got)); diff != "" || records != 1 || f.Sent+f.Received > 0 || f.Kernel && f.Error != "" {
					t.Errorf("%d records (-want +got):\n%s\n%s", records, diff, f.Text())
				}
			}
		})
	}
}
