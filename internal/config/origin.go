package config

import "fmt"

// A Source is a kind of place where a value can come from; a larger one is stronger.
type Source uint8

// The sources.
const (
	FromDefault Source = iota
	FromMesh
	FromFile
	FromProxyConfig
	FromEnvironment
	FromFlag
)

func (s Source) String() string {
	return [...]string{"default", "mesh file", "file", proxyConfigVariable, "environment", "flag"}[s]
}

// An Origin is where a value came from.
type Origin struct {
	Source Source
	Name   string // the variable or the flag; of a file, its name and the line
}

func (o Origin) String() string {
	if o.Name == "" {
		return o.Source.String()
	}
	return fmt.Sprintf("%s %s", o.Source, o.Name)
}

// Origin says where the value with a key came from.
func (c *Config) Origin(key string) Origin { return c.origins[key] }
