package hbone

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/net/http2"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// errDraining is why a connection is refused after Drain.
var errDraining = errors.New("hbone: the server takes no new connections")

// A Server serves the tunnels that peers open.
type Server struct {
	cfg    ServerConfig
	ctx    context.Context // of set-ups; ends when what is left at the end of Close is cut
	cancel context.CancelFunc
	bufs   *buffers

	mu           sync.Mutex // guards below
	draining     bool
	tunnels      map[*tunnel]struct{}
	arrivals     arrivals
	handshakes   int                // in progress
	handshakesOf map[netip.Addr]int // by the peer's address
	wasFull      bool               // when it was asked last
	setups       int                // connections between Serve and their tunnel
	idle         []func()           // called when nothing is left
}

// NewServer returns a Server, which does nothing until it is given connections.
func NewServer(cfg ServerConfig) (*Server, error) {
	if cfg.Group == nil || cfg.TLS == nil || cfg.Handler == nil {
		return nil, errors.New("hbone: server config: Group, TLS and Handler are required")
	}
	cfg.HandshakeTimeout = cmp.Or(cfg.HandshakeTimeout, 10*time.Second)
	cfg.MaxHandshakes = cmp.Or(cfg.MaxHandshakes, 128)
	cfg.MaxArrivals = cmp.Or(cfg.MaxArrivals, 1024)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg, bufs: new(buffers), tunnels: make(map[*tunnel]struct{}), handshakesOf: make(map[netip.Addr]int)}
	s.arrivals.byPeer = make(map[netip.Addr]int)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// setUpDone counts a connection that has become a tunnel, or, with an error, has not.
func (s *Server) setUpDone(a *arrival, err error) {
	if err != nil {
		s.cfg.Log.Debug("tunnel refused", "remote", a.conn.RemoteAddr(), "local", a.conn.LocalAddr(), "err", err)
		if len(a.ahead) > 0 && !errors.Is(err, errDraining) && !errors.Is(err, errEvicted) && !errors.Is(err, loop.ErrStopped) {
			s.refused(a.conn.LocalAddr(), a.conn.RemoteAddr(), &HandshakeError{err})
		}
	}
	s.mu.Lock()
	s.setups--
	s.mu.Unlock()
	s.checkIdle()
}

func (s *Server) refused(local, remote netip.AddrPort, err error) {
	if s.cfg.Refused != nil {
		s.cfg.Refused(local, remote, err)
	}
}

// setUp makes a tunnel of a connection that was granted a handshake.
func (s *Server) setUp(ctx context.Context, a *arrival) error {
	timeLeft := func() time.Duration {
		return max(time.Millisecond, s.cfg.HandshakeTimeout-s.cfg.Group.Now().Sub(a.start))
	}
	ctx, cancel := s.cfg.Group.WithTimeout(ctx, timeLeft())
	defer cancel()
	l, peer, age, err := s.handshake(ctx, a)
	s.mu.Lock()
	s.release(a)
	resume := s.wasFull && !s.full()
	s.mu.Unlock()
	if resume && s.cfg.Resume != nil {
		s.cfg.Resume()
	}
	if err != nil {
		return err
	}
	l.buffers = s.bufs
	startTunnel(tunnelConfig{
		group: s.cfg.Group, link: l, server: true, settings: s.cfg.Settings, owner: (*serverOwner)(s), peer: peer,
		buffers: s.bufs, budget: s.cfg.Budget, metrics: s.cfg.Metrics, settle: timeLeft(), age: age, failed: func() { s.setUpDone(a, loop.ErrStopped) },
	}, func(t *tunnel) {
		s.mu.Lock()
		s.tunnels[t] = struct{}{}
		draining := s.draining
		s.mu.Unlock()
		s.setUpDone(a, nil)
		if draining {
			t.drain()
		}
	})
	return nil
}

func (s *Server) handshake(ctx context.Context, a *arrival) (l *link, peer workload.Identity, age time.Duration, err error) {
	cfg, err := s.cfg.TLS(ctx)
	if err != nil {
		giveUp(a.conn)
		return nil, peer, 0, err
	}
	var own *x509.Certificate
	l, err = handshake(ctx, s.cfg.Group, a.conn, a.ahead, noteCertificate(cfg, &own), true)
	if err != nil {
		return nil, peer, 0, err
	}
	theirs := l.leaf
	if theirs != nil && own != nil {
		ours := firstIdentity(own, func(workload.Identity) bool { return true })
		peer = IdentityIn(theirs, ours.TrustDomain)
	}
	return l, peer, ageLimit(s.cfg.Group.Now(), s.cfg.MaxAge, own, theirs), nil
}

