package node

import (
	"encoding/binary"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"ztun.dev/ztun/internal/replay"
)

// A longCapture is the capture of as many HTTP conversations as asked for: those of a sample, each time from other ports. It is made
// while it is read.
type longCapture struct {
	header  []byte
	records [][]byte // of one conversation
	left    int      // conversations
	number  int
	buf     []byte
	at      int
}

const (
	pcapHeaderBytes = 24
	pcapRecordBytes = 16
	etherBytes      = 14
	ipBytes         = 20
)

// newLongCapture takes the first packets of a sample, in which the client's port is 40000. extra are further bytes in each packet
// with data.
func newLongCapture(t testing.TB, sample string, packets, conversations, extra int) *longCapture {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(replaySamples, sample))
	if err != nil {
		t.Fatal(err)
	}
	c := &longCapture{header: b[:pcapHeaderBytes], left: conversations}
	c.buf = c.header
	for b = b[pcapHeaderBytes:]; len(c.records) < packets; {
		n := pcapRecordBytes + int(binary.LittleEndian.Uint32(b[8:]))
		c.records = append(c.records, append([]byte(nil), b[:n]...))
		b = b[n:]
	}
	for i := range c.records {
		c.records[i] = grown(c.records[i], i, extra)
	}
	return c
}

// grown makes the request and the answer longer, and what comes after them fitting.
func grown(r []byte, i, extra int) []byte {
	ip := r[pcapRecordBytes+etherBytes:]
	tcp := ip[ipBytes:]
	add := func(b []byte, n int) { binary.BigEndian.PutUint32(b, binary.BigEndian.Uint32(b)+uint32(n)) }
	fromClient := binary.BigEndian.Uint16(tcp) == 40000
	if i > 3 && fromClient {
		add(tcp[4:], extra)
	} else if i > 3 {
		add(tcp[8:], extra)
	}
	if i > 5 && !fromClient {
		add(tcp[4:], extra)
	} else if i > 5 {
		add(tcp[8:], extra)
	}
	if i != 3 && i != 5 {
		return r
	}
	binary.BigEndian.PutUint16(ip[2:], binary.BigEndian.Uint16(ip[2:])+uint16(extra))
	for _, at := range []int{8, 12} {
		binary.LittleEndian.PutUint32(r[at:], binary.LittleEndian.Uint32(r[at:])+uint32(extra))
	}
	return append(r, make([]byte, extra)...)
}

// bytes is the length of one conversation in the file.
func (c *longCapture) bytes() (n int) {
	for _, r := range c.records {
		n += len(r)
	}
	return n
}

// Read implements io.Reader.
func (c *longCapture) Read(p []byte) (int, error) {
	if c.at == len(c.buf) {
		if c.left == 0 {
			return 0, io.EOF
		}
		c.left--
		c.next()
	}
	n := copy(p, c.buf[c.at:])
	c.at += n
	return n, nil
}

func (c *longCapture) next() {
	c.buf, c.at = nil, 0
	for i, r := range c.records {
		at := len(c.buf)
		c.buf = append(c.buf, r...)
		b := c.buf[at:]
		// A conversation takes a millisecond, and the next follows.
		micros := uint64(c.number)*1000 + uint64(i)*50
		binary.LittleEndian.PutUint32(b, uint32(1_772_366_400+micros/1e6))
		binary.LittleEndian.PutUint32(b[4:], uint32(micros%1e6))
		tcp := b[pcapRecordBytes+etherBytes+ipBytes:]
		port := tcp
		if binary.BigEndian.Uint16(tcp) != 40000 {
			port = tcp[2:]
		}
		binary.BigEndian.PutUint16(port, uint16(1024+c.number%60000))
	}
	c.number++
}

