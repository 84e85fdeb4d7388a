package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"ztun.dev/ztun/internal/workload"
)

// A CA signs certificate requests. csr is DER; chain is in the form of the Istio CA: PEM texts, the leaf first, then
// intermediates, the trusted roots (one or several in one text) last.
type CA interface {
	Sign(ctx context.Context, csr []byte) (chain [][]byte, err error)
}

// A Config configures a Manager.
type Config struct {
	CA  CA
	Now func() time.Time
	Log *slog.Logger

	SignTimeout time.Duration // limit of one request to the CA: 10 s
}

// A Manager holds the certificates. Its methods may be called from any goroutine.
type Manager struct {
	cfg Config

	mu      sync.Mutex // guards below
	entries map[workload.Identity]*entry
	pending sync.WaitGroup // requests to the CA
}

// An entry is one identity. Its fields are guarded by Manager.mu.
type entry struct {
	cert    *Certificate
	request chan struct{} // closed when the request in progress has ended; nil: none
	err     error         // of the last request
	retry   time.Time     // after a failed renewal: not before
}

// A Certificate is what an identity proves itself with, and whom it trusts. It is immutable.
type Certificate struct {
	Identity workload.Identity
	TLS      tls.Certificate // leaf and intermediates; Leaf is set
	Roots    *x509.CertPool
	RootList []*x509.Certificate // the same, for people
	renew    time.Time
}

// Renewal: a failed one is tried again after renewRetry while the certificate lasts.
const (
	signTimeout = 10 * time.Second
	renewRetry  = 5 * time.Second
)

// New returns a Manager that holds nothing yet.
func New(cfg Config) (*Manager, error) {
	if cfg.CA == nil || cfg.Now == nil || cfg.Log == nil {
		return nil, errors.New("identity: config: CA, Now and Log are required")
	}
	if cfg.SignTimeout == 0 {
		cfg.SignTimeout = signTimeout
	}
	return &Manager{cfg: cfg, entries: make(map[workload.Identity]*entry)}, nil
}

// Certificate returns the current certificate of an identity, and waits for the first one. Half way through its life a new
// one is asked for in the background. One that has expired is never returned.
func (m *Manager) Certificate(ctx context.Context, id workload.Identity) (*Certificate, error) {
	m.mu.Lock()
	e := m.entries[id]
	if e == nil {
		e = new(entry)
		m.entries[id] = e
	}
	now := m.cfg.Now()
	valid := e.cert != nil && now.Before(e.cert.TLS.Leaf.NotAfter)
	if e.request == nil && (!valid || now.After(e.cert.renew) && now.After(e.retry)) {
		e.request = make(chan struct{})
		m.pending.Add(1)
		// The request serves everybody who waits, so it does not end with the ctx of the one who asked first.
		go m.sign(context.WithoutCancel(ctx), id, e)
	}
	cert, done := e.cert, e.request
	m.mu.Unlock()
	if valid {
		return cert, nil
	}
	select {
	case <-done:
	case <-ctx.Done():
		return nil, fmt.Errorf("identity: wait for the certificate of %s: %w", id, context.Cause(ctx))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.err != nil {
		return nil, e.err
	}
	return e.cert, nil
}

// A Status is what the Manager has for an identity.
type Status struct {
	Identity    workload.Identity
	Certificate *Certificate // nil: none
	Err         error        // of the last request, if it failed
}

// Statuses lists the identities that were asked for, in the order of their names.
func (m *Manager) Statuses() []Status {
	m.mu.Lock()
	list := make([]Status, 0, len(m.entries))
	for id, e := range m.entries {
		list = append(list, Status{id, e.cert, e.err})
	}
	m.mu.Unlock()
	slices.SortFunc(list, func(a, b Status) int { return strings.Compare(a.Identity.String(), b.Identity.String()) })
	return list
}

// Close waits for requests to the CA that are in progress.
func (m *Manager) Close() { m.pending.Wait() }

// sign makes one request to the CA.
func (m *Manager) sign(ctx context.Context, id workload.Identity, e *entry) {
	defer m.pending.Done()
	ctx, cancel := context.WithTimeout(ctx, m.cfg.SignTimeout)
	defer cancel()
	cert, err := m.request(ctx, id)

	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.cfg.Now()
	close(e.request)
	e.request, e.err = nil, err
	if err != nil {
		e.retry = now.Add(renewRetry)
		m.cfg.Log.Warn("certificate not obtained", "identity", id.String(), "error", err.Error(), "valid", e.cert != nil && now.Before(e.cert.TLS.Leaf.NotAfter))
		return
	}
	// Half of the remaining life when half of the whole is over already: CAs date certificates back.
	leaf := cert.TLS.Leaf
	cert.renew = leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 2)
	if cert.renew.Before(now.Add(renewRetry)) {
		cert.renew = now.Add(max(renewRetry, leaf.NotAfter.Sub(now)/2))
	}
	e.cert = cert
	m.cfg.Log.Info("certificate obtained", "identity", id.String(), "expires", leaf.NotAfter, "serial", leaf.SerialNumber.String())
}

