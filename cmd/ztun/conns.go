package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/strict"
)

// connsFlags are the flags of ztun conns.
type connsFlags struct {
	admin, pod, state, sort string
	idleOver                time.Duration
}

// connStates are the values of --state: each is the beginning of a state.
var connStates = []string{"connecting", "open", "half-closed", "half-closed-local", "half-closed-remote", "closing", "draining"}

// connOrders are the values of --sort. All but id begin with the largest.
var connOrders = map[string]func(a, b *admin.Connection) int{
	"id":    func(a, b *admin.Connection) int { return cmp.Compare(a.ID, b.ID) },
	"age":   func(a, b *admin.Connection) int { return cmp.Compare(b.AgeSeconds, a.AgeSeconds) },
	"idle":  func(a, b *admin.Connection) int { return cmp.Compare(b.IdleSeconds, a.IdleSeconds) },
	"bytes": func(a, b *admin.Connection) int { return cmp.Compare(b.Received+b.Sent, a.Received+a.Sent) },
	"setup": func(a, b *admin.Connection) int { return cmp.Compare(setUp(b), setUp(a)) },
}

func newConns() *cobra.Command {
	var f connsFlags
	cmd := &cobra.Command{
		Use:   "conns",
		Short: "List the open connections of a running ztun",
		Long: `List the open connections of a running ztun: state, age, time without a byte, identities, bytes, tunnel, the policy that allowed each, and
what its set-up took.

ID is the flow_id of the access log. RECEIVED came from the side that opened the connection, SENT went to it. SETUP is all of it; -o json
has its parts: classify, policy, resolve, connect, tls and response.`,
		Example: `  ztun conns --pod shop/cart-0
  ztun conns --state half-closed --idle-over 10m --sort idle
  ztun conns -o json`,
		Args: noArgs,
	}
	o := addOutput(cmd)
	fs := cmd.Flags()
	fs.StringVar(&f.admin, "admin", "127.0.0.1:15000", "`ADDRESS` of the admin port of a running ztun")
	fs.StringVar(&f.pod, "pod", "", "only those of a pod of this node, `NAMESPACE/NAME`")
	fs.StringVar(&f.state, "state", "", "only those in a state: "+strings.Join(connStates, ", "))
	fs.DurationVar(&f.idleOver, "idle-over", 0, "only those without a byte for longer than this, such as 10m")
	fs.StringVar(&f.sort, "sort", "id", "order: id, or the largest first of age, idle, bytes or setup")
	offer(cmd, "state", connStates...)
	offer(cmd, "sort", slices.Sorted(maps.Keys(connOrders))...)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := f.check(); err != nil {
			return err
		}
		var list []admin.Connection
		if err := f.ask(cmd.Context(), "/debug/conns", &list); err != nil {
			return fmt.Errorf("ztun conns: %w", err)
		}
		if err := f.checkPod(cmd.Context(), list); err != nil {
			return err
		}
		list = f.choose(list)
		if *o == outputJSON {
			return printJSON(cmd.OutOrStdout(), list)
		}
		return printConns(cmd.OutOrStdout(), list)
	}
	return cmd
}

// checkPod reports a pod that has no connection because there is no such pod.
func (f *connsFlags) checkPod(ctx context.Context, list []admin.Connection) error {
	if f.pod == "" || slices.ContainsFunc(list, func(c admin.Connection) bool { return c.Pod == f.pod }) {
		return nil
	}
	var pods map[string]struct {
		Info struct{ Name, Namespace string }
	}
	if err := f.ask(ctx, "/debug/pods", &pods); err != nil {
		return fmt.Errorf("ztun conns: %w", err)
	}
	for _, p := range pods {
		if p.Info.Namespace+"/"+p.Info.Name == f.pod {
			return nil
		}
	}
	return usagef("ztun conns: --pod %s: this node serves no such pod", f.pod)
}

// ask reads what the running ztun has at a path.
func (f *connsFlags) ask(ctx context.Context, path string, v any) error {
	data, err := fetch(ctx, f.admin, path)
	if err != nil {
		return fmt.Errorf("%w; %s", err, isItThere)
	}
	if json.Unmarshal(data, v) != nil {
		return noZtun(f.admin, path)
	}
	return nil
}

func (f *connsFlags) check() error {
	if err := checkAdmin(f.admin); err != nil {
		return usagef("ztun conns: %w", err)
	}
	if f.state != "" && !slices.Contains(connStates, f.state) {
		return usagef("ztun conns: --state: %q is none of %s%s", f.state, strings.Join(connStates, ", "), strict.Suggestion(f.state, connStates))
	}
	if connOrders[f.sort] == nil {
		return usagef("ztun conns: --sort: %q is none of id, age, idle, bytes, setup", f.sort)
	}
	if f.idleOver < 0 {
		return usagef("ztun conns: --idle-over: %v is negative", f.idleOver)
	}
	return nil
}

// choose leaves those that are asked for, in the order that is asked for; never nil, which JSON writes as null.
func (f *connsFlags) choose(list []admin.Connection) []admin.Connection {
	out := []admin.Connection{}
	for i := range list {
		c := &list[i]
		if (f.pod == "" || c.Pod == f.pod) && strings.HasPrefix(c.State, f.state) && (f.idleOver == 0 || c.IdleSeconds > f.idleOver.Seconds()) {
			out = append(out, *c)
		}
	}
	order := connOrders[f.sort]
	slices.SortStableFunc(out, func(a, b admin.Connection) int { return order(&a, &b) })
	return out
}

// setUp is what the set-up has taken, in seconds.
func setUp(c *admin.Connection) (sum float64) {
	for _, s := range c.SetUp {
		sum += s
	}
	return sum
}

func printConns(w io.Writer, list []admin.Connection) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ID\tDIRECTION\tSTATE\tAGE\tIDLE\tSRC\tDST\tSERVICE\tFROM\tTO\tRECEIVED\tSENT\tBUFFERED\tSETUP\tTUNNEL\tCARRIED\tPOLICY") // as in printConfig
	for i := range list {
		c := &list[i]
		_, _ = fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\n", c.ID, c.Direction, c.State, seconds(c.AgeSeconds), seconds(c.IdleSeconds),
			c.Src, cmp.Or(c.OriginalDst, c.Dst), dash(c.Service), who(c.SrcIdentity, c.SrcWorkload), who(c.DstIdentity, c.DstWorkload),
			c.Received, c.Sent, c.Buffered, seconds(setUp(c)), dash(c.Tunnel), dash(c.Carried), dash(c.Policy))
	}
	return t.Flush()
}

// who is an identity that was proved, else, in brackets, the workload that is at the address.
func who(identity, workload string) string {
	switch {
	case identity != "":
		return identity
	case workload != "":
		return "(" + workload + ")"
	}
	return "-"
}

// seconds is a time in a length that can be read.
func seconds(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d >= time.Second:
		return d.Round(time.Second).String()
	case d >= time.Millisecond:
		return d.Round(100 * time.Microsecond).String()
	}
	return d.Round(time.Microsecond).String()
}
