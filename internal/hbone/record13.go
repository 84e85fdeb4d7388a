package hbone

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
)

// Content types, messages and alerts of TLS 1.3 (RFC 8446, section B).
const (
	contentAlert       = 21
	contentHandshake   = 22
	contentApplication = 23

	messageTicket    = 4
	messageKeyUpdate = 24

	alertCloseNotify       = 0
	alertUnexpectedMessage = 10
	alertBadRecordMAC      = 20
	alertRecordOverflow    = 22
	alertIllegalParameter  = 47
	alertDecodeError       = 50
	alertUserCanceled      = 90
)

const (
	// keyLimit is how many records one key seals. The bound of RFC 8446, section 5.5, for AES-GCM is 2^24.5.
	keyLimit = 1 << 24

	// maxUseless is how many records without data, and messages, may come in a row, as in crypto/tls: more are a flood.
	maxUseless = 16

	// maxMessage bounds a message of a server, which is kept until it is whole: a session ticket. A client's is a KeyUpdate.
	maxMessage   = 64 << 10
	keyUpdateLen = 5

	nonceLen = 12
	tagLen   = 16
)

// A suite is a cipher suite of AES-GCM.
type suite struct {
	hash   func() hash.Hash
	keyLen int
}

var suites = map[uint16]*suite{
	tls.TLS_AES_128_GCM_SHA256: {sha256.New, 16},
	tls.TLS_AES_256_GCM_SHA384: {sha512.New384, 32},
}

// secrets take the application traffic secrets of one handshake from crypto/tls, in the format of its log of keys.
type secrets struct{ client, server []byte }

// Write implements io.Writer. It gets one line each time.
func (s *secrets) Write(line []byte) (int, error) {
	f := bytes.Fields(line)
	if len(f) != 3 {
		return len(line), nil
	}
	secret, err := hex.DecodeString(string(f[2]))
	if err != nil {
		return 0, fmt.Errorf("hbone: traffic secret: %w", err)
	}
	switch string(f[0]) {
	case "CLIENT_TRAFFIC_SECRET_0":
		s.client = secret
	case "SERVER_TRAFFIC_SECRET_0":
		s.server = secret
	}
	return len(line), nil
}

// A trafficKey protects one direction.
type trafficKey struct {
	suite  *suite
	secret []byte
	aead   cipher.AEAD
	iv     [nonceLen]byte
	seq    uint64 // of the next record
	now    [nonceLen]byte
}

// use begins with a secret (RFC 8446, section 7.3).
func (k *trafficKey) use(secret []byte) error {
	if len(secret) != k.suite.hash().Size() {
		return fmt.Errorf("hbone: a traffic secret of %d bytes", len(secret))
	}
	key, err := expandLabel(k.suite.hash, secret, "key", k.suite.keyLen)
	if err != nil {
		return err
	}
	iv, err := expandLabel(k.suite.hash, secret, "iv", nonceLen)
	if err != nil {
		return err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return err
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return err
	}
	k.secret, k.aead, k.iv, k.seq = secret, aead, [nonceLen]byte(iv), 0
	return nil
}

// next goes on with the secret that follows (RFC 8446, section 7.2).
func (k *trafficKey) next() error {
	secret, err := expandLabel(k.suite.hash, k.secret, "traffic upd", k.suite.hash().Size())
	if err != nil {
		return err
	}
	return k.use(secret)
}

// nonce is that of the next record (RFC 8446, section 5.3), until nonce is called again.
func (k *trafficKey) nonce() []byte {
	k.now = k.iv
	n := k.now[nonceLen-8:]
	binary.BigEndian.PutUint64(n, binary.BigEndian.Uint64(n)^k.seq)
	k.seq++
	return k.now[:]
}

// expandLabel is HKDF-Expand-Label with an empty context (RFC 8446, section 7.1).
func expandLabel(h func() hash.Hash, secret []byte, label string, n int) ([]byte, error) {
	info := []byte{byte(n >> 8), byte(n), byte(len("tls13 ") + len(label))}
	info = append(info, "tls13 "...)
	info = append(info, label...)
	return hkdf.Expand(h, secret, string(append(info, 0)), n)
}

// A gcmLayer is the record layer of TLS 1.3 with AES-GCM: what crypto/tls does with a connection after its handshake, without the copies
// between its buffers and ours. A record is opened into the turn's plain text, and sealed where it is sent from.
type gcmLayer struct {
	in, out trafficKey
	server  bool

	message []byte // of the peer's handshake messages, what is not whole
	useless int    // records in a row without data

	update bool  // the peer wants another key
	alert  uint8 // to be sent, if err is one of ours
	owed   bool  // alert
	err    error // it is over
}

func newGCMLayer(s *suite, in, out []byte, server bool) (*gcmLayer, error) {
	g := &gcmLayer{in: trafficKey{suite: s}, out: trafficKey{suite: s}, server: server}
	if err := errors.Join(g.in.use(in), g.out.use(out)); err != nil {
		return nil, err
	}
	return g, nil
}

// fail is the end, for a reason that the peer is told.
func (g *gcmLayer) fail(alert uint8) error {
	g.alert, g.owed = alert, true
	g.err = &net.OpError{Op: "local error", Err: tls.AlertError(alert)} // as crypto/tls has it
	return g.err
}

