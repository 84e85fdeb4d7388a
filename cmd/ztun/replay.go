package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"

	"ztun.dev/ztun/internal/node"
	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/workload"
)

// replayFlags are the flags of ztun replay.
type replayFlags struct {
	state, compare, network, expect, write, report, peer, checksum, speed, only, anonymize, seed, script string
	local, dirs                                                                                          []string
	recursive, decap, netSet                                                                             bool
}

func newReplay() *cobra.Command {
	var f replayFlags
	cmd := &cobra.Command{
		Use:   "replay --state FILE CAPTURE...",
		Short: "Play packet captures through the pipeline, and tell what it does",
		Long: `Play packet captures through the pipeline that pods have, and tell for each flow and each DNS question what becomes of it. No root, no
network and no TUN device are needed; the clock is that of the capture, and two runs say the same.

A CAPTURE is a file (pcap or pcapng, also gzip), a directory, or - for standard input. The state is a mesh state file, or what
/config_dump has answered. With --compare the flows are told that another state would treat differently.

Exit codes: 3 if something differs (--expect, --compare), 4 if a capture could not be used in whole, or on an interrupt; the rest is told all the
same. An interrupt of --anonymize leaves nothing: 1.`,
		Example: `  ztun replay --state mesh.yaml in.pcap
  ztun replay --state mesh.yaml --compare new.yaml --local 10.10.1.2 in.pcap
  ztun replay --state mesh.yaml -o json in.pcap > golden.jsonl
  ztun replay --state mesh.yaml --expect golden.jsonl in.pcap`,
	}
	o := addOutput(cmd)
	fs := cmd.Flags()
	fs.StringVar(&f.state, "state", "", "`FILE` with the state of the mesh")
	fs.StringVar(&f.compare, "compare", "", "`FILE` with another state: tell what it would change, in place of everything")
	fs.StringVar(&f.network, "network", "", "network of the node; the default is that of the dump, else \"\"")
	fs.StringSliceVar(&f.local, "local", nil, "`ADDRESS`es of the pods that are served; the default is all workloads that speak HBONE")
	fs.StringSliceVar(&f.dirs, "dir", nil, "`DIRECTORY` of captures, in the order of their names, beside those that are arguments")
	fs.BoolVar(&f.recursive, "recursive", false, "directories with what is below them")
	fs.StringVar(&f.peer, "peer", "recorded", "who answers connections: recorded (what the capture has of the other direction), none, accept, echo, or file:`REPLIES`")
	fs.StringVar(&f.checksum, "checksum", "auto", "wrong checksums: auto (those of a sender are taken while most of them are wrong), off or strict")
	fs.StringVar(&f.speed, "speed", "", "how fast, as `1x` for as it was recorded; the default is as fast as possible")
	fs.BoolVar(&f.decap, "decap", false, "look into GRE, VXLAN and Geneve")
	fs.StringVar(&f.only, "only", "", "play one thing only: `ID` of a flow or question, ADDRESS:PORT, ADDRESS, or NAMESPACE/NAME of a workload")
	fs.StringVar(&f.expect, "expect", "", "compare with `FILE`, JSON lines or text as it has them, and print the difference")
	fs.StringVar(&f.write, "write-pcap", "", "write `FILE` (pcapng): what the netstack has read and sent; with --only the packets as they were captured")
	fs.StringVar(&f.script, "script", "", "play the packets that `FILE` (YAML) describes, in place of captures, and compare what the netstack sends with what it expects")
	fs.StringVar(&f.anonymize, "anonymize", "", "tell nothing; write the packets, or what --only chooses of them, to `FILE` (pcapng) with other addresses and names and without payload, and the state in the same way to FILE.state.json")
	fs.StringVar(&f.seed, "seed", "", "what --anonymize depends on: the same `TEXT`, to be kept secret, gives the same addresses and names; the default is random")
	fs.StringVar(&f.report, "report", "", "write `FILE` (JSON): counts of packets and records, and what could not be used")
	offer(cmd, "peer", "recorded", "none", "accept", "echo", "file:")
	offer(cmd, "checksum", "auto", "off", "strict")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		f.netSet = fs.Changed("network")
		if f.script == "" { // of which an interrupt leaves nothing to end in order
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			context.AfterFunc(ctx, stop) // one more ends it at once, whatever it waits for
			cmd.SetContext(ctx)
		}
		return f.run(cmd, args, *o)
	}
	return cmd
}

