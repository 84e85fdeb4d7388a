package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// Names of the paths, direct first.
const (
	pathDirect      = "direct"
	pathRelay       = "relay"
	pathRelayPair   = "relay-pair"
	pathPassthrough = "passthrough"
	pathInbound     = "inbound"
	pathMesh        = "mesh"
	pathZtun        = "ztun" // what is not measured on a path, but of a process

	pathControl = "control" // as direct, from another pod: what differs from it is noise

	// As passthrough, with ZTUN_CONNECT_CACHE: for connections per second only, what is open is the same.
	pathRemembered = "remembered"

	// To a service whose endpoint is outside the mesh, by its address, which no kernel can carry: the application's leg of a mesh
	// connection without the rest of it.
	pathService = "service"

	// Through ztun with ZTUN_OFFLOAD=off.
	pathNetstackPassthrough = "netstack-passthrough"
	pathNetstackInbound     = "netstack-inbound"
	pathNetstackMesh        = "netstack-mesh"
	pathNetstackService     = "netstack-service"
)

// pathOrder is that of columns.
var pathOrder = []string{
	pathZtun, pathDirect, pathControl, pathRelay, pathRelayPair, pathPassthrough, pathRemembered, pathInbound, pathService, pathMesh,
	pathNetstackPassthrough, pathNetstackInbound, pathNetstackService, pathNetstackMesh,
}

// rivals are what some paths are compared with beside direct: what the kernel carries with what nobody captures, what it has the
// application's side of with a netstack in its place.
var rivals = map[string]string{
	pathPassthrough: pathControl, pathRemembered: pathControl, pathInbound: pathControl, pathService: pathNetstackService, pathMesh: pathNetstackMesh,
}

// A table is some rows of a report as text.
type table struct {
	title string
	lines [][]string // the first is the heading
}

// tables are the report's. Each has the columns that it needs.
func (r *report) tables() []table {
	var all []table
	for _, t := range []struct {
		title string
		of    func(name string) bool
	}{
		{speedTitle, func(name string) bool { return !strings.HasPrefix(name, "cpu/") && !strings.HasPrefix(name, "rss/") }},
		{"CPU seconds of the process on each side", func(name string) bool { return strings.HasPrefix(name, "cpu/") }},
		{"Memory", func(name string) bool { return strings.HasPrefix(name, "rss/") }},
	} {
		rows := slices.DeleteFunc(slices.Clone(r.Rows), func(w row) bool { return !t.of(w.Name) })
		if len(rows) == 0 {
			continue
		}
		paths := slices.DeleteFunc(slices.Clone(pathOrder), func(p string) bool {
			return !slices.ContainsFunc(rows, func(w row) bool { return w.cell(p) != nil })
		})
		lines := [][]string{append([]string{""}, paths...)}
		for _, w := range rows {
			line := []string{w.Title + ", " + w.Unit}
			for _, p := range paths {
				line = append(line, w.cell(p).String())
			}
			lines = append(lines, line)
		}
		all = append(all, table{t.title, lines})
		if t.title == speedTitle {
			if c := r.compared(); len(c.lines) > 0 {
				all = append(all, c)
			}
		}
	}
	return all
}

const speedTitle = "Speed (in parentheses: ratio to direct of the same round)"

// compared is the table of the ratios to rivals; without lines there are none.
func (r *report) compared() table {
	t := table{title: "Ratio to another path of the same round"}
	rival := func(w *row, p string) float64 {
		if c := w.cell(p); c != nil {
			return c.Rival
		}
		return 0
	}
	paths := slices.DeleteFunc(slices.Clone(pathOrder), func(p string) bool {
		return !slices.ContainsFunc(r.Rows, func(w row) bool { return rival(&w, p) > 0 })
	})
	if len(paths) == 0 {
		return t
	}
	head := []string{""}
	for _, p := range paths {
		head = append(head, p+" to "+rivals[p])
	}
	t.lines = append(t.lines, head)
	for i := range r.Rows {
		line, some := []string{r.Rows[i].Title}, false
		for _, p := range paths {
			text := "–"
			if v := rival(&r.Rows[i], p); v > 0 {
				text, some = number(v), true
			}
			line = append(line, text)
		}
		if some {
			t.lines = append(t.lines, line)
		}
	}
	return t
}

// String is the median and the ratio. It can be asked of nothing.
func (c *cell) String() string {
	switch {
	case c == nil:
		return "–"
	case c.Ratio == 0:
		return number(c.Median)
	}
	return number(c.Median) + " (" + number(c.Ratio) + ")"
}

// number has three significant digits, or all of an integer.
func number(v float64) string {
	switch {
	case v >= 100 || v <= -100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10 || v <= -10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// summary is what was measured, where and how, in lines.
func (r *report) summary() []string {
	f := &r.Facts
	lines := []string{
		f.Ztun,
		fmt.Sprintf("%s; Linux %s, %d × %s, %s, MTU %d", f.Time.Format("2006-01-02 15:04 UTC"), f.Kernel, f.CPUs, f.CPUModel, f.CongestionControl, f.MTU),
		fmt.Sprintf("%d rounds, %g s each measurement; load at the start %s, %.0f %% busy", r.Rounds, r.Seconds, f.Load, 100*f.Busy),
	}
	if r.Only != "" {
		lines = append(lines, "only "+r.Only)
	}
	for _, w := range f.Warnings {
		lines = append(lines, "warning: "+w)
	}
	return lines
}

// text prints the report for a terminal.
func (r *report) text(w io.Writer) error {
	var b strings.Builder
	for _, line := range r.summary() {
		b.WriteString(line + "\n")
	}
	for _, t := range r.tables() {
		b.WriteString("\n" + t.title + "\n")
		widths := make([]int, len(t.lines[0]))
		for _, line := range t.lines {
			for i, s := range line {
				widths[i] = max(widths[i], utf8.RuneCountInString(s))
			}
		}
		for _, line := range t.lines {
			for i, s := range line {
				fill := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(s))
				if i == 0 {
					b.WriteString(s + fill)
				} else {
					b.WriteString("  " + fill + s)
				}
			}
			b.WriteString("\n")
		}
	}
	for _, f := range r.Failures {
		b.WriteString("\nnot measured: " + f)
	}
	if len(r.Failures) > 0 {
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// markdown prints the report for docs/performance.md.
func (r *report) markdown(w io.Writer) error {
	var b strings.Builder
	b.WriteString(strings.Join(r.summary(), "  \n") + "\n")
	for _, t := range r.tables() {
		b.WriteString("\n**" + t.title + "**\n\n")
		for i, line := range t.lines {
			b.WriteString("| " + strings.Join(line, " | ") + " |\n")
			if i == 0 {
				b.WriteString("|---|" + strings.Repeat("--:|", len(line)-1) + "\n")
			}
		}
	}
	for _, f := range r.Failures {
		b.WriteString("\nNot measured: " + f + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
