package main

// The relay pair is frozen: it is what figures of different versions are compared by. It is
//
//	application -> relay A -> TLS -> relay B -> application
//
// with the defaults of crypto/tls, TLS 1.3, mutual authentication with P-256, kernel sockets, and io.CopyBuffer with 64 KiB (see
// relay). Each connection has its own handshake, without resumption. A change to it is a commit of its own that changes nothing
// else.

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"
)

// relayName is in the certificate of both relays.
const relayName = "relay"

// tlsRelayTool is one half of the pair: relay A, or with -accept relay B. Arguments are as those of relayTool.
func tlsRelayTool(fs *flag.FlagSet, args []string) (any, error) {
	file := fs.String("identity", "", "`FILE` with certificate and key, of this relay and of the other")
	accept := fs.Bool("accept", false, "TLS is on the side of the listener")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	cfg, err := relayTLS(*file)
	if err != nil {
		return nil, err
	}
	if !*accept {
		return nil, relayAll(fs.Args(), listenTCP, func(addr string) (halfCloser, error) {
			c, err := tls.Dial("tcp4", addr, cfg)
			if err != nil {
				return nil, err
			}
			return c, nil
		})
	}
	return nil, relayAll(fs.Args(), func(port string) (net.Listener, error) {
		ln, err := listenTCP(port)
		if err != nil {
			return nil, err
		}
		return tls.NewListener(ln, cfg), nil
	}, dialTCP)
}

func relayTLS(file string) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(file, file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert.Leaf)
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, RootCAs: pool, ClientCAs: pool, ServerName: relayName,
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13,
	}, nil
}

// writeRelayIdentity makes the certificate of both relays, signed by itself, valid for a day.
func writeRelayIdentity(file string, now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{relayName}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IsCA: true, BasicConstraintsValid: true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	text := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})...)
	return os.WriteFile(file, text, 0o600)
}
