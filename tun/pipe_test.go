package tun

import (
	"errors"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if runAsChild() {
		return
	}
	goleak.VerifyTestMain(m)
}

// packet returns a buffer for Write: offset bytes, of which the last Headroom are h, and then payload.
func packet(offset int, h VnetHdr, payload string) []byte {
	b := make([]byte, offset, offset+len(payload))
	h.Encode(b[offset-Headroom:])
	return append(b, payload...)
}

// readAll reads until ErrAgain, batch packets at a time.
func readAll(t *testing.T, d Device, batch, offset int) (packets []string, headers []VnetHdr) {
	t.Helper()
	bufs, sizes := make([][]byte, batch), make([]int, batch)
	for i := range bufs {
		bufs[i] = make([]byte, offset+MaxPacket)
	}
	for {
		n, err := d.Read(bufs, sizes, offset)
		if errors.Is(err, ErrAgain) {
			return packets, headers
		}
		if err != nil {
			t.Fatalf("Read: %v", err)
		}
		for i := range n {
			var h VnetHdr
			h.Decode(bufs[i][offset-Headroom:])
			headers = append(headers, h)
			packets = append(packets, string(bufs[i][offset:offset+sizes[i]]))
		}
	}
}

func TestPipeCarriesPacketsAndHeadersInOrder(t *testing.T) {
	t.Parallel()
	a, b := Pipe()
	defer a.Close()
	defer b.Close()
	want := []VnetHdr{{}, {Flags: VnetNeedsChecksum, GSOType: VnetGSOTCPv6, HeaderBytes: 72, SegmentBytes: 1428, ChecksumStart: 40, ChecksumOffset: 16}, {Flags: 2}}
	n, err := a.Write([][]byte{packet(16, want[0], "one"), packet(16, want[1], "two"), packet(16, want[2], "three")}, 16)
	if n != 3 || err != nil {
		t.Fatalf("Write = %d, %v, want 3, nil", n, err)
	}
	packets, headers := readAll(t, b, 2, Headroom) // another offset, and a batch that does not divide
	if diff := cmp.Diff([]string{"one", "two", "three"}, packets); diff != "" {
		t.Errorf("packets (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, headers); diff != "" {
		t.Errorf("headers (-want +got):\n%s", diff)
	}
	if packets, _ := readAll(t, a, 1, Headroom); packets != nil {
		t.Errorf("the writing end reads %q, want nothing", packets)
	}
}

func TestPipeCountsWhatItDrops(t *testing.T) {
	t.Parallel()
	a, b := Pipe()
	b.SetQueue(2)
	pkts := [][]byte{packet(10, VnetHdr{}, "long packet"), packet(10, VnetHdr{}, "b"), packet(10, VnetHdr{}, "c")}
	if n, err := a.Write(pkts, 10); n != 3 || err != nil {
		t.Fatalf("Write = %d, %v, want 3, nil: a full queue is a loss, not an error", n, err)
	}
	sizes := make([]int, 2)
	bufs := [][]byte{make([]byte, 10+4), make([]byte, 10+4)}
	n, err := b.Read(bufs, sizes, 10)
	if n != 1 || err != nil || string(bufs[0][10:10+sizes[0]]) != "b" {
		t.Errorf("Read = %d, %v, %q, want the one packet that fits", n, err, bufs[0])
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := a.Write(pkts[:1], 10); n != 1 || err != nil {
		t.Errorf("Write to a closed peer = %d, %v, want 1, nil", n, err)
	}
	if diff := cmp.Diff(PipeDrops{Full: 1, TooLong: 1, PeerGone: 1}, b.Drops()); diff != "" {
		t.Errorf("Drops (-want +got):\n%s", diff)
	}
}

func TestPipeNotifies(t *testing.T) {
	t.Parallel()
	a, b := Pipe()
	defer a.Close()
	defer b.Close()
	var wakes int
	pkt := packet(10, VnetHdr{}, "x")
	if _, err := a.Write([][]byte{pkt}, 10); err != nil {
		t.Fatal(err)
	}
	b.Notify(func() { wakes++; readAll(t, b, 1, 10) }) // may read at once: no lock is held
	if wakes != 1 {
		t.Errorf("%d wakes after Notify with a packet waiting, want 1", wakes)
	}
	if _, err := a.Write([][]byte{pkt, pkt, pkt}, 10); err != nil {
		t.Fatal(err)
	}
	if wakes != 2 {
		t.Errorf("%d wakes after a batch, want 2: one for each batch", wakes)
	}
}

func TestPipeLimitsAndErrors(t *testing.T) {
	t.Parallel()
	a, b := Pipe()
	defer b.Close()
	if mtu, err := a.MTU(); mtu != DefaultPipeMTU || err != nil {
		t.Errorf("MTU = %d, %v, want %d", mtu, err, DefaultPipeMTU)
	}
	a.SetMTU(9000)
	if mtu, err := a.MTU(); mtu != 9000 || err != nil {
		t.Errorf("MTU = %d, %v, want 9000", mtu, err)
	}
	if fd := a.FD(); fd != -1 {
		t.Errorf("FD = %d, want -1", fd)
	}
	if _, err := a.Write([][]byte{make([]byte, 20)}, 9); err == nil {
		t.Error("Write with 9 bytes of headroom: no error")
	}
	if _, err := a.Read([][]byte{make([]byte, 20)}, make([]int, 1), 9); err == nil {
		t.Error("Read with 9 bytes of headroom: no error")
	}
	if n, err := a.Write([][]byte{packet(10, VnetHdr{}, "x"), make([]byte, 10)}, 10); n != 1 || err == nil {
		t.Errorf("Write of an empty packet = %d, %v, want 1 and an error", n, err)
	}
	for range 2 {
		if err := a.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if _, err := a.Read([][]byte{make([]byte, 20)}, make([]int, 1), 10); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read after Close: %v, want os.ErrClosed", err)
	}
	if _, err := a.Write([][]byte{packet(10, VnetHdr{}, "x")}, 10); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Write after Close: %v, want os.ErrClosed", err)
	}
}

func TestPipeDoesNotAllocate(t *testing.T) {
	a, b := Pipe()
	defer a.Close()
	defer b.Close()
	in := [][]byte{packet(10, VnetHdr{}, "0123456789")}
	out, sizes := [][]byte{make([]byte, 64)}, make([]int, 1)
	n := testing.AllocsPerRun(1000, func() {
		if _, err := a.Write(in, 10); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Read(out, sizes, 10); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("a packet through the pipe allocates %v times, want 0", n)
	}
}