func (m *Manager) request(ctx context.Context, id workload.Identity) (*Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader) // a new one for every request
	if err != nil {
		return nil, fmt.Errorf("identity: key of %s: %w", id, err)
	}
	u, err := url.Parse(id.String())
	if err != nil {
		return nil, fmt.Errorf("identity: name of %s: %w", id, err)
	}
	// An empty subject makes the name a critical extension.
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{u}}, key)
	if err != nil {
		return nil, fmt.Errorf("identity: certificate request of %s: %w", id, err)
	}
	chain, err := m.cfg.CA.Sign(ctx, csr)
	if err != nil {
		return nil, fmt.Errorf("identity: sign %s: %w", id, err)
	}
	cert, err := parseChain(id, chain, key, m.cfg.Now())
	if err != nil {
		return nil, fmt.Errorf("identity: answer of the CA for %s: %w", id, err)
	}
	return cert, nil
}

// parseChain checks an answer of the CA: the leaf is for the identity and the key, and leads to a root.
func parseChain(id workload.Identity, chain [][]byte, key *ecdsa.PrivateKey, now time.Time) (*Certificate, error) {
	if len(chain) < 2 {
		return nil, fmt.Errorf("%d certificates; want a leaf and a root", len(chain))
	}
	var certs []*x509.Certificate // leaf and intermediates
	for i, text := range chain[:len(chain)-1] {
		list, err := parsePEM(text)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", i, err)
		}
		certs = append(certs, list...)
	}
	rootList, err := parsePEM(chain[len(chain)-1])
	if err != nil {
		return nil, fmt.Errorf("roots: %w", err)
	}
	leafAt := slices.IndexFunc(certs, func(c *x509.Certificate) bool { return key.PublicKey.Equal(c.PublicKey) })
	if leafAt < 0 {
		return nil, errors.New("no certificate has the public key of the request")
	}
	leaf := certs[leafAt]
	if !slices.ContainsFunc(leaf.URIs, func(u *url.URL) bool { return u.String() == id.String() }) {
		return nil, fmt.Errorf("did not find expected SAN: %s, got %v", id, leaf.URIs)
	}
	roots, intermediates := x509.NewCertPool(), x509.NewCertPool()
	for _, c := range rootList {
		roots.AddCert(c)
	}
	for i, c := range certs {
		if i != leafAt {
			intermediates.AddCert(c)
		}
	}
	verified, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: intermediates, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	if err != nil {
		return nil, err
	}
	c := &Certificate{Identity: id, Roots: roots, RootList: rootList, TLS: tls.Certificate{PrivateKey: key, Leaf: leaf}}
	for _, link := range verified[0][:len(verified[0])-1] { // in issuing order, without the root
		c.TLS.Certificate = append(c.TLS.Certificate, link.Raw)
	}
	return c, nil
}

func parsePEM(text []byte) ([]*x509.Certificate, error) {
	var list []*x509.Certificate
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	if len(list) == 0 {
		return nil, errors.New("no PEM certificate")
	}
	return list, nil
}
