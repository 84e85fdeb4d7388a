package demo

import (
	"regexp"
	"slices"
	"strings"
)

// backend is the capture backend that the demonstration is of, by name: another one would be another demonstration.
const backend = "tun"

var captured = regexp.MustCompile(`pod captured.*\bcapture="?([a-z]+)`)

// captureOf is what a node's log says of how its pods are captured: the name of the backend, or several.
func captureOf(log string) string {
	var names []string
	for line := range strings.Lines(log) {
		if m := captured.FindStringSubmatch(line); m != nil && !slices.Contains(names, m[1]) {
			names = append(names, m[1])
		}
	}
	slices.Sort(names)
	return strings.Join(names, ",")
}
