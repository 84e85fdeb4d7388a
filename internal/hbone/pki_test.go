package hbone

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"testing"
	"time"

	"ztun.dev/ztun/internal/workload"
)

var (
	client1 = workload.Identity{TrustDomain: "cluster.local", Namespace: "shop", ServiceAccount: "orders"}
	server1 = workload.Identity{TrustDomain: "cluster.local", Namespace: "shop", ServiceAccount: "cart"}
)

// A pki makes certificates whose validity does not depend on the clock.
type pki struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	root *x509.Certificate
	pool *x509.CertPool
}

func newPKI(t testing.TB) *pki {
	t.Helper()
	p := &pki{t: t, pool: x509.NewCertPool()}
	p.key = p.newKey()
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: t0.AddDate(-1, 0, 0), NotAfter: t0.AddDate(10, 0, 0),
	}
	p.root = p.parse(x509.CreateCertificate(rand.Reader, tmpl, tmpl, p.key.Public(), p.key))
	p.pool.AddCert(p.root)
	return p
}

func (p *pki) newKey() *ecdsa.PrivateKey {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		p.t.Fatal(err)
	}
	return k
}

func (p *pki) parse(der []byte, err error) *x509.Certificate {
	if err != nil {
		p.t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

func (p *pki) leaf(uris ...string) tls.Certificate {
	p.t.Helper()
	key := p.newKey()
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		NotBefore:   t0.AddDate(-1, 0, 0), NotAfter: t0.AddDate(10, 0, 0),
	}
	for _, s := range uris {
		u, err := url.Parse(s)
		if err != nil {
			p.t.Fatal(err)
		}
		tmpl.URIs = append(tmpl.URIs, u)
	}
	c := p.parse(x509.CreateCertificate(rand.Reader, tmpl, p.root, key.Public(), p.key))
	return tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: key, Leaf: c}
}

func (p *pki) serverTLS(uris ...string) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{p.leaf(uris...)}, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: p.pool, Time: func() time.Time { return t0 },
	}
}

func (p *pki) clientTLS(uris ...string) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{p.leaf(uris...)}, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
		Time:               func() time.Time { return t0 },
		InsecureSkipVerify: true, // no names in the mesh: the chain is verified here, the identity by the Pool
		VerifyConnection: func(cs tls.ConnectionState) error {
			_, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: p.pool, CurrentTime: t0})
			return err
		},
	}
}

func clientFrom(cfg *tls.Config) ClientTLS {
	return func(context.Context, []workload.Identity) (*tls.Config, error) { return cfg, nil }
}

func serverFrom(cfg *tls.Config) ServerTLS {
	return func(context.Context) (*tls.Config, error) { return cfg, nil }
}

func TestIdentityIn(t *testing.T) {
	leaf := newPKI(t).leaf("https://a.example/", "spiffe://other/ns/a/sa/b", "spiffe://cluster.local/ns/shop/sa/cart", "spiffe://cluster.local/ns/shop/sa/two").Leaf
	if got := IdentityIn(leaf, "cluster.local"); got != server1 {
		t.Errorf("IdentityIn = %v, want %v", got, server1)
	}
	if got := IdentityIn(leaf, "absent"); !got.IsZero() {
		t.Errorf("IdentityIn(absent) = %v", got)
	}
}
