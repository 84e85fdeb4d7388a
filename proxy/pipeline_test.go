package proxy_test

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"github.com/rogpeppe/go-internal/txtar"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"ztun.dev/ztun/internal/explain"
	"ztun.dev/ztun/internal/workload"
)

var update = flag.Bool("update", false, "write what happens into testdata/flows/*.txtar")

// TestPipeline plays the scripts of testdata/flows through all of the way: packets into a netstack, the proxy's decision, HBONE with TLS,
// and the proxy of the other pod. The files have the state (state.yaml, and others that "state" puts in its place), the script, what
// happens then (want), the access log, and the counters. The name of a file, without its number, is that of the test.
//
//	pod NAMESPACE/NAME            whose packets these are; the first line
//	at ADDRESS refuse|unreachable|silent|well
//	name HOSTNAME ADDRESS...      of an endpoint; unname HOSTNAME
//	record TYPE HOSTNAME. RECORD  that resolvers know
//	dial NAME SOURCE TARGET       a SYN; before it, the decision of explain if the pod sends it
//	NAME send TEXT, NAME end, NAME reset; so also NAME.server, the other end
//	ask SOURCE RESOLVER TYPE HOSTNAME
//	state FILE
//	advance TIME
func TestPipeline(t *testing.T) {
	files, err := filepath.Glob("../testdata/flows/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		a, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".txtar")
		if ids, _, ok := strings.Cut(string(a.Comment), "\n"); ok && strings.HasPrefix(ids, "scenarios: ") {
			name = strings.TrimPrefix(ids, "scenarios: ") + " " + name
		}
		t.Run(name, func(t *testing.T) { play(t, file, a) })
	}
}

func section(a *txtar.Archive, name string) *txtar.File {
	i := slices.IndexFunc(a.Files, func(f txtar.File) bool { return f.Name == name })
	if i < 0 {
		a.Files = append(a.Files, txtar.File{Name: name})
		i = len(a.Files) - 1
	}
	return &a.Files[i]
}

func parse(t *testing.T, a *txtar.Archive, name string) workload.State {
	t.Helper()
	st, err := workload.ParseStatic(name, section(a, name).Data)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func play(t *testing.T, file string, a *txtar.Archive) {
	m := newMesh(t, parse(t, a, "state.yaml"))
	for i, line := range strings.Split(strings.TrimSpace(string(section(a, "script").Data)), "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		fmt.Fprintf(&m.log, "%s\n", line)
		if err := m.do(a, strings.Fields(line), line); err != nil {
			t.Fatalf("%s: script line %d: %s: %v", file, i+1, line, err)
		}
		if m.far != nil {
			m.settle()
		}
	}
	got := map[string]string{"want": m.log.String(), "log": m.lines(), "metrics": m.counters()}
	changed := false
	for _, name := range []string{"want", "log", "metrics"} {
		f := section(a, name)
		if diff := cmp.Diff(string(f.Data), got[name]); diff != "" {
			if !*update {
				t.Errorf("%s of %s (-file +now; -update writes it):\n%s", name, file, diff)
			}
			f.Data, changed = []byte(got[name]), true
		}
	}
	if *update && changed {
		if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil { //nolint:gosec // as the others
			t.Fatal(err)
		}
	}
}

// do runs one line of a script.
func (m *mesh) do(a *txtar.Archive, f []string, line string) error {
	args := len(f) - 1
	switch {
	case f[0] == "pod" && args == 1:
		w, err := explain.Mesh{State: m.store.Snapshot()}.Find(f[1])
		if err != nil {
			return err
		}
		m.start(w)
	case f[0] == "at" && args == 2:
		dst, err := netip.ParseAddrPort(f[1])
		m.behave[dst] = strings.TrimPrefix(f[2], "well")
		return err
	case f[0] == "unname" && args == 1:
		delete(m.names, f[1])
	case f[0] == "name" && args >= 1:
		m.names[f[1]] = nil
		for _, text := range f[2:] {
			ip, err := netip.ParseAddr(text)
			if err != nil {
				return err
			}
			m.names[f[1]] = append(m.names[f[1]], ip)
		}
	case f[0] == "record" && args > 2:
		m.world[f[1]+" "+f[2]] = f[2] + " " + strings.Join(f[3:], " ")
	case f[0] == "dial" && args == 3:
		return m.dial(f[1], f[2], f[3])
	case f[0] == "ask" && args == 4:
		return m.ask(f[1], f[2], f[3], f[4])
	case f[0] == "state" && args == 1:
		m.store.Replace(parse(m.t, a, f[1]))
	case f[0] == "advance" && args == 1:
		d, err := time.ParseDuration(f[1])
		for by := step; err == nil && d > 0; d -= by {
			if d > time.Minute {
				by = time.Second
			}
			m.Advance(min(d, by))
			m.settle()
		}
		return err
	case args >= 1:
		_, text, _ := strings.Cut(line, f[1])
		return m.act(f[0], f[1], strings.TrimSpace(text))
	default:
		return fmt.Errorf("what is that?")
	}
	return nil
}

// step is how far the clock is moved at once, while applications have to acknowledge.
const step = 50 * time.Millisecond

func (m *mesh) dial(name, src, dst string) error {
	from, err := netip.ParseAddrPort(src)
	if err != nil {
		return err
	}
	to, err := netip.ParseAddrPort(dst)
	if err != nil {
		return err
	}
	if w := m.pod.workload(); w != nil && slices.Contains(w.Addresses, from.Addr()) && to.Port() != 53 {
		r := explain.Mesh{State: m.store.Snapshot(), Network: w.Network}.Outbound(w, to)
		m.say("explain: %s", told(&r))
	}
	i := slices.IndexFunc(m.apps, func(a *app) bool { return a.src == from && a.dst == to })
	if i < 0 {
		m.apps = append(m.apps, &app{name: name, src: from, dst: to, seq: 1000})
		i = len(m.apps) - 1
	}
	m.opening = name
	m.write(m.apps[i].packet(header.TCPFlagSyn, ""))
	m.settle()
	m.Advance(2 * time.Millisecond) // an ICMP error comes after one
	return nil
}

// told is the decision in one line.
func told(r *explain.Report) string {
	one := ""
	if n := len(r.Pools); n > 0 && r.Pools[n-1].Candidates > 1 {
		one = fmt.Sprintf(", one of %d", r.Pools[n-1].Candidates)
	}
	switch {
	case len(r.Waypoints) > 0:
		return r.Outcome()
	case r.Error != "":
		return "refused, " + r.Error
	case r.Authority != "":
		return fmt.Sprintf("%s to %s for %s%s", r.Route, r.NextHop, r.Authority, one)
	}
	return fmt.Sprintf("%s to %s%s", r.Route, r.NextHop, one)
}

func (m *mesh) ask(src, resolver, qtype, name string) error {
	from, err := netip.ParseAddrPort(src)
	if err != nil {
		return err
	}
	to, err := netip.ParseAddrPort(resolver)
	if err != nil {
		return err
	}
	q := new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.StringToType[qtype])
	q.Id = 1
	msg, err := q.Pack()
	if err == nil {
		m.write(udpPacket(from, to, msg))
	}
	return err
}

