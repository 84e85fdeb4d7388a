package admin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"ztun.dev/ztun/internal/telemetry"
)

// Ports are where the Server listens; 0 stands for ztunnel's port, [AnyPort] for one that is free.
type Ports struct {
	Admin int // 15000
	Stats int // 15020
	Ready int // 15021
}

// AnyPort is a free port of the kernel's choice.
const AnyPort = -1

// A Config configures a Server. All fields but Ports, Capture and Explain are required.
type Config struct {
	Ports     Ports
	Dumper    Dumper
	Records   *telemetry.Recorder
	Levels    *telemetry.Levels // what /logging shows and changes
	Metrics   http.Handler      // telemetry.MetricsHandler
	Readiness *Readiness
	Capture   http.HandlerFunc                       // /debug/capture; nil: there is none
	Explain   http.HandlerFunc                       // /debug/explain, the same
	Shutdown  func()                                 // asks the process to end, once or more; does not wait
	Now       func() time.Time                       // as After
	After     func(d time.Duration) <-chan time.Time // time.After
	Build     Build
	Log       *slog.Logger
}

// A Build is what the dump says of the program.
type Build struct {
	Version, Revision, IstioVersion, Go string
	Modified                            bool // built with changes that were not committed
}

// Limits of every server, ztunnel's: time until a header has been read, and its size.
const (
	headerTimeout = 2 * time.Second
	headerBytes   = 8 << 10
)

const (
	idleTimeout   = time.Minute      // of connections between requests
	endTimeout    = time.Second      // for requests that are being answered when the end comes
	pendingPeriod = 10 * time.Second // between log lines that say why this node is not ready
)

// A Server serves the three ports. Listen or Run binds them. It runs once.
type Server struct {
	cfg   Config
	sites []*site

	ended chan struct{} // closed at the end of Run

	mu      sync.Mutex     // guards below
	over    bool           // no goroutine is started any more
	reverts sync.WaitGroup // goroutines that put a log level back
}

// A site is one port.
type site struct {
	name      string
	setting   string // that moves it, as key and flag; "": none does
	addrs     []string
	listeners []net.Listener
	handler   http.Handler
}

// New returns a Server that has touched nothing yet.
func New(cfg Config) (*Server, error) {
	if cfg.Dumper == nil || cfg.Records == nil || cfg.Levels == nil || cfg.Metrics == nil || cfg.Readiness == nil || cfg.Shutdown == nil ||
		cfg.Now == nil || cfg.After == nil || cfg.Log == nil {
		return nil, errors.New("admin: config: Dumper, Records, Levels, Metrics, Readiness, Shutdown, Now, After and Log are required")
	}
	s := &Server{cfg: cfg, ended: make(chan struct{})}
	s.sites = []*site{
		{name: "admin", setting: "proxyAdminPort (--proxy-admin-port)", addrs: hosts(cfg.Ports.Admin, 15000, "127.0.0.1", "::1"), handler: s.adminHandler()},
		{name: "metrics", setting: "statsPort (--stats-port)", addrs: hosts(cfg.Ports.Stats, 15020, ""), handler: exact(map[string]http.HandlerFunc{
			"/metrics": cfg.Metrics.ServeHTTP, "/stats/prometheus": cfg.Metrics.ServeHTTP,
		})},
		{name: "readiness", addrs: hosts(cfg.Ports.Ready, 15021, ""), handler: exact(map[string]http.HandlerFunc{
			"/healthz/ready": cfg.Readiness.serve,
		})},
	}
	return s, nil
}

func hosts(port, standard int, names ...string) []string {
	switch port {
	case 0:
		port = standard
	case AnyPort:
		port = 0
	}
	for i, h := range names {
		names[i] = net.JoinHostPort(h, strconv.Itoa(port))
	}
	return names
}

// exact serves paths as they are written, all others with 404 and no body.
func exact(paths map[string]http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h := paths[r.URL.Path]; h != nil {
			h(w, r)
			return
		}
		w.WriteHeader(http.StatusNotFound)
	})
}

