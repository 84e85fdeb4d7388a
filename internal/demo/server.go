package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// ServerMain is the program in the pods that serve: HTTP that answers with the client's address, and a peer for measurements of
// throughput where iperf3 is missing. Without a listener it just stays, as the pause program of a pod does. It runs until SIGINT
// or SIGTERM and returns an exit code.
func ServerMain(args []string) int {
	fs := flag.NewFlagSet("demo-server", flag.ContinueOnError)
	name := fs.String("name", "server", "`name` to greet with")
	say := fs.String("say", "", "`text` at the end of every answer")
	httpAddr := fs.String("listen", "", "`address` to serve HTTP at")
	sinkAddr := fs.String("sink", "", "`address` to measure throughput and round trips at")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, *name, *say, *httpAddr, *sinkAddr); err != nil {
		fmt.Fprintln(os.Stderr, "demo-server:", err)
		return 1
	}
	return 0
}

func serve(ctx context.Context, name, say, httpAddr, sinkAddr string) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if httpAddr != "" {
		ln, err := listen(ctx, httpAddr)
		if err != nil {
			return err
		}
		s := &http.Server{Handler: greeter(name, say), ReadHeaderTimeout: 10 * time.Second}
		wg.Go(func() { cancel(s.Serve(ln)) })
		defer func() { _ = s.Close() }()
	}
	if sinkAddr != "" {
		ln, err := listen(ctx, sinkAddr)
		if err != nil {
			return err
		}
		wg.Go(func() { cancel(serveSink(ctx, ln)) })
		defer ln.Close()
	}
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// listen is net.Listen with plain TCP, as most servers have it.
func listen(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return lc.Listen(ctx, "tcp", addr)
}

// greeter answers every request. readGreeting reads the answer.
func greeter(name, say string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = fmt.Fprintf(w, "hello from %s\nclient address %s\n%s\n", name, host, say)
	})
}

// The protocol of measurements: the client says upload, download or echo in one byte. Uploads end with the client's FIN, and the
// server answers with the number of bytes; downloads and echoes end when the client closes.
const (
	upload   = 'u'
	download = 'd'
	echo     = 'e'

	chunk = 128 << 10 // bytes of one write: iperf3's default
	ping  = 64        // bytes of a round trip, each way
)

func serveSink(ctx context.Context, ln net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		wg.Go(func() {
			defer c.Close()
			defer context.AfterFunc(ctx, func() { _ = c.Close() })()
			measured(c)
		})
	}
}

// measured serves one measurement. What goes wrong is the client's to report.
func measured(c net.Conn) {
	var verb [1]byte
	if _, err := io.ReadFull(c, verb[:]); err != nil {
		return
	}
	switch verb[0] {
	case upload:
		n, err := io.CopyBuffer(discard{}, onlyReader{c}, make([]byte, chunk))
		if err != nil {
			return
		}
		_, _ = c.Write(binary.BigEndian.AppendUint64(nil, uint64(n)))
	case download:
		buf := make([]byte, chunk)
		for {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	case echo:
		buf := make([]byte, ping)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	}
}

// discard and onlyReader keep io.CopyBuffer from taking another way than through its buffer.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

type onlyReader struct{ io.Reader }