func playLong(t testing.TB, c *longCapture, change func(*ReplayConfig)) *ReplayReport {
	t.Helper()
	source, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: c})
	if err != nil {
		t.Fatal(err)
	}
	cfg := ReplayConfig{
		State: replayState(t), Source: source, Checksums: replay.ChecksumsOff, Local: []netip.Addr{netip.MustParseAddr("10.244.1.10")},
		Emit: func(ReplayRecord) error { return nil },
	}
	if change != nil {
		change(&cfg)
	}
	report, err := Replay(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// 100,000 flows, and no more memory than for a fifth of them.
func TestReplayOfManyFlows(t *testing.T) {
	if testing.Short() || slower > 1 {
		t.Skip("it takes a few seconds")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	taken := func(n int) uint64 {
		records := 0
		report := playLong(t, newLongCapture(t, "refused.pcap", 2, n, 0), func(c *ReplayConfig) {
			c.Emit = func(r ReplayRecord) error {
				records++
				if f := r.(*ReplayFlow); f.Class != "mesh" || f.Close != "refused" {
					t.Errorf("flow %+v", f)
				}
				return nil
			}
		})
		if records != n || report.Packets.Played != uint64(2*n) {
			t.Errorf("%d records, report %+v, want %d and %d packets played", records, report, n, 2*n)
		}
		return fromSystem()
	}
	t.Run("T3/100k flows", func(t *testing.T) {
		const flows = 100_000
		if before, after := taken(flows/5), taken(flows); after > before+before/2+32<<20 {
			t.Errorf("%d MiB from the system after %d flows, %d after %d", before>>20, flows/5, after>>20, flows)
		}
	})
}

// Flows that never end: above the limit the longest without a packet is given up.
func TestReplayOfFlowsThatStayOpen(t *testing.T) {
	const flows, most = 60, 20
	closes := make(map[string]int)
	playLong(t, newLongCapture(t, "mesh-http.pcap", 3, flows, 0), func(c *ReplayConfig) {
		c.MaxOpen = most
		c.Emit = func(r ReplayRecord) error {
			f := r.(*ReplayFlow)
			closes[f.Close]++
			if first := f.ID <= flows-most; first != (f.Close == "given up: too many flows are open at once") {
				t.Errorf("flow %d: %s", f.ID, f.Close)
			}
			return nil
		}
	})
	if closes["the capture ends"] != most || len(closes) != 2 {
		t.Errorf("ends %v, want %d flows that are open at the end and %d given up", closes, most, flows-most)
	}
}

// BenchmarkReplay is the whole pipeline, on one processor as ztun replay has it.
func BenchmarkReplay(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, extra := range []int{0, 1300} {
		b.Run(map[int]string{0: "payload=50", 1300: "payload=1350"}[extra], func(b *testing.B) {
			const conversations = 2000
			b.SetBytes(conversations * int64(newLongCapture(b, "mesh-http.pcap", 10, 1, extra).bytes()))
			for b.Loop() {
				if r := playLong(b, newLongCapture(b, "mesh-http.pcap", 10, conversations, extra), nil); r.Records["mesh"] != conversations {
					b.Fatalf("report %+v", r)
				}
			}
			b.ReportMetric(float64(b.N)*conversations*10/b.Elapsed().Seconds(), "packets/s")
			b.ReportMetric(float64(fromSystem())/(1<<20), "MiB-sys")
		})
	}
}

// fromSystem is how much memory the process has got, in bytes.
func fromSystem() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Sys
}

// BenchmarkReplayGigabyte plays a capture of 1 GB, and needs no more memory for it than for a tenth of it.
func BenchmarkReplayGigabyte(b *testing.B) {
	if os.Getenv("ZTUN_BENCH_GIGABYTE") == "" {
		b.Skip("it takes half a minute: set ZTUN_BENCH_GIGABYTE=1")
	}
	const size, most, extra, packets = 1_000_000_000, 200 << 20, 1300, 10
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	one := newLongCapture(b, "mesh-http.pcap", packets, 1, extra).bytes()
	conversations := size / one
	playLong(b, newLongCapture(b, "mesh-http.pcap", packets, conversations/10, extra), nil)
	before := fromSystem()
	b.SetBytes(int64(conversations * one))
	for b.Loop() {
		if r := playLong(b, newLongCapture(b, "mesh-http.pcap", packets, conversations, extra), nil); r.Records["mesh"] != conversations {
			b.Fatalf("report %+v", r)
		}
	}
	after := fromSystem()
	b.ReportMetric(float64(b.N*conversations*packets)/b.Elapsed().Seconds(), "packets/s")
	b.ReportMetric(float64(after)/(1<<20), "MiB-sys")
	if after > most || after > before+before/2 {
		b.Errorf("%d MiB from the system after 1 GB, %d after a tenth; want at most %d", after>>20, before>>20, most>>20)
	}
}