// Drain stops new tunnels and streams. Those that are open go on.
func (s *Server) Drain() {
	s.mu.Lock()
	s.draining = true
	for e := s.arrivals.all.Front(); e != nil; {
		a, _ := e.Value.(*arrival)
		e = e.Next()
		s.dismiss(a, errDraining)
	}
	open := make([]*tunnel, 0, len(s.tunnels))
	for t := range s.tunnels {
		open = append(open, t)
	}
	s.mu.Unlock()
	for _, t := range open {
		t.ref.Post(t.drain)
	}
}

// Close drains, waits until the last stream has ended or ctx ends, and then cuts what is left.
func (s *Server) Close(ctx context.Context) error {
	s.Drain()
	err := s.await(ctx)
	s.cancel()
	if err == nil {
		return nil
	}
	s.mu.Lock()
	for t := range s.tunnels {
		t.ref.Post(t.cut)
	}
	s.mu.Unlock()
	_ = s.await(context.WithoutCancel(ctx))
	return err
}

func (s *Server) await(ctx context.Context) error {
	return loop.Await(ctx, func(wake func()) {
		s.mu.Lock()
		s.idle = append(s.idle, wake)
		s.mu.Unlock()
		s.checkIdle()
	})
}

func (s *Server) checkIdle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining && len(s.tunnels) == 0 && s.setups == 0 {
		for _, wake := range s.idle {
			wake()
		}
		s.idle = nil
	}
}

// Tunnels is how many tunnels are open.
func (s *Server) Tunnels() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.tunnels)
}

// serverOwner is the Server as its tunnels see it.
type serverOwner Server

func (s *serverOwner) peerLimit(*tunnel, uint32) {}
func (s *serverOwner) noNewStreams(*tunnel)      {}
func (s *serverOwner) busyChanged(*tunnel, bool) {}
func (s *serverOwner) released(*tunnel)          {}

func (s *serverOwner) refused(t *tunnel, err error) { (*Server)(s).refused(t.local, t.remote, err) }

func (s *serverOwner) gone(t *tunnel, err error) {
	s.cfg.Log.Debug("tunnel closed", "remote", t.remote, "local", t.local, "err", err)
	s.mu.Lock()
	delete(s.tunnels, t)
	s.mu.Unlock()
	(*Server)(s).checkIdle()
}

func (s *serverOwner) request(t *tunnel, st *stream, authority string, h Headers) {
	ctx, cancel := context.WithCancel(s.ctx)
	st.cancel = cancel
	s.cfg.Group.Go(ctx, func(ctx context.Context) {
		defer cancel()
		a := &answer{t: t, s: st, ctx: context.WithoutCancel(ctx)}
		s.cfg.Handler.ServeConnect(ctx, &Request{
			Authority: authority,
			Headers:   h,
			Peer:      t.peer,
			Local:     t.local,
			Remote:    t.remote,
			answer:    a,
		})
		done := func() { t.setupDone(st) }
		if a.used {
			t.ref.PostIdle(done) // there is nothing to be done but to forget the set-up
		} else {
			t.ref.Post(done)
		}
	})
}

// An answer is what a Request answers through.
type answer struct {
	t   *tunnel
	s   *stream
	ctx context.Context // for Await only: it never ends

	used bool // by the handler
}

func (a *answer) accept(h Headers, start func(Stream)) error {
	a.used = true
	err := loop.ErrReset
	_ = loop.Await(a.ctx, func(wake func()) {
		posted := a.t.ref.Post(func() {
			if !a.s.broken() {
				if err = a.t.eng.Respond(a.s.id, 200, h, false); err == nil {
					a.s.response = h
					a.s.answered = true
					start(a.s)
					a.t.kick()
				}
			}
			wake()
		})
		if !posted {
			wake()
		}
	})
	return err
}

func (a *answer) reject(status int, h Headers) {
	a.used = true
	a.t.ref.Post(func() {
		if a.s.broken() {
			return
		}
		_ = a.t.eng.Respond(a.s.id, status, h, true)
		a.s.answered = true
		_ = a.s.Close() // RST_STREAM(NO_ERROR) tells the client to keep what it would send (RFC 9113, section 8.1)
	})
}

// setupDone is called when ServeConnect has returned.
func (t *tunnel) setupDone(s *stream) {
	s.cancel = nil
	t.eng.SetupDone(s.id)
	if t.eng.Drained() { // it was the last that the tunnel waited for
		t.kick()
	}
	if s.answered || s.released {
		return
	}
	if s.reset { // before it was answered
		delete(t.streams, s.id)
		return
	}
	if s.release() {
		t.eng.Reset(s.id, http2.ErrCodeInternal)
		t.kick()
	}
}
