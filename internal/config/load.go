package config

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"ztun.dev/ztun/internal/strict"
)

// Sources is what Load reads. The zero value gives the defaults.
type Sources struct {
	Mesh  string            // the mesh configuration, such as MeshFile, which need not be there; "": none
	File  string            // of --config; "": of ZTUN_CONFIG
	Env   []string          // as of os.Environ; of a name that is there twice the first counts, as in package os
	Flags map[string]string // the flags that were given, by Setting.Flag
}

// Load reads all sources. The error joins everything that is wrong with them, a line each.
func Load(src Sources) (*Config, error) {
	l := newLoader()
	l.read(src)
	l.check()
	if len(l.errs) > 0 {
		return nil, errors.Join(l.errs...)
	}
	return l.cfg, nil
}

// read reads the sources, the weakest first.
func (l *loader) read(src Sources) {
	env := l.environment(src.Env)
	if src.Mesh != "" {
		l.meshFile(src.Mesh)
	}
	if l.cfg.File = src.File; src.File == "" {
		l.cfg.File = env[fileVariable]
	}
	if l.cfg.File != "" {
		l.file(l.cfg.File)
	}
	if v := env[proxyConfigVariable]; v != "" {
		l.proxyConfig(FromProxyConfig, proxyConfigVariable, []byte(v))
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		l.prefixed(name, env[name])
	}
	for i := range settings {
		s := &settings[i]
		for _, name := range []string{s.variable, s.stronger} {
			if v, ok := env[name]; ok && name != "" {
				l.set(s, v, Origin{FromEnvironment, name}, "invalid env var %s=%s (%s)")
			}
		}
	}
	l.flags(src.Flags)
}

type loader struct {
	cfg  *Config
	errs []error
}

// newLoader begins with the defaults.
func newLoader() *loader {
	l := &loader{cfg: &Config{origins: make(map[string]Origin, len(settings)), texts: make(map[string]string, len(settings))}}
	for i := range settings {
		s := &settings[i]
		if err := s.bind(l.cfg).Set(s.def); err != nil {
			l.errorf("default of %s: %s", s.key, err)
		}
		l.cfg.texts[s.key] = s.def
	}
	return l
}

func (l *loader) errorf(format string, args ...any) {
	l.errs = append(l.errs, fmt.Errorf("config: "+format, args...))
}

func (l *loader) set(s *setting, v string, o Origin, format string) {
	if err := s.bind(l.cfg).Set(v); err != nil {
		l.errorf(format, o.Name, s.shown(v), err)
		return
	}
	l.cfg.origins[s.key], l.cfg.texts[s.key] = o, v
}

// serviceLink matches what Kubernetes puts into every pod of a namespace with a Service called ztun or ztun-something.
var serviceLink = regexp.MustCompile(`^ZTUN_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_[0-9]+_.*)$`)

func (l *loader) environment(list []string) map[string]string {
	known := []string{fileVariable, testVariable}
	for i := range settings {
		known = append(known, settings[i].variable)
	}
	env := make(map[string]string, len(list))
	for _, kv := range list {
		name, v, _ := strings.Cut(kv, "=")
		if _, twice := env[name]; twice {
			continue
		}
		env[name] = v
		if strings.HasPrefix(name, "ZTUN_") && !slices.Contains(known, name) && !serviceLink.MatchString(name) {
			l.errorf("environment: %s: unknown variable%s", name, strict.Suggestion(name, known))
		}
	}
	return env
}

func (l *loader) flags(given map[string]string) {
	for i := range settings {
		s := &settings[i]
		if v, ok := given[s.flag()]; ok && s.flag() != "" {
			l.set(s, v, Origin{FromFlag, "--" + s.flag()}, "invalid flag %s=%s (%s)")
		}
	}
}

func (l *loader) file(name string) {
	data, err := os.ReadFile(name)
	if err != nil {
		l.errorf("%w", err)
		return
	}
	l.parse(name, data)
}
