package config

import (
	"maps"
	"slices"
	"strings"
)

// An Entry is a setting with the value that it has.
type Entry struct {
	Setting
	Value  string // as it was written; a secret is masked
	Origin Origin
}

// masked is what stands for a secret.
const masked = "***"

// Entries lists the settings with their values, in the order of Settings. Headers of the control plane and the CA, whose names are not
// known beforehand, come last.
func (c *Config) Entries() []Entry {
	list := make([]Entry, 0, len(settings))
	for i, s := range Settings() {
		list = append(list, Entry{s, settings[i].shown(c.texts[s.Key]), c.origins[s.Key]})
	}
	for _, h := range headers {
		for _, name := range slices.Sorted(maps.Keys(*h.bind(c))) {
			v := h.prefix + name
			list = append(list, Entry{Setting{Variable: v, Type: "string", Meaning: h.meaning, Secret: true, Unused: true}, masked, Origin{FromEnvironment, v}})
		}
	}
	return list
}

// shown is the text of a value as people may see it: not that of a secret, unless it is a path.
func (s *setting) shown(text string) string {
	if s.is&secret == 0 || text == "" || strings.HasPrefix(text, "/") || strings.HasPrefix(text, "./") {
		return text
	}
	return masked
}

// Ignored lists the variables that were set and have no effect yet, for a warning at the start.
func (c *Config) Ignored() []string {
	var list []string
	for _, e := range c.Entries() {
		if e.Unused && e.Origin.Source != FromDefault && e.Value != e.Default {
			list = append(list, e.Name())
		}
	}
	return list
}
