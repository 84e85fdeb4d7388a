package explain

import (
	"fmt"
	"strings"

	"ztun.dev/ztun/proxy"
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
	udp := ""
	if r.UDP {
		udp = ", UDP"
	}
	line("flow", "%s -> %s%s", from, r.To, udp)
	switch {
	case r.Match != "":
		line("destination", "%s, %s", r.Destination, r.Match)
	case r.Destination != "":
		line("destination", "%s", r.Destination)
	}
	if len(r.Hidden) > 0 {
		line("", "hidden from the source's namespace: %s", strings.Join(r.Hidden, ", "))
	}
	if len(r.Ports) > 0 {
		line("", "it has no such port, but %s", strings.Trim(strings.ReplaceAll(fmt.Sprint(r.Ports), " ", ", "), "[]"))
	}
	r.writeWaypoint(line)
	if r.Gateway != "" {
		line("gateway", "%s, to another network", r.Gateway)
	}
	r.writeEndpoints(line)
	r.writeChosen(line)
	switch {
	case r.Error != "":
		line("refused", "%s", r.Error)
	case r.Reason != "":
		line("transport", "%s: %s", r.Route, r.Reason)
	case r.Route == proxy.AnsweredHere.String():
		line("transport", "DNS, answered here: names of the mesh from its state, others are forwarded to a resolver")
	case r.Authority != "":
		line("transport", "%s, %s, next hop %s, authority %s", r.Route, r.by(), r.NextHop, r.Authority)
		line("identity", "expects %s", strings.Join(r.Accepts, " or "))
		switch {
		case r.Gateway != "" && len(r.Beyond) == 0:
			line("", "beyond the gateway nobody: the service names no identity, so that every peer is refused")
		case r.Gateway != "":
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

// by says whether a waypoint is on the way.
func (r *Report) by() string {
	if r.Waypoint == "" || r.SkipsIt {
		return "no waypoint"
	}
	return "by the waypoint"
}

func (r *Report) writeWaypoint(line func(string, string, ...any)) {
	if len(r.Waypoints) > 0 {
		line("waypoints", "%d, of which each connection takes one by weight; below is the heaviest", len(r.Waypoints))
	}
	for _, b := range r.Waypoints {
		what := "never"
		switch {
		case b.Error != "":
			what = "refused: " + b.Error
		case b.SkipsIt:
			what = "skipped, the source is the waypoint: " + b.Route + " to " + b.NextHop
		case b.Weight > 0:
			what = fmt.Sprintf("%s, %s, next hop %s", b.Chosen, b.Route, b.NextHop)
		}
		line("", "%d of %d %s: %s", b.Weight, b.Of, b.Waypoint, what)
	}
	switch {
	case r.Waypoint != "" && r.SkipsIt:
		line("waypoint", "%s, skipped: the source is the waypoint", r.Waypoint)
	case r.Waypoint != "":
		line("waypoint", "%s", r.Waypoint)
	}
}

// maxEndpoints is how many endpoints of a service the text names of those that can be picked, and of the others.
const maxEndpoints = 10

func (r *Report) writeEndpoints(line func(string, string, ...any)) {
	for _, p := range r.Pools {
		text := fmt.Sprintf("%d endpoints", p.Endpoints)
		if p.Endpoints == 1 {
			text = "1 endpoint"
		}
		if p.Service != r.Service {
			text += " of " + p.Service
		}
		if n := p.Endpoints - p.Candidates; n > 0 {
			text += fmt.Sprintf(", %d excluded", n)
		}
		if p.Preset != "" {
			text += ", preset " + p.Preset
		}
		if p.Candidates < p.Endpoints || p.Preset != "" {
			text += fmt.Sprintf(" -> %d", p.Candidates)
		}
		if p.Where != "" {
			text += " " + p.Where
		}
		line("candidates", "%s", text)
		taken, left := 0, 0
		for _, e := range r.Endpoints {
			switch {
			case e.Service != p.Service:
			case e.Candidate:
				if taken++; taken <= maxEndpoints {
					line("", "+ %s port %d", e.Workload, e.Port)
				}
			default:
				if left++; left <= maxEndpoints {
					line("", "- %s: %s", e.Workload, e.Why)
				}
			}
		}
		if more := max(taken-maxEndpoints, 0) + max(left-maxEndpoints, 0); more > 0 {
			line("", "and %d more (-o json has all)", more)
		}
	}
}

func (r *Report) writeChosen(line func(string, string, ...any)) {
	if r.Chosen == "" {
		return
	}
	text := r.Chosen
	if r.Address != "" {
		text += " " + r.Address
	}
	if r.Authority == "" || r.by() == "no waypoint" && r.Gateway == "" {
		text += fmt.Sprintf(" target port %d", r.TargetPort)
		if r.Service != "" {
			text += fmt.Sprintf(" (service port %s)", r.To[strings.LastIndexByte(r.To, ':')+1:])
		}
	}
	if n := len(r.Pools); n > 0 && r.Pools[n-1].Candidates > 1 {
		text += fmt.Sprintf(", one of %d, by capacity", r.Pools[n-1].Candidates)
	}
	line("chosen", "%s", text)
	if r.Lookup != "" {
		line("", "has no address: %s is resolved when a connection is made", r.Lookup)
	}
}

// remote is what the node of the destination will do, as far as its policies are known here.
func (r *Report) remote() string {
	allow, deny, missing := 0, 0, 0
	for _, p := range r.Policies {
		switch {
		case p.Missing:
			missing++
		case p.DryRun:
		case p.Action == "DENY":
			deny++
		default:
			allow++
		}
	}
	text := fmt.Sprintf("policies are evaluated by the destination node; %d ALLOW + %d DENY known here", allow, deny)
	if missing > 0 {
		text += fmt.Sprintf(", %d have not arrived", missing)
	}
	for _, p := range r.Policies {
		if p.Matched && !p.DryRun && strings.HasSuffix(r.Verdict, ": "+p.Key) {
			return text + fmt.Sprintf(", would match: %s %s rule %d", p.Action, p.Key, p.Rule)
		}
	}
	return text
}

func (r *Report) writePolicies(line func(string, string, ...any)) {
	if !r.Inbound && r.Allowed != nil {
		line("remote", "%s", r.remote())
	}
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
}
