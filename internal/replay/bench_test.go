package replay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
)

// BenchmarkReader is the reader alone, to the headers of TCP.
func BenchmarkReader(b *testing.B) {
	frames := meshHTTP()
	one := pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, frames)
	const copies = 1000
	b.Run("format=pcap", func(b *testing.B) {
		file := append(bytes.Clone(one), bytes.Repeat(one[pcapHeader:], copies-1)...)
		benchmarkReader(b, file, copies*len(frames))
	})
	b.Run("format=pcapng", func(b *testing.B) {
		f := new(ngFile)
		f.section(binary.LittleEndian)
		f.iface(LinkEthernet, "eth0", 9)
		for range copies {
			for _, p := range frames {
				f.packet(0, uint64(epoch.Add(p.at).UnixNano()), ethernet(p.ip))
			}
		}
		benchmarkReader(b, f.b, copies*len(frames))
	})
}

func benchmarkReader(b *testing.B, file []byte, packets int) {
	b.SetBytes(int64(len(file)))
	b.ReportAllocs()
	for b.Loop() {
		r, err := newReader(bytes.NewReader(file))
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		var p Packet
		var k packet
		for {
			if err := r.next(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				b.Fatal(err)
			}
			at, _ := p.Link.network(p.Data)
			if why := k.parse(p.Data[at:], p.Length-at); why != "" {
				b.Fatal(why)
			}
			n++
		}
		if n != packets {
			b.Fatalf("%d packets, want %d", n, packets)
		}
	}
	b.ReportMetric(float64(b.N)*float64(packets)/b.Elapsed().Seconds(), "packets/s")
}
