package stack

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gvisor.dev/gvisor/pkg/buffer"
)

// A tap sees what is read and what is written, as it is, and nothing after it was taken away.
func TestTapSeesAllPackets(t *testing.T) {
	r := newRig(t, nil)
	var read, written [][]byte
	r.s.SetTap(func(out bool, pieces ...[]byte) {
		if p := bytes.Join(pieces, nil); out {
			written = append(written, p)
		} else {
			read = append(read, p)
		}
	})
	c, seq := r.handshake(flow4, 1000)
	r.received() // the handshake's, which the rig has taken in part
	read, written = nil, nil
	sent := segment{flow: flow4, seq: 1001, ack: seq, flags: flagACK, data: []byte("question")}.packet()
	r.send(sent)
	if _, err := c.TryWrite([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	r.m.Settle()
	if diff := cmp.Diff([][]byte{sent}, read); diff != "" {
		t.Errorf("read (-sent +seen):\n%s", diff)
	}
	got := r.received()
	if diff := cmp.Diff(got, written); len(got) == 0 || diff != "" {
		t.Errorf("written (-received +seen):\n%s", diff)
	}
	r.s.SetTap(nil)
	if err := c.Reset(); err != nil {
		t.Fatal(err)
	}
	r.m.Settle()
	if len(r.received()) == 0 || len(written) != len(got) {
		t.Errorf("%d packets seen, want no more than %d", len(written), len(got))
	}
}

// A RST that the stack makes by itself, and a segment whose headers and payload are read apart.
func TestTapSeesOtherWays(t *testing.T) {
	r := newRig(t, nil)
	var read, written []byte
	r.s.SetTap(func(out bool, pieces ...[]byte) {
		if out {
			written = bytes.Join(pieces, nil)
		} else {
			read = bytes.Join(pieces, nil)
		}
	})
	r.send(syn(flow6, 1))
	r.asked[0].req.Reset()
	if diff := cmp.Diff(r.one(), written); diff != "" {
		t.Errorf("RST (-received +seen):\n%s", diff)
	}
	p := segment{flow: flow4, seq: 1, ack: 1, flags: flagACK, data: bytes.Repeat([]byte("x"), 9000)}.packet()
	r.rd.view, r.rd.predicted = buffer.NewViewSize(viewBytes), 60
	hdr := r.rd.hdr[:headroom+r.rd.predicted]
	clear(hdr)
	n := copy(hdr[headroom:], p)
	copy(r.rd.view.AsSlice(), p[n:])
	r.rd.split(hdr, r.rd.view.AsSlice(), headroom+len(p))
	if diff := cmp.Diff(p, read); diff != "" {
		t.Errorf("split (-sent +seen):\n%s", diff)
	}
	r.m.Settle()
}
