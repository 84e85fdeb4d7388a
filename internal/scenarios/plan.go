package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A plan is what scenarios there are.
type plan struct {
	areas   []area
	reasons map[string]string // by scenario: why it has no test
}

// An area is a page of the specification.
type area struct {
	prefix   string
	about    string
	width    int // digits
	ids      []int
	finished map[int]bool // must be tested, or have a reason
}

func (a *area) id(n int) string { return fmt.Sprintf("%s-%0*d", a.prefix, a.width, n) }

func load(scenarios, untested string) (*plan, error) {
	var file struct {
		Areas []struct{ Prefix, About, IDs, Finished string }
	}
	p := &plan{reasons: make(map[string]string)}
	if err := decode(scenarios, &file); err != nil {
		return nil, err
	}
	known := make(map[string]bool)
	for _, f := range file.Areas {
		a := area{prefix: f.Prefix, about: f.About, finished: make(map[int]bool)}
		if f.Prefix == "FP" {
			a.width = 2
		}
		ids, err := ranges(f.IDs)
		if err != nil {
			return nil, fmt.Errorf("%s: %s: ids: %w", scenarios, f.Prefix, err)
		}
		a.ids = ids
		finished, err := ranges(f.Finished)
		if err != nil {
			return nil, fmt.Errorf("%s: %s: finished: %w", scenarios, f.Prefix, err)
		}
		for _, n := range finished {
			if !slices.Contains(ids, n) {
				return nil, fmt.Errorf("%s: %s: finished: there is no %s", scenarios, f.Prefix, a.id(n))
			}
			a.finished[n] = true
		}
		for _, n := range ids {
			known[a.id(n)] = true
		}
		p.areas = append(p.areas, a)
	}
	if err := decode(untested, &p.reasons); err != nil {
		return nil, err
	}
	for id, why := range p.reasons {
		if !known[id] {
			return nil, fmt.Errorf("%s: %s: there is no such scenario in %s", untested, id, scenarios)
		}
		if why == "" {
			return nil, fmt.Errorf("%s: %s: no reason", untested, id)
		}
	}
	return p, nil
}

func decode(path string, into any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	d := yaml.NewDecoder(f)
	d.KnownFields(true)
	if err := d.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// ranges reads a list such as "1-3, 5".
func ranges(s string) (list []int, err error) {
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, err := strconv.Atoi(from)
		if err != nil {
			return nil, err
		}
		b, err := strconv.Atoi(to)
		if err != nil {
			return nil, err
		}
		for n := a; n <= b; n++ {
			list = append(list, n)
		}
	}
	return list, nil
}

// report prints the table and reports whether nothing is missing.
func (p *plan) report(out io.Writer, passed map[string][]string, all bool) bool {
	ok, w := true, new(strings.Builder)
	fmt.Fprintln(w, "\nScenarios shown by tests that passed:")
	for i := range p.areas {
		a := &p.areas[i]
		shown, due := 0, 0
		var missing, stale []string
		for _, n := range a.ids {
			id := a.id(n)
			tests, why := passed[id], p.reasons[id]
			state := ""
			switch {
			case len(tests) > 0 && why != "":
				shown++
				stale = append(stale, id)
				state = tests[0]
			case len(tests) > 0:
				shown++
				state = tests[0]
			case why != "":
				state = "untested: " + why
			case a.finished[n]:
				missing = append(missing, id)
				state = "MISSING"
			default:
				state = "not due"
			}
			if a.finished[n] {
				due++
			}
			if all {
				fmt.Fprintf(w, "  %-8s %s\n", id, state)
			}
		}
		fmt.Fprintf(w, "%-4s %-40s %3d of %3d, %3d due\n", a.prefix, a.about, shown, len(a.ids), due)
		if len(missing) > 0 {
			ok = false
			fmt.Fprintf(w, "     missing: %s; give a test its name, or testdata/untested.yaml the reason\n", strings.Join(missing, " "))
		}
		if len(stale) > 0 {
			ok = false
			fmt.Fprintf(w, "     tested although testdata/untested.yaml has a reason why not: %s\n", strings.Join(stale, " "))
		}
	}
	_, err := io.WriteString(out, w.String())
	return ok && err == nil
}
