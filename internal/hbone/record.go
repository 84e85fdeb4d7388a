package hbone

import (
	"crypto/fips140"
	"crypto/tls"
	"io"
)

// Of a TLS record (RFC 8446, sections 5.1 and 5.2), in bytes.
const (
	recordHeader = 5
	maxRecord    = 16 << 10        // of plain text
	maxSealed    = maxRecord + 256 // of what is sealed, in TLS 1.3
)

// A recordLayer opens and seals what passes a connection once its handshake is over. It has no socket and never blocks. It is used by
// one goroutine at a time.
type recordLayer interface {
	// open appends the plain text of the whole records that in begins with to p, in whose capacity it fits: no record grows when it is
	// opened. rest is what follows them. io.EOF is the peer's close_notify; after any error nothing more is opened.
	open(p, in []byte) (_, rest []byte, err error)

	// seal appends p to dst in records, behind what is owed to the peer; after a failure only that, and what it returns is to be sent
	// also with an error. p is borrowed.
	seal(dst, p []byte) ([]byte, error)

	// owes reports whether something is to be sent that no seal has brought about: an alert, or the answer to a KeyUpdate.
	owes() bool

	// closing appends a close_notify. Nothing is sealed after it.
	closing(dst []byte) []byte
}

// newRecordLayer returns the one for a connection whose handshake is over, of whose traffic secrets keys has no more then. crypto/tls
// itself goes on where the own layer must not, or cannot: with TLS 1.2, ChaCha20, and where FIPS 140 mode wants the whole of TLS inside
// its module.
func newRecordLayer(tc *tls.Conn, rc *recordConn, keys *secrets, server bool) (recordLayer, error) {
	state := tc.ConnectionState()
	suite := suites[state.CipherSuite]
	in, out := keys.server, keys.client
	*keys = secrets{} // crypto/tls may hold it for as long as the connection
	if state.Version != tls.VersionTLS13 || suite == nil || fips140.Enabled() {
		return &tlsLayer{tls: tc, rc: rc}, nil
	}
	if server {
		in, out = out, in
	}
	return newGCMLayer(suite, in, out, server)
}

// forLink returns a copy of cfg for the handshake of one link. Its traffic secrets go to keys: to a log of keys is the only way out of
// crypto/tls that they have. They are written nowhere else, but to where cfg itself wants them.
//
// A server must not send tickets: they would be sealed with the first nonces of the key that the own layer begins with.
func forLink(cfg *tls.Config, keys *secrets) *tls.Config {
	cfg = cfg.Clone()
	cfg.NextProtos = []string{"h2"}
	cfg.DynamicRecordSizingDisabled = true // we write large batches or what there is
	cfg.SessionTicketsDisabled = true      // each handshake proves an identity anew; see above, too
	if cfg.KeyLogWriter != nil {
		cfg.KeyLogWriter = io.MultiWriter(keys, cfg.KeyLogWriter)
	} else {
		cfg.KeyLogWriter = keys
	}
	if get := cfg.GetConfigForClient; get != nil { // it takes the place of this one
		cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			other, err := get(hello)
			if err != nil || other == nil {
				return other, err
			}
			return forLink(other, keys), nil
		}
	}
	return cfg
}