func (f *replayFlags) run(cmd *cobra.Command, args []string, o output) (err error) {
	if err := f.fit(cmd.Flags().Changed, args); err != nil {
		return err
	}
	cfg, err := f.config(cmd.InOrStdin(), args)
	if err != nil {
		return usageError{fmt.Errorf("ztun replay: %w", err)}
	}
	if f.script != "" {
		return f.playScript(cmd.OutOrStdout(), cfg, o)
	}
	var expected []byte
	if f.expect != "" {
		if expected, err = os.ReadFile(f.expect); err != nil {
			return usageError{fmt.Errorf("ztun replay: --expect: %w", err)}
		}
		if !cmd.Flags().Changed("output") && (len(expected) == 0 || expected[0] == '{') { // text has a summary at least
			o = outputJSON
		}
	}
	files, err := f.create(cmd.InOrStdin(), cfg.Source)
	if err != nil {
		return err
	}
	code := exitOK
	if f.anonymize != "" {
		code, err = f.writeAnonymized(cmd, cfg, files)
	} else {
		code, err = f.play(cmd, cfg, files, o, expected)
	}
	for _, flag := range slices.Sorted(maps.Keys(files)) {
		if failed := files[flag].finish(err == nil); failed != nil {
			err = errors.Join(err, fmt.Errorf("--%s: %w", flag, failed))
		}
	}
	if err != nil {
		return fmt.Errorf("ztun replay: %w", err)
	}
	if code != exitOK {
		return exitCode(code)
	}
	return nil
}

// play plays captures, and returns the exit code.
func (f *replayFlags) play(cmd *cobra.Command, cfg *node.ReplayConfig, files map[string]*outFile, o output, expected []byte) (code int, err error) {
	out := bufio.NewWriterSize(cmd.OutOrStdout(), 64<<10)
	var kept bytes.Buffer
	var w io.Writer = out
	if f.expect != "" {
		w = &kept
	}
	shown := func(err error) error {
		if cfg.Wait != nil && err == nil {
			return out.Flush() // somebody looks on
		}
		return err
	}
	differing := 0
	if cfg.Compare == nil {
		cfg.Emit = func(r node.ReplayRecord) error { return shown(printRecord(w, o, r)) }
	} else {
		cfg.Emit = func(node.ReplayRecord) error { return nil }
		cfg.Differ = func(a, b node.ReplayRecord) error {
			differing++
			return shown(printChange(w, o, a, b))
		}
	}
	if file := files["write-pcap"]; file != nil {
		if w := replay.NewWriter(file, "ztun replay", 0, "pod"); cfg.Only != nil {
			cfg.Recorded = w
		} else {
			cfg.Played = w
		}
	}
	ctx := cmd.Context()
	report, err := playCaptures(ctx, cfg)
	interrupted := ctx.Err() != nil && errors.Is(err, context.Cause(ctx))
	if err != nil && !interrupted {
		_ = out.Flush() // the error says more
		return exitFailure, err
	}
	if o == outputText {
		_, _ = io.WriteString(w, summary(report, cfg.Compare != nil, differing)) // Flush tells
	}
	if f.expect != "" && !interrupted {
		if d := diff.Diff(f.expect, expected, "this run", kept.Bytes()); d != nil {
			differing++
			_, _ = out.Write(d) // as above
		}
	}
	if err := out.Flush(); err != nil {
		return exitFailure, err
	}
	if file := files["report"]; file != nil {
		if err := printJSON(file, report); err != nil {
			return exitFailure, fmt.Errorf("--report: %w", err)
		}
	}
	code = problems(cmd.ErrOrStderr(), report.Problems)
	switch {
	case interrupted:
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "ztun: interrupted: the rest of what there is was not played") // nobody is left to tell
		code = exitPartly
	case differing > 0:
		code = exitDiffers
	}
	return code, nil
}

