package demo

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/lab"
)

// A run is one demonstration.
type run struct {
	cfg      Config
	programs programs
	dir      string
	lab      *lab.Lab
	members  []member
	hosts    map[role]*lab.Host
	nodes    []*nodeProcess // by node
	started  bool           // all nodes were ready

	asked, answered string // markers of requests and of answers
	report          Report
	finished        bool // the report is complete
	text            printer
	cleanup         []error // what went wrong in taking things down
}

// Run runs the demonstration until it has shown everything, or ctx ends. All that it made is gone when it returns. The error is
// an [*Error]; nil says that every fact holds.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.check(); err != nil {
		return &Error{Code: 2, Err: err}
	}
	if _, err := os.Stat(cfg.Binary); err != nil {
		return &Error{Code: 2, Err: fmt.Errorf("demo: the binary: %w", err)}
	}
	if err := preflight(); err != nil {
		return &Error{Code: 1, Err: err}
	}
	r := &run{cfg: cfg, programs: findPrograms(&cfg), asked: marker(), answered: marker(), hosts: make(map[role]*lab.Host)}
	r.report.Failures = []string{} // a list in JSON, also when it is empty
	if !cfg.JSON {
		r.text.w = cfg.Out
	}
	err := r.do(ctx, time.Now())
	switch {
	case !r.finished && ctx.Err() != nil:
		err = errors.New("demo: interrupted")
	case err == nil && !r.report.OK:
		err = fmt.Errorf("demo: %d facts do not hold: %s", len(r.report.Failures), strings.Join(r.report.Failures, "; "))
	}
	if err = errors.Join(append([]error{err}, r.cleanup...)...); err != nil {
		return &Error{Code: 1, Err: err}
	}
	return nil
}

// after notes what went wrong in taking things down.
func (r *run) after(err error) {
	if err != nil {
		r.cleanup = append(r.cleanup, err)
	}
}

// preflight looks for what is easily missing, so that nothing is begun in vain.
func preflight() error {
	if os.Geteuid() != 0 {
		return errors.New("demo: network namespaces need root; run it with sudo")
	}
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("demo: %w; load the kernel module (modprobe tun), in a container pass --device /dev/net/tun", err)
	case err != nil:
		return fmt.Errorf("demo: %w; in a container pass --device /dev/net/tun", err)
	}
	f.Close()
	return nil
}

// marker is a text of 26 letters and digits that is nowhere else.
func marker() string { return rand.Text() }

func hasIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
}

