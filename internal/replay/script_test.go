package replay

import (
	"strings"
	"testing"
)

func TestScriptsThatAreWrong(t *testing.T) {
	const head = "src: 10.0.0.1:1\ndst: 10.0.0.2:2\n"
	for _, tt := range []struct{ name, text, want string }{
		{"empty", "", "src: not an ip:port"},
		{"not YAML", "\t", "x.yaml: yaml"},
		{"no destination", "src: 10.0.0.1:1\n", "dst: not an ip:port"},
		{"families", "src: 10.0.0.1:1\ndst: \"[::2]:2\"\n", "of different families"},
		{"peer", head + "peer: friend\n", `peer: "friend" is none of`},
		{"no steps", head, "0 steps, want 1 to 10000"},
		{"unknown key", head + "steps:\n- send: {flags: S}\n- sent: {flags: S}\n", "line 5: unknown key sent: want send, expect, wait, quiet"},
		{"unknown key of a segment", head + "steps:\n- send: {flag: S}\n", "x.yaml: line 4: unknown key flag: want flags, seq, ack, data, bytes, window, mss, sack, scale, blocks, within"},
		{"unknown key of a script", head + "step: []\n", "x.yaml: line 3: unknown key step: want src, dst, peer, steps"},
		{"no number", head + "steps:\n- send: {flags: S, seq: first}\n", "x.yaml: line 4: this does not fit: str `first`"},
		{"two things", head + "steps:\n- {wait: 1s, quiet: 1s}\n", "step 1: want one of"},
		{"nothing", head + "steps:\n- {}\n", "step 1: want one of"},
		{"flags", head + "steps:\n- send: {flags: SX}\n", `step 1: flags: "SX"`},
		{"no flags", head + "steps:\n- send: {}\n", `step 1: flags: ""`},
		{"icmp cannot be sent", head + "steps:\n- send: {flags: icmp}\n", `flags: "icmp"`},
		{"data and bytes", head + "steps:\n- send: {flags: A, data: x, bytes: 1}\n", "want data or bytes"},
		{"too much", head + "steps:\n- send: {flags: A, bytes: 60001}\n", "of at most 60000 bytes"},
		{"blocks", head + "steps:\n- send: {flags: A, blocks: [1]}\n", "up to three pairs"},
		{"time", head + "steps:\n- wait: soon\n", `line 4: "soon" is not a time`},
		{"a long time", head + "steps:\n- wait: 25h\n", "is not a time from 0s to 24h"},
	} {
		t.Run("T4/"+tt.name, func(t *testing.T) {
			if _, err := ParseScript("x.yaml", []byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("ParseScript(%q): %v, want %s", tt.text, err, tt.want)
			} else if strings.Contains(err.Error(), "replay.") || strings.Contains(err.Error(), "struct") {
				t.Errorf("%v names a type of Go", err)
			}
		})
	}
}

// FuzzScript reads any text: what is taken can be played.
func FuzzScript(f *testing.F) {
	f.Add("src: 10.0.0.1:1\ndst: 10.0.0.2:2\npeer: echo\nsteps:\n- send: {flags: S, sack: true, scale: 3}\n- expect: {flags: SA, within: 1s}\n- quiet: 1s\n")
	f.Add("src: '[::1]:1'\ndst: '[::2]:2'\nsteps:\n- send: {flags: A, seq: -1, ack: 5, data: x, window: 0, blocks: [1, 2]}\n- wait: 3ms\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseScript("x.yaml", []byte(text))
		if err != nil {
			return
		}
		if !s.Src.IsValid() || !s.Dst.IsValid() || len(s.Steps) == 0 || len(s.Steps) > maxSteps {
			t.Fatalf("%q: %+v", text, s)
		}
		p := &Player{dev: &Device{}}
		for i := range s.Steps {
			if g := s.Steps[i].Send; g != nil {
				flags, _ := parseFlags(g.Flags)
				var data []byte
				if g.Bytes != nil {
					data = make([]byte, *g.Bytes)
				}
				_, b := p.scripted(&Flow{Src: s.Src, Dst: s.Dst}, g, 1, flags, 2, data)
				var k packet
				if why := k.parse(b, len(b)); why != "" || k.checkSum() != sumRight || k.carried() != len(data) {
					t.Fatalf("%q: step %d makes %x: %s", text, i+1, b, why)
				}
			}
		}
	})
}
