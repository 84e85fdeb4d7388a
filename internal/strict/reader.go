// Package strict reads what people write: nothing is ignored, and each mistake is told with its place and what was probably meant.
package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// yamlLine matches how the YAML package begins its errors: with the line, where it knows one.
var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+:) )?`)

// Document returns the root of the one document in data, aliases resolved, or nil if there is none. Errors are "name:line: what".
func Document(name string, data []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		if line := notText(data); line > 0 {
			return nil, fmt.Errorf("%s:%d: this is no text in UTF-8; want a YAML file", name, line)
		}
		return nil, fmt.Errorf("%s:%s", name, yamlLine.ReplaceAllString(err.Error(), "$1 "))
	}
	for { // documents with nothing in them, such as what a last "---" begins, are none
		var more yaml.Node
		switch err := dec.Decode(&more); {
		case errors.Is(err, io.EOF):
			return Resolve(doc.Content[0]), nil
		case err != nil || !IsNull(more.Content[0]):
			return nil, fmt.Errorf("%s: more than one YAML document; put everything into one", name)
		}
	}
}

// notText is the line of the first byte that no YAML file in UTF-8 has, such as those of a packet capture; 0: there is none.
func notText(data []byte) (line int) {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == 0 || r == utf8.RuneError && n == 1 {
			return 1 + bytes.Count(data[:i], []byte("\n"))
		}
		i += n
	}
	return 0
}

// A Reader reads the nodes of one file and collects every error, so that the file is mended in one go.
type Reader struct {
	Name string
	Errs []error // each "name:line: path: what"
}

// A Field reads the value of one key, or an item of a list, aliases resolved. path is where it is, such as pods[0].name.
type Field func(n *yaml.Node, path string)

// Errorf adds an error at n. An empty path is that of the root.
func (r *Reader) Errorf(n *yaml.Node, path, format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	if path != "" {
		what = path + ": " + what
	}
	r.Errs = append(r.Errs, fmt.Errorf("%s:%d: %s", r.Name, n.Line, what))
}

// Mapping reads the keys of a mapping; unknown ones and those that are there twice are errors, as are required ones that are not there.
// One whose value is null is as good as not there.
func (r *Reader) Mapping(n *yaml.Node, path string, fields map[string]Field, required ...string) {
	n = Resolve(n)
	if n.Kind != yaml.MappingNode {
		r.Errorf(n, path, "want a mapping, have %s", Describe(n))
		return
	}
	read, seen := make(map[string]bool), make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], Resolve(n.Content[i+1])
		at := Join(path, k.Value)
		switch field := fields[k.Value]; {
		case seen[k.Value]:
			r.Errorf(k, at, "is given twice")
		case field == nil:
			r.Errorf(k, at, "unknown key%s", Suggestion(k.Value, slices.Sorted(maps.Keys(fields))))
		case !IsNull(v):
			field(v, at)
			read[k.Value] = true
		}
		seen[k.Value] = true
	}
	for _, k := range required {
		if !read[k] {
			r.Errorf(n, Join(path, k), "is missing")
		}
	}
}

// List reads the items of a list.
func (r *Reader) List(n *yaml.Node, path string, item Field) {
	n = Resolve(n)
	if n.Kind != yaml.SequenceNode {
		r.Errorf(n, path, "want a list, have %s", Describe(n))
		return
	}
	for i, v := range n.Content {
		item(Resolve(v), fmt.Sprintf("%s[%d]", path, i))
	}
}

// Scalar is the text of a value that is neither a mapping nor a list; want says what it should be.
func (r *Reader) Scalar(n *yaml.Node, path, want string) (string, bool) {
	if n.Kind != yaml.ScalarNode {
		r.Errorf(n, path, "want %s, have %s", want, Describe(n))
		return "", false
	}
	return n.Value, true
}

// String reads a string.
func (r *Reader) String(dst *string) Field {
	return func(n *yaml.Node, path string) {
		if s, ok := r.Scalar(n, path, "a string"); ok {
			*dst = s
		}
	}
}

// Child is the value of a key of a mapping, or nil.
func Child(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return Resolve(n.Content[i+1])
		}
	}
	return nil
}

// Resolve follows aliases.
func Resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// IsNull reports whether n is there but nothing is in it.
func IsNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// Describe says what a node is, for errors.
func Describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case IsNull(n):
		return "nothing"
	}
	return strconv.Quote(n.Value)
}

// Join is the path of a key.
func Join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
