package proxy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"ztun.dev/ztun/internal/hbone"
)

// ErrorText is what the access log says of an error: for what ztunnel has a text for, that text, so that filters made for it go on to
// work. The addresses are in other fields of the line.
func ErrorText(err error) string {
	if _, beyond := errors.AsType[*hbone.InnerError](err); beyond {
		return err.Error()
	}
	if open, ok := errors.AsType[*hbone.OpenError](err); ok {
		status, refused := errors.AsType[*hbone.StatusError](open)
		switch {
		case refused:
			return status.Error()
		case open.Unanswered():
			return fmt.Sprintf("connection timed out, maybe a NetworkPolicy is blocking HBONE port %d: %s", hbone.Port, systemText(open.Err))
		case open.Phase == hbone.PhaseConnect:
			return "io error: " + systemText(open.Err)
		}
		if certificate, ok := errors.AsType[*hbone.CertificateError](open); ok {
			return certificate.Error()
		}
		switch {
		case open.Phase == hbone.PhaseResponse:
			return "h2 failed: " + systemText(open.Err)
		case open.Phase == hbone.PhaseHTTP2, errors.Is(open, context.DeadlineExceeded):
			return "http2 handshake failed: " + systemText(open.Err)
		}
		return err.Error()
	}
	if broken, ok := errors.AsType[*brokenError](err); ok {
		return broken.what + ": " + systemText(broken.err)
	}
	if failed, ok := errors.AsType[*connectError](err); ok {
		return "connection failed: " + systemText(failed.err)
	}
	if text := systemText(err); text != err.Error() {
		return "io error: " + text
	}
	return err.Error()
}

// systemText is an error of a system call, or the end of its time, as Rust has it; of another error its own text.
func systemText(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok && errno.Error() != "" {
		s := errno.Error() // the C library's, but for the first letter
		return fmt.Sprintf("%s%s (os error %d)", strings.ToUpper(s[:1]), s[1:], int(errno))
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "deadline has elapsed"
	}
	return err.Error()
}

// A connectError tells that the application of the pod could not be connected.
type connectError struct{ err error }

func (e *connectError) Error() string { return "connection failed: " + e.err.Error() }
func (e *connectError) Unwrap() error { return e.err }
