package proxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"time"

	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/stack"
)

const (
	maxDNSMessage = 65535            // RFC 1035, section 4.2.2: the length prefix has 16 bits
	dnsIdle       = 10 * time.Second // a TCP connection without a question; RFC 7766, section 6.2.3, wants seconds
)

// takeQuestion takes a place for a question, which costs a socket while it is forwarded; false if there is none.
func (p *Proxy) takeQuestion() bool {
	if p.questions.Add(1) <= int64(p.cfg.MaxQuestions) && (p.cfg.Questions == nil || p.cfg.Questions.Acquire()) {
		return true
	}
	p.questions.Add(-1)
	p.questionsRefused.Add(1)
	return false
}

func (p *Proxy) releaseQuestion() {
	p.questions.Add(-1)
	if p.cfg.Questions != nil {
		p.cfg.Questions.Release()
	}
}

// QuestionsRefused counts questions, and connections for them, that a limit refused.
func (p *Proxy) QuestionsRefused() uint64 { return p.questionsRefused.Load() }

// ServeUDP implements stack.Handler: questions are answered; nothing else is captured.
func (p *Proxy) ServeUDP(ctx context.Context, conn stack.UDPConn) {
	f := conn.Flow()
	if !IsQuestion(f.Dst) {
		return
	}
	if !p.takeQuestion() {
		return // a lost question is asked again
	}
	msg := bytes.Clone(conn.Payload())
	p.cfg.Group.Go(ctx, func(ctx context.Context) {
		defer p.releaseQuestion()
		ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.DNSTimeout)
		defer cancel()
		answer, err := p.cfg.DNS.ServeDNS(ctx, p.cfg.Client, f.Src, f.Dst, false, msg, nil)
		if err != nil {
			p.cfg.Log.Debug("question not answered", "flow", f.String(), "error", err.Error())
			return
		}
		if len(answer) == 0 {
			return
		}
		if err := conn.Reply(answer); err != nil {
			p.cfg.Log.Debug("answer not sent", "flow", f.String(), "error", err.Error())
		}
	})
}

// serveDNSStream answers questions over TCP. ztun is the server here, so the SYN is answered at once.
func (p *Proxy) serveDNSStream(ctx context.Context, req stack.TCPRequest) {
	f := req.Flow()
	if !p.takeQuestion() {
		req.Reset()
		return
	}
	defer p.releaseQuestion()
	conn, err := req.Accept(ctx)
	if err != nil {
		return
	}
	ctx, end := context.WithCancelCause(context.WithoutCancel(ctx)) // that of the request ends with its acceptance
	defer end(nil)
	rec := p.cfg.Records.Open(telemetry.Facts{Direction: telemetry.Outbound, Src: f.Src, Dst: f.Dst, OriginalDst: f.Dst}, end)
	view := p.cfg.Group.Blocking(ctx, conn)
	defer view.Close()
	buf := make([]byte, 2, 512)
	for {
		if err = view.SetReadDeadline(p.cfg.Group.Now().Add(dnsIdle)); err != nil {
			break
		}
		if _, err = io.ReadFull(view, buf[:2]); err != nil {
			break
		}
		n := int(binary.BigEndian.Uint16(buf))
		if n > cap(buf) {
			buf = make([]byte, n)
		}
		msg := buf[:n]
		if _, err = io.ReadFull(view, msg); err != nil {
			break
		}
		rec.Received.Add(uint64(2 + n))
		answer, aerr := p.question(ctx, f, msg)
		if aerr != nil || len(answer) == 0 || len(answer) > maxDNSMessage {
			break
		}
		out := append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(answer)), uint16(len(answer))), answer...)
		if _, err = view.Write(out); err != nil {
			break
		}
		rec.Sent.Add(uint64(len(out)))
	}
	rec.Finish(nil) // the end of the connection is the client's business
}

func (p *Proxy) question(ctx context.Context, f stack.Flow, msg []byte) ([]byte, error) {
	ctx, cancel := p.cfg.Group.WithTimeout(ctx, p.cfg.DNSTimeout)
	defer cancel()
	return p.cfg.DNS.ServeDNS(ctx, p.cfg.Client, f.Src, f.Dst, true, msg, nil)
}
