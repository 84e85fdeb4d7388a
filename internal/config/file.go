package config

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"ztun.dev/ztun/internal/strict"
)

// podsKey is the list that only a file can have.
const podsKey = "pods"

// parse reads the YAML file. An empty one sets nothing.
func (l *loader) parse(name string, data []byte) {
	root, err := strict.Document(name, data)
	if err != nil {
		l.errorf("%w", err)
	}
	if root == nil || strict.IsNull(root) {
		return
	}
	l.nodes(name, func(f *fileReader) {
		fields := map[string]strict.Field{podsKey: f.pods}
		for i := range settings {
			s := &settings[i]
			fields[s.key] = func(n *yaml.Node, path string) { f.setting(s, n, path, FromFile) }
		}
		f.Mapping(root, "", fields)
	})
}

// nodes has the nodes of a file read and keeps the errors.
func (l *loader) nodes(name string, read func(f *fileReader)) {
	f := &fileReader{Reader: strict.Reader{Name: name}, cfg: l.cfg}
	read(f)
	for _, err := range f.Errs {
		l.errorf("%w", err)
	}
}

// HasKey reports whether a YAML mapping has one of the keys.
func HasKey(data []byte, keys ...string) bool {
	root, err := strict.Document("", data)
	if err != nil || root == nil {
		return false
	}
	return root.Kind == yaml.MappingNode && slices.ContainsFunc(keys, func(k string) bool { return strict.Child(root, k) != nil })
}

// A fileReader reads the nodes of one file into the configuration.
type fileReader struct {
	strict.Reader
	cfg *Config
}

// setting reads the value of a setting. Where it stands is the rest of its origin.
func (f *fileReader) setting(s *setting, n *yaml.Node, path string, from Source) {
	v, ok := f.Scalar(n, path, "a "+s.bind(f.cfg).kind())
	if !ok {
		return
	}
	if err := s.bind(f.cfg).Set(v); err != nil {
		f.Errorf(n, path, "%s, have %q", err, s.shown(v))
		return
	}
	where := fmt.Sprintf("%s:%d", f.Name, n.Line)
	if from == FromProxyConfig {
		where = path
	}
	f.cfg.origins[s.key], f.cfg.texts[s.key] = Origin{from, where}, v
}

func (f *fileReader) pods(n *yaml.Node, path string) {
	netns, names := make(map[string]string), make(map[string]string)
	f.List(n, path, func(item *yaml.Node, at string) {
		p := Pod{ServiceAccount: defaultServiceAccount}
		before := len(f.Errs)
		f.Mapping(item, at, map[string]strict.Field{
			"netns":          f.String(&p.Netns),
			"uid":            f.String(&p.UID),
			"name":           f.String(&p.Name),
			"namespace":      f.String(&p.Namespace),
			"serviceAccount": f.String(&p.ServiceAccount),
		}, "netns", "name", "namespace")
		if len(f.Errs) > before {
			return
		}
		if !strings.HasPrefix(p.Netns, "/") {
			f.Errorf(item, at+".netns", "want the path of a network namespace such as /run/netns/web, have %q", p.Netns)
		}
		if p.Name == "" || p.Namespace == "" || p.ServiceAccount == "" {
			f.Errorf(item, at, "name, namespace and serviceAccount must not be empty")
		}
		name := p.Namespace + "/" + p.Name
		if first, ok := netns[p.Netns]; ok {
			f.Errorf(item, at+".netns", "%s is that of %s already", p.Netns, first)
		}
		if first, ok := names[name]; ok {
			f.Errorf(item, at+".name", "%s is that of %s already", name, first)
		}
		netns[p.Netns], names[name] = at, at
		f.cfg.Pods = append(f.cfg.Pods, p)
	})
}
