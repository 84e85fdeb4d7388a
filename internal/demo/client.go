package demo

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ClientMain is the program in the pods that ask, where curl or iperf3 is missing or has no such thing:
//
//	demo-client [-4|-6] [-max-time 5s] get URL          writes the answer's body
//	demo-client [-down] [-time 2s] [-streams 8] load ADDRESS:PORT    writes the throughput in bits per second
//	demo-client [-time 1s] pingpong ADDRESS:PORT        writes median and 99th percentile of round trips in nanoseconds
//
// It returns an exit code.
func ClientMain(args []string) int {
	fs := flag.NewFlagSet("demo-client", flag.ContinueOnError)
	v4 := fs.Bool("4", false, "IPv4 only")
	v6 := fs.Bool("6", false, "IPv6 only")
	maxTime := fs.Duration("max-time", 5*time.Second, "of a request")
	down := fs.Bool("down", false, "measure from the server to here")
	streams := fs.Int("streams", 1, "connections of a measurement, up only")
	duration := fs.Duration("time", DefaultMeasure, "of a measurement")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	network := "tcp"
	switch {
	case *v4:
		network = "tcp4"
	case *v6:
		network = "tcp6"
	}
	var err error
	switch fs.Arg(0) {
	case "get":
		ctx, cancel := context.WithTimeout(context.Background(), *maxTime)
		defer cancel()
		err = get(ctx, network, fs.Arg(1), os.Stdout)
	case "load":
		var bits float64
		if bits, err = loads(network, fs.Arg(1), *down, *streams, *duration); err == nil {
			fmt.Println(strconv.FormatFloat(bits, 'f', 0, 64))
		}
	case "pingpong":
		var p50, p99 time.Duration
		if p50, p99, err = pingPong(network, fs.Arg(1), *duration); err == nil {
			fmt.Println(p50.Nanoseconds(), p99.Nanoseconds())
		}
	default:
		fmt.Fprintln(os.Stderr, "demo-client: want get URL, load ADDRESS:PORT or pingpong ADDRESS:PORT")
		return 2
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo-client:", err)
		return 1
	}
	return 0
}

func get(ctx context.Context, network, url string, w io.Writer) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	var d net.Dialer
	t := &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, addr string) (net.Conn, error) { return d.DialContext(ctx, network, addr) },
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	_, err = io.Copy(w, resp.Body)
	return err
}

// loads is load over several connections.
func loads(network, addr string, down bool, streams int, d time.Duration) (sum float64, err error) {
	type result struct {
		bits float64
		err  error
	}
	results := make(chan result)
	for range streams {
		go func() {
			bits, err := load(network, addr, down, d)
			results <- result{bits, err}
		}()
	}
	for range streams {
		r := <-results
		sum += r.bits
		err = errors.Join(err, r.err)
	}
	return sum, err
}

// pingPong measures round trips of a message on one connection.
func pingPong(network, addr string, d time.Duration) (p50, p99 time.Duration, err error) {
	c, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	start := time.Now()
	_ = c.SetDeadline(start.Add(d + 5*time.Second))
	if _, err := c.Write([]byte{echo}); err != nil {
		return 0, 0, err
	}
	var took []time.Duration
	buf := make([]byte, ping)
	for last := start; last.Sub(start) < d || len(took) == 0; {
		if _, err := c.Write(buf); err != nil {
			return 0, 0, err
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			return 0, 0, err
		}
		now := time.Now()
		took = append(took, now.Sub(last))
		last = now
	}
	slices.Sort(took)
	return took[len(took)/2], took[len(took)*99/100], nil
}

// load measures throughput in bits per second. A peer that does not end in time is an error.
func load(network, addr string, down bool, d time.Duration) (float64, error) {
	c, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if down {
		return loadDown(c, d)
	}
	return loadUp(c, d)
}

func loadUp(c net.Conn, d time.Duration) (float64, error) {
	start := time.Now()
	_ = c.SetDeadline(start.Add(d + 5*time.Second))
	if _, err := c.Write([]byte{upload}); err != nil {
		return 0, err
	}
	buf, sent := make([]byte, chunk), uint64(0)
	for time.Since(start) < d {
		n, err := c.Write(buf)
		if err != nil {
			return 0, err
		}
		sent += uint64(n)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return 0, err
	}
	var answer [8]byte
	if _, err := io.ReadFull(c, answer[:]); err != nil {
		return 0, fmt.Errorf("the server's count: %w", err)
	}
	if n := binary.BigEndian.Uint64(answer[:]); n != sent {
		return 0, fmt.Errorf("sent %d bytes, the server received %d", sent, n)
	}
	return float64(sent) * 8 / time.Since(start).Seconds(), nil
}

func loadDown(c net.Conn, d time.Duration) (float64, error) {
	start := time.Now()
	_ = c.SetDeadline(start.Add(d + 5*time.Second))
	if _, err := c.Write([]byte{download}); err != nil {
		return 0, err
	}
	buf, received := make([]byte, chunk), 0
	for time.Since(start) < d {
		n, err := c.Read(buf)
		if err != nil {
			return 0, err
		}
		received += n
	}
	return float64(received) * 8 / time.Since(start).Seconds(), nil
}

// A greeting is the answer of demo-server.
type greeting struct {
	first  string // its first line
	client string // the address that it saw
	say    string
}

func readGreeting(body string) (g greeting, err error) {
	lines := bufio.NewScanner(strings.NewReader(body))
	for i := 0; lines.Scan(); i++ {
		switch line := lines.Text(); i {
		case 0:
			g.first = line
		case 1:
			g.client, _ = strings.CutPrefix(line, "client address ")
		case 2:
			g.say = line
		}
	}
	if g.first == "" || g.client == "" {
		return g, fmt.Errorf("not an answer of the server in the pod: %q", body)
	}
	return g, nil
}
