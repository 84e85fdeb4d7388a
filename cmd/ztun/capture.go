package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// captureFlags are the flags of ztun capture.
type captureFlags struct {
	admin, pod, point, file string
	duration                time.Duration
	bytes, packets          uint64
	snaplen                 uint
}

func newCapture() *cobra.Command {
	var f captureFlags
	cmd := &cobra.Command{
		Use:   "capture",
		Short: "Capture packets of pods of a running ztun",
		Long: `Capture packets of pods of a running ztun, as pcapng: what the pod's device carries (pod), and the packets of HBONE on the wire
(tunnel), each an interface of its own. Comments name the flow, as the access log numbers it, and the identities of both sides. What is
captured of pods can be played again by ztun replay.

It ends by itself after a time or a size, and when whoever reads it goes away. Packets that the reader is too slow for are dropped and
counted.`,
		Example: `  ztun capture --pod shop/cart-0 -w cart.pcapng
  ztun capture --pod shop/cart-0 --point pod,tunnel -w - | wireshark -k -i -`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringVar(&f.admin, "admin", "127.0.0.1:15000", "`ADDRESS` of the admin port of a running ztun")
	fs.StringVar(&f.pod, "pod", "", "only this pod, `NAMESPACE/NAME`; the default is all of the node")
	fs.StringVar(&f.point, "point", "pod", "where: pod, tunnel or both with a comma")
	fs.StringVarP(&f.file, "write", "w", "", "`FILE` to write, or - for standard output")
	fs.DurationVar(&f.duration, "duration", time.Minute, "for how long, in whole seconds; at most 1h")
	fs.Uint64Var(&f.bytes, "bytes", 64<<20, "size of the file at which it ends")
	fs.Uint64Var(&f.packets, "packets", 0, "number of packets at which it ends; 0: none")
	fs.UintVar(&f.snaplen, "snaplen", 0, "bytes of each packet; 0: all")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.file == "" {
			return usagef("ztun capture: want --write FILE, or - for standard output")
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		return f.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

func (f *captureFlags) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	q := url.Values{"pod": {f.pod}, "point": {f.point}, "seconds": {strconv.Itoa(int(f.duration.Seconds()))}, "bytes": {strconv.FormatUint(f.bytes, 10)}}
	if f.packets > 0 {
		q.Set("packets", strconv.FormatUint(f.packets, 10))
	}
	if f.snaplen > 0 {
		q.Set("snaplen", strconv.FormatUint(uint64(f.snaplen), 10))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+f.admin+"/debug/capture?"+q.Encode(), nil)
	if err != nil {
		return usagef("ztun capture: --admin: %w", err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // past proxies of the environment
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ztun capture: %w; is a ztun running here? --admin says where", err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusBadRequest:
		return usagef("ztun capture: %s", reason(resp.Body))
	default:
		return fmt.Errorf("ztun capture: %s: %s", resp.Status, reason(resp.Body))
	}
	w := stdout
	if f.file != "-" {
		file, err := os.Create(f.file)
		if err != nil {
			return fmt.Errorf("ztun capture: %w", err)
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		w = file
	}
	n, err := io.Copy(w, resp.Body)
	switch {
	case ctx.Err() != nil:
		_, _ = fmt.Fprintf(stderr, "ztun: interrupted after %d bytes; the packets so far are written\n", n) // nobody is left to tell
		return nil
	case errors.Is(err, syscall.EPIPE):
		return nil // whoever has read it has enough
	case err != nil:
		return fmt.Errorf("ztun capture: %w", err)
	}
	_, _ = fmt.Fprintf(stderr, "ztun: %s packets captured, %s dropped\n", resp.Trailer.Get("X-Ztun-Captured"), resp.Trailer.Get("X-Ztun-Dropped")) // as above
	return nil
}

// reason is the first line of an answer.
func reason(r io.Reader) string {
	b, _ := io.ReadAll(io.LimitReader(r, 1<<10)) // what has come
	line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	return line
}
