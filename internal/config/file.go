package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// podsKey is the list that only a file can have.
const podsKey = "pods"

// yamlLine matches how the YAML package begins its errors: with the line, where it knows one.
var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+:) )?`)

// parse reads the YAML file. An empty one sets nothing.
func (l *loader) parse(name string, data []byte) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if line := notText(data); line > 0 {
			l.errorf("%s:%d: this is no text in UTF-8; want a YAML file", name, line)
		} else if !errors.Is(err, io.EOF) {
			l.errorf("%s:%s", name, yamlLine.ReplaceAllString(err.Error(), "$1 "))
		}
		return
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		l.errorf("%s: more than one YAML document; put everything into one", name)
		return
	}
	f := &fileReader{loader: l, name: name}
	fields := map[string]field{podsKey: f.pods}
	for i := range settings {
		s := &settings[i]
		fields[s.key] = func(n *yaml.Node, path string) { f.setting(s, n, path, FromFile) }
	}
	if root := resolve(doc.Content[0]); !isNull(root) {
		f.mapping(root, "", fields)
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

// HasKey reports whether a YAML mapping has one of the keys.
func HasKey(data []byte, keys ...string) bool {
	var doc yaml.Node
	if err := yaml.NewDecoder(bytes.NewReader(data)).Decode(&doc); err != nil {
		return false
	}
	root := resolve(doc.Content[0])
	return root.Kind == yaml.MappingNode && slices.ContainsFunc(keys, func(k string) bool { return child(root, k) != nil })
}

// A fileReader reads the nodes of one file and reports errors as file:line: path: what.
type fileReader struct {
	*loader
	name string
}

// A field reads the value of one key.
type field func(n *yaml.Node, path string)

func (f *fileReader) at(n *yaml.Node, path, format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	if path != "" {
		what = path + ": " + what
	}
	f.errorf("%s:%d: %s", f.name, n.Line, what)
}

// mapping reads the keys of a mapping; unknown ones and those that are there twice are errors, as are required ones that are not there.
func (f *fileReader) mapping(n *yaml.Node, path string, fields map[string]field, required ...string) {
	if n.Kind != yaml.MappingNode {
		f.at(n, path, "want a mapping, have %s", describe(n))
		return
	}
	known := make([]string, 0, len(fields))
	for k := range fields {
		known = append(known, k)
	}
	slices.Sort(known)
	seen := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], resolve(n.Content[i+1])
		at := k.Value
		if path != "" {
			at = path + "." + at
		}
		switch read := fields[k.Value]; {
		case seen[k.Value]:
			f.at(k, at, "is given twice")
		case read == nil:
			f.at(k, at, "unknown key%s", Suggestion(k.Value, known))
		case !isNull(v):
			read(v, at)
			seen[k.Value] = true
		}
	}
	for _, k := range required {
		if !seen[k] {
			f.at(n, path+"."+k, "is missing")
		}
	}
}

// setting reads the value of a setting. Where it stands is the rest of its origin.
func (f *fileReader) setting(s *setting, n *yaml.Node, path string, from Source) {
	v, ok := f.scalar(n, path, "a "+s.bind(f.cfg).kind())
	if !ok {
		return
	}
	if err := s.bind(f.cfg).Set(v); err != nil {
		f.at(n, path, "%s, have %q", err, s.shown(v))
		return
	}
	where := fmt.Sprintf("%s:%d", f.name, n.Line)
	if from == FromProxyConfig {
		where = path
	}
	f.cfg.origins[s.key], f.cfg.texts[s.key] = Origin{from, where}, v
}

func (f *fileReader) scalar(n *yaml.Node, path, want string) (string, bool) {
	if n.Kind != yaml.ScalarNode {
		f.at(n, path, "want %s, have %s", want, describe(n))
		return "", false
	}
	return n.Value, true
}

func (f *fileReader) text(dst *string) field {
	return func(n *yaml.Node, path string) {
		if s, ok := f.scalar(n, path, "a string"); ok {
			*dst = s
		}
	}
}

func (f *fileReader) pods(n *yaml.Node, path string) {
	if n.Kind != yaml.SequenceNode {
		f.at(n, path, "want a list, have %s", describe(n))
		return
	}
	netns, names := make(map[string]string), make(map[string]string)
	for i, item := range n.Content {
		item = resolve(item)
		at := fmt.Sprintf("%s[%d]", path, i)
		p := Pod{ServiceAccount: defaultServiceAccount}
		before := len(f.errs)
		f.mapping(item, at, map[string]field{
			"netns":          f.text(&p.Netns),
			"uid":            f.text(&p.UID),
			"name":           f.text(&p.Name),
			"namespace":      f.text(&p.Namespace),
			"serviceAccount": f.text(&p.ServiceAccount),
		}, "netns", "name", "namespace")
		if len(f.errs) > before {
			continue
		}
		if !strings.HasPrefix(p.Netns, "/") {
			f.at(item, at+".netns", "want the path of a network namespace such as /run/netns/web, have %q", p.Netns)
		}
		if p.Name == "" || p.Namespace == "" || p.ServiceAccount == "" {
			f.at(item, at, "name, namespace and serviceAccount must not be empty")
		}
		name := p.Namespace + "/" + p.Name
		if first, ok := netns[p.Netns]; ok {
			f.at(item, at+".netns", "%s is that of %s already", p.Netns, first)
		}
		if first, ok := names[name]; ok {
			f.at(item, at+".name", "%s is that of %s already", name, first)
		}
		netns[p.Netns], names[name] = at, at
		f.cfg.Pods = append(f.cfg.Pods, p)
	}
}

// resolve follows aliases.
func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "nothing"
	}
	return strconv.Quote(n.Value)
}
