package replay

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"reflect"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// A Script is one TCP connection to the netstack, packet by packet, in place of a capture. Sequence numbers are relative: 0 is the first
// byte of data of either side.
type Script struct {
	Src   netip.AddrPort // who opens it
	Dst   netip.AddrPort
	Peer  Peer // at the other end: accept, echo or none
	Steps []Step
}

// A Step is one thing that is done or expected. One of its fields is set.
type Step struct {
	Send   *Segment
	Expect *Segment      // the next packet that the netstack sends
	Wait   time.Duration // lets time pass
	Quiet  time.Duration // lets time pass, in which the netstack sends nothing
}

// A Segment is a TCP segment. Of one that is expected, what is nil may be anything.
type Segment struct {
	Flags  string   `yaml:"flags"`  // letters of SAFRP; of what is expected also icmp: destination unreachable
	Seq    *int64   `yaml:"seq"`    // not given: of one that is sent, the next
	Ack    *int64   `yaml:"ack"`    // not given: of one that is sent, everything that has come
	Data   *string  `yaml:"data"`   //
	Bytes  *int     `yaml:"bytes"`  // of data, whatever they are; of one that is sent, zeros
	Window *uint16  `yaml:"window"` // 65535
	MSS    uint16   `yaml:"mss"`    // of a SYN, as the next: 0 means 1460
	SACK   bool     `yaml:"sack"`   // permitted
	Scale  *uint8   `yaml:"scale"`
	Blocks []uint32 `yaml:"blocks"` // of selective acknowledgements, in pairs
	Within duration `yaml:"within"` // of what is expected: how long it may take
}

type duration time.Duration

// UnmarshalYAML implements yaml.Unmarshaler.
func (d *duration) UnmarshalYAML(n *yaml.Node) error {
	v, err := time.ParseDuration(n.Value)
	if err != nil || v < 0 || v > MaxGap {
		return fmt.Errorf("line %d: %q is not a time from 0s to %v", n.Line, n.Value, MaxGap)
	}
	*d = duration(v)
	return nil
}

const (
	maxSteps       = 10_000
	maxScriptBytes = 60_000 // of one segment: it has to fit into a packet
)

type scriptFile struct {
	Src, Dst, Peer string
	Steps          []scriptStep
}

type scriptStep struct {
	Send, Expect *Segment
	Wait, Quiet  duration
}

// scriptError says what package yaml says without Go's types, and which keys there are.
func scriptError(err error) error {
	wrong, ok := errors.AsType[*yaml.TypeError](err)
	if !ok {
		return err
	}
	var texts []string
	for _, text := range wrong.Errors {
		if what, kind, ok := strings.Cut(text, " not found in type "); ok {
			text = strings.Replace(what, "field", "unknown key", 1)
			for _, t := range []reflect.Type{reflect.TypeFor[scriptFile](), reflect.TypeFor[scriptStep](), reflect.TypeFor[Segment]()} {
				if t.String() == kind {
					text += ": want " + strings.Join(keysOf(t), ", ")
				}
			}
		} else if what, _, ok := strings.Cut(text, " into "); ok {
			text = strings.Replace(what, "cannot unmarshal !!", "this does not fit: ", 1)
		}
		texts = append(texts, text)
	}
	return errors.New(strings.Join(texts, "; "))
}

// keysOf are the keys of a mapping.
func keysOf(t reflect.Type) (keys []string) {
	for f := range t.Fields() {
		keys = append(keys, cmp.Or(f.Tag.Get("yaml"), strings.ToLower(f.Name)))
	}
	return keys
}

