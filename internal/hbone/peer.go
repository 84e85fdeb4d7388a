package hbone

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"ztun.dev/ztun/internal/workload"
)

// IdentityIn returns the first URI SAN of leaf, in the order of the certificate, that is an identity of the trust domain,
// and the zero Identity if there is none. That SAN, and no other, is who the peer is.
func IdentityIn(leaf *x509.Certificate, trustDomain string) workload.Identity {
	return firstIdentity(leaf, func(id workload.Identity) bool { return id.TrustDomain == trustDomain })
}

func firstIdentity(leaf *x509.Certificate, ok func(workload.Identity) bool) workload.Identity {
	for _, u := range leaf.URIs {
		if id, err := workload.ParseIdentity(u.String()); err == nil && ok(id) {
			return id
		}
	}
	return workload.Identity{}
}

// accepted returns the identity of accept that the peer proved with its certificate, leaf, or nil.
func accepted(leaf *x509.Certificate, accept []workload.Identity) (workload.Identity, error) {
	if leaf == nil {
		return workload.Identity{}, fmt.Errorf("no certificate: %w", ErrUnknownPeer)
	}
	id := firstIdentity(leaf, func(id workload.Identity) bool { return slices.Contains(accept, id) })
	if id.IsZero() {
		return id, fmt.Errorf("%w: want %v, got %v", ErrUnknownPeer, accept, leaf.URIs)
	}
	return id, nil
}

// leafOf is the peer's certificate, or nil.
func leafOf(cs tls.ConnectionState) *x509.Certificate {
	if len(cs.PeerCertificates) == 0 {
		return nil
	}
	return cs.PeerCertificates[0]
}

// requireAccepted returns a copy of cfg that also refuses a server which proves none of the identities, whatever else cfg
// verifies.
func requireAccepted(cfg *tls.Config, accept []workload.Identity) *tls.Config {
	cfg = cfg.Clone()
	verify := cfg.VerifyConnection
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := accepted(leafOf(cs), accept)
		if verify == nil {
			return err
		}
		if verr := verify(cs); verr != nil {
			if err != nil {
				return fmt.Errorf("%w: %w", ErrUnknownPeer, verr) // its words say more
			}
			return verr
		}
		return err
	}
	return cfg
}

// noteCertificate returns a copy of cfg for one handshake, which stores the leaf that it presents.
func noteCertificate(cfg *tls.Config, leaf **x509.Certificate) *tls.Config {
	cfg = cfg.Clone()
	get, certs := cfg.GetCertificate, cfg.Certificates
	cfg.Certificates = nil // they would go before GetCertificate where there is no SNI
	cfg.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		var cert *tls.Certificate
		var err error
		switch {
		case get != nil:
			cert, err = get(hello)
		case len(certs) > 0:
			i := max(0, slices.IndexFunc(certs, func(c tls.Certificate) bool { return hello.SupportsCertificate(&c) == nil }))
			cert = &certs[i]
		}
		if err != nil || cert == nil {
			return cert, err
		}
		if *leaf = cert.Leaf; cert.Leaf == nil && len(cert.Certificate) > 0 {
			*leaf, err = x509.ParseCertificate(cert.Certificate[0])
		}
		return cert, err
	}
	return cfg
}

// noteClientCertificate is noteCertificate for a client.
func noteClientCertificate(cfg *tls.Config, leaf **x509.Certificate) *tls.Config {
	cfg = cfg.Clone()
	get, certs := cfg.GetClientCertificate, cfg.Certificates
	cfg.GetClientCertificate = func(info *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		cert := new(tls.Certificate) // none fits
		var err error
		if get != nil {
			cert, err = get(info)
		} else if i := slices.IndexFunc(certs, func(c tls.Certificate) bool { return info.SupportsCertificate(&c) == nil }); i >= 0 {
			cert = &certs[i]
		}
		if err != nil || cert == nil {
			return cert, err
		}
		if *leaf = cert.Leaf; cert.Leaf == nil && len(cert.Certificate) > 0 {
			*leaf, err = x509.ParseCertificate(cert.Certificate[0])
		}
		return cert, err
	}
	return cfg
}

// ageLimit is how long a tunnel may take new streams from now on: until the first of its certificates ends, and most if that is
// not 0. It is 0 if nothing limits it.
func ageLimit(now time.Time, most time.Duration, leaves ...*x509.Certificate) time.Duration {
	limit := most
	for _, leaf := range leaves {
		if leaf == nil {
			continue
		}
		if left := max(time.Millisecond, leaf.NotAfter.Sub(now)); limit == 0 || left < limit {
			limit = left
		}
	}
	return limit
}
