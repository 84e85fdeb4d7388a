package main

import (
	"cmp"
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

	"ztun.dev/ztun/internal/replay"
)

// captureFlags are the flags of ztun capture.
type captureFlags struct {
	admin, pod, point, file string
	duration, every         time.Duration
	bytes, packets          uint64
	snaplen, files          uint
}

func newCapture() *cobra.Command {
	var f captureFlags
	cmd := &cobra.Command{
		Use:   "capture",
		Short: "Capture packets of pods of a running ztun",
		Long: `Capture packets of pods of a running ztun, as pcapng: what the pod's device carries (pod), and the packets of HBONE on the wire
(tunnel), each an interface of its own. Comments name the flow, as the access log numbers it, and the identities of both sides. What is
captured of pods can be played again by ztun replay.

It ends by itself after a time or a size, says so if that was the size, and ends when whoever reads it goes away. With --files it is a ring: it goes on until its time is
over or it is interrupted, and the last files are kept. Packets that the reader is too slow for are dropped and counted.`,
		Example: `  ztun capture --pod shop/cart-0 -w cart.pcapng
  ztun capture --pod shop/cart-0 --point pod,tunnel -w - | wireshark -k -i -
  ztun capture --pod shop/cart-0 -w cart.pcapng --files 10 --bytes 10000000 --duration 12h`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringVar(&f.admin, "admin", "127.0.0.1:15000", "`ADDRESS` of the admin port of a running ztun")
	fs.StringVar(&f.pod, "pod", "", "only this pod, `NAMESPACE/NAME`; the default is all of the node")
	fs.StringVar(&f.point, "point", "pod", "where: pod, tunnel or both with a comma")
	fs.StringVarP(&f.file, "write", "w", "", "`FILE` to write, or - for standard output")
	fs.DurationVar(&f.duration, "duration", time.Minute, "for how long, in whole seconds; at most 24h")
	fs.Uint64Var(&f.bytes, "bytes", 64<<20, "size of the file at which it ends, or with --files the next one begins")
	fs.UintVar(&f.files, "files", 0, "a ring: keep the last `N` files, whose names have numbers; at least 2")
	fs.DurationVar(&f.every, "every", 0, "with --files: begin another file also after this time; 0: by --bytes alone")
	fs.Uint64Var(&f.packets, "packets", 0, "number of packets at which it ends; 0: none")
	fs.UintVar(&f.snaplen, "snaplen", 0, "bytes of each packet; 0: all")
	offer(cmd, "point", "pod", "tunnel", "pod,tunnel")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := checkAdmin(f.admin); err != nil {
			return usagef("ztun capture: %w", err)
		}
		if f.file == "" {
			return usagef("ztun capture: want --write FILE, or - for standard output")
		}
		switch {
		case f.files == 0 && f.every != 0:
			return usagef("ztun capture: --every is for a ring: say by --files how many files are kept")
		case f.files == 0:
		case f.files == 1, f.files > 1<<16:
			return usagef("ztun capture: --files %d: want a number from 2 to %d", f.files, 1<<16)
		case f.file == "-":
			return usagef("ztun capture: a ring (--files) cannot be standard output: name a file by --write")
		case f.every < 0:
			return usagef("ztun capture: --every %s: want a time", f.every)
		case f.bytes < 1<<10 || f.bytes > captureMaxBytes:
			return usagef("ztun capture: --bytes %d: want a number from %d to %d", f.bytes, 1<<10, int64(captureMaxBytes))
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		return f.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

// captureMaxBytes is the limit of a running ztun: of a capture, and what a ring is without one of its own.
const captureMaxBytes = 1 << 40

func (f *captureFlags) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	total := f.bytes
	if f.files > 0 {
		total = captureMaxBytes
	}
	q := url.Values{"pod": {f.pod}, "point": {f.point}, "seconds": {strconv.Itoa(int(f.duration.Seconds()))}, "bytes": {strconv.FormatUint(total, 10)}}
	if f.packets > 0 {
		q.Set("packets", strconv.FormatUint(f.packets, 10))
	}
	if f.snaplen > 0 {
		q.Set("snaplen", strconv.FormatUint(uint64(f.snaplen), 10))
	}
	resp, err := open(ctx, f.admin, "/debug/capture?"+q.Encode())
	if err != nil {
		return fmt.Errorf("ztun capture: %w; %s", err, isItThere)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusBadRequest:
		return usagef("ztun capture: %s", reason(resp.Body))
	default:
		return fmt.Errorf("ztun capture: %s: %s", resp.Status, reason(resp.Body))
	}
	if kind := resp.Header.Get("Content-Type"); kind != captureType {
		return fmt.Errorf("ztun capture: what answers at %s is no ztun: it sends %q; --admin says where one is", f.admin, kind)
	}
	w := io.WriteCloser(unclosed{stdout})
	switch {
	case f.files > 0:
		w, err = replay.NewRing(replay.RingConfig{Path: f.file, Files: int(f.files), Bytes: int64(f.bytes), Every: f.every})
	case f.file != "-":
		w, err = os.Create(f.file)
	}
	if err != nil {
		return fmt.Errorf("ztun capture: %w", err)
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	n, err := io.Copy(w, resp.Body)
	switch {
	case ctx.Err() != nil:
		_, _ = fmt.Fprintf(stderr, "ztun: interrupted after %d bytes; the packets so far are written\n", n) // nobody is left to tell
		return nil
	case errors.Is(err, syscall.EPIPE):
		return nil // whoever has read it has enough
	case err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET):
		return fmt.Errorf("ztun capture: %w", err)
	}
	packets, dropped := resp.Trailer.Get("X-Ztun-Captured"), resp.Trailer.Get("X-Ztun-Dropped")
	if packets == "" || dropped == "" { // they come last
		where := cmp.Or(strings.TrimPrefix(f.file, "-"), "standard output")
		if f.files > 0 {
			where = "the files of " + where
		}
		return fmt.Errorf("ztun capture: the running ztun went away after %d bytes: what it had sent is in %s", n, where)
	}
	_, _ = fmt.Fprintf(stderr, "ztun: %s packets captured, %s dropped%s\n", packets, dropped, f.early(resp.Trailer)) // as above
	return nil
}

// early says of a capture that a limit has ended before its time which one that was, and when.
func (f *captureFlags) early(trailer http.Header) string {
	limit := ""
	switch trailer.Get("X-Ztun-Limit") {
	case "bytes":
		if limit = sizeText(f.bytes) + " (--bytes)"; f.files > 0 {
			limit = sizeText(captureMaxBytes) + ", the most that a ztun sends,"
		}
	case "packets":
		limit = fmt.Sprintf("%d packets (--packets)", f.packets)
	default:
		return ""
	}
	after := ""
	if took, err := strconv.ParseFloat(trailer.Get("X-Ztun-Seconds"), 64); err == nil {
		after = fmt.Sprintf(" after %s s", strconv.FormatFloat(took, 'f', 1, 64))
	}
	return fmt.Sprintf("; ended early: %s reached%s of %g s", limit, after, f.duration.Seconds())
}

// sizeText is a number of bytes, in the largest unit of which it is a multiple.
func sizeText(n uint64) string {
	for i, unit := range []string{"TiB", "GiB", "MiB", "KiB"} {
		if shift := 10 * (4 - i); n > 0 && n%(1<<shift) == 0 {
			return fmt.Sprintf("%d %s", n>>shift, unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// captureType is the media type of captures.
const captureType = "application/vnd.tcpdump.pcap"

// An unclosed is somebody else's to close.
type unclosed struct{ io.Writer }

// Close implements io.Closer.
func (unclosed) Close() error { return nil }

// reason is the first line of an answer.
func reason(r io.Reader) string {
	b, _ := io.ReadAll(io.LimitReader(r, 1<<10)) // what has come
	line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	return line
}
