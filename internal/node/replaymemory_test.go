package node

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"ztun.dev/ztun/internal/replay"
)

// A craftedCapture is a capture that is being made, packet by packet.
type craftedCapture struct {
	t    *testing.T
	file bytes.Buffer
	z    *gzip.Writer
	w    *replay.Writer
	at   time.Time // of the next packet
	gap  time.Duration
	deaf bool // the next packets have no window
}

func newCraftedCapture(t *testing.T, gap time.Duration) *craftedCapture {
	c := &craftedCapture{t: t, at: time.Unix(1_772_366_400, 0), gap: gap}
	c.z, _ = gzip.NewWriterLevel(&c.file, gzip.BestSpeed) // a level that there is
	c.w = replay.NewWriter(c.z, "test", 0, "pod")
	return c
}

// Flags of TCP.
const tcpFIN, tcpSYN, tcpACK = 1, 2, 16

// segment adds a segment with data, and n bytes in all: the rest was not captured.
func (c *craftedCapture) segment(from, to string, flags byte, seq, ack uint32, data []byte, n int) {
	b := append(synPacket(from, to), data...)
	binary.BigEndian.PutUint16(b[2:], uint16(40+n))
	binary.BigEndian.PutUint32(b[24:], seq)
	binary.BigEndian.PutUint32(b[28:], ack)
	b[33] = flags
	if c.deaf {
		b[34] = 0
	}
	if err := c.w.Packet(0, c.at, replay.DirUnknown, b, 40+n, ""); err != nil {
		c.t.Fatal(err)
	}
	c.at = c.at.Add(c.gap)
}

// open adds a handshake. Data begin with the sequence numbers 1001 and 5001.
func (c *craftedCapture) open(client, server string) {
	c.segment(client, server, tcpSYN, 1000, 0, nil, 0)
	c.segment(server, client, tcpSYN|tcpACK, 5000, 1001, nil, 0)
	c.segment(client, server, tcpACK, 1001, 5001, nil, 0)
}

// end returns the file.
func (c *craftedCapture) end() []byte {
	if err := c.z.Close(); err != nil {
		c.t.Fatal(err)
	}
	return c.file.Bytes()
}

// Captures of a few megabytes that ask for much more: memory is bounded, by a limit for all flows together.
func TestReplayOfCostlyCaptures(t *testing.T) {
	if slower > 1 || testing.Short() {
		t.Skip("it takes a few seconds")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const web, resolver = "192.0.2.80:80", "192.0.2.53:53"
	client := func(i int) string { return fmt.Sprintf("10.244.1.10:%d", 1024+i) }
	for _, tt := range []struct {
		name string
		gap  time.Duration
		peer replay.Peer
		add  func(c *craftedCapture)
		want string // the end of each flow
	}{
		{"bytes that were not captured and that nobody acknowledges", time.Microsecond, replay.PeerRecorded, func(c *craftedCapture) {
			for i := range 400 {
				c.open(client(i), web)
				for j := range uint32(20) {
					c.segment(web, client(i), tcpACK, 5001+j*65000, 1001, nil, 65000)
				}
			}
		}, "the capture ends"},
		{"the same, once the server has ended it", time.Microsecond, replay.PeerRecorded, func(c *craftedCapture) {
			for i := range 400 {
				c.open(client(i), web)
				for j := range uint32(20) {
					c.segment(web, client(i), tcpACK|tcpFIN*byte(j/19), 5001+j*65000, 1001, nil, 65000)
				}
				c.at = c.at.Add(time.Minute)
			}
		}, ""},
		{"what the application sends, to an echo that it does not listen to", time.Microsecond, replay.PeerEcho, func(c *craftedCapture) {
			c.deaf = true
			for i := range 400 {
				c.open(client(i), web)
				for j := range uint32(40) {
					c.segment(client(i), web, tcpACK, 1001+j*65000, 5001, nil, 65000)
				}
			}
		}, "the capture ends"},
		{"data behind a hole", time.Microsecond, replay.PeerRecorded, func(c *craftedCapture) {
			data := make([]byte, 8000)
			for i := range 400 {
				c.open(client(i), web)
				for j := range uint32(120) {
					c.segment(web, client(i), tcpACK, 5101+j*8000, 1001, data, len(data))
				}
			}
		}, "the capture ends"},
		{"answers to no question", time.Microsecond, replay.PeerRecorded, func(c *craftedCapture) {
			for i := range 400 {
				c.open(client(i), resolver)
				for j := range uint32(60) {
					c.segment(resolver, client(i), tcpACK, 5001+j*65002, 1001, []byte{0xfd, 0xe8}, 65002)
				}
			}
		}, ""},
		{"connections that the server ends first, all at the same time", 0, replay.PeerRecorded, func(c *craftedCapture) {
			for i := range 60_000 {
				c.open(client(i), web)
				c.segment(web, client(i), tcpACK|tcpFIN, 5001, 1001, nil, 0)
				c.segment(client(i), web, tcpACK|tcpFIN, 1001, 5002, nil, 0)
				c.segment(web, client(i), tcpACK, 5002, 1002, nil, 0)
			}
		}, "ended"},
	} {
		t.Run("T3/"+tt.name, func(t *testing.T) {
			c := newCraftedCapture(t, tt.gap)
			tt.add(c)
			file := c.end()
			debug.FreeOSMemory()
			var most, before uint64
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			before = m.HeapSys - m.HeapReleased
			most = before
			n := 0
			_, report := replayBytes(t, replayState(t), file, func(cfg *ReplayConfig) {
				cfg.Peer, cfg.Checksums = tt.peer, replay.ChecksumsOff
				cfg.Emit = func(r ReplayRecord) error {
					if n++; n%64 == 1 {
						runtime.ReadMemStats(&m)
						most = max(most, m.HeapSys-m.HeapReleased)
					}
					if f, ok := r.(*ReplayFlow); ok && tt.want != "" && f.Close != tt.want {
						t.Errorf("flow %d: %s, want %s", f.ID, f.Close, tt.want)
					}
					return nil
				}
			})
			runtime.ReadMemStats(&m)
			most = max(most, m.HeapSys-m.HeapReleased)
			t.Logf("%d packets of %d KiB: %d MiB", report.Packets.Packets, len(file)>>10, (most-before)>>20)
			if grown := most - before; grown > 250<<20 {
				t.Errorf("%d KiB took %d MiB of memory", len(file)>>10, grown>>20)
			}
		})
	}
}