// playCaptures plays captures on one processor. One thing happens at a time, and then no goroutine has to wake another thread for it:
// 87,000 packets a second, against 32,000 with two (BenchmarkReplay, on a busy machine).
func playCaptures(ctx context.Context, cfg *node.ReplayConfig) (*node.ReplayReport, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	return node.Replay(ctx, *cfg)
}

// playScript plays a script: its steps, and then what became of the connection.
func (f *replayFlags) playScript(w io.Writer, cfg *node.ReplayConfig, o output) error {
	data, err := os.ReadFile(f.script)
	var s *replay.Script
	if err == nil {
		s, err = replay.ParseScript(f.script, data)
	}
	if err != nil {
		return usageError{fmt.Errorf("ztun replay: --script: %w", err)}
	}
	cfg.Emit = func(r node.ReplayRecord) error { return printRecord(w, o, r) }
	ok, err := node.ReplayScript(*cfg, s, func(r *replay.StepResult) error {
		if o == outputJSON {
			return printLine(w, r)
		}
		_, err := io.WriteString(w, r.Text())
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("ztun replay: %w", err)
	case !ok:
		return exitCode(exitDiffers)
	}
	return nil
}

// problems tells what could not be used, and returns the exit code.
func problems(stderr io.Writer, list []replay.Problem) int {
	for _, p := range list {
		_, _ = fmt.Fprintf(stderr, "ztun: %s\n", p) // nobody is left to tell
	}
	if len(list) > 0 {
		return exitPartly
	}
	return exitOK
}

// writeAnonymized writes a capture and a state that can be given away, and returns the exit code.
func (f *replayFlags) writeAnonymized(cmd *cobra.Command, cfg *node.ReplayConfig, files map[string]*outFile) (code int, err error) {
	key := []byte(f.seed)
	if f.seed == "" {
		key = make([]byte, 32)
		_, _ = rand.Read(key) // never fails
	}
	a := replay.NewAnonymizer(key)
	if err := printJSON(files[anonymizedState], anonymousState(a, cfg)); err != nil {
		return exitFailure, err
	}
	var left uint64
	var unused []replay.Problem
	w := replay.NewWriter(untilDone{cmd.Context(), files["anonymize"]}, "ztun replay --anonymize", 0, "anonymized")
	if cfg.Only == nil {
		left, err = a.Capture(cfg.Source, w)
		unused = cfg.Source.Problems()
	} else {
		left, unused, err = anonymizeChosen(cmd.Context(), cfg, a, w)
	}
	if err != nil {
		return exitFailure, err
	}
	if left > 0 {
		_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "ztun: %d packets were left out: not IP, or damaged\n", left) // nobody is left to tell
	}
	return problems(cmd.ErrOrStderr(), unused), nil
}

// An untilDone writes as long as there is no reason to end.
type untilDone struct {
	ctx context.Context
	w   io.Writer
}

// Write implements io.Writer.
func (u untilDone) Write(p []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.w.Write(p)
}

// anonymizeChosen writes what --only chooses, which takes playing it.
func anonymizeChosen(ctx context.Context, cfg *node.ReplayConfig, a *replay.Anonymizer, w *replay.Writer) (left uint64, unused []replay.Problem, err error) {
	chosen, from := io.Pipe()
	played := make(chan error)
	go func() {
		buf := bufio.NewWriterSize(from, 256<<10)
		cfg.Recorded, cfg.Emit = replay.NewWriter(buf, "ztun replay", 0, "pod"), func(node.ReplayRecord) error { return nil }
		report, err := playCaptures(ctx, cfg)
		if err = errors.Join(err, buf.Flush(), from.Close()); err == nil {
			unused = report.Problems
		}
		played <- err
	}()
	source, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: chosen})
	if err == nil {
		left, err = a.Capture(source, w)
	}
	_ = chosen.Close() // whoever writes to it has an error now, and no more
	if playing := <-played; err == nil {
		err = playing
	}
	return left, unused, err
}

