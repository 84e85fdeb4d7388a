// Package admin answers people and probes over HTTP: what this node sees and holds, its metrics, whether it is ready, and
// which log lines are written.
//
// A [Server] listens on three ports: admin (15000) on loopback addresses alone, since it has no authentication; metrics (15020)
// and readiness (15021) on every address. It changes nothing but log levels, and it may ask for the end of the process. It reads
// everybody else through a [Dumper]; what holds readiness back is told to a [Readiness].
//
// Paths, texts and the form of /config_dump are those of ztunnel, so that istioctl, probes and dashboards made for it work.
package admin