// ParseScript reads YAML: src, dst, peer and steps.
func ParseScript(name string, data []byte) (*Script, error) {
	var file scriptFile
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", name, scriptError(err))
	}
	s := new(Script)
	var err error
	if s.Src, err = netip.ParseAddrPort(file.Src); err != nil {
		return nil, fmt.Errorf("%s: src: %w", name, err)
	}
	if s.Dst, err = netip.ParseAddrPort(file.Dst); err != nil {
		return nil, fmt.Errorf("%s: dst: %w", name, err)
	}
	if s.Src.Addr().Is4() != s.Dst.Addr().Is4() {
		return nil, fmt.Errorf("%s: src and dst are of different families", name)
	}
	switch file.Peer {
	case "", "accept":
		s.Peer = PeerAccept
	case "echo":
		s.Peer = PeerEcho
	case "none":
		s.Peer = PeerNone
	default:
		return nil, fmt.Errorf("%s: peer: %q is none of accept, echo and none", name, file.Peer)
	}
	if len(file.Steps) == 0 || len(file.Steps) > maxSteps {
		return nil, fmt.Errorf("%s: %d steps, want 1 to %d", name, len(file.Steps), maxSteps)
	}
	for i, f := range file.Steps {
		step := Step{Send: f.Send, Expect: f.Expect, Wait: time.Duration(f.Wait), Quiet: time.Duration(f.Quiet)}
		if err := step.check(); err != nil {
			return nil, fmt.Errorf("%s: step %d: %w", name, i+1, err)
		}
		s.Steps = append(s.Steps, step)
	}
	return s, nil
}

func (s *Step) check() error {
	set := 0
	for _, is := range []bool{s.Send != nil, s.Expect != nil, s.Wait > 0, s.Quiet > 0} {
		if is {
			set++
		}
	}
	if set != 1 {
		return errors.New("want one of send, expect, wait and quiet")
	}
	for _, g := range []*Segment{s.Send, s.Expect} {
		if g == nil || g == s.Expect && g.Flags == icmpFlags {
			continue
		}
		if _, ok := parseFlags(g.Flags); !ok {
			return fmt.Errorf("flags: %q is not made of the letters S, A, F, R and P", g.Flags)
		}
		if g.Bytes != nil && (g.Data != nil || *g.Bytes < 0 || *g.Bytes > maxScriptBytes) || g.Data != nil && len(*g.Data) > maxScriptBytes {
			return fmt.Errorf("want data or bytes, of at most %d bytes", maxScriptBytes)
		}
		if len(g.Blocks)%2 != 0 || len(g.Blocks) > 6 {
			return errors.New("blocks: want up to three pairs")
		}
	}
	return nil
}

const icmpFlags = "icmp"

var flagLetters = "FSRPA"

func parseFlags(s string) (flags byte, ok bool) {
	for _, c := range s {
		i := strings.IndexRune(flagLetters, c)
		if i < 0 {
			return 0, false
		}
		flags |= 1 << i
	}
	return flags, s != ""
}

func flagText(flags byte) string {
	var b strings.Builder
	for _, c := range "SFRPA" {
		if flags&(1<<strings.IndexRune(flagLetters, c)) != 0 {
			b.WriteRune(c)
		}
	}
	return b.String()
}

// A StepResult is what a step led to.
type StepResult struct {
	Type string `json:"type"` // step
	Step int    `json:"step"`
	Time string `json:"time"` // since the beginning
	Done string `json:"done"` // what was sent, or came
	Want string `json:"want,omitempty"`
	OK   bool   `json:"ok"`
}

// Text is the result in a line.
func (r *StepResult) Text() string {
	if r.OK {
		return fmt.Sprintf("%10s  %s\n", r.Time, r.Done)
	}
	return fmt.Sprintf("%10s  %s\n            step %d: want %s\n", r.Time, r.Done, r.Step, r.Want)
}

// A seenSegment is what the netstack has sent.
type seenSegment struct {
	icmp  bool
	flags byte
	seq   int64
	ack   int64 // valid with the flag
	data  string
}

func (s *seenSegment) String() string {
	if s.icmp {
		return "< icmp"
	}
	text := fmt.Sprintf("< %s seq %d", flagText(s.flags), s.seq)
	if s.flags&flagACK != 0 {
		text += fmt.Sprintf(" ack %d", s.ack)
	}
	return text + dataText(s.data)
}

func dataText(data string) string {
	switch n := len(data); {
	case n == 0:
		return ""
	case n <= 40 && strings.Trim(data, "\x00") != "":
		return fmt.Sprintf(" data %q", data)
	default:
		return fmt.Sprintf(" bytes %d", n)
	}
}