// do makes everything, shows everything, and takes everything down, in this order.
func (r *run) do(ctx context.Context, start time.Time) (err error) {
	if r.dir, err = os.MkdirTemp("", "ztun-demo-"); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { r.after(os.RemoveAll(r.dir)) }()

	r.report.IPv6 = hasIPv6()
	r.lab, err = lab.New(ctx, lab.Config{Nodes: len(roles), PodsPerNode: len(roles[0]), IPv6: r.report.IPv6, ResolvConf: resolvConf})
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { r.after(r.lab.Close()) }()
	r.populate()
	r.text.opening(r)
	if err := r.startServers(ctx); err != nil {
		return err
	}
	if err := r.control(ctx); err != nil {
		return err
	}
	defer func() { r.after(r.stopNodes()) }()
	if err := r.startNodes(ctx); err != nil {
		return err
	}
	if err := r.show(ctx); err != nil {
		return err
	}
	r.report.DurationSeconds = time.Since(start).Seconds()
	r.report.finish()
	r.finished = true
	r.text.closing(&r.report)
	if r.cfg.JSON {
		enc := json.NewEncoder(r.cfg.Out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(&r.report); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
	}
	if r.cfg.Keep {
		return r.keep(ctx)
	}
	return nil
}

// populate gives the pods of the lab their roles.
func (r *run) populate() {
	for i := range roles {
		for j, role := range roles[i] {
			pod := r.lab.Pod(i, j)
			addrs := []netip.Addr{pod.Addr4}
			if r.report.IPv6 {
				addrs = append(addrs, pod.Addr6)
			}
			r.hosts[role] = pod
			r.members = append(r.members, member{Role: role, Node: r.lab.Node(i).Name, Addrs: addrs, Netns: pod.NetnsPath()})
		}
	}
	rep := &r.report
	rep.HTTPClient, rep.ThroughputClient = r.programs.httpClient(), r.programs.throughputClient()
	rep.CongestionControl, rep.MTU, rep.RequestURL = r.lab.CongestionControl(), r.lab.MTU(), serviceURL
	rep.SourceIdentityExpected, rep.DestinationIdentityExpected, rep.DeniedClient = client.identity(), web.identity(), intruder.identity()
	for _, f := range rep.families() {
		*f.expect = r.member(client).Addrs[f.index].String()
	}
}

func (r *run) member(of role) *member {
	for i := range r.members {
		if r.members[i].Role == of {
			return &r.members[i]
		}
	}
	return nil
}

// startServers starts the programs that serve, before there is any ztun. They run until the lab closes.
func (r *run) startServers(ctx context.Context) error {
	// They outlive ctx so that the end of ctx does not look like their failure.
	background := context.WithoutCancel(ctx)
	servers := []struct {
		in   role
		cmd  *lab.Cmd
		port uint16
	}{
		{web, r.hosts[web].Command(background, r.cfg.Binary, "demo-server", "-name", string(web), "-say", r.answered, "-listen", fmt.Sprint(":", webPort)), webPort},
		{sink, r.programs.sinkCommand(background, r.hosts[sink]), sinkPort},
		{sink, r.hosts[sink].Command(background, r.cfg.Binary, "demo-server", "-name", "crowd", "-sink", fmt.Sprint(":", crowdPort)), crowdPort},
		{sink, r.hosts[sink].Command(background, r.cfg.Binary, "demo-server", "-name", "echo", "-sink", fmt.Sprint(":", echoPort)), echoPort},
	}
	for _, s := range servers {
		var said lines
		s.cmd.Env, s.cmd.Stderr = environment, &said
		if err := s.cmd.Start(); err != nil {
			return fmt.Errorf("demo: server in %s: %w", s.in, err)
		}
		wait, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := r.hosts[s.in].WaitListening(wait, s.port)
		cancel()
		if err != nil {
			return fmt.Errorf("demo: server in %s: %w; it said %q", s.in, err, said.last(3))
		}
	}
	return nil
}

// control does without ztun what is measured with it. Names and policies are ztun's; here the server's own address is asked.
func (r *run) control(ctx context.Context) error {
	s, err := r.sniff()
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }() // counted has, unless there was an error
	for _, f := range r.report.families() {
		at := netip.AddrPortFrom(r.member(web).Addrs[f.index], webPort)
		url := fmt.Sprintf("http://%s/?%s", at, r.asked)
		if g, _, err := r.programs.get(ctx, r.hosts[client], f.flag, url); err != nil {
			return fmt.Errorf("demo: control run without ztun: %s over %s: %w", r.report.HTTPClient, f.name, err)
		} else if g.say != r.answered {
			return fmt.Errorf("demo: control run without ztun: the answer over %s lacks its marker", f.name)
		}
	}
	if r.report.Without, r.report.ClearBytesWithout, err = counted(s); err != nil {
		return err
	}
	if r.report.SpeedWithout, err = r.speed(ctx); err != nil {
		return err
	}
	r.report.PingPongWithout, err = r.pingPong(ctx)
	return err
}

func (r *run) sniff() (*lab.Sniffer, error) {
	s, err := r.lab.Wire().Sniff(lab.SniffConfig{Markers: [][]byte{[]byte(r.asked), []byte(r.answered)}})
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	return s, nil
}

// counted ends a sniffer. readable are the bytes that could be read: payload of TCP, and markers elsewhere.
func counted(s *lab.Sniffer) (w Wire, readable uint64, err error) {
	if err := s.Close(); err != nil {
		return Wire{}, 0, fmt.Errorf("demo: %w", err)
	}
	c := s.Count()
	return Wire{
		Packets: c.Packets, ClearBytes: c.ClearBytes, TunnelBytes: c.TunnelBytes, OtherBytes: c.OtherBytes,
		RequestHits: c.Hits[0], ReplyHits: c.Hits[1], Lost: c.Dropped,
	}, c.ClearBytes + c.HiddenBytes, nil
}

