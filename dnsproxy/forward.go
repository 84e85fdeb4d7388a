package dnsproxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/miekg/dns"
)

// forward asks the resolver that the application addressed. A resolver that cannot be asked, or does not answer, gives SERVFAIL.
func (s *Server) forward(ctx context.Context, q *query, server netip.AddrPort, buf []byte) ([]byte, error) {
	id := uint16(s.cfg.Rand()) // RFC 5452, section 9.2
	msg := bytes.Clone(q.msg)
	binary.BigEndian.PutUint16(msg, id)

	// What the client takes, and one byte more: a datagram that fills it was longer.
	limit := maxTCP
	if !q.tcp {
		limit = max(q.udpSize, minUDP)
	}
	answer, err := s.cfg.Upstream.Exchange(ctx, server, q.tcp, msg, sized(buf, q, limit+1), func(answer []byte) bool {
		return len(answer) >= headerLen && binary.BigEndian.Uint16(answer) == id && q.answeredBy(answer)
	})
	if err != nil {
		return s.unanswered(ctx, q, server, buf, err)
	}
	if len(answer) > limit {
		return q.truncated(buf), nil
	}
	copy(answer, q.msg[:2])
	flags := flagsOf(answer)&^flagAA | flagRA
	if !q.do && flagsOf(q.msg)&flagAD == 0 {
		flags &^= flagAD // RFC 6840, section 5.8
	}
	binary.BigEndian.PutUint16(answer[2:], flags)
	return answer, nil
}

// unanswered says that a resolver did not answer, unless nobody waits any more.
func (s *Server) unanswered(ctx context.Context, q *query, server netip.AddrPort, buf []byte, err error) ([]byte, error) {
	ede := edeNetworkError
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, context.DeadlineExceeded):
		ede = edeNotReachable
	case cause != nil:
		return nil, fmt.Errorf("dnsproxy: question to %s: %w", server, cause)
	}
	s.cfg.Log.Debug("resolver does not answer", "server", server.String(), "error", err.Error())
	return q.fail(buf, dns.RcodeServerFailure, ede), nil
}

// sized is buf with a length of n. Over TCP a shorter one does: the Upstream finds room for what does not fit.
func sized(buf []byte, q *query, n int) []byte {
	if q.tcp {
		n = min(n, max(cap(buf), minUDP))
	}
	return slices.Grow(buf[:0], n)[:n]
}

// answeredBy reports whether a message is an answer to this very question. The name is compared regardless of case; whoever wants
// it exact, as it was sent, sees it in the answer. An error may come without the question.
func (q *query) answeredBy(answer []byte) bool {
	flags := flagsOf(answer)
	if flags&flagQR == 0 || flags&maskOpcode != 0 {
		return false
	}
	if count(answer, 0) == 0 {
		return flags&maskRcode != dns.RcodeSuccess && flags&maskRcode != dns.RcodeNameError && len(answer) == headerLen
	}
	if count(answer, 0) != 1 || len(answer) < headerLen+len(q.question) {
		return false
	}
	name, rest := len(q.question)-4, answer[headerLen:]
	return equalFoldASCII(rest[:name], q.question[:name]) && bytes.Equal(rest[name:name+4], q.question[name:])
}

func equalFoldASCII(a, b []byte) bool {
	lower := func(c byte) byte {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		return c
	}
	return slices.EqualFunc(a, b, func(x, y byte) bool { return lower(x) == lower(y) })
}

// relay passes a message and its answer on untouched: updates, notifications, and whatever is signed, where every changed bit
// breaks the signature.
func (s *Server) relay(ctx context.Context, q *query, server netip.AddrPort, buf []byte) ([]byte, error) {
	msg := q.msg
	answer, err := s.cfg.Upstream.Exchange(ctx, server, q.tcp, msg, slices.Grow(buf[:0], maxTCP)[:maxTCP], func(answer []byte) bool {
		return len(answer) >= headerLen && bytes.Equal(answer[:2], msg[:2]) && flagsOf(answer)&flagQR != 0 && opcodeOf(answer) == opcodeOf(msg)
	})
	if err != nil {
		return s.unanswered(ctx, q, server, buf, err)
	}
	return answer, nil
}
