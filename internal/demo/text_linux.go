package demo

import (
	"fmt"
	"strings"
)

// opening shows the network.
func (p *printer) opening(r *run) {
	p.printf("Two nodes, each a ztun process of its own, with two pods each; programs in the pods: %s.\n\n", r.programNames())
	node := ""
	for _, m := range r.members {
		if m.Node == node {
			m.Node = ""
		} else {
			node = m.Node
		}
		addrs := make([]string, len(m.Addrs))
		for i, a := range m.Addrs {
			addrs[i] = a.String()
		}
		p.printf("  %-8s %-9s %-24s %s\n", m.Node, m.Role, strings.Join(addrs, "  "), m.Role.identity())
	}
	if !r.report.IPv6 {
		p.printf("\nThis machine has no IPv6: all that follows is over IPv4 alone.\n")
	}
}

func (r *run) programNames() string {
	names := "an HTTP server, " + r.report.HTTPClient + " and " + r.report.ThroughputClient
	var missing []string
	if r.programs.curl == "" {
		missing = append(missing, "curl")
	}
	if r.programs.iperf3 == "" {
		missing = append(missing, "iperf3")
	}
	switch {
	case len(missing) == 0:
		return names
	case r.cfg.OwnClients:
		return "an HTTP server and clients of ztun's own"
	}
	return "an HTTP server, and clients of ztun's own in place of " + strings.Join(missing, " and ") + ", not installed here"
}

// invitation lists commands to try. pids are of a program in each pod.
func (p *printer) invitation(r *run, pids map[role]int) {
	in := func(of role) string { return fmt.Sprintf("nsenter -t %d -n -m", pids[of]) }
	get := "curl " + serviceURL
	if r.programs.curl == "" {
		get = r.cfg.Binary + " demo-client get " + serviceURL
	}
	p.printf("\nEverything goes on until Ctrl-C. In another terminal, as root:\n\n")
	try := func(command, why string) { p.printf("  # %s\n  %s\n", why, command) }
	try(in(client)+" "+get, "a request that policy lets through")
	try(in(intruder)+" "+get, "one that it denies")
	if r.programs.iperf3 != "" {
		try(fmt.Sprintf("%s iperf3 -c %s -P 8", in(client), r.member(sink).Addrs[0]), "throughput of eight connections")
	}
	try(in(client)+" bash", "a shell in the pod client")
	try(fmt.Sprintf("nsenter --net=%s tcpdump -lnAi br0", r.lab.Wire().NetnsPath()), "the wire between the nodes")
	try(fmt.Sprintf("tail -f %s/node-*.access.log", r.dir), "the access logs of both nodes")
	try(fmt.Sprintf("less %s/mesh.yaml %s/node-a.yaml", r.dir, r.dir), "the state of the mesh and the configuration of a node")
}