func (g *gcmLayer) open(p, in []byte) (_, rest []byte, err error) {
	for g.err == nil && len(in) >= recordHeader {
		n := int(binary.BigEndian.Uint16(in[3:]))
		switch {
		case in[0] != contentApplication: // in clear, which nothing is after the handshake
			return p, in, g.fail(alertUnexpectedMessage)
		case n > maxSealed:
			return p, in, g.fail(alertRecordOverflow)
		case n < tagLen:
			return p, in, g.fail(alertBadRecordMAC)
		case len(in) < recordHeader+n:
			return p, in, nil
		}
		inner, err := g.in.aead.Open(p, g.in.nonce(), in[recordHeader:recordHeader+n], in[:recordHeader])
		if err != nil {
			return p, in, g.fail(alertBadRecordMAC)
		}
		in = in[recordHeader+n:]
		if len(inner)-len(p) > maxRecord+1 {
			return p, in, g.fail(alertRecordOverflow)
		}
		// Behind the content is its type, and behind that any number of zeros (RFC 8446, section 5.4).
		end := len(inner)
		for end > len(p) && inner[end-1] == 0 {
			end--
		}
		if end == len(p) {
			return p, in, g.fail(alertUnexpectedMessage)
		}
		end--
		content := inner[len(p):end]
		if inner[end] == contentApplication && len(content) > 0 && len(g.message) == 0 {
			g.useless = 0
			p = inner[:end]
			continue
		}
		if err := g.other(inner[end], content); err != nil {
			return p, in, err
		}
	}
	return p, in, g.err
}

// other takes a record that brings no data.
func (g *gcmLayer) other(kind byte, content []byte) error {
	if kind == contentHandshake && len(content) > 0 {
		return g.handshake(content)
	}
	if g.useless++; g.useless > maxUseless {
		return g.fail(alertUnexpectedMessage)
	}
	switch {
	case len(g.message) > 0: // nothing may come in between (RFC 8446, section 5.1)
		return g.fail(alertUnexpectedMessage)
	case kind == contentApplication:
		return nil
	case kind != contentAlert || len(content) != 2:
		return g.fail(alertUnexpectedMessage)
	}
	switch content[1] {
	case alertCloseNotify:
		g.err = io.EOF
	case alertUserCanceled: // the close_notify follows
	default:
		g.err = &net.OpError{Op: "remote error", Err: tls.AlertError(content[1])}
	}
	return g.err
}

// handshake takes a part of the peer's handshake messages (RFC 8446, section 4.6).
func (g *gcmLayer) handshake(part []byte) error {
	g.message = append(g.message, part...)
	for len(g.message) >= 4 {
		n := 4 + int(binary.BigEndian.Uint32(g.message)&0xffffff)
		if n > maxMessage || g.server && n > keyUpdateLen {
			return g.fail(alertUnexpectedMessage)
		}
		if len(g.message) < n {
			return nil
		}
		if g.useless++; g.useless > maxUseless {
			return g.fail(alertUnexpectedMessage)
		}
		m, behind := g.message[:n], g.message[n:]
		switch {
		case m[0] == messageTicket && !g.server: // sessions are not resumed
		case m[0] == messageKeyUpdate && len(behind) > 0: // what is behind it was sealed with the old key
			return g.fail(alertUnexpectedMessage)
		case m[0] == messageKeyUpdate && n != keyUpdateLen:
			return g.fail(alertDecodeError)
		case m[0] == messageKeyUpdate && m[4] > 1:
			return g.fail(alertIllegalParameter)
		case m[0] == messageKeyUpdate:
			g.update = g.update || m[4] == 1
			if err := g.in.next(); err != nil {
				g.err = err
				return err
			}
		default:
			return g.fail(alertUnexpectedMessage)
		}
		g.message = behind
	}
	if len(g.message) == 0 {
		g.message = nil
	}
	return nil
}

func (g *gcmLayer) owes() bool { return g.owed || g.update && g.err == nil }

func (g *gcmLayer) seal(dst, p []byte) ([]byte, error) {
	if g.owed {
		g.owed = false
		return g.record(dst, contentAlert, []byte{2, g.alert}), nil
	}
	if g.err != nil && !errors.Is(g.err, io.EOF) {
		return dst, nil // nobody reads it
	}
	for first := true; first || len(p) > 0; first = false {
		if g.update || g.out.seq >= keyLimit {
			g.update = false
			dst = g.record(dst, contentHandshake, []byte{messageKeyUpdate, 0, 0, 1, 0})
			if err := g.out.next(); err != nil {
				g.err = err
				return dst, err
			}
		}
		if n := min(len(p), maxRecord); n > 0 {
			dst = g.record(dst, contentApplication, p[:n])
			p = p[n:]
		}
	}
	return dst, nil
}

func (g *gcmLayer) closing(dst []byte) []byte {
	if g.err != nil && !errors.Is(g.err, io.EOF) {
		return dst
	}
	return g.record(dst, contentAlert, []byte{1, alertCloseNotify})
}

// record appends one record, which is sealed where it lies.
func (g *gcmLayer) record(dst []byte, kind byte, content []byte) []byte {
	n := len(content) + 1 + tagLen
	at := len(dst) + recordHeader
	dst = append(dst, contentApplication, 3, 3, byte(n>>8), byte(n)) // the version is that of TLS 1.2 (RFC 8446, section 5.1)
	dst = append(dst, content...)
	dst = append(dst, kind)
	return g.out.aead.Seal(dst[:at], g.out.nonce(), dst[at:], dst[at-recordHeader:at])
}