// act has an application, or a server, do something.
func (m *mesh) act(who, what, text string) error {
	if c := m.servers[who]; c != nil {
		switch what {
		case "send":
			n, err := c.TryWrite([]byte(text))
			if err == nil && n < len(text) {
				return fmt.Errorf("only %d bytes were taken", n)
			}
			return err
		case "end":
			return c.CloseWrite()
		case "reset":
			delete(m.servers, who)
			return c.Reset()
		}
	}
	i := slices.IndexFunc(m.apps, func(a *app) bool { return a.name == who })
	if i < 0 {
		return fmt.Errorf("there is no %s", who)
	}
	a := m.apps[i]
	switch what {
	case "send":
		m.write(a.packet(header.TCPFlagAck|header.TCPFlagPsh, text))
	case "end":
		m.write(a.packet(header.TCPFlagAck|header.TCPFlagFin, ""))
	case "reset":
		a.over = true
		m.write(a.packet(header.TCPFlagAck|header.TCPFlagRst, ""))
	default:
		return fmt.Errorf("%s cannot %s", who, what)
	}
	return nil
}

// lines is the access log so far.
func (m *mesh) lines() string {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	m.must(m.records.Run(ctx))
	return m.access.String()
}

// counters are the metrics that are not zero, with the labels that tell them apart.
func (m *mesh) counters() string {
	families, err := m.metrics.Gather()
	m.must(err)
	var lines []string
	for _, f := range families {
		for _, x := range f.GetMetric() {
			v := x.GetCounter().GetValue() + x.GetGauge().GetValue()
			if v == 0 {
				continue
			}
			var labels []string
			for _, l := range x.GetLabel() {
				switch l.GetName() {
				case "reporter", "direction", "reason", "response_flags", "destination_service", "hostname", "connection_security_policy":
					labels = append(labels, l.GetName()+"="+l.GetValue())
				}
			}
			lines = append(lines, fmt.Sprintf("%s{%s} %v\n", f.GetName(), strings.Join(labels, ","), v))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}