// expected says what is wanted, in the form of String.
func (g *Segment) expected() string {
	text := "< " + g.Flags
	if g.Seq != nil {
		text += fmt.Sprintf(" seq %d", *g.Seq)
	}
	if g.Ack != nil {
		text += fmt.Sprintf(" ack %d", *g.Ack)
	}
	if g.Data != nil {
		text += dataText(*g.Data)
	}
	if g.Bytes != nil {
		text += fmt.Sprintf(" bytes %d", *g.Bytes)
	}
	return text
}

func (g *Segment) fits(s *seenSegment) bool {
	if g.Flags == icmpFlags || s.icmp {
		return s.icmp && g.Flags == icmpFlags
	}
	flags, _ := parseFlags(g.Flags)
	return flags == s.flags && (g.Seq == nil || *g.Seq == s.seq) && (g.Ack == nil || *g.Ack == s.ack) &&
		(g.Data == nil || *g.Data == s.data) && (g.Bytes == nil || *g.Bytes == len(s.data))
}

// scriptISN is the sequence number of the SYN of a script.
const scriptISN = 1000

// RunScript plays a script, once, in place of packets, and tells each of what its steps led to. It ends at the first that goes wrong.
func (p *Player) RunScript(s *Script, tell func(r *StepResult) error) (ok bool, err error) {
	p.cfg.Peer = s.Peer
	p.begun = true
	p.mu.Lock()
	p.lastID++
	f := &Flow{
		ID: p.lastID, Src: s.Src, Dst: s.Dst, Inbound: !p.cfg.Local(s.Src.Addr()), Start: p.now, End: p.now, script: true, isn: scriptISN, held: &p.held,
		up: assembler{discard: true, fin: noFIN}, down: assembler{fin: noFIN}, window: 65535, auto: true,
	}
	p.flows[pair{f.Src, f.Dst}] = f
	p.open.push(f)
	p.mu.Unlock()
	if p.cfg.Seed != nil {
		p.cfg.Seed(f)
	}
	start := p.When()
	next := int64(0) // that is sent
	for i := range s.Steps {
		step := &s.Steps[i]
		r := &StepResult{Type: "step", Step: i + 1, OK: true}
		switch {
		case step.Send != nil:
			r.Done = p.sendScripted(f, step.Send, &next)
		case step.Expect != nil:
			got := p.awaitScripted(f, time.Duration(step.Expect.Within))
			if r.Done = "nothing"; got != nil {
				r.Done = got.String()
			}
			r.Want = step.Expect.expected()
			r.OK = got != nil && step.Expect.fits(got)
		default:
			p.m.Advance(step.Wait + step.Quiet)
			r.Done = fmt.Sprintf("%v pass", step.Wait+step.Quiet)
			if p.mu.Lock(); step.Quiet > 0 && len(f.seen) > 0 {
				r.Done, r.Want, r.OK = f.seen[0].String(), "nothing", false
			}
			p.mu.Unlock()
		}
		p.now = p.When()
		r.Time = fmt.Sprintf("%.6f", float64(p.now-start)/secondsToNanos)
		if err := tell(r); err != nil || !r.OK {
			return false, err
		}
	}
	return true, nil
}

// awaitScripted takes the next packet of the netstack, or nil if none comes in time.
func (p *Player) awaitScripted(f *Flow, within time.Duration) *seenSegment {
	const tick = time.Millisecond
	for waited := time.Duration(0); ; waited += tick {
		p.m.Settle()
		p.mu.Lock()
		if len(f.seen) > 0 {
			s := f.seen[0]
			f.seen = f.seen[1:]
			p.mu.Unlock()
			return &s
		}
		p.mu.Unlock()
		if waited >= within {
			return nil
		}
		p.m.Advance(min(tick, within-waited))
	}
}

