package proxy

import (
	"context"
	"errors"
	"syscall"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/stack"
)

// answer tells the application of a flow that could not be connected what it would have seen without a mesh: unreachable
// networks and hosts as such, a time limit by no answer, so that its next SYN is another attempt; all else as refused.
func answer(req stack.TCPRequest, err error) {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		req.Drop()
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EHOSTDOWN):
		req.Unreachable(stack.HostUnreachable)
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.ENETDOWN):
		req.Unreachable(stack.NetworkUnreachable)
	default:
		req.Reset()
	}
}

// tryAnother reports whether another endpoint may do better. A peer that refused by policy decided about us, not about itself.
func tryAnother(err error) bool {
	var status *hbone.StatusError
	return !errors.As(err, &status) || status.Code != 401 && status.Code != 403
}