// speed measures throughput both ways.
func (r *run) speed(ctx context.Context) (s Speed, err error) {
	to := r.member(sink).Addrs[0].String()
	if s.Up, err = r.programs.measure(ctx, r.hosts[client], to, false, r.cfg.Measure); err == nil {
		s.Down, err = r.programs.measure(ctx, r.hosts[client], to, true, r.cfg.Measure)
	}
	if err != nil {
		return s, fmt.Errorf("demo: throughput: %w", err)
	}
	return s, nil
}

// pingPong measures round trips beside bulk connections.
func (r *run) pingPong(ctx context.Context) (PingPong, error) {
	m, err := r.programs.pingPong(ctx, r.hosts[client], r.member(sink).Addrs[0], r.cfg.Measure/2)
	if err != nil {
		return m, fmt.Errorf("demo: round trips: %w", err)
	}
	return m, nil
}

// startNodes writes the configuration and starts a ztun for each node.
func (r *run) startNodes(ctx context.Context) error {
	authority, err := ca.New(time.Now)
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	root, err := authority.PEM()
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	files := map[string][]byte{"root.pem": root, "mesh.yaml": meshFile(r.members)}
	for i := range roles {
		name := r.lab.Node(i).Name
		files[name+".yaml"] = nodeFile(name, r.dir, r.members)
		if err := os.Mkdir(filepath.Join(r.dir, name), 0o700); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(r.dir, name), content, 0o600); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
	}
	for i := range roles {
		p, err := startNode(ctx, r.cfg.Binary, r.lab.Node(i), r.dir)
		if err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		r.nodes = append(r.nodes, p)
	}
	var said strings.Builder
	for _, p := range r.nodes {
		if err := p.ready(ctx); err != nil {
			return err
		}
		said.WriteString(p.log.last(p.log.len()) + "\n")
	}
	r.report.Capture = captureOf(said.String())
	r.text.printf("\n")
	r.text.line("how the nodes capture their pods", r.report.Capture, r.report.Capture == backend)
	r.started = true
	return nil
}

// stopNodes ends the nodes at the same time.
func (r *run) stopNodes() error {
	errs := make([]error, len(r.nodes))
	var g errgroup.Group
	for i, p := range r.nodes {
		g.Go(func() error { errs[i] = p.stop(r.started); return nil })
	}
	_ = g.Wait()
	r.nodes = nil
	return errors.Join(errs...)
}

// show does all that is shown with ztun. Errors are of the demonstration itself; what ztun does not do is noted in the report.
func (r *run) show(ctx context.Context) error {
	s, err := r.sniff()
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }() // counted has, unless there was an error
	steps := []func(context.Context){r.request, r.identities, r.denial, r.markers}
	for _, step := range steps {
		step(ctx)
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if r.report.With, r.report.ClearBytesWithZtun, err = counted(s); err != nil {
		return err
	}
	r.text.wire(&r.report)
	if r.report.SpeedWith, err = r.speed(ctx); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.report.fail("with ztun: %v", err)
	} else if err := r.measuredInTunnel(ctx); err != nil {
		r.report.fail("the measured connection: %v", err)
	}
	r.text.throughput(&r.report)
	if r.report.PingPongWith, err = r.pingPong(ctx); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.report.fail("with ztun: %v", err)
	}
	r.text.pingPong(&r.report)
	return nil
}

// measuredInTunnel finds the connections of the measurement in the access log of the sink's node.
func (r *run) measuredInTunnel(ctx context.Context) error {
	from := r.member(client).Addrs[0]
	_, err := r.nodes[1].record(ctx, 0, func(rec record) bool {
		return rec.from("inbound", from) && rec["dst.workload"] == string(sink) && rec["src.identity"] == client.identity()
	})
	return err
}

// request asks for the service by its name.
func (r *run) request(ctx context.Context) {
	r.text.heading("request by service name", "name and service address are ztun's to answer; the server is on the other node")
	var seen []family
	for _, f := range r.report.families() {
		g, shown, err := r.programs.get(ctx, r.hosts[client], f.flag, serviceURL)
		if err != nil {
			r.report.fail("%s: %v", shown, err)
			r.text.line("client$ "+shown, err.Error(), false)
			continue
		}
		*f.ok, *f.seen, r.report.Answer = g.say == r.answered, g.client, g.first
		r.text.line("client$ "+shown, g.first, *f.ok)
		seen = append(seen, f)
	}
	r.text.heading("client address that the server saw", "the pod's own: programs, logs and network policies keep working")
	for _, f := range seen {
		r.text.line(f.name, fmt.Sprintf("%s, expected %s", *f.seen, *f.expect), *f.seen == *f.expect)
	}
}

