package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"ztun.dev/ztun/internal/explain"
	"ztun.dev/ztun/internal/workload"
)

// explainFlags are the flags of ztun explain.
type explainFlags struct {
	explain.Question
	state, admin, network string
	matrix, netSet        bool
}

func newExplain() *cobra.Command {
	var f explainFlags
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Tell for one flow which way it takes, and why",
		Long: `Tell for one flow which way it takes, and why: what its address is, which endpoints can be picked, which identities the peer has to
have, and what each policy says. The same code decides about real flows.

The state is that of a running ztun (--admin), or of a file (--state): a mesh state file, or what /config_dump has answered.`,
		Example: `  ztun explain --from shop/cart-0 --to 10.96.3.17:80
  ztun explain --state mesh.yaml --from shop/cart-0 --to orders.shop.svc.cluster.local:80
  ztun explain --state mesh.yaml --inbound --from 10.1.2.3 --to shop/orders-0:8080
  ztun explain --state mesh.yaml --matrix
  ztun explain --state mesh.yaml --inbound --matrix --to shop/orders-0`,
		Args: noArgs,
	}
	o := addOutput(cmd)
	fs := cmd.Flags()
	fs.StringVar(&f.From, "from", "", "source: NAMESPACE/NAME, address or uid of a workload; with --inbound also any other address")
	fs.StringVar(&f.To, "to", "", "destination: ADDRESS:PORT, HOSTNAME:PORT of a service as DNS answers it to the source, or NAMESPACE/NAME:PORT of a workload")
	fs.BoolVar(&f.Inbound, "inbound", false, "what the destination's policies say, each of them")
	fs.BoolVar(&f.Plaintext, "plaintext", false, "with --inbound: the source has no identity")
	fs.BoolVar(&f.UDP, "udp", false, "the source sends UDP, of which only DNS is captured")
	fs.BoolVar(&f.matrix, "matrix", false, "a line for each flow from each workload, or from --from, to each port of each service; with --inbound for each identity of the mesh and each port of the workload --to")
	fs.StringVar(&f.state, "state", "", "`FILE` with the state, in place of a running ztun")
	fs.StringVar(&f.admin, "admin", "127.0.0.1:15000", "`ADDRESS` of the admin port of a running ztun")
	fs.StringVar(&f.network, "network", "", "network of the source's node; the default is that of the running ztun or dump, else \"\"")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		f.netSet = fs.Changed("network")
		return f.run(cmd.Context(), *o, cmd.OutOrStdout())
	}
	return cmd
}

func (f *explainFlags) run(ctx context.Context, o output, w io.Writer) error {
	if err := checkAdmin(f.admin); err != nil {
		return usagef("ztun explain: %w", err)
	}
	switch {
	case f.matrix && f.Inbound && (f.To == "" || f.From != "" || f.Plaintext):
		return usagef("ztun explain: --inbound --matrix goes with --to only")
	case f.matrix && !f.Inbound && f.To != "":
		return usagef("ztun explain: --matrix goes with --from only, or with --inbound and --to")
	case !f.matrix && (f.From == "" || f.To == ""):
		return usagef("ztun explain: want --from and --to, or --matrix")
	case f.Plaintext && !f.Inbound:
		return usagef("ztun explain: --plaintext goes with --inbound only")
	case f.UDP && (f.Inbound || f.matrix):
		return usagef("ztun explain: --udp goes with --from and --to only")
	}
	if !f.matrix && f.state == "" && !f.netSet {
		if r, answered, err := f.askRunning(ctx); answered || err != nil {
			return printReport(&r, err, o, w)
		}
	}
	m, err := f.mesh(ctx)
	if err != nil {
		return err
	}
	switch {
	case f.matrix && f.Inbound:
		return f.printGrants(m, o, w)
	case f.matrix:
		return f.printMatrix(m, o, w)
	}
	r, err := m.Ask(f.Question)
	if err != nil {
		err = usageError{fmt.Errorf("ztun explain: --%w", err)}
	}
	return printReport(&r, err, o, w)
}

// askRunning has a running ztun answer by its own state. One that cannot, such as ztunnel, may still have a dump.
func (f *explainFlags) askRunning(ctx context.Context) (r explain.Report, answered bool, err error) {
	status, data, err := get(ctx, f.admin, "/debug/explain?"+f.Query().Encode())
	switch {
	case err != nil:
		return r, false, notRunning(err)
	case status == http.StatusOK:
		if json.Unmarshal(data, &r) != nil {
			return r, false, fmt.Errorf("ztun explain: %w", noZtun(f.admin, "/debug/explain"))
		}
		return r, true, nil
	case status == http.StatusBadRequest:
		return r, false, usageError{fmt.Errorf("ztun explain: --%s", bytes.TrimSpace(data))}
	}
	return r, false, nil
}

func notRunning(err error) error {
	return fmt.Errorf("ztun explain: %w; %s, --state takes a file instead", err, isItThere)
}

