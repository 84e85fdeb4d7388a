package explain

import (
	"fmt"
	"strings"
)

// Text is the report for people.
func (r *Report) Text() string {
	var b strings.Builder
	line := func(what, format string, args ...any) {
		fmt.Fprintf(&b, "%-12s%s\n", what, fmt.Sprintf(format, args...))
	}
	from := r.From
	if r.FromAddress != "" {
		from += " (" + r.FromAddress + ")"
	}
	line("flow", "%s -> %s", from, r.To)
	line("destination", "%s", r.Destination)
	if len(r.Ports) > 0 {
		line("", "it has no such port, but %s", strings.Trim(strings.ReplaceAll(fmt.Sprint(r.Ports), " ", ", "), "[]"))
	}
	switch {
	case r.Waypoint != "" && r.SkipsIt:
		line("waypoint", "%s, skipped: the source is the waypoint", r.Waypoint)
	case r.Waypoint != "":
		line("waypoint", "%s", r.Waypoint)
	}
	if r.Gateway != "" {
		line("gateway", "%s, to another network", r.Gateway)
	}
	r.writeEndpoints(line)
	if r.Chosen != "" {
		line("chosen", "%s", r.Chosen)
	}
	if r.Lookup != "" {
		line("", "has no address: %s is resolved when a connection is made", r.Lookup)
	}
	switch {
	case r.Error != "":
		line("refused", "%s", r.Error)
	case r.Authority != "":
		line("transport", "%s, next hop %s, authority %s", r.Route, r.NextHop, r.Authority)
		line("identity", "expects %s", strings.Join(r.Accepts, " or "))
		if r.Gateway != "" {
			line("", "beyond the gateway %s", strings.Join(r.Beyond, " or "))
		}
	case r.NextHop != "":
		line("transport", "%s to %s, as it is", r.Route, r.NextHop)
	default:
		line("transport", "%s", r.Route)
	}
	r.writePolicies(line)
	return b.String()
}

func (r *Report) writeEndpoints(line func(string, string, ...any)) {
	if len(r.Endpoints) == 0 {
		return
	}
	n := 0
	for _, e := range r.Endpoints {
		if e.Candidate {
			n++
		}
	}
	line("endpoints", "%d of %d can be picked", n, len(r.Endpoints))
	for _, e := range r.Endpoints {
		if e.Candidate {
			line("", "+ %s port %d", e.Workload, e.Port)
		} else {
			line("", "- %s %s", e.Workload, e.Why)
		}
	}
}

func (r *Report) writePolicies(line func(string, string, ...any)) {
	for i, p := range r.Policies {
		what := ""
		if i == 0 {
			what = "policies"
		}
		action := p.Action
		if p.DryRun {
			action += " (dry run)"
		}
		switch {
		case p.Missing:
			line(what, "%s has not arrived", p.Key)
		case p.Matched:
			line(what, "%s %s, scope %s: rule %d matches", action, p.Key, p.Scope, p.Rule)
		default:
			line(what, "%s %s, scope %s: does not match: %s", action, p.Key, p.Scope, p.Failed)
		}
	}
	switch {
	case r.Verdict == "":
	case r.Allowed == nil:
		line("verdict", "%s", r.Verdict)
	case *r.Allowed:
		line("verdict", "allowed: %s", r.Verdict)
	default:
		line("verdict", "denied: %s", r.Verdict)
	}
	if !r.Inbound && r.Allowed != nil {
		line("", "(the destination's node decides, with its own state)")
	}
}
