// Package telemetry keeps the record of each connection and writes the access log.
//
// A [Conn] is what is known of one connection: who, to whom, over what, how many bytes. It lives apart from whatever moves
// the bytes. A [Recorder] holds the open ones, writes a line when one ends (and, if asked, when it opens), and counts.
//
// The lines are those of ztunnel: the same fields, in the same order, so that filters and dashboards made for it work.
package telemetry
