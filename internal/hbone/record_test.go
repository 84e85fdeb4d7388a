package hbone

import (
	"bufio"
	"bytes"
	"crypto/fips140"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Keys, and records that were sealed with them, of RFC 8448, section 3.
func TestRecordKeysRFC8448(t *testing.T) {
	client := unhex(t, "9e40646ce79a7f9dc05af8889bce6552 875afa0b06df0087f792ebb7c17504a5")
	server := unhex(t, "a11af9f05531f856ad47116b45a95032 8204b4f44bfb6b3a4b4f1f3fcb631643")
	keys := new(secrets)
	for label, secret := range map[string][]byte{"CLIENT_HANDSHAKE_TRAFFIC_SECRET": make([]byte, 32), "CLIENT_TRAFFIC_SECRET_0": client, "SERVER_TRAFFIC_SECRET_0": server} {
		if _, err := fmt.Fprintf(keys, "%s %x %x\n", label, make([]byte, 32), secret); err != nil {
			t.Fatal(err)
		}
	}
	s := suites[tls.TLS_AES_128_GCM_SHA256]
	g, err := newGCMLayer(s, keys.server, keys.client, false)
	if err != nil {
		t.Fatal(err)
	}
	if want := unhex(t, "5b78923dee08579033e523d9"); !bytes.Equal(g.out.iv[:], want) {
		t.Errorf("the client's iv is %x, want %x", g.out.iv, want)
	}
	if want := unhex(t, "cf782b88dd83549aadf1e984"); !bytes.Equal(g.in.iv[:], want) {
		t.Errorf("the server's iv is %x, want %x", g.in.iv, want)
	}
	text := make([]byte, 50)
	for i := range text {
		text[i] = byte(i)
	}
	sealed, err := g.seal(nil, text)
	want := unhex(t, `17 03 03 00 43 a2 3f 70 54 b6 2c 94 d0 af fa fe 82 28 ba 55 cb ef ac ea 42 f9 14 aa 66 bc ab 3f 2b 98 19 a8 a5 b4 6b 39 5b d5 4a 9a
		20 44 1e 2b 62 97 4e 1f 5a 62 92 a2 97 70 14 bd 1e 3d ea e6 3a ee bb 21 69 49 15 e4`)
	if err != nil || !bytes.Equal(sealed, want) {
		t.Errorf("sealed %x, %v, want %x", sealed, err, want)
	}
}

// layers returns the two ends of a connection with a suite.
func layers(t testing.TB, id uint16) (client, server *gcmLayer) {
	t.Helper()
	s := suites[id]
	a, b := pattern(s.hash().Size()), bytes.Repeat([]byte{7}, s.hash().Size())
	client, err := newGCMLayer(s, a, b, false)
	if err != nil {
		t.Fatal(err)
	}
	if server, err = newGCMLayer(s, b, a, true); err != nil {
		t.Fatal(err)
	}
	return client, server
}

func mustSeal(t testing.TB, l recordLayer, p []byte) []byte {
	t.Helper()
	b, err := l.seal(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What was sealed is opened, however it is cut and whatever key is used.
func TestRecordsArriveAsTheyWereSealed(t *testing.T) {
	for id := range suites {
		t.Run(tls.CipherSuiteName(id), func(t *testing.T) {
			client, server := layers(t, id)
			for _, size := range []int{1, 100, maxRecord, maxRecord + 1, 100_000} {
				text := pattern(size)
				sealed := mustSeal(t, client, text)
				if n := (size + maxRecord - 1) / maxRecord; len(sealed) != size+n*(recordHeader+1+tagLen) {
					t.Errorf("%d bytes are sealed in %d", size, len(sealed))
				}
				for _, cut := range []int{1, 4, 5, 1000, 20_000, len(sealed)} {
					if size > maxRecord && cut < 1000 {
						continue
					}
					var got, rest []byte
					from := *server // the same keys again
					for in := sealed; len(in) > 0; {
						n := min(cut, len(in))
						rest = append(rest, in[:n]...)
						in = in[n:]
						var err error
						if got, rest, err = from.open(got, rest); err != nil {
							t.Fatal(err)
						}
					}
					if len(rest) > 0 || !bytes.Equal(got, text) {
						t.Errorf("%d bytes in pieces of %d: %d arrive, %d are left", size, cut, len(got), len(rest))
					}
				}
				if _, _, err := server.open(nil, sealed); err != nil {
					t.Fatal(err)
				}
			}
			client.out.seq, server.in.seq = keyLimit-1, keyLimit-1
			text := pattern(3 * maxRecord)
			got, rest, err := server.open(nil, mustSeal(t, client, text))
			if err != nil || len(rest) > 0 || !bytes.Equal(got, text) {
				t.Errorf("at the end of a key: %d bytes, %d left, %v", len(got), len(rest), err)
			}
			if client.out.seq != 2 || server.owes() {
				t.Errorf("%d records with the next key, and an answer is owed: %t; want 2 and none", client.out.seq, server.owes())
			}
			// The other direction has another key, and is not touched.
			if got, _, err := client.open(nil, mustSeal(t, server, text[:9])); err != nil || !bytes.Equal(got, text[:9]) {
				t.Errorf("back: %q, %v", got, err)
			}
			client.out.seq = keyLimit // changed also where there is nothing to send
			if b := mustSeal(t, client, nil); len(b) == 0 || client.out.seq != 0 {
				t.Errorf("a full key sends %d bytes, and is at %d", len(b), client.out.seq)
			}
		})
	}
}

// Sealing copies once, into memory that is there, and opening not at all: neither allocates.
func TestRecordsAllocateNothing(t *testing.T) {
	client, server := layers(t, tls.TLS_AES_128_GCM_SHA256)
	text, sealed, plain := pattern(64<<10), make([]byte, 0, 128<<10), make([]byte, 0, 128<<10)
	n := testing.AllocsPerRun(20, func() {
		b, err := client.seal(sealed, text)
		if err != nil {
			t.Fatal(err)
		}
		got, rest, err := server.open(plain, b)
		if err != nil || len(got) != len(text) || len(rest) > 0 {
			t.Fatalf("%d bytes, %d left, %v", len(got), len(rest), err)
		}
	})
	if n > 0 {
		t.Errorf("%v allocations for 64 KiB", n)
	}
}

// What a peer may not send ends the connection with the alert of RFC 8446, and nothing behind it is opened.
func TestRecordsThatAreRefused(t *testing.T) {
	app := func(p ...byte) func(g *gcmLayer) []byte {
		return func(g *gcmLayer) []byte { return g.record(nil, contentApplication, p) }
	}
	sealed := func(kind byte, p ...byte) func(g *gcmLayer) []byte {
		return func(g *gcmLayer) []byte { return g.record(nil, kind, p) }
	}
	several := func(parts ...func(g *gcmLayer) []byte) func(g *gcmLayer) []byte {
		return func(g *gcmLayer) (all []byte) {
			for _, p := range parts {
				all = append(all, p(g)...)
			}
			return all
		}
	}
	raw := func(b ...byte) func(*gcmLayer) []byte { return func(*gcmLayer) []byte { return b } }
	times := func(n int, f func(g *gcmLayer) []byte) func(g *gcmLayer) []byte {
		return func(g *gcmLayer) (all []byte) {
			for range n {
				all = append(all, f(g)...)
			}
			return all
		}
	}
	for _, tt := range []struct {
		name  string
		to    string // client or server; both if empty
		send  func(g *gcmLayer) []byte
		alert uint8
	}{
		{"in clear", "", raw(contentAlert, 3, 3, 0, 2, 2, 40), alertUnexpectedMessage},
		{"change_cipher_spec", "", raw(20, 3, 3, 0, 1, 1), alertUnexpectedMessage},
		{"HTTP", "", raw([]byte("GET / HTTP/1.1\r\n")...), alertUnexpectedMessage},
		{"too long", "", raw(contentApplication, 3, 3, 0x41, 1), alertRecordOverflow},
		{"shorter than a tag", "", raw(contentApplication, 3, 3, 0, 15), alertBadRecordMAC},
		{"only a tag", "", func(g *gcmLayer) []byte {
			b := []byte{contentApplication, 3, 3, 0, tagLen}
			return g.out.aead.Seal(b, g.out.nonce(), nil, b)
		}, alertUnexpectedMessage},
		{"only zeros", "", sealed(0, make([]byte, 100)...), alertUnexpectedMessage},
		{"text that is too long", "", app(make([]byte, maxRecord+1)...), alertRecordOverflow},
		{"another key", "", func(g *gcmLayer) []byte {
			_ = g.out.next()
			return app(1)(g)
		}, alertBadRecordMAC},
		{"twice", "", func(g *gcmLayer) []byte {
			b := app(1)(g)
			return append(b, b...)
		}, alertBadRecordMAC},
		{"left out", "", func(g *gcmLayer) []byte {
			app(1)(g)
			return app(2)(g)
		}, alertBadRecordMAC},
		{"a bit in the header", "", func(g *gcmLayer) []byte {
			b := app(1)(g)
			b[2] ^= 1
			return b
		}, alertBadRecordMAC},
		{"a bit in the text", "", func(g *gcmLayer) []byte {
			b := app(1)(g)
			b[recordHeader] ^= 1
			return b
		}, alertBadRecordMAC},
		{"unknown type", "", sealed(99, 1), alertUnexpectedMessage},
		{"an empty handshake message", "", sealed(contentHandshake), alertUnexpectedMessage},
		{"a long alert", "", sealed(contentAlert, 1, 0, 0), alertUnexpectedMessage},
		{"a short alert", "", sealed(contentAlert, 1), alertUnexpectedMessage},
		{"an empty alert", "", sealed(contentAlert), alertUnexpectedMessage},
		{"padding beyond a record", "", func(g *gcmLayer) []byte { return padded(g, make([]byte, maxRecord), 5) }, alertRecordOverflow},
		{"a ticket for a server", "server", sealed(contentHandshake, messageTicket, 0, 0, 0), alertUnexpectedMessage},
		{"a request for a certificate", "", sealed(contentHandshake, 13, 0, 0, 0), alertUnexpectedMessage},
		{"a ClientHello", "", sealed(contentHandshake, 1, 0, 0, 0), alertUnexpectedMessage},
		{"a message without an end", "", sealed(contentHandshake, messageTicket, 0xff, 0xff, 0xff), alertUnexpectedMessage},
		{"data within a message", "", several(sealed(contentHandshake, messageKeyUpdate, 0, 0), app(1)), alertUnexpectedMessage},
		{"nothing within a message", "", several(sealed(contentHandshake, messageKeyUpdate, 0, 0), app()), alertUnexpectedMessage},
		{"an end within a message", "", several(sealed(contentHandshake, messageKeyUpdate, 0, 0), sealed(contentAlert, 1, 0)), alertUnexpectedMessage},
		{"a short KeyUpdate", "", sealed(contentHandshake, messageKeyUpdate, 0, 0, 0), alertDecodeError},
		{"a long KeyUpdate", "client", sealed(contentHandshake, messageKeyUpdate, 0, 0, 2, 0, 0), alertDecodeError},
		{"a message that is longer than a client's", "server", sealed(contentHandshake, messageTicket, 0, 0, 9), alertUnexpectedMessage},
		{"a strange KeyUpdate", "", sealed(contentHandshake, messageKeyUpdate, 0, 0, 1, 2), alertIllegalParameter},
		{"a KeyUpdate with something behind it", "", sealed(contentHandshake, messageKeyUpdate, 0, 0, 1, 0, messageTicket), alertUnexpectedMessage},
		{"a KeyUpdate with the old key behind it", "", several(sealed(contentHandshake, messageKeyUpdate, 0, 0, 1, 0), app(1)), alertBadRecordMAC},
		{"a flood of nothing", "", times(maxUseless+1, app()), alertUnexpectedMessage},
		{"a flood of tickets", "client", times(maxUseless+1, sealed(contentHandshake, messageTicket, 0, 0, 0)), alertUnexpectedMessage},
		{"a flood of tickets in one record", "client", sealed(contentHandshake, bytes.Repeat([]byte{messageTicket, 0, 0, 0}, maxUseless+1)...), alertUnexpectedMessage},
		{"a flood of user_canceled", "", times(maxUseless+1, sealed(contentAlert, 1, alertUserCanceled)), alertUnexpectedMessage},
	} {
		for _, to := range []string{"client", "server"} {
			if tt.to != "" && tt.to != to {
				continue
			}
			t.Run(tt.name+" to the "+to, func(t *testing.T) {
				g, peer := layers(t, tls.TLS_AES_128_GCM_SHA256)
				if to == "server" {
					g, peer = peer, g
				}
				before := peer.record(nil, contentApplication, []byte("before"))
				got, _, err := g.open(nil, append(before, tt.send(peer)...))
				var alert tls.AlertError
				if !errors.As(err, &alert) || uint8(alert) != tt.alert || !strings.HasPrefix(err.Error(), "local error: tls: ") {
					t.Errorf("%v, want alert %d of ours", err, tt.alert)
				}
				// A record that was refused for what is behind it has been opened.
				if !strings.HasPrefix(string(got), "before") || len(got) > len("before")+1 {
					t.Errorf("%q is opened", got)
				}
				if _, _, again := g.open(nil, app(1)(peer)); again != err {
					t.Errorf("opened again: %v", again)
				}
				if !g.owes() {
					t.Error("no alert is owed")
				}
				// The peer is told once, and gets nothing else.
				told := mustSeal(t, g, []byte("more"))
				more := append(mustSeal(t, g, []byte("more")), g.closing(nil)...)
				if _, _, err := peer.open(nil, told); !errors.As(err, &alert) || uint8(alert) != tt.alert || !strings.HasPrefix(err.Error(), "remote error: tls: ") {
					t.Errorf("the peer has %v, want alert %d", err, tt.alert)
				}
				if len(more) > 0 || g.owes() {
					t.Errorf("%d bytes follow", len(more))
				}
			})
		}
	}
}

// padded appends a record of data with zeros behind its type.
func padded(g *gcmLayer, p []byte, zeros int) []byte {
	inner := append(append(bytes.Clone(p), contentApplication), make([]byte, zeros)...)
	b := []byte{contentApplication, 3, 3, 0, 0}
	binary.BigEndian.PutUint16(b[3:], uint16(len(inner)+tagLen))
	return g.out.aead.Seal(b, g.out.nonce(), inner, b)
}

// What a peer may send beside data: tickets, other keys, padding, and an end.
func TestRecordsBesideData(t *testing.T) {
	client, server := layers(t, tls.TLS_AES_256_GCM_SHA384)
	var in []byte
	ticket := append([]byte{messageTicket, 0, 0x75, 0x30}, make([]byte, 30_000)...) // of 30,000 bytes, in 61 records; another begins in the last
	for b := append(ticket, messageTicket); len(b) > 0; {
		n := min(len(b), 500)
		in = server.record(in, contentHandshake, b[:n])
		b = b[n:]
	}
	in = server.record(in, contentHandshake, []byte{0, 0, 1, 9, messageTicket, 0, 0, 0}) // the rest of it, and one more
	in = append(in, mustSeal(t, server, []byte("one "))...)
	in = server.record(in, contentApplication, nil)
	in = server.record(in, contentAlert, []byte{1, alertUserCanceled})
	for range 3 {
		in = server.record(in, contentHandshake, []byte{messageKeyUpdate, 0, 0, 1, 1})
		if err := server.out.next(); err != nil {
			t.Fatal(err)
		}
	}
	in = append(in, padded(server, []byte("two "), 300)...)
	in = append(in, server.closing(nil)...)
	in = append(in, "anything"...)

	got, rest, err := client.open(nil, in)
	if string(got) != "one two " || err != io.EOF || string(rest) != "anything" {
		t.Errorf("%q, %d bytes left, %v; want one, two and the end", got, len(rest), err)
	}
	// One answer to three requests, with what is sent next; our side is still open.
	sealed := mustSeal(t, client, []byte("answer"))
	if got, _, err := server.open(nil, sealed); err != nil || string(got) != "answer" || server.in.seq != 1 {
		t.Errorf("%q with record %d of the key, %v", got, server.in.seq, err)
	}
	if got, _, err := server.open(nil, client.closing(nil)); err != io.EOF || len(got) > 0 {
		t.Errorf("the end: %q, %v", got, err)
	}
}

// Over the life of a connection there may be any number of records without data, if there is data in between.
func TestRecordsWithoutDataAreNoFlood(t *testing.T) {
	client, server := layers(t, tls.TLS_AES_128_GCM_SHA256)
	for range 3 * maxUseless {
		in := server.record(nil, contentApplication, nil)
		in = server.record(in, contentHandshake, []byte{messageTicket, 0, 0, 0})
		if got, _, err := client.open(nil, append(in, mustSeal(t, server, []byte("x"))...)); err != nil || string(got) != "x" {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

// An answer is owed to a request for another key, also where nothing else is to be sent.
func TestRecordsAnswerKeyUpdate(t *testing.T) {
	client, server := layers(t, tls.TLS_AES_128_GCM_SHA256)
	in := client.record(nil, contentHandshake, []byte{messageKeyUpdate, 0, 0, 1, 1})
	if _, _, err := server.open(nil, in); err != nil || !server.owes() {
		t.Fatalf("%v, an answer is owed: %t", err, server.owes())
	}
	if got, rest, err := client.open(nil, mustSeal(t, server, nil)); err != nil || len(got)+len(rest) > 0 || client.owes() || server.owes() {
		t.Errorf("%q, %d left, %v, owed: %t, %t", got, len(rest), err, client.owes(), server.owes())
	}
}

// An alignedConn never reads beyond a record, as a recordConn.
type alignedConn struct {
	net.Conn
	left int
	head []byte
}

func (c *alignedConn) Read(p []byte) (int, error) {
	if c.left == 0 && len(c.head) == 0 {
		h := make([]byte, recordHeader)
		if _, err := io.ReadFull(c.Conn, h); err != nil {
			return 0, err
		}
		c.head, c.left = h, int(binary.BigEndian.Uint16(h[3:]))
	}
	if n := copy(p, c.head); n > 0 {
		c.head = c.head[n:]
		return n, nil
	}
	n, err := c.Conn.Read(p[:min(c.left, len(p))])
	c.left -= n
	return n, err
}

// ownLayer makes a handshake on conn and returns the own layer for what follows.
func ownLayer(t *testing.T, conn net.Conn, cfg *tls.Config, server bool) *gcmLayer {
	t.Helper()
	if fips140.Enabled() {
		t.Skip("FIPS 140 mode: crypto/tls seals by itself")
	}
	var keys secrets
	cfg = forLink(cfg, &keys)
	aligned := &alignedConn{Conn: conn}
	tc := tls.Client(aligned, cfg)
	if server {
		tc = tls.Server(aligned, cfg)
	}
	if err := tc.Handshake(); err != nil { //nolint:noctx // bounded by the deadline of conn
		t.Fatal(err)
	}
	l, err := newRecordLayer(tc, &recordConn{}, &keys, server)
	if err != nil {
		t.Fatal(err)
	}
	g, ok := l.(*gcmLayer)
	if !ok {
		t.Fatalf("%s has no own layer", tls.CipherSuiteName(tc.ConnectionState().CipherSuite))
	}
	return g
}

// A layerConn is a connection with the own layer, blocking.
type layerConn struct {
	t    *testing.T
	conn net.Conn
	g    *gcmLayer
	kept []byte
}

func (c *layerConn) write(p []byte) {
	c.t.Helper()
	sealed, err := c.g.seal(nil, p)
	if err == nil {
		_, err = c.conn.Write(sealed)
	}
	if err != nil {
		c.t.Error(err)
	}
}

// read returns the next bytes of data, and answers what is owed.
func (c *layerConn) read() (got []byte, err error) {
	for len(got) == 0 && err == nil {
		got, err = c.readOnce()
	}
	return got, err
}

// readOnce is read until something has arrived, of whatever kind.
func (c *layerConn) readOnce() ([]byte, error) {
	b := make([]byte, 64<<10)
	n, err := c.conn.Read(b)
	if err != nil {
		return nil, err
	}
	got, rest, err := c.g.open(nil, append(c.kept, b[:n]...))
	c.kept = rest
	if c.g.owes() {
		c.write(nil)
	}
	return got, err
}

func (c *layerConn) readAll(n int) []byte {
	c.t.Helper()
	var all []byte
	for len(all) < n {
		b, err := c.read()
		if err != nil {
			c.t.Fatal(err)
		}
		all = append(all, b...)
	}
	return all
}

// The own layer against crypto/tls, on both sides, with other keys on the way.
func TestRecordsWithCryptoTLS(t *testing.T) {
	p := newPKI(t)
	for _, server := range []bool{false, true} {
		t.Run(map[bool]string{false: "client", true: "server"}[server], func(t *testing.T) {
			a, b := tcpPair(t)
			defer a.Close()
			defer b.Close()
			for _, c := range []net.Conn{a, b} {
				_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			}
			mine, theirs := p.clientTLS(client1.String()), p.serverTLS(server1.String())
			peer := tls.Server(b, theirs)
			if server {
				mine, theirs = theirs, mine
				// The config that counts is another one, which would send tickets.
				real := mine
				real.SetSessionTicketKeys([][32]byte{{1}})
				theirs.ClientSessionCache = tls.NewLRUClientSessionCache(1)
				mine = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return real, nil }}
				peer = tls.Client(b, theirs)
			}
			text := pattern(1 << 20)
			ended := make(chan error, 1)
			go func() { // an echo
				_, err := io.Copy(peer, peer)
				ended <- errors.Join(err, peer.CloseWrite())
			}()
			c := &layerConn{t: t, conn: a, g: ownLayer(t, a, mine, server)}
			for _, size := range []int{1, 100_000, 1 << 20} {
				sealed := mustSeal(t, c.g, text[:size])
				go func() { _, _ = a.Write(sealed) }()
				if got := c.readAll(size); !bytes.Equal(got, text[:size]) {
					t.Errorf("%d bytes of %d, not as they were sent", len(got), size)
				}
				c.g.update = true // with another key from here on
			}
			if _, err := a.Write(c.g.closing(nil)); err != nil {
				t.Fatal(err)
			}
			if got, err := c.read(); err != io.EOF {
				t.Errorf("%q, %v, want the end", got, err)
			}
			if err := <-ended; err != nil {
				t.Errorf("the peer: %v", err)
			}
		})
	}
}

// Another stack: OpenSSL sends tickets, and changes keys and asks for ours when it is told to.
func TestRecordsWithOpenSSL(t *testing.T) {
	path, err := exec.LookPath("openssl")
	if err != nil {
		if os.Getenv("ZTUN_REQUIRE_NETNS") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	p := newPKI(t)
	dir := t.TempDir()
	writePEM(t, dir, p.leaf(server1.String()))
	files := []string{"-cert", filepath.Join(dir, "cert.pem"), "-key", filepath.Join(dir, "key.pem"), "-tls1_3", "-alpn", "h2"}

	// converse talks with openssl, which is at its standard streams, until it is told to end.
	converse := func(t *testing.T, c *layerConn, to io.Writer, from *bufio.Reader) {
		say := func(s string) {
			t.Helper()
			if _, err := io.WriteString(to, s); err != nil {
				t.Fatal(err)
			}
		}
		hear := func(want string) {
			t.Helper()
			for {
				line, err := from.ReadString('\n')
				if err != nil {
					t.Fatalf("openssl ended before it printed %q: %v", want, err)
				}
				if strings.Contains(line, want) {
					return
				}
			}
		}
		for i, command := range []string{"", "k\n", "K\n", "K\n", "k\n"} { // K asks for our keys, too
			say(command)
			<-time.After(100 * time.Millisecond) // it reads a command only at the beginning of what it reads
			text := fmt.Sprintf("text %d\n", i)
			say(text)
			if got := c.readAll(len(text)); string(got) != text {
				t.Errorf("%q from openssl, want %q", got, text)
			}
			c.write(fmt.Appendf(nil, "answer %d\n", i))
			hear(fmt.Sprintf("answer %d", i))
		}
		say("Q\n")
		if got, err := c.read(); err != io.EOF {
			t.Errorf("%q, %v, want the end", got, err)
		}
	}
	start := func(t *testing.T, args ...string) (in io.WriteCloser, out *bufio.Reader) {
		cmd := exec.CommandContext(t.Context(), path, args...) //nolint:gosec // of this test
		cmd.WaitDelay = 5 * time.Second
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = in.Close()
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return in, bufio.NewReader(stdout)
	}

	t.Run("ChaCha20 is not ours", func(t *testing.T) {
		if fips140.Enabled() {
			t.Skip("FIPS 140 mode has none")
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // at once
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		start(t, append([]string{"s_client", "-connect", ln.Addr().String(), "-ciphersuites", "TLS_CHACHA20_POLY1305_SHA256"}, files...)...)
		conn, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var keys secrets
		tc := tls.Server(conn, forLink(p.serverTLS(server1.String()), &keys))
		if err := tc.Handshake(); err != nil { //nolint:noctx // at once
			t.Fatal(err)
		}
		if l, err := newRecordLayer(tc, &recordConn{}, &keys, true); err != nil || !isA[*tlsLayer](l) {
			t.Errorf("%s has %T, %v", tls.CipherSuiteName(tc.ConnectionState().CipherSuite), l, err)
		}
		if keys.client != nil || keys.server != nil {
			t.Error("the secrets are kept")
		}
	})
	for _, name := range []string{"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384"} {
		t.Run("server "+name, func(t *testing.T) {
			args := append([]string{"s_server", "-accept", "127.0.0.1:0", "-naccept", "1", "-Verify", "1", "-ciphersuites", name}, files...)
			in, out := start(t, args...)
			var addr string
			for addr == "" {
				line, err := out.ReadString('\n')
				if err != nil {
					t.Fatal(err)
				}
				if m := regexp.MustCompile(`^ACCEPT (127\.0\.0\.1:[0-9]+)`).FindStringSubmatch(line); m != nil {
					addr = m[1]
				}
			}
			conn, err := net.Dial("tcp", addr) //nolint:noctx // at once
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			converse(t, &layerConn{t: t, conn: conn, g: ownLayer(t, conn, p.clientTLS(client1.String()), false)}, in, out)
		})
		t.Run("client "+name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // at once
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			in, out := start(t, append([]string{"s_client", "-connect", ln.Addr().String(), "-ciphersuites", name}, files...)...)
			conn, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			converse(t, &layerConn{t: t, conn: conn, g: ownLayer(t, conn, p.serverTLS(server1.String()), true)}, in, out)
		})
	}
}

func writePEM(t *testing.T, dir string, c tls.Certificate) {
	t.Helper()
	key, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]*pem.Block{"cert.pem": {Type: "CERTIFICATE", Bytes: c.Certificate[0]}, "key.pem": {Type: "PRIVATE KEY", Bytes: key}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// Whatever a peer that has the keys sends, and however it is cut: what is opened is the data of records before the first that is
// refused, and the layer neither panics nor holds more than a message.
func FuzzRecords(f *testing.F) {
	f.Add([]byte{contentApplication, 1, 'a', contentHandshake, 5, messageKeyUpdate, 0, 0, 1, 1, contentApplication, 1, 'b', contentAlert, 2, 1, 0}, uint16(7), true)
	f.Add([]byte{contentHandshake, 5, messageTicket, 0, 0, 1, 0, contentApplication, 0}, uint16(1), false)
	f.Fuzz(func(t *testing.T, script []byte, cut uint16, toServer bool) {
		g, peer := layers(t, tls.TLS_AES_128_GCM_SHA256)
		if toServer {
			g, peer = peer, g
		}
		var in, want []byte
		for b := script; len(b) >= 2; {
			kind, n := b[0], min(int(b[1]), len(b)-2)
			content := b[2 : 2+n]
			b = b[2+n:]
			in = peer.record(in, kind, content)
			if kind == 0 { // it is padding, and what is before it the type
				if content = bytes.TrimRight(content, "\x00"); len(content) > 0 {
					kind, content = content[len(content)-1], content[:len(content)-1]
				}
				n = len(content)
			}
			if kind == contentHandshake && n == 5 && content[0] == messageKeyUpdate {
				_ = peer.out.next()
			}
			if kind == contentApplication {
				want = append(want, content...)
			}
		}
		var got, kept []byte
		var err error
		for rest := in; len(rest) > 0 && err == nil; {
			n := min(len(rest), int(cut)+1)
			kept = append(kept, rest[:n]...)
			rest = rest[n:]
			got, kept, err = g.open(got, kept)
			if len(g.message) > maxMessage {
				t.Errorf("%d bytes of a message are kept", len(g.message))
			}
		}
		if !bytes.HasPrefix(want, got) || err == nil && len(got) != len(want) {
			t.Errorf("%q is opened, %q was sent, %v", got, want, err)
		}
		// The peer hears of it: by an alert, or by data if nothing was wrong.
		told, _, perr := peer.open(nil, mustSeal(t, g, []byte("x")))
		var local *net.OpError
		if refused := errors.As(err, &local) && local.Op == "local error"; refused != (perr != nil) || (err == nil || err == io.EOF) != (string(told) == "x") {
			t.Errorf("%v here, and the peer has %q, %v", err, told, perr)
		}
	})
}

// BenchmarkRecords is what the records of a turn cost, in memory that is there.
func BenchmarkRecords(b *testing.B) {
	const size = 128 << 10
	client, server := layers(b, tls.TLS_AES_128_GCM_SHA256)
	text, sealed, plain := pattern(size), make([]byte, 0, 2*size), make([]byte, 0, 2*size)
	b.Run("seal", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			_, _ = client.seal(sealed, text)
		}
	})
	in := mustSeal(b, client, text)
	b.Run("open", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			server.in.seq = client.out.seq - size/maxRecord
			if _, _, err := server.open(plain, in); err != nil {
				b.Fatal(err)
			}
		}
	})
}
