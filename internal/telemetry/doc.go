// Package telemetry keeps the record of each connection, counts it, writes the access log, and makes the logger of everything else.
//
// A [Conn] is what is known of one connection: who, to whom, over what, how many bytes. It lives apart from whatever moves
// the bytes. A [Recorder] holds the open ones, writes a line when one ends (and, if asked, when it opens), and is the
// collector of the traffic metrics.
//
// [NewLogger] makes the logger that everything else uses; [Levels], which may be changed at any time, say which of its lines and of the
// access log are written.
//
// Lines, metrics and their labels are those of ztunnel: the same fields, in the same order, so that filters and dashboards made for it work.
package telemetry
