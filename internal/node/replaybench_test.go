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

// newLongCapture takes the first conversation of a sample: 10 packets. extra are further bytes in each packet with data.
func newLongCapture(t testing.TB, conversations, extra int) *longCapture {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(replaySamples, "mesh-http.pcap"))
	if err != nil {
		t.Fatal(err)
	}
	c := &longCapture{header: b[:pcapHeaderBytes], left: conversations}
	c.buf = c.header
	for b = b[pcapHeaderBytes:]; len(c.records) < 10; {
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

func playLong(t testing.TB, conversations, extra int) (records int, r *ReplayReport) {
	t.Helper()
	source, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: newLongCapture(t, conversations, extra)})
	if err != nil {
		t.Fatal(err)
	}
	r, err = Replay(t.Context(), ReplayConfig{
		State: replayState(t), Source: source, Checksums: replay.ChecksumsOff, Local: []netip.Addr{netip.MustParseAddr("10.244.1.10")},
		Emit: func(rec ReplayRecord) error {
			records++
			if f := rec.(*ReplayFlow); f.Class != "mesh" || f.Close != "ended" || f.Sent != uint64(53+extra) || f.Received != uint64(63+extra) {
				t.Errorf("flow %+v", f)
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return records, r
}

// 100,000 flows, and no more memory than for 10,000.
func TestReplayOfManyFlows(t *testing.T) {
	if testing.Short() || slower > 1 {
		t.Skip("it takes a few seconds")
	}
	const flows = 100_000
	heap := func(n int) uint64 {
		records, report := playLong(t, n, 0)
		if records != n || report.Packets.Played != uint64(10*n) {
			t.Errorf("%d records, report %+v, want %d and %d packets played", records, report, n, 10*n)
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.Sys
	}
	t.Run("T3/100k flows", func(t *testing.T) {
		if before, after := heap(flows/2), heap(flows); after > before+before/2+16<<20 {
			t.Errorf("%d MiB from the system after %d flows, %d after %d", before>>20, flows/2, after>>20, flows)
		}
	})
}

// BenchmarkReplay is the whole pipeline, on one processor as ztun replay has it.
func BenchmarkReplay(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, extra := range []int{0, 1300} {
		b.Run(map[int]string{0: "payload=50", 1300: "payload=1350"}[extra], func(b *testing.B) {
			const conversations = 2000
			for b.Loop() {
				playLong(b, conversations, extra)
			}
			b.ReportMetric(float64(b.N)*conversations*10/b.Elapsed().Seconds(), "packets/s")
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			b.ReportMetric(float64(m.Sys)/(1<<20), "MiB-sys")
		})
	}
}
