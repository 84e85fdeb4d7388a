package strict

import (
	"fmt"
	"strings"
)

// Suggestion is "; did you mean x?" with the nearest of the known names, the first if several are, or "" if none is near: within three
// edits, and half of its letters.
func Suggestion(name string, known []string) string {
	best, distance := "", 4
	for _, k := range known {
		if n := editDistance(strings.ToLower(name), strings.ToLower(k)); n < distance && 2*n <= len(name)+1 {
			best, distance = k, n
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", best)
}

// editDistance is Levenshtein's.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
