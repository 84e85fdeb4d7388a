package main

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		in   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 2, 9}, 3}} {
		if got := median(tt.in); got != tt.want {
			t.Errorf("median(%v) = %v, want %v", tt.in, got, tt.want)
		}
	}
}

// Ratios are of one round; a round that lacks one of the two has none.
func TestRatios(t *testing.T) {
	var r report
	r.addRows([]row{{Name: "a"}, {Name: "nothing"}})
	for round, v := range []float64{10, 20, 40} {
		r.add("a", pathDirect, round, v)
	}
	r.add("a", pathMesh, 0, 5)
	r.add("a", pathMesh, 2, 4)
	r.fail("a", pathMesh, errors.New("benchnet: no"))
	r.fail("a", pathMesh, errors.New("benchnet: no"))
	r.finish()
	if len(r.Rows) != 1 {
		t.Fatalf("%d rows, want none without a figure", len(r.Rows))
	}
	c := r.Rows[0].cell(pathMesh)
	if c.Median != 4.5 || math.Abs(c.Ratio-0.3) > 1e-9 || c.Samples[1].Ratio != 0.1 {
		t.Errorf("cell %+v, want median 4.5 and ratio 0.3", c)
	}
	if d := r.Rows[0].cell(pathDirect); d.Ratio != 0 || d.Median != 20 {
		t.Errorf("direct %+v, want median 20 and no ratio", d)
	}
	if err := r.failures(); err == nil || err.Error() != "benchnet: not measured: a/mesh: no" {
		t.Errorf("failures = %v", err)
	}
}

func TestTables(t *testing.T) {
	var r report
	r.addRows([]row{{Name: "bulk/1/up", Title: "1 stream up", Unit: "Gbit/s"}, {Name: "cpu/1/up/source", Title: "CPU", Unit: "s/GB"}})
	r.add("bulk/1/up", pathDirect, 0, 20)
	r.add("bulk/1/up", pathMesh, 0, 5.001)
	r.add("bulk/1/up", pathNetstackMesh, 1, 2.5) // of another round
	r.add("cpu/1/up/source", pathMesh, 0, 123.4)
	r.finish()
	var text, md strings.Builder
	if err := errors.Join(r.text(&text), r.markdown(&md)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"                     direct         mesh  netstack-mesh\n1 stream up, Gbit/s    20.0  5.00 (0.25)           2.50\n", "           mesh\nCPU, s/GB   123\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, text.String())
		}
	}
	if want := "|  | direct | mesh | netstack-mesh |\n|---|--:|--:|--:|\n| 1 stream up, Gbit/s | 20.0 | 5.00 (0.25) | 2.50 |\n"; !strings.Contains(md.String(), want) {
		t.Errorf("the Markdown lacks %q:\n%s", want, md.String())
	}
}

func TestRivals(t *testing.T) {
	var r report
	r.addRows([]row{{Name: "bulk/1/up", Title: "1 stream up", Unit: "Gbit/s"}})
	for round, v := range []float64{10, 20} {
		r.add("bulk/1/up", pathDirect, round, 2*v)
		r.add("bulk/1/up", pathControl, round, v)
	}
	r.add("bulk/1/up", pathPassthrough, 0, 9)
	r.add("bulk/1/up", pathPassthrough, 1, 10)
	r.finish()
	if c := r.Rows[0].cell(pathPassthrough); math.Abs(c.Rival-0.7) > 1e-9 || math.Abs(c.Ratio-0.35) > 1e-9 {
		t.Errorf("cell %+v, want 0.7 of the control and 0.35 of direct", c)
	}
	var text strings.Builder
	if err := r.text(&text); err != nil {
		t.Fatal(err)
	}
	want := "             passthrough to control\n1 stream up                    0.70\n"
	if !strings.Contains(text.String(), want) {
		t.Errorf("the text lacks %q:\n%s", want, text.String())
	}
}

func TestHistogram(t *testing.T) {
	var h histogram
	if got := h.quantile(0.5); got != 0 {
		t.Errorf("quantile of nothing = %v", got)
	}
	var all []float64
	for i := range 10_000 {
		ns := 50 + i*i
		h.add(time.Duration(ns))
		all = append(all, float64(ns))
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.5, 0.99, 0.999, 1} {
		got, want := h.quantile(q), all[min(int(q*float64(len(all))), len(all)-1)]
		if math.Abs(got-want) > 0.016*want+1 {
			t.Errorf("quantile(%v) = %v, want %v to 1.6 %%", q, got, want)
		}
	}
	h.add(-1)
	h.add(math.MaxInt64)
	if got := h.quantile(1); got < math.MaxInt64*0.98 {
		t.Errorf("the largest = %v", got)
	}
	if n := testing.AllocsPerRun(100, func() { h.add(1234) }); n != 0 {
		t.Errorf("add allocates %v times", n)
	}
}
