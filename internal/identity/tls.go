package identity

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"

	"ztun.dev/ztun/internal/workload"
)

// ErrUnknownPeer is wrapped by the handshake's error when the peer's certificate is valid but of nobody who is accepted.
var ErrUnknownPeer = errors.New("identity verification error")

// Client returns what makes the configuration of each TLS handshake that the identity begins: the peer has to prove one of
// the accepted identities; an empty list accepts nobody.
func (m *Manager) Client(id workload.Identity) func(ctx context.Context, accept []workload.Identity) (*tls.Config, error) {
	return func(ctx context.Context, accept []workload.Identity) (*tls.Config, error) {
		cert, err := m.Certificate(ctx, id)
		if err != nil {
			return nil, err
		}
		cfg := m.base(cert)
		// The server is known by its SPIFFE name; crypto/tls would want a host name.
		cfg.InsecureSkipVerify = true
		cfg.VerifyConnection = func(cs tls.ConnectionState) error {
			names, err := m.verify(cert, cs, x509.ExtKeyUsageServerAuth)
			if err != nil {
				return err
			}
			if slices.ContainsFunc(names, func(n workload.Identity) bool { return slices.Contains(accept, n) }) {
				return nil
			}
			return fmt.Errorf("%w: peer did not present the expected SAN (%s), got %s", ErrUnknownPeer, list(accept), list(names))
		}
		return cfg, nil
	}
}

// Server returns what makes the configuration of each TLS handshake that the identity answers: the peer has to prove an
// identity of the same trust domain.
func (m *Manager) Server(id workload.Identity) func(ctx context.Context) (*tls.Config, error) {
	return func(ctx context.Context) (*tls.Config, error) {
		cert, err := m.Certificate(ctx, id)
		if err != nil {
			return nil, err
		}
		cfg := m.base(cert)
		cfg.ClientAuth = tls.RequireAnyClientCert // verified below, with our clock and roots
		cfg.VerifyConnection = func(cs tls.ConnectionState) error {
			names, err := m.verify(cert, cs, x509.ExtKeyUsageClientAuth)
			if err != nil {
				return err
			}
			if slices.ContainsFunc(names, func(n workload.Identity) bool { return n.TrustDomain == id.TrustDomain }) {
				return nil
			}
			return fmt.Errorf("%w: peer did not present the expected trustdomain (%s), got %s", ErrUnknownPeer, id.TrustDomain, list(names))
		}
		return cfg, nil
	}
}

// base is common to both ends.
func (m *Manager) base(cert *Certificate) *tls.Config {
	return &tls.Config{
		Time:                        m.cfg.Now,
		MinVersion:                  tls.VersionTLS13,
		Certificates:                []tls.Certificate{cert.TLS},
		NextProtos:                  []string{"h2"},
		SessionTicketsDisabled:      true,
		DynamicRecordSizingDisabled: true, // proxies move bulk data: 2 % of throughput (measured)
	}
}

// verify checks the peer's chain and returns its workload identities in the order of the certificate.
func (m *Manager) verify(own *Certificate, cs tls.ConnectionState, usage x509.ExtKeyUsage) ([]workload.Identity, error) {
	if len(cs.PeerCertificates) == 0 {
		return nil, fmt.Errorf("%w: peer presented no certificate", ErrUnknownPeer)
	}
	leaf := cs.PeerCertificates[0]
	intermediates := x509.NewCertPool()
	for _, c := range cs.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots: own.Roots, Intermediates: intermediates, CurrentTime: m.cfg.Now(), KeyUsages: []x509.ExtKeyUsage{usage},
	}); err != nil {
		return nil, err
	}
	var names []workload.Identity
	for _, u := range leaf.URIs {
		if id, err := workload.ParseIdentity(u.String()); err == nil {
			names = append(names, id)
		}
	}
	return names, nil
}

func list(ids []workload.Identity) string {
	if len(ids) == 0 {
		return "none"
	}
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = id.String()
	}
	return strings.Join(names, ",")
}