// sendScripted gives the netstack a segment.
func (p *Player) sendScripted(f *Flow, g *Segment, next *int64) string {
	p.mu.Lock()
	flags, _ := parseFlags(g.Flags)
	var data []byte
	if g.Data != nil {
		data = []byte(*g.Data)
	} else if g.Bytes != nil {
		data = make([]byte, *g.Bytes)
	}
	seq := *next
	if g.Seq != nil {
		seq = *g.Seq
	}
	ack := f.stackNext
	if g.Ack != nil {
		ack = *g.Ack
	}
	number := f.isn + 1 + uint32(seq)
	text := fmt.Sprintf("> %s seq %d", flagText(flags), seq)
	if flags&flagSYN != 0 {
		number--
		text = "> " + flagText(flags)
	}
	whole, b := p.scripted(f, g, number, flags, f.stackISN+1+uint32(ack), data)
	if flags&flagACK != 0 {
		text += fmt.Sprintf(" ack %d", ack)
	}
	if flags&flagFIN != 0 {
		seq++
	}
	*next = max(*next, seq+int64(len(data)))
	p.counts.Packets++
	p.counts.Played++
	p.inject(whole, b)
	p.mu.Unlock()
	p.m.Settle()
	return text + dataText(string(data))
}

// scripted makes the segment.
func (p *Player) scripted(f *Flow, g *Segment, seq uint32, flags byte, ack uint32, data []byte) (whole, b []byte) {
	var o []byte
	if flags&flagSYN != 0 {
		mss := g.MSS
		if mss == 0 {
			mss = 1460
		}
		o = binary.BigEndian.AppendUint16([]byte{2, 4}, mss)
		if g.SACK {
			o = append(o, optSACKOK, 2, optNop, optNop)
		}
		if g.Scale != nil {
			o = append(o, optNop, optScale, 3, *g.Scale)
		}
	}
	if len(g.Blocks) > 0 {
		o = append(o, optNop, optNop, optSACK, byte(2+4*len(g.Blocks)))
		for _, v := range g.Blocks {
			o = binary.BigEndian.AppendUint32(o, f.stackISN+1+v)
		}
	}
	n := ipv4Len + tcpLen + len(o) + len(data)
	if f.Src.Addr().Is6() {
		n += ipv6Len - ipv4Len
	}
	whole, b = p.dev.buffer(n)
	t := putIP(b, f.Src.Addr(), f.Dst.Addr(), protoTCP)
	binary.BigEndian.PutUint16(t, f.Src.Port())
	binary.BigEndian.PutUint16(t[2:], f.Dst.Port())
	binary.BigEndian.PutUint32(t[4:], seq)
	if flags&flagACK == 0 {
		ack = 0
	}
	binary.BigEndian.PutUint32(t[8:], ack)
	window := uint16(65535)
	if g.Window != nil {
		window = *g.Window
	}
	t[12], t[13] = byte(tcpLen+len(o))/4<<4, flags
	binary.BigEndian.PutUint16(t[14:], window)
	t[16], t[17], t[18], t[19] = 0, 0, 0, 0
	copy(t[tcpLen:], o)
	copy(t[tcpLen+len(o):], data)
	sum := sum16(b[len(b)-len(t)-addressBytes(f.Src.Addr()):len(b)-len(t)], uint64(protoTCP)+uint64(len(t)))
	binary.BigEndian.PutUint16(t[16:], ^fold(sum16(t, sum)))
	return whole, b
}

// seeScripted notes what the netstack sends. mu is held.
func (f *Flow) seeScripted(k *packet) {
	if k.proto != protoTCP {
		f.seen = append(f.seen, seenSegment{icmp: true})
		return
	}
	if k.flags&flagSYN != 0 && !f.answered {
		f.answered, f.stackISN = true, k.seq
	}
	s := seenSegment{flags: k.flags & (flagFIN | flagSYN | flagRST | flagPSH | flagACK), data: string(k.captured())}
	s.ack = relative(k.ack, f.isn+1, 0)
	if f.answered {
		if s.seq = relative(k.seq, f.stackISN+1, f.stackNext); k.flags&flagSYN != 0 {
			s.seq = 0
		}
		end := s.seq + int64(k.carried())
		if k.flags&flagFIN != 0 {
			end++
		}
		f.stackNext = max(f.stackNext, end)
	}
	f.seen = append(f.seen, s)
}
