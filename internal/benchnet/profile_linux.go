package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

// profileTime is that of a profile, and of the measurement that it is of.
const profileTime = 2 * time.Second

func fileName(measurement string) string { return strings.ReplaceAll(measurement, "/", "-") }

// profile takes a measurement whose result does not count, and asks ztun's administration port for a CPU profile meanwhile.
func (b *bed) profile(ctx context.Context, m *measurement, p *path, z *ztun, file string) error {
	done := make(chan error, 1)
	go func() {
		_, err := m.take(ctx, b, p, profileTime+time.Second)
		done <- err
	}()
	err := z.cpuProfile(ctx, file)
	if err2 := <-done; err == nil {
		err = err2
	}
	if err != nil {
		return fmt.Errorf("benchnet: profile of %s on %s: %w", m.name, p.name, err)
	}
	return nil
}

func (z *ztun) cpuProfile(ctx context.Context, file string) error {
	t := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		return z.node.Dial(ctx, network, addr)
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:15000/debug/pprof/profile?seconds=%d", int(profileTime.Seconds())), nil)
	if err != nil {
		return err
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", req.URL, resp.Status)
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(f, resp.Body)
	return err
}