// Listen binds the ports, so that they answer once Run runs. An address of a family that the kernel does not have is left out, unless
// it is the only one of its port. After an error nothing is bound.
func (s *Server) Listen(ctx context.Context) error {
	var lc net.ListenConfig
	for _, x := range s.sites {
		var last error
		for _, addr := range x.addrs {
			l, err := lc.Listen(ctx, "tcp", addr)
			if err != nil {
				last = x.explain(err)
				if errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EADDRNOTAVAIL) {
					continue
				}
				s.Close()
				return last
			}
			x.listeners = append(x.listeners, l)
		}
		if len(x.listeners) == 0 {
			s.Close()
			return last
		}
	}
	return nil
}

// explain says of an error of listening what can be done.
func (x *site) explain(err error) error {
	if !errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("admin: %s: %w", x.name, err)
	}
	hint := "stop the process that holds the port (ss -ltnp names it)"
	if x.setting != "" {
		hint += ", or set " + x.setting + " to another"
	} else {
		hint += "; this port is fixed"
	}
	return fmt.Errorf("admin: %s: %w; %s", x.name, err, hint)
}

// Addrs are the addresses that a port listens on, by its name: admin, metrics or readiness.
func (s *Server) Addrs(name string) []net.Addr {
	var list []net.Addr
	for _, x := range s.sites {
		if x.name != name {
			continue
		}
		for _, l := range x.listeners {
			list = append(list, l.Addr())
		}
	}
	return list
}

// Close lets go of what Listen has bound, if Run does not come to it.
func (s *Server) Close() {
	for _, x := range s.sites {
		for _, l := range x.listeners {
			l.Close()
		}
		x.listeners = nil
	}
}

// Run binds what is not bound yet, and serves until ctx ends: then new connections are refused at once, and requests that are being
// answered have a second. It logs why the node is not ready while that lasts.
func (s *Server) Run(ctx context.Context) error {
	if !slices.ContainsFunc(s.sites, func(x *site) bool { return len(x.listeners) > 0 }) {
		if err := s.Listen(ctx); err != nil {
			return err
		}
	}
	var servers []*http.Server
	ends := make(chan error, 8)
	var serving sync.WaitGroup
	for _, x := range s.sites {
		srv := &http.Server{
			Handler: x.handler, ReadHeaderTimeout: headerTimeout, MaxHeaderBytes: headerBytes, IdleTimeout: idleTimeout,
			ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug), // what clients do wrong
		}
		servers = append(servers, srv)
		for _, l := range x.listeners {
			s.cfg.Log.Info("listening", "for", x.name, "addr", l.Addr().String())
			serving.Go(func() {
				if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
					ends <- fmt.Errorf("admin: %s: %w", x.name, err)
				}
			})
		}
	}
	var background sync.WaitGroup
	watch, stopWatch := context.WithCancel(ctx)
	background.Go(func() { s.logPending(watch) })
	var err error
	select {
	case <-ctx.Done():
	case err = <-ends:
	}
	stopWatch()
	s.end(servers)
	serving.Wait()
	background.Wait()
	close(s.ended)
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.reverts.Wait()
	return err
}

// end closes the listeners at once and waits a little for answers.
func (s *Server) end(servers []*http.Server) {
	grace, cancel := context.WithCancel(context.Background())
	defer cancel()
	var all sync.WaitGroup
	for _, srv := range servers {
		all.Go(func() {
			if srv.Shutdown(grace) != nil {
				srv.Close() //nolint:errcheck // its listeners are closed already
			}
		})
	}
	done := make(chan struct{})
	go func() {
		all.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-s.cfg.After(endTimeout):
		cancel()
		<-done
	}
}

func (s *Server) logPending(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.cfg.After(pendingPeriod):
			if ready, body := s.cfg.Readiness.state(); !ready {
				s.cfg.Log.Warn("not ready", "reason", body)
			}
		}
	}
}