// anonymizedState stands for the other file of --anonymize.
const anonymizedState = "anonymize (the state)"

// A stateDump is the state in the form of a /config_dump, by whose staticConfig one is told.
type stateDump struct {
	workload.Dump
	StaticConfig struct{} `json:"staticConfig"`
	Config       struct {
		Network  string        `json:"network"`
		Settings []dumpSetting `json:"settings"`
	} `json:"config"`
}

type dumpSetting struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// anonymousState is the state, with the settings that decide with it.
func anonymousState(a *replay.Anonymizer, cfg *node.ReplayConfig) (d stateDump) {
	d.Dump = workload.NewDump(workload.NewSnapshot(a.State(cfg.State)))
	unknown := "deny"
	if cfg.AllowUnknownPolicy {
		unknown = "allow"
	}
	d.Config.Network = a.Text(cfg.Network)
	d.Config.Settings = []dumpSetting{
		{"clusterDomain", a.Text(strings.ToLower(cfg.ClusterDomain))},
		{"preferedServiceNamespace", a.Text(cfg.PreferredNamespace)},
		{"unknownPolicy", unknown},
		{"ipv6Enabled", strconv.FormatBool(!cfg.NoIPv6)},
	}
	return d
}

// create creates the files that are written, by flag. It refuses those that are inputs, or one another.
func (f *replayFlags) create(stdin io.Reader, captures *replay.Source) (map[string]*outFile, error) {
	names := map[string]string{"write-pcap": f.write, "anonymize": f.anonymize, "report": f.report}
	if f.anonymize != "" {
		names[anonymizedState] = f.anonymize + ".state.json"
	}
	maps.DeleteFunc(names, func(_, name string) bool { return name == "" })
	inputs := slices.Concat(captures.Files(), []string{f.state, f.compare, f.expect, f.script})
	if name, ok := strings.CutPrefix(f.peer, "file:"); ok {
		inputs = append(inputs, name)
	}
	if file, ok := stdin.(*os.File); ok && slices.Contains(inputs, "-") {
		inputs = append(inputs, fmt.Sprintf("/dev/fd/%d", file.Fd()))
	}
	flags := slices.Sorted(maps.Keys(names))
	for i, flag := range flags {
		name := names[flag]
		if name == "-" {
			return nil, usagef("ztun replay: --%s -: it cannot be standard output: name a file", flag)
		}
		if info, err := os.Stat(name); err == nil && !info.Mode().IsRegular() && !info.IsDir() {
			continue // a pipe, or /dev/null
		}
		for _, in := range inputs {
			if in != "" && sameFile(name, in) {
				return nil, usagef("ztun replay: --%s %s: that is also an input, %s: name another file", flag, name, in)
			}
		}
		for _, other := range flags[:i] {
			if sameFile(name, names[other]) {
				return nil, usagef("ztun replay: --%s %s: --%s writes that file as well: name another one", flag, name, other)
			}
		}
	}
	files := make(map[string]*outFile)
	for _, flag := range flags {
		file, err := createFile(names[flag])
		if err != nil {
			for _, created := range files {
				_ = created.finish(false) // the error says more
			}
			return nil, fmt.Errorf("ztun replay: --%s: %w", flag, err)
		}
		files[flag] = file
	}
	return files, nil
}