func printReport(r *explain.Report, err error, o output, w io.Writer) error {
	switch {
	case err != nil:
		return err
	case o == outputJSON:
		return printJSON(w, r)
	}
	_, err = io.WriteString(w, r.Text())
	return err
}

func (f *explainFlags) printMatrix(m explain.Mesh, o output, w io.Writer) error {
	var sources []*workload.Workload
	for _, w := range m.State.State().Workloads {
		if m.InMesh(w) { // nobody captures the others
			sources = append(sources, w)
		}
	}
	if f.From != "" {
		from, err := m.Find(f.From)
		if err != nil {
			return usageError{fmt.Errorf("ztun explain: --from: %w", err)}
		}
		sources = []*workload.Workload{from}
	}
	cells := m.Matrix(sources)
	if o == outputJSON {
		if cells == nil {
			cells = []explain.Cell{}
		}
		return printJSON(w, cells)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "FROM\tTO\tSERVICE\tOUTCOME") // as in printConfig
	for _, c := range cells {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", c.From, c.To, c.Service, c.Outcome)
	}
	return t.Flush()
}

// printGrants is a table of who can talk to a workload.
func (f *explainFlags) printGrants(m explain.Mesh, o output, w io.Writer) error {
	name, further := f.To, []uint16(nil)
	to, err := m.Find(name)
	if i := strings.LastIndexByte(name, ':'); err != nil && i >= 0 {
		if port, perr := strconv.ParseUint(name[i+1:], 10, 16); perr == nil {
			further = []uint16{uint16(port)}
			to, err = m.Find(strings.Trim(name[:i], "[]"))
		}
	}
	if err != nil {
		return usageError{fmt.Errorf("ztun explain: --to: %w", err)}
	}
	grants := m.InboundMatrix(to, further...)
	if o == outputJSON {
		if grants == nil {
			grants = []explain.Grant{}
		}
		return printJSON(w, grants)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "FROM\tPORT\tDECISION\tWHY") // as in printConfig
	for _, g := range grants {
		decision, why, from := "deny", g.Verdict, g.From
		if g.Allowed {
			decision = "allow"
		}
		if g.Rule > 0 {
			why += fmt.Sprintf(" rule %d", g.Rule)
		}
		if from == "" {
			from = "(plaintext)"
		}
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%s\n", from, g.Port, decision, why)
	}
	return t.Flush()
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// mesh reads the state that is asked.
func (f *explainFlags) mesh(ctx context.Context) (m explain.Mesh, err error) {
	name, data := f.state, []byte(nil)
	if f.state == "" {
		name = "http://" + f.admin + "/config_dump"
		if data, err = fetch(ctx, f.admin, "/config_dump"); err != nil {
			return m, notRunning(err)
		}
	} else if data, err = os.ReadFile(f.state); err != nil {
		return m, usageError{fmt.Errorf("ztun explain: --state: %w", err)}
	}
	st, settings, err := parseState(name, data)
	if err != nil {
		return m, usageError{fmt.Errorf("ztun explain: %w", err)}
	}
	m = explain.Mesh{
		State: workload.NewSnapshot(st), Network: settings["network"], AllowUnknown: settings["unknownPolicy"] == "allow",
		ClusterDomain: settings["clusterDomain"], PreferredNamespace: settings["preferedServiceNamespace"], NoIPv6: settings["ipv6Enabled"] == "false",
		Served: servedPods(data),
	}
	if f.netSet {
		m.Network = f.network
	}
	return m, nil
}

// servedPods reports whether a workload is a pod that is served by the node whose dump this is; nil: it names none.
func servedPods(data []byte) func(*workload.Workload) bool {
	var dump struct {
		Pods map[string]struct {
			State string `json:"state"`
			Info  struct {
				Name      string `json:"name"`
				Namespace string `json:"namespace"`
			} `json:"info"`
		} `json:"workloadState"`
	}
	if json.Unmarshal(data, &dump) != nil {
		return nil // a mesh state file
	}
	served := make(map[string]bool)
	for _, p := range dump.Pods {
		if p.State != "Pending" {
			served[p.Info.Namespace+"/"+p.Info.Name] = true
		}
	}
	if len(served) == 0 {
		return nil
	}
	return func(w *workload.Workload) bool { return served[w.Namespace+"/"+w.Name] }
}

// parseState reads a dump, with the node's settings, or a static state.
func parseState(name string, data []byte) (st workload.State, settings map[string]string, err error) {
	var probe struct {
		StaticConfig json.RawMessage `json:"staticConfig"`
		Config       struct {
			Settings []struct{ Key, Value string } `json:"settings"`
			Network  string                        `json:"network"` // ztunnel's
		} `json:"config"`
	}
	if !bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) || json.Unmarshal(data, &probe) != nil || probe.StaticConfig == nil {
		st, err = workload.ParseStatic(name, data)
		return st, nil, err
	}
	settings = map[string]string{"network": probe.Config.Network}
	for _, s := range probe.Config.Settings {
		settings[s.Key] = s.Value
	}
	st, err = workload.ParseDump(name, data)
	return st, settings, err
}