// identities reads from the access logs who talked to whom: the source as the destination's node has verified it, and the
// other way round.
func (r *run) identities(ctx context.Context) {
	r.text.heading("identities of both ends", "from the access logs; each is what the other side's node verified in mutual TLS")
	if !r.report.RequestOK {
		r.text.line("both", "no connection to read about", false)
		return
	}
	from := r.member(client).Addrs[0]
	for _, side := range []struct {
		what, direction, field string
		node                   *nodeProcess
		got                    *string
		want                   string
	}{
		{"source", "inbound", "src.identity", r.nodes[1], &r.report.SourceIdentity, r.report.SourceIdentityExpected},
		{"destination", "outbound", "dst.identity", r.nodes[0], &r.report.DestinationIdentity, r.report.DestinationIdentityExpected},
	} {
		rec, err := side.node.record(ctx, 0, func(rec record) bool {
			return rec.from(side.direction, from) && rec["dst.workload"] == string(web) && rec["error"] == "" && rec["duration"] != ""
		})
		if err != nil {
			r.report.fail("%s: %v", side.what, err)
			r.text.line(side.what, err.Error(), false)
			continue
		}
		*side.got = rec[side.field]
		r.text.line(side.what, rec[side.field], rec[side.field] == side.want)
	}
}

// denial asks from a pod whose service account the policy does not let in.
func (r *run) denial(ctx context.Context) {
	r.text.heading("a flow that policy denies", "policy "+namespace+"/"+policy+", decided by identity on the server's node")
	first := r.nodes[1].access.len()
	g, shown, err := r.programs.get(ctx, r.hosts[intruder], "-4", serviceURL)
	if err == nil {
		r.report.DeniedObserved = g.first
		r.text.line("intruder$ "+shown, "was answered: "+g.first, false)
		return
	}
	r.report.DeniedObserved = err.Error()
	r.text.line("intruder$ "+shown, err.Error(), true)
	from := r.member(intruder).Addrs[0]
	rec, err := r.nodes[1].record(ctx, first, func(rec record) bool { return rec.from("inbound", from) && rec["error"] != "" })
	if err != nil {
		r.report.fail("reason of the denial: %v", err)
		r.text.line("reason", err.Error(), false)
		return
	}
	r.report.DeniedReason = rec["error"]
	r.report.Denied = strings.Contains(rec["error"], "policy rejection") && strings.Contains(rec["error"], namespace+"/"+policy)
	r.text.line("reason", rec["error"], r.report.Denied)
}

// markers sends what the sniffer looks for.
func (r *run) markers(ctx context.Context) {
	for _, f := range r.report.families() {
		if !*f.ok {
			continue // noted already
		}
		g, _, err := r.programs.get(ctx, r.hosts[client], f.flag, serviceURL+"?"+r.asked)
		if err == nil && g.say != r.answered {
			err = errors.New("the answer lacks its marker")
		}
		if err != nil {
			r.report.fail("markers over %s: %v", f.name, err)
		}
	}
}

// keep lets everything run until ctx ends, or a node does.
func (r *run) keep(ctx context.Context) error {
	// A program in each pod whose namespaces can be entered, mounts and with them resolv.conf included.
	pids := make(map[role]int)
	for role, host := range r.hosts {
		c := host.Command(context.WithoutCancel(ctx), r.cfg.Binary, "demo-server", "-name", string(role))
		c.Env = environment
		if err := c.Start(); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		pids[role] = c.Pid()
	}
	w := r.cfg.Out
	if r.cfg.JSON {
		w = r.cfg.Err
	}
	(&printer{w: w}).invitation(r, pids)
	select {
	case <-ctx.Done():
		return nil
	case <-r.nodes[0].cmd.Done():
	case <-r.nodes[1].cmd.Done():
	}
	if ctx.Err() != nil {
		return nil
	}
	return errors.New("demo: a node has ended by itself")
}