// fit refuses flags that have no effect beside others. given says which there are.
func (f *replayFlags) fit(given func(flag string) bool, args []string) error {
	switch {
	case f.state == "":
		return usagef("ztun replay: want --state: what is a capture played against?")
	case f.script != "" && len(args)+len(f.dirs) > 0:
		return usagef("ztun replay: --script is in place of captures")
	case f.script == "" && len(args)+len(f.dirs) == 0:
		return usagef("ztun replay: want a capture: a file, a directory, or - for standard input")
	case given("seed") && f.anonymize == "":
		return usagef("ztun replay: --seed is for --anonymize")
	}
	for _, x := range []struct {
		flag string
		not  []string // beside it
	}{
		{"script", []string{"anonymize", "checksum", "compare", "decap", "expect", "only", "peer", "recursive", "report", "speed", "write-pcap"}},
		{"anonymize", []string{"compare", "expect", "output", "peer", "report", "speed", "write-pcap"}},
		{"expect", []string{"compare"}},
	} {
		for _, other := range x.not {
			if given(x.flag) && given(other) {
				return usagef("ztun replay: --%s and --%s do not go together", x.flag, other)
			}
		}
	}
	for _, flag := range []string{"checksum", "decap", "local"} {
		if f.anonymize != "" && f.only == "" && given(flag) {
			return usagef("ztun replay: --%s has no effect on --anonymize without --only: nothing is played", flag)
		}
	}
	return nil
}

// config reads what the flags name.
func (f *replayFlags) config(stdin io.Reader, args []string) (*node.ReplayConfig, error) {
	cfg := &node.ReplayConfig{Decap: f.decap}
	settings, err := readState("--state", f.state, &cfg.State)
	if err != nil {
		return nil, err
	}
	cfg.Network, cfg.ClusterDomain = settings["network"], settings["clusterDomain"]
	cfg.PreferredNamespace, cfg.AllowUnknownPolicy = settings["preferedServiceNamespace"], settings["unknownPolicy"] == "allow"
	cfg.NoIPv6 = settings["ipv6Enabled"] == "false"
	if f.netSet {
		cfg.Network = f.network
	}
	if f.compare != "" {
		cfg.Compare = new(workload.State)
		if _, err := readState("--compare", f.compare, cfg.Compare); err != nil {
			return nil, err
		}
	}
	for _, s := range f.local {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("--local %s: want an address, such as 10.10.1.2", s)
		}
		cfg.Local = append(cfg.Local, a.Unmap().WithZone(""))
	}
	if err := f.choices(cfg); err != nil {
		return nil, err
	}
	cfg.Source, err = replay.NewSource(replay.SourceConfig{Paths: slices.Concat(args, f.dirs), Recursive: f.recursive, Stdin: stdin})
	return cfg, err
}

func readState(flag, name string, st *workload.State) (settings map[string]string, err error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	if !utf8.Valid(data) {
		return nil, fmt.Errorf("%s: %s is no text: want a mesh state file (YAML), or what /config_dump has answered", flag, name)
	}
	*st, settings, err = parseState(name, data)
	return settings, err
}

// choices reads the flags that have words of their own.
func (f *replayFlags) choices(cfg *node.ReplayConfig) (err error) {
	peers := map[string]replay.Peer{"recorded": replay.PeerRecorded, "none": replay.PeerNone, "accept": replay.PeerAccept, "echo": replay.PeerEcho}
	if name, ok := strings.CutPrefix(f.peer, "file:"); ok {
		cfg.Peer = replay.PeerFile
		if cfg.Replies, err = os.ReadFile(name); err != nil {
			return fmt.Errorf("--peer: %w", err)
		}
	} else if cfg.Peer, ok = peers[f.peer]; !ok {
		return fmt.Errorf("--peer %s: want recorded, none, accept, echo or file:REPLIES", f.peer)
	}
	sums := map[string]replay.Checksums{"auto": replay.ChecksumsAuto, "off": replay.ChecksumsOff, "strict": replay.ChecksumsStrict}
	var ok bool
	if cfg.Checksums, ok = sums[f.checksum]; !ok {
		return fmt.Errorf("--checksum %s: want auto, off or strict", f.checksum)
	}
	if f.speed != "" {
		speed, err := strconv.ParseFloat(strings.TrimSuffix(f.speed, "x"), 64)
		if err != nil || !(speed >= 0.001 && speed <= 1e6) { // nor is it NaN
			return fmt.Errorf("--speed %s: want a factor such as 1x or 0.5x", f.speed)
		}
		cfg.Wait = pace(speed)
	}
	if f.only != "" {
		cfg.Only, err = f.chosen(&cfg.State)
	}
	return err
}

