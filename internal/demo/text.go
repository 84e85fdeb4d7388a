package demo

import (
	"fmt"
	"io"
	"strings"
)

// A printer writes the report for people, as it comes about. Without a writer it writes nothing.
type printer struct{ w io.Writer }

func (p *printer) printf(format string, args ...any) {
	if p.w != nil {
		_, _ = fmt.Fprintf(p.w, format, args...)
	}
}

// heading begins a part: what it shows, and what that proves.
func (p *printer) heading(what, proves string) { p.printf("\n%s\n  (%s)\n", what, proves) }

// line is one observation.
func (p *printer) line(what, got string, ok bool) {
	p.printf("  %-6s %-53s %s\n", verdict(ok), what, got)
}

func verdict(ok bool) string {
	if ok {
		return "ok"
	}
	return "FAILED"
}

// bits is a throughput for people.
func bits(mbps float64) string {
	switch {
	case mbps == 0:
		return "-"
	case mbps < 1000:
		return fmt.Sprintf("%.0f Mbit/s", mbps)
	}
	return fmt.Sprintf("%.2f Gbit/s", mbps/1000)
}

func (p *printer) wire(r *Report) {
	p.heading("bytes that could be read on the wire between the nodes",
		"TCP payload outside port 15008, and packets with a random marker sent both ways, over "+r.familyNames())
	p.printf("         %-13s %14s %10s %24s\n", "", "readable", "markers", "encrypted on port 15008")
	row := func(ok bool, name string, readable uint64, w Wire) {
		p.printf("  %-6s %-13s %12d B %10d %22d B\n", verdict(ok), name, readable, w.RequestHits+w.ReplyHits, w.TunnelBytes)
	}
	row(r.ClearBytesWithout > 0, "without ztun", r.ClearBytesWithout, r.Without)
	row(r.ClearBytesWithZtun == 0 && r.With.RequestHits+r.With.ReplyHits == 0, "with ztun", r.ClearBytesWithZtun, r.With)
}

func (r *Report) familyNames() string {
	var names []string
	for _, f := range r.families() {
		names = append(names, f.name)
	}
	return strings.Join(names, " and ")
}

func (p *printer) throughput(r *Report) {
	p.heading("throughput of one connection from client to sink",
		fmt.Sprintf("%s, TCP %s, MTU %d; both nodes share the processors of this machine", r.ThroughputClient, r.CongestionControl, r.MTU))
	p.printf("         %-13s %14s %14s\n", "", "up", "down")
	p.printf("         %-13s %14s %14s\n", "without ztun", bits(r.SpeedWithout.Up), bits(r.SpeedWithout.Down))
	p.printf("         %-13s %14s %14s\n", "with ztun", bits(r.SpeedWith.Up), bits(r.SpeedWith.Down))
	if r.SpeedWith.Up > 0 && r.SpeedWith.Down > 0 && r.SpeedWithout.Up > 0 && r.SpeedWithout.Down > 0 {
		p.printf("         %-13s %14.2f %14.2f\n", "ratio", r.SpeedWith.Up/r.SpeedWithout.Up, r.SpeedWith.Down/r.SpeedWithout.Down)
	}
}

func (p *printer) pingPong(r *Report) {
	p.heading(fmt.Sprintf("a round trip of 64 bytes beside %d connections of the same pod at full speed", r.PingPongWithout.Streams),
		"one busy connection must not delay a quiet one")
	p.printf("         %-13s %14s %14s %24s\n", "", "median", "99 % within", "the others meanwhile")
	row := func(name string, m PingPong) {
		p.printf("         %-13s %14s %14s %24s\n", name, millis(m.P50), millis(m.P99), bits(m.Bulk))
	}
	row("without ztun", r.PingPongWithout)
	row("with ztun", r.PingPongWith)
}

// millis is a time for people.
func millis(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f ms", ms)
}

func (p *printer) closing(r *Report) {
	if r.OK {
		p.printf("\nEverything holds, after %.1f s.\n", r.DurationSeconds)
		return
	}
	p.printf("\nNot everything holds, after %.1f s:\n", r.DurationSeconds)
	for _, f := range r.Failures {
		p.printf("  - %s\n", f)
	}
}
