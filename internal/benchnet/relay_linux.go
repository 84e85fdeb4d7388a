package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"strings"
)

// relayBytes is the size of a relay's buffers, one for each direction.
const relayBytes = 64 << 10

// relayTool is the plain relay: a Go program as anyone would write it, with two goroutines for a connection and nothing else. It
// runs until it is killed. Arguments are PORT=ADDRESS:PORT, where to listen and what to connect to.
func relayTool(fs *flag.FlagSet, args []string) (any, error) {
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	return nil, relayAll(fs.Args(), listenTCP, dialTCP)
}

// relayAll relays for each argument until one listener fails.
func relayAll(args []string, listen func(port string) (net.Listener, error), dial func(addr string) (halfCloser, error)) error {
	failed := make(chan error, 1)
	for _, arg := range args {
		port, target, ok := strings.Cut(arg, "=")
		if !ok {
			return fmt.Errorf("%q: want PORT=ADDRESS:PORT", arg)
		}
		ln, err := listen(port)
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					failed <- err
					return
				}
				go relay(c.(halfCloser), func() (halfCloser, error) { return dial(target) })
			}
		}()
	}
	return <-failed
}

func listenTCP(port string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false) // on by default for listeners
	return lc.Listen(context.Background(), "tcp4", ":"+port)
}

func dialTCP(addr string) (halfCloser, error) {
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// A halfCloser is a *net.TCPConn or a *tls.Conn.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// relay copies both ways until both have ended.
func relay(down halfCloser, dial func() (halfCloser, error)) {
	defer down.Close()
	up, err := dial()
	if err != nil {
		return
	}
	defer up.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		copyStream(down, up)
	}()
	copyStream(up, down)
	<-done
}

// copyStream hides ReadFrom and WriteTo, which would splice inside the kernel. An error ends both directions: each end must learn
// that there is no more to come.
func copyStream(dst, src halfCloser) {
	_, err := io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, relayBytes))
	if err == nil {
		err = dst.CloseWrite()
	}
	if err != nil {
		dst.Close()
		src.Close()
	}
}
