package ca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func request(t *testing.T, uris ...string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := new(x509.CertificateRequest)
	for _, s := range uris {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		tmpl.URIs = append(tmpl.URIs, u)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, tmpl, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestSignedChainVerifiesAgainstALoadedCopy(t *testing.T) {
	made, err := New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := made.PEM()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "root.pem")
	if err := os.WriteFile(path, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(path, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	const id = "spiffe://cluster.local/ns/shop/sa/cart"
	chain, err := loaded.Sign(t.Context(), request(t, id))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(chain[0])
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(made.root)
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Errorf("the leaf does not verify: %v", err)
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != id {
		t.Errorf("names of the leaf: %v, want %s", leaf.URIs, id)
	}
	if d := leaf.NotAfter.Sub(leaf.NotBefore); d != leafLife+backdated {
		t.Errorf("life of the leaf: %v", d)
	}
}

func TestSignRefuses(t *testing.T) {
	c, err := New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for name, csr := range map[string][]byte{
		"no request":    []byte("x"),
		"no name":       request(t),
		"two names":     request(t, "spiffe://a/ns/b/sa/c", "spiffe://a/ns/b/sa/d"),
		"not a SPIFFE ": request(t, "https://a/ns/b/sa/c"),
	} {
		if _, err := c.Sign(t.Context(), csr); err == nil {
			t.Errorf("%s: signed", name)
		}
	}
}

func TestLoadNamesWhatIsWrong(t *testing.T) {
	a, _ := New(time.Now)
	b, _ := New(time.Now)
	aPEM, _ := a.PEM()
	bPEM, _ := b.PEM()
	cut := strings.Index(string(aPEM), "-----BEGIN PRIVATE")
	bCut := strings.Index(string(bPEM), "-----BEGIN PRIVATE")
	old, _ := New(func() time.Time { return time.Now().Add(-11 * 365 * 24 * time.Hour) })
	oldPEM, _ := old.PEM()
	tests := []struct{ name, in, want string }{
		{"empty", "", "no certificate"},
		{"certificate only", string(aPEM[:cut]), "no private key"},
		{"another's key", string(aPEM[:cut]) + string(bPEM[bCut:]), "does not belong to the certificate"},
		{"two certificates", string(aPEM) + string(bPEM), "more than one certificate"},
		{"expired", string(oldPEM), "expired at"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "root.pem")
			if err := os.WriteFile(path, []byte(tt.in), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := Load(path, time.Now); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v, want the path and %q", err, tt.want)
			}
		})
	}
	if _, err := Load("/does/not/exist", time.Now); err == nil {
		t.Error("a missing file is loaded")
	}
}
