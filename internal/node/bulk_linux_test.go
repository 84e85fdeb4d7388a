package node

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"
)

// send sends n bytes of the stream that seed names by w, then a FIN, and returns their sum.
func send(w io.Writer, c *net.TCPConn, seed byte, n int64) ([]byte, error) {
	h := sha256.New()
	random := rand.NewChaCha8([32]byte{seed})
	if _, err := io.Copy(io.MultiWriter(h, w), io.LimitReader(random, n)); err != nil {
		return nil, err
	}
	return h.Sum(nil), c.CloseWrite()
}

// receive reads until the FIN and returns the number of bytes and their sum.
func receive(c *net.TCPConn) (int64, []byte, error) {
	h := sha256.New()
	n, err := io.Copy(h, struct{ io.Reader }{c})
	return n, h.Sum(nil), err
}

// transfer sends n bytes from one end to the other and compares.
func transfer(from, to *net.TCPConn, seed byte, n int64) error {
	return transferBy(struct{ io.Writer }{from}, from, to, seed, n)
}

// transferBy is transfer through a writer of from.
func transferBy(w io.Writer, from, to *net.TCPConn, seed byte, n int64) error {
	var sum []byte
	var sendErr error
	var sent sync.WaitGroup
	sent.Go(func() { sum, sendErr = send(w, from, seed, n) })
	got, gotSum, err := receive(to)
	sent.Wait()
	switch {
	case sendErr != nil || err != nil:
		return fmt.Errorf("after %d of %d bytes: %w", got, n, errors.Join(sendErr, err))
	case got != n || !bytes.Equal(sum, gotSum):
		return fmt.Errorf("%d bytes with the sum %x arrived, of %d with %x", got, gotSum, n, sum)
	}
	return nil
}

// [bulkBytes] each way, first one after the other, then both at once.
func TestNetnsBulkArrivesIntact(t *testing.T) { eachBackend(t, checkBulkArrivesIntact) }

func checkBulkArrivesIntact(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	for i, w := range b.ways(8080) {
		for _, both := range []bool{false, true} {
			client, server := b.connect(t, w)
			limit := time.Now().Add(60 * time.Second)
			client.SetDeadline(limit)
			server.SetDeadline(limit)
			start := time.Now()
			var down sync.WaitGroup
			var downErr error
			receiveDown := func() { downErr = transfer(server, client, byte(2*i+1), bulkBytes) }
			if both {
				down.Go(receiveDown)
			}
			upErr := transfer(client, server, byte(2*i), bulkBytes)
			down.Wait()
			if !both {
				receiveDown()
			}
			if err := errors.Join(upErr, downErr); err != nil {
				t.Errorf("%s, %s, at once %t: %v", w.name, w.addr, both, err)
			}
			t.Logf("%s, %s, at once %t: %.0f Mbit/s", w.name, w.addr, both, 2*bulkBytes*8/1e6/time.Since(start).Seconds())
			client.Close()
			server.Close()
		}
	}
	awaitNoneOpen(t, a, z)
}

// An application that writes in pieces of all sizes.
func TestNetnsOddWrites(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) { t.Run("DP-124", func(t *testing.T) { checkOddWrites(t, b) }) })
}

func checkOddWrites(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	for i, w := range b.ways(8080) {
		client, server := b.connect(t, w)
		from, to := client, server
		if i%2 == 1 {
			from, to = server, client
		}
		limit := time.Now().Add(60 * time.Second)
		client.SetDeadline(limit)
		server.SetDeadline(limit)
		if err := transferBy(&pieces{w: from}, from, to, byte(i), 32<<20); err != nil {
			t.Errorf("%s, %s: %v", w.name, w.addr, err)
		}
		client.Close()
		server.Close()
	}
	awaitNoneOpen(t, a, z)
}

// pieces writes what it is given in pieces, each of another odd size.
type pieces struct {
	w io.Writer
	n int
}

func (o *pieces) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		const prime = 6151
		o.n += prime
		n := min(len(rest), 1+o.n%(20<<10)|1)
		if _, err := o.w.Write(rest[:n]); err != nil {
			return len(p) - len(rest), err
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// Several connections share tunnels and loops, each with a tenth of [bulkBytes] both ways.
func TestNetnsParallelBulkArrivesIntact(t *testing.T) { eachBackend(t, checkParallelBulkArrivesIntact) }

func checkParallelBulkArrivesIntact(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	const size = bulkBytes / 10
	for _, w := range b.ways(8080)[:2] { // the mesh's
		var ends [8][2]*net.TCPConn
		for i := range ends {
			ends[i][0], ends[i][1] = b.connect(t, w)
		}
		var all sync.WaitGroup
		for i, e := range ends {
			for way := range 2 {
				all.Go(func() {
					limit := time.Now().Add(60 * time.Second)
					e[way].SetDeadline(limit)
					if err := transfer(e[way], e[1-way], byte(2*i+way), size); err != nil {
						t.Errorf("%s, connection %d, direction %d: %v", w.addr, i, way, err)
					}
				})
			}
		}
		all.Wait()
		for _, e := range ends {
			e[0].Close()
			e[1].Close()
		}
	}
	awaitNoneOpen(t, a, z)
}
