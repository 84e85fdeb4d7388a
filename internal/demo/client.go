package demo

import (
	"bufio"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// ClientMain is the program in the pods that ask, where curl or iperf3 is missing:
//
//	demo-client [-4|-6] [-max-time 5s] get URL          writes the answer's body
//	demo-client [-down] [-time 2s] load ADDRESS:PORT    writes the throughput in bits per second
//
// It returns an exit code.
func ClientMain(args []string) int {
	fs := flag.NewFlagSet("demo-client", flag.ContinueOnError)
	v4 := fs.Bool("4", false, "IPv4 only")
	v6 := fs.Bool("6", false, "IPv6 only")
	maxTime := fs.Duration("max-time", 5*time.Second, "of a request")
	down := fs.Bool("down", false, "measure from the server to here")
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
		if bits, err = load(network, fs.Arg(1), *down, *duration); err == nil {
			fmt.Println(strconv.FormatFloat(bits, 'f', 0, 64))
		}
	default:
		fmt.Fprintln(os.Stderr, "demo-client: want get URL or load ADDRESS:PORT")
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
