package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// A report is everything that a run has found.
type report struct {
	Facts    facts    `json:"facts"`
	Rounds   int      `json:"rounds"`
	Seconds  float64  `json:"seconds"` // of each measurement
	Only     string   `json:"only,omitempty"`
	Rows     []row    `json:"rows"`
	Failures []string `json:"failures"` // what could not be measured, and why
}

// Which values of a row are better.
const (
	higher = "higher"
	lower  = "lower"
)

// A row is one quantity on all paths.
type row struct {
	Name   string `json:"name"`
	Title  string `json:"title"`
	Unit   string `json:"unit"`
	Better string `json:"better"`
	Cells  []cell `json:"cells"`
}

// A cell is one quantity on one path.
type cell struct {
	Path    string   `json:"path"`
	Samples []sample `json:"samples"`
	Median  float64  `json:"median"`
	Ratio   float64  `json:"ratio,omitempty"` // median of the samples' ratios; 0 where nothing is direct
	Rival   float64  `json:"rival,omitempty"` // median of their ratios to the path's rival; 0 where it has none
}

// A sample is the figure of one round.
type sample struct {
	Round int     `json:"round"`
	Value float64 `json:"value"`
	Ratio float64 `json:"ratio,omitempty"` // to direct in the same round
	Rival float64 `json:"rival,omitempty"` // to the rival in the same round
}

func (r *row) cell(path string) *cell {
	for i := range r.Cells {
		if r.Cells[i].Path == path {
			return &r.Cells[i]
		}
	}
	return nil
}

// addRows says which rows there will be, in their order.
func (r *report) addRows(rows []row) { r.Rows = append(r.Rows, rows...) }

// add notes a figure.
func (r *report) add(name, path string, round int, value float64) {
	i := slices.IndexFunc(r.Rows, func(w row) bool { return w.Name == name })
	w := &r.Rows[i]
	c := w.cell(path)
	if c == nil {
		w.Cells = append(w.Cells, cell{Path: path})
		c = &w.Cells[len(w.Cells)-1]
	}
	c.Samples = append(c.Samples, sample{Round: round, Value: value})
}

// fail notes what could not be measured.
func (r *report) fail(name, path string, err error) {
	if text := name + "/" + path + ": " + strings.TrimPrefix(err.Error(), "benchnet: "); !slices.Contains(r.Failures, text) {
		r.Failures = append(r.Failures, text)
	}
}

func (r *report) failures() error {
	if len(r.Failures) == 0 {
		return nil
	}
	return errors.New("benchnet: not measured: " + strings.Join(r.Failures, "; "))
}

// finish computes medians and ratios, and leaves out rows without a figure.
func (r *report) finish() {
	r.Rows = slices.DeleteFunc(r.Rows, func(w row) bool { return len(w.Cells) == 0 })
	for i := range r.Rows {
		w := &r.Rows[i]
		slices.SortFunc(w.Cells, func(a, b cell) int { return slices.Index(pathOrder, a.Path) - slices.Index(pathOrder, b.Path) })
		reference := w.cell(pathDirect)
		for j := range w.Cells {
			c := &w.Cells[j]
			c.finish(reference, w.cell(rivals[c.Path]))
		}
	}
}

func (c *cell) finish(reference, rival *cell) {
	var values, ratios, rivals []float64
	for i := range c.Samples {
		s := &c.Samples[i]
		values = append(values, s.Value)
		if s.Ratio = s.to(reference); s.Ratio > 0 && reference != c {
			ratios = append(ratios, s.Ratio)
		} else {
			s.Ratio = 0
		}
		if s.Rival = s.to(rival); s.Rival > 0 {
			rivals = append(rivals, s.Rival)
		}
	}
	c.Median, c.Ratio, c.Rival = median(values), median(ratios), median(rivals)
}

// to is the ratio of a sample to that of another path in the same round; 0 without one.
func (s *sample) to(other *cell) float64 {
	if other == nil {
		return 0
	}
	for _, o := range other.Samples {
		if o.Round == s.Round && o.Value > 0 {
			return s.Value / o.Value
		}
	}
	return 0
}

// median of an even number is the mean of the two in the middle; of none, 0.
func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	switch n := len(s); {
	case n == 0:
		return 0
	case n%2 == 1:
		return s[n/2]
	default:
		return (s[n/2-1] + s[n/2]) / 2
	}
}

func (r *report) write(file string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("benchnet: %w", err)
	}
	return nil
}

func readReport(file string) (*report, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("benchnet: %w", err)
	}
	r := new(report)
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("benchnet: %s: %w", file, err)
	}
	return r, nil
}
