// Package config makes one typed [Config] of everything that can be set: defaults, then a YAML file, then the environment, then
// flags, each stronger than the one before.
//
// One table ([Settings]) names each setting: its variable, its key in the file, its type, default and meaning. [Load] is strict: an
// unknown key, an unknown variable of ztun's own, a value that cannot be read, two settings that exclude each other are errors,
// and all of them are reported at once. It remembers where each value came from ([Config.Origin]).
//
// The package reads the file and nothing else: the environment and the flags are handed in. Whether a path, a namespace or an address
// that is named here exists is found out by whoever opens it.
package config
