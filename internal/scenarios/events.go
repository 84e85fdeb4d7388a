package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
)

// An event is a line of go test -json (go doc test2json).
type event struct {
	Action, Package, Test, Output string
	ImportPath                    string // of the events of a build
}

// results are what the events say.
type results struct {
	passed map[string][]string // the tests, by scenario
	failed []string            // tests and packages
	why    map[string][]string // what failed tests say, by their names: a line for each of the first maxWhy
}

// maxWhy is how many lines of what a failed test says are said once more at the end, where an excerpt of a long output still has them.
const maxWhy = 5

// said are the first lines of what a test says itself, and of what ends it.
var said = regexp.MustCompile(`^\s*(?:[\w.-]+\.go:[0-9]+: |panic: |fatal error: |WARNING: DATA RACE)`)

var idPattern = regexp.MustCompile(`(?:^|[^A-Za-z0-9-])((?:DP|CP|AZ|DNS|NA|ID|FP)-[0-9]+)(?:$|[^0-9-])`)

// idsOf are the ids in the name of a test.
func idsOf(test string) (ids []string) {
	for {
		m := idPattern.FindStringSubmatchIndex(test)
		if m == nil {
			return ids
		}
		ids = append(ids, test[m[2]:m[3]])
		test = test[m[3]:]
	}
}

// read reads the events of a whole run, and repeats what a plain go test would have printed: a line for each package, and all of
// the tests that failed.
func read(r io.Reader, out io.Writer) (*results, error) {
	res := &results{passed: make(map[string][]string), why: make(map[string][]string)}
	output := make(map[string]*bytes.Buffer) // of tests that run, and of packages
	packages := 0
	begun := make(map[string]bool) // packages that have not ended
	in := bufio.NewScanner(r)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		line := in.Bytes()
		var e event
		if len(line) == 0 || line[0] != '{' || json.Unmarshal(line, &e) != nil {
			_, _ = fmt.Fprintf(out, "%s\n", line) // of go itself
			continue
		}
		top, _, _ := strings.Cut(e.Test, "/")
		key := e.Package + "\x00" + top // subtests are shown with their test
		switch e.Action {
		case "start":
			begun[e.Package] = true
		case "build-output":
			_, _ = fmt.Fprint(out, e.Output)
		case "build-fail":
			res.failed = append(res.failed, e.ImportPath)
		case "output":
			if output[key] == nil {
				output[key] = new(bytes.Buffer)
			}
			if name := e.Package + "." + e.Test; said.MatchString(e.Output) && len(res.why[name]) < maxWhy {
				res.why[name] = append(res.why[name], strings.TrimSpace(e.Output))
			}
			if e.Test == "" && isPackageLine(e.Output) || e.Test != "" {
				output[key].WriteString(e.Output)
			}
		case "pass", "fail", "skip":
			if e.Test != "" && e.Action == "pass" {
				name := e.Package + "." + e.Test
				for _, id := range idsOf(e.Test) {
					res.passed[id] = append(res.passed[id], name)
				}
			}
			if e.Action != "fail" {
				delete(res.why, e.Package+"."+e.Test)
			} else {
				res.failed = append(res.failed, strings.TrimSuffix(e.Package+"."+e.Test, "."))
			}
			if e.Test != top { // of a subtest
				continue
			}
			if b := output[key]; b != nil && (e.Test == "" || e.Action == "fail") {
				_, _ = fmt.Fprint(out, b.String())
			}
			delete(output, key)
			if e.Test == "" {
				packages++
				delete(begun, e.Package)
			}
		}
	}
	if err := in.Err(); err != nil {
		return nil, fmt.Errorf("events of go test: %w", err)
	}
	if packages == 0 && len(res.failed) == 0 {
		return nil, errors.New("no package was tested: go test -json goes before this in the pipe")
	}
	for p := range begun {
		res.failed = append(res.failed, p+" (did not end)")
	}
	slices.Sort(res.failed)
	res.failed = slices.Compact(res.failed)
	return res, nil
}

// isPackageLine tells the lines that go test prints of a package from what its tests print by themselves.
func isPackageLine(s string) bool {
	return s != "PASS\n" && !strings.HasPrefix(s, "-test.shuffle")
}
