package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"ztun.dev/ztun/internal/strict"
)

// MeshFile is where the mesh configuration is mounted.
const MeshFile = "./etc/istio/config/mesh"

// proxyConfigKeys are the keys of Istio's ProxyConfig that are read, beside proxyMetadata, and the settings that they are. It has
// many others, for Envoy.
var proxyConfigKeys = map[string]string{
	"discoveryAddress": "xdsAddress", "proxyAdminPort": "proxyAdminPort", "statsPort": "statsPort", "concurrency": "workerThreads",
}

// meshFile reads defaultConfig of the mesh configuration. It need not be there.
func (l *loader) meshFile(name string) {
	data, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		l.errorf("%w", err)
		return
	}
	l.proxyConfig(FromMesh, name, data)
}

// proxyConfig reads a ProxyConfig, in the mesh file under its key there.
func (l *loader) proxyConfig(from Source, name string, data []byte) {
	root, err := strict.Document(name, data)
	if err != nil {
		l.errorf("%w", err)
	}
	if root == nil {
		return
	}
	path := ""
	if from == FromMesh && root.Kind == yaml.MappingNode {
		path = "defaultConfig"
		if root = strict.Child(root, path); root == nil {
			return
		}
	}
	if strict.IsNull(root) {
		return
	}
	l.nodes(name, func(f *fileReader) { f.proxyConfig(root, path, from) })
}

func (f *fileReader) proxyConfig(root *yaml.Node, path string, from Source) {
	if root.Kind != yaml.MappingNode {
		f.Errorf(root, path, "want a mapping, have %s", strict.Describe(root))
		return
	}
	for _, key := range slices.Sorted(maps.Keys(proxyConfigKeys)) {
		if n := strict.Child(root, key); n != nil && !strict.IsNull(n) {
			f.setting(find(proxyConfigKeys[key]), n, strict.Join(path, key), from)
		}
	}
	if n := strict.Child(root, "proxyMetadata"); n != nil && !strict.IsNull(n) {
		f.metadata(n, strict.Join(path, "proxyMetadata"), from)
	}
}

// metadata reads proxyMetadata: what ISTIO_META_ variables would say, with or without that prefix.
func (f *fileReader) metadata(n *yaml.Node, path string, from Source) {
	if n.Kind != yaml.MappingNode {
		f.Errorf(n, path, "want a mapping, have %s", strict.Describe(n))
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i].Value, strict.Resolve(n.Content[i+1])
		text, ok := f.Scalar(v, strict.Join(path, k), "a string")
		if !ok {
			continue
		}
		name := strings.TrimPrefix(k, metadataPrefix)
		f.cfg.setMetadata(name, text)
		if s := withMetadata(name); s != nil {
			f.setting(s, v, strict.Join(path, k), from)
		}
	}
}

func (c *Config) setMetadata(name, v string) {
	if c.Metadata == nil {
		c.Metadata = make(map[string]string)
	}
	c.Metadata[name] = v
}

// prefixed reads the variables that are known by a prefix alone.
func (l *loader) prefixed(name, v string) {
	for _, h := range headers {
		if k, ok := strings.CutPrefix(name, h.prefix); ok && k != "" {
			m := h.bind(l.cfg)
			if *m == nil {
				*m = make(map[string]string)
			}
			(*m)[k] = v
		}
	}
	if k, ok := strings.CutPrefix(name, metadataPrefix); ok && k != "" {
		l.cfg.setMetadata(k, v)
	}
	if k, ok := strings.CutPrefix(name, metadataJSONPrefix); ok && k != "" {
		if !json.Valid([]byte(v)) {
			l.errorf("invalid env var %s (want JSON)", name)
			return
		}
		if l.cfg.MetadataJSON == nil {
			l.cfg.MetadataJSON = make(map[string]json.RawMessage)
		}
		l.cfg.MetadataJSON[k] = json.RawMessage(v)
	}
}

// find is the setting with a key, which is there.
func find(key string) *setting {
	for i := range settings {
		if settings[i].key == key {
			return &settings[i]
		}
	}
	panic(fmt.Sprintf("config: no setting %s", key))
}

// withMetadata is the setting that node metadata can set, or nil.
func withMetadata(name string) *setting {
	for i := range settings {
		if s := &settings[i]; s.variable == metadataPrefix+name || s.stronger == metadataPrefix+name {
			return s
		}
	}
	return nil
}
