// Package ca is a small certificate authority in files, for trials, tests, the demonstration and hosts without a cluster.
//
// A [CA] signs certificate requests for SPIFFE identities. Its root, certificate and key, is made fresh by [New] or read from
// a PEM file by [Load]; nodes that share the file trust each other. It is not a CA for production: the key is in a file.
package ca

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"time"
)

// Lifetimes. Certificates begin a little in the past, for clocks that differ.
const (
	rootLife  = 10 * 365 * 24 * time.Hour
	leafLife  = 24 * time.Hour // ztunnel's SECRET_TTL
	backdated = 2 * time.Minute
)

// A CA signs for any identity that asks.
type CA struct {
	root *x509.Certificate
	key  *ecdsa.PrivateKey
	now  func() time.Time
}

// New makes a CA with a fresh root.
func New(now func() time.Time) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("ca: root key: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{Organization: []string{"ztun trial CA"}},
		NotBefore:             now().Add(-backdated),
		NotAfter:              now().Add(rootLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("ca: root certificate: %w", err)
	}
	root, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("ca: root certificate: %w", err)
	}
	return &CA{root: root, key: key, now: now}, nil
}

// Load reads a CA from a PEM file with one certificate and its private key (PKCS #8 or SEC 1), in any order.
func Load(path string, now func() time.Time) (*CA, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("ca: %w", err)
	}
	c, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("ca: %s: %w", path, err)
	}
	c.now = now
	if t := now(); t.After(c.root.NotAfter) {
		return nil, fmt.Errorf("ca: %s: the root certificate expired at %s", path, c.root.NotAfter.Format(time.RFC3339))
	}
	return c, nil
}

func parse(data []byte) (*CA, error) {
	c := new(CA)
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		var err error
		switch block.Type {
		case "CERTIFICATE":
			if c.root != nil {
				return nil, errors.New("more than one certificate; want the root alone")
			}
			c.root, err = x509.ParseCertificate(block.Bytes)
		case "PRIVATE KEY", "EC PRIVATE KEY":
			c.key, err = parseKey(block)
		}
		if err != nil {
			return nil, err
		}
	}
	switch {
	case c.root == nil:
		return nil, errors.New("no certificate (PEM block CERTIFICATE)")
	case c.key == nil:
		return nil, errors.New("no private key (PEM block PRIVATE KEY or EC PRIVATE KEY)")
	case !c.root.IsCA:
		return nil, errors.New("the certificate is not one of a CA")
	case !c.key.PublicKey.Equal(c.root.PublicKey):
		return nil, errors.New("the private key does not belong to the certificate")
	}
	return c, nil
}

func parseKey(block *pem.Block) (*ecdsa.PrivateKey, error) {
	if block.Type == "EC PRIVATE KEY" {
		return x509.ParseECPrivateKey(block.Bytes)
	}
	k, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := k.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("the private key is %T, want an ECDSA key", k)
	}
	return key, nil
}

// PEM is the root, certificate and private key: what Load reads. It is a secret.
func (c *CA) PEM() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(c.key)
	if err != nil {
		return nil, fmt.Errorf("ca: root key: %w", err)
	}
	out := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.root.Raw})
	return append(out, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})...), nil
}

// Sign issues a certificate for the one URI name of a DER certificate request, for 24 hours and for both ends of TLS. The
// chain is in the form of the Istio CA: PEM texts, the leaf first, the roots last.
func (c *CA) Sign(_ context.Context, csr []byte) ([][]byte, error) {
	req, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return nil, fmt.Errorf("ca: certificate request: %w", err)
	}
	if err := req.CheckSignature(); err != nil {
		return nil, fmt.Errorf("ca: certificate request: %w", err)
	}
	if len(req.URIs) != 1 || req.URIs[0].Scheme != "spiffe" {
		return nil, fmt.Errorf("ca: certificate request: want one SPIFFE URI, have %v", req.URIs)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{Organization: []string{req.URIs[0].Host}},
		NotBefore:    c.now().Add(-backdated),
		NotAfter:     minTime(c.now().Add(leafLife), c.root.NotAfter),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:         []*url.URL{req.URIs[0]},
	}
	leaf, err := x509.CreateCertificate(rand.Reader, tmpl, c.root, req.PublicKey, c.key)
	if err != nil {
		return nil, fmt.Errorf("ca: sign %s: %w", req.URIs[0], err)
	}
	return [][]byte{certPEM(leaf), certPEM(c.root.Raw)}, nil
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// newSerial is 127 random bits: positive, as RFC 5280, section 4.1.2.2, wants it.
func newSerial() (*big.Int, error) {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("ca: serial number: %w", err)
	}
	return n, nil
}
