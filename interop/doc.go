// Package interop runs ztun's HBONE against code that this project did not write: istio's pkg/hbone, Envoy, Node's http2 and
// h2spec.
//
// It is a module of its own, so that none of that is ever linked into ztun, and it has tests only: `make interop` in the
// directory above fetches the peers and runs them, in a network namespace of their own.
package interop
