package stack

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/tun"
)

func TestNewChecksItsConfig(t *testing.T) {
	m := loop.NewManual(epoch)
	defer m.Close()
	near, _ := tun.Pipe()
	small, _ := tun.Pipe()
	small.SetMTU(1279)
	good := Config{Device: near, Group: m.Group(), Handler: refuser{}}
	tests := []struct {
		name   string
		change func(*Config)
		want   string // in the error
	}{
		{"no device", func(c *Config) { c.Device = nil }, "no device"},
		{"no group", func(c *Config) { c.Group = nil }, "no group"},
		{"no handler", func(c *Config) { c.Handler = nil }, "no handler"},
		{"negative limit", func(c *Config) { c.MaxInFlight = -1 }, "MaxInFlight: -1"},
		{"negative probes", func(c *Config) { c.KeepaliveRetries = -1 }, "must not be negative"},
		{"MTU too small for IPv6", func(c *Config) { c.Device = small }, "1279 is less than"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := good
			tt.change(&cfg)
			s, err := New(cfg)
			if err == nil {
				s.Close()
				t.Fatal("New succeeded")
			}
			if !strings.HasPrefix(err.Error(), "stack: ") || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("New() = %v, want an error with %q", err, tt.want)
			}
		})
	}
	t.Run("a stack that never ran is closed", func(t *testing.T) {
		s, err := New(good)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// failing is a device that breaks.
type failing struct {
	*tun.PipeEnd
	err error
}

func (d failing) Read([][]byte, []int, int) (int, error) { return 0, d.err }

func TestRun(t *testing.T) {
	broken := errors.New("the device is gone")
	tests := []struct {
		name   string
		device func(*tun.PipeEnd) tun.Device
		cancel bool
		want   error
	}{
		{"ends with its ctx", func(p *tun.PipeEnd) tun.Device { return p }, true, nil},
		{"ends with its device", func(p *tun.PipeEnd) tun.Device { return failing{p, broken} }, false, broken},
		{"ends with a closed device", func(p *tun.PipeEnd) tun.Device { p.Close(); return p }, false, os.ErrClosed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g, err := loop.New(loop.Config{Now: time.Now})
			if err != nil {
				t.Fatal(err)
			}
			gctx, stopGroup := context.WithCancel(context.Background())
			var loops sync.WaitGroup
			loops.Go(func() {
				if err := g.Run(gctx); err != nil {
					t.Error(err)
				}
			})
			near, _ := tun.Pipe()
			s, err := New(Config{Device: tt.device(near), Group: g, Handler: refuser{}})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if tt.cancel {
				cancel()
			}
			err = s.Run(ctx)
			if !errors.Is(err, tt.want) {
				t.Errorf("Run() = %v, want %v", err, tt.want)
			}
			stopGroup()
			loops.Wait()
			if st := g.Stats(); st != (loop.Stats{}) {
				t.Errorf("afterwards the group holds %+v, want nothing", st)
			}
		})
	}
}

func TestRunAfterTheGroup(t *testing.T) {
	m := loop.NewManual(epoch)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	near, _ := tun.Pipe()
	s, err := New(Config{Device: near, Group: m.Group(), Handler: refuser{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(context.Background()); !errors.Is(err, loop.ErrStopped) {
		t.Errorf("Run() = %v, want %v", err, loop.ErrStopped)
	}
}
