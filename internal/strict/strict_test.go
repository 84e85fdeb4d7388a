package strict

import (
	"errors"
	"testing"

	"go.yaml.in/yaml/v3"
)

func TestDocument(t *testing.T) {
	for _, tt := range []struct{ name, data, want string }{
		{"empty", "", ""},
		{"only a comment", "# nothing yet\n", ""},
		{"syntax", "a: [", "f.yaml:1: did not find expected node content"},
		{"syntax below", "a: b\n  c: d\n", "f.yaml:2: mapping values are not allowed in this context"},
		{"a packet capture", "\xd4\xc3\xb2\xa1\x02\x00", "f.yaml:1: this is no text in UTF-8; want a YAML file"},
		{"Latin-1 below", "a: b\nc: caf\xe9\n", "f.yaml:2: this is no text in UTF-8; want a YAML file"},
		{"two documents", "a: b\n---\nc: d\n", "f.yaml: more than one YAML document; put everything into one"},
		{"something behind it", "a: b\n---\n[", "f.yaml: more than one YAML document; put everything into one"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root, err := Document("f.yaml", []byte(tt.data))
			if got := errorText(err); got != tt.want || root != nil {
				t.Errorf("Document = %v, %q, want %q", root, got, tt.want)
			}
		})
	}
	for _, data := range []string{"a: b\n", "---\na: b\n---\n", "a: b\n...\n---\n# the end\n---\n"} {
		root, err := Document("f.yaml", []byte(data))
		if err != nil || root.Kind != yaml.MappingNode || Child(root, "a").Value != "b" || Child(root, "b") != nil {
			t.Errorf("Document(%q) = %+v, %v", data, root, err)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestReader(t *testing.T) {
	for _, tt := range []struct{ name, data, want string }{
		{"as it should be", "name: x\nlist: [a, b]\n", ""},
		{"an alias", "name: &x y\nlist: [*x]\n", ""},
		{"unknown", "nam: x\n", "f:1: nam: unknown key; did you mean name?\nf:1: name: is missing"},
		{"unknown, like none", "port: x\nname: y\n", "f:1: port: unknown key"},
		{"twice", "name: x\nname: y\n", "f:2: name: is given twice"},
		{"twice, at first nothing", "name:\nname: y\n", "f:2: name: is given twice\nf:1: name: is missing"},
		{"nothing", "name:\n", "f:1: name: is missing"},
		{"no mapping", "[a]\n", "f:1: want a mapping, have a list"},
		{"no string", "name: {a: b}\n", "f:1: name: want a string, have a mapping"},
		{"no list", "name: x\nlist: y\n", `f:2: list: want a list, have "y"`},
		{"no item", "name: x\nlist:\n- a\n- [b]\n", "f:4: list[1]: want a string, have a list"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root, err := Document("f", []byte(tt.data))
			if err != nil {
				t.Fatal(err)
			}
			r := &Reader{Name: "f"}
			var name, item string
			r.Mapping(root, "", map[string]Field{
				"name": r.String(&name),
				"list": func(n *yaml.Node, path string) { r.List(n, path, r.String(&item)) },
			}, "name")
			if got := errorText(errors.Join(r.Errs...)); got != tt.want {
				t.Errorf("errors:\n%s\nwant:\n%s", got, tt.want)
			}
		})
	}
}

func TestSuggestion(t *testing.T) {
	known := []string{"capture", "name", "names", "namespace"}
	for given, want := range map[string]string{
		"nam": "; did you mean name?", "NAMES": "; did you mean names?", "captrue": "; did you mean capture?", "x": "", "": "", "certificate": "",
	} {
		if got := Suggestion(given, known); got != want {
			t.Errorf("Suggestion(%q) = %q, want %q", given, got, want)
		}
	}
}