// pace waits until it is time for a packet, by the first one that comes. Time passes as on the clock of a replay.Player: a long gap is
// shortened, and a packet that is much earlier than one before it, or the first of a capture from another time, begins a time of its own.
func pace(speed float64) func(ctx context.Context, t int64, first bool) error {
	var began time.Time
	var origin, latest int64 // when it would have begun; the packet that came last by its time
	return func(ctx context.Context, t int64, first bool) error {
		step := time.Duration(t - latest)
		switch {
		case began.IsZero():
			began, origin = time.Now(), t
		case first && (step < 0 || step > replay.MaxGap), step < -replay.MaxBack:
			origin += int64(step)
		case step < 0:
			t = latest
		case step > replay.MaxGap:
			origin += int64(step - replay.MaxGap)
		}
		latest = t
		wait := time.Duration(float64(t-origin)/speed) - time.Since(began)
		if wait <= 0 {
			return nil
		}
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// chosen reads --only.
func (f *replayFlags) chosen(st *workload.State) (func(id uint64, src, dst netip.AddrPort) bool, error) {
	if id, err := strconv.ParseUint(f.only, 10, 64); err == nil {
		return func(n uint64, _, _ netip.AddrPort) bool { return n == id }, nil
	}
	if a, err := netip.ParseAddrPort(f.only); err == nil {
		return func(_ uint64, src, dst netip.AddrPort) bool { return src == a || dst == a }, nil
	}
	var addrs []netip.Addr
	if a, err := netip.ParseAddr(f.only); err == nil {
		addrs = []netip.Addr{a.Unmap()}
	}
	for _, w := range st.Workloads {
		if w.Namespace+"/"+w.Name == f.only {
			addrs = append(addrs, w.Addresses...)
		}
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("--only %s: neither an id, an address nor a workload of the state", f.only)
	}
	return func(_ uint64, src, dst netip.AddrPort) bool {
		return slices.Contains(addrs, src.Addr()) || slices.Contains(addrs, dst.Addr())
	}, nil
}

func printRecord(w io.Writer, o output, r node.ReplayRecord) error {
	if o == outputText {
		_, err := io.WriteString(w, r.Text())
		return err
	}
	return printLine(w, r)
}

// printLine prints one JSON object on one line.
func printLine(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// printChange prints what another state makes of a flow.
func printChange(w io.Writer, o output, a, b node.ReplayRecord) error {
	if o == outputJSON {
		return printLine(w, struct {
			Type string            `json:"type"`
			A    node.ReplayRecord `json:"a"`
			B    node.ReplayRecord `json:"b"`
		}{"change", a, b})
	}
	either := a
	if a == nil {
		either = b
	}
	head, _, _ := strings.Cut(either.Text(), "\n")
	_, err := fmt.Fprintf(w, "%s\n  - %s\n  + %s\n", head, node.Outcome(a), node.Outcome(b))
	return err
}

func summary(r *node.ReplayReport, compared bool, differing int) string {
	var parts []string
	for _, class := range []string{"mesh", "passthrough", "inbound", "dns", "dropped", "midstream", "tunnel"} {
		if n := r.Records[class]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, class))
		}
	}
	flows := strings.Join(parts, ", ")
	if flows == "" {
		flows = "none"
	}
	s := fmt.Sprintf("%d packets; flows: %s; questions: %d answered by the mesh, %d by a resolver\n",
		r.Packets.Packets, flows, r.Records["dns_mesh"], r.Records["dns_resolver"])
	if doubts := r.Packets.Doubts(); doubts != "" {
		s += "played all the same: " + doubts + "\n"
	}
	if unused := r.Packets.Unused(); unused != "" {
		s += "not played: " + unused + "\n"
	}
	if compared {
		s += fmt.Sprintf("%d differ\n", differing)
	}
	return s
}
