package replay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A read packet, in a form that compares.
type seen struct {
	At        time.Duration // since epoch
	IP        string
	Interface string
}

func readAll(t *testing.T, b []byte) (list []seen, err error) {
	t.Helper()
	r, err := newReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	var p Packet
	for {
		if err := r.next(&p); errors.Is(err, io.EOF) {
			return list, nil
		} else if err != nil {
			return list, err
		}
		at, ok := p.Link.network(p.Data)
		if !ok {
			t.Errorf("packet at byte %d: no IP packet in %x", p.Offset, p.Data)
			continue
		}
		list = append(list, seen{time.Unix(0, p.Time).Sub(epoch), string(p.Data[at:]), p.Interface})
	}
}

func TestFormats(t *testing.T) {
	frames := meshHTTP()
	want := func(name string) (list []seen) {
		for _, f := range frames {
			list = append(list, seen{f.at, string(f.ip), name})
		}
		return list
	}
	ng := func(order byteOrder, resolution byte, units int64, kind uint32) []byte {
		f := new(ngFile)
		f.section(order)
		f.iface(LinkRaw, "eth0", resolution)
		for _, p := range frames {
			at := uint64(epoch.Add(p.at).UnixNano() / units)
			if kind == ngPacket {
				f.packet(0, at, p.ip)
				continue
			}
			b := order.AppendUint16(nil, 0) // the packet block of early versions: interface, and drops
			b = order.AppendUint16(b, 99)
			b = order.AppendUint32(b, uint32(at>>32))
			b = order.AppendUint32(b, uint32(at))
			b = order.AppendUint32(b, uint32(len(p.ip)))
			b = order.AppendUint32(b, uint32(len(p.ip)))
			f.block(ngOldPacket, pad(append(b, p.ip...)))
		}
		return f.b
	}
	for _, tt := range []struct {
		name string
		file []byte
		want []seen
	}{
		{"pcap, little-endian", pcapFile(binary.LittleEndian, false, LinkRaw, nil, frames), want("")},
		{"pcap, big-endian", pcapFile(binary.BigEndian, false, LinkRaw, nil, frames), want("")},
		{"pcap, nanoseconds, little-endian", pcapFile(binary.LittleEndian, true, LinkRaw, nil, frames), want("")},
		{"pcap, nanoseconds, big-endian", pcapFile(binary.BigEndian, true, LinkRaw, nil, frames), want("")},
		{"Ethernet", pcapFile(binary.LittleEndian, false, LinkEthernet, ethernet, frames), want("")},
		{"VLAN", pcapFile(binary.LittleEndian, false, LinkEthernet, func(b []byte) []byte { return vlan(b, 7) }, frames), want("")},
		{"QinQ", pcapFile(binary.LittleEndian, false, LinkEthernet, func(b []byte) []byte { return vlan(b, 7, 8) }, frames), want("")},
		{"cooked v1", pcapFile(binary.LittleEndian, false, LinkSLL, cooked1, frames), want("")},
		{"cooked v2", pcapFile(binary.LittleEndian, false, LinkSLL2, cooked2, frames), want("")},
		{"null", pcapFile(binary.LittleEndian, false, LinkNull, null, frames), want("")},
		{"loop", pcapFile(binary.LittleEndian, false, LinkLoop, null, frames), want("")},
		{"IPv4", pcapFile(binary.LittleEndian, false, LinkIPv4, nil, frames), want("")},
		{"pcapng, little-endian, nanoseconds", ng(binary.LittleEndian, 9, 1, ngPacket), want("eth0")},
		{"pcapng, big-endian, microseconds", ng(binary.BigEndian, 6, 1000, ngPacket), want("eth0")},
		{"pcapng, packet block of early versions", ng(binary.BigEndian, 6, 1000, ngOldPacket), want("eth0")},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			got, err := readAll(t, tt.file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// What Writer writes is read again.
func TestWriterIsRead(t *testing.T) {
	var b bytes.Buffer
	w := NewWriter(&b, "test", 0, "pod", "tunnel")
	var want []seen
	for i, f := range meshHTTP() {
		name := []string{"pod", "tunnel"}[i%2]
		if err := w.Packet(i%2, epoch.Add(f.at), DirInbound, f.ip, len(f.ip), strings.Repeat("x", i%5)); err != nil {
			t.Fatal(err)
		}
		want = append(want, seen{f.at, string(f.ip), name})
	}
	got, err := readAll(t, b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A Source says of each file what it could not use, and goes on.
func TestBadInput(t *testing.T) {
	whole := pcapFile(binary.LittleEndian, false, LinkRaw, nil, meshHTTP())
	huge := bytes.Clone(whole)
	binary.LittleEndian.PutUint32(huge[pcapHeader+8:], 1<<30)
	ng := new(ngFile)
	ng.section(binary.LittleEndian)
	ng.iface(LinkRaw, "a", 9)
	block := func(kind, length, again uint32, body []byte) []byte {
		b := binary.LittleEndian.AppendUint32(bytes.Clone(ng.b), kind)
		b = binary.LittleEndian.AppendUint32(b, length)
		return binary.LittleEndian.AppendUint32(append(b, body...), again)
	}
	foreign := binary.LittleEndian.AppendUint32(nil, 1) // of interface 1
	for _, tt := range []struct {
		name    string
		file    []byte
		packets int
		want    string
	}{
		{"empty", nil, 0, "byte 0: it is empty"},
		{"two bytes", []byte{1, 2}, 0, "byte 0: it is too short for a capture"},
		{"not a capture", []byte("hello, world"), 0, "byte 0: it begins with 0x68656c6c: neither pcap nor pcapng"},
		{"header cut off", whole[:20], 0, "byte 0: the header is cut off"},
		{"old version", append(append(bytes.Clone(whole[:4]), 1, 0), whole[6:]...), 0, "byte 0: pcap of version 1, want 2"},
		{"last packet cut off", whole[:len(whole)-1], 29, "byte 2392: the last packet is cut off"},
		{"last header cut off", whole[:2392+5], 29, "byte 2392: the header of the last packet is cut off"},
		{"a packet of 1 GiB", huge, 0, "byte 24: a packet of 1073741824 bytes"},
		{"gzip cut off", zipped(whole)[:200], 1, "is cut off"},
		{"gzip header damaged", append([]byte{0x1f, 0x8b, 99}, whole...), 0, "byte 0: gzip: invalid header"},
		{"block of 4 GiB", block(ngPacket, 1<<32-4, 0, nil), 0, "byte 68: a block of 4294967292 bytes"},
		{"unknown block of 4 GiB", block(77, 1<<32-4, 0, nil), 0, "byte 68: a block of 4294967292 bytes"},
		{"unknown block of 1 GiB", block(77, 1<<30, 0, nil), 0, "byte 68: the last block is cut off"},
		{"block of 8 bytes", block(ngPacket, 8, 8, nil), 0, "byte 68: a block of 8 bytes"},
		{"block of 13 bytes", block(ngPacket, 13, 13, nil), 0, "byte 68: a block of 13 bytes"},
		{"lengths differ", block(ngPacket, 16, 20, make([]byte, 4)), 0, "byte 68: a block of 16 bytes at its beginning and 20 at its end"},
		{"packet block too short", block(ngPacket, 16, 16, make([]byte, 4)), 0, "byte 68: a packet block that is too short"},
		{"unknown interface", block(ngPacket, 32, 32, append(foreign, make([]byte, 16)...)), 0, "byte 68: a packet of interface 1, of 1"},
		{"packet longer than its block", block(ngPacket, 32, 32, append(make([]byte, 12), 255, 0, 0, 0, 0, 0, 0, 0)), 0, "byte 68: a packet of 255 bytes in a block of 32"},
		{"section without byte order", append([]byte{10, 13, 13, 10, 28, 0, 0, 0}, make([]byte, 20)...), 0, "byte 0: a section without a byte order"},
	} {
		t.Run("T3/"+tt.name, func(t *testing.T) {
			dir := t.TempDir()
			bad, good := filepath.Join(dir, "1.pcap"), filepath.Join(dir, "2.pcap")
			for name, b := range map[string][]byte{bad: tt.file, good: whole} {
				if err := os.WriteFile(name, b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			s, err := NewSource(SourceConfig{Paths: []string{dir}})
			if err != nil {
				t.Fatal(err)
			}
			packets := make(map[string]int)
			var p Packet
			for {
				if err = s.Next(&p); err != nil {
					break
				}
				packets[s.Name()]++
			}
			if !errors.Is(err, io.EOF) {
				t.Errorf("error %v, want EOF", err)
			}
			if packets[bad] < tt.packets || tt.name != "gzip cut off" && packets[bad] != tt.packets || packets[good] != 30 {
				t.Errorf("packets %v, want %d and 30", packets, tt.packets)
			}
			if list := s.Problems(); len(list) != 1 || list[0].File != bad || !strings.Contains(list[0].Text, tt.want) {
				t.Errorf("problems %v, want one with %q", list, tt.want)
			}
		})
	}
}

func TestDirectories(t *testing.T) {
	dir := t.TempDir()
	one := pcapFile(binary.LittleEndian, false, LinkRaw, nil, meshHTTP()[:1])
	for _, name := range []string{"b.pcap", "a.pcap", ".hidden", "sub/c.pcap", "sub/.d/e.pcap"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, one, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name      string
		recursive bool
		want      []string
	}{
		{"in the order of names", false, []string{"a.pcap", "b.pcap", "standard input"}},
		{"with what is below", true, []string{"a.pcap", "b.pcap", "sub/c.pcap", "standard input"}},
	} {
		t.Run("T1/"+tt.name, func(t *testing.T) {
			s, err := NewSource(SourceConfig{Paths: []string{dir, "-"}, Recursive: tt.recursive, Stdin: bytes.NewReader(one)})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for p := new(Packet); s.Next(p) == nil; {
				got = append(got, strings.TrimPrefix(s.Name(), dir+"/"))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	empty := t.TempDir()
	if _, err := NewSource(SourceConfig{Paths: []string{empty}}); err == nil || !strings.Contains(err.Error(), "has no file") {
		t.Errorf("empty directory: %v", err)
	}
	if _, err := NewSource(SourceConfig{Paths: []string{empty + "/none"}}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no such file: %v", err)
	}
}

func TestInterfaceTimes(t *testing.T) {
	for _, tt := range []struct {
		name  string
		iface ngIface
		count uint64
		want  int64
	}{
		{"microseconds", ngIface{units: ticks(6)}, 1_500_000, 1.5e9},
		{"seconds", ngIface{units: ticks(0)}, 3, 3e9},
		{"units of 2^-10 s", ngIface{units: ticks(0x80 | 10)}, 1536, 1.5e9},
		{"finer than nanoseconds", ngIface{units: ticks(12)}, 1_500_000_000_999, 1.5e9},
		{"as fine as can be", ngIface{units: ticks(19)}, 1 << 63, 922337203},
		{"an offset", ngIface{units: ticks(6), seconds: 10}, 1_500_000, 11.5e9},
		{"before 1970", ngIface{units: ticks(6), seconds: -10}, 1_500_000, 0},
		{"long after", ngIface{units: ticks(0)}, 1<<64 - 1, maxTime},
		{"an offset out of range", ngIface{units: ticks(6), seconds: 1<<63 - 1}, 0, maxTime},
		{"both nearly out of range", ngIface{units: ticks(0), seconds: 4_600_000_000}, 4_600_000_000, maxTime},
	} {
		if got := tt.iface.time(tt.count); got != tt.want {
			t.Errorf("%s: time(%d) = %d, want %d", tt.name, tt.count, got, tt.want)
		}
	}
	for _, resolution := range []byte{20, 0x80 | 64, 0x7f, 0xff} {
		if n := ticks(resolution); n != 0 {
			t.Errorf("ticks(%#x) = %d, want 0", resolution, n)
		}
	}
}

// FuzzReader reads any bytes: each packet is whole and in place, and the end comes.
func FuzzReader(f *testing.F) {
	for _, b := range sampleFiles() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := newReader(bytes.NewReader(b))
		if err != nil {
			return
		}
		var p Packet
		last := int64(-1)
		for {
			err := r.next(&p)
			if err != nil {
				var damaged *DamageError
				if !errors.Is(err, io.EOF) && !errors.As(err, &damaged) {
					t.Fatalf("error %v", err)
				}
				return
			}
			switch {
			case p.Offset <= last, p.Offset >= int64(len(b)):
				t.Fatalf("packet at byte %d after %d, of %d", p.Offset, last, len(b))
			case len(p.Data) > p.Length || p.Length > maxCaptured || p.Time < 0 || p.Time > maxTime:
				t.Fatalf("packet %+v", p)
			}
			last = p.Offset
			if at, ok := p.Link.network(p.Data); ok {
				var k packet
				if k.parse(p.Data[at:], p.Length-at) == "" && !k.fragment {
					k.checkSum()
					inner(&k)
					quoted(&k)
					readSYN(k.options())
				}
			}
		}
	})
}
